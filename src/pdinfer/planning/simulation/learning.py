"""How a simulated decode learns what its steps take, as a real one does, from fewer of them."""

from __future__ import annotations

from collections.abc import Sequence

from pdinfer.scheduling.costs import StepCosts, decode_cost
from pdinfer.stats import DecodeCost

LEARN_ALL, LEARN_EVERY = 2048, 128
"""A decode learns its costs from all of its first steps, and of those after its speed has changed, and later from one
in so many, which saves time. A real one goes on learning from all."""


class DecodeLearning:
    """Teaches the `costs` of a scheduler."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._cost: DecodeCost | None = None
        self._learned_at, self._learn_all_until = 0, LEARN_ALL

    @property
    def cost(self) -> DecodeCost:
        """What steps take, by those learned from so far."""
        if self._cost is None:
            self._cost = decode_cost(self._costs)
        return self._cost

    def begin_anew(self, num_steps: int) -> None:
        """Learn from every step again, after so many."""
        self._learn_all_until = num_steps + LEARN_ALL

    def learn(self, began_s: float, ends_s: Sequence[float], first: int, num_rows: int, context: int) -> None:
        """Learn from steps that follow each other, the first of which comes after `first` others. Contexts grow by a
        token for each row and step."""
        learns_all = first < self._learn_all_until
        count = len(ends_s) if learns_all else int(first + len(ends_s) >= self._learned_at + LEARN_EVERY)
        for at in range(len(ends_s) - count, len(ends_s)):
            took_s = ends_s[at] - (ends_s[at - 1] if at else began_s)
            self._costs.add((1.0, float(num_rows), float(context + num_rows * at)), took_s)
        if count:
            self._learned_at, self._cost = first + len(ends_s), None
