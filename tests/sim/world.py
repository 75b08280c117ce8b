"""One simulated run: real engines, channels, pools and a real Pairing, a network that fails, and an oracle.

    World(seed).run() raises Violation when a promise did not hold.

While faults last, only safety is checked: no wrong token, no page with two owners, no second end, no exception. Then
all faults are healed, and within HEAL_S of virtual time every request must have ended and every page be free.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import attrs

from pdinfer.config import CacheConfig
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.engine.ranks import lockstep
from pdinfer.errors import Overloaded, PDInferError, RankLost, RequestError
from pdinfer.kv.channel import sender
from pdinfer.kv.channel.snapshot import AcceptedState
from pdinfer.kv.pool import PagePool
from pdinfer.pairing.losses import MAX_COMPUTING
from pdinfer.pairing.pairing import Pairing
from pdinfer.pairing.request import TrackedRequest
from pdinfer.parallel.groups import Groups
from pdinfer.testing import NetworkFaults, SimChannel, SimNetwork, Simulation
from pdinfer.types import FinishReason, Request, TokenEvent
from tests.sim import reach
from tests.sim.fakes import CellBrain, Violation
from tests.sim.plan import Arrival, Focus, Plan, Trouble, draw, focus_of
from tests.sim.ports import Engine, Following, Loop, Served
from tests.sim.ranks import Gone, SimWakeup, Team

HEAL_S = 60.0
PROMPT_S = 0.25
RETRY_S = 0.5
HOST = "host"


class Brain(Protocol):
    """A model, engines for it, and the tokens that they must give."""

    model: Any
    prefill: type[PrefillEngine]
    decode: type[DecodeEngine]

    def among(self, groups: Groups) -> Any:
        """Return the model for a rank of these groups; each rank has all of it."""

    def watch(self, pool: PagePool, accounts: PagePool, over: Callable[[], bool]) -> None:
        """Check all writes into the pool against the states of its pages in `accounts` (the pool itself, or the
        leader's), until it is `over`."""

    def check_token(self, request: Request, tokens: list[int]) -> None:
        """Raise Violation when the last of `tokens` is not the one that the request must give."""

    def is_whole(self, request: Request, tokens: list[int]) -> bool:
        """Return whether `tokens` are all that the request must give; raise Violation when they are not right."""


class WatchedChannel(SimChannel):
    """A channel that holds its engine to its hand-offs, also to those that it gives without the engine."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self._finished: set[bytes] = set()
        say_aborted = self.sender.say_aborted

        def finish(peer, room, error):
            self._finished.add(room)
            say_aborted(peer, room, error)

        self.sender.say_aborted = finish

    def push(self, grant, **more):
        if grant.room in self._finished:
            raise Violation("a room is written after its writer's hand-off")
        return super().push(grant, **more)

    def finish(self, grant, handoff):
        self._finished.add(grant.room)
        return super().finish(grant, handoff)


@attrs.define(eq=False)
class Stream:
    """The events that one request has given so far."""

    arrival: Arrival
    tracked: TrackedRequest
    tokens: list[int] = attrs.field(factory=list)
    end: TokenEvent | None = None
    cancelled_at: float | None = None


class World:
    """One run, drawn from `seed` within `focus`, of engines that compute with `brain`."""

    def __init__(self, seed: int, focus: Focus | None = None, brain: Brain | None = None) -> None:
        self.simulation = Simulation(seed)
        self.plan: Plan = draw(self.simulation.rng, focus or focus_of(seed))
        self.network = SimNetwork(self.simulation, self.plan.faults)
        self.counts: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.streams: dict[str, Stream] = {}
        self.served: dict[str, Served] = {}
        self.engines: dict[str, Engine] = {}
        self.following: dict[str, list[Following]] = defaultdict(list)
        self.teams: dict[str, Team] = {}
        self._every_team: list[Team] = []
        self.brain: Brain = brain or CellBrain()
        self._caches: dict[str, CacheConfig] = {}
        self._nodes: dict[str, tuple[str, ...]] = {}
        self._sick_until = 0.0
        self._salts: dict[PagePool, dict[tuple[int, int], bytes]] = defaultdict(dict)
        self._healed = False

    # -- building ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        plan = self.plan
        for role, caches in (("p", plan.prefills), ("d", plan.decodes)):
            for number, cache in enumerate(caches):
                self._caches[f"{role}{number}"] = cache
        for name, size in zip(self._caches, plan.num_ranks, strict=True):
            self._nodes[name] = (name, *(f"{name}.{rank}" for rank in range(1, size)))
        if plan.ports == "shared":
            pool = self._pool(self._caches["d0"])
            for name in ("p0", "d0"):
                self.engines[name] = self._engine(name, pool)
            self.engines["p0"].shared = True
        else:
            for name in self._caches:
                self._start(name)
        ports = {name: self._port(name) for name in self.engines}
        self.pairing = Pairing(
            [port for name, port in ports.items() if name[0] == "p"],
            [port for name, port in ports.items() if name[0] == "d"],
            config=plan.pairing,
            clock=self.simulation.clock,
            random_bytes=self.simulation.random_bytes,
        )
        self._host = Loop(self.simulation, HOST, self._host_turn)
        self.pairing._intake.inbox.listen(self._host.wake)

    def _start(self, name: str) -> None:
        """Make an engine: with several ranks, one on each of its nodes, the leader's first."""
        cache, nodes = self._caches[name], self._nodes[name]
        pools = [self._pool(cache)]
        if len(nodes) == 1:
            self.engines[name] = self._engine(name, *pools)
            return
        self.counts["ranks"] += 1
        made: list[Engine] = []
        # its accounts end when the leader closes, and a follower that does not know of it yet has open links
        pools += [self._pool(cache, pools[0], lambda: bool(made) and made[0].closed) for _ in nodes[1:]]
        team = self.teams[name] = Team(self.simulation, nodes)
        self._every_team.append(team)
        made += team.make(lambda rank, groups: self._engine(nodes[rank], pools[rank], groups))
        self.engines[name], *followers = made
        self.following[name] = [  # the leader sets the pace, or a slow engine would be slower the more ranks it has
            Following(self.simulation, node, engine, self.plan.step_s, lost=self._lost, fiber=fiber)
            for node, engine, fiber in zip(nodes[1:], followers, team.fibers[1:], strict=True)
        ]

    def _pool(
        self, cache: CacheConfig, accounts: PagePool | None = None, over: Callable[[], bool] = lambda: False
    ) -> PagePool:
        pool = PagePool(self.brain.model, cache)
        self.brain.watch(pool, accounts or pool, over)
        return pool

    def _engine(self, node: str, pool: PagePool, groups: Groups | None = None) -> Engine:
        channel = WatchedChannel(pool, self.network, node, placement=self.plan.placement, key=self.plan.key)
        kind = self.brain.prefill if node[0] == "p" else self.brain.decode
        model = self.brain.model if groups is None else self.brain.among(groups)
        return kind(model, channel, self.plan.engine, clock=self.simulation.clock)

    def _step_s(self, name: str) -> float:
        return self.plan.step_s * (self.plan.prefill_slowness if name[0] == "p" else 1)

    def _port(self, name: str):
        engine = self.engines[name]
        if self.plan.ports != "piped":
            return engine
        fiber = self.teams[name].fibers[0] if name in self.teams else None
        self.served[name] = Served(
            self.simulation, name, engine, self._step_s(name), self._check_engines, lost=self._lost, fiber=fiber
        )
        return self.served[name].port

    def _lost(self, error: RankLost) -> None:
        """Check that a rank goes on without others only where some were made to fail."""
        if not isinstance(error, Gone) or self.plan.quiet:
            raise Violation(f"ranks fell apart: {error}") from error.__cause__
        self.counts["rank lost"] += 1

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> World:
        """Do the whole run; raise Violation, or any error of an engine."""
        errors = _Errors()
        logger = logging.getLogger("pdinfer")
        logger.addHandler(errors)
        grouping, wakeup = sender.GROUP_BYTES, lockstep.Wakeup
        sender.GROUP_BYTES, lockstep.Wakeup = self.plan.group_bytes, SimWakeup
        try:
            self._build()
            if self.plan.quiet and not self.simulation.run(self._linked, timeout_s=HEAL_S):
                raise Violation("ranks do not find each other")
            for arrival in self.plan.arrivals:
                self.simulation.later(arrival.at_s, partial(self._submit, arrival))
            for trouble in self.plan.troubles:
                self.simulation.later(trouble.at_s, partial(self._strike, trouble))
            last_s = max([arrival.at_s for arrival in self.plan.arrivals] + [t.at_s for t in self.plan.troubles])
            self.simulation.run(timeout_s=last_s + 0.001)
            self.simulation.run(lambda: not self.pairing.num_unfinished, timeout_s=2.0)
            self._heal()
            if not self.simulation.run(self._idle, timeout_s=HEAL_S):
                raise Violation(f"not idle {HEAL_S:g} s after everything was healed: {self._unrest()}")
            self._judge()
            self.counts["moved"] += self.pairing.stats.num_moved
            self.counts["port is back"] += sum(lost.is_back for lost in self.pairing.stats.ports_lost)
            errors.check(quiet=self.plan.quiet)
        finally:
            sender.GROUP_BYTES, lockstep.Wakeup = grouping, wakeup
            for team in self._every_team:
                team.end()
            logger.removeHandler(errors)
        return self

    def _linked(self) -> bool:
        """Return whether every rank knows of its links. A request that overtakes the last frame of a handshake loses an
        attempt, so where no request may fail none comes before."""
        sides = [[self.engines[name].channel for name in self._nodes if name[0] == role] for role in "pd"]
        for name, following in self.following.items():
            sides["pd".index(name[0])] += [one.engine.channel for one in following]
        prefills, decodes = sides
        return all(one.connected(two.address) and two.connected(one.address) for one in prefills for two in decodes)

    def _submit(self, arrival: Arrival) -> None:
        request = arrival.request
        try:
            self.pairing.submit(request)
        except (Overloaded, RequestError):
            self.counts["not taken"] += 1
            return
        self.streams[request.request_id] = Stream(arrival, self.pairing._broker.requests[request.request_id])
        if request.deadline_s is not None:
            self.simulation.later(request.deadline_s + PROMPT_S, partial(self._overdue, request.request_id))
        if arrival.cancel_s is not None:
            self.simulation.later(arrival.cancel_s - arrival.at_s, partial(self._cancel, request.request_id))

    def _cancel(self, request_id: str) -> None:
        stream = self.streams[request_id]
        if stream.end is None:
            self.counts["cancel"] += 1
            stream.cancelled_at = self.simulation.clock.now_s
            self.pairing.cancel(request_id)
            self.simulation.later(PROMPT_S, partial(self._cancelled, stream))

    def _cancelled(self, stream: Stream) -> None:
        if stream.end is None and self._sick_until < stream.cancelled_at:
            raise Violation(f"{stream.arrival.request.request_id} has not ended {PROMPT_S} s after its cancel")

    def _overdue(self, request_id: str) -> None:
        stream = self.streams[request_id]
        if stream.end is None and self._sick_until < stream.arrival.at_s:
            raise Violation(f"{request_id} has not ended {PROMPT_S} s after its deadline")

    def _host_turn(self) -> float | None:
        for event in self.pairing.step():
            self._hear(event)
        if self.plan.ports != "piped":
            self._check_engines(*self.engines.values())
        if self.pairing.wait(0.0):
            return self.plan.step_s * (0.5 + self.simulation.rng.random())
        return 0.1 if self.pairing.num_unfinished else None

    # -- trouble ----------------------------------------------------------------------------------------------------

    def _strike(self, trouble: Trouble) -> None:
        if self._healed:
            return
        names = [node for nodes in self._nodes.values() for node in nodes]
        one = names[trouble.one % len(names)]
        others = [name for name in names if name[0] != one[0]]
        other = others[trouble.other % len(others)]
        self._sick_until = max(self._sick_until, self.simulation.clock.now_s + trouble.lasts_s + 3.0)
        later = self.simulation.later
        if trouble.kind == "cut":
            self.network.cut(one, other)
        elif trouble.kind == "partition":
            self.network.partition(one, other)
            later(trouble.lasts_s, self.network.heal)
        elif trouble.kind == "freeze" and self.simulation.running(one):
            self.counts["freeze"] += 1
            self.simulation.freeze(one)
            later(trouble.lasts_s, partial(self._thaw, one))
        elif trouble.kind == "stall" and self.simulation.running(one):
            self.counts["stall"] += 1
            self._loops[one].stall(self.simulation.clock.now_s + trouble.lasts_s)
        elif trouble.kind == "crash" and self.simulation.alive(one):
            self._crash(one)
            later(trouble.lasts_s, partial(self._restart, one.split(".")[0]))

    @property
    def _loops(self) -> dict[str, Loop]:
        loops = {name: served.loop for name, served in self.served.items()}
        for name, following in self.following.items():
            loops.update(zip(self._nodes[name][1:], (one.loop for one in following), strict=True))
        return loops

    def _thaw(self, name: str) -> None:
        if self.simulation.alive(name):
            self.simulation.thaw(name)

    def _crash(self, name: str) -> None:
        self.counts["crash"] += 1
        self.simulation.crash(name)
        if name in self.served:
            self.simulation.later(0.001, self.served[name].port.hang_up, node=HOST)

    def _restart(self, name: str) -> None:
        """Start new processes in the place of those that died or were given up."""
        nodes = self._nodes[name]
        if all(map(self.simulation.alive, nodes)) and not self.served[name].ended:
            return
        for node in nodes:
            self.simulation.crash(node)
            self.simulation.restart(node)
        self.simulation.later(0.001, self.served[name].port.hang_up, node=HOST)
        self.counts["restart"] += 1
        self._start(name)
        self._join(self._port(name))

    def _join(self, port) -> None:
        """Connect a port. This may find other ports lost and end their requests, so a host looks for events after it in
        any case."""
        try:
            self.pairing._joining.add(port)  # at once: time does not pass in a thread beside this one
        except PDInferError:
            self.counts["join again"] += 1
            self.simulation.later(RETRY_S, partial(self._join, port))
        self._host.wake()

    def _heal(self) -> None:
        self._healed = True
        self.network.faults = NetworkFaults()
        self.network.heal()
        for node, loop in self._loops.items():
            self._thaw(node)
            loop.stall(0.0)
            loop.wake()

    # -- the oracle -------------------------------------------------------------------------------------------------

    def _check_engines(self, *engines: Engine) -> None:
        """Check engines that have stepped, and note the states in which all of them are then."""
        for engine in engines:
            self._check_engine(engine)
        sides = [[e for e in self.engines.values() if isinstance(e, side)] for side in (DecodeEngine, PrefillEngine)]
        reach.request_states(*sides, self.reached)
        reach.room_states(*sides, self.reached)
        for name in self.teams:
            leader = self.engines[name].channel
            followers = [one.engine.channel for one in self.following[name]]
            reach.rank_states(leader, followers, self.reached)
            reach.writer_states([leader, *followers], self.reached)

    def _check_engine(self, engine: Engine) -> None:
        pool = engine.channel.pool
        pool.check()
        if pool.num_free + pool.num_cached + pool.num_owned + pool.num_granted != pool.num_pages:
            raise Violation(f"pages are lost: {pool.states(range(pool.num_pages))}")
        most = self.plan.engine.max_total_tokens
        if most is not None and (pool.num_pages - pool.num_available) * pool.layout.page_size > most:
            raise Violation(f"pages for more than {most} tokens are in use")
        if isinstance(engine, PrefillEngine):
            holders = [(prompt.request, prompt.pages) for prompt in engine.snapshot().active]
        else:
            holders = [(sequence.request, sequence.pages) for sequence in engine.snapshot().running]
        salts = self._salts[pool]
        for request, pages in holders:
            for page, generation in zip(pages, pool.generations(pages), strict=True):
                if salts.setdefault((page, generation), request.cache_salt) != request.cache_salt:
                    raise Violation(f"{request.request_id} reads page {page}, which was made under another salt")

    def _hear(self, event: TokenEvent) -> None:
        stream = self.streams.get(event.request_id)
        name = event.request_id
        self.simulation.note(repr((name, event.index, event.token, event.finish_reason)).encode())
        if stream is None:
            raise Violation(f"an event of a request that was not taken: {event}")
        if stream.end is not None:
            raise Violation(f"{name} has ended with {stream.end.finish_reason} and goes on: {event}")
        if event.index != len(stream.tokens):
            raise Violation(f"{name}: index {event.index} comes after {len(stream.tokens)} tokens")
        if event.token is not None:
            stream.tokens.append(event.token)
            self.brain.check_token(stream.arrival.request, stream.tokens)
        if event.finish_reason is not None:
            stream.end = event
            self.counts[f"end {event.finish_reason.value}"] += 1
            self._check_end(stream, event)

    def _check_end(self, stream: Stream, event: TokenEvent) -> None:
        name, reason = event.request_id, event.finish_reason
        whole = self.brain.is_whole(stream.arrival.request, stream.tokens)
        deadline_s = stream.arrival.request.deadline_s
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            fair = whole
        elif reason is FinishReason.CANCELLED:
            fair = stream.cancelled_at is not None
        elif reason is FinishReason.DEADLINE:
            fair = deadline_s is not None and self.simulation.clock.now_s >= stream.arrival.at_s + deadline_s - 1e-9
        elif isinstance(event.error, Overloaded):
            self.counts["displaced"] += 1
            fair = stream.arrival.request.priority < max(arrival.request.priority for arrival in self.plan.arrivals)
        else:
            fair = not self.plan.quiet and not self._could_go_on(stream.tracked, event)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.counts["continued"] += stream.tracked.continued
        if not fair:
            raise Violation(f"{name} ended with {reason} after {stream.tokens}: {event.error}")

    def _could_go_on(self, tracked: TrackedRequest, event: TokenEvent) -> bool:
        """Whether it failed with its decode though there is another one that it might have gone to."""
        rooms = [port.limits.max_tokens for port in self.pairing.ports if port.role == "decode"]
        if max(rooms, default=0) < tracked.max_tokens or not str(event.error).startswith("its decode is lost"):
            return False
        if tracked.first_token_s is not None and not self.plan.pairing.continue_elsewhere:
            return False
        return len(tracked.losses.computing) <= MAX_COMPUTING

    def _idle(self) -> bool:
        # requests that a call other than `step` has ended are reported by the next step
        told = all(stream.end is not None for stream in self.streams.values())
        return (
            told
            and not self.pairing.num_unfinished
            and not self.pairing.stats.ports_away
            and all(self.engines[name].closed for name in self.served if self._closes(name))
            and all(not self._unrest_of(name) for name, engine in self.engines.items() if self._lives(name))
        )

    def _closes(self, name: str) -> bool:
        """Return whether its host has begun to close it, which may take time among ranks."""
        return self.simulation.alive(name) and self.served[name].ended

    def _lives(self, name: str) -> bool:
        served = self.served.get(name)
        return self.simulation.alive(name) and (served is None or not served.ended)

    def _unrest_of(self, name: str) -> str:
        engine = self.engines[name]
        pool = engine.channel.pool
        if not engine.num_unfinished and not pool.num_granted and not pool.num_owned:
            return self._unrest_of_ranks(name)
        return (
            f"{name}: {engine.num_unfinished} unfinished, of {pool.num_pages} pages {pool.num_granted} granted, "
            f"{pool.num_owned} owned"
        )

    def _unrest_of_ranks(self, name: str) -> str:
        """Return what the ranks of an engine without work still keep for each other."""
        if name not in self.teams or not self._lives(name):
            return ""
        leader = self.engines[name].ranks.channel
        kept = [leader._handoffs, leader._settled, leader._sent, leader._stops]
        for one in self.following[name]:
            follower = one.engine.ranks.follower
            kept += [follower._grants, follower._refused, follower._sending, follower._drafts]
            held = one.engine.channel.snapshot()
            written = (AcceptedState.OPEN, AcceptedState.STOPPING)
            kept += [held.expected, [room for room, state in held.accepted.items() if state in written]]
        return f"{name}: its ranks keep {[what for what in kept if what]}" if any(kept) else ""

    def _unrest(self) -> str:
        ended = [name for name, stream in self.streams.items() if stream.end is None]
        rest = [unrest for name in self.engines if self._lives(name) and (unrest := self._unrest_of(name))]
        return f"unfinished {ended}; away {list(self.pairing.stats.ports_away)}; {'; '.join(rest)}"

    def _judge(self) -> None:
        open_ = [name for name, stream in self.streams.items() if stream.end is None]
        if open_:
            raise Violation(f"the pairing is done and {open_} have not ended")
        # an engine that was started again at the address of a dead one refuses peers that look for the dead one
        unsound = [(node, error) for node, error in self.network.refusals if "answers as another" not in str(error)]
        if unsound:
            raise Violation(f"a sound link was closed: {unsound}")
        for name in self.engines:
            if not self._lives(name) and self.simulation.alive(name):
                unrest = self._unrest_of(name)
                if unrest:
                    raise Violation(f"a closed engine holds pages: {unrest}")


class _Errors(logging.Handler):
    """A handler that collects what engines log as exceptions: none is expected, whatever fails around them. While
    nothing fails, a writer that was asked to stop must say so."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.exceptions: list[logging.LogRecord] = []
        self.mute: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            if not isinstance(record.exc_info[1], Gone):
                self.exceptions.append(record)
        elif "did not stop writing" in (text := record.getMessage()):
            self.mute.append(text)

    def check(self, *, quiet: bool) -> None:
        for record in self.exceptions:
            raise Violation(f"an engine logged an exception: {record.getMessage()}") from record.exc_info[1]
        if quiet and self.mute:
            raise Violation(f"nothing was wrong with a writer, and yet: {self.mute}")
