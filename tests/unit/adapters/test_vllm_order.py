"""Which prompts a prefill computes first: a decode waits for those with a grant, and perhaps nobody for the others."""

from __future__ import annotations

import os
from typing import Any

import attrs
import pytest

from pdinfer.adapters.vllm.messages import Arrivals
from pdinfer.adapters.vllm.scheduler import SchedulerHalf
from pdinfer.adapters.vllm.settings import Settings
from tests.unit.adapters.fake_vllm import FakeRequest, Pairs, run
from tests.unit.adapters.test_vllm import counted

HOLD_S = 1.0
TOKENS = tuple(range(40))


@attrs.define
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def sends() -> dict[str, Any]:
    return {"do_remote_decode": True, "room": os.urandom(16).hex()}


def test_a_prompt_with_a_grant_is_computed_before_those_that_nobody_has_asked_for(pair: Pairs) -> None:
    """As after a decode was lost: its prompts have waited for their grants, and the next one comes behind them."""
    prefill, decode = pair({"hold_s": HOLD_S}, max_seqs=2)
    clock = prefill.scheduler._scheduler._clock = Clock()
    lost = [prefill.add(f"lost-{at}", TOKENS, sends()) for at in range(5)]
    prefill.step()
    asked = sends()
    decode.add("next", TOKENS, {"do_remote_prefill": True, "room": asked["room"], "prefill": prefill.address})
    clock.now = 0.9 * HOLD_S
    run([prefill, decode], lambda: asked["room"] in prefill.scheduler._scheduler._grants)
    clock.now = HOLD_S
    following = prefill.add("next", TOKENS, asked)
    prefill.step()
    assert following.is_over
    assert not any(request.is_over for request in lost)
    prefill.step()
    assert [request.is_over for request in lost] == [True, True, False, False, False]  # nobody is before them now
    run([prefill, decode], lambda: all(request.is_over for request in decode.requests.values()))
    assert decode.requests["next"].landed is not None


def test_a_prompt_with_a_grant_gets_the_blocks_of_one_that_nobody_has_asked_for(pair: Pairs) -> None:
    """The pool is full of kept prompts, whose lease is far from over. Those kept longest make way, and no more."""
    prefill, decode = pair({"hold_s": 0.0, "lease_s": 60.0}, num_blocks=10)
    for at in range(3):  # three blocks each
        prefill.add(f"lost-{at}", TOKENS, sends())
    run([prefill], lambda: len(prefill.worker._worker._sending._kept) == 3)
    for at in range(2):
        wanted = sends()
        asks = {"do_remote_prefill": True, "room": wanted["room"], "prefill": prefill.address}
        loading = decode.add(f"wanted-{at}", TOKENS, asks)
        run([prefill, decode], lambda room=wanted["room"]: room in prefill.scheduler._scheduler._grants)
        prefill.add(f"wanted-{at}", TOKENS, wanted)
        run([prefill, decode], lambda loading=loading: loading.is_over)
        assert loading.landed is not None
    assert counted(prefill) == {**counted(prefill), "aborted_blocks": 1, "sent": 2}
    assert [*prefill.worker._worker._sending._kept] == ["lost-1", "lost-2"]


def test_prompts_that_nobody_has_asked_for_do_not_displace_each_other(pair: Pairs) -> None:
    prefill, _ = pair({"hold_s": 0.0, "lease_s": 0.5}, num_blocks=4)
    first, second = (prefill.add(name, TOKENS, sends()) for name in ("first", "second"))
    run([prefill], lambda: first.is_over)
    for _ in range(3):
        prefill.step()
    assert not second.num_computed or "aborted_lease" in counted(prefill)
    run([prefill], lambda: second.is_over and prefill.is_at_rest)
    assert counted(prefill)["aborted_lease"] == 2
    assert "aborted_blocks" not in counted(prefill)


def test_a_request_of_the_prefills_own_gets_the_blocks_of_one_that_nobody_has_asked_for(pair: Pairs) -> None:
    prefill, _ = pair({"hold_s": 0.0, "lease_s": 60.0}, num_blocks=4)
    lost = prefill.add("lost", TOKENS, sends())
    run([prefill], lambda: lost.is_over)
    own = prefill.add("own", TOKENS, None)
    run([prefill], lambda: own.is_over)
    assert counted(prefill)["aborted_blocks"] == 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def half(clock: Clock) -> SchedulerHalf:
    return SchedulerHalf(16, Settings(sends=True, receives=False, hold_s=HOLD_S, lease_s=4.0), clock)


def test_a_grant_without_a_prompt_is_waited_for_as_long_as_a_prompt_without_a_grant(
    half: SchedulerHalf, clock: Clock
) -> None:
    lost = FakeRequest("lost", TOKENS, sends())
    assert half.matched(lost, 0) == (None, False)
    clock.now = 0.5 * HOLD_S
    half.arrived(Arrivals(frozenset({sends()["room"]})), None)
    clock.now = 1.4 * HOLD_S
    assert half.matched(lost, 0) == (None, False)
    clock.now = 1.5 * HOLD_S
    assert half.matched(lost, 0) == (0, False)


def test_prompts_without_a_grant_go_on_however_many_others_come(half: SchedulerHalf, clock: Clock) -> None:
    lost = FakeRequest("lost", TOKENS, sends())
    waited = []
    for tenth in range(30):
        clock.now = tenth / 10 * HOLD_S
        half.arrived(Arrivals(frozenset({sends()["room"]})), None)
        waited.append(half.matched(lost, 0) == (None, False))
    assert waited == [True] * 20 + [False] * 10


def test_a_prompt_that_is_begun_holds_nothing_up(half: SchedulerHalf, clock: Clock) -> None:
    lost, begun = FakeRequest("lost", TOKENS, sends()), FakeRequest("begun", TOKENS, sends())
    half.matched(lost, 0)
    clock.now = HOLD_S
    assert begun.kv_transfer_params is not None
    half.arrived(Arrivals(frozenset({begun.kv_transfer_params["room"]})), None)
    assert half.matched(begun, 0) == (0, False)
    assert half.matched(lost, 0) == (None, False)
    half.allocated(begun, ([0, 1, 2],), 0)
    assert half.matched(lost, 0) == (0, False)
