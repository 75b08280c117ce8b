"""Step costs are learned from steps, and follow an engine that changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.scheduling.rules import LEAST_STEPS, StepCosts


def prefill_s(num_tokens: float) -> float:
    return 0.03 + num_tokens / 14000


def taught(*sizes: float, speed: float = 1.0, costs: StepCosts | None = None) -> StepCosts:
    costs = costs or StepCosts(2)
    for size in sizes:
        costs.add((1.0, size), prefill_s(size) / speed)
    return costs


def seconds(costs: StepCosts, *terms: float) -> float:
    return sum(weight * term for weight, term in zip(costs.weights, terms, strict=True))


def test_a_few_steps_say_nothing() -> None:
    """An engine whose first step happened to be slow must be given others."""
    assert StepCosts(3).weights == (0.0, 0.0, 0.0)
    assert LEAST_STEPS == 8
    costs = taught(*[512.0] * 7)
    assert costs.weights == (0.0, 0.0)
    assert seconds(taught(512.0, costs=costs), 1.0, 512.0) == pytest.approx(prefill_s(512))


def test_sizes_that_varied_tell_the_terms_apart() -> None:
    costs = taught(*[100, 8192, 4000, 700] * 5)
    assert costs.weights == pytest.approx((0.03, 1 / 14000), rel=1e-6)
    decode = StepCosts(3)
    for count, context in [(1, 400), (20, 9000), (64, 200_000), (30, 150_000), (5, 70_000)] * 4:
        decode.add((1.0, count, context), 0.02 + 1e-4 * count + 2e-8 * context)
    assert decode.weights == pytest.approx((0.02, 1e-4, 2e-8), rel=1e-4)


def test_sizes_that_did_not_vary_still_give_their_own_seconds() -> None:
    assert seconds(taught(*[512.0] * 30), 1.0, 512.0) == pytest.approx(prefill_s(512))
    assert seconds(taught(*[4096.0] * 9), 1.0, 4096.0) == pytest.approx(prefill_s(4096))


@pytest.mark.parametrize("speed", [0.5, 1 / 2.2, 0.1, 2.0])
def test_a_change_of_pace_is_seen_within_20_steps(speed: float) -> None:
    sizes = [100, 8192, 4000, 700] * 50
    costs = taught(*[100, 8192, 4000, 700] * 5, speed=speed, costs=taught(*sizes))
    assert seconds(costs, 1.0, 4096.0) == pytest.approx(prefill_s(4096) / speed, rel=0.1)


def test_one_pause_does_not_make_a_slow_engine() -> None:
    costs = taught(*[100, 8192, 4000, 700] * 50)
    costs.add((1.0, 4096.0), 30.0)
    assert seconds(costs, 1.0, 4096.0) < 2 * prefill_s(4096)
    taught(*[100, 8192, 4000, 700] * 5, costs=costs)
    assert seconds(costs, 1.0, 4096.0) == pytest.approx(prefill_s(4096), rel=0.1)


def test_first_uses_are_forgotten() -> None:
    costs = StepCosts(2)
    costs.add((1.0, 4096.0), 40.0)
    taught(*[4096, 8192, 100] * 3, costs=costs)
    assert seconds(costs, 1.0, 4096.0) == pytest.approx(prefill_s(4096), rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), max_size=40))
def test_weights_are_never_negative(steps: list[tuple[int, float]]) -> None:
    costs = StepCosts(2)
    for size, took_s in steps:
        costs.add((1.0, float(size)), took_s)
        assert all(0 <= weight < 1e6 for weight in costs.weights)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), max_size=40))
def test_whether_weights_were_read_changes_none(steps: list[tuple[int, float]]) -> None:
    read, unread = StepCosts(2), StepCosts(2)
    for size, took_s in steps:
        unread.add((1.0, float(size)), took_s)
        read.add((1.0, float(size)), took_s)
        assert len(read.weights) == 2
    assert read.weights == unread.weights
