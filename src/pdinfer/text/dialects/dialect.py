"""The dialect of a checkpoint, found by its added tokens and its chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from pdinfer.text.dialects.families import FAMILIES
from pdinfer.text.dialects.grammar import END_OF_THOUGHT, THINK, Family, Place, Steps
from pdinfer.text.dialects.parser import Parser, new_call_id

if TYPE_CHECKING:
    from pdinfer.text.chat import ChatTemplate
    from pdinfer.text.tokenizer import Tokenizer


NOT_SHOWN = (
    "the chat template of the checkpoint does not show tools to the model: put one that reads `tools` into the "
    "folder, as chat_template.jinja"
)


@attrs.frozen(eq=False)
class Dialect:
    """The form in which a checkpoint writes reasoning and calls of tools. Any number of parsers may share one. Made by
    `dialect_of`.

    `markers` are the texts of added tokens that a parser has to see, some of which may be special, and have no text
    otherwise. `thinks` says whether an answer may begin with `<think>`. `why_not` says why a client may not bring
    tools, and is empty where it may. `shows_tools` says whether the chat template shows them to the model.
    """

    name: str
    markers: frozenset[str]
    thinks: bool
    why_not: str
    shows_tools: bool
    _family: Family = attrs.field(repr=False)
    _steps: Mapping[bool, Steps] = attrs.field(repr=False)

    @property
    def reads_calls(self) -> bool:
        """True if a client may bring tools: calls can be read, and the prompt can show tools."""
        return not self.why_not

    def tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return what the system's turn has to say of OpenAI's `tools`; None where the chat template shows them, or the
        maker says nothing of it."""
        text = self._family.tools_text
        return None if self.shows_tools or text is None else text.of(tools)

    def parser(
        self, prompt_text: str, tools: Sequence[Mapping[str, Any]] | None, *, new_id: Callable[[], str] = new_call_id
    ) -> Parser:
        """Return a parser of one answer.

        `prompt_text` is the end of the rendered prompt with its markers, which shows whether the answer begins inside
        an open `<think>`. `tools` is OpenAI's list, whose schemas say which arguments are text where the markup does
        not; with None no calls are read, and their markup is content. `new_id` makes the ids of calls, where the model
        makes none.
        """
        begin = max(prompt_text.rfind(turn) + len(turn) if turn in prompt_text else 0 for turn in self._family.turns)
        opened, closed = (prompt_text.rfind(marker, begin) for marker in (THINK, END_OF_THOUGHT))
        place = Place.OPENING if self.thinks and opened == closed else Place.CONTENT
        place = Place.REASONING if opened > closed else place
        return Parser(self._family, self._steps[tools is not None], place, tools or (), new_id)


@functools.lru_cache(maxsize=8)
def dialect_of(tokenizer: Tokenizer) -> Dialect | None:
    """Return the dialect of a checkpoint, or None where its markers are those of no family that is known here."""
    added = {token.content for token in tokenizer.library.get_added_tokens_decoder().values()}
    templates = [template.source for template in tokenizer.templates.values()]

    def is_written(text: str) -> bool:
        return any(text in template for template in templates)

    def is_known(text: str) -> bool:
        return text in added or is_written(text)

    for family in FAMILIES:
        if all(map(is_known, family.tokens)) and all(map(is_written, family.written)):
            steps = {reads_calls: family.steps(reads_calls=reads_calls) for reads_calls in (False, True)}
            words = {marker for _, markers in steps[True].values() for marker in markers}
            words |= {family.calls.name, family.calls.key} if family.calls else set()
            markers = frozenset(token for token in added if any(token in word for word in words))
            template = tokenizer.templates.get("tool_use") or tokenizer.chat_template
            has_tools = template is None or shows_tools(template)
            why_not = family.why_not or ("" if has_tools or family.tools_text else NOT_SHOWN)
            return Dialect(family.name, markers, is_known(THINK), why_not, has_tools, family, steps)
    return None


def shows_tools(template: ChatTemplate) -> bool:
    """Return whether a template reads `tools`, in more than a comment."""
    return bool(re.search(r"\btools\b", re.sub(r"\{#.*?#\}", "", template.source, flags=re.DOTALL)))
