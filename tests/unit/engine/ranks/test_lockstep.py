"""Ranks agree before each step: what each learns, which are woken, and what happens when one cannot go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pdinfer.config import EngineConfig
from pdinfer.engine.ranks import lockstep as lockstep_module
from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.lockstep import Agreement, Lockstep, compare, gather_bytes
from pdinfer.errors import ConfigError, RankLost
from pdinfer.moe.migration.migration import ExpertStatus
from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.parallel.groups import Groups
from pdinfer.parallel.topology import Topology
from pdinfer.testing import VirtualClock
from pdinfer.types import PeerAddress
from tests.sim.fakes import FakeModel
from tests.unit.parallel.thread_groups import TIMEOUT_S, abandon, groups_of, on_ranks
from tests.waiting import check_ends, started, wait_until

PEER = PeerAddress(b"peer", 1, 0, ("tcp://a:1",))


def no_experts() -> Rebalancing:
    model: Any = FakeModel()
    return Rebalancing(model.experts, model.moe_layers(), model.groups, EngineConfig())


@contextmanager
def locksteps(
    groups: list[Groups], clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[list[Lockstep], list[threading.Event]]]:
    """Yield a lockstep per rank, and an event per rank that is set when it is woken. All met once and had no work."""
    woken = [threading.Event() for _ in groups]
    made = on_ranks(groups, lambda one: Lockstep(one, no_experts(), woken[one.world.rank].set, clock=clock))
    with ExitStack() as stack:
        for one in made:
            stack.callback(one.close)
        stack.callback(abandon, groups)
        on_ranks(groups, lambda one: meet(made[one.world.rank]))
        for event in woken:
            event.clear()
        yield made, woken


def meet(lockstep: Lockstep, **status: int) -> Agreement:
    """Return the next agreement once this rank is due."""
    while (agreement := lockstep.agree(**status)) is None:  # type: ignore[arg-type]
        time.sleep(min(0.01, lockstep.due_in_s()))
    return agreement


def test_all_learn_what_all_have() -> None:
    groups = groups_of(dp_size=3)
    with locksteps(groups) as (made, _):
        agreements = on_ranks(
            groups, lambda one: meet(made[one.world.rank], num_rows=one.world.rank, num_passes=2 * one.world.rank)
        )
    for agreement in agreements:
        assert [status.num_rows for status in agreement.statuses] == [0, 1, 2]
        assert (agreement.runs, agreement.num_passes) == (True, 4)
        assert {status.number for status in agreement.statuses} == {1}


def test_collectives_look_for_silent_ranks_and_who_closes_without_the_others_is_missed() -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        for lockstep, one in zip(made, groups, strict=True):
            assert one.world.lookout.look == lockstep._wakeup.check
        agreed: list[bool] = []
        for lockstep in made:
            close = lockstep._wakeup.close
            lockstep._wakeup.close = lambda *, as_agreed, close=close: (agreed.append(as_agreed), close())  # type: ignore[method-assign]
        made[0].close()
        on_ranks(groups, lambda one: meet(made[one.world.rank], is_closing=one.world.rank == 0))
        made[1].close()
        assert agreed == [False, True]
        assert groups[0].world.lookout.look is None


def test_orders_reach_the_followers_and_reports_the_leader() -> None:
    groups = groups_of(dp_size=2, tp_size=3)
    with locksteps(groups) as (made, _):
        for rank, message in (
            (0, say.DialMessage(PEER)),
            (2, say.SentMessage(b"x")),
            (2, say.Linked([PEER])),
            (4, say.SentMessage(b"y")),
        ):
            made[rank].tell(message)
        agreements = on_ranks(groups, lambda one: meet(made[one.world.rank]))
        again = on_ranks(groups, lambda one: meet(made[one.world.rank]))
    assert not any(agreement.heard for agreement in again)
    heard = [agreement.heard for agreement in agreements]
    assert not any(agreement.runs for agreement in agreements)
    connect = ((0, say.DialMessage(PEER)),)
    assert heard == [
        ((2, say.SentMessage(b"x")), (2, say.Linked([PEER]))),
        connect,
        connect,
        ((1, say.SentMessage(b"y")),),
        (),
        (),
    ]


def test_a_rank_with_work_wakes_the_others_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_module, "BEAT_S", 3600.0)
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, woken):
        assert made[1].agree() is None  # nothing to say, not rung: no collective
        assert made[1].due_in_s() > 1000
        made[1]._wakeup._heard(77)  # whatever comes over the network
        assert not woken[1].is_set()
        with_work = started(made[0].agree, num_rows=1)
        assert woken[1].wait(TIMEOUT_S)
        assert made[1].due_in_s() == 0
        agreement = made[1].agree()
        check_ends(with_work)
        assert agreement is not None
        assert agreement.runs
        assert [one.due_in_s() for one in made] == [0, 0]  # behind a step of the model all meet again


def test_a_ring_that_is_lost_costs_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        monkeypatch.setattr(made[0]._wakeup, "notify", lambda number: None)
        with_work = started(made[0].agree, num_rows=1)
        agreement = meet(made[1])
        check_ends(with_work)
    assert agreement.runs


def test_who_is_idle_agrees_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_module, "BEAT_S", 3600.0)
    groups = groups_of(dp_size=2)
    clock = VirtualClock()
    with locksteps(groups, clock) as (made, _):
        assert all(one.due_in_s() > 1000 for one in made)
        clock.advance(3600.0)
        assert [one.due_in_s() for one in made] == [0, 0]
        on_ranks(groups, lambda one: meet(made[one.world.rank]))
        assert all(one.due_in_s() > 1000 for one in made)


def test_experts_that_move_and_news_of_them_wait_for_no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_module, "BEAT_S", 3600.0)
    rebalancing: Any = SimpleNamespace(has_news=False, status=ExpertStatus, agreed=lambda *_, runs: False)
    lockstep = Lockstep(Topology().apart(), rebalancing, lambda: None)
    try:
        lockstep.agree()
        assert lockstep.due_in_s() > 1000
        rebalancing.has_news = True
        assert lockstep.due_in_s() == 0
        rebalancing.agreed = lambda *_, runs: True
        lockstep.agree()
        rebalancing.has_news = False
        assert lockstep.due_in_s() == 0
        rebalancing.agreed = lambda *_, runs: False
        lockstep.agree()
        assert lockstep.due_in_s() > 1000
    finally:
        lockstep.close()


def test_who_begins_early_meets_who_does_not() -> None:
    """Rows that this rank does not have after all are an empty step; those that it gets meanwhile run in it."""
    groups = groups_of(dp_size=3)
    with locksteps(groups) as (made, _):
        on_ranks(groups, lambda one: meet(made[one.world.rank], num_rows=1))
        for rank in (0, 1):  # nobody waits here for rank 2
            made[rank].begin(num_rows=1 - rank, num_passes=rank)
        agreements = on_ranks(groups, lambda one: meet(made[one.world.rank], num_rows=one.world.rank))
        again = on_ranks(groups, lambda one: meet(made[one.world.rank]))
    for agreement in agreements:
        assert [(status.number, status.num_rows) for status in agreement.statuses] == [(2, 1), (2, 0), (2, 2)]
        assert agreement.num_passes == 1
    assert {status.number for agreement in again for status in agreement.statuses} == {3}


def test_rows_that_come_too_late_for_a_step_without_any_meet_all_ranks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_module, "BEAT_S", 3600.0)
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        on_ranks(groups, lambda one: meet(made[one.world.rank], num_rows=1))
        for lockstep in made:
            lockstep.begin(num_rows=0, num_passes=0)
        late: list[Agreement | None] = []
        with_work = started(lambda: late.append(made[0].agree(num_rows=2)))
        agreement = made[1].agree()
        assert agreement is not None
        assert not agreement.runs
        wait_until(lambda: late or made[0]._number == 4)
        assert not late
        meet(made[1])  # once it is woken
        check_ends(with_work)
        (found,) = late
        assert found is not None
        assert [(status.number, status.num_rows) for status in found.statuses] == [(3, 2), (3, 0)]


def test_who_closes_behind_an_agreement_that_was_begun_says_so_in_the_next_one() -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        on_ranks(groups, lambda one: meet(made[one.world.rank], num_rows=1))
        for lockstep in made:
            lockstep.begin(num_rows=1, num_passes=0)
        on_ranks(groups, lambda one: meet(made[one.world.rank], is_closing=one.world.rank == 0))
        assert not any(lockstep.closing for lockstep in made)
        for lockstep in made:  # while the step runs that was agreed on
            lockstep.begin(num_rows=1, num_passes=0)
        on_ranks(groups, lambda one: meet(made[one.world.rank], is_closing=one.world.rank == 0))
        assert all(lockstep.closing for lockstep in made)
        number = made[0]._number
        made[0].begin(num_rows=1, num_passes=0)  # nobody comes behind the last step
        assert made[0]._number == number


def test_a_rank_that_is_lost_behind_an_agreement_that_was_begun_is_missed() -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        on_ranks(groups, lambda one: meet(made[one.world.rank], num_rows=1))
        made[0].begin(num_rows=1, num_passes=0)
        groups[0].world.lookout.look = silent
        with pytest.raises(RankLost, match="rank 1 is silent"):
            made[0].agree()
        made[0].begin(num_rows=1, num_passes=0)
        with pytest.raises(RankLost, match="rank 1 is silent"):
            made[0].agree()


def silent() -> None:
    raise RankLost("rank 1 is silent")


def test_one_that_closes_closes_all() -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        on_ranks(groups, lambda one: meet(made[one.world.rank], is_closing=one.world.rank == 1))
        assert [one.closing for one in made] == [True, True]


def test_ranks_close_once_no_leader_has_anything_to_do() -> None:
    groups = groups_of(dp_size=2, tp_size=2)
    with locksteps(groups) as (made, _):
        closing = []
        for leader, num_rows in ((0, 0), (2, 1), (2, 0)):
            made[leader].may_close = True
            rows = {2: num_rows}
            on_ranks(groups, lambda one, rows=rows: meet(made[one.world.rank], num_rows=rows.get(one.world.rank, 0)))
            closing.append([one.closing for one in made])
    assert closing == [[False] * 4, [False] * 4, [True] * 4]


@pytest.mark.parametrize("closes", [False, True])
def test_roles_change_once_all_leaders_were_asked_and_none_has_rows(closes: bool) -> None:
    groups = groups_of(dp_size=2, tp_size=2)

    def changing(made: list[Lockstep], **status: int) -> list[bool]:
        on_ranks(groups, lambda one: meet(made[one.world.rank], **(status if one.world.rank == 2 else {})))
        return [one.changing for one in made]

    with locksteps(groups) as (made, _):
        assert changing(made) == [False] * 4
        made[2].may_change = True
        assert changing(made) == [False] * 4, "the other leader was not asked"
        made[0].may_change = True
        assert changing(made, num_rows=1) == [False] * 4
        assert changing(made, is_closing=closes) == [not closes] * 4


def test_a_rank_that_left_a_common_step_says_so_ever_after() -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        told = r"rank 1 left a step .*\(ValueError: odd\); start all ranks anew"
        with pytest.raises(RankLost, match=told), made[1].together():
            raise ValueError("odd")
        with pytest.raises(RankLost, match=told):
            made[1].agree(num_rows=1)
        assert made[1].due_in_s() == 0


def test_a_rank_that_is_lost_to_a_collective_is_lost_ever_after() -> None:
    """The first reason is kept, and no rank is waited for again."""
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        abandon(groups)
        with pytest.raises(RankLost, match="a thread did not come"):
            made[0].agree(num_rows=1)
        first = made[0].lost
        for _ in range(2):
            with pytest.raises(RankLost) as raised:
                made[0].agree(num_rows=1)
            assert raised.value is first
        with pytest.raises(RankLost, match="another"), made[0].together():
            raise RankLost("another")
        with pytest.raises(RankLost, match="a thread did not come"), made[0].together():
            raise ValueError("odd")
        assert made[0].lost is first
        assert made[0].due_in_s() == 0


def test_a_host_that_is_interrupted_in_a_common_step_has_left_it() -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        with pytest.raises(KeyboardInterrupt), made[1].together():
            raise KeyboardInterrupt
        with pytest.raises(RankLost, match=r"rank 1 left a step .*\(KeyboardInterrupt\)"):
            made[1].agree()


def test_ranks_that_step_different_engines_are_told() -> None:
    groups = groups_of(dp_size=2)
    with locksteps(groups) as (made, _):
        made[1]._number = 5
        told = on_ranks(groups, lambda one: _error(made[one.world.rank]))
    assert all("different agreements, 1 on rank 0, 5 on rank 1" in error for error in told)


def _error(lockstep: Lockstep) -> str:
    with pytest.raises(RankLost) as raised:
        lockstep.agree(num_rows=1)
    return str(raised.value)


def test_what_differs_is_named_on_every_rank() -> None:
    groups = groups_of(dp_size=3)

    def differ(one: Groups) -> str:
        compare(one.world, {"page_size": 4, "chunk": 16})
        with pytest.raises(ConfigError, match="mtp must be the same on all ranks of an engine; it is False on rank 0"):
            compare(one.world, {"page_size": 4, "mtp": one.world.rank == 2})
        with pytest.raises(ConfigError) as raised:
            compare(one.world, {"page_size": 4, "chunk": 16 if one.world.rank else -1})
        return str(raised.value)

    told = "chunk must be the same on all ranks of an engine; it is -1 on rank 0, 16 on rank 1, 16 on rank 2"
    assert on_ranks(groups, differ) == [told] * 3


def test_bytes_of_any_length_are_gathered() -> None:
    groups = groups_of(dp_size=3)
    assert on_ranks(groups, lambda one: gather_bytes(one.world, b"x" * one.world.rank)) == [[b"", b"x", b"xx"]] * 3
