"""Joined cases: none is lost, and one that fails says which it was."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest

from tests.joined import FEW, for_each, pairs_each_time, spread

NUMBERS = [1, 2]
TARGET = SimpleNamespace(patched=0)


def node_of(*few: tuple[int, int], marked: str = "", profile: str | None = None) -> SimpleNamespace:
    """Return what stands for a test in a run of tests that are marked so, with this profile of Hypothesis."""
    stash = pytest.Stash()
    for each in few:
        stash[FEW] = each
    config = SimpleNamespace(option=SimpleNamespace(markexpr=marked), getoption=lambda *_: profile)
    return SimpleNamespace(node=SimpleNamespace(stash=stash), config=config)


def ran_of(
    decorate: Callable[[Callable[..., None]], Callable[..., None]], *few: tuple[int, int], **how: str
) -> list[tuple[object, ...]]:
    ran: list[tuple[object, ...]] = []

    def test(**given: int) -> None:
        ran.append(tuple(given.values()))

    decorate(test)(request=node_of(*few, **how))
    return ran


def test_every_combination_runs_in_one_case() -> None:
    def both(test: Callable[..., None]) -> Callable[..., None]:
        return for_each(("a", "b"), [(1, 2), (3, 4)])(for_each("c", "xy")(test))

    assert ran_of(both) == [(1, 2, "x"), (1, 2, "y"), (3, 4, "x"), (3, 4, "y")]
    assert ran_of(both, (2, 0)) == [(3, 4, "y"), (1, 2, "y")]
    assert ran_of(both, (2, 1)) == [(3, 4, "x"), (1, 2, "x")]
    assert sorted(ran_of(both, (9, 3))) == sorted(ran_of(both))


def test_where_a_test_says_so_any_two_values_meet_each_time_and_all_combinations_run_in_the_long_run() -> None:
    def three(test: Callable[..., None]) -> Callable[..., None]:
        return pairs_each_time(for_each("a", (1, 2))(for_each(("b", "c"), [*product((1, 2, 3), (1, 2))])(test)))

    ran = ran_of(three, marked="not full")
    assert len(ran) == 6
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(each[one], each[other]) for each in ran} == {(each[one], each[other]) for each in ran_of(three)}
    assert len(ran_of(three)) == len(ran_of(three, marked="not full", profile="whole")) == 12


def test_a_few_are_spread_from_the_last_on() -> None:
    assert spread(range(10), 3) == [9, 6, 3]
    assert sorted(spread(range(10), 10, shift=4)) == [*range(10)]
    assert sorted(spread(range(3), 10)) == [0, 1, 2]


def test_a_case_that_fails_is_named() -> None:
    @for_each("number", NUMBERS)
    def fails(number: int) -> None:
        assert number != 2

    with pytest.raises(AssertionError) as raised:
        fails(request=node_of())
    assert raised.value.__notes__ == ["with number=2"]


def test_a_case_that_would_skip_the_others_fails() -> None:
    @for_each("number", NUMBERS)
    def skips(number: int) -> None:
        if number == 2:
            pytest.skip("not today")

    with pytest.raises(pytest.fail.Exception, match=r"must not be skipped: \{'number': 2\}: not today"):
        skips(request=node_of())


@for_each("number", NUMBERS)
@pytest.mark.parametrize("more", [10])
def test_what_one_case_patches_no_other_has(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, more: int, number: int
) -> None:
    """Beside cases of pytest and fixtures."""
    assert "more" in request.fixturenames
    assert TARGET.patched == 0
    monkeypatch.setattr(TARGET, "patched", number + more)
