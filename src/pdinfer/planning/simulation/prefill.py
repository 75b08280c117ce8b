"""A simulated prefill engine: a `PrefillScheduler` decides, and the host's function says what steps take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import attrs

from pdinfer.planning.simulation.deployment import EngineModel, StepRows, seconds
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.links import SimTransfer
from pdinfer.planning.simulation.pages import Held, SimPages
from pdinfer.planning.simulation.world import World
from pdinfer.scheduling.prefill import PrefillScheduler, ScheduledPrompt
from pdinfer.scheduling.rules import withheld_pages
from pdinfer.stats import PrefillCost


@attrs.define(eq=False, kw_only=True)
class SimPrompt(ScheduledPrompt):
    """One attempt of a request here. All but `num_uncached` of its tokens were in the pages when it came. Those up to
    `num_pushed` are at decode or on the way. `pushes` are the tokens that the newest step pushes, by `transfer`. The
    engine took it in step `taken` and admitted it in step `admitted`; -1 is not yet. `held` is what it found of the
    pages, and holds once it is admitted."""

    job: Job
    room: int
    num_pushed: int
    held: Held = attrs.field(factory=Held)
    num_uncached: int = 0
    taken: int = -1
    admitted: int = -1
    pushes: int = 0
    transfer: SimTransfer | None = None


class PrefillWorld(World, Protocol):
    """What prefills ask of their simulation besides."""

    def is_full(self, prompt: SimPrompt, /) -> bool:
        """Return whether more than `send_window_bytes` wait for the decode of this prompt."""

    def push(self, prompt: SimPrompt, now_s: float) -> None:
        """Send `prompt.pushes` tokens while the step computes them."""

    def settle(self, job: Job, now_s: float) -> None:
        """Tell the decode that has given a request up that nobody writes its pages any more."""

    def hand_off(self, prompt: SimPrompt, now_s: float) -> None:
        """Tell decode that a prompt is computed. `Prefill.sent` is called once its last byte has left."""


class Prefill:
    """One engine. Prompts hold their pages until they are sent. `num_changes` grows with whatever a policy could see.
    It counts the pages of its scheduler (`PromptPages`)."""

    def __init__(
        self, number: int, model: EngineModel, pages: SimPages, world: PrefillWorld, *, shares_pool: bool
    ) -> None:
        self.number, self.pages, self.model, self._config = number, pages, model, model.engine
        self.page_size = model.cache.page_size
        self.speed, self.due_s = 1.0, math.inf
        self.scheduler: PrefillScheduler[SimPrompt] = PrefillScheduler(self, model.engine, lambda: world.now_s)
        self.is_full = world.is_full
        self.num_changes = 0
        self._world = world
        self._shares_pool = shares_pool
        self._num_withheld = withheld_pages(
            pages.num_pages, page_size=self.page_size, max_total_tokens=model.engine.max_total_tokens
        )
        self._num_arrivals = 0
        self._step: list[tuple[SimPrompt, int]] = []
        self._new: list[SimPrompt] = []
        self._stopped: list[SimPrompt] = []
        self._num_begun = 0
        self._sent: deque[tuple[float, SimPrompt]] = deque()
        self._began_s = 0.0

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a prompt for which decode has granted pages."""
        self.num_changes += 1
        taken_s = now_s if self.due_s == math.inf else self.due_s  # what was left at the grant counts from there on
        prompt = SimPrompt(
            job=job,
            room=job.room,
            arrival=self._num_arrivals,
            submitted_at=now_s,
            is_resumed=job.num_output > 0,
            deadline_at=job.deadline_at and job.deadline_at + taken_s - (job.granted_s or 0.0),
            priority=job.priority,
            num_tokens=job.num_tokens,
            num_pushed=job.num_found,
        )
        self._num_arrivals += 1
        self.scheduler.wait(prompt)
        self._new.append(prompt)
        self.poke()

    def change_speed(self, speed: float, now_s: float) -> None:
        """Run at another speed from the next step on."""
        self.speed = speed

    def poke(self) -> None:
        """Begin a step if none is under way."""
        if self.due_s == math.inf:
            self._world.soon(self)

    def wake(self, now_s: float) -> None:
        """Go on after a step, if one ends now."""
        if now_s != self.due_s:
            return
        self.due_s = math.inf
        self.num_changes += 1
        step, self._step = self._step, []
        self.scheduler.ran(sum(count for _, count in step), now_s - self._began_s)
        for prompt, count in step:
            prompt.num_computed += count
            prompt.num_pushed = max(prompt.num_pushed, prompt.num_computed)
            if not prompt.num_remaining and prompt in self.scheduler.active:
                self.scheduler.leave(prompt)
                prompt.job.prefilled_s = now_s
                self._world.hand_off(prompt, now_s)
        self._world.soon(self)

    def sent(self, prompt: SimPrompt, now_s: float) -> None:
        """Note that nothing reads the pages of a prompt any more. The next step that begins later returns them, and
        others find them from then on."""
        self._sent.append((now_s, prompt))
        self.poke()

    def _return_pages(self, before_s: float) -> None:
        while self._sent and self._sent[0][0] < before_s:
            _, prompt = self._sent.popleft()
            if not self._shares_pool:
                self.pages.keep(prompt.held, prompt.job.keys(self.page_size, prompt.num_tokens))
                self.pages.release(prompt.held)

    def cancel(self, job: Job) -> None:
        """Forget the prompt of a request that goes elsewhere."""
        self.num_changes += 1
        for prompt in [prompt for prompt in self.scheduler.unfinished if prompt.job is job]:
            if prompt.admitted >= 0 and not self._shares_pool:
                self.pages.release(prompt.held)
            self.scheduler.leave(prompt)

    def stop(self, job: Job) -> bool:
        """Stop the prompt of a request that has ended, at the next step. Return False if it is not here."""
        stopped = [prompt for prompt in self.scheduler.unfinished if prompt.job is job]
        self._stopped += stopped
        self.poke()
        return bool(stopped)

    def fail(self) -> None:
        """Stop for good."""
        self.due_s = math.inf
        self.scheduler.clear()

    @property
    def chunk_tokens(self) -> int:
        """The most tokens of a step."""
        chunk = self._config.chunked_prefill_size
        return self._config.max_prefill_tokens if chunk == -1 else chunk

    @property
    def max_tokens(self) -> int:
        """The longest prompt and output that it takes."""
        return (self.pages.num_pages - self._num_withheld) * self.page_size

    @property
    def cost(self) -> PrefillCost:
        """What its steps take, as it has learned."""
        step_s, token_s = self.scheduler.costs.weights
        return PrefillCost(step_s=step_s, token_s=token_s, chunk_tokens=self.chunk_tokens)

    def num_found(self, job: Job) -> int:
        """Return how many tokens of a request its pages hold."""
        size = self.page_size
        return self.pages.find(job.keys(size, job.num_tokens), (job.num_tokens - 1) // size).num_known * size

    def sizes(self) -> tuple[int, list[int]]:
        """Return what the host knows, which is from before the step under way: all tokens to compute, where prompts
        that wait count in full, and those of each prompt without what is cached, as far as the engine has looked."""
        under_way = self._num_begun if self.due_s < math.inf else 0
        total, sizes = 0, []
        for prompt in self.scheduler.unfinished:
            is_queued = prompt.admitted in (-1, under_way)
            total += prompt.num_tokens if is_queued else prompt.num_remaining
            if prompt.taken in (-1, under_way):
                sizes.append(prompt.num_tokens)
            else:
                sizes.append(prompt.num_uncached if is_queued else prompt.num_remaining)
        return total, sizes

    def begin(self, now_s: float) -> None:
        """Do what `PrefillEngine.step` does, unless a step is under way, and work out when the model has run."""
        if self.due_s < math.inf or not self._world.may_begin(self, now_s):
            return
        self.num_changes += 1
        self._return_pages(now_s)
        self._num_begun += 1
        for prompt in self._new:
            prompt.taken = self._num_begun
            prompt.num_uncached = prompt.num_tokens - self._find(prompt).num_known * self.page_size
        self._new.clear()
        for prompt in self._stopped:
            self.cancel(prompt.job)
            self._world.settle(prompt.job, now_s)
        self._stopped.clear()
        step = self._plan(now_s) if self.scheduler.unfinished else []
        if not step and self._sent:
            self._return_pages(math.inf)
            step = self._plan(now_s)
        if step:
            self._run(step, now_s)

    def _plan(self, now_s: float) -> list[tuple[SimPrompt, int]]:
        self._admit(now_s)
        return self.scheduler.plan(None)

    def _run(self, step: list[tuple[SimPrompt, int]], now_s: float) -> None:
        self._step, self._began_s = step, now_s
        took_s = seconds("prefill_s", self.model.step_s, _rows(step)) / self.speed
        noise = self._world.chance.noise(1)
        self.due_s = now_s + (took_s if noise is None else took_s * float(noise[0]))
        for prompt, count in step:
            prompt.pushes = max(0, prompt.num_computed + count - prompt.num_pushed)
            if prompt.pushes:
                self._world.push(prompt, now_s)
        self._world.wake(self, self.due_s)

    def _admit(self, now_s: float) -> None:
        while (prompt := self.scheduler.start()) is not None:
            job, known = prompt.job, prompt.held
            prompt.admitted = self._num_begun
            job.began_s = now_s
            if self._shares_pool:
                prompt.num_computed = job.num_found
            else:
                self.pages.share(known)
                known.num_own = -(-prompt.num_tokens // self.page_size) - known.num_known
                self.pages.take(known.num_own)
                prompt.num_computed = known.num_known * self.page_size
            if job.committed_s is None:
                job.num_cached = prompt.num_computed

    # -- what the scheduler asks --------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that can be had; zero or less when there are none."""
        return self.pages.num_available - self._num_withheld

    def num_needed(self, prompt: SimPrompt, /) -> int:
        """Return how many available pages the prompt takes when it starts: none in a pool shared with decode."""
        if self._shares_pool:
            return 0
        found = self._find(prompt)
        return -(-prompt.num_tokens // self.page_size) - found.num_known + self.pages.num_unused(found)

    def _find(self, prompt: SimPrompt) -> Held:
        if not self._shares_pool:
            keys, size = prompt.job.keys(self.page_size, prompt.num_tokens), self.page_size
            prompt.held = self.pages.find(keys, (prompt.num_tokens - 1) // size)
        return prompt.held


def _rows(step: Sequence[tuple[SimPrompt, int]]) -> StepRows:
    num_tokens = num_context = num_pairs = 0
    for prompt, count in step:
        num_tokens += count
        num_context += prompt.num_computed + count
        num_pairs += count * prompt.num_computed + count * (count + 1) // 2
    return StepRows(len(step), num_tokens, num_context, num_pairs)
