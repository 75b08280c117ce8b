"""Ranks of one engine in virtual time. Each steps in a thread of its own that runs only while the simulation waits for
it, so that a rank can wait in the middle of a step for another one to come, or to die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from pdinfer.errors import RankLost
from pdinfer.parallel.groups import Group, Groups
from pdinfer.testing import Simulation
from tests.forks import FAR_S
from tests.sim.fakes import Violation

T = TypeVar("T")
DEADLINE_S = 4.0
"""How long a collective waits for a rank that does not come because it is frozen or its host hangs."""
FLIGHT_S = (0.0001, 0.001)
LOST_RINGS = 0.1


class Gone(RankLost):
    """A rank that was made to fail did not come."""


class Killed(BaseException):
    """Raised to unwind a thread whose node has crashed, or whose world is over."""


class Fiber:
    """Work that may `wait` in its middle. Only one fiber runs at a time: `start` and `resume` return once it waits or
    is done."""

    def __init__(self) -> None:
        self.busy = False
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._killed = False
        self._error: BaseException | None = None
        self._work: Callable[[], Any] = lambda: None
        self._done: Callable[[Any], None] = lambda result: None
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], T], done: Callable[[T], None] = lambda result: None) -> None:
        """Run `work`, then `done` with its result; raise the error of `work`, or let `resume` do so."""
        assert not self.busy
        self._work, self._done, self.busy = work, done, True
        self.resume()

    def resume(self) -> None:
        if self._killed:
            return
        self._switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self.busy:
            done, result, self._result = self._done, self._result, None
            done(result)

    def wait(self) -> None:
        """Wait until resumed; called by the work."""
        if not self._killed:
            self._back.release()
            self._go.acquire()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """Stop the work for good. Called from the thread of the simulation."""
        if not self._killed:
            self._killed = True
            self._switch()
            self._thread.join()
            self._error = None

    def _switch(self) -> None:
        self._go.release()
        if not self._back.acquire(timeout=FAR_S):
            raise RuntimeError(f"the work of a fiber has neither waited nor ended in {FAR_S} s")

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            self._go.acquire()
            if not self._killed:
                try:
                    self._result = self._work()
                except Killed:
                    pass
                except BaseException as error:  # noqa: BLE001 - raised where it was resumed
                    self._error = error
                self.busy = False
            is_last = self._killed  # what happens behind the release is for the next turn
            self._back.release()
            if is_last:
                return


class Team:
    """The ranks of one engine, on `nodes` (the leader's first): their fibers and the place where they meet."""

    def __init__(self, simulation: Simulation, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)
        self.fibers = [Fiber() for _ in nodes]
        self.wakeups: dict[int, Callable[[int], None]] = {}
        self.simulation = simulation
        self._rounds: dict[int, dict[int, tuple[str, Tensor]]] = {}
        self._num_calls = [0] * len(nodes)
        self._waiting: dict[int, tuple[int, float]] = {}
        self._loss = ""
        simulation.crash_listeners.append(self._crashed)
        for rank, node in enumerate(nodes):
            simulation.every(DEADLINE_S / 4, partial(self._look, rank), node=node)

    def make(self, make: Callable[[int, Groups], T]) -> list[T]:
        """Return what `make` gives on each rank, at once: making takes no time."""
        made: dict[int, T] = {}

        def keep(rank: int, one: T) -> None:
            made[rank] = one

        for rank, fiber in enumerate(self.fibers):
            fiber.start(partial(make, rank, self._groups(rank)), partial(keep, rank))
        while len(made) < len(self.nodes):
            for fiber in self.fibers:
                if fiber.busy:
                    fiber.resume()
        return [made[rank] for rank in range(len(self.nodes))]

    def meet(self, rank: int, what: str, x: Tensor) -> list[Tensor]:
        """Exchange what every rank brings to its next call; all ranks must make the same calls."""
        if self._loss:
            raise Gone(self._loss)
        number = self._num_calls[rank]
        self._num_calls[rank] += 1
        brought = self._rounds.setdefault(number, {})
        brought[rank] = what, x.clone()
        size = len(self.nodes)
        if len(brought) == size:
            del self._rounds[number]
            self._wake_all()
        while len(brought) < size:
            self._waiting[rank] = number, self.simulation.clock.now_s
            self.fibers[rank].wait()
            del self._waiting[rank]
            if self._loss and len(brought) < size:
                raise Gone(self._loss)
        told = {what for what, _ in brought.values()}
        if len(told) > 1:
            raise Violation(f"ranks of {self.nodes[0]} make different calls: {sorted(told)}")
        return [brought[other][1] for other in range(size)]

    def notify(self, rank: int, number: int) -> None:
        """Tells all others, most of the time."""
        rng = self.simulation.rng
        for other, heard in self.wakeups.items():
            if other != rank and rng.random() >= LOST_RINGS:
                self.simulation.later(rng.uniform(*FLIGHT_S), partial(heard, number), node=self.nodes[other])

    def end(self) -> None:
        for fiber in self.fibers:
            fiber.kill()

    def _groups(self, rank: int) -> Groups:
        every = tuple(range(len(self.nodes)))
        world, attention = (SimGroup(name, every, rank, team=self) for name in ("world", "attention"))
        return attrs.evolve(Groups.single(), world=world, attention=attention)

    def _wake_all(self) -> None:
        for rank, (number, _) in sorted(self._waiting.items()):
            delay_s = self.simulation.rng.uniform(*FLIGHT_S)
            self.simulation.later(delay_s, partial(self._go_on, rank, number), node=self.nodes[rank])

    def _go_on(self, rank: int, number: int) -> None:
        if rank in self._waiting and self._waiting[rank][0] == number:
            self.fibers[rank].resume()

    def _look(self, rank: int) -> None:
        if rank in self._waiting:
            number, since = self._waiting[rank]
            if number in self._rounds and self.simulation.clock.now_s - since >= DEADLINE_S:
                self._lose("a rank did not come")

    def _crashed(self, node: str) -> None:
        if node in self.nodes:
            self._lose(f"{node} has crashed")
            self.fibers[self.nodes.index(node)].kill()

    def _lose(self, why: str) -> None:
        self._loss = self._loss or f"{why}; start all ranks anew"
        self._wake_all()


@attrs.frozen(eq=False)
class SimGroup(Group):
    """A group whose ranks meet in virtual time."""

    team: Team = attrs.field(kw_only=True)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meet("all_gather", x))

    def all_gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(x) == counts[self.rank]
        return torch.cat(self._meet(f"all_gather_rows {list(counts)}", x))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._meet("all_reduce", x)).sum(0))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._meet(f"broadcast {list(x.shape)}", x)[source])

    def _meet(self, what: str, x: Tensor) -> list[Tensor]:
        return self.team.meet(self.rank, f"{self.name}.{what}", x)


class SimWakeup:
    """Stands in for a Wakeup; now and then a notification is lost."""

    def __init__(self, world: SimGroup, heard: Callable[[int], None]) -> None:
        self._world = world
        world.team.wakeups[world.rank] = heard

    def notify(self, number: int) -> None:
        self._world.team.notify(self._world.rank, number)

    def check(self) -> None:
        """Return: a simulated collective has a deadline of its own."""

    def close(self, *, as_agreed: bool = True) -> None:
        self._world.team.wakeups.pop(self._world.rank, None)
