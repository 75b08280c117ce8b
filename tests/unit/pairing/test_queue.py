"""The queue: which request is next, which one gives way, and what share a tenant gets. No engine, no clock."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.pairing.queue import MAX_TENANTS, Queue, Shares, gives_way
from pdinfer.pairing.request import TrackedRequest
from pdinfer.scheduling.rules import OLDEST_EVERY, PATIENCE_S, forecast_tokens


def tracked(name: str, *, at: float = 0.0, **more: object) -> TrackedRequest:
    sampling = pd.SamplingParams(max_new_tokens=1, seed=0)
    asked = attrs.evolve(pd.Request(request_id=name, prompt=(1, 2, 3), sampling=sampling), **more)
    return TrackedRequest.of(asked, at, None, bytes)


def queue_of(*requests: TrackedRequest, fair_share: bool = False) -> Queue:
    queue = Queue(fair_share=fair_share)
    for one in requests:
        queue.put(one)
    return queue


def served(queue: Queue, count: int, *, now: float = 0.0) -> list[str]:
    """Return who is served when there is one place at a time."""
    names = []
    for _ in range(count):
        first = next(queue.in_turn(now))
        queue.serve(first)
        names.append(first.request_id)
    return names


def test_everybody_is_asked_once_whoever_is_served() -> None:
    queue = queue_of(*(tracked(str(number), priority=number % 3) for number in range(9)))
    asked = []
    for one in queue.in_turn(1e6):
        asked.append(one.request_id)
        if len(asked) % 2:
            queue.serve(one)
    assert sorted(asked) == list("012345678")
    assert len(queue) == 4


def test_the_oldest_has_one_turn_in_so_many_and_only_when_it_has_waited_long() -> None:
    for now, expected in ((PATIENCE_S, []), (PATIENCE_S + 0.1, [OLDEST_EVERY - 1, 2 * OLDEST_EVERY - 1])):
        old = [tracked(name, priority=-5) for name in ("old", "older")]
        high = [tracked(str(number), at=now, priority=5) for number in range(40)]
        order = served(queue_of(*old, *high), 2 * OLDEST_EVERY, now=now)
        assert [order.index(one.request_id) for one in old if one.request_id in order] == expected


def test_when_the_oldest_cannot_go_its_turn_is_the_next_ones() -> None:
    old = [tracked(name, priority=-5) for name in ("cannot", "can")]
    queue = queue_of(*old, *(tracked(str(number), at=40.0, priority=5) for number in range(40)))
    served(queue, OLDEST_EVERY - 1, now=40.0)
    turns = queue.in_turn(40.0)
    assert next(turns) is old[0]
    assert next(turns) is old[1]


@given(st.lists(st.tuples(st.integers(-2, 2), st.floats(0, 100)), min_size=1, max_size=30), st.integers(-3, 3))
def test_who_gives_way_is_the_youngest_of_the_lowest(requests: list[tuple[int, float]], priority: int) -> None:
    made = [tracked(str(i), at=at, priority=own) for i, (own, at) in enumerate(sorted(requests, key=lambda t: t[1]))]
    found = gives_way(made, priority)
    below = [one for one in made if one.request.priority < priority]
    if not below:
        assert found is None
        return
    lowest = min(one.request.priority for one in below)
    assert found is [one for one in below if one.request.priority == lowest][-1]


@pytest.mark.parametrize("big", [1, 50])
def test_tenants_have_the_same_share_of_tokens(big: int) -> None:
    greedy = [tracked(f"g{number}", prompt=(1,) * big, cache_salt=b"greedy") for number in range(60)]
    modest = [tracked(f"m{number}", prompt=(1,), cache_salt=b"modest") for number in range(60)]
    order = served(queue_of(*greedy, *modest, fair_share=True), 52)
    had = {name: sum((big if name == "g" else 1) + 1 for one in order if one[0] == name) for name in "gm"}
    assert abs(had["g"] - had["m"]) <= big + 1


def test_who_was_away_has_saved_up_nothing() -> None:
    queue = queue_of(*(tracked(f"a{number}", cache_salt=b"a") for number in range(20)), fair_share=True)
    served(queue, 10)
    for number in range(20):
        queue.put(tracked(f"b{number}", at=1.0, cache_salt=b"b"))
    order = served(queue, 10)
    assert sum(name[0] == "a" for name in order) in (4, 5)


def test_priority_goes_before_shares_and_shares_before_age() -> None:
    queue = queue_of(
        *(tracked(f"a{number}", cache_salt=b"a") for number in range(3)),
        tracked("b", at=5.0, cache_salt=b"b"),
        tracked("high", at=9.0, cache_salt=b"a", priority=1),
        fair_share=True,
    )
    assert served(queue, 5) == ["high", "b", "a0", "a1", "a2"]


def test_shares_of_tenants_without_end_take_bounded_memory() -> None:
    shares = Shares()
    for number in range(5 * MAX_TENANTS):
        shares.look([str(number).encode()])
        shares.add(str(number).encode(), 1)
    shares.add(b"heavy", 1 << 40)
    for number in range(MAX_TENANTS):
        shares.add(b"x%d" % number, 1)
    assert len(shares) <= MAX_TENANTS
    assert shares.of(b"heavy") >= 1 << 40


def test_a_tenant_is_charged_what_its_requests_are_expected_to_use() -> None:
    limit = pd.SamplingParams(max_new_tokens=100_000, seed=0)
    queue = queue_of(
        *(tracked(f"a{n}", at=n, cache_salt=b"a", sampling=limit, expected_new_tokens=1) for n in range(3)),
        *(tracked(f"b{n}", at=n + 0.5, cache_salt=b"b") for n in range(3)),
        fair_share=True,
    )
    assert served(queue, 6) == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize(("expected", "left"), [(None, 8), (3, 3), (100, 8), (0, 0)])
def test_a_forecast_is_never_above_the_limit_nor_below_what_came(expected: int | None, left: int) -> None:
    sampling = pd.SamplingParams(max_new_tokens=10, seed=0)
    one = tracked("a", sampling=sampling, expected_new_tokens=expected, output=(7, 7))
    assert forecast_tokens(one.request) == 3 + min(10, 10 if expected is None else expected)
    assert one.to_generate == max(0, forecast_tokens(one.request) - 5)
    assert left >= one.to_generate
