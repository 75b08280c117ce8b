"""What a prefill engine decides: which prompt may start, and how many tokens of each run in a step.

It counts pages and reads a clock. Whoever obeys has the pages and the links: a `PrefillEngine` real ones, a simulated
prefill counts and modelled seconds."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from functools import cached_property, partial
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import attrs

from pdinfer.config import EngineConfig
from pdinfer.scheduling.rules import (
    Scheduled,
    StepCosts,
    by_age,
    chunk_beside,
    is_late,
    order_of,
    plan_chunk,
    share_a_step,
)

FIRST = (False, -math.inf, False)
"""Sorts before every class of prompts, which is (is late, minus the priority, has given no token)."""

SINCE = attrgetter("submitted_at")


@attrs.define(eq=False, kw_only=True)
class ScheduledPrompt(Scheduled):
    """One prompt as the decisions see it, with the tokens that its request has given already. Of its `num_tokens`
    tokens, `num_computed` are in the pages."""

    num_tokens: int
    num_computed: int = 0

    @property
    def num_remaining(self) -> int:
        """How many tokens are still to run."""
        return self.num_tokens - self.num_computed

    @cached_property
    def order(self) -> tuple[int, bool, float, int]:
        """The sort key of waiting and of active prompts. Readers of those that are resumed wait for the next token."""
        is_new = not self.is_resumed
        return order_of(self.priority, self.submitted_at, self.deadline_at, self.arrival, is_new=is_new)


P = TypeVar("P", bound=ScheduledPrompt)
P_contra = TypeVar("P_contra", bound=ScheduledPrompt, contravariant=True)


class PromptPages(Protocol[P_contra]):
    """The pages and links of prefill. `num_available` pages can be had within all limits."""

    @property
    def num_available(self) -> int: ...

    def is_full(self, prompt: P_contra, /) -> bool:
        """Return whether too many bytes are on their way to the decode of this prompt."""

    def num_needed(self, prompt: P_contra, /) -> int:
        """Return how many available pages the prompt takes when it starts."""


class PrefillScheduler(Generic[P]):
    """The prompts of a prefill: those in the `queue`, in the order of their turns, and those that are `active`. `costs`
    is what steps have taken, for each step and each token."""

    def __init__(self, pages: PromptPages[P], config: EngineConfig, clock: Callable[[], float]) -> None:
        self.costs = StepCosts(2)
        self._pages, self._config, self._clock = pages, config, clock
        self._num_starts = 0
        self.num_steps = 0
        self.clear()

    def clear(self) -> None:
        """Forget all prompts."""
        self.queue: list[P] = []
        self.active: list[P] = []

    @property
    def unfinished(self) -> list[P]:
        """The prompts that are not computed yet."""
        return [*self.queue, *self.active]

    def wait(self, prompt: P) -> None:
        """Queue a prompt."""
        insort(self.queue, prompt, key=attrgetter("order"))

    def leave(self, prompt: P) -> None:
        """Forget a prompt that is computed or given up."""
        for prompts in (self.queue, self.active):
            if prompt in prompts:
                prompts.remove(prompt)

    def next(self) -> P | None:
        """Return the prompt that may start now. A prompt whose decode is full lets others pass. A prompt that waits for
        pages does not, or a long prompt would wait for ever."""
        if not self.queue or len(self.active) >= self._config.max_running_requests:
            return None
        able = partial(filter, lambda prompt: not self._pages.is_full(prompt), self.queue)
        oldest = by_age(able(), SINCE, num_turns=self._num_starts, now=self._clock())
        first = oldest or next(able(), None)
        return first if first is not None and self._fits(first) else None

    def start(self) -> P | None:
        """Let the prompt start whose turn it is, and return it; None if no prompt may."""
        prompt = self.next()
        if prompt is not None:
            self.queue.remove(prompt)
            self.active.append(prompt)
            self._num_starts += 1
        return prompt

    def plan(self, decoding_s: float | None) -> list[tuple[P, int]]:
        """Return the prompts of the next step, each with its number of tokens. It takes turns with decode steps of
        `decoding_s`, unless that is None.

        A prompt that cannot meet its deadline at the best speed so far gets what the others leave. Every
        OLDEST_EVERY-th step begins with the oldest prompt if that has waited long."""
        if not self.active:
            return []
        prompts = share_a_step(self.active, attrgetter("alone"), num_steps=self.num_steps)
        now, speed = self._clock(), self.costs.best_tokens_per_s
        classes: dict[P, tuple[bool, float, bool]] = {}
        for prompt in prompts:
            late = is_late(prompt.deadline_at, prompt.num_remaining, now=now, tokens_per_s=speed)
            classes[prompt] = (late, *prompt.order[:2])
        oldest = by_age(prompts, SINCE, num_turns=self.num_steps, now=now)
        if oldest is not None:
            classes[oldest] = FIRST
        prompts.sort(key=lambda prompt: (classes[prompt], prompt.order))
        counts = plan_chunk(
            [prompt.num_remaining for prompt in prompts],
            [classes[prompt] for prompt in prompts],
            chunk_size=self._chunk_size(decoding_s),
            max_tokens=self._config.max_prefill_tokens,
        )
        self.num_steps += 1
        return [(prompt, count) for prompt, count in zip(prompts, counts, strict=True) if count]

    def ran(self, num_tokens: int, took_s: float) -> None:
        """Learn from a step of so many tokens."""
        self.costs.count(num_tokens, took_s)
        self.costs.add((1.0, float(num_tokens)), took_s)

    def _fits(self, prompt: P) -> bool:
        needed = self._pages.num_needed(prompt)
        return not needed or needed <= self._pages.num_available

    def _chunk_size(self, decoding_s: float | None) -> int:
        """Return the most tokens of this step, so that what decodes in the same thread is not held up too long."""
        size, target_itl_s = self._config.chunked_prefill_size, self._config.target_itl_s
        if decoding_s is None or target_itl_s is None or size == -1:
            return size
        costs = self.costs
        step_s, token_s = costs.weights
        if not (step_s or token_s) and costs.num_tokens:
            token_s = costs.busy_s / costs.num_tokens
        best = costs.best_tokens_per_s
        return chunk_beside(
            decoding_s, target_itl_s=target_itl_s, chunk_size=size, costs=(step_s, token_s), tokens_per_s=best
        )
