"""Ranks as threads: groups whose collectives meet at a barrier, for tests that need no processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from pdinfer.errors import RankLost
from pdinfer.parallel.groups import Begun, Group, Groups
from pdinfer.parallel.topology import Topology
from tests.forks import FAR_S
from tests.waiting import started

T = TypeVar("T")
TIMEOUT_S = FAR_S


@attrs.frozen(eq=False, kw_only=True)
class Meeting:
    """The place where the ranks of one group exchange what they have."""

    size: int
    barrier: threading.Barrier
    brought: dict[int, Tensor] = attrs.field(factory=dict)
    mail: list[list[queue.Queue[Tensor]]] = attrs.field(
        default=attrs.Factory(lambda self: [[queue.Queue() for _ in range(self.size)] for _ in range(self.size)], True)
    )

    def of(self, rank: int, x: Tensor) -> list[Tensor]:
        try:
            self.barrier.wait(TIMEOUT_S)  # everybody has read what was brought before
            self.brought[rank] = x.clone()
            self.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise RankLost("a thread did not come; start all ranks anew") from None
        return [self.brought[other] for other in range(self.size)]


class Underway:
    """A collective that a thread waits for, as a `dist.Work`."""

    def __init__(self, meet: Callable[[], object]) -> None:
        self._ended: Future[object] = Future()
        started(self._run, meet)

    def _run(self, meet: Callable[[], object]) -> None:
        try:
            self._ended.set_result(meet())
        except RankLost as error:
            self._ended.set_exception(error)

    def is_completed(self) -> bool:
        return self._ended.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        try:
            self._ended.result(TIMEOUT_S if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("it has not ended yet") from error


@attrs.frozen(eq=False)
class ThreadGroup(Group):
    """A group of threads."""

    meeting: Meeting = attrs.field(kw_only=True)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.of(self.rank, x))

    def all_gather_begin(self, x: Tensor) -> Begun:
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        work: Any = Underway(lambda: gathered.copy_(self.all_gather(x)))
        return Begun(self, "all_gather", work, x, gathered)

    def all_gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(x) == counts[self.rank]
        return self.all_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.meeting.of(self.rank, x)).sum(0))

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        for to, x in sends:
            self.meeting.mail[self.rank][to].put(x.clone())
        for source, x in receives:
            x.copy_(self.meeting.mail[source][self.rank].get(timeout=TIMEOUT_S))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self.meeting.of(self.rank, x)[source])


def groups_of(*, dp_size: int = 1, tp_size: int = 1) -> list[Groups]:
    """Return the groups of each rank of a new world. Only world and attention groups work."""
    size = dp_size * tp_size
    world = Meeting(size=size, barrier=threading.Barrier(size))
    attention = [Meeting(size=tp_size, barrier=threading.Barrier(tp_size)) for _ in range(dp_size)]
    every = tuple(range(size))
    return [
        attrs.evolve(
            Topology().apart(),
            world=ThreadGroup("world", every, rank, meeting=world),
            attention=ThreadGroup(
                "attention",
                every[rank // tp_size * tp_size :][:tp_size],
                rank % tp_size,
                meeting=attention[rank // tp_size],
            ),
        )
        for rank in range(size)
    ]


def on_ranks(groups: Sequence[Groups], work: Callable[[Groups], T]) -> list[T]:
    """Run `work` on each rank, in threads at the same time, and return the results.

    Raises what the first rank raised; the others then do not wait for it.
    """
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(work, one) for one in groups]
        failed = [future for future in wait(futures, TIMEOUT_S, FIRST_EXCEPTION).done if future.exception()]
        if failed:
            abandon(groups)
        return [future.result(TIMEOUT_S) for future in [*failed, *futures]][len(failed) :]


def abandon(groups: Sequence[Groups]) -> None:
    """Tell every rank that waits for others that they do not come."""
    for one in groups:
        for group in (one.world, one.attention):
            assert isinstance(group, ThreadGroup)
            group.meeting.barrier.abort()
