"""What is drawn by the seed of a run: how steps scatter, and which drafts are right."""

from __future__ import annotations

import numpy as np

from pdinfer.planning.simulation.deployment import Cluster

_BATCH = 4096
"""Random factors that are drawn at once."""


class Chance:
    """The draws of one run."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._step_cv, self._accept_rate = cluster.step_cv, cluster.accept_rate
        self._steps, self._drafts = (np.random.default_rng([seed, stream]) for stream in (2, 3))
        self._factors, self._num_drawn = np.empty(0), 0

    def noise(self, count: int) -> np.ndarray | None:
        """Return a factor of mean 1 for each of `count` steps, gamma distributed; None when steps do not scatter."""
        cv = self._step_cv
        if not cv:
            return None
        if self._num_drawn + count > len(self._factors):
            self._factors, self._num_drawn = self._steps.gamma(cv**-2, cv**2, max(count, _BATCH)), 0
        self._num_drawn += count
        return self._factors[self._num_drawn - count : self._num_drawn]

    def num_accepted(self, num_drafts: int) -> int:
        """Return how many of so many drafts are right: each with the same chance, if those before it are."""
        wrong = self._drafts.random(num_drafts) >= self._accept_rate
        return int(wrong.argmax()) if wrong.any() else num_drafts
