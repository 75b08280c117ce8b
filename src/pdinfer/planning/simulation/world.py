"""The world of a run: its time, what happens when, and what is drawn by its seed."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import numpy as np

from pdinfer.bench.traces import rng_of

_BATCH = 4096
"""Random factors that are drawn at once."""


class World:
    """Events in the order of their times; those of one time in the order in which they were planned."""

    def __init__(self, *, step_cv: float = 0.0, accept_rate: float = 0.0, seed: int = 0) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0
        self._soon: dict[Callable[[], None], None] = {}
        self._step_cv, self._accept_rate = step_cv, accept_rate
        self._steps, self._drafts = (rng_of(seed, stream) for stream in (2, 3))
        self._factors, self._num_drawn = np.ones(_BATCH), 0

    def at(self, at_s: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action` then."""
        self._num_planned += 1
        heappush(self._heap, (at_s, self._num_planned, action, args))

    def soon(self, action: Callable[[], None]) -> None:
        """Call `action`, once, when everything has happened that happens now."""
        self._soon[action] = None

    def run(self) -> None:
        """Let everything happen."""
        heap = self._heap
        while heap:
            self.now_s, _, action, args = heappop(heap)
            self.num_events += 1
            action(*args)
            while self._soon and (not heap or heap[0][0] > self.now_s):
                begin = next(iter(self._soon))
                del self._soon[begin]
                begin()

    def noise(self, count: int) -> np.ndarray:
        """Return a gamma distributed factor of mean 1 for each of `count` steps; ones if steps do not scatter."""
        cv = self._step_cv
        if not cv:
            return self._factors[:count]
        if not self._num_drawn or self._num_drawn + count > len(self._factors):
            self._factors, self._num_drawn = self._steps.gamma(cv**-2, cv**2, max(count, _BATCH)), 0
        self._num_drawn += count
        return self._factors[self._num_drawn - count : self._num_drawn]

    def num_accepted(self, num_drafts: int) -> int:
        """Return how many of so many drafts are right: each with the same chance, if those before it are."""
        wrong = self._drafts.random(num_drafts) >= self._accept_rate
        return int(wrong.argmax()) if wrong.any() else num_drafts
