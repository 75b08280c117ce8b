"""A policy that follows prefixes while queues are balanced, as SGLang's router does."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pdinfer.checks import int_in
from pdinfer.pairing.policy.by_load import held_share, least, weight
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape


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
