"""Start reading here: a Pairing takes requests, has a prefill and a decode serve each, and returns their events.

    submit ─► inbox ─► Broker: queue, choice, ports ─► TokenEvent ─► step

It holds no tensor and computes nothing. Its ports are engines in this process, or clients of engines in other processes
(`pdinfer.remote`). There may be any number of each, and they may join and leave while it runs. This file is what a host
calls; `pdinfer.pairing.broker` decides what happens to each request."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from pdinfer.checks import typed
from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.execution.sampling import LogitsProcessorFactory
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.model.load import Device, DType, load_model
from pdinfer.model.model import Model
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.following import Followed, Following, PortDirectory, in_a_thread
from pdinfer.pairing.generating import generated
from pdinfer.pairing.health import Health, HealthState, health_of
from pdinfer.pairing.intake import Intake, Outbox, Stepping
from pdinfer.pairing.joining import Joining
from pdinfer.pairing.leaving import Leaving, check_drain
from pdinfer.pairing.policy import Policy, traffic_aware
from pdinfer.pairing.port import DecodePort, PrefillPort
from pdinfer.pairing.ports import Ports
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import interruptible, undivided
from pdinfer.progress import Progress
from pdinfer.stats import PairingStats
from pdinfer.types import FinishReason, Request, TokenEvent


class Pairing(OfOneProcess):
    """Pairs any number of prefill ports with any number of decode ports and serves requests over them.

    `submit`, `cancel`, `add` and `close` may be called from any thread; `step`, `generate`, `remove` and `drain` from
    one thread at a time. Every submitted request ends in exactly one event with a `finish_reason`. The constructor
    connects the ports as `add` does and, with a `directory`, begins to follow it. Raises ConfigError when a side is
    empty and there is no directory."""

    @typed
    def __init__(
        self,
        prefill: PrefillPort | Sequence[PrefillPort] = (),
        decode: DecodePort | Sequence[DecodePort] = (),
        *,
        directory: PortDirectory | None = None,
        config: PairingConfig | None = None,
        policy: Policy = traffic_aware,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.config = config or PairingConfig()
        self._clock = clock
        self._random_bytes = random_bytes
        self._ports = Ports()
        self._outbox = Outbox()
        self._broker = Broker(self._ports, self.config, policy, clock, self._outbox.put)
        self._intake = Intake(self._broker, self._ports, self.config, clock, random_bytes)
        self._stepping = Stepping(self._broker, self._intake, self._ports, self._outbox, clock)
        self._joining = Joining(self._ports, self._intake, self._stepping.find_lost, self.config.connect_timeout_s)
        self._followings: list[Following] = []
        self._leaving = Leaving(self._ports, self._broker, self._joining, self._stepping, self._followings)
        for port in prefill if isinstance(prefill, Sequence) else [prefill]:
            self.add(port)
        for other in decode if isinstance(decode, Sequence) else [decode]:
            self.add(other)
        if directory is not None:
            self.follow(directory)
        elif not all(self._ports.most_tokens.values()):
            raise ConfigError("a Pairing needs a prefill port and a decode port at least, or a directory of them")

    def __repr__(self) -> str:
        prefills, decodes = len(self._ports.prefills), len(self._ports.decodes)
        closed = ", closed" if self._intake.closed else ""
        return f"Pairing({prefills} prefill, {decodes} decode, {self.num_unfinished} unfinished requests{closed})"

    @classmethod
    @typed
    def local(
        cls,
        checkpoint_or_model: str | os.PathLike[str] | Model,
        *,
        device: Device = "cpu",
        dtype: DType | None = None,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        config: PairingConfig | None = None,
        policy: Policy = traffic_aware,
        logits_processors: Mapping[str, LogitsProcessorFactory] | None = None,
        trusted_roots: Sequence[str | os.PathLike[str]] = (),
        progress: Progress = None,
    ) -> Pairing:
        """Make a prefill and a decode in this process, with one model and one pool. Pages change hands without a
        copy. `trusted_roots` and `progress` are as for `load_model`."""
        model = checkpoint_or_model
        if not isinstance(model, Model):
            model = load_model(
                model,
                device=device,
                dtype=dtype,
                mtp=engine is not None and engine.num_draft_tokens > 0,
                cache=cache or CacheConfig(),
                trusted_roots=trusted_roots,
                progress=progress,
            )
        pool = PagePool(model, cache)
        prefill_end, decode_end = KVChannel.loopback(pool, pool)
        prefill = PrefillEngine(model, prefill_end, engine, logits_processors=logits_processors)
        decode = DecodeEngine(model, decode_end, engine, logits_processors=logits_processors)
        return cls(prefill, decode, config=config, policy=policy)

    @property
    def max_tokens(self) -> int:
        """How many tokens prompt and output may have so that every port can serve them: what the model and the smallest
        pool hold, 0 while there is no port of one role. Any thread may read it."""
        return self._ports.fits_all

    @property
    def num_unfinished(self) -> int:
        """How many submitted requests have no final event yet."""
        return self._intake.num_unfinished

    @property
    def ports(self) -> tuple[PrefillPort | DecodePort, ...]:
        """The ports in use now, decodes first."""
        return (*self._ports.decodes.values(), *self._ports.prefills.values())

    @property
    def stats(self) -> PairingStats:
        """A snapshot of counts, for a dashboard."""
        return self._broker.stats

    def health(self) -> Health:
        """Return whether it serves, and with all that it was given. Never blocks; any thread may call it."""
        if self._intake.closed:
            return Health(HealthState.DOWN, ("the pairing is closed",))
        return health_of(self.ports, self.stats)

    # -- requests ---------------------------------------------------------------------------------------------------

    @typed
    @interruptible
    def submit(self, request: Request) -> str:
        """Take a request and return its id. An id and a seed are made up where it has none. Never blocks.

        Raises RequestError for a request that can never be served, and Overloaded when the queue is full or so long
        that the request's deadline would probably pass before its turn, or when the request would probably miss
        `PairingConfig.slo`. Nothing was taken then. In a full queue the request takes the place of the youngest one of
        the lowest priority below its own, which ends FAILED with Overloaded."""
        return self._intake.submit(request)

    @typed
    @undivided
    def cancel(self, request_id: str) -> None:
        """End a request with CANCELLED at a coming step. Unknown or finished ids are ignored."""
        self._intake.cancel(request_id)

    @typed
    def generate(self, requests: Request | Iterable[Request]) -> Iterator[TokenEvent]:
        """Serve one request or several, and yield their events as they come. Pulls lazily, and waits where `submit`
        would raise Overloaded. A bad request yields its FAILED event and the others go on. Closing the iterator cancels
        what it submitted. Events of other requests stay for `step`; a `step` that the host calls before the iterator
        has ended takes the iterator's events, too, and then it does not yield them. Raises ConfigError for what is no
        request, which ends the iterator."""
        source = iter((requests,) if isinstance(requests, Request) else requests)
        return generated(source, self.submit, self._stepping, self._random_bytes)

    def step(self) -> list[TokenEvent]:
        """Send waiting requests on, step every port, and return the events since the last step. Raise ConfigError, and
        change nothing, in a mode of torch that makes tensors without memory. What Ctrl-C or another signal raises waits
        for the end of the step: the next one goes on, and returns the events of this one, too."""
        events: list[TokenEvent] = []
        try:
            with self._stepping.lock:
                self._stepping.advance()
                events, self._outbox.events = self._outbox.events, []
            return events
        except BaseException as error:  # the caller did not get them
            if not isinstance(error, PDInferError):
                self.let_go()
            self._outbox.events = events + self._outbox.events
            raise

    @typed
    @interruptible
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would."""
        if self._outbox.events or self._intake.closed:
            return bool(self._outbox.events)
        return self._stepping.sleep(timeout_s)

    @typed
    @interruptible
    def drain(self, timeout_s: float) -> bool:
        """Step until every request has ended or `timeout_s` is over, and return whether all have ended. The next `step`
        returns the events."""
        end = time.monotonic() + timeout_s
        while self.num_unfinished and time.monotonic() < end:
            self._stepping.advance()
            if self.num_unfinished:
                self._stepping.sleep(min(0.1, max(0.0, end - time.monotonic())))
        return not self.num_unfinished

    @undivided
    def close(self) -> None:
        """End unfinished requests with CANCELLED and close the ports, once a step that is under way has ended. One last
        `step` returns the events. Does not wait for ports in other processes. A second call does nothing."""
        with self._intake.lock:
            if self._intake.closed and not self._stepping.is_unfinished:
                return
            self._intake.closed = self._stepping.is_unfinished = True  # until the ports are closed
        self._intake.inbox.wake()
        for following in self._followings:
            following.close()
        with self._stepping.lock, contextlib.ExitStack() as closing:
            for tracked in list(self._broker.requests.values()):
                self._broker.end(tracked, FinishReason.CANCELLED)
            # a port that cannot be closed does not keep the others open
            for port in [*self._broker.lost_ports.away.values(), *reversed(self._ports.all)]:
                closing.callback(port.close)
        self._stepping.is_unfinished = False

    def let_go(self) -> None:
        """Open the locks that an interrupted call of this thread still holds. Ports open their own."""
        self._stepping.let_go()

    # -- ports ------------------------------------------------------------------------------------------------------

    @typed
    @interruptible
    def add(self, port: PrefillPort | DecodePort) -> None:
        """Connect a port to the ports of the other side and use it. Other threads may step meanwhile; the thread that
        steps goes on stepping, and its events stay for the next `step`. A pair that cannot be connected now is dialled
        again, and is in `stats.links_down` until it is connected.

        Raises TransferError when no port of the other side can be connected or the pairing is closed, LayoutMismatch
        when the layouts of two ports differ, and ConfigError when the port is part of this pairing already. The port
        does not join then."""
        if not self._stepping.is_between:
            self._joining.add(port)
            return
        for _ in self.joining(port):
            self._stepping.advance()
            self._stepping.sleep(0.05)

    @typed
    def joining(self, port: PrefillPort | DecodePort) -> Iterator[float]:
        """Do the same for a host that steps meanwhile, and so gets the events: take an item (the seconds left) between
        steps until there is none, or what `add` raises. A thread connects the port meanwhile. A port does not join when
        its iterator is closed before it has."""
        return self._joining.beside(port)

    @typed
    @interruptible
    def remove(self, port: PrefillPort | DecodePort, *, drain_s: float) -> None:
        """Stop choosing a port, step until its requests have ended or `drain_s` is over, and let it go, still open.
        Requests it still has then move to another port, as if the port were lost. Events stay for the next `step`.
        Raises ConfigError, before anything changes, for a `drain_s` that is negative or no number of seconds."""
        self._stepping.carry_out(self.removal(port, drain_s=drain_s))

    @typed
    def removal(self, port: PrefillPort | DecodePort, *, drain_s: float) -> Generator[float, None, None]:
        """Do the same for a host that steps meanwhile, and so gets the events: take an item (the seconds left) between
        steps until there is none. A removal that is closed before leaves the port in use."""
        return self._leaving.removal(port, drain_s=drain_s)

    @typed
    @interruptible
    def switch(
        self, port: PrefillPort | DecodePort, role: str, *, drain_s: float, leaves_none: bool = False
    ) -> PrefillPort | DecodePort:
        """Let a port serve the other role ("prefill" or "decode"), and return the port that it has become. It leaves as
        in `remove`, becomes an engine of that role over the same model and cached pages, with its `other_config`, and
        joins as in `add`. With one of several leaders (`dp_size` above 1) all do so together, and all must be ports of
        this pairing. Events stay for the next `step`.

        Raises ConfigError, before anything changes, for a `drain_s` as in `remove`, for a port that is not here, has
        that role or cannot take it; for the last one of its role, and one that holds a request which no other port can
        hold, unless `leaves_none`: then what needs the old role waits for `PairingConfig.port_wait_s`. Raises
        TransferError when the port is lost meanwhile, and what `add` raises when it cannot join; it is then out of the
        pairing, and the host's to close."""
        switching = self.switching(port, role, drain_s=drain_s, leaves_none=leaves_none)
        return self._stepping.carry_out(switching)

    @typed
    def switching(
        self, port: PrefillPort | DecodePort, role: str, *, drain_s: float, leaves_none: bool = False
    ) -> Generator[float, None, PrefillPort | DecodePort]:
        """Do the same for a host that steps meanwhile, as `removal` does; it returns the new port. Closed while it
        drains, it leaves the port in use."""
        return self._leaving.switching(port, role, drain_s=drain_s, leaves_none=leaves_none)

    @typed
    @interruptible
    def follow(self, directory: PortDirectory, *, drain_s: float = 30.0) -> None:
        """From now on have every engine that the directory names, until the pairing is closed. A thread reads the
        directory, and others dial, so no step waits for either. An entry that cannot be dialled is tried ever more
        rarely.

        A port leaves when its engine is lost, as any does, or has asked to be let go of: then as by `remove`, within
        the steps of the host. That an entry is gone removes nothing. A request waits for ports of a role of which there
        is none yet as for ports that were lost (`PairingConfig.port_wait_s`, by default a minute). Raises TransferError
        when the pairing is closed, and ConfigError for a `drain_s` as in `remove`."""
        check_drain(drain_s)
        followed = Followed(self.add, self.removal, self._leaving.has, self._intake.inbox.wake)
        following = Following(directory, followed, drain_s, self._clock, in_a_thread)
        with self._intake.lock:
            if self._intake.closed:
                raise TransferError("the pairing is closed: make another one to follow the directory")
            self._followings.append(following)
        following.start()
        self._broker.lost_ports.expect_ports()
        self._stepping.before.append(following.act)
