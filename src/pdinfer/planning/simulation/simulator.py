"""A load through a simulated cluster, one event after the other: engines, links, and the host of the Pairing."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from pdinfer.bench.load import Load
from pdinfer.bench.record import Record
from pdinfer.bench.traces import Arrival
from pdinfer.errors import ConfigError
from pdinfer.pairing.losses import MAX_COMPUTING
from pdinfer.pairing.policy import Policy, traffic_aware
from pdinfer.planning.simulation.chance import Chance
from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.deployment import Change, Cluster
from pdinfer.planning.simulation.device import Device
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.links import SimLinks, SimTransfer
from pdinfer.planning.simulation.pages import SimPages
from pdinfer.planning.simulation.prefill import Prefill, SimPrompt
from pdinfer.planning.simulation.records import record_of
from pdinfer.planning.simulation.view import View
from pdinfer.planning.simulation.world import SimEngine
from pdinfer.progress import Tell, nobody
from pdinfer.scheduling.rules import by_age, order_of


class Simulator:
    """One run. `num_events` counts the events of its heap and `num_steps` the steps of engines, most of which are part
    of a burst and no event."""

    def __init__(
        self,
        cluster: Cluster,
        load: Load,
        *,
        policy: Policy = traffic_aware,
        seed: int = 0,
        progress: Tell = nobody,
    ) -> None:
        if not load.arrivals:
            raise ConfigError("the load has no request to send")
        self.cluster, self.load = cluster, load
        self.jobs: list[Job] = []
        self.num_events = 0
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._num_pushed = 0
        self._soon: dict[SimEngine, None] = {}
        self.chance = Chance(cluster, seed)
        decode_pages = [_pool(cluster, "decode") for _ in range(cluster.num_decodes)]
        prefill_pages = (
            decode_pages if cluster.colocated else [_pool(cluster, "prefill") for _ in range(cluster.num_prefills)]
        )
        self.decodes = [
            Decode(at, cluster.decode, pages, self, shares_pool=cluster.colocated)
            for at, pages in enumerate(decode_pages)
        ]
        self.prefills = [
            Prefill(at, cluster.prefill, pages, self, shares_pool=cluster.colocated)
            for at, pages in enumerate(prefill_pages)
        ]
        pairs = zip(self.prefills, self.decodes, strict=False)
        self._devices = [Device(*pair) for pair in pairs] if cluster.colocated else []
        rate = None if cluster.colocated else cluster.network.bytes_per_s
        self.links = None if rate is None else SimLinks(rate)
        self._links_due_s = math.inf
        self._landing: dict[SimTransfer, tuple[SimPrompt, float]] = {}
        self.pushed_tokens = self.landed_tokens = 0
        self._view = View(cluster, self.prefills, self.decodes, self.links, policy)
        self._queue: list[Job] = []
        self._num_turns = 0
        self._held_back: deque[tuple[Arrival, float]] = deque()
        self._num_in_flight = 0
        self._num_arrived = self._num_ended = 0
        self._progress = progress
        self._begin_load()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[Record, ...]:
        """Let everything happen, and return a record of every request in the order of intended sends."""
        heap = self._heap
        while heap:
            now_s, _, action, what = heappop(heap)
            self.now_s = now_s
            self.num_events += 1
            action(now_s, what)
            while self._soon and (not heap or heap[0][0] > now_s):
                engine = next(iter(self._soon))
                del self._soon[engine]
                engine.begin(now_s)
        records = [record_of(job, self.cluster) for job in self.jobs]
        return tuple(sorted(records, key=lambda record: record.intended_s))

    @property
    def num_steps(self) -> int:
        """The steps that all decodes ran."""
        return sum(len(decode.ends) for decode in self.decodes)

    def _at(self, at_s: float, action: Callable[[float, Any], None], what: Any = None) -> None:
        self._num_pushed += 1
        heappush(self._heap, (at_s, self._num_pushed, action, what))

    # -- the world of engines ----------------------------------------------------------------------------------------

    def wake(self, engine: SimEngine, at_s: float) -> None:
        """Call `engine.wake` then. Its device is busy until then."""
        if self._devices:
            self._devices[engine.number].busy = engine
        self._at(at_s, self._wake, engine)

    def _wake(self, now_s: float, engine: SimEngine) -> None:
        if self._devices and engine.due_s == now_s:
            self._devices[engine.number].release(engine)
        engine.wake(now_s)

    def soon(self, engine: SimEngine) -> None:
        """Call `engine.begin` once everything has happened that happens now."""
        self._soon[engine] = None

    def may_begin(self, engine: SimEngine, now_s: float) -> bool:
        """Return whether the engine's device is free. If it is not, the engine begins when it is."""
        return not self._devices or self._devices[engine.number].may_begin(engine, now_s)

    def is_alone(self, engine: SimEngine) -> bool:
        """Return whether nobody else has work for the engine's device."""
        return not self._devices or self._devices[engine.number].is_alone()

    def abort(self, job: Job, now_s: float) -> None:
        """Let the prefill of a granted request stop. `Decode.settle` is called when it has."""
        self._view.keep_promise(job)
        self._view.landed(job)
        is_computed = job.prefilled_s is not None and job.granted_s is not None and job.prefilled_s >= job.granted_s
        if not is_computed and not self.prefills[job.prefill].stop(job):
            self.settle(job, now_s)

    def tell(self, at_s: float, granted: Sequence[Job], ended: Sequence[Job]) -> None:
        """Let the host learn this then."""
        self._at(at_s, self._told, ([(job, job.room) for job in granted], ended))

    def is_full(self, prompt: SimPrompt, /) -> bool:
        """Return whether more than `send_window_bytes` wait for the decode of this prompt."""
        if self.links is None:
            return False
        waiting = self.links.backlog.get((prompt.job.prefill, prompt.job.decode), 0.0)
        return waiting > self.cluster.prefill.engine.send_window_bytes

    # -- links -------------------------------------------------------------------------------------------------------

    def push(self, prompt: SimPrompt, now_s: float) -> None:
        """Send `prompt.pushes` tokens while the step computes them."""
        self.pushed_tokens += prompt.pushes
        if self.links is not None:
            self._settle(now_s)
            pair = prompt.job.prefill, prompt.job.decode
            prompt.transfer = self.links.send(now_s, pair, prompt.pushes * self.cluster.network.token_bytes)
            self._watch_links()

    def hand_off(self, prompt: SimPrompt, now_s: float) -> None:
        """Let a prompt that is computed land when its bytes have left; the last push begins only now."""
        network, transfer = self.cluster.network, prompt.transfer
        if self.links is None or network.bytes_per_s is None:
            self._at(now_s + (0.0 if self._devices else network.latency_s), self._land, prompt)
            return
        self._settle(now_s)
        ready_s = now_s + prompt.pushes * network.token_bytes / network.num_pushes / network.bytes_per_s
        if transfer is None or transfer.done_s is not None:
            self._at(ready_s + network.latency_s, self._land, prompt)
        else:
            self._landing[transfer] = prompt, ready_s
        self._watch_links()

    def settle(self, job: Job, now_s: float) -> None:
        """Tell the decode that has given a request up that nobody writes its pages any more."""
        self.decodes[job.decode].settle(job, now_s)

    def _settle(self, now_s: float) -> None:
        assert self.links is not None
        for transfer in self.links.advance(now_s):
            if transfer in self._landing:
                prompt, ready_s = self._landing.pop(transfer)
                self._at(max(now_s, ready_s) + self.cluster.network.latency_s, self._land, prompt)

    def _watch_links(self) -> None:
        assert self.links is not None
        due_s = self.links.next_s()
        if due_s != self._links_due_s:
            self._links_due_s = due_s
            if due_s < math.inf:
                self._at(due_s, self._transferred)

    def _transferred(self, now_s: float, _: None) -> None:
        if now_s == self._links_due_s:
            self._settle(now_s)
            self._watch_links()
            for prefill in self.prefills:  # a link that was full may not be any more
                if prefill.scheduler.queue:
                    prefill.poke()

    def _land(self, now_s: float, prompt: SimPrompt) -> None:
        job = prompt.job
        self.prefills[job.prefill].sent(prompt, now_s)
        if job.outcome != "unfinished":
            self.settle(job, now_s)
        if job.room == prompt.room and job in self.decodes[job.decode].scheduler.granted:
            self.landed_tokens += prompt.num_tokens - job.num_found
            self._view.landed(job)
            job.last_byte_s = now_s
            self.decodes[job.decode].land(job, now_s)

    # -- the host: what is sent --------------------------------------------------------------------------------------

    def _begin_load(self) -> None:
        arrivals, most = self.load.arrivals, self.load.max_concurrency
        if self.load.mode == "closed_loop" and most is not None:
            for at in range(min(most, len(arrivals))):
                self._at(arrivals[at].at_s, self._start_client)
        else:
            self._at(arrivals[0].at_s, self._arrive)
        for change in self.cluster.changes:
            self._at(change.at_s, self._change, change)

    def _stalled_until(self, now_s: float) -> float:
        """Return when the host does something again."""
        for stall in self.cluster.stalls:
            if stall.at_s <= now_s < stall.at_s + stall.for_s:
                return stall.at_s + stall.for_s
        return now_s

    def _arrive(self, now_s: float, _: None) -> None:
        """Send what is due, as far as `max_concurrency` allows."""
        if (until_s := self._stalled_until(now_s)) > now_s:
            self._at(until_s, self._arrive)
            return
        arrivals = self.load.arrivals
        while self._num_arrived < len(arrivals) and arrivals[self._num_arrived].at_s <= now_s:
            arrival = arrivals[self._num_arrived]
            self._num_arrived += 1
            self._held_back.append((arrival, arrival.at_s))
        if self._num_arrived < len(arrivals):
            self._at(arrivals[self._num_arrived].at_s, self._arrive)
        self._send(now_s)

    def _start_client(self, now_s: float, _: None) -> None:
        """Send the next request of a closed loop."""
        if (until_s := self._stalled_until(now_s)) > now_s:
            self._at(until_s, self._start_client)
        elif self._num_arrived < len(self.load.arrivals):
            self._held_back.append((self.load.arrivals[self._num_arrived], now_s))
            self._num_arrived += 1
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        most = self.load.max_concurrency or math.inf
        while self._held_back and self._num_in_flight < most:
            arrival, intended_s = self._held_back.popleft()
            deadline_s = self.cluster.pairing.default_deadline_s
            job = Job.of(len(self.jobs), arrival, intended_s, now_s, self.load.block_tokens, deadline_s)
            self.jobs.append(job)
            self._num_in_flight += 1
            refusal = self._view.refusal(job, num_queued=len(self._queue))
            if refusal is None:
                insort(self._queue, job, key=_turn)
                if job.deadline_at is not None:
                    self._at(job.deadline_at, self._expire, job)
            else:
                self._end(job, now_s, "refused", refusal)
        self._dispatch(now_s)

    def _end(self, job: Job, now_s: float, outcome: str, error: str | None = None) -> None:
        job.outcome, job.error, job.ended_s = outcome, error, now_s
        self._num_in_flight -= 1
        self._num_ended += 1
        self._progress(self._num_ended, len(self.load.arrivals))
        if self.load.mode == "closed_loop":
            self._at(now_s, self._start_client)

    def _expire(self, now_s: float, job: Job) -> None:
        """End a request that waits in the queue at its deadline. Its decode ends any other."""
        if job in self._queue:
            self._queue.remove(job)
            self._end(job, now_s, "deadline")
        elif job.deadline_at is not None and job.deadline_at > now_s:
            self._at(job.deadline_at, self._expire, job)
        elif job.ended_s is None:
            self.decodes[job.decode].poke(now_s)

    # -- the host: what is chosen ------------------------------------------------------------------------------------

    def _dispatch(self, now_s: float) -> None:
        """Send queued requests, in turn, to the pairs that the policy chooses, until it lets one wait."""
        while self._queue:
            oldest = by_age(self._queue, attrgetter("sent_s"), num_turns=self._num_turns, now=now_s)
            job = oldest or self._queue[0]
            choice = self._view.choose(job, now_s)
            if choice is None:
                if not self._view.has_ports:
                    self._queue.remove(job)
                    self._end(job, now_s, "failed", "no prefill or no decode is left")
                    continue
                return
            self._queue.remove(job)
            self._num_turns += 1
            job.prefill, job.decode, job.score = choice
            job.chosen_s = now_s if job.chosen_s is None else job.chosen_s
            self._view.promise(job)
            self.decodes[job.decode].submit(job, now_s)

    def _told(self, now_s: float, told: tuple[list[tuple[Job, int]], Sequence[Job]]) -> None:
        """Forward what decode has granted, and read the ends of requests."""
        if (until_s := self._stalled_until(now_s)) > now_s:
            self._at(until_s, self._told, told)
            return
        granted, ended = told
        for job, room in granted:
            if job.room == room and job in self.decodes[job.decode].scheduler.granted:
                self._view.keep_promise(job)
                self.prefills[job.prefill].submit(job, now_s)
        for job in ended:
            self._end(job, now_s, "length" if job.is_whole else job.outcome)
        if ended and self._held_back:
            self._send(now_s)
        elif self._queue:
            self._dispatch(now_s)

    # -- what happens to engines -------------------------------------------------------------------------------------

    def _change(self, now_s: float, change: Change) -> None:
        side: Sequence[Prefill | Decode] = self.prefills if change.engine[0] == "P" else self.decodes
        engine = side[int(change.engine[1:])]
        if change.speed > 0:
            engine.change_speed(change.speed, now_s)
        elif isinstance(engine, Decode):
            self._lose_decode(engine, now_s)
        else:
            self._lose_prefill(engine, now_s)

    def _lose_prefill(self, prefill: Prefill, now_s: float) -> None:
        """Give what it had to other prefills. Requests that run need one, too, in case they lose their pages."""
        self._view.drop(prefill)
        prefill.fail()
        for job in [job for job in self.jobs if job.ended_s is None and job.prefill == prefill.number]:
            if job.outcome != "unfinished":
                self.settle(job, now_s)
            if job.outcome != "unfinished" or job.chosen_s is None or job in self._queue:
                continue
            decode = self.decodes[job.decode]
            self._view.keep_promise(job)
            self._view.landed(job)
            if not self._view.choose_prefill(job, now_s):
                if not job.runs:
                    decode.drop(job, now_s)
                    self._end(job, now_s, "failed", "no prefill is left")
                continue
            job.room += 1
            if not job.runs:
                self._view.promise(job)
            decode.give_up(job, now_s)

    def _lose_decode(self, decode: Decode, now_s: float) -> None:
        """Move what it had to other decodes, as far as a Pairing would."""
        self._view.drop(decode)
        for job in decode.fail(now_s):
            self.prefills[job.prefill].cancel(job)
            self._view.keep_promise(job)
            self._view.landed(job)
            job.room += 1
            if job.spells and job.spells[-1].told_s > now_s:  # the host never got this token
                job.spells.pop()
                job.offset -= 1
            job.num_decodes_lost += job.attempts > 0
            job.num_computing_lost += job.runs
            is_last = job.num_computing_lost > MAX_COMPUTING
            if is_last or (job.num_output and not self.cluster.pairing.continue_elsewhere):
                self._end(job, now_s, "failed", f"its decode is lost: D{decode.number}")
                continue
            insort(self._queue, job, key=_turn)
        self._dispatch(now_s)


def _turn(job: Job) -> tuple[int, bool, float, int]:
    return order_of(job.priority, job.sent_s, job.deadline_at, job.number, is_new=not job.num_output)


def _pool(cluster: Cluster, side: str) -> SimPages:
    model = cluster.prefill if side == "prefill" else cluster.decode
    return SimPages(model.num_pages, prefix_cache=model.cache.prefix_cache)
