"""What a request would get, and the door that refuses it. Loads are made up, and so is the time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.config import SLO
from pdinfer.pairing.policy import TrafficAware
from pdinfer.pairing.promise import (
    FEW_ANSWERS,
    LATE_ONE_IN,
    MAX_CLASSES,
    MAX_WEIGHT,
    MOST_LATE,
    Answers,
    Coming,
    Door,
    predict,
)
from pdinfer.stats import DecodeCost, DecodeLoad, Links, PrefillCost, PrefillLoad
from pdinfer.types import Link, RequestShape
from tests.unit.pairing.policy.test_traffic_aware import decode, prefill

KIND = 0, b""
COST = PrefillCost(step_s=0.0, token_s=1e-3, chunk_tokens=1000)
SECOND = 1000
"""The tokens that a prefill of COST computes in a second."""


def shape(num_tokens: int = SECOND, **more: Any) -> RequestShape:
    return RequestShape(
        ordinal=0, num_prompt_tokens=num_tokens, num_output_tokens=0, **{"max_new_tokens": 10_000, **more}
    )


def queue(*sizes: int, rank: int = 0, **more: Any) -> PrefillLoad:
    return attrs.evolve(prefill(rank, *sizes, cost=COST), **more)


def quick(rank: int = 9, **more: Any) -> DecodeLoad:
    """Return a decode whose steps take a millisecond, whatever runs in them."""
    return decode(rank, **{"cost": DecodeCost(step_s=1e-3), "num_free_pages": 100_000, **more})


def door(
    prefills: Sequence[PrefillLoad] = (),
    decodes: Sequence[DecodeLoad] = (),
    *,
    coming: Iterable[Coming] = (),
    links: Links | None = None,
    answers: int = 0,
    **limits: float,
) -> Door:
    made = Door(SLO(**(limits or {"ttft_s": 8.0})))
    for _ in range(FEW_ANSWERS if answers else 0):
        made.answers.note(KIND, answers)
    by_address = [{load.address: load for load in side} for side in (prefills, decodes or [quick()])]
    made.look(by_address[0], by_address[1], Links() if links is None else links, coming, 0.0)  # type: ignore[arg-type]
    return made


def takes(at: Door, *, of: RequestShape | None = None, now: float = 0.0, expected: int | None = None) -> bool:
    try:
        at.take(of or shape(), KIND, expected, now)
    except pd.Overloaded:
        return False
    return True


def refusal(at: Door, of: RequestShape | None = None) -> pd.Overloaded:
    with pytest.raises(pd.Overloaded) as refused:
        at.take(of or shape(), KIND, None, 0.0)
    return refused.value


# -- the prediction ---------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 50_000), max_size=12),
    running=st.integers(0, 200),
    waiting=st.integers(0, 50),
    num_tokens=st.integers(1, 100_000),
    found=st.integers(0, 2000),
    backlog=st.integers(0, 10**10),
)
def test_routing_and_prediction_have_the_same_terms(
    sizes: list[int], running: int, waiting: int, num_tokens: int, found: int, backlog: int
) -> None:
    source = prefill(0, *sizes)
    target = decode(1, running, num_waiting_requests=waiting, num_waiting_tokens=700 * waiting)
    link = Link(prefill=source.address, decode=target.address, bytes_per_s=25e9, backlog_bytes=backlog)
    at = {source.address: min(found, num_tokens)}
    asked = shape(num_tokens, found_tokens=at, links=(link,))
    choice = TrafficAware()(asked, [source], [target])
    assert choice is not None
    score, told = dict(choice.score), predict(asked, source, target, link)
    assert told.queue_s + told.own_s == pytest.approx(score["prefill_s"])
    assert (told.own_s * (1 + min(4, len(sizes))), told.step_s) == pytest.approx((score["work_s"], score["step_s"]))
    assert told.link_s == pytest.approx(score["link_s"])
    assert told.ttft_s >= told.queue_s + told.own_s + told.link_s


def test_a_line_moves_as_fast_as_answers_end() -> None:
    """128 run, of answers of 400 tokens at 10 ms: one ends every 31 ms, and three have to."""
    full = quick(num_running_requests=128, num_waiting_requests=2, cost=DecodeCost(step_s=0.01))
    told = predict(shape(), queue(), full, None, answer_tokens=400)
    assert told.line_s == pytest.approx(3 / 128 * 400 * 0.01)
    drafting = attrs.evolve(full, accept_length=2.0)
    assert predict(shape(), queue(), drafting, None, answer_tokens=400).line_s == pytest.approx(told.line_s / 2)
    assert predict(shape(), queue(), full, None).line_s == 0.0


def test_who_waits_with_room_for_all_waits_for_no_answer() -> None:
    told = predict(shape(), queue(), quick(num_running_requests=3, num_waiting_requests=9), None, answer_tokens=400)
    assert told.line_s == 0.0


def test_pages_are_waited_for_like_slots() -> None:
    """No page is left, and 30 answers hold 30,000 tokens: two thirds of them have to end for 20,000 more."""
    full = quick(num_free_pages=0, num_running_requests=30, num_running_tokens=30_000)
    told = predict(shape(20_000), queue(), full, None, answer_tokens=300)
    assert told.line_s == pytest.approx(2 / 3 * 300 * 1e-3)


def test_those_who_come_at_once_to_an_idle_decode_hold_it_before_anybody_waits() -> None:
    """One of the 128 that will have its slots has to end for one more, or a tenth of what will be in its pages."""
    idle = quick(num_free_pages=6000, num_waiting_requests=128)
    assert predict(shape(), queue(), idle, None, answer_tokens=400).line_s == pytest.approx(1 / 128 * 400 * 1e-3)
    pages = attrs.evolve(idle, num_waiting_requests=5, num_waiting_tokens=6000 * 64)
    assert predict(shape(38_400), queue(), pages, None, answer_tokens=400).line_s == pytest.approx(0.1 * 400 * 1e-3)
    withheld = quick(num_free_pages=0)  # by rooms whose writers have not stopped
    assert predict(shape(38_400), queue(), withheld, None, answer_tokens=400).line_s == pytest.approx(0.1 * 400 * 1e-3)


def test_line_and_queue_pass_at_the_same_time() -> None:
    full = quick(num_running_requests=128, num_waiting_requests=127)
    told = predict(shape(), queue(4 * SECOND), full, None, answer_tokens=3000)
    assert (told.line_s, told.queue_s) == pytest.approx((3.0, 1.0))
    assert told.ttft_s == pytest.approx(3.0 + 1.0 + 2 * told.step_s)


# -- the door ---------------------------------------------------------------------------------------------------------


def test_a_request_that_would_miss_is_refused_with_the_time_when_it_would_not() -> None:
    """9 s of equal prompts are ahead, and its own takes a second: it is 2 s too early for 8 s."""
    at = door([queue(*[SECOND] * 9)], ttft_s=8.0)
    error = refusal(at, shape(1023))
    assert "first token would come after about 10 s, and may take 8 s" in str(error)
    assert error.retry_after_s == pytest.approx(9.0 + 1.023 + 0.002 - 8.0, abs=0.02)
    assert takes(door([queue(*[SECOND] * 6)], ttft_s=8.0), of=shape(1023))


def test_long_prompts_have_more_time() -> None:
    busy = [queue(*[SECOND] * 9)]
    assert not takes(door(busy, ttft_s=8.0, ttft_per_token_s=1e-3), of=shape(1023))
    assert takes(door(busy, ttft_s=8.0, ttft_per_token_s=15e-3), of=shape(1023))


def test_a_burst_between_two_steps_is_counted() -> None:
    at = door([queue(SECOND), queue(SECOND, rank=1)], ttft_s=8.0)
    assert [takes(at, of=shape(1023)) for _ in range(20)] == [True] * 12 + [False] * 8


def test_loads_that_a_door_was_shown_stay_as_they_are() -> None:
    prefills, decodes = [queue(SECOND)], [quick()]
    at = door(prefills, decodes)
    assert [takes(at), takes(at, of=shape(priority=1))] == [True, True]
    assert (prefills, decodes) == ([queue(SECOND)], [quick()])


def test_what_is_found_in_pages_is_not_computed() -> None:
    busy = queue(*[SECOND] * 6)
    assert not takes(door([busy], ttft_s=8.0), of=shape(8 * SECOND))
    assert takes(door([busy], ttft_s=8.0), of=shape(8 * SECOND, found_tokens={busy.address: 7 * SECOND}))


def test_tokens_that_come_too_slowly_are_refused_until_enough_answers_end() -> None:
    """With it a step takes 51 ms, and may take 40: a fifth of the batch has to end, of answers that take 5 s."""
    slow = quick(50, num_running_requests=50, cost=DecodeCost(sequence_s=1e-3))
    error = refusal(door([queue()], [slow], answers=100, tpot_s=0.04))
    assert "tokens would come every 0.051 s, and may take 0.04 s" in str(error)
    assert error.retry_after_s == pytest.approx((0.051 - 0.04) / 0.051 * 100 * 0.051)
    assert refusal(door([queue()], [slow], tpot_s=0.04)).retry_after_s == pytest.approx(0.051)  # nothing ends before
    assert takes(door([queue()], [attrs.evolve(slow, num_running_requests=38)], answers=100, tpot_s=0.04))


def test_a_growing_context_counts_by_what_answers_take() -> None:
    """Its context grows by half of the answer on average, and a token of it costs 20 us in each step."""
    reading = quick(num_running_requests=1, cost=DecodeCost(token_s=20e-6))
    assert takes(door([queue()], [reading], answers=100, tpot_s=0.04))
    assert not takes(door([queue()], [reading], answers=3000, tpot_s=0.04))
    assert takes(door([queue()], [reading], answers=3000, tpot_s=0.04), expected=100)
    assert takes(door([queue()], [reading], answers=3000, tpot_s=0.04), of=shape(max_new_tokens=100))


def test_what_nobody_else_delays_is_taken_however_slow() -> None:
    """Waiting would not help, and a port that was slow once would never be measured again."""
    assert takes(door([queue()], ttft_s=0.1))
    assert takes(door([queue()], [quick(cost=DecodeCost(step_s=9.0))], tpot_s=0.04))
    assert not takes(door([queue(SECOND)], ttft_s=0.1))


def test_ports_without_a_measured_speed_take_all() -> None:
    unmeasured = attrs.evolve(queue(*[SECOND] * 99), cost=PrefillCost())
    assert takes(door([unmeasured], [quick(num_running_requests=128, cost=DecodeCost())], answers=900, ttft_s=1.0))
    assert takes(Door(SLO(ttft_s=1.0)))


def test_without_an_answer_so_far_no_line_is_held_against_a_request() -> None:
    full = quick(num_running_requests=128, num_waiting_requests=99, cost=DecodeCost(step_s=0.01))
    assert takes(door([queue()], [full], ttft_s=2.0))
    assert not takes(door([queue()], [full], answers=1000, ttft_s=2.0))


def test_a_port_may_have_done_a_step_since_it_was_seen() -> None:
    """It is 0.9 or 1.9 s too early, and a step takes one, whatever the time."""
    for queued, now, age_s, taken in ((9, 99.0, None, False), (8, 0.5, None, False), (8, 1.5, None, True)):
        at = door([queue(*[SECOND] * queued, step_age_s=age_s)], ttft_s=8.0)
        assert takes(at, of=shape(900), now=now) == taken
    assert takes(door([queue(*[SECOND] * 8, step_age_s=1.5)], ttft_s=8.0), of=shape(900))


def test_one_in_a_hundred_may_be_late() -> None:
    """Whoever follows ten prompts of a second would miss the limit of eight."""
    idle, busy = queue(), queue(*[SECOND] * 10)
    at = door([busy])
    assert not takes(at)
    for num_taken, num_late in ((LATE_ONE_IN, 1), (LATE_ONE_IN - 1, 0), (1, 0), (20 * LATE_ONE_IN, MOST_LATE)):
        at.look({idle.address: idle}, {quick().address: quick()}, Links(), (), 0.0)
        assert all(takes(at, of=shape(1)) for _ in range(num_taken))
        at.look({busy.address: busy}, {quick().address: quick()}, Links(), (), 0.0)
        assert [takes(at) for _ in range(num_late + 1)] == [True] * num_late + [False]


def test_a_high_priority_waits_for_its_own_kind_alone() -> None:
    busy, target = queue(*[SECOND] * 20), quick(num_running_requests=128, num_waiting_requests=20)
    low = [Coming(0, SECOND, SECOND, busy.address, target.address)] * 20
    at = door([busy], [target], coming=low, answers=3000, ttft_s=8.0)
    assert not takes(at)
    assert [takes(at, of=shape(1023, priority=1)) for _ in range(9)] == [True] * 7 + [False] * 2
    assert takes(at, of=shape(1023, priority=2))
    assert not takes(at, of=shape(1023, priority=1))


def test_who_has_no_ports_yet_is_ahead_of_those_who_come() -> None:
    waiting = [Coming(0, SECOND, SECOND)] * 16
    assert not takes(door([queue(), queue(rank=1)], coming=waiting, ttft_s=7.2))
    assert takes(door([queue(), queue(rank=1)], coming=waiting[:6], ttft_s=7.2))


def test_only_ports_that_reach_each_other_and_hold_it_count() -> None:
    idle, busy, target = queue(), queue(*[SECOND] * 20, rank=1), quick()
    reached = Links([Link(prefill=busy.address, decode=target.address)])
    assert takes(door([idle, busy], [target]))
    assert not takes(door([idle, busy], [target], links=reached))
    small = attrs.evolve(idle, num_free_pages=10, num_total_pages=10)
    assert not takes(door([small, busy], [target]))
    assert takes(door([busy], [target], links=Links([Link(prefill=idle.address, decode=target.address)])))


def test_ports_that_the_fastest_decode_does_not_reach_are_asked_too() -> None:
    """The prefill that reaches it is busy, and another decode is a little slower, and reached by an idle prefill."""
    busy, busier, idle = queue(*[SECOND] * 20), queue(*[SECOND] * 30, rank=1), queue(rank=2)
    fast, slower = quick(8), quick(9, cost=DecodeCost(step_s=2e-3))
    ends = [(busy, fast), (idle, slower), (busier, slower)]
    prefills = [busy, busier, idle]

    def reached(*pairs: tuple[PrefillLoad, DecodeLoad]) -> Door:
        links = Links([Link(prefill=source.address, decode=target.address) for source, target in pairs])
        return door(prefills, [fast, slower], links=links, ttft_s=8.0)

    assert all(takes(reached(*ends)) for _ in prefills)
    assert refusal(reached(ends[0], ends[2])).retry_after_s == pytest.approx(20 + 1 - 8, abs=0.1)


# -- what answers take ------------------------------------------------------------------------------------------------


def test_answers_are_learned_by_class_and_the_last_ones_count_most() -> None:
    answers = Answers()
    assert answers.expect(KIND) == answers.expect() == 0.0
    for _ in range(FEW_ANSWERS - 1):
        answers.note((1, b"chat"), 10)
    for _ in range(1000):
        answers.note(KIND, 500)
    assert answers.expect(KIND) == 500.0
    assert answers.expect((1, b"chat")) == answers.expect((2, b"new")) == answers.expect()
    answers.note((1, b"chat"), 10)
    assert answers.expect((1, b"chat")) == 10.0
    for _ in range(MAX_WEIGHT):
        answers.note(KIND, 100)
    assert 100 < answers.expect(KIND) < 100 + 400 / math.e + 10


def test_the_memory_of_answers_is_bounded() -> None:
    answers = Answers()
    for tenant in range(MAX_CLASSES + 9):
        answers.note((0, b"often"), 7)
        answers.note((0, str(tenant).encode()), 500)
    assert len(answers) == MAX_CLASSES
    assert answers.expect((0, b"often")) == 7


# -- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"e2e_s": 9.0}, {"itl_p99_s": 0.1}, {"e2e_s": 9.0, "itl_p99_s": 0.1}])
def test_a_pairing_promises_no_limit_that_no_door_can_keep(limits: dict[str, float]) -> None:
    with pytest.raises(pd.ConfigError, match=f"limits .*{next(iter(limits))}.* nobody knows at submit"):
        pd.PairingConfig(slo=SLO(ttft_s=1.0, **limits))
    assert pd.PairingConfig(slo=SLO(ttft_s=1.0, ttft_per_token_s=1e-3, tpot_s=0.05)).slo is not None


def test_a_promise_is_an_slo() -> None:
    with pytest.raises(pd.ConfigError, match=r"slo must be an SLO or None, got 2\.0"):
        pd.PairingConfig(slo=2.0)  # type: ignore[arg-type]
    assert pd.PairingConfig().slo is None
    assert pd.bench.SLO is SLO
