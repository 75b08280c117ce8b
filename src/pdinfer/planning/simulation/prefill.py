"""A simulated prefill engine: a `PrefillScheduler` decides, and the host's function says what steps take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from pdinfer.planning.simulation.deployment import EngineModel, StepRows, seconds
from pdinfer.planning.simulation.engine import SimEngine
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.links import SimLinks, SimTransfer
from pdinfer.planning.simulation.pages import Held, SimPages
from pdinfer.planning.simulation.world import World
from pdinfer.scheduling.prefill import PrefillScheduler, ScheduledPrompt
from pdinfer.stats import PrefillCost, PrefillLoad, QueuedSizes


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


class Prefill(SimEngine):
    """One engine. Prompts hold their pages until they have landed, which `landed` is told. `stopped` is told of
    requests that were to be stopped, when nobody writes their pages at decode any more. It counts the pages of its
    scheduler (`PromptPages`)."""

    def __init__(
        self,
        number: int,
        model: EngineModel,
        pages: SimPages,
        world: World,
        links: SimLinks,
        *,
        landed: Callable[[SimPrompt], None],
        stopped: Callable[[Job], None],
        shares_pool: bool,
    ) -> None:
        super().__init__("P", number, model, pages, world)
        self.scheduler: PrefillScheduler[SimPrompt] = PrefillScheduler(self, model.engine, lambda: world.now_s)
        self._links, self._landed, self._stopped = links, landed, stopped
        self._shares_pool = shares_pool
        self._step: list[tuple[SimPrompt, int]] = []
        self._new: list[SimPrompt] = []
        self._stopping: list[SimPrompt] = []
        self._num_begun = 0
        self._sent: deque[tuple[float, SimPrompt]] = deque()
        self._began_s = 0.0
        self._load: PrefillLoad | None = None  # as long as nothing has changed that a policy could see

    # -- what comes from outside -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a prompt for which decode has granted pages."""
        self._load = None
        now_s = self._world.now_s
        taken_s = (
            now_s if self.group.due_s == math.inf else self.group.due_s
        )  # what was left at the grant counts from there on
        prompt = SimPrompt(
            job=job,
            room=job.room,
            arrival=next(self._arrivals),
            submitted_at=now_s,
            is_resumed=job.num_output > 0,
            deadline_at=job.deadline_at and job.deadline_at + taken_s - (job.granted_s or 0.0),
            priority=job.priority,
            num_tokens=job.num_tokens,
            num_pushed=job.num_found,
        )
        self.scheduler.wait(prompt)
        self._new.append(prompt)
        self.poke()

    def poke(self) -> None:
        """Begin a step if none is under way."""
        if self.group.due_s == math.inf:
            self._world.soon(self.group.begin)

    def cancel(self, job: Job) -> None:
        """Forget the prompt of a request that goes elsewhere."""
        self._load = None
        for prompt in self._prompts_of(job):
            if prompt.admitted >= 0 and not self._shares_pool:
                self.pages.release(prompt.held)
            self.scheduler.leave(prompt)

    def stop(self, job: Job) -> bool:
        """Stop the prompt of a request that has ended, at the next step. Return False if it is not here."""
        prompts = self._prompts_of(job)
        self._stopping += prompts
        self.poke()
        return bool(prompts)

    def fail(self) -> None:
        """Stop for good."""
        self.due_s = math.inf
        self.scheduler.clear()

    def load(self) -> PrefillLoad:
        """Return what the host knows, which is from before the step under way. All tokens of prompts that wait count,
        and by size those that are not cached, as far as the engine has looked."""
        if self._load is None:
            under_way = self._num_begun if self.due_s < math.inf else 0
            num_tokens, sizes = 0, []
            for prompt in self.scheduler.unfinished:
                is_queued = prompt.admitted in (-1, under_way)
                num_tokens += prompt.num_tokens if is_queued else prompt.num_remaining
                if prompt.taken in (-1, under_way):
                    sizes.append(prompt.num_tokens)
                else:
                    sizes.append(prompt.num_uncached if is_queued else prompt.num_remaining)
            costs, config = self.scheduler.costs, self.model.engine
            step_s, token_s = costs.weights
            chunk = config.chunked_prefill_size
            self._load = PrefillLoad(
                address=self.address,
                num_free_pages=self.pages.num_free,
                num_cached_pages=self.pages.num_cached,
                num_total_pages=self.pages.num_pages,
                page_size=self.page_size,
                token_bytes=self._links.network.token_bytes,
                num_tokens=costs.num_tokens,
                busy_s=costs.busy_s,
                num_queued_requests=len(sizes),
                num_queued_tokens=num_tokens,
                queued=QueuedSizes.of(sizes),
                cost=PrefillCost(
                    step_s=step_s, token_s=token_s, chunk_tokens=config.max_prefill_tokens if chunk == -1 else chunk
                ),
            )
        return self._load

    def _prompts_of(self, job: Job) -> list[SimPrompt]:
        return [prompt for prompt in self.scheduler.unfinished if prompt.job is job]

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether it has a prompt to compute."""
        return bool(self.scheduler.unfinished)

    @property
    def wants_step(self) -> bool:
        """Always: a step returns pages of what has been sent, if nothing else."""
        return True

    def decide(self) -> bool:
        """Do what `PrefillEngine.step` does before the model runs."""
        self._load = None
        self._return_pages(self._world.now_s)
        self._num_begun += 1
        for prompt in self._new:
            prompt.taken = self._num_begun
            prompt.num_uncached = prompt.num_tokens - self._found(prompt).num_known * self.page_size
        self._new.clear()
        for prompt in self._stopping:
            self.cancel(prompt.job)
            self._stopped(prompt.job)
        self._stopping.clear()
        step = self._plan() if self.scheduler.unfinished else []
        if not step and self._sent:
            self._return_pages(math.inf)
            step = self._plan()
        self._step = step
        return bool(step)

    def _plan(self) -> list[tuple[SimPrompt, int]]:
        while (prompt := self.scheduler.start()) is not None:
            self._admit(prompt)
        return self.scheduler.plan(None)

    def took_s(self, num_steps: int) -> list[float]:
        """Return the seconds of the step, which is always one."""
        return [seconds("prefill_s", self.model.step_s, _rows(self._step))] * num_steps

    def began(self, ends_s: Sequence[float]) -> None:
        """Push what the step computes while it runs."""
        if not self._step:
            return
        self._began_s = self._world.now_s
        for prompt, count in self._step:
            prompt.pushes = max(0, prompt.num_computed + count - prompt.num_pushed)
            if prompt.pushes:
                prompt.transfer = self._links.push((prompt.job.prefill, prompt.job.decode), prompt.pushes)
        self.end_at(ends_s[0])

    def finish(self) -> None:
        """Note what the step has computed, and let prompts that are whole land."""
        self._load = None
        step, self._step = self._step, []
        now_s = self._world.now_s
        self.scheduler.ran(sum(count for _, count in step), now_s - self._began_s)
        for prompt, count in step:
            prompt.num_computed += count
            prompt.num_pushed = max(prompt.num_pushed, prompt.num_computed)
            if not prompt.num_remaining and prompt in self.scheduler.active:
                self.scheduler.leave(prompt)
                prompt.job.prefilled_s = now_s
                self._links.land(prompt.transfer, prompt.pushes, partial(self._land, prompt))

    def _land(self, prompt: SimPrompt) -> None:
        """Note that nothing reads the pages of a prompt any more. The next step that begins later returns them, and
        others find them from then on."""
        self._sent.append((self._world.now_s, prompt))
        self.poke()
        self._landed(prompt)

    def cut(self) -> None:
        """Do nothing: a prefill runs one step at a time."""

    # -- pages -------------------------------------------------------------------------------------------------------

    def is_full(self, prompt: SimPrompt, /) -> bool:
        """Return whether more than `send_window_bytes` wait for the decode of this prompt."""
        waiting = self._links.backlog.get((prompt.job.prefill, prompt.job.decode), 0.0)
        return waiting > self.model.engine.send_window_bytes

    def num_needed(self, prompt: SimPrompt, /) -> int:
        """Return how many available pages the prompt takes when it starts: none in a pool shared with decode."""
        if self._shares_pool:
            return 0
        found = self._found(prompt)
        return -(-prompt.num_tokens // self.page_size) - found.num_known + self.pages.num_unused(found)

    def _found(self, prompt: SimPrompt) -> Held:
        if not self._shares_pool:
            prompt.held = self.find(prompt.job, prompt.num_tokens)
        return prompt.held

    def _admit(self, prompt: SimPrompt) -> None:
        """Take the pages of a prompt that starts."""
        job, known = prompt.job, prompt.held
        prompt.admitted = self._num_begun
        job.began_s = self._world.now_s
        if self._shares_pool:
            prompt.num_computed = job.num_found
        else:
            self.pages.share(known)
            known.num_own = -(-prompt.num_tokens // self.page_size) - known.num_known
            self.pages.take(known.num_own)
            prompt.num_computed = known.num_known * self.page_size
        if job.committed_s is None:
            job.num_cached = prompt.num_computed

    def _return_pages(self, before_s: float) -> None:
        while self._sent and self._sent[0][0] < before_s:
            _, prompt = self._sent.popleft()
            if not self._shares_pool:
                self.pages.keep(prompt.held, prompt.job.keys(self.page_size, prompt.num_tokens))
                self.pages.release(prompt.held)


def _rows(step: Sequence[tuple[SimPrompt, int]]) -> StepRows:
    num_tokens = num_context = num_pairs = 0
    for prompt, count in step:
        num_tokens += count
        num_context += prompt.num_computed + count
        num_pairs += count * prompt.num_computed + count * (count + 1) // 2
    return StepRows(len(step), num_tokens, num_context, num_pairs)
