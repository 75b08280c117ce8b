"""Every term of the prediction decides where the others are equal, and the score tells all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.pairing import policy
from pdinfer.stats import DecodeCost, DecodeLoad, Links, PrefillCost, PrefillLoad, QueuedSizes
from pdinfer.types import Choice, Link, RequestShape
from tests.unit.pairing.policies.test_by_load import address

FAST = PrefillCost(step_s=0.03, token_s=1 / 14000, chunk_tokens=8192)
SLOW = PrefillCost(step_s=0.06, token_s=1 / 7000, chunk_tokens=8192)
STEADY = DecodeCost(step_s=0.02, sequence_s=1e-4, token_s=2e-8)
TERMS = ("prefill_s", "work_s", "delay_s", "link_s", "line_s", "step_s", "pool_s")


def prefill(rank: int, *sizes: int, cost: PrefillCost = FAST) -> PrefillLoad:
    return PrefillLoad(
        address=address(rank),
        num_free_pages=1000,
        num_total_pages=1000,
        page_size=64,
        num_queued_requests=len(sizes),
        num_queued_tokens=sum(sizes),
        queued=QueuedSizes.of(sizes),
        cost=cost,
    )


def decode(rank: int, running: int = 0, **more: Any) -> DecodeLoad:
    fields: dict[str, Any] = {
        "address": address(rank),
        "num_free_pages": 6000,
        "num_total_pages": 6000,
        "page_size": 64,
        "token_bytes": 70272,
        "num_waiting_requests": 0,
        "num_waiting_tokens": 0,
        "num_granted_requests": 0,
        "num_running_requests": running,
        "num_running_tokens": 1000 * running,
        "max_running_requests": 128,
        "cost": STEADY,
    }
    return DecodeLoad(**{**fields, **more})


def choose(
    prefills: Sequence[PrefillLoad],
    decodes: Sequence[DecodeLoad],
    *,
    num_tokens: int = 4000,
    ordinal: int = 0,
    policy: policy.TrafficAware = policy.traffic_aware,
    **more: Any,
) -> Choice:
    shape = RequestShape(ordinal=ordinal, num_prompt_tokens=num_tokens, num_output_tokens=0, max_new_tokens=100, **more)
    choice = policy(shape, prefills, decodes)
    assert choice is not None
    assert tuple(name for name, _ in choice.score) == TERMS
    assert all(math.isfinite(term) for _, term in choice.score)
    return choice


def prefill_of(prefills: Sequence[PrefillLoad], **more: Any) -> int:
    """Return the prefill that is chosen whoever's turn it is."""
    ranks = {choose(prefills, [decode(0)], ordinal=turn, **more).prefill.rank for turn in range(4)}
    assert len(ranks) == 1
    return ranks.pop()


def decode_of(decodes: Sequence[DecodeLoad], **more: Any) -> int:
    ranks = {choose([prefill(0)], decodes, ordinal=turn, **more).decode.rank for turn in range(4)}
    assert len(ranks) == 1
    return ranks.pop()


def test_a_prefill_that_holds_the_prompt_is_taken_until_its_queue_costs_more() -> None:
    found = {address(1): 3584}
    assert prefill_of([prefill(0), prefill(1)], found_tokens=found) == 1
    assert prefill_of([prefill(0), prefill(1, 300, 100)], found_tokens=found) == 1
    assert prefill_of([prefill(0), prefill(1, 20000, *[400] * 60)], found_tokens=found) == 0


def test_a_prefill_is_as_fast_as_its_own_steps() -> None:
    assert prefill_of([prefill(0, cost=SLOW), prefill(1)]) == 1
    assert prefill_of([prefill(0, 3000, cost=FAST), prefill(1, 3000, cost=SLOW)]) == 0
    assert prefill_of([prefill(0, cost=SLOW), prefill(1, 8000, 8000)]) == 0  # slow, and still sooner


def test_long_prompts_in_a_queue_hold_short_ones_up_less() -> None:
    """Half of each step goes to the shortest: behind 100,000 tokens of one prompt, a short one is done soon."""
    assert prefill_of([prefill(0, 100_000), prefill(1, *[1000] * 40)], num_tokens=2000) == 0
    assert prefill_of([prefill(0, 100_000), prefill(1, *[1000] * 40)], num_tokens=100_000) == 1


def test_work_that_delays_others_counts() -> None:
    """Both are done with it at the same time; on one of them, five longer prompts wait for it."""
    loads = [prefill(0, 40_000), prefill(1, *[8000] * 5)]
    assert prefill_of(loads, num_tokens=3000) == 0


def test_a_port_without_sizes_is_judged_by_its_tokens() -> None:
    silent = [attrs.evolve(prefill(rank), num_queued_tokens=tokens) for rank, tokens in enumerate((9000, 3000))]
    assert prefill_of(silent) == 1


def test_ports_that_were_not_measured_count_as_the_others() -> None:
    new = prefill(2, cost=PrefillCost())
    assert prefill_of([prefill(0, 9000), prefill(1, 8000), new]) == 2
    assert prefill_of([prefill(0), attrs.evolve(new, queued=QueuedSizes.of([9000]))]) == 0
    assert decode_of([decode(0, 90), decode(1, 10, cost=DecodeCost())]) == 1
    assert decode_of([decode(0, 10), decode(1, 90, cost=DecodeCost())]) == 0


def test_the_decode_with_the_shortest_step_is_taken() -> None:
    slow = attrs.evolve(STEADY, step_s=0.044)
    assert decode_of([decode(0, 10, cost=slow), decode(1, 90)]) == 1
    assert decode_of([decode(0, 80), decode(1, 10)]) == 1
    granted = decode(0, 10, num_granted_requests=60, num_running_tokens=70_000)
    assert decode_of([granted, decode(1, 30)]) == 1


@pytest.mark.parametrize(
    "full",
    [
        {"num_waiting_requests": 1, "num_waiting_tokens": 10},
        {"num_running_requests": 128, "num_running_tokens": 5000},
        {"num_running_requests": 100, "num_granted_requests": 28},
        {"num_free_pages": 30, "num_cached_pages": 32},
    ],
    ids=["a line", "no place", "no place, granted", "no pages"],
)
def test_a_decode_where_it_would_wait_is_left_alone(full: dict[str, int]) -> None:
    assert decode_of([decode(0, **full), decode(1, 120)]) == 1
    assert dict(choose([prefill(0)], [decode(0, **full)]).score)["line_s"] >= policy.traffic_aware.line_s


def test_pages_that_a_decode_holds_already_need_not_be_free() -> None:
    tight = decode(0, num_free_pages=30, num_cached_pages=10)
    assert decode_of([tight, decode(1, 120)]) == 1
    assert decode_of([tight, decode(1, 120)], found_tokens={address(0): 2048}) == 0


def test_the_backlog_of_a_link_counts_and_pairs_out_of_reach_are_never_chosen() -> None:
    prefills, decodes = [prefill(0), prefill(1)], [decode(0), decode(1)]
    free = {(one, other): 0 for one in range(2) for other in range(2)}

    def links(backlog: dict[tuple[int, int], int]) -> tuple[Link, ...]:
        return tuple(
            Link(prefill=address(one), decode=address(other), bytes_per_s=1e9, backlog_bytes=num_bytes)
            for (one, other), num_bytes in backlog.items()
        )

    busy = {**free, (0, 0): 10**9, (0, 1): 10**9, (1, 0): 10**9}
    for ordinal in range(4):
        choice = choose(prefills, decodes, ordinal=ordinal, links=links(busy))
        assert (choice.prefill.rank, choice.decode.rank) == (1, 1)
        choice = choose(prefills, decodes, ordinal=ordinal, links=links({(1, 0): 10**9}))
        assert (choice.prefill.rank, choice.decode.rank) == (1, 0)
        assert dict(choice.score)["link_s"] == pytest.approx(1 + 0.1 * 4000 * 70272 / 1e9)
    shape = RequestShape(ordinal=0, num_prompt_tokens=9, num_output_tokens=0, max_new_tokens=9)
    strange = (Link(prefill=address(7), decode=address(8)),)
    assert policy.traffic_aware(attrs.evolve(shape, links=strange), prefills, decodes) is None


@given(st.data())
def test_it_chooses_what_its_score_says_whatever_the_order(data: st.DataObject) -> None:
    """The sum of the terms is within the slack of the least sum over all pairs."""
    sizes = st.lists(st.integers(1, 30_000), max_size=6)
    prefills = [prefill(rank, *data.draw(sizes)) for rank in range(3)]
    decodes = [decode(rank, data.draw(st.integers(0, 127))) for rank in range(3)]
    found = {address(rank): 64 * data.draw(st.integers(0, 60)) for rank in range(3)}
    links = [
        Link(prefill=p.address, decode=d.address, bytes_per_s=1e9, backlog_bytes=data.draw(st.integers(0, 10**9)))
        for p in prefills
        for d in decodes
    ]
    more: dict[str, Any] = {"found_tokens": found, "links": Links(data.draw(st.permutations(links)))}
    ordinal = data.draw(st.integers(0, 9))
    choice = choose(data.draw(st.permutations(prefills)), data.draw(st.permutations(decodes)), ordinal=ordinal, **more)
    alone = [sum(term for _, term in choose([p], [d], **more).score) for p in prefills for d in decodes]
    slack = policy.traffic_aware.prefill_slack_s + policy.traffic_aware.decode_slack_s
    assert sum(term for _, term in choice.score) <= min(alone) + slack + 1e-9


def test_differences_that_nobody_notices_are_ties() -> None:
    """Measured costs always differ a little; twenty requests must not all go to the port that seems 2 % faster."""
    nearly = attrs.evolve(FAST, token_s=FAST.token_s * 1.02)
    slower = attrs.evolve(STEADY, step_s=0.0205)
    pairs = [
        choose([prefill(0), prefill(1, cost=nearly)], [decode(0), decode(1, cost=slower)], ordinal=ordinal)
        for ordinal in range(20)
    ]
    for side in ("prefill", "decode"):
        assert 8 <= sum(getattr(choice, side).rank for choice in pairs) <= 12


@pytest.mark.parametrize("wrong", [{"work_weight": -1.0}, {"line_s": float("inf")}, {"pace_ratio": 0.5}])
def test_parameters_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(pd.ConfigError, match=next(iter(wrong))):
        policy.TrafficAware(**wrong)
