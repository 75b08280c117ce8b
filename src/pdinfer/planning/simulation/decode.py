"""A simulated decode engine: a `DecodeScheduler` decides, and the host's function says what steps take.

Steps between two decisions are equal but for their contexts. They are worked out at once, as a burst, which is cut at
the end of the step that is under way when something comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pdinfer.planning.simulation.deployment import EngineModel
from pdinfer.planning.simulation.engine import SimEngine
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.pages import SimPages
from pdinfer.planning.simulation.steps import Burst, DecodeLearning, Finishes
from pdinfer.planning.simulation.tables import SimTables
from pdinfer.planning.simulation.world import World
from pdinfer.scheduling.decode import DecodeScheduler, SequenceState
from pdinfer.stats import DecodeLoad, with_waiting

MAX_BURST = 128
"""Steps that are worked out at once."""


class _Decided(NamedTuple):
    """The load before a step, and what the step did."""

    before: DecodeLoad
    joined: list[Job]
    ended: list[Job]
    granted: list[Job]
    held_back: list[Job]


class Decode(SimEngine):
    """One engine. Requests in `landed` have all their KV and join the next
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
        self.landed: list[Job] = []
        self.burst = Burst(model)
        self._by_writer = model.cache.trust_domain == "writer" and not shares_pool
        self.tables = SimTables(self, self.burst.ended_s, by_writer=self._by_writer)
        self.scheduler: DecodeScheduler[Job] = DecodeScheduler(
            self.tables, model.engine, lambda: world.now_s, num_pages=pages.num_pages, page_size=self.page_size
        )
        self.context = self.most_slots = 0
        self._tell, self._abort, self._token_bytes = tell, abort, token_bytes
        self._learning = DecodeLearning(self.scheduler.costs)
        self._before: DecodeLoad | None = None  # as long as the first step of a burst is under way
        self._is_planned = False
        self._decided: _Decided | None = None
        self._finishes = Finishes(self.scheduler.running)

    # -- what comes from outside -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a request."""
        now_s = self._world.now_s
        job.begin(next(self._arrivals), now_s)
        self.scheduler.wait(job)
        if self._before is not None:
            self._before = with_waiting(self._before, [job.num_tokens])
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
        self.landed, self.due_s, self.burst.ends_s = [], math.inf, []
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
        self._learning.begin_anew(len(self.burst.ended_s))
        self.cut()

    def cut(self) -> None:
        """End the burst with the step that is under way."""
        self.sync()
        if len(self.burst.ends_s) > 1:
            del self.burst.ends_s[1:]
            self.end_at(self.burst.ends_s[0])

    def load(self) -> DecodeLoad:
        """Return what the host knows: the state after the last step, with what it has submitted since."""
        self.sync()
        if self._before is not None:
            return self._before
        scheduler = self.scheduler
        return DecodeLoad(
            address=self.address,
            num_free_pages=self.pages.num_free + (self.tables.needs(1)[0] if self.burst.ends_s else 0),
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
        self.burst.form(self.scheduler.running, held_back, self.context)
        for job in held_back:  # they leave this step out
            job.note_steps()
            job.since += 1
            self._shift(job, -1)
        return True

    def began(self, ends_s: Sequence[float]) -> None:
        """Note when its steps end, and let the host learn what was decided when the first of them does."""
        if (decided := self._decided) is None:
            return
        told_s = ends_s[0] if ends_s else self._world.now_s
        if len(self.scheduler.running) > len(decided.held_back):
            if not self._is_planned:
                self.pages.take(self.tables.needs(1)[0])
            self.most_slots = max(self.most_slots, len(self.scheduler.running) + len(self.scheduler.granted))
            self.end_at(self.burst.begin(self._world.now_s, ends_s))
            self._before = decided.before
        elif not ends_s and self.scheduler.next_turn() is not None:  # what was retracted has left pages
            self.end_at(told_s)
        for job in decided.joined:
            if job not in decided.held_back:
                job.read_s[-1] = told_s
        if decided.granted or decided.ended:
            self._tell(told_s, decided.granted, decided.ended)

    @property
    def num_alike(self) -> int:
        """For how many steps nothing is to be decided: until a request ends or a page is missing. After one step
        a rival may have its turn; one that was planned is followed by another plan; and where requests wait while pages
        are kept for growth, fewer are kept after each."""
        scheduler = self.scheduler
        has_slot = len(scheduler.running) < self.model.engine.max_running_requests
        is_pressed = scheduler.waiting and scheduler.growth_share and has_slot
        if self._is_planned or is_pressed or (self.rival is not None and self.rival.has_work):
            return 1
        return self.tables.affordable(min(MAX_BURST, self._finishes.next() - len(self.burst.ended_s)))

    def took_s(self, num_steps: int) -> np.ndarray | list[float]:
        return self.burst.took_s(num_steps, self.scheduler.num_drafts)

    def finish(self) -> None:
        """End the requests that get their last token in the step that ends now."""
        self.sync()
        ended = []
        for job in self._finishes.until(len(self.burst.ended_s)):
            self._end(job)
            ended.append(job)
        if ended:
            self._tell(self._world.now_s, (), ended)

    def sync(self) -> None:
        """Count the steps that have ended by now."""
        burst, ended = self.burst, self.burst.ended_by(self._world.now_s)
        if not ended:
            return
        count, took_s = len(ended), ended[-1] - burst.began_s
        for _ in range(0 if self._is_planned else count):
            self.scheduler.learn(num_retracted=0)
        self._is_planned, self._before = False, None
        self._learning.learn(burst.began_s, ended, len(burst.ended_s), burst.num_rows, burst.context)
        needs = self.tables.needs(min(count + 1, len(burst.ends_s)))
        self.pages.take(sum(needs[1:]))  # the first has its pages
        burst.end(ended)
        num_tokens = burst.num_rows * count + sum(map(self._accept, burst.drafting))
        self.tables.trim()
        self.scheduler.costs.count(num_tokens, took_s)
        self.context += num_tokens

    def _accept(self, job: Job) -> int:
        """Give a request the drafts of the step that has ended that were right, and return how many they are."""
        num_accepted = self._world.num_accepted(job.num_drafts) if job.num_drafts else 0
        job.num_drafted += job.num_drafts
        job.accepted_s += [self.burst.ended_s[-1]] * num_accepted
        if num_accepted:
            self._shift(job, num_accepted)
        return num_accepted

    def _shift(self, job: Job, by: int) -> None:
        """Let a request have `by` tokens more than by the steps that it runs."""
        self.tables.shift(job, by)
        self._finishes.note(job)

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
        for job in landed:
            if job not in self.scheduler.granted:
                self.settle(job)
                continue
            self.scheduler.admit(job)
            job.run(self.burst.ended_s, self._world.now_s)
            joined.append(job)
            self.context += job.num_tokens
            self.tables.adopt(job)
            if job.is_whole:
                self._end(job)
                ended.append(job)
            else:
                self._finishes.note(job)
        return joined, ended

    def _grant(self) -> list[Job]:
        """Grant pages to those that have their turn."""
        granted: list[Job] = []
        while (job := self.scheduler.next_turn()) is not None:
            self.scheduler.grant(job)
            self.tables.grant(job)
            job.grant(self._world.now_s)
            granted.append(job)
        return granted

    def _held_back(self) -> list[Job]:
        """Return the requests that have no page for their next token and do not run in the next step."""
        self._is_planned = self.burst.drafts or self.tables.needs(1)[0] > self.tables.num_available
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
