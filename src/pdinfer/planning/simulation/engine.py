"""What simulated engines of both sides have in common: pages, limits, a device that two may share, and steps that the
ranks of one engine take together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import count

import numpy as np

from pdinfer.planning.simulation.deployment import EngineModel
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.pages import Held, SimPages
from pdinfer.planning.simulation.world import World
from pdinfer.scheduling.rules import withheld_pages
from pdinfer.types import PeerAddress


class SimEngine(ABC):
    """One engine, such as P0 or D1, or one rank of it, such as D1.3. It steps with its `group`. The step or burst under
    way in which it has rows ends at `due_s`, which is infinity without one.

    A prefill and a decode that share a device and a pool are each other's `rival`. They take turns, as in a Pairing
    that steps both: the one that had its turn lets the other begin first.
    """

    def __init__(self, side: str, number: int, model: EngineModel, pages: SimPages, world: World) -> None:
        self.name, self.number, self.model, self.pages = model.name_of(side, number), number, model, pages
        self.address = PeerAddress(self.name.encode(), 0, 0)
        self.page_size = model.cache.page_size
        self.speed, self.due_s = 1.0, math.inf
        self.rival: SimEngine | None = None
        self.group = Lockstep([self], world)
        self.had_turn = False
        self._world = world
        self._arrivals = count()
        self._num_withheld = withheld_pages(
            pages.num_pages, page_size=self.page_size, max_total_tokens=model.engine.max_total_tokens
        )

    @property
    def num_available(self) -> int:
        """Pages that can be had; zero or less when there are none."""
        return self.pages.num_available - self._num_withheld

    @property
    def max_tokens(self) -> int:
        """The longest prompt and output that it takes."""
        return (self.pages.num_pages - self._num_withheld) * self.page_size

    def find(self, job: Job, num_tokens: int, domain: Hashable = None) -> Held:
        """Return what its pages have of the first tokens of a request. The last one is computed in any case."""
        return self.pages.find(job.keys(self.page_size, num_tokens), (num_tokens - 1) // self.page_size, domain)

    def num_found(self, job: Job, writer: int | None = None) -> int:
        """Return how many tokens of a request its pages hold."""
        return self.find(job, job.num_tokens).num_known * self.page_size

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether it has a request that a step may serve."""

    @property
    def wants_step(self) -> bool:
        """Whether a step would do something."""
        return self.has_work

    @abstractmethod
    def decide(self) -> bool:
        """Do what a real engine's step does before the model runs. Return whether it has rows."""

    @property
    def num_alike(self) -> int:
        """For how many steps nothing is to be decided, with the rows that were decided on."""
        return 1

    @abstractmethod
    def took_s(self, num_steps: int) -> np.ndarray | list[float]:
        """Return the seconds of so many steps with these rows, by the host's function."""

    @abstractmethod
    def began(self, ends_s: Sequence[float]) -> None:
        """Note when the steps end that its group takes now: none if no rank has rows."""

    @abstractmethod
    def finish(self) -> None:
        """Note what came of the step or burst that ends now."""

    @abstractmethod
    def cut(self) -> None:
        """End a burst with the step that is under way."""

    def may_begin(self) -> bool:
        """Return whether a step may begin now. If its device is busy, it may at the end of the step under way there."""
        rival = self.rival
        if self.due_s < math.inf or rival is None:
            return self.due_s == math.inf
        rival.cut()
        if self.had_turn and rival.due_s == math.inf:
            self.had_turn = False
            rival.group.begin()
        return rival.due_s == math.inf

    def end_at(self, due_s: float) -> None:
        """Let what is under way end then."""
        self.due_s = due_s
        self._world.at(due_s, self._reach_end)

    def _reach_end(self) -> None:
        if self._world.now_s != self.due_s:
            return  # it was cut, and has ended before
        self.due_s = math.inf
        if self.rival is not None:
            self.had_turn, self.rival.had_turn = True, False
        self.finish()
        self._world.soon(self.group.begin)

    def change_speed(self, speed: float) -> None:
        """Run at another speed from the next step on."""
        self.speed = speed


class Lockstep:
    """The data-parallel ranks of one engine. They step together, since they share experts: a step lasts as long as it
    takes the slowest of them, and ranks without rows wait for it."""

    def __init__(self, ranks: Sequence[SimEngine], world: World) -> None:
        self.ranks, self._world = ranks, world
        for rank in ranks:
            rank.group = self

    @property
    def due_s(self) -> float:
        """When the step or burst under way ends; infinity without one."""
        return min(rank.due_s for rank in self.ranks)

    def cut(self) -> None:
        """End a burst with the step that is under way."""
        for rank in self.ranks:
            rank.cut()

    def begin(self) -> None:
        """Let every rank take a step, unless one is under way, and plan its end."""
        ranks = self.ranks
        if self.due_s < math.inf or not any(rank.wants_step for rank in ranks) or not ranks[0].may_begin():
            return
        running = [rank for rank in ranks if rank.decide()]
        ends_s = self._ends(running, min(rank.num_alike for rank in running)) if running else []
        for rank in ranks:
            rank.began(ends_s)

    def _ends(self, running: Sequence[SimEngine], num_steps: int) -> list[float]:
        noise, speed, now_s = self._world.noise(num_steps), running[0].speed, self._world.now_s
        took = [rank.took_s(num_steps) for rank in running]
        arrays = [each for each in took if isinstance(each, np.ndarray)]
        if len(arrays) == len(took):
            ends: list[float] = ((reduce(np.maximum, arrays) * noise / speed).cumsum() + now_s).tolist()
            return ends
        ends = []
        for factor, seconds in zip(noise.tolist(), map(max, zip(*took, strict=True)), strict=True):
            now_s += float(seconds) * factor / speed
            ends.append(now_s)
        return ends
