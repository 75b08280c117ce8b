"""What the steps of an engine take, learned from the steps themselves.

A step's seconds are taken to be a sum of terms with constant weights: so much for the step, so much for each token. The
weights' ratios are fitted to many steps, because only sizes that varied tell them apart; their scale follows
the last few steps, so that an engine that slows down is soon seen to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from operator import mul

import numpy as np

from pdinfer.stats import DecodeCost

RATIO_DECAY = 0.99
"""What a step counts for in the ratios after each later one: about 100 steps are remembered."""
SCALE_DECAY = 0.85
"""The same for the scale: after 20 steps the old pace counts for 4 % of it."""
OUTLIER = 4.0
"""A step counts for at most this many times what was expected of it: one pause says nothing of the next step. A step
that takes so many times less proves that those before it were the exceptions, such as first uses. Both hold whichever
term the seconds belong to, since sizes that were not seen before prove nothing."""
FIT_EVERY = 8
LEAST_STEPS = 8
"""Fewer steps say too little: an engine whose first one happened to be slow would never be given another."""
LEAST_PIVOT = 1e-6
"""Terms that varied together cannot be told apart."""


class StepCosts:
    """The weights of `num_terms` terms, none of them negative. All steps together took `busy_s` seconds for
    `num_tokens` tokens; `best_tokens_per_s` is the best speed so far, 0 before one is known."""

    def __init__(self, num_terms: int) -> None:
        self.num_tokens = 0
        self.busy_s = 0.0
        self.best_tokens_per_s = 0.0
        self._num_terms = num_terms
        self._products: np.ndarray
        self._unfitted: list[tuple[float, ...]]
        self._ratios: list[float] | None
        self._recent_terms: list[float]
        self._recent_s: float
        self._num_steps: int
        self.forget()

    @property
    def weights(self) -> tuple[float, ...]:
        """Seconds per unit of each term; zeros before there were LEAST_STEPS steps."""
        if self._num_steps < LEAST_STEPS:
            return (0.0,) * self._num_terms
        ratios, scale = self._fit()
        return tuple([scale * ratio for ratio in ratios])

    def forget(self) -> None:
        """Begin again."""
        self._products = np.zeros((self._num_terms + 1, self._num_terms + 1))  # of terms and seconds, summed over steps
        self._unfitted = []
        self._ratios = [0.0] * self._num_terms
        self._recent_terms = [0.0] * self._num_terms
        self._recent_s = 0.0
        self._num_steps = 0

    def count(self, num_tokens: int, took_s: float) -> None:
        """Count a step, or steps that took so long together."""
        self.num_tokens += num_tokens
        self.busy_s += took_s
        if took_s > 0:
            self.best_tokens_per_s = max(self.best_tokens_per_s, num_tokens / took_s)

    def add(self, terms: Sequence[float], seconds: float) -> None:
        """Learn from one step. The first term should be 1."""
        if self._recent_s > 0:
            expected = [self._recent_s / total * term for total, term in zip(self._recent_terms, terms, strict=True)]
            if seconds * OUTLIER < min(expected) or seconds > OUTLIER * max(expected):  # what was fitted may allow it
                ratios, scale = self._fit()
                expected.append(scale * sum(map(mul, ratios, terms)))
                if seconds * OUTLIER < min(expected):
                    self.forget()
                seconds = min(seconds, OUTLIER * max(expected))
        self._unfitted.append((*terms, seconds))
        self._recent_terms = [SCALE_DECAY * old + new for old, new in zip(self._recent_terms, terms, strict=True)]
        self._recent_s = SCALE_DECAY * self._recent_s + seconds
        self._num_steps += 1
        if self._num_steps < FIT_EVERY or self._num_steps % FIT_EVERY == 0:
            rows, count = np.array(self._unfitted), len(self._unfitted)
            self._unfitted = []
            self._products *= RATIO_DECAY**count
            self._products += (rows.T * RATIO_DECAY ** np.arange(count - 1, -1, -1)) @ rows
            self._ratios = None

    def _fit(self) -> tuple[list[float], float]:
        """Return the weights' ratios, and their scale. They are fitted when somebody asks: most steps are as long as
        expected, and most loads are never read."""
        if self._ratios is None:
            self._ratios = _fitted(self._products.tolist())
        expected = sum(map(mul, self._ratios, self._recent_terms))
        return self._ratios, self._recent_s / expected if expected > 0 else 0.0


def _fitted(products: list[list[float]]) -> list[float]:
    """Return the weights w >= 0 with the least squared error, w' products w - 2 w' sums, which are the last column.
    There are few terms, so every set of them that may have weights above 0 is tried, the set of all first: without a
    negative weight nothing is better."""
    *products, sums = products
    best, least = [0.0] * len(products), 0.0
    for count in range(len(products), 0, -1):
        for used in combinations(range(len(products)), count):
            solved = _solve([[products[i][j] for j in used] for i in used], [sums[i] for i in used])
            if solved is None or min(solved) < 0:
                continue
            error = -sum(weight * sums[i] for weight, i in zip(solved, used, strict=True))
            if error < least:
                least, best = error, [0.0] * len(products)
                for index, weight in zip(used, solved, strict=True):
                    best[index] = weight
                if count == len(products):
                    return best
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Return the solution of symmetric equations by elimination, or None when they are nearly dependent."""
    size = len(right)
    diagonal = [matrix[i][i] for i in range(size)]
    for i in range(size):
        if matrix[i][i] <= LEAST_PIVOT * diagonal[i]:
            return None
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [below - factor * above for below, above in zip(matrix[j], matrix[i], strict=True)]
            right[j] -= factor * right[i]
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = (right[i] - rest) / matrix[i][i]
    return solved


def decode_cost(costs: StepCosts) -> DecodeCost:
    """Return what the steps of a decode take, whose terms are 1, their sequences and the tokens of their contexts."""
    step_s, sequence_s, token_s = costs.weights
    return DecodeCost(step_s=step_s, sequence_s=sequence_s, token_s=token_s)
