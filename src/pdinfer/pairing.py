"""Start reading here: a Pairing takes requests, has a prefill and a decode serve each, and returns what they say.

    submit ─► inbox ─► Broker: line, choice, ports ─► TokenEvent ─► step

It holds no tensor and computes nothing. Its ports are engines in this process, or clients of engines elsewhere
(`pdinfer.remote`); any number of each, joining and leaving while it runs. This file is what a host calls; what becomes
of a request is decided in `pdinfer.broker`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from pdinfer.broker import Broker
from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.decode import DecodeEngine
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RequestError, TransferError
from pdinfer.forked import OfOneProcess
from pdinfer.inbox import Inbox
from pdinfer.kv.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.locks import let_go, open_lock
from pdinfer.model import Model
from pdinfer.policy import Policy, least_tokens
from pdinfer.ports import DecodePort, Port, PrefillPort, Roster, addresses_of
from pdinfer.prefill import PrefillEngine
from pdinfer.sampling import LogitsProcessorFactory
from pdinfer.schedule import check_request
from pdinfer.ticket import Ticket, refusal
from pdinfer.types import FinishReason, PairingStats, PeerAddress, PrefillLoad, Request, TokenEvent
from pdinfer.weights import Device, DType, load_model

_log = logging.getLogger("pdinfer")


Args = ParamSpec("Args")
Result = TypeVar("Result")
Method = Callable[Concatenate["Pairing", Args], Result]


def _interruptible(method: Method[Args, Result]) -> Method[Args, Result]:
    """A method that leaves no lock closed, wherever Ctrl-C hits it. What it leaves half done, the next step finds."""

    @functools.wraps(method)
    def call(pairing: Pairing, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            return method(pairing, *args, **kwargs)
        except PDInferError:
            raise
        except BaseException:
            pairing._let_go()  # noqa: SLF001
            raise

    return call


class Pairing(OfOneProcess):
    """Pairs any number of prefill ports with any number of decode ports and serves requests over them.

    `submit`, `cancel` and `close` may be called from any thread; `step`, `generate`, `add`, `remove` and `drain` from
    one at a time. Every submitted request ends in exactly one event with a `finish_reason`. Connects every pair when
    made: LayoutMismatch or TransferError when one cannot be, ConfigError when a side is empty.
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
        self._roster = Roster()
        self._admission = threading.RLock()
        self._inbox: Inbox[tuple[Ticket, bool]] = Inbox()  # and whether it is wanted, or not any more
        self._broker = Broker(self._roster, self.config, policy, clock, self._emit)
        self._stepping = threading.RLock()
        self._undelivered: list[TokenEvent] = []
        self._muted: set[str] = set()
        self._unfinished_call = False
        self._closed = False
        for port in prefill if isinstance(prefill, Sequence) else [prefill]:
            self.add(port)
        for other in decode if isinstance(decode, Sequence) else [decode]:
            self.add(other)
        if not all(self._roster.most_tokens.values()):
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
        return len(self._broker.tickets)

    @property
    def stats(self) -> PairingStats:
        """A snapshot of counts, for a dashboard."""
        return self._broker.stats

    # -- requests ---------------------------------------------------------------------------------------------------

    @_interruptible
    def submit(self, request: Request) -> str:
        """Takes a request and returns its id, made up when it has none, as is a seed. Never blocks.

        Raises RequestError for a request that can never be served, and Overloaded when the line is full or so long that
        the request's deadline would probably be over before its turn; then nothing was taken.
        """
        check_request(request, self._roster.roomiest_limits())
        ticket = Ticket.of(request, self._clock(), self.config.default_deadline_s, self._random_bytes)
        with self._admission:  # of two threads with one id, or with the last place in the line, one gets it
            if self._closed:
                raise RequestError("the pairing is closed")
            if ticket.request_id in self._broker.tickets:
                raise RequestError(f"request_id {ticket.request_id!r} is in use by a request that has not ended")
            self._check_line(ticket)
            try:
                self._broker.tickets[ticket.request_id] = ticket
                self._inbox.put((ticket, True))
                return ticket.request_id
            except BaseException:  # nobody will know that it was taken
                self._withdraw(ticket)
                raise

    @_interruptible
    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED at a coming step. Unknown or finished ids are ignored."""
        ticket = self._broker.tickets.get(request_id)  # now: the id may name another request by the time of the step
        if ticket is not None:
            self._inbox.put((ticket, False))

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
                while more and self._line_has_room():
                    pulled = pulled or next(source, None)
                    if pulled is None:
                        more = False
                        break
                    try:
                        mine.add(self.submit(pulled))
                    except Overloaded:
                        break  # the line was filled meanwhile: by another thread, or by `requests` itself
                    except RequestError as error:
                        yield refusal(pulled, error, self._random_bytes(8).hex())
                    pulled = None
                yield from self._advance_for(mine)
                collected = {event.request_id for event in self._undelivered}  # by another step, while we yielded
                mine &= self._broker.tickets.keys() | collected
                if (more or mine) and not mine & collected:
                    self._sleep(1.0)
        except (PDInferError, GeneratorExit):
            raise
        except BaseException:
            self._let_go()
            raise
        finally:
            self._forget(mine)

    @_interruptible
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

    @_interruptible
    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a step would do something, at most `timeout_s`; tells whether it would."""
        if self._undelivered or self._closed:
            return bool(self._undelivered)
        return self._sleep(timeout_s)

    def _sleep(self, timeout_s: float) -> bool:
        """As `wait`, for a host that knows of the events it has not fetched."""
        if self._closed or any(port.wait(0.0) for port in self._roster.all):
            return True
        left_s = self._broker.wakes_at() - self._clock()
        return self._inbox.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    @_interruptible
    def drain(self, timeout_s: float) -> bool:
        """Steps until every request has ended or the time is over; the next `step` returns the events."""
        end = time.monotonic() + timeout_s
        while self.num_unfinished and time.monotonic() < end:
            self._advance()
            if self.num_unfinished:
                self._sleep(min(0.1, max(0.0, end - time.monotonic())))
        return not self.num_unfinished

    @_interruptible
    def close(self) -> None:
        """Ends unfinished requests with CANCELLED (a last `step` returns the events) and closes the ports, once a step
        that is under way has ended. No port in another process is waited for. A second call does nothing."""
        with self._admission:
            if self._closed and not self._unfinished_call:
                return
            self._closed = self._unfinished_call = True  # the latter until the ports are closed
        self._inbox.wake()
        with self._stepping, contextlib.ExitStack() as ports:
            for ticket in list(self._broker.tickets.values()):
                self._broker.end(ticket, FinishReason.CANCELLED)
            for port in reversed(self._roster.all):  # one that cannot be closed does not keep the others open
                ports.callback(port.close)
        self._unfinished_call = False

    def _let_go(self) -> None:
        """Opens the locks that an interrupted call of this thread holds."""
        let_go()
        open_lock(self._admission)
        open_lock(self._stepping)

    # -- ports ------------------------------------------------------------------------------------------------------

    def add(self, port: PrefillPort | DecodePort) -> None:
        """Connects a port to every port of the other side and puts it to use. LayoutMismatch or TransferError when a
        pair cannot be connected, ConfigError when it says that it is one which is here; then it does not join."""
        if port.address in (known.address for known in self._roster.all):
            raise ConfigError(f"{port.address} is a port of this pairing already; every engine is added once")
        if isinstance(port.load(), PrefillLoad):
            for address, decode in list(self._roster.decodes.items()):
                self._connect(port, decode, address, decode)
        else:
            for address, prefill in list(self._roster.prefills.items()):
                self._connect(prefill, port, address, prefill)
        with self._stepping:
            if self._closed:
                raise TransferError("the pairing was closed while the port was connected; it is open, and yours")
            self._roster.add(port)
        port.notify(self._inbox.wake)
        if self.num_unfinished:
            self._inbox.wake()

    def _connect(self, prefill: Port, decode: Port, address: PeerAddress, known: Port) -> None:
        """A known port that turns out to be lost is no reason to refuse a new one."""
        try:
            for rank in addresses_of(decode):
                prefill.connect(rank, timeout_s=self.config.connect_timeout_s)
        except TransferError:
            with self._stepping:
                self._broker.step_port(address, known)
                if known in self._roster.all:
                    raise

    @_interruptible
    def remove(self, port: PrefillPort | DecodePort, *, drain_s: float) -> None:
        """Chooses the port no more, steps until its requests have ended or `drain_s` is over, and lets it go, open.
        Requests of a prefill then go to another one, those of a decode end FAILED. Events stay for the next `step`."""
        address = port.address
        self._roster.leaving.add(address)
        end = time.monotonic() + drain_s
        while self._broker.assigned(address) and time.monotonic() < end:
            self._advance()
            self._sleep(min(0.05, max(0.0, end - time.monotonic())))
        with self._stepping:
            left = self._broker.assigned(address) if address in self._roster.decodes else []
            self._broker.part_with(address, TransferError("its port was removed from the pairing"))
            for ticket in left:
                port.cancel(ticket.request_id)
            self._broker.step_port(address, port)
            self._advance()
            self._broker.step_port(address, port)  # so that it answers those who took its rooms away

    # -- inside -----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        with self._stepping:
            if self._closed:
                return
            if self._unfinished_call:
                let_go()
                unseen = [ticket for ticket, wanted in self._inbox.peek() if wanted]
                self._broker.recover(unseen, self._undelivered)
            self._unfinished_call = True  # until this one has ended
            try:
                self._take_inbox()
                self._broker.advance()
            except MemoryError:
                raise
            except Exception:  # of a policy: nothing is half done
                self._unfinished_call = False
                raise
            self._unfinished_call = False

    def _advance_for(self, mine: set[str]) -> list[TokenEvent]:
        """The events of `mine`; all others wait for `step`."""
        events = self.step()
        self._undelivered += [event for event in events if event.request_id not in mine]
        return [event for event in events if event.request_id in mine]

    def _take_inbox(self) -> None:
        with self._admission:
            items = self._inbox.take()
            came = [ticket for ticket, wanted in items if wanted]
            self._broker.line += [each for each in came if self._broker.tickets.get(each.request_id) is each]
        for ticket, wanted in items:
            if not wanted:
                self._broker.cancel(ticket)

    def _withdraw(self, ticket: Ticket) -> None:
        """Takes back a request whose `submit` was interrupted."""
        if ticket.decode is None and ticket not in self._broker.line:
            self._broker.tickets.pop(ticket.request_id, None)
        else:  # another thread has sent it on
            self._muted.add(ticket.request_id)
            self._inbox.put((ticket, False))

    def _line_has_room(self) -> bool:
        unseen = sum(wanted for _, wanted in self._inbox.peek())
        return len(self._broker.line) + unseen < self.config.max_queued_requests

    def _check_line(self, ticket: Ticket) -> None:
        """Overloaded when there is no place for it, or none that it would live to leave."""
        if not self._line_has_room():
            waits_s = self._broker.queueing_s()
            raise Overloaded(
                f"the line already holds {self.config.max_queued_requests} requests",
                retry_after_s=None if waits_s is None else waits_s / 2,  # the line is half empty then
            )
        if ticket.deadline_at is None:
            return
        waits_s = self._broker.queueing_s(ticket.request.priority)
        left_s = ticket.deadline_at - ticket.submitted_at
        if waits_s is not None and waits_s > left_s:
            raise Overloaded(
                f"the request would wait about {waits_s:.2g} s for its turn and its deadline is {left_s:.2g} s",
                retry_after_s=waits_s - left_s,
            )

    def _emit(self, event: TokenEvent) -> None:
        """Keeps an event for the host, unless nobody will ask for it."""
        if event.request_id not in self._muted:
            self._undelivered.append(event)
        elif event.finish_reason is not None:
            self._muted.discard(event.request_id)

    def _forget(self, request_ids: set[str]) -> None:
        """Cancels requests whose events nobody will read, and makes the cancellation happen."""
        with self._stepping:
            self._undelivered = [event for event in self._undelivered if event.request_id not in request_ids]
        unfinished = [request_id for request_id in request_ids if request_id in self._broker.tickets]
        self._muted.update(unfinished)
        for request_id in unfinished:
            self.cancel(request_id)
        if unfinished:
            self._advance()
