"""Whether a request may enter: pure functions of the request and of what an engine can take.

`Pairing.submit` and the `submit` of each engine check every request. Even so, each process scans a long prompt only
once: the first check marks the prompt, later checks in the same process trust the mark, and the mark does not travel.

    Pairing ── marked prompt ──► an engine in this process: no second scan
       └────── packed ids ─────► another process: unpacked without a mark, and scanned once there
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pdinfer.bounds import MAX_LOGPROBS
from pdinfer.checks import CheckedTokens, clip, is_int, is_number
from pdinfer.config.options import MAX_DEADLINE_S
from pdinfer.errors import RequestError
from pdinfer.stop import MAX_STOP_LENGTH, MAX_STOPS
from pdinfer.types import Request, RequestLimits, SamplingParams

MAX_ID_CHARACTERS = 256
MAX_SALT_BYTES = 256
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 1024
MAX_ARGUMENT_BYTES = 1 << 16

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
MAX_BIAS = 100.0
SHOWN_NAMES = 120


def check_request(request: Request, limits: Sequence[RequestLimits]) -> Request:
    """Return the request with its prompt marked as `CheckedTokens`, so that later checks here need not scan it again.

    Raise RequestError, which names the field, its value and the limit. No part of a bad request reaches a device."""
    _check_id(request.request_id)
    vocab_size = min([limit.vocab_size for limit in limits], default=2**31)
    _check_tokens("prompt", request.prompt, vocab_size)
    _check_tokens("output", request.output, vocab_size)
    if not request.prompt:
        raise RequestError("prompt is empty; it needs at least one token")
    _check_sampling(request.sampling, vocab_size)
    _check_processor(request.sampling, limits)
    _check_length(request, limits)
    if not is_int(request.priority) or abs(request.priority) >= 2**31:
        raise RequestError(f"priority must be an int of 32 bits, got {clip(request.priority)}")
    if not isinstance(request.cache_salt, bytes) or len(request.cache_salt) > MAX_SALT_BYTES:
        raise RequestError(
            f"cache_salt must be a bytes object of at most {MAX_SALT_BYTES} bytes, got {clip(request.cache_salt)}"
        )
    if not isinstance(request.alone, bool):
        raise RequestError(f"alone must be True or False, got {clip(request.alone)}")
    expected = request.expected_new_tokens
    if expected is not None and not (is_int(expected) and 0 <= expected < 2**31):
        raise RequestError(f"expected_new_tokens must be an int from 0 to {2**31 - 1} or None, got {clip(expected)}")
    _check_stop(request.stop, vocab_size)
    deadline = request.deadline_s
    if deadline is not None and not (is_number(deadline) and 0 <= deadline <= MAX_DEADLINE_S):
        raise RequestError(f"deadline_s must be a number from 0 to {MAX_DEADLINE_S:g}, got {clip(deadline)}")
    return attrs.evolve(request, prompt=CheckedTokens.of(request.prompt))


def _check_id(request_id: object) -> None:
    if request_id is None:
        return
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARACTERS or not request_id.isprintable():
        raise RequestError(f"request_id must be 1 to {MAX_ID_CHARACTERS} printable characters, got {clip(request_id)}")


def _check_tokens(name: str, tokens: object, vocab_size: int) -> None:
    if not isinstance(tokens, tuple):
        raise RequestError(f"{name} must be a tuple of token ids, got {clip(type(tokens).__name__)}")
    if tokens and (not isinstance(tokens, CheckedTokens) or tokens.largest >= vocab_size):
        _scan(name, tokens, vocab_size)


def _scan(name: str, tokens: tuple[object, ...], vocab_size: int) -> None:
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(f"{name}[{index}] is {clip(token)}; token ids are ints from 0 to {vocab_size - 1}")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling must be SamplingParams, got {clip(sampling)}")
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if (type(value) is not float and not is_number(value)) or not low <= value <= high:
            raise RequestError(f"sampling.{name} must be a number from {low:g} to {high:g}, got {clip(value)}")
    if sampling.top_p == 0:
        raise RequestError("sampling.top_p is 0, which keeps no token; use temperature=0 for greedy decoding")
    if not is_int(sampling.top_k) or not 0 <= sampling.top_k < 2**31:
        raise RequestError(f"sampling.top_k must be an int from 0 (off) to {2**31 - 1}, got {clip(sampling.top_k)}")
    if not is_int(sampling.max_new_tokens) or not 1 <= sampling.max_new_tokens < 2**31:
        raise RequestError(
            f"sampling.max_new_tokens must be an int from 1 to {2**31 - 1}, got {clip(sampling.max_new_tokens)}"
        )
    least = sampling.min_new_tokens
    if not is_int(least) or not 0 <= least <= sampling.max_new_tokens:
        raise RequestError(
            f"sampling.min_new_tokens must be an int from 0 to max_new_tokens, which is {sampling.max_new_tokens}, "
            f"got {clip(least)}"
        )
    logprobs = sampling.logprobs
    if logprobs is not None and (not is_int(logprobs) or not 0 <= logprobs <= MAX_LOGPROBS):
        raise RequestError(f"sampling.logprobs must be None or an int from 0 to {MAX_LOGPROBS}, got {clip(logprobs)}")
    seed = sampling.seed
    if seed is not None and (not is_int(seed) or not 0 <= seed < 2**64):
        raise RequestError(f"sampling.seed must be an int from 0 to 2**64 - 1, got {clip(seed)}")
    if not isinstance(sampling.ignore_eos, bool):
        raise RequestError(f"sampling.ignore_eos must be a bool, got {clip(sampling.ignore_eos)}")
    _check_tokens("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(f"sampling.stop_token_ids has {len(sampling.stop_token_ids)} ids, at most {MAX_STOP_TOKENS}")
    _check_bias(sampling.logit_bias, vocab_size)


def _check_bias(bias: object, vocab_size: int) -> None:
    if not isinstance(bias, tuple):
        raise RequestError(f"sampling.logit_bias must be a tuple of (token id, bias) pairs, got {clip(bias)}")
    if not bias:
        return
    if len(bias) > MAX_BIASED_TOKENS:
        raise RequestError(f"sampling.logit_bias has {len(bias)} pairs, at most {MAX_BIASED_TOKENS}")
    for index, pair in enumerate(bias):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError(f"sampling.logit_bias[{index}] must be a (token id, bias) pair, got {clip(pair)}")
        if not is_number(pair[1]) or abs(pair[1]) > MAX_BIAS:
            raise RequestError(
                f"the bias of sampling.logit_bias[{index}] must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                f"got {clip(pair[1])}"
            )
    _check_tokens("sampling.logit_bias", tuple(token for token, _ in bias), vocab_size)
    if len({token for token, _ in bias}) < len(bias):
        raise RequestError("sampling.logit_bias has two pairs of one token id; give each token one bias")


def _check_stop(stop: object, vocab_size: int) -> None:
    if not isinstance(stop, tuple):
        if not callable(getattr(stop, "begin", None)):
            raise RequestError(
                f"stop must be a tuple of token sequences or a matcher with a method begin, got {clip(stop)}; "
                "pdinfer.text.StopStrings makes one of strings"
            )
        return
    if len(stop) > MAX_STOPS:
        raise RequestError(f"stop has {len(stop)} sequences, at most {MAX_STOPS}")
    for index, sequence in enumerate(stop):
        _check_tokens(f"stop[{index}]", sequence, vocab_size)
        if not 0 < len(sequence) <= MAX_STOP_LENGTH:
            raise RequestError(f"stop[{index}] has {len(sequence)} tokens; a sequence has 1 to {MAX_STOP_LENGTH}")


def _check_processor(sampling: SamplingParams, limits: Sequence[RequestLimits]) -> None:
    name, argument = sampling.logits_processor, sampling.logits_processor_argument
    if not isinstance(argument, str) or not _travels(argument, MAX_ARGUMENT_BYTES):
        raise RequestError(
            f"sampling.logits_processor_argument must be a str of at most {MAX_ARGUMENT_BYTES} bytes of UTF-8, "
            f"got {clip(argument)}"
        )
    if name is None:
        if argument:
            raise RequestError("sampling.logits_processor_argument is given and sampling.logits_processor is None")
        return
    for limit in limits:
        if not isinstance(name, str) or name not in limit.logits_processors:
            known = ", ".join(limit.logits_processors)[:SHOWN_NAMES] or "none"
            raise RequestError(f"sampling.logits_processor is {clip(name)}; the {limit.name} engine was given: {known}")


def _travels(text: str, max_bytes: int) -> bool:
    """Return whether `text` can be encoded (it has no lone surrogate) in at most `max_bytes` bytes."""
    try:
        return len(text) <= max_bytes and len(text.encode()) <= max_bytes
    except UnicodeEncodeError:
        return False


def _check_length(request: Request, limits: Sequence[RequestLimits]) -> None:
    if len(request.output) >= request.sampling.max_new_tokens:
        raise RequestError(
            f"output already has {len(request.output)} tokens and sampling.max_new_tokens is "
            f"{request.sampling.max_new_tokens}; nothing is left to generate"
        )
    total = len(request.prompt) + request.sampling.max_new_tokens
    if total > min([limit.max_tokens for limit in limits], default=total):
        held = ", ".join(f"{limit.name} holds {limit.max_tokens}" for limit in limits)
        raise RequestError(
            f"prompt of {len(request.prompt)} tokens plus max_new_tokens {request.sampling.max_new_tokens} makes "
            f"{total}; {held}: shorten the prompt, ask for fewer tokens or use larger pools"
        )
