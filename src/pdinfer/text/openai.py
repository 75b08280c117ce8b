"""OpenAI's completions and chat completions, without HTTP: the body of a call becomes requests, and their events become
answers in the form that OpenAI's clients read. A host brings the server.

    call = pd.text.openai.Call.parse(body, tokenizer, is_chat=True, model="tiny")
    for event in pairing.generate(call.requests):
        for chunk in call.push(event):
            print(chunk)
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from pdinfer.errors import PDInferError, RequestError, TransferError
from pdinfer.text.stream import StopStrings, TextStream
from pdinfer.text.tokenizer import Tokenizer
from pdinfer.types import FinishReason, Request, SamplingParams, TokenEvent

__all__ = ["Call", "error_answer"]

MAX_CHOICES = 64
PROCESSOR = "json_schema"
"""The name that engines must know `text.json_schema` by."""
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "ignore_eos"),
)
_KINDS = {400: "invalid_request_error", 429: "rate_limit_error", 503: "server_error"}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of a body."""

    include_usage: bool | None = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of calls may ask for; top_k, min_p, repetition_penalty and ignore_eos are pdinfer's own.
    `check_request` has the ranges of numbers."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/completions. `logprobs` is how many of the best tokens are told with each token."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


@attrs.define
class _Choice:
    """One answer as far as it has come."""

    text: TextStream
    shown: str = ""
    events: list[TokenEvent] = attrs.Factory(list)


class Call:
    """One call of a client. `requests` are to be served, `streams` says whether the client wants chunks, and `push`
    takes the events. Make one with `Call.parse`."""

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, body: CompletionBody | ChatBody, model: str
    ) -> None:
        self.requests = tuple(requests)
        self.streams = bool(body.stream)
        self._tokenizer = tokenizer
        self._is_chat = isinstance(body, ChatBody)
        self._num_each = body.n or 1
        self._tells_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {"id": f"cmpl-{os.urandom(12).hex()}", "object": kind, "created": int(time.time()), "model": model}
        self._choices = {str(request.request_id): _Choice(TextStream(tokenizer, request)) for request in self.requests}
        self._index = {request_id: index for index, request_id in enumerate(self._choices)}

    @classmethod
    def parse(
        cls, data: bytes | str, tokenizer: Tokenizer, *, is_chat: bool, model: str, has_schemas: bool = True
    ) -> Call:
        """Read a body. `model` is what the model is called here. `has_schemas` says whether the engines know
        `json_schema` as a logits processor of that name.

        Raises RequestError for what cannot be read, for what is not known, and for what cannot be served.
        """
        body = _decoded(data, ChatBody if is_chat else CompletionBody)
        if body.model not in (None, "", model):
            raise RequestError(f"model {body.model!r} is not served here, only {model!r}")
        if body.n is not None and not 1 <= body.n <= MAX_CHOICES:
            raise RequestError(f"n must be from 1 to {MAX_CHOICES}, got {body.n}")
        sampling = SamplingParams(**_options(body, has_schemas))
        stop = StopStrings(tokenizer, [body.stop] if isinstance(body.stop, str) else body.stop or [])
        requests = [
            Request(
                request_id=os.urandom(8).hex(),
                prompt=prompt,
                sampling=sampling if sampling.seed is None else attrs.evolve(sampling, seed=sampling.seed + number),
                stop=stop if stop.strings else (),
            )
            for prompt in _prompts(body, tokenizer)
            for number in range(body.n or 1)
        ]
        if not 1 <= len(requests) <= MAX_CHOICES:
            raise RequestError(f"a call has 1 to {MAX_CHOICES} prompts times n, got {len(requests)}")
        return cls(requests, tokenizer, body, model)

    def push(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """Take the next event, and yield what to send to the client: for a stream the chunks of this event, else the
        whole answer behind the last event. Raises the event's error, or TransferError when the request was cancelled or
        late; nothing more is to be sent then."""
        if event.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            raise event.error or TransferError(f"the request ended early: {event.finish_reason}")
        choice = self._choices[event.request_id]
        text = choice.text.push(event)
        if self.streams:
            yield self._chunk([self._part(event.request_id, text, [event], is_first=not choice.events)])
            choice.events = [event]
            if self._tells_usage and self._has_ended:
                yield {**self._chunk([]), "usage": self._usage()}
            return
        choice.shown += text
        choice.events.append(event)
        if self._has_ended:
            yield self._answer()

    @property
    def _has_ended(self) -> bool:
        return all(choice.events and choice.events[-1].finish_reason for choice in self._choices.values())

    def _answer(self) -> dict[str, Any]:
        choices = []
        for request_id, choice in self._choices.items():
            part = self._part(request_id, choice.shown, choice.events, is_first=True)
            if self._is_chat:
                part["message"] = {**part.pop("delta"), "refusal": None}
            choices.append(part)
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._tells_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _part(self, request_id: str, text: str, events: list[TokenEvent], *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text}
        if is_first:
            delta["role"] = "assistant"
        reason = events[-1].finish_reason
        return {
            "index": self._index[request_id],
            **({"delta": delta} if self._is_chat else {"text": text}),
            "logprobs": self._logprobs(events),
            "finish_reason": reason.value if reason else None,
        }

    def _logprobs(self, events: list[TokenEvent]) -> dict[str, Any] | None:
        if self.requests[0].sampling.logprobs is None:
            return None
        told = [event for event in events if event.token is not None]
        if self._is_chat:
            content = [
                {
                    **self._told(event.token, event.logprob),
                    "top_logprobs": [self._told(*top) for top in event.top_logprobs],
                }
                for event in told
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._name(event.token) for event in told],
            "token_logprobs": [event.logprob for event in told],
            "top_logprobs": [{self._name(token): logprob for token, logprob in event.top_logprobs} for event in told],
        }

    def _told(self, token: int | None, logprob: float | None) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": None if "\ufffd" in name else list(name.encode())}

    def _name(self, token: int | None) -> str:
        """Return the text of a token, or what tokenizer.json calls it where it has no text of its own."""
        assert token is not None
        return self._tokenizer.decode([token]) or self._tokenizer.library.id_to_token(token) or f"<{token}>"

    def _usage(self) -> dict[str, Any]:
        """Return what all requests used. Answers to one prompt count it once. "pdinfer" has what each waited for."""
        used = [choice.events[-1].usage for choice in self._choices.values()]
        prompts = [usage for usage in used[:: self._num_each] if usage]
        asked, made = sum(usage.prompt_tokens for usage in prompts), sum(usage.output_tokens for usage in used if usage)
        return {
            "prompt_tokens": asked,
            "completion_tokens": made,
            "total_tokens": asked + made,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
            "pdinfer": [attrs.asdict(attrs.evolve(usage, choice=None)) for usage in used if usage],
        }


def error_answer(error: PDInferError) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return the status, the headers and the body that tell a client of an error: 400 for what it may not ask, 429 when
    it should ask later, 503 for what it cannot help."""
    status = {"REQUEST": 400, "CONFIG": 400, "OVERLOADED": 429}.get(error.code, 503)
    wait_s = getattr(error, "retry_after_s", None) or 1.0
    body = {"message": str(error), "type": _KINDS[status], "param": None, "code": error.code.lower()}
    return status, {"Retry-After": str(math.ceil(wait_s))} if status != 400 else {}, {"error": body}


def _decoded(data: bytes | str, kind: type[CompletionBody] | type[ChatBody]) -> CompletionBody | ChatBody:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body of the call cannot be used: {error}") from error


def _options(body: CompletionBody | ChatBody, has_schemas: bool) -> dict[str, Any]:
    """Return the fields of SamplingParams that a body sets."""
    options = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    options["logit_bias"] = tuple((body.logit_bias or {}).items())
    most = body.max_tokens
    if isinstance(body, CompletionBody):
        options["logprobs"] = body.logprobs
    elif body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise RequestError("top_logprobs needs logprobs to be true")
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        most = body.max_completion_tokens
    if most is not None:
        options["max_new_tokens"] = most
    if (schema := _schema(body.response_format or {"type": "text"})) is not None:
        if not has_schemas:
            raise RequestError(
                "response_format needs the library llguidance or xgrammar, and this server has neither: "
                "pip install 'pdinfer[structured]'"
            )
        options |= {"logits_processor": PROCESSOR, "logits_processor_argument": json.dumps(schema)}
    return options


def _schema(wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, named = wanted.get("type"), wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(schema, dict):
        return schema
    raise RequestError(
        'response_format must be {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
    )


def _prompts(body: CompletionBody | ChatBody, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    if isinstance(body, ChatBody):
        return [tokenizer.chat(body.messages)]
    prompts: Any = body.prompt
    if isinstance(prompts, str) or (prompts and all(isinstance(token, int) for token in prompts)):
        prompts = [prompts]
    if any(isinstance(prompt, int) for prompt in prompts):
        raise RequestError("prompt must be a text, tokens, or a list of either; got tokens among others")
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
