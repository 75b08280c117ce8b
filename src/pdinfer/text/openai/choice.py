"""One answer as far as it has come: its text, and what of that is reasoning, content, or calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pdinfer.text.dialects import CallDelta, Delta, Dialect
from pdinfer.text.openai.logprobs import TokenNames
from pdinfer.text.openai.tools import ForcedCall, Tools
from pdinfer.text.stream import TextStream
from pdinfer.text.tokenizer import Tokenizer
from pdinfer.types import FinishReason, Request, TokenEvent

Part = dict[str, Any]
PROMPT_END = 64
"""The number of last tokens of a prompt that show whether the answer begins inside a reasoning."""


class Choice(ABC):
    """One of the answers to a call. A stream takes the `chunk` of each event; otherwise `add` takes them, and `whole`
    returns the answer. `names` makes log-probabilities, if the client wants them."""

    def __init__(self, index: int, names: TokenNames | None, speech: Speech) -> None:
        self.index = index
        self.names = names
        self.last: TokenEvent | None = None
        self._speech = speech
        self._events: list[TokenEvent] = []
        self._deltas: list[Delta] = []

    @property
    def has_ended(self) -> bool:
        """True if its last event has come."""
        return self.last is not None and self.last.finish_reason is not None

    def chunk(self, event: TokenEvent) -> Part:
        """Take the next event, and return what it adds."""
        is_first, self.last = self.last is None, event
        added = self._added(list(self._speech.push(event)), is_first=is_first)
        return {"index": self.index, **added, **self._about([event])}

    def add(self, event: TokenEvent) -> None:
        """Take the next event of an answer that is returned whole."""
        self._deltas += self._speech.push(event)
        self.last = event
        self._events.append(event)

    def whole(self) -> Part:
        """Return the answer."""
        return {"index": self.index, **self._answer(self._deltas), **self._about(self._events)}

    @abstractmethod
    def _added(self, deltas: Sequence[Delta], *, is_first: bool) -> Part: ...

    @abstractmethod
    def _answer(self, deltas: Sequence[Delta]) -> Part: ...

    @abstractmethod
    def _logprobs(self, names: TokenNames, events: list[TokenEvent]) -> Part: ...

    def _about(self, events: list[TokenEvent]) -> Part:
        logprobs = None if self.names is None else self._logprobs(self.names, events)
        return {"logprobs": logprobs, "finish_reason": self._reason(events[-1].finish_reason)}

    def _reason(self, reason: FinishReason | None) -> str | None:
        return None if reason is None else reason.value


class Completion(Choice):
    """An answer to a prompt: a text. `echoed` is the prompt's, where the client wants it before the answer."""

    def __init__(self, index: int, names: TokenNames | None, speech: Speech, echoed: str) -> None:
        super().__init__(index, names, speech)
        self._echoed = echoed

    def _added(self, deltas: Sequence[Delta], *, is_first: bool) -> Part:
        return {"text": (self._echoed if is_first else "") + _content(deltas)}

    def _answer(self, deltas: Sequence[Delta]) -> Part:
        return self._added(deltas, is_first=True)

    def _logprobs(self, names: TokenNames, events: list[TokenEvent]) -> Part:
        return names.for_completion(events)


class Turn(Choice):
    """The assistant's turn in a chat."""

    _has_calls = False
    _is_content = True
    """The kind of the last delta."""

    def _added(self, deltas: Sequence[Delta], *, is_first: bool) -> Part:
        content, calls = _content(deltas), self._calls(deltas)
        self._is_content = bool(deltas[-1].content) if deltas else self._is_content
        message: Part = {**({"content": content} if content else {}), **_reasoned(deltas)}
        if calls:
            message["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
        if not message and self._is_content:
            # elsewhere a content, though empty, would end a reasoning or a call for some clients
            message["content"] = ""
        return {"delta": {**({"role": "assistant"} if is_first else {}), **message}}

    def _answer(self, deltas: Sequence[Delta]) -> Part:
        content, calls = _content(deltas), self._calls(deltas)
        message = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            **_reasoned(deltas),
            **({"tool_calls": list(calls.values())} if calls else {}),
        }
        return {"message": message}

    def _logprobs(self, names: TokenNames, events: list[TokenEvent]) -> Part:
        return names.for_chat(events)

    def _calls(self, deltas: Sequence[Delta]) -> dict[int, Part]:
        """Return the calls, or what is added to them, by their index."""
        found: dict[int, list[CallDelta]] = {}
        for delta in deltas:
            if delta.call is not None:
                found.setdefault(delta.call.index, []).append(delta.call)
        self._has_calls |= bool(found)
        return {index: _call(found[index]) for index in sorted(found)}

    def _reason(self, reason: FinishReason | None) -> str | None:
        """Return why it ended: a turn that calls tools, and was not cut off, ended for them."""
        return "tool_calls" if self._has_calls and reason is FinishReason.STOP else super()._reason(reason)


class Speech:
    """The text of an answer as it comes, read by the markup of the checkpoint's `dialect`, if it has any."""

    def __init__(self, tokenizer: Tokenizer, request: Request, dialect: Dialect | None, tools: Tools) -> None:
        shown = () if dialect is None else dialect.markers
        ids = {tokenizer.special_texts[text] for text in shown if text in tokenizer.special_texts}
        self._text = TextStream(tokenizer, request, shown=ids)
        prompt_end = tokenizer.joined(request.prompt[-PROMPT_END:])
        offered = tools.shown if tools.are_parsed else None
        self._parser = None if dialect is None else dialect.parser(prompt_end, offered)
        self._forced = ForcedCall(tools.named) if tools.schema is not None else None
        self._at_most_one = tools.at_most_one

    def push(self, event: TokenEvent) -> Iterator[Delta]:
        """Take the next event, and yield what it adds."""
        text, is_last = self._text.push(event), event.finish_reason is not None
        if self._parser is None:
            deltas: list[Delta] = [Delta(content=text)] if text else []
        else:
            deltas = [*self._parser.push(text), *(self._parser.end() if is_last else ())]
        for delta in self._called(deltas, is_last=is_last):
            if not (self._at_most_one and delta.call is not None and delta.call.index):
                yield delta

    def _called(self, deltas: Iterable[Delta], *, is_last: bool) -> Iterator[Delta]:
        """Make the content the call that it is, where a call was forced."""
        if self._forced is None:
            yield from deltas
            return
        for delta in deltas:
            yield from self._forced.push(delta.content) if delta.content else (delta,)
        if is_last:
            yield from self._forced.end()


def _content(deltas: Sequence[Delta]) -> str:
    return "".join(delta.content for delta in deltas)


def _reasoned(deltas: Sequence[Delta]) -> Part:
    reasoning = "".join(delta.reasoning for delta in deltas)
    return {"reasoning_content": reasoning} if reasoning else {}


def _call(deltas: Sequence[CallDelta]) -> Part:
    first = deltas[0]
    head: Part = {} if first.call_id is None else {"id": first.call_id, "type": "function"}
    function: Part = {} if first.name is None else {"name": first.name}
    return {**head, "function": {**function, "arguments": "".join(delta.arguments for delta in deltas)}}
