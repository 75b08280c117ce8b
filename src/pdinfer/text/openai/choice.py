"""One answer as far as it has come: its text, and what of that is reasoning, content, or calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
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

    def __init__(self, index: int, names: TokenNames | None) -> None:
        self.index = index
        self.names = names
        self.last: TokenEvent | None = None
        self._events: list[TokenEvent] = []

    @property
    def has_ended(self) -> bool:
        """True if its last event has come."""
        return self.last is not None and self.last.finish_reason is not None

    def chunk(self, event: TokenEvent) -> Part:
        """Take the next event, and return what it adds."""
        is_first, self.last = self.last is None, event
        return {"index": self.index, **self._added(event, is_first=is_first), **self._about([event])}

    def add(self, event: TokenEvent) -> None:
        """Take the next event of an answer that is returned whole."""
        self._keep(event)
        self.last = event
        self._events.append(event)

    def whole(self) -> Part:
        """Return the answer."""
        return {"index": self.index, **self._answer(), **self._about(self._events)}

    @abstractmethod
    def _added(self, event: TokenEvent, *, is_first: bool) -> Part: ...

    @abstractmethod
    def _keep(self, event: TokenEvent) -> None: ...

    @abstractmethod
    def _answer(self) -> Part: ...

    @abstractmethod
    def _logprobs(self, names: TokenNames, events: list[TokenEvent]) -> Part: ...

    def _about(self, events: list[TokenEvent]) -> Part:
        logprobs = None if self.names is None else self._logprobs(self.names, events)
        return {"logprobs": logprobs, "finish_reason": self._reason(events[-1].finish_reason)}

    def _reason(self, reason: FinishReason | None) -> str | None:
        return None if reason is None else reason.value


class Completion(Choice):
    """An answer to a prompt: a text. `echoed` is the prompt's, where the client wants it before the answer."""

    def __init__(self, index: int, names: TokenNames | None, text: TextStream, echoed: str) -> None:
        super().__init__(index, names)
        self._text = text
        self._shown = [echoed]

    def _added(self, event: TokenEvent, *, is_first: bool) -> Part:
        return {"text": (self._shown[0] if is_first else "") + self._text.push(event)}

    def _keep(self, event: TokenEvent) -> None:
        self._shown.append(self._text.push(event))

    def _answer(self) -> Part:
        return {"text": "".join(self._shown)}

    def _logprobs(self, names: TokenNames, events: list[TokenEvent]) -> Part:
        return names.for_completion(events)


class Turn(Choice):
    """The assistant's turn in a chat."""

    def __init__(self, index: int, names: TokenNames | None, speech: Speech) -> None:
        super().__init__(index, names)
        self._speech = speech
        self._message = Message()
        self._has_calls = False
        self._is_content = True  # the kind of the last delta

    def _added(self, event: TokenEvent, *, is_first: bool) -> Part:
        chunk = self._read(event, Message()).chunk()
        if not chunk and self._is_content:
            # elsewhere a content, though empty, would end a reasoning or a call for some clients
            chunk = {"content": ""}
        return {"delta": {**({"role": "assistant"} if is_first else {}), **chunk}}

    def _keep(self, event: TokenEvent) -> None:
        self._read(event, self._message)

    def _answer(self) -> Part:
        return {"message": {"role": "assistant", **self._message.whole()}}

    def _logprobs(self, names: TokenNames, events: list[TokenEvent]) -> Part:
        return names.for_chat(events)

    def _read(self, event: TokenEvent, message: Message) -> Message:
        for delta in self._speech.push(event):
            message.add(delta)
            self._is_content = bool(delta.content)
        self._has_calls |= bool(message.calls)
        return message

    def _reason(self, reason: FinishReason | None) -> str | None:
        """Return why it ended: a turn that calls tools, and was not cut off, ended for them."""
        return "tool_calls" if self._has_calls and reason is FinishReason.STOP else super()._reason(reason)


class Speech:
    """The text of a turn as it comes, read by the markup of the checkpoint's `dialect`, if it has any."""

    def __init__(self, tokenizer: Tokenizer, request: Request, dialect: Dialect | None, tools: Tools) -> None:
        shown = () if dialect is None else dialect.markers
        ids = {tokenizer.special_texts[text] for text in shown if text in tokenizer.special_texts}
        self._text = TextStream(tokenizer, request, shown=ids)
        prompt_end = tokenizer.library.decode(request.prompt[-PROMPT_END:], skip_special_tokens=False)
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


class Message:
    """The message of a turn, from deltas: those of one event for a chunk, or all."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: dict[int, list[CallDelta]] = {}

    def add(self, delta: Delta) -> None:
        """Take one more delta."""
        if delta.call is not None:
            self.calls.setdefault(delta.call.index, []).append(delta.call)
        self._reasoning.append(delta.reasoning)
        self._content.append(delta.content)

    def whole(self) -> Part:
        """Return the fields of an answer's message, without its role."""
        content = "".join(self._content)
        calls = [_call(deltas) for _, deltas in sorted(self.calls.items())]
        return {
            "content": content if content or not calls else None,
            "refusal": None,
            **self._reasoned(),
            **({"tool_calls": calls} if calls else {}),
        }

    def chunk(self) -> Part:
        """Return the fields of a delta, without its role."""
        content = "".join(self._content)
        calls = [{"index": index, **_call(deltas)} for index, deltas in sorted(self.calls.items())]
        return {
            **({"content": content} if content else {}),
            **self._reasoned(),
            **({"tool_calls": calls} if calls else {}),
        }

    def _reasoned(self) -> Part:
        reasoning = "".join(self._reasoning)
        return {"reasoning_content": reasoning} if reasoning else {}


def _call(deltas: list[CallDelta]) -> Part:
    first = deltas[0]
    head: Part = {} if first.call_id is None else {"id": first.call_id, "type": "function"}
    function: Part = {} if first.name is None else {"name": first.name}
    return {**head, "function": {**function, "arguments": "".join(delta.arguments for delta in deltas)}}
