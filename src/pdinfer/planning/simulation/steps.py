"""The steps of a simulated decode: those under way, what they take, and in which of them requests end."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from pdinfer.checks import clip
from pdinfer.errors import ConfigError
from pdinfer.planning.simulation.deployment import EngineModel, StepRows, seconds
from pdinfer.planning.simulation.job import Job
from pdinfer.scheduling.rules import StepCosts, decode_cost
from pdinfer.stats import DecodeCost

ARRAY_FROM = 4
"""A burst of fewer steps is faster without numpy."""


class Burst:
    """Steps that are worked out at once, with the same `num_rows`. These had `context` tokens at `began_s`. `ends_s`
    has when the steps end that have not ended, and `ended_s` when all others did. `drafting` are the requests of a step
    that checks drafts. `slot_s` is the time that rows ran."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self.drafts = model.engine.num_draft_tokens > 0
        self.drafting: list[Job] = []
        self.num_rows = self.context = 0
        self.began_s = self.slot_s = self.max_step_s = 0.0
        self.ends_s, self.ended_s = list[float](), list[float]()

    def form(self, running: Collection[Job], held_back: Collection[Job], context: int) -> None:
        """Take the requests that run, whose contexts have so many tokens, but for those that are held back."""
        self.num_rows = len(running) - len(held_back)
        self.context = context - sum(job.num_tokens for job in held_back)
        self.drafting = [job for job in running if job not in held_back] if self.drafts else []

    def took_s(self, num_steps: int, num_drafts: Callable[[Job], int]) -> np.ndarray | list[float]:
        """Return the seconds of so many steps, whose contexts grow by a token for each row. One that checks drafts has
        `num_drafts(job)` of each request."""
        model, num_rows, context = self._model, self.num_rows, self.context
        if num_steps >= ARRAY_FROM and model.takes_arrays:
            contexts = np.arange(context, context + num_rows * num_steps, num_rows)
            took = np.asarray(model.step_s(StepRows(num_rows, num_rows, contexts, contexts)), dtype=float)
            if not (took.min() >= 0 and math.isfinite(took.sum())):
                raise ConfigError(f"decode_s must return seconds, finite and at least 0, got {clip(took)}")
            return took if took.shape == contexts.shape else np.broadcast_to(took, contexts.shape)
        if self.drafts:
            return [seconds("decode_s", model.step_s, self._drafted_rows(num_drafts))]
        each = (context + num_rows * step for step in range(num_steps))
        return [seconds("decode_s", model.step_s, StepRows(num_rows, num_rows, size, size)) for size in each]

    def _drafted_rows(self, num_drafts: Callable[[Job], int]) -> StepRows:
        num_tokens, num_context, num_pairs = len(self.drafting), self.context, self.context
        for job in self.drafting:
            drafts = job.num_drafts = num_drafts(job)
            num_tokens, num_context = num_tokens + drafts, num_context + drafts
            num_pairs += drafts * job.num_tokens + drafts * (drafts + 1) // 2
        return StepRows(len(self.drafting), num_tokens, num_context, num_pairs)

    def begin(self, now_s: float, ends_s: Sequence[float]) -> float:
        """Let the steps end then, and return when the last one does."""
        self.began_s, self.ends_s = now_s, [*ends_s]
        before_s, due_s = [now_s, *ends_s][-2:]
        self.max_step_s = max(self.max_step_s, due_s - before_s)  # steps of a burst grow longer with the contexts
        return due_s

    def ended_by(self, now_s: float) -> list[float]:
        """Return the ends of steps that are to be counted."""
        return self.ends_s[: bisect_right(self.ends_s, now_s)]

    def end(self, ended_s: Sequence[float]) -> None:
        """Count the first steps, which ended then."""
        self.context += self.num_rows * len(ended_s)
        self.slot_s += (ended_s[-1] - self.began_s) * self.num_rows
        self.began_s = ended_s[-1]
        self.ended_s += ended_s
        del self.ends_s[: len(ended_s)]


class Finishes:
    """The steps in which `running` requests get their last token, the next first. One that ends in another step than
    was noted is noted again, and what was noted before does not count."""

    def __init__(self, running: Collection[Job]) -> None:
        self._running = running
        self._steps: list[tuple[int, int, Job]] = []

    def note(self, job: Job) -> None:
        heappush(self._steps, (job.end_step, job.number, job))

    def next(self) -> int:
        """Return the step in which the next request ends. One must run."""
        while not self._counts():
            heappop(self._steps)
        return self._steps[0][0]

    def until(self, step: int) -> Iterator[Job]:
        """Yield the requests that end by this step, which are to be let go of."""
        while self._steps and self._steps[0][0] <= step:
            counts = self._counts()
            job = heappop(self._steps)[2]
            if counts:
                yield job

    def _counts(self) -> bool:
        end_step, _, job = self._steps[0]
        return job in self._running and job.end_step == end_step


LEARN_ALL, LEARN_EVERY = 2048, 128
"""A decode learns its costs from all of its first steps, and of those after its speed has changed, and later from one
in so many, which saves time. A real one goes on learning from all."""


class DecodeLearning:
    """Teaches the `costs` of a scheduler what steps take, as a real decode does, from fewer of them."""

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
