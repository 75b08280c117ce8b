"""Every term of the prediction decides where the others are equal, and the score tells all of them."""

from __future__ import annotations

import math
import random
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
from tests.unit.pairing.policy.test_by_load import address

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
    assert prefill_of([prefill(0, *[25_000] * 4), prefill(1, *[10_000] * 4)], num_tokens=100_000) == 1


def test_work_counts_where_many_wait() -> None:
    """Both are done with it at the same time. Where four prompts wait, more will come than where one does."""
    assert prefill_of([prefill(0, *[2000] * 4), prefill(1, 8000)], num_tokens=16_000) == 1


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


def prefill_terms(sizes: Sequence[int], queued: int, lacks: int, cost: PrefillCost) -> list[float]:
    """Return prefill_s, work_s and delay_s as the docstring has them. Prompts of as many bits as this one count as
    shorter and as longer by halves."""
    own_s, pace_s, bits = cost.seconds(lacks), cost.token_s + cost.step_s / cost.chunk_tokens, lacks.bit_length()
    work_s = (1 + min(4, len(sizes))) * own_s
    if not sizes:
        return [queued * pace_s + own_s, work_s, 0.0]
    alike = [size for size in sizes if size.bit_length() == bits]
    shorter = sum(size for size in sizes if size.bit_length() < bits) + sum(alike) // 2
    longer = sum(size.bit_length() > bits for size in sizes) + len(alike) / 2
    return [min(2 * shorter + lacks, sum(sizes)) * pace_s + own_s, work_s, longer * lacks * pace_s]


def decode_terms(load: DecodeLoad, num_tokens: int, lacks: int) -> list[float]:
    """Return line_s, step_s and pool_s."""
    there, most = load.num_running_requests + load.num_granted_requests, load.max_running_requests
    has_pages = lacks <= (load.num_free_pages + load.num_cached_pages) * load.page_size
    has_place = not load.num_waiting_requests and (there < most or not most)
    context = load.num_running_tokens + load.num_waiting_tokens + num_tokens
    together = there + load.num_waiting_requests + 1
    return [
        0.0 if has_pages and has_place else 5.0 * (load.num_waiting_requests + 1),
        load.cost.seconds(min(together, most) if most else together, context),
        0.02 * context / (load.num_total_pages * load.page_size),
    ]


def check_terms(rng: random.Random) -> None:
    prompt, output = 64 * rng.randint(1, 60), 64 * rng.randint(0, 20)
    num_tokens, sizes = prompt + output, [rng.randint(1, 8000) for _ in range(rng.randint(0, 8))]
    known = 64 * rng.randint(0, num_tokens // 64), 64 * rng.randint(0, num_tokens // 64)
    one = attrs.evolve(prefill(0, *sizes), num_queued_tokens=sum(sizes) or rng.randint(0, 9000))
    waiting, running, granted = rng.choice([0, 0, 0, 3]), rng.randint(0, 6), rng.randint(0, 2)
    other = decode(
        1,
        running,
        num_free_pages=rng.randint(0, 20),
        num_cached_pages=rng.randint(0, 10),
        num_waiting_requests=waiting,
        num_waiting_tokens=700 * waiting,
        num_granted_requests=granted,
        max_running_requests=rng.choice([0, 5, 8]),
    )
    link = Link(prefill=one.address, decode=other.address, bytes_per_s=1e9, backlog_bytes=rng.randint(0, 10**9))
    shape = RequestShape(
        ordinal=0,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        max_new_tokens=9,
        links=(link,),
        found_tokens={one.address: known[0], other.address: known[1]},
    )
    choice = policy.traffic_aware(shape, [one], [other])
    assert choice is not None
    lacks = num_tokens - known[1]
    expected = [
        *prefill_terms(sizes, one.num_queued_tokens, max(1, num_tokens - known[0]), FAST),
        (link.backlog_bytes + 0.1 * lacks * other.token_bytes) / link.bytes_per_s,
        *decode_terms(other, num_tokens, lacks),
    ]
    assert dict(choice.score) == pytest.approx(dict(zip(TERMS, expected, strict=True)))


def test_every_term_is_what_is_said_of_it() -> None:
    rng = random.Random(0)
    for _ in range(300):
        check_terms(rng)


def test_ports_that_are_about_as_fast_count_as_their_mean_and_slower_ones_as_themselves() -> None:
    faster = attrs.evolve(FAST, step_s=0.01, token_s=FAST.token_s * 1.2, chunk_tokens=2000)
    mean = PrefillCost(step_s=0.02, token_s=FAST.token_s * 1.1, chunk_tokens=8192)
    quick = DecodeCost(step_s=0.019, sequence_s=3e-4, token_s=4e-8)
    average = DecodeCost(step_s=0.0195, sequence_s=2e-4, token_s=3e-8)
    prefills, decodes = [prefill(0), prefill(1, cost=faster)], [decode(0, 10), decode(1, 10, cost=quick)]
    slow = prefill(2, cost=SLOW), decode(2, 10, cost=attrs.evolve(STEADY, step_s=0.08))
    for some, others in ((prefills, decodes), ([*prefills, slow[0]], [*decodes, slow[1]])):
        score = dict(choose(some, others).score)
        assert score["prefill_s"] == pytest.approx(mean.seconds(4000))
        assert score["step_s"] == pytest.approx(average.seconds(11, 14_000))
    near = attrs.evolve(slow[0], queued=QueuedSizes(), num_queued_tokens=0)
    links = tuple(Link(prefill=near.address, decode=address(rank)) for rank in range(3))
    assert dict(choose([*prefills, near], decodes, links=links).score)["prefill_s"] == pytest.approx(SLOW.seconds(4000))


def test_whether_a_decode_is_as_fast_is_judged_by_the_batches_that_they_run() -> None:
    """At 100 sequences of 1000 tokens one takes 1.4 times as long as the other, and alone twice as long."""
    heavy = DecodeCost(step_s=0.02, sequence_s=1e-4, token_s=1e-7)
    flat = DecodeCost(step_s=0.056, sequence_s=0.0, token_s=0.0)
    score = dict(choose([prefill(0)], [decode(0, 100, cost=heavy), decode(1, 100, cost=flat)]).score)
    assert score["step_s"] == pytest.approx(0.038 + 101 * 5e-5 + 104_000 * 5e-8)
    only = DecodeCost(step_s=0.0, sequence_s=1e-3, token_s=0.0)
    lone = [decode(0, cost=only), decode(1, cost=attrs.evolve(only, sequence_s=1.4e-3))]
    assert dict(choose([prefill(0)], lone).score)["step_s"] == pytest.approx(1.2e-3)


def test_equal_pairs_have_all_their_turns() -> None:
    prefills, decodes = [prefill(rank) for rank in range(2)], [decode(rank) for rank in range(2)]
    chosen = [choose(prefills, decodes, ordinal=ordinal) for ordinal in range(4)]
    assert len({(choice.prefill, choice.decode) for choice in chosen}) == 4


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
