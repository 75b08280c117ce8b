"""Start reading here: a Pairing takes requests, chooses a prefill and a decode for each, and carries what they say.

    submit ─► line ─► policy ─► decode.submit ─► Granted ─► prefill.submit ─► (the channel) ─► TokenEvent ─► step

It holds no tensor and computes nothing. Its ports are engines in this process, or clients of engines elsewhere
(`pdinfer.remote`); any number of each, joining and leaving while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.decode import DecodeEngine
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RequestError, TransferError
from pdinfer.inbox import Inbox
from pdinfer.kv.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.model import Model
from pdinfer.policy import Policy, least_tokens
from pdinfer.ports import DecodePort, Port, PrefillPort, Promised, Roster
from pdinfer.prefill import PrefillEngine
from pdinfer.schedule import check_request
from pdinfer.ticket import Ticket, refusal
from pdinfer.types import Event, FinishReason, Granted, PeerAddress, Refused, Request, TokenEvent
from pdinfer.weights import Device, DType, load_model

_log = logging.getLogger("pdinfer")


class Pairing:
    """Pairs any number of prefill ports with any number of decode ports and serves requests over them.

    `submit` and `cancel` may be called from any thread; `step`, `generate`, `add`, `remove`, `drain` and `close` from
    one at a time. Every submitted request ends in exactly one event with a `finish_reason`. Connects every pair when
    made: LayoutMismatch or TransferError when one cannot be, ConfigError when a side is empty.
    """

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
        self._policy = policy
        self._clock = clock
        self._random_bytes = random_bytes
        self._roster = Roster()
        self._admission = threading.Lock()
        self._inbox: Inbox[tuple[Ticket, bool]] = Inbox()  # and whether it is wanted, or not any more
        self._tickets: dict[str, Ticket] = {}
        self._line: deque[Ticket] = deque()
        self._undelivered: list[TokenEvent] = []
        self._muted: set[str] = set()
        self._num_choices = 0
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
    ) -> Pairing:
        """One process, one model, one pool that both engines share: pages change hands without a copy."""
        given = checkpoint_or_model
        model = given if isinstance(given, Model) else load_model(given, device=device, dtype=dtype)
        pool = PagePool(model, cache)
        prefill_end, decode_end = KVChannel.loopback(pool, pool)
        prefill, decode = PrefillEngine(model, prefill_end, engine), DecodeEngine(model, decode_end, engine)
        return cls(prefill, decode, config=config, policy=policy)

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and without a final event."""
        return len(self._tickets)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> str:
        """Takes a request and returns its id, made up when it has none, as is a seed. Never blocks.

        Raises RequestError for a request that can never be served and Overloaded when the line is full; then nothing
        was taken.
        """
        check_request(request, self._roster.roomiest_limits())
        ticket = Ticket.of(request, self._clock(), self.config.default_deadline_s, self._random_bytes)
        with self._admission:  # of two threads with one id, or with the last place in the line, one gets it
            if self._closed:
                raise RequestError("the pairing is closed")
            if ticket.request_id in self._tickets:
                raise RequestError(f"request_id {ticket.request_id!r} is in use by a request that has not ended")
            if not self._line_has_room():
                raise Overloaded(f"the line already holds {self.config.max_queued_requests} requests")
            self._tickets[ticket.request_id] = ticket
            self._inbox.put((ticket, True))
        return ticket.request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED at a coming step. Unknown or finished ids are ignored."""
        ticket = self._tickets.get(request_id)  # now: the id may name another request by the time of the step
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
                mine &= self._tickets.keys() | collected
                if (more or mine) and not mine & collected:
                    self._sleep(1.0)
        finally:
            self._forget(mine)

    def step(self) -> list[TokenEvent]:
        """Sends waiting requests on, steps every port that runs here, and returns the events since the last step."""
        if not self._closed:
            self._advance()
        events, self._undelivered = self._undelivered, []
        return events

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a step would do something, at most `timeout_s`; tells whether it would."""
        if self._undelivered or self._closed:
            return bool(self._undelivered)
        return self._sleep(timeout_s)

    def _sleep(self, timeout_s: float) -> bool:
        """As `wait`, for a host that knows of the events it has not fetched."""
        if self._closed or any(port.wait(0.0) for port in self._roster.all):
            return True
        now = self._clock()
        ends = [end for ticket in list(self._tickets.values()) if (end := ticket.wakes_at(now)) is not None]
        left_s = min(ends, default=float("inf")) - now
        return self._inbox.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    def drain(self, timeout_s: float) -> bool:
        """Steps until every request has ended or the time is over; the next `step` returns the events."""
        end = time.monotonic() + timeout_s
        while self._tickets and time.monotonic() < end:
            self._advance()
            if self._tickets:
                self._sleep(min(0.1, max(0.0, end - time.monotonic())))
        return not self._tickets

    def close(self) -> None:
        """Ends unfinished requests with CANCELLED (a last `step` returns the events) and closes the ports. A second
        call does nothing."""
        with self._admission:
            if self._closed:
                return
            self._closed = True
        for ticket in list(self._tickets.values()):
            self._end(ticket, FinishReason.CANCELLED)
        self._inbox.wake()
        with contextlib.ExitStack() as ports:  # one that cannot be closed does not keep the others open
            for port in reversed(self._roster.all):
                ports.callback(port.close)

    def __enter__(self) -> Pairing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- ports ------------------------------------------------------------------------------------------------------

    def add(self, port: PrefillPort | DecodePort) -> None:
        """Connects a port to every port of the other side and puts it to use. LayoutMismatch or TransferError when a
        pair cannot be connected; then it does not join."""
        self._roster.add(port, timeout_s=self.config.connect_timeout_s)
        port.notify(self._inbox.wake)

    def remove(self, port: PrefillPort | DecodePort, *, drain_s: float) -> None:
        """Chooses the port no more, steps until its requests have ended or `drain_s` is over, and lets it go, open.
        Requests of a prefill then go to another one, those of a decode end FAILED. Events stay for the next `step`."""
        address = port.address
        self._roster.leaving.add(address)
        end = time.monotonic() + drain_s
        while self._assigned(address) and time.monotonic() < end:
            self._advance()
            self._sleep(min(0.05, max(0.0, end - time.monotonic())))
        if address in self._roster.decodes:
            for ticket in self._assigned(address):
                port.cancel(ticket.request_id)
            self._stepped(address, port)
        self._part_with(address, TransferError("its port was removed from the pairing"))
        self._advance()
        self._stepped(address, port)  # once more, so that it answers those who took its rooms away

    def _assigned(self, address: PeerAddress) -> list[Ticket]:
        """Unfinished requests that still need this port."""
        return [ticket for ticket in list(self._tickets.values()) if ticket.needs(address)]

    def _lose(self, address: PeerAddress, error: Exception) -> None:
        """A port failed: its process is gone or it broke. Closing it is what proves to the others that it stopped."""
        _log.error("a port was lost: %s", error)
        port = self._roster.prefills.get(address) or self._roster.decodes.get(address)
        if port is not None:
            try:
                port.close()
            except Exception:  # noqa: BLE001 - it is broken already
                _log.exception("closing the lost port failed")
        self._part_with(address, error)

    def _part_with(self, address: PeerAddress, error: Exception) -> None:
        self._roster.drop(address)
        for ticket in list(self._tickets.values()):
            if ticket.decode == address:
                self._end(ticket, FinishReason.FAILED, TransferError(f"its decode is gone: {error}"))
            elif ticket.prefill == address and ticket.decode is not None:
                self._reroute(ticket)  # a running one too: it will need a prefill if it is retracted

    # -- one step ---------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._take_inbox()
        self._dispatch()
        for address, decode in list(self._roster.decodes.items()):
            for event in self._stepped(address, decode):
                self._handle(event, address)
        for address, prefill in list(self._roster.prefills.items()):
            self._stepped(address, prefill)

    def _stepped(self, address: PeerAddress, port: Port) -> list[Event]:
        try:
            return port.step()
        except Exception as error:  # noqa: BLE001 - a port that raises is lost, the others go on
            self._lose(address, error)
            return []

    def _advance_for(self, mine: set[str]) -> list[TokenEvent]:
        """The events of `mine`; all others wait for `step`."""
        events = self.step()
        self._undelivered += [event for event in events if event.request_id not in mine]
        return [event for event in events if event.request_id in mine]

    def _take_inbox(self) -> None:
        with self._admission:
            items = self._inbox.take()
            self._line += [ticket for ticket, wanted in items if wanted]
        for ticket, wanted in items:
            if wanted or self._tickets.get(ticket.request_id) is not ticket:
                continue
            if ticket.decode is None:
                self._line.remove(ticket)
                self._end(ticket, FinishReason.CANCELLED)
            else:
                ticket.cancelled = True
                self._roster.decodes[ticket.decode].cancel(ticket.request_id)

    def _dispatch(self) -> None:
        """Sends requests of the line to the pair the policy chooses, highest priority first, until it says wait."""
        now = self._clock()
        most = self._roster.most_tokens
        for ticket in list(self._line):
            if (end := ticket.end_in_line(now, most)) is not None:
                self._line.remove(ticket)
                self._end(ticket, *end)
        promised = self._promised() if self._line else Promised()
        for ticket in sorted(self._line, key=lambda ticket: -ticket.request.priority):
            if not self._assign(ticket, now, promised):
                break

    def _assign(self, ticket: Ticket, now: float, promised: Promised) -> bool:
        limit = self.config.max_queued_per_decode
        shape = ticket.shape(self._num_choices)
        choice = self._roster.choose(self._policy, shape, promised, max_queued_per_decode=limit)
        if choice is None:
            return False
        promised.add(choice.prefill, shape)
        self._num_choices += 1
        self._line.remove(ticket)
        ticket.prefill, ticket.decode, ticket.line_s = choice.prefill, choice.decode, now - ticket.submitted_at
        self._roster.decodes[choice.decode].submit(ticket.request_at(now), writers=(choice.prefill,))
        return True

    def _handle(self, event: Event, decode: PeerAddress) -> None:
        request_id = event.grant.request_id if isinstance(event, Granted) else event.request_id
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.decode != decode:
            if isinstance(event, Granted):  # nobody waits for it any more
                self._roster.decodes[decode].cancel(request_id)
            return
        if isinstance(event, Granted):
            self._forward(ticket, event)
        elif isinstance(event, Refused):
            self._refused(ticket, event.error)
        else:
            if event.finish_reason is not None:
                del self._tickets[request_id]
            self._emit(ticket.passed_on(event))

    def _forward(self, ticket: Ticket, granted: Granted) -> None:
        """Tells prefill to start; its port may have left since the choice."""
        if ticket.failure is not None:
            return  # decode has been asked to end it
        ticket.landed = False
        port = self._roster.prefills.get(granted.grant.writers[0])
        ticket.forwarded = port is not None
        if port is None:
            self._reroute(ticket)
        else:
            port.submit(granted.request, granted.grant)

    def _refused(self, ticket: Ticket, error: PDInferError) -> None:
        """Decode has no place: back to the front of the line. Any other reason is final."""
        if not isinstance(error, Overloaded) or ticket.failure is not None:
            self._end(ticket, FinishReason.FAILED, ticket.failure or error)
        elif ticket.cancelled:  # decode did not know it any more when the cancellation came
            self._end(ticket, FinishReason.CANCELLED)
        else:
            ticket.prefill = ticket.decode = None
            self._line.appendleft(ticket)

    def _reroute(self, ticket: Ticket) -> None:
        """Another prefill for a request that decode holds already."""
        assert ticket.decode is not None
        decode = self._roster.decodes[ticket.decode]
        shape = ticket.shape(self._num_choices)
        choice = self._roster.choose(self._policy, shape, self._promised(), decode=ticket.decode)
        if choice is not None:
            ticket.prefill, ticket.forwarded = choice.prefill, ticket.landed
            decode.change_writers(ticket.request_id, writers=(choice.prefill,))
        elif not ticket.landed:
            ticket.failure = TransferError("no prefill port is left for it")
            decode.cancel(ticket.request_id)  # its answer ends the request: no event of it can come after that

    def _promised(self) -> Promised:
        coming = [ticket for ticket in list(self._tickets.values()) if not ticket.forwarded]
        return Promised((ticket.prefill, ticket.shape(self._num_choices)) for ticket in coming)

    # -- small things -----------------------------------------------------------------------------------------------

    def _line_has_room(self) -> bool:
        unseen = sum(wanted for _, wanted in self._inbox.peek())
        return len(self._line) + unseen < self.config.max_queued_requests

    def _end(self, ticket: Ticket, reason: FinishReason, error: PDInferError | None = None) -> None:
        del self._tickets[ticket.request_id]
        self._emit(ticket.final_event(reason, error, self._clock()))

    def _emit(self, event: TokenEvent) -> None:
        """Keeps an event for the host, unless nobody will ask for it."""
        if event.request_id not in self._muted:
            self._undelivered.append(event)
        elif event.finish_reason is not None:
            self._muted.discard(event.request_id)

    def _forget(self, request_ids: set[str]) -> None:
        """Cancels requests whose events nobody will read, and makes the cancellation happen."""
        self._undelivered = [event for event in self._undelivered if event.request_id not in request_ids]
        unfinished = [request_id for request_id in request_ids if request_id in self._tickets]
        self._muted.update(unfinished)
        for request_id in unfinished:
            self.cancel(request_id)
        if unfinished and not self._closed:
            self._advance()
