"""The calls by which vLLM computes a prompt, and the threads that wait for its answers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import attrs

from pdinfer.bounds import escaped
from pdinfer.checks import clip, is_int, is_number
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RequestError, TransferError
from pdinfer.process.locks import new_lock
from pdinfer.process.threads import start
from pdinfer.types import Request, SamplingParams

ANSWER_S = 600.0
"""Seconds that a server may take to compute one prompt, the time in its queue included."""
MODELS_S = 10.0
MAX_MODELS_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20
MAX_BIAS = 100.0
_SEED_MASK = (1 << 63) - 1

SETTLED_HERE = frozenset({"request_id", "sampling", "priority", "deadline_s", "stop", "alone"})
"""Fields of a Request that vLLM need not know: the Pairing names, orders and ends requests. vLLM shares its steps as
it likes, so one that should run alone may not (docs/decisions/0056)."""
SENT = frozenset(
    {"prompt", "output", "cache_salt", "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p"}
    | {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed"}
    | {"stop_token_ids", "ignore_eos"}
)
"""Fields of a Request and its SamplingParams that `body_of` sends to vLLM. Any other is refused unless it is at its
default, so that one which is added later is never lost in silence."""

Complete = Callable[[Mapping[str, Any]], object]
"""Has vLLM compute one prompt, described as the body of a POST to /v1/completions, and returns when it has. Called from
several threads. It raises RequestError for a prompt that vLLM does not take, and anything else when it failed."""


@attrs.frozen
class Piece:
    """The next part of vLLM's answer to a request: tokens with their log-probabilities, and with the last of them how
    it ends: "stop" or "length"."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None

    @classmethod
    def of(cls, chunk: Any) -> Piece:
        """Read a chunk of a streamed completion. Raises TransferError for an error, and for anything but a chunk."""
        try:
            (choice,) = chunk["choices"]
            tokens = tuple(choice["token_ids"])
            logprobs = tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())
            reason = choice.get("finish_reason")
            is_good = all(map(is_int, tokens)) and all(map(is_number, logprobs)) and len(logprobs) in (0, len(tokens))
        except (LookupError, TypeError, ValueError, AttributeError):
            is_good = False
        if not is_good:
            raise TransferError(f"vLLM sent something else than tokens: {escaped(json.dumps(chunk)[:400])}")
        return cls(tokens, logprobs, reason if isinstance(reason, str) else None)


Stream = Callable[[Mapping[str, Any]], Iterator[Piece]]
"""Gives vLLM the body of a POST to /v1/completions, and yields what it says. Closed before its end, it leaves vLLM.
Called from several threads; it raises as Complete does."""


def body_of(request: Request, params: Mapping[str, Any], *, max_tokens: int = 1) -> dict[str, Any]:
    """Return what asks vLLM for the next tokens of a request, with these `kv_transfer_params`. Every sampling parameter
    is there, since vLLM's defaults are those of the checkpoint. The output so far is a part of the prompt: what it adds
    to penalties goes into the biases. Raises RequestError, by name, for a field that is neither sent nor at its
    default."""
    sampling, output = request.sampling, request.output
    if sampling.logprobs == 0:  # of the drawn token alone, which vLLM always says
        sampling = attrs.evolve(sampling, logprobs=None)
    _check_all_is_sent(request)
    _check_all_is_sent(sampling)
    biases = Counter(dict(sampling.logit_bias))
    for token, count in Counter(output).items():
        biases[token] -= sampling.presence_penalty + count * sampling.frequency_penalty  # type: ignore[assignment]
    return {
        "prompt": list(request.tokens),
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, max(0, sampling.min_new_tokens - len(output))),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): min(MAX_BIAS, max(-MAX_BIAS, bias)) for token, bias in biases.items() if bias},
        "seed": None if sampling.seed is None else (sampling.seed + len(output)) & _SEED_MASK,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "cache_salt": request.cache_salt.hex() or None,
        "kv_transfer_params": dict(params),
    }


def _check_all_is_sent(asked: Request | SamplingParams) -> None:
    for field in attrs.fields(type(asked)):
        given = getattr(asked, field.name)
        if field.name not in SENT | SETTLED_HERE and given != field.default:
            raise RequestError(
                f"{field.name}={clip(given)} cannot be sent to vLLM, where a token of this request would be drawn; "
                "leave it out, or give the request to a Pairing whose prefill and decode are engines of pdinfer"
            )


class VLLMCall:
    """A body for vLLM, until its answer. It may be left from any thread, and vLLM ends a request whose connection
    closes."""

    def __init__(self) -> None:
        self._changing = new_lock()
        self._connection: socket.socket | None = None
        self.is_left = False

    @contextlib.contextmanager
    def heard(self, answer: HTTPResponse) -> Iterator[None]:
        """Have `leave` close the connection of an answer meanwhile."""
        with socket.socket(fileno=os.dup(answer.fileno())) as connection:
            with self._changing:
                self._connection = connection
                is_left = self.is_left
            if is_left:
                self.leave()
            try:
                yield
            finally:
                with self._changing:
                    self._connection = None

    def leave(self) -> None:
        """Close the connection, now or as soon as the server begins to answer."""
        with self._changing:
            self.is_left = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the server was first
                    self._connection.shutdown(socket.SHUT_RDWR)


@attrs.frozen
class Server:
    """A server of vLLM at `url`, such as "http://127.0.0.1:8100"."""

    url: str = attrs.field()

    @url.validator
    def _check_url(self, _: object, value: object) -> None:
        if isinstance(value, str) and value.isprintable() and " " not in value:
            with contextlib.suppress(ValueError):  # half a bracket, or a port that is none
                parts = urlsplit(value)
                if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                    return
        raise ConfigError(f'a server of vLLM has a URL such as "http://127.0.0.1:8100", got {clip(value)}')

    def max_model_len(self) -> int | None:
        """Return the most tokens of a prompt and its output, None when the server does not say. Raises TransferError
        when it cannot be reached."""
        try:
            with urllib.request.urlopen(f"{self.url.rstrip('/')}/v1/models", timeout=MODELS_S) as answer:  # noqa: S310
                models = json.loads(answer.read(MAX_MODELS_BYTES))
            length = models["data"][0].get("max_model_len")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return None
        except (OSError, HTTPException) as error:
            why = escaped(str(error))
            raise TransferError(f"vLLM at {self.url} did not say which models it has: {why}") from None
        return length if is_int(length) and length > 1 else None

    def __call__(self, body: Mapping[str, Any], call: VLLMCall | None = None) -> None:
        """Have the server compute a prompt. Raises RequestError when it does not take it, TransferError when it cannot
        be reached, fails, or is left."""
        for _ in self._pieces(body, call or VLLMCall()):
            pass

    def stream(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield what the server says to a body. Raises as a call does."""
        return self._pieces({**body, "return_tokens_as_token_ids": True, "logprobs": 0}, VLLMCall())

    def _pieces(self, body: Mapping[str, Any], call: VLLMCall) -> Iterator[Piece]:
        with self._posted({**body, "return_token_ids": True, "stream": True}) as answer, call.heard(answer):
            while line := answer.readline(MAX_LINE_BYTES):
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield self._piece(_json(data))
            raise TransferError(f"vLLM at {self.url} broke off its answer")

    def _piece(self, chunk: Any) -> Piece:
        """Read a chunk. What vLLM refuses after the start of its answer is an error in its place."""
        match chunk:
            case {"error": {"code": int(code), "message": str(why)}} if _is_theirs(code):
                raise RequestError(f"vLLM at {self.url} answered {code}: {escaped(why[:400])}")
        return Piece.of(chunk)

    @contextlib.contextmanager
    def _posted(self, body: Mapping[str, Any]) -> Iterator[HTTPResponse]:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        post = urllib.request.Request(f"{self.url.rstrip('/')}/v1/completions", data, kind)  # noqa: S310 - checked above
        try:
            with urllib.request.urlopen(post, timeout=ANSWER_S) as answer:  # noqa: S310
                yield answer
        except urllib.error.HTTPError as refused:
            with refused:
                why = escaped(refused.read(400).decode("utf-8", "replace"))
            kind_of_error = RequestError if _is_theirs(refused.code) else TransferError
            raise kind_of_error(f"vLLM at {self.url} answered {refused.code}: {why}") from None
        except (OSError, HTTPException) as error:
            raise TransferError(f"vLLM at {self.url} did not answer: {escaped(str(error))}") from None


def _is_theirs(code: int) -> bool:
    """Return whether an HTTP status says that the request is at fault, and will be the next time."""
    return 400 <= code < 500 and code not in (408, 429)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


@attrs.frozen
class Answer:
    """The result of a prompt: `error` is None when vLLM has computed it."""

    room: bytes
    error: PDInferError | None


class Prompts:
    """The prompts that vLLM computes for us, at most `max_concurrent` at a time and in order. Answers go to `answered`,
    from any thread. Threads are made as they are needed, and are daemons: one that waits for vLLM keeps no process
    alive."""

    def __init__(self, complete: Complete, max_concurrent: int, answered: Callable[[Answer], None]) -> None:
        self._complete = complete
        self._max_concurrent = max_concurrent
        self._answered = answered
        self._changing = new_lock()
        self._waiting: queue.SimpleQueue[tuple[bytes, dict[str, Any]] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._calls: dict[bytes, VLLMCall] = {}  # of all that is not answered

    def ask(self, room: bytes, body: dict[str, Any]) -> None:
        """Have a prompt computed. Never waits."""
        with self._changing:
            self._calls[room] = VLLMCall()
            needs_thread = self._num_threads < min(self._max_concurrent, len(self._calls))
            self._num_threads += needs_thread
        if needs_thread:
            try:
                start(threading.Thread(target=self._work, name="pdinfer-vllm-prompt", daemon=True))
            except Overloaded as error:
                with self._changing:
                    self._num_threads -= 1
                    has_threads = self._num_threads > 0
                    if not has_threads:
                        del self._calls[room]
                if not has_threads:
                    self._answered(Answer(room, error))
                    return
        self._waiting.put((room, body))

    def drop(self, room: bytes) -> None:
        """Answer a prompt with an error. A server that has it already is left; another way to vLLM goes to its end."""
        if (call := self._calls.get(room)) is not None:
            call.leave()

    def close(self) -> None:
        """Ask for nothing more, leave the server, and end the threads, each after the answer that it waits for."""
        with self._changing:
            self._max_concurrent = 0
            for _ in range(self._num_threads):
                self._waiting.put(None)
            calls = list(self._calls.values())
        for call in calls:
            call.leave()

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None:
            room, body = asked
            call = self._calls[room]
            cancelled = RequestError("the request was cancelled")
            error = cancelled if call.is_left else self._problem(body, call)
            with self._changing:
                del self._calls[room]
            self._answered(Answer(room, cancelled if error is not None and call.is_left else error))

    def _problem(self, body: dict[str, Any], call: VLLMCall) -> PDInferError | None:
        """Have vLLM compute a prompt. Return why it did not."""
        try:
            if isinstance(self._complete, Server):
                self._complete(body, call)
            else:
                self._complete(body)
        except PDInferError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a host's own way to reach vLLM
            return TransferError(f"vLLM did not compute a prompt: {type(error).__name__}: {error}")
        return None
