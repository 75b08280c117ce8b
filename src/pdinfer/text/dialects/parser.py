"""One answer, as its text comes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import msgspec

from pdinfer.text.dialects.grammar import WHITE, Calls, Family, Place, Steps

MAX_NAME = 256
"""The most characters before the arguments of a call. Longer text is not a call."""
MAX_WHITE = 64
"""The most white space that is held back until it is known whether a marker follows."""

_UNDECIDED = frozenset({Place.OPENING, Place.NAME})
"""Their text is read again, as another place's, when it turns out to be something else."""
_INSIDE = frozenset({Place.NAME, Place.JSON, Place.PARAMETERS, Place.KEY, Place.VALUE})
_TEXT = frozenset({"string"})
"""The types of an argument that is always text."""


def new_call_id() -> str:
    """Return the id of a call to which the model gave none."""
    return f"call_{os.urandom(12).hex()}"


@attrs.frozen
class CallDelta:
    """An addition to the call with this index, counted from 0. The first delta of a call has its id and name. Its
    `arguments` joined are one JSON text."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@attrs.frozen
class Delta:
    """An addition to an answer: one of the three."""

    reasoning: str = ""
    content: str = ""
    call: CallDelta | None = None


class Parser:
    """Reads one answer. Made by `Dialect.parser`.

    Of any text:

    - The deltas joined do not depend on where the text was cut. Held back is what may be the beginning of a marker, a
      call up to its arguments, an argument that may be no string, and, where the family drops white space before a
      marker, at most 64 characters of that. A character costs the same however long the answer is.
    - Nothing raises. Markers disappear where they mean something, and are text anywhere else: so are those of calls
      among thoughts, and `<think>` after the first word.
    - Nothing else is lost. What begins like a call and has no name, or none within 256 characters, is content. What
      stands where a call has no place for it is content, too.
    - The arguments of a whole call are valid JSON, if the markup has them one by one. Where the model writes JSON they
      are what it wrote, or {} for nothing. Those of a call that the answer ends in are what came.
    """

    def __init__(
        self, family: Family, steps: Steps, begin: Place, tools: Iterable[object], new_id: Callable[[], str]
    ) -> None:
        self._calls = family.calls or Calls({}, "")
        self._steps = steps
        self._properties = _properties_of(tools)
        self._new_id = new_id
        self._white = {
            Place.REASONING: (family.white, family.white),
            Place.CONTENT: (family.white, family.white_behind),
            **dict.fromkeys((Place.CALLS, Place.PARAMETERS, Place.JSON), (WHITE, WHITE)),
        }
        self._out: list[Delta] = []
        self._held = self._blank = ""
        self._state = 0
        self._enter(begin)
        self._call, self._function, self._has_arguments = -1, "", False
        self._parts: list[str] = []
        self._types: frozenset[str] = frozenset()

    def push(self, text: str) -> list[Delta]:
        """Take more text of the answer, cut anywhere, and return the deltas that it completes."""
        self._read(text)
        deltas, self._out = self._out, []
        return deltas

    def end(self) -> list[Delta]:
        """Return what was held back, once the answer is over."""
        while self._place in _UNDECIDED:
            text, self._held = self._held, ""
            self._give_up()
            self._read(text)
        self._take(self._held)
        text = "".join(self._parts)
        if self._place is Place.KEY and text:
            # without its end, as the answer ended inside: joined pieces stay what came
            self._argue(self._separator() + _quoted(text)[:-1])
        elif self._place is Place.VALUE:
            self._argue(text)
        return self._out

    def _read(self, text: str) -> None:
        """Pass over text, from marker to marker."""
        text, at, done = self._held + text, len(self._held), 0
        while at < len(text):
            automaton = self._steps[self._place][0]
            self._state = automaton.next(self._state, text[at])
            at += 1
            num_held = automaton.held[self._state]
            if length := automaton.found[self._state]:
                is_whole = self._pass(text[done : at - length], text[at - length : at])
            elif self._place is Place.NAME:
                is_whole = at - done <= MAX_NAME
            elif self._place is Place.OPENING:
                is_whole = at - num_held - done <= MAX_WHITE and not text[done : at - num_held].strip(WHITE)
            else:
                continue
            if not is_whole:
                # read again, as text of the place that it belongs to after all
                self._give_up()
                at = done
            elif length:
                done = at
        num_held = self._steps[self._place][0].held[self._state]
        shown = done if self._place in _UNDECIDED else len(text) - num_held
        self._take(text[done:shown])
        self._held = text[shown:]

    def _pass(self, before: str, marker: str) -> bool:
        """Go on after a marker, or return False if the text before it has no name of a call."""
        place, then = self._place, self._steps[self._place][1][marker]
        if place is Place.NAME:
            named = re.fullmatch(self._calls.name, before)
            if named is None or then is Place.NAME:
                return False
            self._begin_call(named["name"], named.groupdict().get("id"))
        elif place is not Place.OPENING:
            self._take(before)
        if place is Place.KEY:
            self._begin_value()
        elif place is Place.VALUE:
            self._end_value()
        if place in _INSIDE and then not in _INSIDE:
            self._end_call()
        if then is Place.NAME:
            self._before_call = place, self._blank + marker
        self._enter(then)
        if then is Place.CONTENT and place is not Place.REASONING:
            self._white_before = WHITE
        return True

    def _enter(self, place: Place) -> None:
        self._place, self._state, self._blank = place, 0, ""
        self._white_before, self._white_behind = self._white.get(place, ("", ""))

    def _give_up(self) -> None:
        """Return to where a call or a thought seemed to begin."""
        if self._place is Place.OPENING:
            self._enter(Place.CONTENT)
            return
        place, begin = self._before_call
        self._out.append(Delta(content=begin))
        self._enter(place)
        self._white_before = ""

    def _take(self, text: str) -> None:
        """Take text of the place."""
        if self._white_before and text:
            text = text.lstrip(self._white_before)
            self._white_before = "" if text else self._white_before
        if self._white_behind:
            text = self._blank + text
            # white space at the end waits: it is dropped if a marker follows
            shown = max(len(text.rstrip(self._white_behind)), len(text) - MAX_WHITE)
            text, self._blank = text[:shown], text[shown:]
        if not text:
            return
        if self._place is Place.REASONING:
            self._out.append(Delta(reasoning=text))
        elif self._place is Place.JSON:
            self._argue(text)
        elif self._place is Place.VALUE and self._types == _TEXT:
            self._argue(_quoted(text)[1:-1])
        elif self._place in (Place.KEY, Place.VALUE):
            self._parts.append(text)
        else:
            self._out.append(Delta(content=text))

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._has_arguments = True
            self._out.append(Delta(call=CallDelta(self._call, arguments)))

    def _separator(self) -> str:
        return ", " if self._has_arguments else "{"

    def _begin_call(self, name: str, call_id: str | None) -> None:
        self._call, self._function, self._has_arguments = self._call + 1, name, False
        self._out.append(Delta(call=CallDelta(self._call, "", call_id or self._new_id(), name)))

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._argue("{}")
        elif self._place is not Place.JSON:
            self._argue("}")

    def _begin_value(self) -> None:
        """Begin the value of the key that was read."""
        text = "".join(self._parts)
        self._parts.clear()
        found = re.fullmatch(self._calls.key, text, re.DOTALL)
        key = (found["key"] if found else text).strip()
        is_text = found.groupdict().get("is_text") if found else None
        types = _types_of(self._properties.get(self._function, {}).get(key)) if is_text is None else frozenset()
        self._types = _TEXT if is_text == "true" else types
        self._argue(f"{self._separator()}{_quoted(key)}: " + ('"' if self._types == _TEXT else ""))

    def _end_value(self) -> None:
        self._argue('"' if self._types == _TEXT else _as_json("".join(self._parts), self._types))
        self._parts.clear()


def _properties_of(tools: Iterable[object]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the parameters of each function that OpenAI's list of tools describes."""
    found = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": Mapping() as properties}}}:
                found[name] = properties
    return found


def _types_of(schema: object) -> frozenset[str]:
    """Return the types that a schema allows, or none where it says none or says them in a more complicated way. It
    comes from a client, and may be anything."""
    match schema:
        case {"type": str(kind)}:
            return frozenset({kind})
        case {"type": [*kinds]}:
            return frozenset(kind for kind in kinds if isinstance(kind, str))
        case {"anyOf": [{"type": str(one)}, {"type": str(other)}]}:
            return frozenset({one, other})
    return frozenset()


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return a value of these types as JSON: the text itself where it is JSON, and else a JSON string."""
    stripped = text.strip()
    if stripped == "null" or types != _TEXT | {"null"}:
        try:
            msgspec.json.decode(stripped)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return stripped
    return _quoted(text)


def _quoted(text: str) -> str:
    """Return the JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)
