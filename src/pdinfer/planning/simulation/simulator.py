"""A load through a simulated cluster: the host of its Pairing, and what happens to engines."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from importlib.metadata import version
from operator import attrgetter

import attrs

from pdinfer.bench.load import Load
from pdinfer.bench.record import Record
from pdinfer.bench.summarize import check_gpus, check_said, summarize
from pdinfer.bench.summary import EngineUse, Summary
from pdinfer.bench.traces import Arrival
from pdinfer.checks import typed
from pdinfer.config import SLO
from pdinfer.errors import ConfigError
from pdinfer.pairing.losses import MAX_COMPUTING
from pdinfer.pairing.policy import Policy, traffic_aware
from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.deployment import Change, Cluster, EngineModel
from pdinfer.planning.simulation.engine import Lockstep
from pdinfer.planning.simulation.host import Host
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.links import SimLinks
from pdinfer.planning.simulation.pages import SimPages
from pdinfer.planning.simulation.prefill import Prefill, SimPrompt
from pdinfer.planning.simulation.switching import Adviser, Switching
from pdinfer.planning.simulation.view import View
from pdinfer.planning.simulation.world import World
from pdinfer.progress import Progress, Tell, nobody, telling
from pdinfer.scheduling.rules import by_age, order_of


@typed
def simulate(
    cluster: Cluster,
    load: Load,
    *,
    policy: Policy = traffic_aware,
    slo: SLO | None = None,
    seed: int = 0,
    num_gpus: int | None = None,
    name: str = "",
    progress: Progress = None,
    adviser: Adviser | None = None,
) -> Summary:
    """Run a load through a simulated cluster and return the summary. Equal arguments give equal bytes.

    The Pairing's host takes no time, except where the cluster says that it stalls. `seed` draws how steps scatter
    (`step_cv`); loads are drawn by their own. `progress(ended, requests)` is called when a request has ended; True
    draws a line on stderr. `adviser`, such as `lambda stats: advise(stats, cost, slo)`, is asked every second: the port
    that it names gets no more requests, and two seconds later at most it serves the other role. The summary notes each
    move. Raises ConfigError for an empty load, for `num_gpus` below 1, for text that JSON cannot have, for a policy
    that names a port that it was not shown, for step times that are no seconds, and for an adviser of engines with
    several ranks or a common device."""
    check_gpus(num_gpus)
    notes, environment = (*load.notes, *cluster.notes), {"cluster": cluster.name, **dict(load.environment)}
    check_said(name=name or load.name, notes=notes, environment=environment)
    with telling(progress, "simulating", "requests") as tell:
        simulator = Simulator(cluster, load, policy=policy, seed=seed, progress=tell, adviser=adviser)
        records = simulator.run()
    return summarize(
        records,
        slo=slo,
        num_gpus=num_gpus,
        max_concurrency=load.max_concurrency,
        environment={"pdinfer": version("pdinfer"), **environment},
        engines=uses_of(simulator),
        max_step_ms=max(decode.burst.max_step_s for decode in simulator.decodes) * 1e3,
        source="simulated",
        mode=load.mode,
        request_rate=load.request_rate,
        speed=load.speed,
        seed=seed,
        name=name or load.name,
        notes=(*notes, *simulator.moves),
    )


class Simulator:
    """One run. `num_steps` counts the steps of engines, most of which are part of a burst and no event of the world."""

    @typed
    def __init__(
        self,
        cluster: Cluster,
        load: Load,
        *,
        policy: Policy = traffic_aware,
        seed: int = 0,
        progress: Tell = nobody,
        adviser: Adviser | None = None,
    ) -> None:
        if not load.arrivals:
            raise ConfigError("the load has no request to send")
        self.cluster, self.load = cluster, load
        self.jobs: list[Job] = []
        self.landed_tokens = 0
        self.world = World(step_cv=cluster.step_cv, accept_rate=cluster.accept_rate, seed=seed)
        network = (
            attrs.evolve(cluster.network, bytes_per_s=None, latency_s=0.0) if cluster.colocated else cluster.network
        )
        self.links = SimLinks(network, self.world, self._freed)
        self.decodes = list[Decode]()
        self.prefills = list[Prefill]()
        for _ in range(cluster.num_decodes * cluster.decode.ranks):
            self._make("decode")
        for _ in range(cluster.num_prefills * cluster.prefill.ranks):
            self._make("prefill")
        if cluster.colocated:
            for prefill, decode in zip(self.prefills, self.decodes, strict=True):
                prefill.rival, decode.rival = decode, prefill
        for ranks, count in ((self.prefills, cluster.prefill.ranks), (self.decodes, cluster.decode.ranks)):
            for first in range(0, len(ranks), count):
                Lockstep(ranks[first : first + count], self.world)
        self._view = View(cluster, self.prefills, self.decodes, policy)
        self._queue: list[Job] = []
        self._num_turns = 0
        self._num_ended = 0
        self._progress = progress
        self._host = Host(load, cluster.stalls, self.world, send=self._send, dispatch=self._dispatch)
        self._host.begin()
        for change in cluster.changes:
            self.world.at(change.at_s, self._change, change)
        self.moves = list[str]()
        if adviser is not None:
            Switching(adviser, self, self._view, make=self._make, lose=self._lose, joined=self._dispatch)

    def run(self) -> tuple[Record, ...]:
        """Let everything happen, and return a record of every request in the order of intended sends."""
        self.world.run()
        records = [job.record(self.cluster) for job in self.jobs]
        return tuple(sorted(records, key=lambda record: record.intended_s))

    @property
    def num_steps(self) -> int:
        """The steps that all decodes ran."""
        return sum(len(decode.burst.ended_s) for decode in self.decodes)

    def _make(self, role: str) -> Prefill | Decode:
        """Add an engine."""
        cluster, shares_pool = self.cluster, self.cluster.colocated
        if role == "decode":
            decode = Decode(
                len(self.decodes),
                cluster.decode,
                _pool(cluster.decode),
                self.world,
                tell=self._tell,
                abort=self._abort,
                shares_pool=shares_pool,
                token_bytes=self.links.network.token_bytes,
            )
            self.decodes.append(decode)
            return decode
        prefill = Prefill(
            len(self.prefills),
            cluster.prefill,
            self.decodes[len(self.prefills)].pages if shares_pool else _pool(cluster.prefill),
            self.world,
            self.links,
            landed=self._landed,
            stopped=self._stopped,
            shares_pool=shares_pool,
        )
        self.prefills.append(prefill)
        return prefill

    # -- what engines tell -------------------------------------------------------------------------------------------

    def _tell(self, at_s: float, granted: Sequence[Job], ended: Sequence[Job]) -> None:
        """Let the host learn then what a decode has granted, and what has ended."""
        self._host.at(at_s, self._told, [(job, job.room) for job in granted], ended)

    def _abort(self, job: Job) -> None:
        """Let the prefill of a granted request stop. Its decode learns when nobody writes its pages any more."""
        self._forget(job)
        is_computed = job.prefilled_s is not None and job.granted_s is not None and job.prefilled_s >= job.granted_s
        if not is_computed and not self.prefills[job.prefill].stop(job):
            self._stopped(job)

    def _stopped(self, job: Job) -> None:
        """Let a decode know that the prefill of a request that it has given up has stopped."""
        self.decodes[job.decode].settle(job)

    def _landed(self, prompt: SimPrompt) -> None:
        """Let a decode know that a prompt's last byte is there."""
        job = prompt.job
        if job.outcome != "unfinished":
            self._stopped(job)
        if job.room == prompt.room and job in self.decodes[job.decode].scheduler.granted:
            self.landed_tokens += prompt.num_tokens - job.num_found
            self._view.landed(job)
            job.last_byte_s = self.world.now_s
            self.decodes[job.decode].land(job)

    def _freed(self) -> None:
        """Let prefills go on whose link was full, and may not be any more."""
        for prefill in self.prefills:
            if prefill.scheduler.queue:
                prefill.poke()

    # -- the host: what is sent --------------------------------------------------------------------------------------

    def _send(self, arrival: Arrival, intended_s: float) -> None:
        """Take a request, or refuse it."""
        now_s, deadline_s = self.world.now_s, self.cluster.pairing.default_deadline_s
        job = Job.of(len(self.jobs), arrival, intended_s, now_s, self.load.block_tokens, deadline_s)
        self.jobs.append(job)
        self._view.look(self._queue)
        refusal = self._view.refusal(job, num_queued=len(self._queue))
        if refusal is not None:
            self._end(job, "refused", refusal)
            return
        insort(self._queue, job, key=_turn)
        if job.deadline_at is not None:
            self.world.at(job.deadline_at, self._expire, job)

    def _end(self, job: Job, outcome: str, error: str | None = None) -> None:
        job.outcome, job.error, job.ended_s = outcome, error, self.world.now_s
        self._view.ended(job)
        self._num_ended += 1
        self._progress(self._num_ended, len(self.load.arrivals))
        self._host.ended()

    def _expire(self, job: Job) -> None:
        """End a request that waits in the queue at its deadline. Its decode ends any other."""
        if job in self._queue:
            self._queue.remove(job)
            self._end(job, "deadline")
        elif job.deadline_at is not None and job.deadline_at > self.world.now_s:
            self.world.at(job.deadline_at, self._expire, job)
        elif job.ended_s is None:
            self.decodes[job.decode].poke()

    # -- the host: what is chosen ------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send queued requests, in turn, to the pairs that the policy chooses, until it lets one wait."""
        now_s = self.world.now_s
        while self._queue:
            oldest = by_age(self._queue, attrgetter("sent_s"), num_turns=self._num_turns, now=now_s)
            job = oldest or self._queue[0]
            if not self._view.choose(job):
                if self._view.has_ports:
                    return
                self._queue.remove(job)
                self._end(job, "failed", "no prefill or no decode is left")
                continue
            self._queue.remove(job)
            self._num_turns += 1
            job.chosen_s = now_s if job.chosen_s is None else job.chosen_s
            self.decodes[job.decode].submit(job)

    def _told(self, granted: Sequence[tuple[Job, int]], ended: Sequence[Job]) -> None:
        """Forward what decode has granted, and read the ends of requests."""
        for job, room in granted:
            if job.room == room and job in self.decodes[job.decode].scheduler.granted:
                self._view.keep_promise(job)
                self.prefills[job.prefill].submit(job)
        for job in ended:
            self._end(job, "length" if job.is_whole else job.outcome)
        if ended and self._host.has_due:
            self._host.send_due()
        elif self._queue:
            self._dispatch()

    def _forget(self, job: Job) -> None:
        """Note that a request will not come to its prefill, nor its bytes to its decode."""
        self._view.keep_promise(job)
        self._view.landed(job)

    # -- what happens to engines -------------------------------------------------------------------------------------

    def _change(self, change: Change) -> None:
        """Change the speed of all ranks of an engine, or lose them."""
        engines: list[Prefill | Decode] = [*self.prefills, *self.decodes]
        ranks = [rank for rank in engines if rank.name.partition(".")[0] == change.engine]
        for rank in ranks:
            if change.speed > 0:
                rank.change_speed(change.speed)
            else:
                self._view.drop(rank)
        for rank in ranks if change.speed == 0 else []:
            self._lose(rank)

    def _lose(self, engine: Prefill | Decode) -> None:
        """Give what an engine has to others."""
        if isinstance(engine, Decode):
            self._lose_decode(engine)
        else:
            self._lose_prefill(engine)

    def _lose_prefill(self, prefill: Prefill) -> None:
        """Give what it had to other prefills. Requests that run need one, too, in case they lose their pages."""
        prefill.fail()
        for job in [job for job in self.jobs if job.ended_s is None and job.prefill == prefill.number]:
            if job.outcome != "unfinished":
                self._stopped(job)
            if job.outcome != "unfinished" or job.chosen_s is None or job in self._queue:
                continue
            decode = self.decodes[job.decode]
            self._forget(job)
            if not self._view.choose_prefill(job):
                if not job.runs:
                    decode.drop(job)
                    self._end(job, "failed", "no prefill is left")
                continue
            job.room += 1
            if not job.runs:
                self._view.promise(job)
            decode.give_up(job)

    def _lose_decode(self, decode: Decode) -> None:
        """Move what it had to other decodes, as far as a Pairing would."""
        for job in decode.fail():
            self.prefills[job.prefill].cancel(job)
            self._forget(job)
            job.room += 1
            if job.read_s and job.read_s[-1] > self.world.now_s:  # the host never got this token
                del job.token_s[-1], job.read_s[-1]
                job.offset -= 1
            job.num_retries += job.attempts > 0
            job.num_computing_lost += job.runs
            is_last = job.num_computing_lost > MAX_COMPUTING
            if is_last or (job.num_output and not self.cluster.pairing.continue_elsewhere):
                self._end(job, "failed", f"its decode is lost: {decode.name}")
                continue
            insort(self._queue, job, key=_turn)
        self._dispatch()


def _turn(job: Job) -> tuple[int, bool, float, int]:
    return order_of(job.priority, job.sent_s, job.deadline_at, job.number, is_new=not job.num_output)


def _pool(model: EngineModel) -> SimPages:
    return SimPages(model.num_pages, prefix_cache=model.cache.prefix_cache)


def uses_of(simulator: Simulator) -> tuple[EngineUse, ...]:
    """Return the use of slots and pages in a run, one value per engine. A pool that two share is that of the decode."""
    slots = simulator.cluster.decode.engine.max_running_requests
    ended = (decode.burst.ended_s for decode in simulator.decodes)
    whole_s = max((ended_s[-1] for ended_s in ended if ended_s), default=0.0)
    prefills = [] if simulator.cluster.colocated else simulator.prefills
    return (
        *(EngineUse(name=each.name, role="prefill", max_pages=each.pages.max_share) for each in prefills),
        *(
            EngineUse(
                name=each.name,
                role="decode",
                mean_slots=each.burst.slot_s / whole_s / slots if whole_s else None,
                max_slots=each.most_slots / slots,
                max_pages=each.pages.max_share,
            )
            for each in simulator.decodes
        ),
    )
