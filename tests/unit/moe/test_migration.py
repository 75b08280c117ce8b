"""One migration, row by row of its table: what all ranks said, what this rank does, and the state that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.moe.migration.migration import ExpertRequests, ExpertStatus, Migration, MigrationState, Verdict
from tests.e2e.rebalance_jobs import scattered

STAGED, MOVING, READY = MigrationState.STAGED, MigrationState.MOVING, MigrationState.READY
FAILED, APPLIED, DROPPED = MigrationState.FAILED, MigrationState.APPLIED, MigrationState.DROPPED
PLACEMENT = scattered(pd.ExpertPlacement.trivial(1, 4, 2), 1)


@attrs.define
class FakeTransfer:
    """A transfer that notes what is done with it. Packing the part `broken` raises."""

    num_parts: int
    broken: int | None = None
    done: list[str] = attrs.field(factory=list)
    num_moves: int = 5

    def pack(self, part: int) -> None:
        if part == self.broken:
            raise MemoryError("a test's fault")
        self.done.append(f"pack {part}")

    def send(self) -> None:
        self.done.append("send")

    def apply(self) -> None:
        self.done.append("apply")


def staged(transfer: Any) -> Migration:
    return Migration(PLACEMENT, 1, lambda _: transfer)


def in_state(state: MigrationState) -> tuple[Migration, FakeTransfer]:
    """Return a migration of two parts that has come to this state, and its transfer."""
    transfer = FakeTransfer(2, broken=1 if state is FAILED else None)
    migration = staged(transfer)
    while migration.state is not state:
        agree(migration)
    transfer.done.clear()
    return migration, transfer


def status_of(migration: Migration) -> ExpertStatus:
    return ExpertStatus(staged=migration.digest, num_advances=migration.num_advances)


def agree(migration: Migration, others: Sequence[ExpertStatus] | None = None) -> MigrationState:
    """Follow what this rank and `others` say; by default one other rank says the same."""
    ours = status_of(migration)
    statuses = [ours, *([ours] if others is None else others)]
    migration.follow(Verdict.of(migration.digest, statuses), statuses)
    return migration.state


@pytest.mark.parametrize("state", [STAGED, MOVING, READY])
@pytest.mark.parametrize("said", [{"staged": None}, {"staged": 7}, {"failed": 7}], ids=["none", "another", "failed"])
def test_it_waits_while_a_rank_says_anything_else(state: MigrationState, said: dict[str, Any]) -> None:
    migration, transfer = in_state(state)
    assert agree(migration, [attrs.evolve(status_of(migration), **said)]) is state
    assert transfer.done == []


@pytest.mark.parametrize(
    ("num_parts", "done", "state"), [(2, ["pack 0"], MOVING), (1, ["pack 0"], MOVING), (0, [], READY)]
)
def test_it_begins_with_the_first_part_when_all_have_staged_it(
    num_parts: int, done: list[str], state: MigrationState
) -> None:
    transfer = FakeTransfer(num_parts)
    migration = staged(transfer)
    assert not migration.has_begun
    assert agree(migration) is state
    assert (transfer.done, migration.has_begun, migration.num_advances) == (done, True, 1)


def test_it_sends_a_part_and_packs_the_next_until_the_last() -> None:
    migration, transfer = in_state(MOVING)
    assert agree(migration) is MOVING
    assert transfer.done == ["send", "pack 1"]
    assert agree(migration) is READY
    assert transfer.done == ["send", "pack 1", "send"]


@pytest.mark.parametrize(("state", "broken"), [(STAGED, 0), (MOVING, 1)])
def test_it_keeps_the_error_when_packing_raises(state: MigrationState, broken: int) -> None:
    migration, transfer = in_state(state)
    transfer.broken, num_advances = broken, migration.num_advances
    assert agree(migration) is FAILED
    assert (migration.error, migration.num_advances) == ("MemoryError: a test's fault", num_advances)


def test_it_writes_all_slots_when_every_part_has_come() -> None:
    migration, transfer = in_state(READY)
    assert agree(migration) is APPLIED
    assert (transfer.done, migration.num_moves) == (["apply"], 5)


@pytest.mark.parametrize("state", [STAGED, MOVING, READY, FAILED])
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "broken"])
def test_it_is_dropped_when_a_rank_cancels_or_cannot_go_on(state: MigrationState, is_cancelled: bool) -> None:
    migration, transfer = in_state(state)
    said = {"requests": ExpertRequests.CANCEL} if is_cancelled else {"failed": migration.digest}
    assert agree(migration, [attrs.evolve(status_of(migration), **said)]) is DROPPED
    assert transfer.done == []


def test_ranks_that_took_different_steps_do_not_go_on() -> None:
    migration, _ = in_state(MOVING)
    with pytest.raises(RuntimeError, match=r"ranks have packed different parts: \[1, 2\]"):
        agree(migration, [attrs.evolve(status_of(migration), num_advances=2)])


@pytest.mark.parametrize(
    ("status", "ints"),
    [
        (ExpertStatus(), (0, 0, 0, 0, 0)),
        (ExpertStatus(staged=9, num_advances=3, failed=8), (9, 3, 8, 0, 0)),
        (ExpertStatus(requests=ExpertRequests.CANCEL), (0, 0, 0, 1, 0)),
        (ExpertStatus(requests=ExpertRequests.SUM_LOAD | ExpertRequests.REBALANCE), (0, 0, 0, 6, 0)),
        (ExpertStatus(answer_bytes=0), (0, 0, 0, 0, -1)),
        (ExpertStatus(answer_bytes=77), (0, 0, 0, 0, 77)),
    ],
)
def test_a_status_travels_as_five_ints(status: ExpertStatus, ints: tuple[int, ...]) -> None:
    assert status.to_ints() == ints
    assert ExpertStatus.from_ints(ints) == status
