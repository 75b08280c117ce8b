"""The form in which families.py says how models write."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pdinfer.stop import Automaton

THINK, END_OF_THOUGHT = "<think>", "</think>"
WHITE = " \t\r\n"


class Place(enum.Enum):
    """The part of an answer that a character is in. What follows CALLS is inside a call."""

    OPENING = "before all but white space, where <think> may come"
    REASONING = "the thoughts"
    CONTENT = "the answer"
    CALLS = "between the calls of a section"
    NAME = "before the arguments of a call"
    JSON = "arguments that are written as JSON"
    PARAMETERS = "between arguments that are written one by one"
    KEY = "what an argument is called"
    VALUE = "what it is"


Ends = Mapping[Place, Mapping[str, Place]]
"""The markers that end each place, and the place after them. Of two that end together the longer counts. What leads to
NAME begins a call."""
Steps = Mapping[Place, tuple[Automaton[str], Mapping[str, Place]]]
"""The same, with what finds the markers."""


@attrs.frozen
class Calls:
    """The form of calls. `name` is a pattern of the whole text in NAME, with the group "name", and "id" where the
    model itself names its calls. `key` is one of the text in KEY, with the group "key", and "is_text" where the markup
    says whether a value is text ("true") or JSON ("false")."""

    ends: Ends
    name: str
    key: str = ""


@attrs.frozen
class ToolsText:
    """The text about tools in the system's turn, where the chat template has none: `head`, `each` with the name, the
    description and the parameters of one, and `tail`."""

    head: str
    each: str
    tail: str

    def of(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text for OpenAI's list of tools."""
        texts = []
        for tool in tools:
            function = tool["function"]
            parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
            texts.append(self.each.format(function["name"], function.get("description") or "", parameters))
        return self.head + "".join(texts) + self.tail


@attrs.frozen
class Family:
    """A dialect, which a checkpoint speaks that knows all `tokens`, as added tokens or in its chat template, and whose
    template has what is `written`.

    The answer begins after the last of `turns` in a prompt. White space in `white` is dropped at both ends of the
    reasoning and before the content, `white_behind` after the content. `why_not` says why `calls` are not known.
    `call_ends_thought` is for models that leave `</think>` out before a call. `tools_text` is the maker's way to show
    tools with a template that does not.
    """

    name: str
    tokens: tuple[str, ...]
    turns: tuple[str, ...]
    written: tuple[str, ...] = ()
    calls: Calls | None = None
    why_not: str = ""
    white: str = ""
    white_behind: str = ""
    call_ends_thought: bool = False
    tools_text: ToolsText | None = None

    def steps(self, *, reads_calls: bool) -> Steps:
        """Return the places of an answer whose calls are read, or are content."""
        ends = dict(self.calls.ends) if self.calls and reads_calls else {Place.CONTENT: {}}
        thought = {END_OF_THOUGHT: Place.CONTENT, **(ends[Place.CONTENT] if self.call_ends_thought else {})}
        ends |= {Place.OPENING: {THINK: Place.REASONING}, Place.REASONING: thought}
        return {place: (Automaton.of(tuple(markers)), markers) for place, markers in ends.items()}
