"""Which request is next, what runs in a step, and which sequence gets pages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.errors import ConfigError
from pdinfer.scheduling.rules import (
    PATIENCE_S,
    WORTH_A_STEP,
    choose_victim,
    chunk_beside,
    due_at,
    is_late,
    learn_growth,
    may_grant,
    plan_chunk,
    queueing_s,
    share_a_step,
    withheld_pages,
)

LENGTHS = st.lists(st.integers(1, 300), max_size=12)
CLASSED = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), max_size=12).map(sorted)


def split(classed: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the lengths and their classes."""
    return [length for _, length in classed], [kind for kind, _ in classed]


@given(CLASSED, st.integers(1, 400), st.integers(1, 1000))
def test_a_chunk_fills_its_budget_class_by_class(
    classed: list[tuple[int, int]], chunk_size: int, max_tokens: int
) -> None:
    remaining, classes = split(classed)
    counts = plan_chunk(remaining, classes, chunk_size=chunk_size, max_tokens=max_tokens)
    assert sum(counts) == min(chunk_size, sum(remaining))
    assert all(0 <= count <= length for count, length in zip(counts, remaining, strict=True))
    for before in (1, 2):
        first = [index for index, kind in enumerate(classes) if kind < before]
        assert sum(counts[index] for index in first) == min(chunk_size, sum(remaining[index] for index in first))


@given(LENGTHS.filter(bool), st.integers(1, 400))
def test_the_first_in_line_gets_half_of_a_chunk_or_all_it_needs(remaining: list[int], chunk_size: int) -> None:
    counts = plan_chunk(remaining, [0] * len(remaining), chunk_size=chunk_size, max_tokens=1)
    assert 2 * counts[0] >= min(chunk_size, 2 * remaining[0])


def steps_until_done(index: int, remaining: list[int], chunk_size: int, newcomers: Iterator[int]) -> int:
    """Return the number of steps until a prompt is computed while one more joins the queue at each step."""
    remaining = list(remaining)
    for number in count(1):
        remaining.append(next(newcomers))
        counts = plan_chunk(remaining, [0] * len(remaining), chunk_size=chunk_size, max_tokens=1)
        remaining = [length - done for length, done in zip(remaining, counts, strict=True)]
        if not remaining[index]:
            return number
        index -= sum(not length for length in remaining[:index])
        remaining = [length for length in remaining if length]
    raise AssertionError


@given(LENGTHS.filter(bool), st.integers(1, 100), st.lists(st.integers(1, 300), min_size=1), st.data())
def test_nobody_waits_longer_than_for_those_before_it_at_half_speed(
    remaining: list[int], chunk_size: int, newcomers: list[int], data: st.DataObject
) -> None:
    """It does not matter how many shorter ones keep coming."""
    index = data.draw(st.integers(0, len(remaining) - 1))
    steps = steps_until_done(index, remaining, chunk_size, cycle(newcomers))
    half = chunk_size - chunk_size // 2
    assert steps <= -(-sum(remaining[: index + 1]) // half)


@given(st.lists(st.integers(1, 10_000), max_size=12), st.integers(1, 60), st.integers(2, 100))
def test_a_short_prompt_waits_for_no_long_one(extra: list[int], length: int, chunk_size: int) -> None:
    """However many come before it: those that are longer by more than what they are served meanwhile."""
    steps = -(-length // (chunk_size // 2))
    longer = [length + steps * chunk_size + more for more in extra]
    assert steps_until_done(len(longer), [*longer, length], chunk_size, repeat(max(longer, default=length))) <= steps


@given(CLASSED, st.integers(1, 400))
def test_whole_prompts_fit_in_the_budget_beside_the_first(classed: list[tuple[int, int]], max_tokens: int) -> None:
    remaining, classes = split(classed)
    counts = plan_chunk(remaining, classes, chunk_size=-1, max_tokens=max_tokens)
    assert all(count in (0, length) for count, length in zip(counts, remaining, strict=True))
    assert counts[:1] == remaining[:1]
    assert sum(map(bool, counts)) <= 1 or sum(counts) <= max_tokens
    left_out = [length for count, length in zip(counts, remaining, strict=True) if not count]
    assert all(sum(counts) + length > max_tokens for length in left_out)
    for kind in set(classes):
        _, *others = [index for index, one in enumerate(classes) if one == kind]
        longest = max((counts[index] for index in others), default=0)
        assert all(counts[index] or remaining[index] >= longest for index in others)


TIMES = st.floats(0, 1e6)
DEADLINES = st.none() | st.floats(0, 1e6)


@given(TIMES, DEADLINES, st.floats(0, 1e3), DEADLINES)
def test_nobody_is_overtaken_after_a_while(
    submitted_at: float, deadline_at: float | None, later_s: float, other: float | None
) -> None:
    newcomer_at = submitted_at + PATIENCE_S + later_s
    newcomer = due_at(newcomer_at, None if other is None else newcomer_at + other)
    assert due_at(submitted_at, deadline_at) <= newcomer


def test_an_earlier_deadline_comes_first_and_without_one_age_decides() -> None:
    assert due_at(5.0, 7.0) < due_at(0.0, 8.0) < due_at(0.0, None) < due_at(1.0, None)
    assert due_at(0.0, 1e9) == due_at(0.0, None), "a deadline never puts back"


def test_who_is_late() -> None:
    assert not is_late(None, 10**9, now=0.0, tokens_per_s=1.0)
    assert not is_late(12.0, 200, now=10.0, tokens_per_s=100.0)
    assert is_late(12.0, 201, now=10.0, tokens_per_s=100.0)
    assert not is_late(12.0, 10**9, now=10.0, tokens_per_s=0.0), "nothing was measured"
    assert is_late(12.0, 1, now=12.1, tokens_per_s=0.0)


PAGES = st.integers(0, 100)


@given(needed=PAGES, free=PAGES, watermark=PAGES, others=st.integers(1, 5))
def test_a_grant_leaves_the_watermark_to_the_others(needed: int, free: int, watermark: int, others: int) -> None:
    assert may_grant(needed, available=free, watermark=watermark, others=others) == (free - needed >= watermark)


@given(needed=PAGES, free=PAGES, watermark=PAGES)
def test_alone_a_sequence_may_take_all(needed: int, free: int, watermark: int) -> None:
    assert may_grant(needed, available=free, watermark=watermark, others=0) == (needed <= free)


SEQUENCES = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(1, 3), st.integers(0, 50)), min_size=1, unique_by=lambda item: item[2]
)


@given(SEQUENCES)
def test_the_victim_is_the_last_of_those_with_the_fewest_attempts_of_the_lowest_priority(
    sequences: list[tuple[int, int, int]],
) -> None:
    priority, attempts, arrival = sequences[choose_victim(sequences)]
    assert priority == min(one[0] for one in sequences)
    assert attempts == min(one[1] for one in sequences if one[0] == priority)
    assert arrival == max(one[2] for one in sequences if one[:2] == (priority, attempts))


@given(st.lists(st.integers(0, 5)))
def test_growth_is_learnt_from_retractions_and_forgotten(retractions: list[int]) -> None:
    share = 0.0
    for num_retracted in retractions:
        before, share = share, learn_growth(share, num_retracted=num_retracted)
        assert 0 <= share <= 1
        assert share >= before if num_retracted else share <= before
        assert not num_retracted or share >= 0.1
    half = learn_growth(share, num_retracted=0)
    for _ in range(255):
        half = learn_growth(half, num_retracted=0)
    assert half == pytest.approx(max(0.0, share - 0.5))
    for _ in range(256):
        half = learn_growth(half, num_retracted=0)
    assert half == 0


@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 10_000))
def test_pages_beyond_the_most_tokens_are_withheld(num_pages: int, page_size: int, most: int) -> None:
    if most < page_size:
        with pytest.raises(ConfigError, match=f"max_total_tokens is {most} and a page holds {page_size}"):
            withheld_pages(num_pages, page_size=page_size, max_total_tokens=most)
        return
    withheld = withheld_pages(num_pages, page_size=page_size, max_total_tokens=most)
    assert 0 <= withheld < num_pages
    assert (num_pages - withheld) * page_size <= most
    assert not withheld or (num_pages - withheld + 1) * page_size > most
    assert withheld_pages(num_pages, page_size=page_size, max_total_tokens=None) == 0


def test_the_slowest_stage_tells_how_long_a_line_takes() -> None:
    assert queueing_s() == queueing_s((0, 0.0)) == 0.0
    assert queueing_s((100, 50.0), (30, 10.0)) == 3.0
    assert queueing_s((100, 50.0), (0, 0.0)) == 2.0
    assert queueing_s((100, 50.0), (1, 0.0)) is None


# -- chunks beside decode ---------------------------------------------------------------------------------------------

COSTS = (0.05, 0.002)


def beside(decoding_s: float, target_itl_s: float, **other: object) -> int:
    known = {"chunk_size": 4096, "costs": COSTS, "tokens_per_s": 500.0, **other}
    return chunk_beside(decoding_s, target_itl_s=target_itl_s, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decoding_s", "target_itl_s", "num_tokens"),
    [
        (0.25, 2.0, 850),  # 1.75 s are left, less 0.05 s
        (0.0, 1.0, 475),  # what decode takes is not known yet
        (1.5, 2.0, 725),  # prefill has as much time as decode
        (0.1, 0.01, int(WORTH_A_STEP * 25)),  # and as much as makes a step worth the while
        (0.1, 100.0, 4096),
    ],
)
def test_a_chunk_beside_decode_fits_its_time(decoding_s: float, target_itl_s: float, num_tokens: int) -> None:
    assert abs(beside(decoding_s, target_itl_s) - num_tokens) <= 1


def test_a_chunk_beside_decode_is_whole_until_a_step_was_measured_and_never_empty() -> None:
    assert beside(0.1, 0.5, tokens_per_s=0.0) == 4096
    assert beside(0.1, 0.5, chunk_size=16) == 16
    assert beside(0.0, 1e-9, costs=(0.0, 0.0)) == 1


def test_a_chunk_beside_decode_is_no_larger_than_the_best_speed_allows() -> None:
    """Steps of one size do not tell what a token costs."""
    assert beside(0.0, 1.0, costs=(0.1, 0.0)) == 450


def test_who_must_run_alone_has_turns_of_its_own() -> None:
    rows = ["a", "B", "c", "D"]
    turns = [share_a_step(rows, str.isupper, num_steps=number) for number in range(6)]
    assert turns == [["B"], ["D"], ["a", "c"]] * 2
    assert share_a_step(["B"], str.isupper, num_steps=7) == ["B"]
    assert share_a_step([], str.isupper, num_steps=7) == []
    assert share_a_step(quiet := ["a", "c"], str.isupper, num_steps=7) is quiet
