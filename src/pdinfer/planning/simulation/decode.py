"""A simulated decode engine: a `DecodeScheduler` decides, and the host's function says what steps take.

Steps between two decisions are equal but for their contexts. They are worked out at once, as a burst, which is cut at
the end of the step that is under way when something comes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

import numpy as np

from pdinfer.checks import clip
from pdinfer.errors import ConfigError
from pdinfer.planning.simulation.deployment import EngineModel, StepRows, seconds
from pdinfer.planning.simulation.growth import Growth
from pdinfer.planning.simulation.job import Job, Spell
from pdinfer.planning.simulation.pages import Held, SimPages
from pdinfer.planning.simulation.world import DecodeState, World
from pdinfer.scheduling.decode import DecodeScheduler, SequenceState
from pdinfer.scheduling.rules import withheld_pages
from pdinfer.stats import DecodeCost

MAX_BURST = 128
"""Steps that are worked out at once."""
ARRAY_FROM = 4
"""A burst of fewer steps is faster without numpy."""
LEARN_ALL, LEARN_EVERY = 2048, 128
"""A decode learns its costs from all of its first steps, and of those after its speed has changed, and later from one
in so many, which saves time. A real one goes on learning from all."""


class Decode:
    """One engine. `ends` has when each of its steps ended. Requests in `landed` have all their KV and join the next
    step; until then they are granted, too. It counts the pages of its scheduler (`SequencePages`)."""

    def __init__(self, number: int, model: EngineModel, pages: SimPages, world: World, *, shares_pool: bool) -> None:
        config = model.engine
        self.number, self.pages, self.model = number, pages, model
        self.page_size = model.cache.page_size
        self.speed, self.due_s = 1.0, math.inf
        self.ends: list[float] = []
        self.landed: list[Job] = []
        self.orphans: dict[Job, Held] = {}
        self._drafts = config.num_draft_tokens > 0
        self.scheduler: DecodeScheduler[Job] = DecodeScheduler(
            self, config, lambda: world.now_s, num_pages=pages.num_pages, page_size=self.page_size
        )
        self._cost: DecodeCost | None = None
        self.context = self.most_slots = self.num_retracted = 0
        self.slot_s = self.max_step_s = 0.0
        self._world = world
        self._of_writer = model.cache.trust_domain == "writer" and not shares_pool
        self._num_withheld = withheld_pages(
            pages.num_pages, page_size=self.page_size, max_total_tokens=config.max_total_tokens
        )
        self._num_arrivals = 0
        self._growth = Growth(self.page_size)
        self._grown_until = 0
        self._before: DecodeState | None = None  # as long as the first step of a burst is under way
        self._has_grown = False
        self._grown: set[Job] = set()  # have a page for the step under way, and it is counted
        self._finishes: list[tuple[int, int, Job]] = []
        self._burst: list[float] | np.ndarray = []
        self._batch: list[Job] = []  # of the step under way, if it drafts
        self._num_batch = self._step_context = self._step_first = self._learned_at = 0
        self._began_s = 0.0
        self._learn_all_until = LEARN_ALL

    # -- what comes from outside -------------------------------------------------------------------------------------

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a request."""
        job.begin(self._num_arrivals, now_s)
        self._num_arrivals += 1
        self.scheduler.wait(job)
        if self._before is not None:
            self._before.num_waiting += 1
            self._before.waiting_tokens += job.num_tokens
        self.poke(now_s)
        if job.deadline_at is not None and self.due_s < math.inf:
            job.deadline_at += self.due_s - now_s  # what is left of it counts from the step that takes the request

    def land(self, job: Job, now_s: float) -> None:
        """Take the last byte of a hand-off."""
        self.landed.append(job)
        self.poke(now_s)

    def give_up(self, job: Job, now_s: float) -> None:
        """Abort the attempt of a granted request whose prefill is gone, and queue it for another prefill."""
        if self.scheduler.take_over(job):
            self.pages.release(job.held)
            self.poke(now_s)

    def settle(self, job: Job, now_s: float) -> None:
        """Free the pages of a room that was given up: its prefill has stopped."""
        if (held := self.orphans.pop(job, None)) is not None:
            self.pages.release(held)
            self.poke(now_s)

    def poke(self, now_s: float) -> None:
        """Decide at the end of the step under way, or now if there is none."""
        if self.due_s == math.inf:
            self._world.soon(self)
        else:
            self.cut(now_s)

    def change_speed(self, speed: float, now_s: float) -> None:
        """Run at another speed from the next step on."""
        self.speed = speed
        self._learn_all_until = len(self.ends) + LEARN_ALL
        if self.due_s < math.inf:
            self.cut(now_s)

    def cut(self, now_s: float) -> None:
        """End the burst with the step that is under way."""
        self.sync(now_s)
        if len(self._burst) > 1:
            self._burst = self._burst[:1]
            self.due_s = float(self._burst[0])
            self._world.wake(self, self.due_s)

    def fail(self, now_s: float) -> list[Job]:
        """Stop for good, and return the requests that it had."""
        self.sync(now_s)
        scheduler = self.scheduler
        jobs = [*scheduler.running, *scheduler.granted, *scheduler.waiting]
        for job in scheduler.running:
            self.release(job)
        scheduler.clear()
        self.landed, self.due_s, self._burst, self.orphans = [], math.inf, [], {}
        return jobs

    def drop(self, job: Job, now_s: float) -> None:
        """Forget a request that holds no KV and cannot go on."""
        self.scheduler.leave(job)
        self.pages.release(job.held)
        self.poke(now_s)

    def state(self) -> DecodeState:
        """Return what the host knows: the state after the last step, with what it has submitted since."""
        if self._before is not None:
            return self._before
        scheduler = self.scheduler
        under_way = self._growth.num_pages(len(self.ends), 1) if len(self._burst) else 0
        return DecodeState(
            num_free=self.pages.num_free + under_way,
            num_cached=self.pages.num_cached,
            num_waiting=len(scheduler.waiting),
            waiting_tokens=sum(job.num_tokens for job in scheduler.waiting),
            num_granted=len(scheduler.granted),
            num_running=len(scheduler.running),
            held_tokens=self.context + sum(job.num_tokens for job in scheduler.granted),
        )

    @property
    def max_tokens(self) -> int:
        """The longest prompt and output that it takes."""
        return (self.pages.num_pages - self._num_withheld) * self.page_size

    @property
    def cost(self) -> DecodeCost:
        """What its steps take, as it has learned."""
        if self._cost is None:
            step_s, sequence_s, token_s = self.scheduler.costs.weights
            self._cost = DecodeCost(step_s=step_s, sequence_s=sequence_s, token_s=token_s)
        return self._cost

    def num_found(self, job: Job, writer: int | None) -> int:
        """Return how many tokens of a request its pages hold. Where they are kept apart by writer, those of this
        prefill count, and none without one."""
        size, domain = self.page_size, writer if self._of_writer else None
        if self._of_writer and writer is None:
            return 0
        return self.pages.find(job.keys(size, job.num_tokens), (job.num_tokens - 1) // size, domain).num_known * size

    # -- time --------------------------------------------------------------------------------------------------------

    def wake(self, now_s: float) -> None:
        """Go on after a step, if one ends now."""
        if now_s != self.due_s:
            return
        self.sync(now_s)
        self.due_s = math.inf
        if ended := self._finish():
            self._world.tell(now_s, (), ended)
        self._world.soon(self)

    def sync(self, now_s: float) -> None:
        """Count the steps that have ended by now."""
        burst = self._burst
        if not len(burst) or burst[0] > now_s:
            return
        if isinstance(burst, list):
            ended = [end_s for end_s in burst if end_s <= now_s]
        else:
            ended = burst[: int(burst.searchsorted(now_s, side="right"))].tolist()
        count = len(ended)
        for _ in range(0 if self._has_grown else count):
            self.scheduler.learn(num_retracted=0)
        self._has_grown = False
        self._grown.clear()
        self._before = None
        self._learn(ended)
        took_s, self._began_s = ended[-1] - self._began_s, ended[-1]
        self.slot_s += took_s * self._num_batch
        self.ends += ended
        self._burst = burst[count:]
        self._take_pages()
        num_accepted = sum(map(self._accept, self._batch)) if self._drafts else 0
        self.scheduler.costs.count(self._num_batch * count + num_accepted, took_s)
        self.context += self._num_batch * count + num_accepted

    def _accept(self, job: Job) -> int:
        """Give a request the drafts of the step that has ended that were right, and return how many they are. Pages
        that only the others needed return, as those of `PageTables.trim`."""
        num_accepted = self._world.chance.num_accepted(job.num_drafts) if job.num_drafts else 0
        job.num_drafted += job.num_drafts
        job.accepted_s += [self.ends[-1]] * num_accepted
        job.offset += num_accepted
        if num_accepted:
            heappush(self._finishes, (job.end_step, job.number, job))
        if not job.protected:
            self.pages.give_back(job.held, max(0, self._num_held(job) - self._num_pages(job.num_tokens)))
        return num_accepted

    def _take_pages(self) -> None:
        """Take the pages that the steps so far needed, and the one under way."""
        first, until = self._grown_until, len(self.ends) + (len(self._burst) > 0)
        if until > first:
            self.pages.take(self._growth.num_pages(first, until - first))
            self._grown_until = until

    def _learn(self, ended: list[float]) -> None:
        """Learn what steps take: from every one at first, then from one in LEARN_EVERY."""
        first = len(self.ends)
        learns_all = first < self._learn_all_until
        count = len(ended) if learns_all else int(first + len(ended) >= self._learned_at + LEARN_EVERY)
        for at in range(len(ended) - count, len(ended)):
            context = self._step_context + self._num_batch * (first + at - self._step_first)
            took_s = ended[at] - (ended[at - 1] if at else self._began_s)
            self.scheduler.costs.add((1.0, float(self._num_batch), float(context)), took_s)
        if count:
            self._learned_at, self._cost = first + len(ended), None

    def begin(self, now_s: float) -> None:
        """Do what `DecodeEngine.step` does, unless a step is under way: what landed joins, pages are granted, and the
        batch runs. The host learns of it when the step ends."""
        scheduler = self.scheduler
        has_work = scheduler.running or scheduler.granted or scheduler.waiting
        if self.due_s < math.inf or not has_work or not self._world.may_begin(self, now_s):
            return
        before = self.state()
        overdue = self._expire(now_s)
        joined, ended = self._land(now_s)
        granted = self._grant(now_s)
        held_back = self._held_back() if scheduler.running else []
        told_s = now_s
        if len(scheduler.running) > len(held_back):
            self._run(now_s, held_back)
            self._before = before
            told_s = float(self._burst[0])
        elif scheduler.next_turn() is not None:  # what was retracted has left pages
            self.due_s = now_s
            self._world.wake(self, now_s)
        for job in joined:
            job.spells[-1].told_s = told_s
        if granted or ended or overdue:
            self._world.tell(told_s, granted, [*ended, *overdue])

    def _run(self, now_s: float, held_back: Sequence[Job]) -> None:
        """Work out when the next steps end: as many as need no decision."""
        scheduler = self.scheduler
        num_rows = self._num_batch = len(scheduler.running) - len(held_back)
        context = self.context - sum(job.num_tokens for job in held_back)
        for job in held_back:
            self._skip(job)
        count = 1
        self._batch = [job for job in scheduler.running if job not in held_back] if self._drafts else []
        if not self._has_grown and self._world.is_alone(self):
            finishes = self._finishes
            while finishes[0][2] not in scheduler.running or finishes[0][2].end_step != finishes[0][0]:
                heappop(finishes)
            count = self._affordable(min(MAX_BURST, finishes[0][0] - len(self.ends)))
        self._began_s, self._step_context, self._step_first = now_s, context, len(self.ends)
        self._burst = self._ends_of(now_s, num_rows, context, count)
        self._grown_until = len(self.ends) + self._has_grown
        self._take_pages()
        self.due_s = float(self._burst[-1])
        before_s = now_s if count == 1 else float(self._burst[-2])
        self.max_step_s = max(self.max_step_s, self.due_s - before_s)  # steps of a burst grow longer with the contexts
        self.most_slots = max(self.most_slots, len(scheduler.running) + len(scheduler.granted))
        self._world.wake(self, self.due_s)

    def _ends_of(self, now_s: float, num_rows: int, context: int, count: int) -> list[float] | np.ndarray:
        model, noise = self.model, self._world.chance.noise(count)
        if count >= ARRAY_FROM and model.takes_arrays:
            contexts = np.arange(context, context + num_rows * count, num_rows)
            took = np.asarray(model.step_s(StepRows(num_rows, num_rows, contexts, contexts)), dtype=float)
            took = (took if noise is None else took * noise) / self.speed
            ends = (took if took.shape else np.full(count, took)).cumsum()
            if not (took.min() >= 0 and math.isfinite(ends[-1])):
                raise ConfigError(f"decode_s must return seconds, finite and at least 0, got {clip(took)}")
            ends += now_s
            return ends
        told = []
        if self._drafts:
            return [now_s + self._drafting_s(context) * (1.0 if noise is None else float(noise[0])) / self.speed]
        for at in range(count):
            took_s = seconds("decode_s", model.step_s, StepRows(num_rows, num_rows, context, context))
            now_s += took_s / self.speed if noise is None else took_s * float(noise[at]) / self.speed
            context += num_rows
            told.append(now_s)
        return told

    def _drafting_s(self, context: int) -> float:
        """Return the seconds of a step that checks drafts, and decide how many of each request."""
        num_tokens, num_context, num_pairs = len(self._batch), context, context
        for job in self._batch:
            drafts = job.num_drafts = self.scheduler.num_drafts(job)
            num_tokens, num_context = num_tokens + drafts, num_context + drafts
            num_pairs += drafts * job.num_tokens + drafts * (drafts + 1) // 2
        return seconds("decode_s", self.model.step_s, StepRows(len(self._batch), num_tokens, num_context, num_pairs))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> list[Job]:
        """End the requests whose deadline is over, and return them. The pages of a room wait for its prefill."""
        overdue = self.scheduler.overdue()
        for job in overdue:
            job.outcome = "deadline"
            self.scheduler.leave(job)
            if job.runs:
                self.release(job)
            elif job.state is SequenceState.GRANTED:
                self.orphans[job] = job.held
                self._world.abort(job, now_s)
        return overdue

    def _land(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Let landed requests join. Return those that gave their first token, and those that end with it."""
        joined, ended = [], []
        landed, self.landed = self.landed, []
        for job in landed:
            if job not in self.scheduler.granted:
                self.settle(job, now_s)
                continue
            self.scheduler.admit(job)
            self.pages.keep(job.held, job.keys(self.page_size, job.num_tokens - self._drafts), self._domain(job))
            job.offset += 1
            job.committed_s = now_s
            job.spells.append(Spell(self.ends, len(self.ends), landed_s=now_s, told_s=now_s))
            job.run(self.ends)
            joined.append(job)
            self.context += job.num_tokens
            if self._grows(job):
                self._growth.add(job.offset)
            if job.is_whole:
                self._end(job)
                ended.append(job)
            else:
                heappush(self._finishes, (job.end_step, job.number, job))
        return joined, ended

    def _finish(self) -> list[Job]:
        """Return the requests that got their last token in the step that has just ended."""
        ended, finishes = [], self._finishes
        while finishes and finishes[0][0] <= len(self.ends):
            end_step, _, job = heappop(finishes)
            if job in self.scheduler.running and job.end_step == end_step:
                self._end(job)
                ended.append(job)
        return ended

    def _end(self, job: Job) -> None:
        self.scheduler.leave(job)
        self.release(job)

    def release(self, job: Job, /) -> None:
        """Take the pages of a running request, which others may find from now on."""
        held = job.held
        job.close_spell(len(self.ends))
        self.context -= job.num_tokens
        if self._grows(job):
            self._growth.remove(job.offset)
            held.num_own = self._num_held(job) - held.num_known
        self._grown.discard(job)
        job.rest()
        self.pages.keep(held, job.keys(self.page_size, job.num_tokens - 1 - self._drafts), self._domain(job))
        self.pages.release(held)

    def _skip(self, job: Job) -> None:
        """Leave a request out of the next step."""
        steps = len(self.ends)
        job.close_spell(steps)
        job.spells.append(Spell(self.ends, steps + 1))
        if self._grows(job):
            self._growth.remove(job.offset)
            self._growth.add(job.offset - 1)
        job.offset -= 1
        heappush(self._finishes, (job.end_step, job.number, job))

    def _grows(self, job: Job) -> bool:
        """Return whether a request takes pages by `Growth`, one in so many steps, and they are counted when it ends."""
        return not (job.protected or self._drafts)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _num_held(self, job: Job) -> int:
        """Return how many pages a running request has."""
        if self._grows(job):
            return self._num_pages(job.num_tokens - 1) + (job in self._grown)
        return job.held.num_known + job.held.num_own

    def _domain(self, job: Job) -> Hashable:
        return job.prefill if self._of_writer else None

    # -- pages -------------------------------------------------------------------------------------------------------

    @property
    def num_orphans(self) -> int:
        """Rooms that were given up and whose prefills have not stopped yet."""
        return len(self.orphans)

    @property
    def num_available(self) -> int:
        """Pages that can be had; zero or less when there are none."""
        return self.pages.num_available - self._num_withheld

    def _grant(self, now_s: float) -> list[Job]:
        """Grant pages to those that have their turn."""
        granted: list[Job] = []
        while (job := self.scheduler.next_turn()) is not None:
            self.scheduler.grant(job)
            self._open_room(job, now_s)
            granted.append(job)
        return granted

    def num_in_use(self, job: Job, /) -> int:
        """Return how many pages with the beginning of a waiting request are in use anyway."""
        keys, size = job.keys(self.page_size, job.num_tokens), self.page_size
        job.found = self.pages.find(keys, (job.num_tokens - 1) // size, self._domain(job))
        return job.found.num_known - self.pages.num_unused(job.found)

    def extend(self, job: Job, num_drafts: int = 0, /) -> bool:
        """Make sure that a request has a page for its next token and for the `num_drafts` tokens after it. Return False
        when there is none."""
        if self._num_pages(job.num_tokens + num_drafts) <= self._num_held(job):
            return True
        if self.num_available <= 0:
            return False
        self.pages.take(1)
        if self._drafts:
            job.held.num_own += 1
        else:
            self._grown.add(job)
        return True

    def _open_room(self, job: Job, now_s: float) -> None:
        found = job.found
        self.pages.share(found)
        found.num_own = -(-job.reserved_tokens // self.page_size) - found.num_known
        self.pages.take(found.num_own)
        job.held, job.num_found = found, found.num_known * self.page_size
        job.num_retries += job.attempts > 1
        job.room += 1
        job.granted_s = now_s

    def _affordable(self, count: int) -> int:
        """Return how many of the next `count` steps need no page that is not there. While pages are kept for growth and
        requests wait, every step decides, since fewer are kept after each."""
        scheduler = self.scheduler
        if (
            scheduler.waiting
            and scheduler.growth_share
            and len(scheduler.running) < self.model.engine.max_running_requests
        ):
            return 1
        return self._growth.affordable(len(self.ends), count, self.num_available)

    def _held_back(self) -> list[Job]:
        """Return the requests that have no page for their next token and do not run in the next step. Where there are
        enough pages, everybody runs, and nothing has to be planned."""
        self._has_grown = self._drafts or self._growth.num_pages(len(self.ends), 1) > self.num_available
        if not self._has_grown:
            return []
        batch = set(self.scheduler.plan())
        self.num_retracted += len(self.scheduler.retracted)
        return [job for job in self.scheduler.running if job not in batch]
