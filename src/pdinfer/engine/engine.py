"""What the two engines share: a model, one end of a channel, an inbox, the way a host waits for them, and the way they
continue after a step that did not end."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import torch

from pdinfer.bounds import cause, escaped
from pdinfer.checks import typed
from pdinfer.config import EngineConfig
from pdinfer.engine.experts import EngineExperts
from pdinfer.engine.page_tables import PageTables, PromptTables
from pdinfer.engine.ranks.leader import RankRunner, RunEmpty
from pdinfer.engine.ranks.ranks import Ranks, SeveralRanks
from pdinfer.engine.sequence import Cancel
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RequestError
from pdinfer.execution.runner import ModelRunner, using_threads
from pdinfer.execution.sampling import LogitsProcessorFactory
from pdinfer.execution.warm_up import WarmUp, WarmUpRun, WarmUpStep
from pdinfer.inbox import Inbox
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import Held, PagePool
from pdinfer.kv.prefix import KeyScheme
from pdinfer.log import log
from pdinfer.model.model import Model
from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.process.forked import OfOneProcess, begin_to_compute
from pdinfer.process.locks import HeldBack, check_not_inside, let_go
from pdinfer.process.memory import keep_freed_memory
from pdinfer.process.modes import own_modes
from pdinfer.progress import Progress, telling
from pdinfer.scheduling.decode import DecodeScheduler
from pdinfer.scheduling.prefill import PrefillScheduler
from pdinfer.scheduling.rules import StepCosts, withheld_pages
from pdinfer.stats import EngineLoad
from pdinfer.trace import STEP, Trace, mark, span
from pdinfer.types import Event, PeerAddress, RequestLimits

Command = TypeVar("Command")
AnyEngine = TypeVar("AnyEngine", bound="Engine[Any]")

DRAIN_POLL_S = 0.1


class Interruptible(OfOneProcess, Generic[Command]):
    """The part of an engine that recovers. `_arrived` holds the commands from the inbox that are not dealt with yet."""

    role: str
    channel: KVChannel
    pool: PagePool
    _unfinished_call = False
    _inbox: Inbox[Command | Cancel]
    _arrived: deque[Command | Cancel]
    ranks: Ranks
    computing: frozenset[str]
    """The ids of the requests of which it has begun to compute rows: at prefill until their hand-off, at decode until
    they end or are retracted. Those that have ended since may still be named."""
    _num_changes = 0
    """Grows with every step and command that changes what a load says."""

    def _begin_call(self) -> None:
        """Begin a call that changes what this engine has. The call ends by clearing `_unfinished_call`; when an earlier
        one did not, everything is in doubt and the engine recovers first."""
        if self._unfinished_call or self.channel.transport.in_doubt:
            let_go()
            self._recover(PDInferError(f"a step of the {self.role} engine was interrupted"))
        self._unfinished_call = True

    def _recover(self, error: PDInferError) -> None:
        """End all requests with `error`. Once the links are closed no peer writes our pages any more, so the pages are
        free. Raise RankLost when there are other ranks, because they cannot know about it."""
        self.ranks.leave(str(error))
        self.channel.recover()
        self._drop(error)
        self._arrived.clear()
        self.computing = frozenset()
        self.pool.rebuild()
        self._num_changes += 1
        self._unfinished_call = False

    @abstractmethod
    def _drop(self, error: PDInferError) -> None:
        """End every request, whatever it holds."""

    def _arrivals_in_order(self) -> Iterator[Command | Cancel]:
        """Yield the commands in the inbox. Each is remembered until it has been dealt with."""
        self._arrived.extend(self._inbox.take())
        while self._arrived:
            yield self._arrived[0]
            self._arrived.popleft()


class Engine(Interruptible[Command], ABC, Generic[Command]):
    """An engine over the pages of its channel's pool, which no other engine uses. `close` also closes the channel.

    A request may name any of `logits_processors`. Give the engines of both roles the same ones. `other_config` is for
    the engine of the other role that this one may become (`Pairing.switch`), and by default like `config`. `submit`,
    `cancel` and `load` may be called from any thread, everything else only from the thread that steps.

    When the model's topology has several ranks, each rank makes an engine with equal arguments in its own process,
    steps it and waits for it (`remote.serve` is such a loop). Requests go to the leader of an attention group; on any
    other rank `submit` and `cancel` raise RequestError. `step` raises RankLost once a rank is lost. A rank whose host
    does not step for as long as a collective may take counts as lost. An engine that is closed on one rank closes on
    all of them."""

    role = "engine"
    address: PeerAddress
    """The address by which peers know this engine."""
    addresses: tuple[PeerAddress, ...]
    """The addresses of all ranks that have the same requests, the leader's first."""
    closed: bool
    """Whether the engine was closed, here or on another of its ranks."""
    limits: RequestLimits
    """What a request may ask of this engine."""
    _has_left = False
    _check_steps: Callable[[Model, EngineConfig], None]
    """Raise ConfigError when a step of this role may be larger than the model can run, before anything is made."""
    _run_empty: RunEmpty
    _warm_up: Callable[[WarmUpRun], Iterable[WarmUpStep]]
    """Run the steps of this role's warm-up one by one."""
    _scheduler: DecodeScheduler[Any] | PrefillScheduler[Any]

    @typed
    @own_modes()
    def __init__(
        self,
        model: Model,
        channel: KVChannel,
        config: EngineConfig | None = None,
        *,
        other_config: EngineConfig | None = None,
        logits_processors: Mapping[str, LogitsProcessorFactory] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.channel = model, channel
        self.config = config = config or EngineConfig()
        self._other_config = other_config or self.config
        self._check_steps(model, self.config)
        self.pool = _checked_pool(channel, model)
        begin_to_compute(self.config.num_threads or torch.get_num_threads())
        self._factories = dict(logits_processors or {})
        self._clock = clock
        folder, engine_id = self.config.trace, channel.address.engine_id
        self._trace = None if folder is None else Trace.in_folder(folder, self.role, engine_id)
        if self.config.keep_freed_memory and model.device.type == "cpu":
            keep_freed_memory()
        self._num_withheld = withheld_pages(
            self.pool.num_pages, page_size=self.pool.layout.page_size, max_total_tokens=self.config.max_total_tokens
        )
        self._inbox: Inbox[Command | Cancel] = Inbox()
        wake, groups = self._inbox.wake, model.groups
        self._rebalancing = Rebalancing(model.experts, model.moe_layers(), groups, config, wake=wake, clock=clock)
        self.experts = EngineExperts(self._rebalancing)
        self._model_runner = self._make_runner()
        join: Callable[..., Ranks] = Ranks
        if groups.world.size > 1:
            shared = _shared_limits(self.role, self.config, model, self.pool)
            join = partial(
                SeveralRanks, groups, run_empty=self._run_empty, limits=shared, inbox=self._inbox, clock=clock
            )
        self.ranks = join(channel, self._model_runner, rebalancing=self._rebalancing)
        self.address, self.addresses = channel.address, self.ranks.addresses
        # `channel` is this rank's own end; requests go through `_channel`, which stands for all ranks of the group
        self._runner: ModelRunner | RankRunner = self.ranks.runner
        self._channel = self.ranks.channel
        self._events: list[Event] = []
        self._tell_computing: Callable[[frozenset[str]], None] | None = None
        self.longest_warm_up_s = 0.0
        self._brief: tuple[int, EngineLoad] | None = None
        self._arrivals = 0
        self._arrived, self.computing, self.closed = deque(), frozenset(), False
        channel.notify(wake)
        channel.engine = weakref.ref(self)
        self.peers = channel.peers
        self.limits = _limits(self.role, model, self.pool, self._num_withheld, self._factories)
        self._prepare()
        self.pool.holders.add(self._held)

    @abstractmethod
    def _prepare(self) -> None:
        """Make the scheduler of this role, and what it counts."""

    @abstractmethod
    def _held(self) -> Held:
        """Return the pages that requests hold."""

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return (
            f"{type(self).__name__}({self.address}, {self.num_unfinished} unfinished requests, {self.model}, "
            f"{self.pool}{closed})"
        )

    def _make_runner(self) -> ModelRunner:
        """Make what runs this engine's steps. Tests and benchmarks override it."""
        return ModelRunner(self.model, self.pool.memory, self._trace)

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """How many requests this engine is not done with."""

    @property
    @abstractmethod
    def request_ids(self) -> list[str]:
        """The ids of the requests that `cancel` would end."""

    @typed
    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Connect the channel to an engine of the other role; see `KVChannel.connect`."""
        self._channel.connect(peer, timeout_s=timeout_s)

    @typed
    def disconnect(self, peer: PeerAddress) -> None:
        """Close the channel's link to a peer. The rooms that the peer still owed settle as ABORTED."""
        self._channel.drop_peer(peer)

    def _put(self, command: Command | Cancel) -> None:
        """Put a command into the inbox. Raise RequestError on a rank that takes no requests."""
        self.ranks.check_leads()
        self._inbox.put(command)
        self._num_changes += 1

    @typed
    def cancel(self, request_id: str) -> None:
        """Stop a request at the next step. Unknown and finished ids are ignored."""
        self._put(Cancel(request_id))

    @typed
    def stage_placement(self, placement: ExpertPlacement) -> None:
        """Place the experts like this at a common step of all ranks: `experts.stage`, under the next epoch."""
        self.experts.stage(placement)

    @typed
    def notify(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, whenever a step would do something."""
        self._inbox.listen(listener)

    @typed
    def tell_computing(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call `listener` with `computing`, in the thread that steps, before a step that computes the first rows of a
        request: the listener then knows of them even if the step ends the process."""
        self._tell_computing = listener

    def _begin(self, request_ids: Iterable[str | None]) -> None:
        """Note of which requests the coming step computes rows."""
        new = {request_id or "" for request_id in request_ids} - self.computing
        if new:
            self.computing = self.computing.intersection(self.request_ids) | new
            if self._tell_computing is not None:
                self._tell_computing(self.computing)

    def step(self) -> list[Event]:
        """Do what can be done now, and return the events that came of it. A step never waits, except for the other
        ranks if there are any. Raise RankLost when one does not come. What signals raise waits (`HeldBack`)."""
        events: list[Event] = []
        try:
            with HeldBack():
                self._change()
            events, self._events = self._events, []
            return events
        except BaseException:  # the caller did not get them
            self._events = events + self._events
            raise

    def _change(self) -> None:
        if self._has_left:  # its channel and its pages are another engine's
            return
        if self._unfinished_call:
            check_not_inside(self, type(self).__name__)
        had_work = self.num_unfinished > 0
        try:
            self._begin_call()
            with own_modes(self.model.device), using_threads(self.config.num_threads), span(self._trace, STEP):
                mark(self._trace, "schedule")
                if self.channel.redial_in_s() <= 0:
                    self.channel.links.redial()
                self.ranks.step(self._step)
                if self.ranks.are_closing:
                    self.close()
        except PDInferError:
            raise
        except BaseException as error:
            let_go()
            if not isinstance(error, Exception):
                raise
            self.ranks.propagate(error)
            log.exception("a step of the %s engine failed: what it had ends with it", self.role)
            self._recover(PDInferError(f"a step of the {self.role} engine failed: {cause(error)}"))
        self._num_changes += had_work or self.num_unfinished > 0
        self._unfinished_call = False

    @abstractmethod
    def _step(self) -> None:
        """Run this role's part of a step and put the events into `_events`. `step` has prepared everything."""

    def warm_up(self, *, progress: Progress = None) -> WarmUp:
        """Run every size of step once, so that no request pays for a first use, and return what was run.
        `progress(done, steps)` is called after each; True draws a line on stderr.

        All ranks call it together. It takes seconds. Call it from the thread that steps and before requests come, for
        example before `remote.serve`. A warm-up borrows free pages, touches no others, leaves the prefix cache as it
        is, counts in no `load`, and forgets what was recorded about experts. Raise Overloaded when requests are
        unfinished or no page is free, RequestError when the engine is closed."""
        _check_unused(self.role, self.num_unfinished, closed=self.closed)
        self._begin_call()
        line = telling(progress, f"warming up {self.role}", "steps", self._clock)
        try:
            modes, threads = own_modes(self.model.device), using_threads(self.config.num_threads)
            with modes, threads, span(self._trace, "warm_up"), line as tell:
                run = WarmUpRun(self._model_runner, self.pool, self.config, self.limits, self._clock, tell)
                ran = WarmUp(steps=tuple(self._warm_up(run)))
            self.longest_warm_up_s = ran.longest_s
            self._unfinished_call = False
            return ran
        finally:
            if self._rebalancing.recorder is not None:
                self._rebalancing.recorder.reset()

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would."""

    def _sleep(self, timeout_s: float, left_s: float = float("inf")) -> bool:
        """Sleep until something comes or is due, here in `left_s` or with the other ranks. Return whether it is."""
        left_s = min(left_s, self.ranks.due_in_s(), self.channel.redial_in_s())
        return self._inbox.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    @typed
    def drain(self, timeout_s: float) -> bool:
        """Step until nothing is unfinished or the time is over. The next `step` returns the events of these steps."""
        end, events = time.monotonic() + timeout_s, list[Event]()
        try:
            while self.num_unfinished and time.monotonic() < end:
                events += self.step()
                self.wait(min(DRAIN_POLL_S, max(0.0, end - time.monotonic())))
        finally:
            self._events = events + self._events
        return not self.num_unfinished

    @own_modes()
    def close(self) -> None:
        """End what is unfinished, close the channel, and write the trace if there is one. The other ranks do the same
        in their next step. A second call does nothing."""
        if not self.closed:
            with HeldBack():
                self.ranks.close(begin=self._begin_call, end=self._close)
                self._leave()

    def _become(self, other: type[AnyEngine]) -> AnyEngine:
        """Close the engine, which has nothing unfinished, but leave its channel open, without links, and its pages
        cached. Return an engine of the `other` role in its place; all ranks do so together. See `engine.roles`."""
        self._begin_call()
        self.channel.vacate(self._inbox.wake)
        self.ranks.vacate()
        self._has_left = True
        self._leave()
        more: Any = {"other_config": self.config, "logits_processors": self._factories, "clock": self._clock}
        return other(self.model, self.channel, self._other_config, **more)

    def _leave(self) -> None:
        self._rebalancing.close()
        self.closed, self._unfinished_call = True, False
        self.pool.holders.remove(self._held)
        self._inbox.wake()
        if self._trace is not None:
            self._trace.write()

    @abstractmethod
    def _close(self) -> None:
        """End what is unfinished and close the channel."""

    @property
    def key_scheme(self) -> KeyScheme | None:
        """How the keys of cached pages are made, see `count_known`; None when no pages are cached."""
        return self.pool.key_scheme if self.pool.prefix_cache else None

    @typed
    def count_known(self, keys: Sequence[bytes]) -> int:
        """Return how many of these keys, from the first, belong to cached pages or to pages in use."""
        return self.pool.count_known(keys)

    def brief_load(self) -> EngineLoad:
        """Return the part of `load` that policies need, as it was after the last step or `submit`."""
        if self._brief is None or self._brief[0] != self._num_changes:
            self._brief = self._num_changes, self._make_brief_load()
        return self._brief[1]

    @abstractmethod
    def _make_brief_load(self) -> EngineLoad:
        """Return what there is to do now."""


def _checked_pool(channel: KVChannel, model: Model) -> PagePool:
    """Return the pool of a channel. Raise ConfigError unless an engine of this model may use both."""
    pool = channel.pool
    if channel.is_closed:
        raise ConfigError(f"{channel} is closed: make a new channel, over a new transport")
    if channel.engine is not None:
        raise ConfigError(f"{channel} has an engine already, which gets its pages and its news: make a new channel")
    if not isinstance(pool, PagePool):
        raise ConfigError(f"{channel} has pages of another engine; give this one a channel with a PagePool")
    if pool.layout.model_id != model.config.fingerprint:
        raise ConfigError(f"{channel} has pages of another model than {model}: make a pool for this one")
    return pool


def _check_unused(role: str, num_unfinished: int, *, closed: bool) -> None:
    """Raise what `warm_up` does for an engine that it would disturb."""
    if closed:
        raise RequestError(f"the {role} engine is closed: it cannot be warmed up")
    if num_unfinished:
        raise Overloaded(
            f"the {role} engine has {num_unfinished} unfinished requests: warm up before the first one, or drain it"
        )


def _limits(role: str, model: Model, pool: PagePool, num_withheld: int, processors: Iterable[str]) -> RequestLimits:
    """Return what a request may ask of an engine."""
    num_held = (pool.num_pages - num_withheld) * pool.layout.page_size
    return RequestLimits(
        name=role,
        vocab_size=model.config.vocab_size,
        max_tokens=min(model.config.max_position_embeddings, num_held),
        logits_processors=tuple(sorted(processors)),
    )


def _shared_limits(role: str, config: EngineConfig, model: Model, pool: PagePool) -> dict[str, object]:
    """Return what must be the same on all ranks for their steps and pages to fit together."""
    return {
        **attrs.asdict(config, filter=lambda field, _: field.name not in ("trace", "num_threads")),
        "role": role,
        "num_pages": pool.num_pages,
        "page_size": pool.layout.page_size,
        "layout_id": pool.layout.layout_id.hex(),
        "mtp": model.mtp is not None,
    }


def brief_fields(
    address: PeerAddress, pool: PagePool, tables: PageTables | PromptTables, costs: StepCosts
) -> dict[str, Any]:
    """Return the fields of EngineLoad that policies need, which take little time."""
    return {
        "address": address,
        "num_free_pages": pool.num_free,
        "num_cached_pages": pool.num_cached,
        "num_total_pages": pool.num_pages,
        "page_size": pool.layout.page_size,
        "token_bytes": pool.layout.token_bytes,
        "num_tokens": costs.num_tokens,
        "busy_s": costs.busy_s,
        "prefix_query_tokens": tables.num_looked_up,
        "prefix_hit_tokens": tables.num_found,
    }


def full_fields(model: Model, channel: KVChannel, rebalancing: Rebalancing) -> dict[str, Any]:
    """Return the other fields of EngineLoad."""
    return {
        "placement_epoch": rebalancing.epoch,
        "is_placement_staged": rebalancing.is_staged,
        "placement_error": rebalancing.error and escaped(rebalancing.error),
        "transport": channel.transport.name,
        "providers": tuple((choice.op, choice.provider) for choice in model.resolved.choices),
        "kv": channel.stats,
    }
