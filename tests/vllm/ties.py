"""Where two runs of a model may say different tokens: at near ties, and where one engine differs from itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

NEAR = 0.1
"""The margin of a token over the second one, in log-probability, below which the order of sums may decide."""


def some_of(count: int, usual: int) -> int:
    """Return how many of `count` prompts are given: `usual`, or what PROMPTS says (make test-vllm PROMPTS=500)."""
    return min(count, int(os.environ.get("PROMPTS") or usual))


def margin_of(logprobs: Sequence[float]) -> float:
    """Return how far the best is above the second."""
    best, second, *_ = sorted(logprobs, reverse=True)
    return best - second


@attrs.frozen
class Said:
    """The tokens of a run that greedily draws them, and the margin of each."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]

    @classmethod
    def of(cls, done: Mapping[str, Any]) -> Said:
        """Read what a child has said to a prompt."""
        return cls(tuple(done["tokens"]), tuple(margin_of(list(step.values())) for step in done["logprobs"]))


@attrs.define
class Comparison:
    """How some runs differ from reference runs of the same prompts. `far` are the prompts that differ first where the
    reference has a margin, and not because a second reference run differs too."""

    num_prompts: int = 0
    num_different: int = 0
    num_first: int = 0
    num_noisy: int = 0
    greatest_near: float = 0.0
    far: list[tuple[int, int, float]] = attrs.field(factory=list)

    def add(self, at: int, tokens: Sequence[int], one: Said, again: Said | None = None) -> None:
        """Compare what was said to prompt number `at`. `again` is what the same engine says in other batches."""
        self.num_prompts += 1
        pairs = enumerate(zip(tokens, one.tokens, strict=True))
        where = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
        if where is None:
            return
        self.num_different += 1
        self.num_first += where == 0
        if one.margins[where] < NEAR:
            self.greatest_near = max(self.greatest_near, one.margins[where])
        elif again is not None and again.tokens != one.tokens:
            self.num_noisy += 1
        else:
            self.far.append((at, where, round(one.margins[where], 4)))
