"""Pure functions: whether a request may enter, and which sequences run this step. No engine, no tensor, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from pdinfer.bounds import MAX_LOGPROBS
from pdinfer.checks import clip, is_int
from pdinfer.config.options import MAX_DEADLINE_S
from pdinfer.errors import ConfigError, RequestError
from pdinfer.types import Request, RequestLimits, SamplingParams

T = TypeVar("T")

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

PATIENCE_S = 30.0
"""How long a request without a deadline, or with a later one, may be overtaken by urgent ones of its priority."""
OLDEST_EVERY = 8
"""Of so many turns one is for who has waited longest, whatever its priority, once that is more than PATIENCE_S."""
RESUME_TOKENS = 128
"""What there must be room for, beyond its tokens, before a sequence that lost its KV comes back (less at its end): its
prompt and output are computed and sent again for that."""
GROWTH_RAISE = 0.1
GROWTH_DECAY = 1 / 512


def check_request(request: Request, limits: Sequence[RequestLimits]) -> None:
    """Raises RequestError naming the field, its value and the limit. Nothing of a bad request reaches a device."""
    _check_id(request.request_id)
    vocab_size = min((limit.vocab_size for limit in limits), default=2**31)
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
        raise RequestError(f"cache_salt must be at most {MAX_SALT_BYTES} bytes, got {clip(request.cache_salt)}")
    deadline = request.deadline_s
    if deadline is not None and not (_is_number(deadline) and 0 <= deadline <= MAX_DEADLINE_S):
        raise RequestError(f"deadline_s must be a number from 0 to {MAX_DEADLINE_S:g}, got {clip(deadline)}")


def _check_id(request_id: object) -> None:
    if request_id is None:
        return
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARACTERS or not request_id.isprintable():
        raise RequestError(f"request_id must be 1 to {MAX_ID_CHARACTERS} printable characters, got {clip(request_id)}")


def _check_tokens(name: str, tokens: object, vocab_size: int) -> None:
    if not isinstance(tokens, tuple):
        raise RequestError(f"{name} must be a tuple of token ids, got {clip(type(tokens).__name__)}")
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(f"{name}[{index}] is {clip(token)}; token ids are ints from 0 to {vocab_size - 1}")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling must be SamplingParams, got {clip(sampling)}")
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if not _is_number(value) or not low <= value <= high:
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
    if len(bias) > MAX_BIASED_TOKENS:
        raise RequestError(f"sampling.logit_bias has {len(bias)} pairs, at most {MAX_BIASED_TOKENS}")
    for index, pair in enumerate(bias):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError(f"sampling.logit_bias[{index}] must be a (token id, bias) pair, got {clip(pair)}")
        if not _is_number(pair[1]) or abs(pair[1]) > MAX_BIAS:
            raise RequestError(
                f"the bias of sampling.logit_bias[{index}] must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                f"got {clip(pair[1])}"
            )
    _check_tokens("sampling.logit_bias", tuple(token for token, _ in bias), vocab_size)
    if len({token for token, _ in bias}) < len(bias):
        raise RequestError("sampling.logit_bias has two pairs of one token id; give each token one bias")


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
    """Whether it is text (no half of a surrogate pair) of at most so many bytes."""
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
    if any(total > limit.max_tokens for limit in limits):
        held = ", ".join(f"{limit.name} holds {limit.max_tokens}" for limit in limits)
        raise RequestError(
            f"prompt of {len(request.prompt)} tokens plus max_new_tokens {request.sampling.max_new_tokens} makes "
            f"{total}; {held}: shorten the prompt, ask for fewer tokens or use larger pools"
        )


def _is_number(value: object) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


# -- who comes first --------------------------------------------------------------------------------------------------


def due_at(submitted_at: float, deadline_at: float | None) -> float:
    """When a request should have its turn, by the clock of its arguments: requests of one priority come in this order.
    Its deadline, or PATIENCE_S after it came. Among those without a deadline that is age; one that has a deadline may
    overtake, and nobody is overtaken by who came PATIENCE_S after it."""
    patient_until = submitted_at + PATIENCE_S
    return patient_until if deadline_at is None else min(deadline_at, patient_until)


def is_late(deadline_at: float | None, num_tokens: int, *, now: float, tokens_per_s: float) -> bool:
    """Whether `num_tokens` cannot be computed before the deadline, even at `tokens_per_s`, the best speed seen so far
    (0 when none was measured)."""
    if deadline_at is None:
        return False
    return now + (num_tokens / tokens_per_s if tokens_per_s else 0.0) > deadline_at


def is_turn_of_oldest(num_turns: int) -> bool:
    """Whether the turn behind so many others is one that goes by age alone. So priorities are kept in all other turns,
    and who has waited for PATIENCE_S has its own after at most OLDEST_EVERY for each that has waited longer."""
    return num_turns % OLDEST_EVERY == OLDEST_EVERY - 1


def by_age(waiting: Iterable[T], since: Callable[[T], float], *, num_turns: int, now: float) -> T | None:
    """Who has the next turn because it has waited longest; None when the turn goes by priority."""
    if not is_turn_of_oldest(num_turns):
        return None
    return min((one for one in waiting if now - since(one) > PATIENCE_S), key=since, default=None)


# -- prefill steps ----------------------------------------------------------------------------------------------------


def plan_chunk(remaining: Sequence[int], classes: Sequence[Hashable], *, chunk_size: int, max_tokens: int) -> list[int]:
    """How many tokens of each prompt run this step, for prompts in order of preference; those of one class stand
    together, and a class gets what those before it leave.

    With a `chunk_size` the step has that many tokens, prompts may be cut, and within a class one half of the step goes
    down the order and the other to the shortest. Without one (-1) prompts run whole, the first always, and beside it
    the shortest that fit in `max_tokens` together with it.
    """
    budget = max_tokens if chunk_size == -1 else chunk_size
    counts: list[int] = []
    for _, members in groupby(zip(classes, remaining, strict=True), key=lambda pair: pair[0]):
        tokens = [count for _, count in members]
        share = _whole(tokens, budget, at_least_one=not counts) if chunk_size == -1 else _halves(tokens, budget)
        counts += share
        budget -= sum(share)
    return counts


def _halves(remaining: Sequence[int], budget: int) -> list[int]:
    counts = [0] * len(remaining)
    shortest = sorted(range(len(remaining)), key=remaining.__getitem__)
    for order, part in ((range(len(remaining)), budget - budget // 2), (shortest, budget // 2)):
        for index in order:
            count = min(remaining[index] - counts[index], part)
            counts[index] += count
            part -= count
    return counts


def _whole(remaining: Sequence[int], budget: int, *, at_least_one: bool) -> list[int]:
    counts = [0] * len(remaining)
    shortest = sorted(range(1, len(remaining)), key=remaining.__getitem__)
    for index in (0, *shortest):
        if remaining[index] <= budget or (at_least_one and index == 0):
            counts[index] = remaining[index]
            budget -= remaining[index]
    return counts


# -- pages ------------------------------------------------------------------------------------------------------------


def withheld_pages(num_pages: int, *, page_size: int, max_total_tokens: int | None) -> int:
    """How many pages of a pool stay unused so that those in use hold at most `max_total_tokens`; ConfigError when that
    leaves none."""
    if max_total_tokens is None:
        return 0
    if max_total_tokens < page_size:
        raise ConfigError(
            f"max_total_tokens is {max_total_tokens} and a page holds {page_size} tokens; allow at least one page"
        )
    return max(0, num_pages - max_total_tokens // page_size)


def may_grant(needed: int, *, available: int, watermark: int, others: int) -> bool:
    """Whether a sequence that needs `needed` pages, not counting those in use anyway, may have them: `watermark` of the
    pages that are free or cached stay so for the growth of the `others` that hold pages; alone, a sequence may take
    all."""
    return needed <= available - (watermark if others else 0)


def learn_growth(share: float, *, num_retracted: int) -> float:
    """The part of what running sequences may still generate for which pages are kept free, after a step that retracted
    `num_retracted` of them: up by GROWTH_RAISE for each, else slowly down, so that batches fill again."""
    return min(1.0, share + GROWTH_RAISE * num_retracted) if num_retracted else max(0.0, share - GROWTH_DECAY)


def choose_victim(sequences: Sequence[tuple[int, int, int]]) -> int:
    """Index of the sequence to retract, of (priority, attempts, arrival) each: of the lowest priority, of those that
    have had the fewest attempts, the one that arrived last. So nobody is retracted twice before all others once."""
    return min(range(len(sequences)), key=lambda i: (*sequences[i][:2], -sequences[i][2]))


# -- overload ---------------------------------------------------------------------------------------------------------


def queueing_s(*stages: tuple[int, float]) -> float | None:
    """Seconds until the last of a line has its turn, when each stage that the line goes through has to do so many
    tokens first, at so many tokens per second: they work at the same time, so the slowest counts. None when a stage
    that has tokens to do has not been measured."""
    if any(num_tokens and not tokens_per_s for num_tokens, tokens_per_s in stages):
        return None
    return max((num_tokens / tokens_per_s for num_tokens, tokens_per_s in stages if num_tokens), default=0.0)
