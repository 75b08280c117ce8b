"""Start reading here: a Pairing takes requests, has a prefill and a decode serve each, and returns what they say.

    submit ─► inbox ─► Broker: queue, choice, ports ─► TokenEvent ─► step

It holds no tensor and computes nothing. Its ports are engines in this process, or clients of engines elsewhere
(`pdinfer.remote`); any number of each, joining and leaving while it runs. This file is what a host calls; what becomes
of a request is decided in `pdinfer.pairing.broker`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.engine.admission import check_request
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RequestError, TransferError
from pdinfer.execution.sampling import LogitsProcessorFactory
from pdinfer.inbox import Inbox
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.model.load import Device, DType, load_model
from pdinfer.model.model import Model
from pdinfer.pairing.admission import Admission
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.joining import link
from pdinfer.pairing.policy import Policy, least_tokens
from pdinfer.pairing.ports import DecodePort, Port, Ports, PrefillPort
from pdinfer.pairing.tracked_request import TrackedRequest, Wish, refusal
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import interruptible, let_go, open_lock
from pdinfer.stats import PairingStats
from pdinfer.types import FinishReason, PeerAddress, Request, TokenEvent

_log = logging.getLogger("pdinfer")


class Pairing(OfOneProcess):
    """Pairs any number of prefill ports with any number of decode ports and serves requests over them.

    `submit`, `cancel`, `add` and `close` may be called from any thread; `step`, `generate`, `remove` and `drain` from
    one at a time. Every submitted request ends in exactly one event with a `finish_reason`. Connects its ports when
    made, as `add` does; ConfigError when a side is empty.
    """

    ends = frozenset({"close", "_forget"})  # the latter ends a `generate` that a child drops

    def __init__(
        self,
        prefill: PrefillPort | Sequence[PrefillPort],
        decode: DecodePort | Sequence[DecodePort],
        *,
        config: PairingConfig | None = None,
        policy: Policy = least_tokens,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.config = config or PairingConfig()
        self._clock = clock
        self._random_bytes = random_bytes
        self._ports = Ports()
        self._admitting = threading.RLock()  # held for a moment only: `step` needs it too
        self._joining: dict[PeerAddress, object] = {}
        self._inbox: Inbox[tuple[TrackedRequest, Wish]] = Inbox()
        self._broker = Broker(self._ports, self.config, policy, clock, self._emit)
        self._admission = Admission(self._broker, self._ports, self._inbox, self._admitting, self.config)
        self._stepping = threading.RLock()
        self._undelivered: list[TokenEvent] = []
        self._unread_ids: set[str] = set()
        self._unfinished_call = False
        self._closed = False
        for port in prefill if isinstance(prefill, Sequence) else [prefill]:
            self.add(port)
        for other in decode if isinstance(decode, Sequence) else [decode]:
            self.add(other)
        if not all(self._ports.most_tokens.values()):
            raise ConfigError("a Pairing needs at least one prefill port and one decode port")

    @classmethod
    def local(
        cls,
        checkpoint_or_model: str | os.PathLike[str] | Model,
        *,
        device: Device = "cpu",
        dtype: DType | None = None,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        config: PairingConfig | None = None,
        policy: Policy = least_tokens,
        logits_processors: Mapping[str, LogitsProcessorFactory] | None = None,
    ) -> Pairing:
        """One process, one model, one pool that both engines share: pages change hands without a copy."""
        model = checkpoint_or_model
        if not isinstance(model, Model):
            mtp = engine is not None and engine.num_draft_tokens > 0
            model = load_model(model, device=device, dtype=dtype, mtp=mtp)
        pool = PagePool(model, cache)
        prefill_end, decode_end = KVChannel.loopback(pool, pool)
        prefill = PrefillEngine(model, prefill_end, engine, logits_processors=logits_processors)
        decode = DecodeEngine(model, decode_end, engine, logits_processors=logits_processors)
        return cls(prefill, decode, config=config, policy=policy)

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and without a final event."""
        return len(self._broker.requests)

    @property
    def ports(self) -> tuple[PrefillPort | DecodePort, ...]:
        """The ports in use now, decodes first."""
        return (*self._ports.decodes.values(), *self._ports.prefills.values())

    @property
    def stats(self) -> PairingStats:
        """A snapshot of counts, for a dashboard."""
        return self._broker.stats

    # -- requests ---------------------------------------------------------------------------------------------------

    @interruptible
    def submit(self, request: Request) -> str:
        """Takes a request and returns its id, made up when it has none, as is a seed. Never blocks.

        Raises RequestError for a request that can never be served, and Overloaded when the queue is full or so long
        that the request's deadline would probably be over before its turn; then nothing was taken. In a full queue it
        takes the place of the youngest request of the lowest priority below its own, which ends FAILED with Overloaded.
        """
        request = check_request(request, self._ports.roomiest_limits())
        tracked = TrackedRequest.of(request, self._clock(), self.config.default_deadline_s, self._random_bytes)
        with self._admitting:  # of two threads with one id, or with the last place in the queue, one gets it
            if self._closed:
                raise RequestError("the pairing is closed")
            if tracked.request_id in self._broker.requests:
                raise RequestError(f"request_id {tracked.request_id!r} is in use by a request that has not ended")
            displaced = self._admission.check(tracked)
            try:
                self._broker.requests[tracked.request_id] = tracked
                if displaced is not None:
                    self._inbox.put((displaced, Wish.DISPLACE))
                self._inbox.put((tracked, Wish.SERVE))
                return tracked.request_id
            except BaseException:  # nobody will know that it was taken
                self._withdraw(tracked, displaced)
                raise

    @interruptible
    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED at a coming step. Unknown or finished ids are ignored."""
        tracked = self._broker.requests.get(request_id)  # now: the id may name another request by the time of the step
        if tracked is not None:
            self._inbox.put((tracked, Wish.CANCEL))

    def generate(self, requests: Iterable[Request]) -> Iterator[TokenEvent]:
        """Serves `requests` and yields their events as they come. Pulls lazily, and waits where `submit` would raise
        Overloaded. A bad request yields its FAILED event and the others go on. Closing the iterator cancels what it
        submitted; events of other requests stay for `step`."""
        mine: set[str] = set()
        source = iter(requests)
        more = True
        pulled: Request | None = None
        try:
            while more or mine:
                while more and self._admission.has_room:
                    pulled = pulled or next(source, None)
                    if pulled is None:
                        more = False
                        break
                    try:
                        mine.add(self.submit(pulled))
                    except Overloaded:
                        break  # the queue was filled meanwhile: by another thread, or by `requests` itself
                    except RequestError as error:
                        yield refusal(pulled, error, self._random_bytes(8).hex())
                    pulled = None
                yield from self._advance_for(mine)
                collected = {event.request_id for event in self._undelivered}  # by another step, while we yielded
                mine &= self._broker.requests.keys() | collected
                if (more or mine) and not mine & collected:
                    self._sleep(1.0)
        except (PDInferError, GeneratorExit):
            raise
        except BaseException:
            self.let_go()
            raise
        finally:
            self._forget(mine)

    @interruptible
    def step(self) -> list[TokenEvent]:
        """Sends waiting requests on, steps every port that runs here, and returns the events since the last step."""
        events: list[TokenEvent] = []
        try:
            with self._stepping:
                self._advance()
                events, self._undelivered = self._undelivered, []
            return events
        except BaseException:  # the caller has not got them
            self._undelivered = events + self._undelivered
            raise

    @interruptible
    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a step would do something, at most `timeout_s`; tells whether it would."""
        if self._undelivered or self._closed:
            return bool(self._undelivered)
        return self._sleep(timeout_s)

    def _sleep(self, timeout_s: float) -> bool:
        """As `wait`, for a host that knows of the events it has not fetched."""
        if self._closed or any(port.wait(0.0) for port in self._ports.all):
            return True
        left_s = self._broker.wakes_at() - self._clock()
        return self._inbox.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    @interruptible
    def drain(self, timeout_s: float) -> bool:
        """Steps until every request has ended or the time is over; the next `step` returns the events."""
        end = time.monotonic() + timeout_s
        while self.num_unfinished and time.monotonic() < end:
            self._advance()
            if self.num_unfinished:
                self._sleep(min(0.1, max(0.0, end - time.monotonic())))
        return not self.num_unfinished

    @interruptible
    def close(self) -> None:
        """Ends unfinished requests with CANCELLED (a last `step` returns the events) and closes the ports, once a step
        that is under way has ended. No port in another process is waited for. A second call does nothing."""
        with self._admitting:
            if self._closed and not self._unfinished_call:
                return
            self._closed = self._unfinished_call = True  # the latter until the ports are closed
        self._inbox.wake()
        with self._stepping, contextlib.ExitStack() as closing:
            for tracked in list(self._broker.requests.values()):
                self._broker.end(tracked, FinishReason.CANCELLED)
            # one that cannot be closed does not keep the others open
            for port in [*self._broker.lost_ports.away.values(), *reversed(self._ports.all)]:
                closing.callback(port.close)
        self._unfinished_call = False

    def let_go(self) -> None:
        """Opens the locks that an interrupted call of this thread holds; what is called from here does so itself."""
        let_go()
        open_lock(self._admitting)
        open_lock(self._stepping)

    # -- ports ------------------------------------------------------------------------------------------------------

    @interruptible
    def add(self, port: PrefillPort | DecodePort) -> None:
        """Connects a port to the ports of the other side and puts it to use. Other threads step meanwhile. A pair that
        cannot be connected now is dialled again, and in `stats.links_down` until it is. TransferError when there are
        others and none can be connected, or the pairing is closed; LayoutMismatch when one has another layout,
        ConfigError when the port says that it is one which is here. Then it does not join."""
        token = object()
        try:
            with self._admitting:
                if port.address in self._joining or port.address in (known.address for known in self._ports.all):
                    raise ConfigError(f"{port.address} is a port of this pairing already; every engine is added once")
                self._joining[port.address] = token
            self._join(port, token)
        finally:
            with self._admitting:
                if self._joining.get(port.address) is token:
                    del self._joining[port.address]
            if self.num_unfinished:
                self._inbox.wake()

    def _join(self, port: PrefillPort | DecodePort, token: object) -> None:
        """Links the port to who is here, then to who has joined meanwhile, until nobody has."""
        met: set[PeerAddress] = set()
        unlinked: dict[PeerAddress, TransferError] = {}
        while True:
            with self._admitting:
                others = self._ports.opposite(port)
                newcomers = [other for other in others if other.address not in met]
                if self._closed or self._joining.get(port.address) is not token:
                    what = "pairing was closed" if self._closed else "port was removed"
                    raise TransferError(f"the {what} while the port was connected; it is open, and yours")
                if not newcomers:
                    if others and all(other.address in unlinked for other in others):
                        raise unlinked[others[0].address]
                    port.notify(self._inbox.wake)
                    self._ports.add(port, unlinked)
                    return
            met.update(other.address for other in newcomers)
            unlinked |= link(port, newcomers, timeout_s=self.config.connect_timeout_s)
            self._find_lost([other for other in newcomers if other.address in unlinked])

    def _find_lost(self, others: Iterable[Port]) -> None:
        """A known port that turns out to be lost is no reason to refuse a new one. Who steps finds it out; if nobody
        does now, this thread does."""
        if self._stepping.acquire(blocking=False):
            try:
                for other in others:
                    if other in self._ports.all:
                        self._change(partial(self._broker.step_port, other.address, other))
            finally:
                self._stepping.release()

    @interruptible
    def remove(self, port: PrefillPort | DecodePort, *, drain_s: float) -> None:
        """Chooses the port no more, steps until its requests have ended or `drain_s` is over, and lets it go, open.
        What it still has then goes to another one, as if the port were lost. Events stay for the next `step`."""
        address = port.address
        self._broker.lost_ports.away.pop(address, None)
        with self._admitting:
            self._joining.pop(address, None)  # whoever adds it now is told
        self._ports.leaving.add(address)
        end = time.monotonic() + drain_s
        try:
            while self._broker.assigned(address) and time.monotonic() < end:
                self._advance()
                self._sleep(min(0.05, max(0.0, end - time.monotonic())))
            with self._stepping:
                self._change(partial(self._part_with, port))
                self._advance()
                # so that it answers those who took its rooms away
                self._change(partial(self._broker.step_port, address, port))
        finally:  # one that is still here, since this was interrupted, stays
            self._ports.leaving.discard(address)

    def _part_with(self, port: Port) -> None:
        self._broker.take_back(port.address, port)
        self._broker.part_with(port.address, TransferError("its port was removed from the pairing"))
        self._broker.step_port(port.address, port)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        with self._stepping:
            if not self._closed:
                self._change(self._go_on)

    def _go_on(self) -> None:
        self._admission.act()
        self._broker.advance()

    def _change(self, change: Callable[[], None]) -> None:
        """Does what may not stay half done, in a thread that has `_stepping`. After an interrupt the next change makes
        everything anew first."""
        if self._closed:
            change()
            return
        if self._unfinished_call:
            let_go()
            with self._admitting:
                self._admission.take()
                self._broker.recover(self._undelivered)
        self._unfinished_call = True  # until this one has ended
        try:
            change()
        except MemoryError:
            raise
        except Exception:  # of a policy: nothing is half done
            self._unfinished_call = False
            raise
        self._unfinished_call = False

    def _advance_for(self, mine: set[str]) -> list[TokenEvent]:
        """The events of `mine`; all others wait for `step`."""
        with self._stepping:
            self._advance()
            events = self._undelivered
            self._undelivered = [event for event in events if event.request_id not in mine]
        return [event for event in events if event.request_id in mine]

    def _withdraw(self, tracked: TrackedRequest, displaced: TrackedRequest | None) -> None:
        """Takes back a request whose `submit` was interrupted. Who was to give way for it does so."""
        self._broker.requests.pop(tracked.request_id, None)
        if displaced is not None:
            self._inbox.put((displaced, Wish.DISPLACE))

    def _emit(self, event: TokenEvent) -> None:
        """Keeps an event for the host, unless nobody will ask for it."""
        if event.request_id not in self._unread_ids:
            self._undelivered.append(event)
        elif event.finish_reason is not None:
            self._unread_ids.discard(event.request_id)

    def _forget(self, request_ids: set[str]) -> None:
        """Cancels requests whose events nobody will read, and makes the cancellation happen."""
        with self._stepping:
            self._undelivered = [event for event in self._undelivered if event.request_id not in request_ids]
        unfinished = [request_id for request_id in request_ids if request_id in self._broker.requests]
        self._unread_ids.update(unfinished)
        for request_id in unfinished:
            self.cancel(request_id)
        if unfinished:
            self._advance()
