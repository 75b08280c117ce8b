"""Policies that look at each side by itself: at what its ports have to do, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

import attrs

from pdinfer.checks import as_float, float_in, int_in
from pdinfer.stats import DecodeLoad, EngineLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape

AnyLoad = TypeVar("AnyLoad", bound=EngineLoad)


def weight(default: float) -> Any:
    """Return an attrs field for a number of a policy, which is finite and at least 0."""
    return attrs.field(default=default, converter=as_float, validator=float_in(0.0, 1e6, low_included=True))


def round_robin(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    """Choose every port in turn, whatever its load."""
    if not prefills or not decodes:
        return None
    return Choice(
        prefill=prefills[shape.ordinal % len(prefills)].address, decode=decodes[shape.ordinal % len(decodes)].address
    )


def least_tokens(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    """Choose the prefill with the fewest tokens still to compute, and the decode with the fewest tokens held or waiting
    per page of its pool. Counting tokens keeps long prompts from piling up behind each other."""
    if not prefills or not decodes:
        return None
    prefill = least(prefills, [float(load.num_queued_tokens) for load in prefills], shape.ordinal)
    decode = least(decodes, [held_share(load) for load in decodes], shape.ordinal)
    return _by_load(prefill, decode)


@attrs.frozen(kw_only=True)
class PowerOfTwo:
    """Choose, on each side, the better of two ports that are drawn at random, by the counts of `least_tokens`. Draws
    depend on `seed` and on the request's ordinal alone."""

    seed: int = 0

    def __call__(
        self, shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]
    ) -> Choice | None:
        if not prefills or not decodes:
            return None
        draw = Random(f"{self.seed} {shape.ordinal}")  # noqa: S311 - it spreads load and guards nothing
        two_prefills = draw.sample(prefills, min(2, len(prefills)))
        two_decodes = draw.sample(decodes, min(2, len(decodes)))
        return _by_load(min(two_prefills, key=lambda load: load.num_queued_tokens), min(two_decodes, key=held_share))


power_of_two = PowerOfTwo()


@attrs.frozen(kw_only=True)
class CacheAware:
    """Choose the prefill that holds most of the prompt, if that is more than `min_match` of it and the queues are
    balanced, else the one with the fewest queued requests. Choose the decode of `least_tokens`.

    Queues are out of balance when the longest has more than `balance_requests` more requests than the shortest and more
    than `balance_ratio` times as many. These are the rules and the defaults of SGLang's router, except that without a
    match it goes to the smallest cache; where all prompts begin alike, that sends all of them to one prefill."""

    min_match: float = weight(0.3)
    balance_requests: int = attrs.field(default=8, validator=int_in(0, 2**31))
    balance_ratio: float = weight(1.5)

    def __call__(
        self, shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]
    ) -> Choice | None:
        if not prefills or not decodes:
            return None
        queued = [float(load.num_queued_requests) for load in prefills]
        found = shape.found_at([load.address for load in prefills])
        fewest, most = min(queued), max(queued)
        balanced = most - fewest <= self.balance_requests or most <= self.balance_ratio * fewest
        follow = balanced and max(found) > self.min_match * (shape.num_prompt_tokens + shape.num_output_tokens)
        prefill = least(prefills, [-float(count) for count in found] if follow else queued, shape.ordinal)
        decode = least(decodes, [held_share(load) for load in decodes], shape.ordinal)
        return Choice(
            prefill=prefill.address,
            decode=decode.address,
            score=(
                ("prefill_found_tokens", -float(shape.found_tokens.get(prefill.address, 0))),
                ("prefill_queued_requests", float(prefill.num_queued_requests)),
                ("decode_held_share", held_share(decode)),
            ),
        )


cache_aware = CacheAware()


def _by_load(prefill: PrefillLoad, decode: DecodeLoad) -> Choice:
    return Choice(
        prefill=prefill.address,
        decode=decode.address,
        score=(("prefill_queued_tokens", float(prefill.num_queued_tokens)), ("decode_held_share", held_share(decode))),
    )


def held_share(load: DecodeLoad) -> float:
    """Return the tokens running, granted and waiting as a share of the tokens that the pool can hold."""
    return (load.num_running_tokens + load.num_waiting_tokens) / (load.num_total_pages * load.page_size)


def least(loads: Sequence[AnyLoad], scores: Sequence[float], turn: int) -> AnyLoad:
    """Return the load with the least score. Those with equal scores have their turns."""
    lowest = min(scores)
    equal = [load for load, score in zip(loads, scores, strict=True) if score == lowest]
    return equal[turn % len(equal)]
