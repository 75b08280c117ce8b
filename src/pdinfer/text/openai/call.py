"""A call of a client: from its body to requests, and from their events to answers."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from pdinfer.checks import MAX_TOKENS, clip
from pdinfer.errors import PDInferError, RequestError, TransferError
from pdinfer.text.dialects import dialect_of
from pdinfer.text.openai.body import MAX_CHOICES, Body, ChatBody, CompletionBody, read
from pdinfer.text.openai.choice import Choice, Completion, Speech, Turn
from pdinfer.text.openai.logprobs import TokenNames
from pdinfer.text.openai.options import most_tokens, sampling_of
from pdinfer.text.openai.prompts import TooLong, prompts_of
from pdinfer.text.openai.tools import Tools
from pdinfer.text.stream import StopStrings
from pdinfer.text.tokenizer import Tokenizer
from pdinfer.types import COMPLETE, Request, SamplingParams, TokenEvent

__all__ = ["Call", "error_answer", "max_bytes"]

BYTES_PER_TOKEN = 32
"""A body whose tokens have more bytes than that on average is nothing that a model could use."""
SPARE_BYTES = 64 << 10
_KINDS = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error", 503: "server_error"}


class UnknownModel(RequestError):
    """A model that is not served here. Routers of several hosts ask another one then."""


_TOLD: dict[type[PDInferError], tuple[int, str]] = {
    UnknownModel: (404, "model_not_found"),
    TooLong: (400, "context_length_exceeded"),
}
"""Statuses and codes by which clients know what they can do about an error."""


class Call:
    """One call of a client. `requests` are to be served, `streams` says whether the client wants chunks, and `push`
    takes the events. Make one with `Call.parse` or `Call.parse_async`."""

    def __init__(self, requests: Sequence[Request], choices: Sequence[Choice], body: Body, model: str) -> None:
        self.requests = tuple(requests)
        self.streams = bool(body.stream)
        self._is_chat = isinstance(body, ChatBody)
        self._num_each = body.n or 1
        self._reports_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        kind = "chat.completion" if self._is_chat else "text_completion"
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{os.urandom(12).hex()}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        ids = (str(request.request_id) for request in requests)
        self._choices = dict(zip(ids, choices, strict=True))

    def __repr__(self) -> str:
        model, streams = clip(self._head["model"]), ", streams" if self.streams else ""
        return f"Call({self._head['object']} of {model}, {len(self.requests)} requests{streams})"

    @classmethod
    def parse(
        cls,
        data: bytes | str,
        tokenizer: Tokenizer,
        *,
        is_chat: bool,
        model: str,
        has_schemas: bool = True,
        limit: int | None = None,
        tenant: bytes = b"",
    ) -> Call:
        """Read a body. `model` is what the model is called here. `has_schemas` says whether the engines know
        `json_schema` as a logits processor of that name. `limit` is how many tokens a prompt and its answer may have,
        see `Pairing.max_tokens`; None for what the checkpoint's config.json says. A chat that does not say how long its
        answer may be gets what the prompt leaves of it; a completion gets the 128 of SamplingParams.

        Pages of prompts are shared between calls of one `tenant` alone, whatever `cache_salt` their bodies say.

        A body has at most `max_bytes(limit)`, which is checked before it is read. A long text takes seconds all the
        same: from an event loop, use `parse_async`.

        Raises RequestError for what cannot be read, for what is not known, and for what cannot be served.
        """
        limit = limit or tokenizer.max_tokens or MAX_TOKENS
        body = _read(data, limit, is_chat=is_chat, model=model)
        tools = Tools.of(body) if isinstance(body, ChatBody) else Tools()
        sampling = sampling_of(body, tokenizer, tools.schema, has_schemas=has_schemas)
        stop = StopStrings(tokenizer, [body.stop] if isinstance(body.stop, str) else body.stop or [])
        names = None if sampling.logprobs is None else TokenNames(tokenizer)
        requests: list[Request] = []
        choices: list[Choice] = []
        is_open = isinstance(body, ChatBody) and most_tokens(body) is None
        num_new = 1 if is_open else sampling.max_new_tokens
        for prompt in prompts_of(body, tokenizer, tools, limit=limit, num_new=num_new):
            drawn, expected = sampling, None
            if is_open:
                drawn = attrs.evolve(sampling, max_new_tokens=limit - len(prompt.tokens))
                expected = SamplingParams().max_new_tokens
            for number in range(body.n or 1):
                seed = None if drawn.seed is None else (drawn.seed + number) % 2**64  # OpenAI's may be negative
                request = Request(
                    request_id=os.urandom(8).hex(),
                    prompt=prompt.tokens,
                    sampling=attrs.evolve(drawn, seed=seed),
                    stop=stop if stop.strings else (),
                    cache_salt=_salt(tenant, body.cache_salt),
                    expected_new_tokens=expected,
                )
                requests.append(request)
                if isinstance(body, ChatBody):
                    speech = Speech(tokenizer, request, dialect_of(tokenizer), tools)
                    choices.append(Turn(len(choices), names, speech))
                else:
                    speech = Speech(tokenizer, request, None, tools)
                    choices.append(Completion(len(choices), names, speech, prompt.echoed))
        return cls(requests, choices, body, model)

    @classmethod
    async def parse_async(cls, data: bytes | str, tokenizer: Tokenizer, **options: Any) -> Call:
        """Do what `parse` does in a thread, so that the event loop goes on meanwhile."""
        return await asyncio.to_thread(cls.parse, data, tokenizer, **options)

    def push(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """Take the next event, and yield what to send to the client: for a stream the chunks of this event, else the
        whole answer after the last event. Raises the event's error, or TransferError when the request was cancelled or
        late; nothing more is to be sent then."""
        reason = event.finish_reason
        if reason is not None and reason not in COMPLETE:
            raise event.error or TransferError(f"the request ended early: {reason.value}")
        choice = self._choices[event.request_id]
        if self.streams:
            yield self._chunk([choice.chunk(event)])
            if self._reports_usage and self._has_ended:
                yield {**self._chunk([]), "usage": self._usage()}
            return
        choice.add(event)
        if self._has_ended:
            choices = [choice.whole() for choice in self._choices.values()]
            yield {**self._head, "choices": choices, "usage": self._usage()}

    @property
    def _has_ended(self) -> bool:
        return all(choice.has_ended for choice in self._choices.values())

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._reports_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _usage(self) -> dict[str, Any]:
        """Return what all requests used. Answers to one prompt count it once. "pdinfer" has what each waited for."""
        used = [choice.last.usage for choice in self._choices.values() if choice.last is not None]
        prompts = [usage for usage in used[:: self._num_each] if usage]
        asked, made = sum(usage.prompt_tokens for usage in prompts), sum(usage.output_tokens for usage in used if usage)
        return {
            "prompt_tokens": asked,
            "completion_tokens": made,
            "total_tokens": asked + made,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
            "pdinfer": [attrs.asdict(attrs.evolve(usage, choice=None)) for usage in used if usage],
        }


def _read(data: bytes | str, limit: int, *, is_chat: bool, model: str) -> CompletionBody | ChatBody:
    """Return the body, which is not too long, of a call of this model."""
    if len(data) > max_bytes(limit):
        raise TooLong(
            f"the body of the call has {len(data)} bytes; at most {max_bytes(limit)} are read, as prompt and answer "
            f"have {limit} tokens: shorten it"
        )
    body = read(data, is_chat=is_chat)
    if body.model not in (None, "", model):
        raise UnknownModel(f"model {clip(body.model)} is not served here, only {model!r}")
    if body.n is not None and not 1 <= body.n <= MAX_CHOICES:
        raise RequestError(f"n must be from 1 to {MAX_CHOICES}, got {body.n}")
    return body


def _salt(tenant: bytes, given: str | None) -> bytes:
    """Return the salt of a call, however long what it is made of. No other tenant can say the same."""
    salt = (given or "").encode()
    return hashlib.sha256(len(tenant).to_bytes(8) + tenant + salt).digest() if tenant or salt else b""


def max_bytes(limit: int) -> int:
    """Return how many bytes a body may have where prompt and answer have at most `limit` tokens: 32 for each of them,
    plus 64 KiB."""
    return SPARE_BYTES + BYTES_PER_TOKEN * limit


def error_answer(error: PDInferError) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return the status, the headers and the body that report an error to a client: 400 for what it may not ask, 404
    for a model that is not here, 429 when it should ask later, 503 for what it cannot help."""
    status = {"REQUEST": 400, "CONFIG": 400, "OVERLOADED": 429}.get(error.code, 503)
    status, code = _TOLD.get(type(error), (status, error.code.lower()))
    wait_s = getattr(error, "retry_after_s", None) or 1.0
    body = {"message": str(error), "type": _KINDS[status], "param": None, "code": code}
    return status, {"Retry-After": str(math.ceil(wait_s))} if status > 404 else {}, {"error": body}
