"""A simulated decode engine: a `DecodeScheduler` decides, and the host's function says what steps take.

Steps between two decisions are equal but for their contexts. They are worked out at once, as a burst, which is cut at
the end of the step that is under way when something comes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pdinfer.checks import clip
from pdinfer.errors import ConfigError
from pdinfer.planning.simulation.deployment import EngineModel, StepRows, seconds
from pdinfer.planning.simulation.engine import SimEngine
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.learning import DecodeLearning
from pdinfer.planning.simulation.pages import SimPages
from pdinfer.planning.simulation.tables import SimTables
from pdinfer.planning.simulation.world import World
from pdinfer.scheduling.decode import DecodeScheduler, SequenceState
from pdinfer.stats import DecodeLoad, changed

MAX_BURST = 128
"""Steps that are worked out at once."""
ARRAY_FROM = 4
"""A burst of fewer steps is faster without numpy."""


class _Decided(NamedTuple):
    """The load before a step, and what the step did."""

    before: DecodeLoad
    joined: list[Job]
    ended: list[Job]
    granted: list[Job]
    held_back: list[Job]


class Decode(SimEngine):
    """One engine. `ends` has when each of its steps ended. Requests in `landed` have all their KV and join the next
    step; until then they are granted, too. `tell` lets the host learn at a time what was granted and what has ended.
    `abort` lets the prefill of a granted request stop, after which `settle` is called."""

    def __init__(
        self,
        number: int,
        model: EngineModel,
        pages: SimPages,
        world: World,
        *,
        tell: Callable[[float, Sequence[Job], Sequence[Job]], None],
        abort: Callable[[Job], None],
        shares_pool: bool,
        token_bytes: int = 0,
    ) -> None:
        super().__init__("D", number, model, pages, world)
        self.ends: list[float] = []
        self.landed: list[Job] = []
        self._by_writer = model.cache.trust_domain == "writer" and not shares_pool
        self.tables = SimTables(self, self.ends, by_writer=self._by_writer)
        self.scheduler: DecodeScheduler[Job] = DecodeScheduler(
            self.tables, model.engine, lambda: world.now_s, num_pages=pages.num_pages, page_size=self.page_size
        )
        self.context = self.most_slots = 0
        self.slot_s = self.max_step_s = 0.0
        self._tell, self._abort, self._token_bytes = tell, abort, token_bytes
        self._drafts = model.engine.num_draft_tokens > 0
        self._learning = DecodeLearning(self.scheduler.costs)
        self._before: DecodeLoad | None = None  # as long as the first step of a burst is under way
        self._is_planned = False
        self._decided: _Decided | None = None
        self._finishes: list[tuple[int, int, Job]] = []
        self._burst: list[float] = []
        self._batch: list[Job] = []  # of the step under way, if it drafts
        self._began_s, self._num_batch, self._batch_context = 0.0, 0, 0  # of the next step to end

    # -- what comes from outside -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a request."""
        now_s = self._world.now_s
        job.begin(next(self._arrivals), now_s)
        self.scheduler.wait(job)
        if (load := self._before) is not None:
            self._before = changed(
                load,
                num_waiting_requests=load.num_waiting_requests + 1,
                num_waiting_tokens=load.num_waiting_tokens + job.num_tokens,
            )
        self.poke()
        if job.deadline_at is not None and (due_s := self.group.due_s) < math.inf:
            job.deadline_at += due_s - now_s  # what is left of it counts from the step that takes the request

    def land(self, job: Job) -> None:
        """Take the last byte of a hand-off."""
        self.landed.append(job)
        self.poke()

    def give_up(self, job: Job) -> None:
        """Abort the attempt of a granted request whose prefill is gone, and queue it for another prefill."""
        if self.scheduler.take_over(job):
            self.pages.release(job.held)
            self.poke()

    def settle(self, job: Job) -> None:
        """Free the pages of a room that was given up: its prefill has stopped."""
        if self.tables.settle(job):
            self.poke()

    def drop(self, job: Job) -> None:
        """Forget a request that holds no KV and cannot go on."""
        self.scheduler.leave(job)
        self.pages.release(job.held)
        self.poke()

    def fail(self) -> list[Job]:
        """Stop for good, and return the requests that it had."""
        self.sync()
        scheduler = self.scheduler
        jobs = [*scheduler.running, *scheduler.granted, *scheduler.waiting]
        for job in [*scheduler.running]:
            self._end(job)
        scheduler.clear()
        self.tables.orphans.clear()
        self.landed, self.due_s, self._burst = [], math.inf, []
        return jobs

    def poke(self) -> None:
        """Decide at the end of the step under way, or now if there is none."""
        if self.group.due_s == math.inf:
            self._world.soon(self.group.begin)
        else:
            self.group.cut()

    def change_speed(self, speed: float) -> None:
        """Run at another speed from the next step on."""
        super().change_speed(speed)
        self._learning.begin_anew(len(self.ends))
        self.cut()

    def cut(self) -> None:
        """End the burst with the step that is under way."""
        self.sync()
        if len(self._burst) > 1:
            del self._burst[1:]
            self.end_at(self._burst[0])

    def load(self) -> DecodeLoad:
        """Return what the host knows: the state after the last step, with what it has submitted since."""
        self.sync()
        if self._before is not None:
            return self._before
        scheduler = self.scheduler
        return DecodeLoad(
            address=self.address,
            num_free_pages=self.pages.num_free + (self.tables.needs(1)[0] if self._burst else 0),
            num_cached_pages=self.pages.num_cached,
            num_total_pages=self.pages.num_pages,
            page_size=self.page_size,
            token_bytes=self._token_bytes,
            num_tokens=scheduler.costs.num_tokens,
            busy_s=scheduler.costs.busy_s,
            num_waiting_requests=len(scheduler.waiting),
            num_waiting_tokens=sum(job.num_tokens for job in scheduler.waiting),
            num_granted_requests=len(scheduler.granted),
            num_running_requests=len(scheduler.running),
            num_running_tokens=self.context + sum(job.num_tokens for job in scheduler.granted),
            max_running_requests=self.model.engine.max_running_requests,
            cost=self._learning.cost,
        )

    def num_found(self, job: Job, writer: int | None = None) -> int:
        """Return how many tokens of a request its pages hold. Where they are kept apart by writer, those of this
        prefill count, and none without one."""
        if not self._by_writer:
            return super().num_found(job)
        return 0 if writer is None else self.find(job, job.num_tokens, writer).num_known * self.page_size

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether it has a request."""
        return bool(self.scheduler.running or self.scheduler.granted or self.scheduler.waiting)

    def decide(self) -> bool:
        """Do what `DecodeEngine.step` does before the batch runs: what landed joins, and pages are granted. The host
        learns of it when the step ends."""
        self._decided = None
        if not self.has_work:
            return False
        before, overdue = self.load(), self._expire()
        joined, ended = self._join()
        granted = self._grant()
        held_back = self._held_back() if self.scheduler.running else []
        self._decided = _Decided(before, joined, [*ended, *overdue], granted, held_back)
        if len(self.scheduler.running) == len(held_back):
            return False
        self._num_batch = len(self.scheduler.running) - len(held_back)
        context = self.context - sum(job.num_tokens for job in held_back)
        for job in held_back:  # they leave this step out
            job.note_steps()
            job.since += 1
            self._shift(job, -1)
        self._batch = [job for job in self.scheduler.running if job not in held_back] if self._drafts else []
        self._batch_context = context
        return True

    def began(self, ends_s: Sequence[float]) -> None:
        """Note when its steps end, and let the host learn what was decided when the first of them does."""
        if (decided := self._decided) is None:
            return
        told_s = ends_s[0] if ends_s else self._world.now_s
        if len(self.scheduler.running) > len(decided.held_back):
            self._run(ends_s)
            self._before = decided.before
        elif not ends_s and self.scheduler.next_turn() is not None:  # what was retracted has left pages
            self.end_at(told_s)
        for job in decided.joined:
            if job not in decided.held_back:
                job.read_s[-1] = told_s
        if decided.granted or decided.ended:
            self._tell(told_s, decided.granted, decided.ended)

    def _run(self, ends_s: Sequence[float]) -> None:
        """Let the next steps end then."""
        self._began_s, self._burst = self._world.now_s, [*ends_s]
        if not self._is_planned:
            self.pages.take(self.tables.needs(1)[0])
        before_s, due_s = [self._began_s, *ends_s][-2:]
        self.max_step_s = max(self.max_step_s, due_s - before_s)  # steps of a burst grow longer with the contexts
        self.most_slots = max(self.most_slots, len(self.scheduler.running) + len(self.scheduler.granted))
        self.end_at(due_s)

    @property
    def num_alike(self) -> int:
        """For how many steps nothing is to be decided: until a request ends or a page is missing. After one step
        a rival may have its turn; one that was planned is followed by another plan; and where requests wait while pages
        are kept for growth, fewer are kept after each."""
        scheduler, finishes = self.scheduler, self._finishes
        has_slot = len(scheduler.running) < self.model.engine.max_running_requests
        is_pressed = scheduler.waiting and scheduler.growth_share and has_slot
        if self._is_planned or is_pressed or (self.rival is not None and self.rival.has_work):
            return 1
        while finishes[0][2] not in scheduler.running or finishes[0][2].end_step != finishes[0][0]:
            heappop(finishes)
        return self.tables.affordable(min(MAX_BURST, finishes[0][0] - len(self.ends)))

    def took_s(self, num_steps: int) -> np.ndarray | list[float]:
        """Return the seconds of so many steps, whose contexts grow by a token for each row."""
        model, num_rows, context = self.model, self._num_batch, self._batch_context
        if num_steps >= ARRAY_FROM and model.takes_arrays:
            contexts = np.arange(context, context + num_rows * num_steps, num_rows)
            took = np.asarray(model.step_s(StepRows(num_rows, num_rows, contexts, contexts)), dtype=float)
            if not (took.min() >= 0 and math.isfinite(took.sum())):
                raise ConfigError(f"decode_s must return seconds, finite and at least 0, got {clip(took)}")
            return np.broadcast_to(took, contexts.shape)
        if self._drafts:
            return [seconds("decode_s", model.step_s, self._drafted_rows(context))]
        each = (context + num_rows * step for step in range(num_steps))
        return [seconds("decode_s", model.step_s, StepRows(num_rows, num_rows, size, size)) for size in each]

    def _drafted_rows(self, context: int) -> StepRows:
        """Return the sizes of a step that checks drafts, and decide how many of each request."""
        num_tokens, num_context, num_pairs = len(self._batch), context, context
        for job in self._batch:
            drafts = job.num_drafts = self.scheduler.num_drafts(job)
            num_tokens, num_context = num_tokens + drafts, num_context + drafts
            num_pairs += drafts * job.num_tokens + drafts * (drafts + 1) // 2
        return StepRows(len(self._batch), num_tokens, num_context, num_pairs)

    def finish(self) -> None:
        """End the requests that get their last token in the step that ends now."""
        self.sync()
        ended, finishes = [], self._finishes
        while finishes and finishes[0][0] <= len(self.ends):
            end_step, _, job = heappop(finishes)
            if job in self.scheduler.running and job.end_step == end_step:
                self._end(job)
                ended.append(job)
        if ended:
            self._tell(self._world.now_s, (), ended)

    def sync(self) -> None:
        """Count the steps that have ended by now."""
        count = bisect_right(self._burst, self._world.now_s)
        if not count:
            return
        ended = self._burst[:count]
        for _ in range(0 if self._is_planned else count):
            self.scheduler.learn(num_retracted=0)
        self._is_planned, self._before = False, None
        self._learning.learn(self._began_s, ended, len(self.ends), self._num_batch, self._batch_context)
        self._batch_context += self._num_batch * count
        took_s, self._began_s = ended[-1] - self._began_s, ended[-1]
        self.slot_s += took_s * self._num_batch
        del self._burst[:count]
        self.pages.take(sum(self.tables.needs(count + bool(self._burst))[1:]))  # the first has its pages
        self.ends += ended
        num_tokens = self._num_batch * count + sum(map(self._accept, self._batch))
        self.tables.trim()
        self.scheduler.costs.count(num_tokens, took_s)
        self.context += num_tokens

    def _accept(self, job: Job) -> int:
        """Give a request the drafts of the step that has ended that were right, and return how many they are."""
        num_accepted = self._world.num_accepted(job.num_drafts) if job.num_drafts else 0
        job.num_drafted += job.num_drafts
        job.accepted_s += [self.ends[-1]] * num_accepted
        if num_accepted:
            self._shift(job, num_accepted)
        return num_accepted

    def _shift(self, job: Job, by: int) -> None:
        """Let a request have `by` tokens more than by the steps that it runs."""
        self.tables.shift(job, by)
        heappush(self._finishes, (job.end_step, job.number, job))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _expire(self) -> list[Job]:
        """End the requests whose deadline is over, and return them. The pages of a room wait for its prefill."""
        overdue = self.scheduler.overdue()
        for job in overdue:
            job.outcome = "deadline"
            if job.runs:
                self._end(job)
                continue
            self.scheduler.leave(job)
            if job.state is SequenceState.GRANTED:
                self.tables.orphans[job] = job.held
                self._abort(job)
        return overdue

    def _join(self) -> tuple[list[Job], list[Job]]:
        """Let landed requests join. Return those that gave their first token, and those that end with it."""
        joined, ended = [], []
        landed, self.landed = self.landed, []
        now_s = self._world.now_s
        for job in landed:
            if job not in self.scheduler.granted:
                self.settle(job)
                continue
            self.scheduler.admit(job)
            job.offset += 1
            job.committed_s = now_s
            job.token_s.append(now_s)
            job.read_s.append(now_s)
            job.run(self.ends)
            joined.append(job)
            self.context += job.num_tokens
            self.tables.adopt(job)
            if job.is_whole:
                self._end(job)
                ended.append(job)
            else:
                heappush(self._finishes, (job.end_step, job.number, job))
        return joined, ended

    def _grant(self) -> list[Job]:
        """Grant pages to those that have their turn."""
        granted: list[Job] = []
        while (job := self.scheduler.next_turn()) is not None:
            self.scheduler.grant(job)
            self.tables.grant(job)
            job.num_retries += job.attempts > 1
            job.room += 1
            job.granted_s = self._world.now_s
            granted.append(job)
        return granted

    def _held_back(self) -> list[Job]:
        """Return the requests that have no page for their next token and do not run in the next step."""
        self._is_planned = self._drafts or self.tables.needs(1)[0] > self.tables.num_available
        if not self._is_planned:
            return []
        batch = set(self.scheduler.plan())
        for job in self.scheduler.retracted:
            self._rest(job)
        return [job for job in self.scheduler.running if job not in batch]

    def _end(self, job: Job) -> None:
        """Let a running request go."""
        self.scheduler.leave(job)
        self.tables.release(job)
        self._rest(job)

    def _rest(self, job: Job) -> None:
        """Note that a request does not run any more."""
        self.context -= job.num_tokens
        job.rest()
