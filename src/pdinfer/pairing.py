"""Start reading here: a Pairing takes requests, chooses a prefill and a decode for each, and carries what they say.

    submit ─► line ─► policy ─► decode.submit ─► Granted ─► prefill.submit ─► (the channel) ─► TokenEvent ─► step

It holds no tensor and computes nothing. Its ports are engines in this process, or clients of engines elsewhere
(`pdinfer.remote`); any number of each, joining and leaving while it runs.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs

from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.decode import DecodeEngine
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RequestError, TransferError
from pdinfer.inbox import Inbox
from pdinfer.kv.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.model import Model
from pdinfer.policy import Policy, least_tokens
from pdinfer.prefill import PrefillEngine
from pdinfer.schedule import RequestLimits, check_request
from pdinfer.types import (
    DecodeLoad,
    Event,
    FinishReason,
    Granted,
    PageGrant,
    PeerAddress,
    PrefillLoad,
    Refused,
    Request,
    RequestShape,
    TokenEvent,
    Usage,
)
from pdinfer.weights import load_model

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("pdinfer")


class Port(Protocol):
    """What prefill and decode ports have in common. A `step` that raises means that the port is lost."""

    @property
    def address(self) -> PeerAddress: ...

    @property
    def limits(self) -> RequestLimits: ...

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[Event]: ...

    def notify(self, listener: Callable[[], None]) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


class PrefillPort(Port, Protocol):
    """A prefill engine, here or elsewhere."""

    def submit(self, request: Request, grant: PageGrant) -> None: ...

    def load(self) -> PrefillLoad: ...


class DecodePort(Port, Protocol):
    """A decode engine, here or elsewhere."""

    def submit(self, request: Request, *, writers: Sequence[PeerAddress]) -> None: ...

    def load(self) -> DecodeLoad: ...


PortT = TypeVar("PortT", bound=Port)


@attrs.define(eq=False)
class _Ticket:
    """One unfinished request. `landed` is set by the first token after a grant: from then on prefill is out of it."""

    request: Request
    request_id: str
    submitted_at: float
    deadline_at: float | None
    prefill: PeerAddress | None = None
    decode: PeerAddress | None = None
    line_s: float = 0.0
    num_tokens: int = 0
    landed: bool = False
    cancelled: bool = False


class _Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


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
        self._prefills: dict[PeerAddress, PrefillPort] = {}
        self._decodes: dict[PeerAddress, DecodePort] = {}
        self._leaving: set[PeerAddress] = set()
        self._inbox: Inbox[_Ticket | str] = Inbox()
        self._tickets: dict[str, _Ticket] = {}
        self._line: deque[_Ticket] = deque()
        self._undelivered: list[TokenEvent] = []
        self._muted: set[str] = set()
        self._num_choices = 0
        self._closed = False
        for port in prefill if isinstance(prefill, Sequence) else [prefill]:
            self.add(port)
        for other in decode if isinstance(decode, Sequence) else [decode]:
            self.add(other)
        if not self._prefills or not self._decodes:
            raise ConfigError("a Pairing needs at least one prefill port and one decode port")

    @classmethod
    def local(
        cls,
        checkpoint_or_model: str | os.PathLike[str] | Model,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        config: PairingConfig | None = None,
        policy: Policy = least_tokens,
    ) -> Pairing:
        """One process, one model, one pool that both engines share: pages change hands without a copy."""
        if isinstance(checkpoint_or_model, Model):
            model = checkpoint_or_model
        else:
            model = load_model(checkpoint_or_model, device=device, dtype=dtype)
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
        if self._closed:
            raise RequestError("the pairing is closed")
        request_id = request.request_id
        if request_id is None:
            request_id = self._random_bytes(8).hex()
        check_request(request, self._roomiest_limits())
        if request_id in self._tickets:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not ended")
        if not self._line_has_room():
            raise Overloaded(f"the line already holds {self.config.max_queued_requests} requests")
        sampling = request.sampling
        if sampling.seed is None:
            sampling = attrs.evolve(sampling, seed=int.from_bytes(self._random_bytes(8), "little"))
        deadline_s = self.config.default_deadline_s if request.deadline_s is None else request.deadline_s
        now = self._clock()
        ticket = _Ticket(
            request=attrs.evolve(request, request_id=request_id, sampling=sampling),
            request_id=request_id,
            submitted_at=now,
            deadline_at=None if deadline_s is None else now + deadline_s,
            num_tokens=len(request.output),
        )
        self._tickets[request_id] = ticket
        self._inbox.put(ticket)
        return request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request with CANCELLED at a coming step. Unknown or finished ids are ignored."""
        self._inbox.put(request_id)

    def generate(self, requests: Iterable[Request]) -> Iterator[TokenEvent]:
        """Serves `requests` and yields their events as they come. Pulls lazily, and waits where `submit` would raise
        Overloaded. A bad request yields its FAILED event and the others go on. Closing the iterator cancels what it
        submitted; events of other requests stay for `step`."""
        mine: set[str] = set()
        source = iter(requests)
        more = True
        try:
            while more or mine:
                while more and self._line_has_room():
                    request = next(source, None)
                    if request is None:
                        more = False
                        break
                    try:
                        mine.add(self.submit(request))
                    except RequestError as error:
                        yield self._refusal(request, error)
                for event in self._advance_for(mine):
                    if event.finish_reason is not None:
                        mine.discard(event.request_id)
                    yield event
                if mine and not self._undelivered:
                    self.wait(1.0)
        finally:
            self._forget(mine)

    def step(self) -> list[TokenEvent]:
        """Sends waiting requests on, steps every port that runs here, and returns the events since the last step."""
        events, self._undelivered = self._undelivered, []
        return events + ([] if self._closed else self._advance())

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a step would do something, at most `timeout_s`; tells whether it would."""
        if self._undelivered or self._closed:
            return bool(self._undelivered)
        if any(port.wait(0.0) for port in self._ports()):
            return True
        ends = [ticket.deadline_at for ticket in list(self._line) if ticket.deadline_at is not None]
        left_s = min(ends, default=float("inf")) - self._clock()
        return self._inbox.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    def drain(self, timeout_s: float) -> bool:
        """Steps until every request has ended or the time is over; the next `step` returns the events."""
        end = time.monotonic() + timeout_s
        while self._tickets and time.monotonic() < end:
            self._undelivered += self._advance()
            if self._tickets and not any(port.wait(0.0) for port in self._ports()):
                self._inbox.wait(min(0.1, max(0.0, end - time.monotonic())))
        return not self._tickets

    def close(self) -> None:
        """Ends unfinished requests with CANCELLED (a last `step` returns the events) and closes the ports. A second
        call does nothing."""
        if self._closed:
            return
        self._closed = True
        for ticket in list(self._tickets.values()):
            self._undelivered += self._end(ticket, FinishReason.CANCELLED)
        for port in self._ports():
            port.close()
        self._inbox.wake()

    def __enter__(self) -> Pairing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- ports ------------------------------------------------------------------------------------------------------

    def add(self, port: PrefillPort | DecodePort) -> None:
        """Connects a port to every port of the other side and puts it to use. LayoutMismatch or TransferError when a
        pair cannot be connected; then it does not join."""
        timeout_s = self.config.connect_timeout_s
        if _role(port) is _Role.PREFILL:
            for address in self._decodes:
                port.connect(address, timeout_s=timeout_s)
            self._prefills[port.address] = port  # type: ignore[assignment]
        else:
            for prefill in self._prefills.values():
                prefill.connect(port.address, timeout_s=timeout_s)
            self._decodes[port.address] = port  # type: ignore[assignment]
        port.notify(self._inbox.wake)

    def remove(self, port: PrefillPort | DecodePort, *, drain_s: float) -> None:
        """Chooses the port no more, steps until its requests have ended or `drain_s` is over, and lets it go, open.
        Requests of a prefill then go to another one, those of a decode end FAILED. Events stay for the next `step`."""
        address = port.address
        self._leaving.add(address)
        end = time.monotonic() + drain_s
        while self._assigned(address) and time.monotonic() < end:
            self._undelivered += self._advance()
            self.wait(min(0.05, max(0.0, end - time.monotonic())))
        if _role(port) is _Role.DECODE:
            for ticket in self._assigned(address):
                port.cancel(ticket.request_id)
            port.step()
        self._undelivered += self._part_with(address, TransferError("its port was removed from the pairing"))
        self._leaving.discard(address)

    def _ports(self) -> list[Port]:
        return [*self._decodes.values(), *self._prefills.values()]

    def _assigned(self, address: PeerAddress) -> list[_Ticket]:
        """Unfinished requests that still need this port."""
        return [
            ticket
            for ticket in list(self._tickets.values())
            if ticket.decode == address or (ticket.prefill == address and not ticket.landed)
        ]

    def _lose(self, address: PeerAddress, error: PDInferError) -> list[TokenEvent]:
        """A port failed: its process is gone or it broke. Closing it is what proves to the others that it stopped."""
        _log.error("a port was lost: %s", error)
        port = self._prefills.get(address) or self._decodes.get(address)
        if port is not None:
            try:
                port.close()
            except Exception:  # noqa: BLE001 - it is broken already
                _log.exception("closing the lost port failed")
        return self._part_with(address, error)

    def _part_with(self, address: PeerAddress, error: PDInferError) -> list[TokenEvent]:
        self._prefills.pop(address, None)
        was_decode = self._decodes.pop(address, None) is not None
        events: list[TokenEvent] = []
        for ticket in self._assigned(address):
            if was_decode:
                events += self._end(ticket, FinishReason.FAILED, TransferError(f"its decode is gone: {error}"))
            else:
                events += self._reroute(ticket)
        return events

    # -- one step ---------------------------------------------------------------------------------------------------

    def _advance(self) -> list[TokenEvent]:
        events = self._take_inbox()
        events += self._dispatch()
        for address, decode in list(self._decodes.items()):
            try:
                said = decode.step()
            except Exception as error:  # noqa: BLE001 - a port that raises is lost, the others go on
                events += self._lose(address, _as_error(error))
                continue
            for event in said:
                events += self._handle(event, address)
        for address, prefill in list(self._prefills.items()):
            try:
                prefill.step()
            except Exception as error:  # noqa: BLE001 - a port that raises is lost, the others go on
                events += self._lose(address, _as_error(error))
        return [event for event in events if not self._is_muted(event)]

    def _advance_for(self, mine: set[str]) -> list[TokenEvent]:
        """The events of `mine`; all others wait for `step`."""
        events = self.step()
        self._undelivered += [event for event in events if event.request_id not in mine]
        return [event for event in events if event.request_id in mine]

    def _take_inbox(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for item in self._inbox.take():
            if isinstance(item, _Ticket):
                self._line.append(item)
                continue
            ticket = self._tickets.get(item)
            if ticket is None:
                continue
            if ticket.decode is None:
                self._line.remove(ticket)
                events += self._end(ticket, FinishReason.CANCELLED)
            else:
                ticket.cancelled = True
                self._decodes[ticket.decode].cancel(item)
        return events

    def _dispatch(self) -> list[TokenEvent]:
        """Sends requests of the line to the pair the policy chooses, highest priority first, until it says wait."""
        events: list[TokenEvent] = []
        now = self._clock()
        for ticket in sorted(self._line, key=lambda ticket: -ticket.request.priority):
            if ticket.deadline_at is not None and now >= ticket.deadline_at:
                self._line.remove(ticket)
                events += self._end(ticket, FinishReason.DEADLINE)
                continue
            if not self._prefills or not self._decodes:
                side = "decode" if self._prefills else "prefill"
                self._line.remove(ticket)
                events += self._end(ticket, FinishReason.FAILED, TransferError(f"no {side} port is left"))
                continue
            if not self._assign(ticket, now):
                break
        return events

    def _assign(self, ticket: _Ticket, now: float) -> bool:
        prefills = [port.load() for port in self._fitting(self._prefills, ticket)]
        decodes = [port.load() for port in self._fitting(self._decodes, ticket)]
        choice = self._policy(
            self._shape(ticket),
            prefills,
            [load for load in decodes if load.num_waiting_requests < self.config.max_queued_per_decode],
        )
        if choice is None:
            return False
        self._num_choices += 1
        self._line.remove(ticket)
        ticket.prefill, ticket.decode, ticket.line_s = choice.prefill, choice.decode, now - ticket.submitted_at
        left = None if ticket.deadline_at is None else max(0.0, ticket.deadline_at - now)
        request = attrs.evolve(ticket.request, deadline_s=left)
        self._decodes[choice.decode].submit(request, writers=(choice.prefill,))
        return True

    def _fitting(self, ports: Mapping[PeerAddress, PortT], ticket: _Ticket) -> list[PortT]:
        total = len(ticket.request.prompt) + ticket.request.sampling.max_new_tokens
        return [
            port for address, port in ports.items() if address not in self._leaving and port.limits.max_tokens >= total
        ]

    def _handle(self, event: Event, decode: PeerAddress) -> list[TokenEvent]:
        if isinstance(event, Granted):
            return self._forward(event, decode)
        ticket = self._tickets.get(event.request_id)
        if ticket is None or ticket.decode != decode:
            return []
        if isinstance(event, Refused):
            if isinstance(event.error, Overloaded):
                ticket.prefill = ticket.decode = None
                if ticket.cancelled:  # decode did not know it any more when the cancellation came
                    return self._end(ticket, FinishReason.CANCELLED)
                self._line.appendleft(ticket)
                return []
            return self._end(ticket, FinishReason.FAILED, event.error)
        ticket.landed = True
        ticket.num_tokens = event.index + (event.token is not None)
        if event.finish_reason is None:
            return [event]
        del self._tickets[event.request_id]
        return [attrs.evolve(event, usage=_with_line(event.usage, ticket.line_s))]

    def _forward(self, granted: Granted, decode: PeerAddress) -> list[TokenEvent]:
        """Tells prefill to start; its port may have left since the choice."""
        ticket = self._tickets.get(granted.grant.request_id)
        if ticket is None or ticket.decode != decode:
            return []
        ticket.landed = False
        writer = granted.grant.writers[0]
        if writer not in self._prefills:
            return self._reroute(ticket)
        self._prefills[writer].submit(granted.request, granted.grant)
        return []

    def _reroute(self, ticket: _Ticket) -> list[TokenEvent]:
        """Another prefill for a request that decode holds already."""
        assert ticket.decode is not None
        prefills = [port.load() for port in self._fitting(self._prefills, ticket)]
        choice = self._policy(self._shape(ticket), prefills, [self._decodes[ticket.decode].load()])
        if choice is None:
            self._decodes[ticket.decode].cancel(ticket.request_id)
            return self._end(ticket, FinishReason.FAILED, TransferError("no prefill port is left for it"))
        ticket.prefill = choice.prefill
        self._decodes[ticket.decode].submit(ticket.request, writers=(choice.prefill,))
        return []

    # -- small things -----------------------------------------------------------------------------------------------

    def _shape(self, ticket: _Ticket) -> RequestShape:
        return RequestShape(
            ordinal=self._num_choices,
            num_prompt_tokens=len(ticket.request.prompt),
            num_output_tokens=ticket.num_tokens,
            max_new_tokens=ticket.request.sampling.max_new_tokens,
            priority=ticket.request.priority,
        )

    def _line_has_room(self) -> bool:
        unseen = sum(isinstance(item, _Ticket) for item in self._inbox.peek())
        return len(self._line) + unseen < self.config.max_queued_requests

    def _roomiest_limits(self) -> list[RequestLimits]:
        """Of each side the port that takes the longest request."""
        sides = [
            [port.limits for port in self._prefills.values()],
            [port.limits for port in self._decodes.values()],
        ]
        return [max(side, key=lambda limits: limits.max_tokens) for side in sides if side]

    def _end(self, ticket: _Ticket, reason: FinishReason, error: PDInferError | None = None) -> list[TokenEvent]:
        """The final event of a request that decode never accepted or whose decode is lost."""
        del self._tickets[ticket.request_id]
        usage = Usage(
            prompt_tokens=len(ticket.request.prompt),
            output_tokens=ticket.num_tokens,
            cached_tokens=0,
            queue_s=self._clock() - ticket.submitted_at if ticket.decode is None else ticket.line_s,
            ttft_s=None,
        )
        event = TokenEvent(
            request_id=ticket.request_id,
            token=None,
            index=ticket.num_tokens,
            finish_reason=reason,
            error=error,
            usage=usage,
        )
        return [event]

    def _refusal(self, request: Request, error: PDInferError) -> TokenEvent:
        """The event of a request that `submit` would not take."""
        request_id = request.request_id if isinstance(request.request_id, str) else self._random_bytes(8).hex()
        return TokenEvent(
            request_id=request_id, token=None, index=0, finish_reason=FinishReason.FAILED, error=error, usage=None
        )

    def _forget(self, request_ids: set[str]) -> None:
        """Cancels requests whose events nobody will read, and makes the cancellation happen."""
        unfinished = [request_id for request_id in request_ids if request_id in self._tickets]
        self._muted.update(unfinished)
        for request_id in unfinished:
            self.cancel(request_id)
        if unfinished and not self._closed:
            self._undelivered += self._advance()

    def _is_muted(self, event: TokenEvent) -> bool:
        if event.request_id not in self._muted:
            return False
        if event.finish_reason is not None:
            self._muted.discard(event.request_id)
        return True


def _role(port: PrefillPort | DecodePort) -> _Role:
    return _Role.PREFILL if isinstance(port.load(), PrefillLoad) else _Role.DECODE


def _with_line(usage: Usage | None, line_s: float) -> Usage | None:
    """Decode counts from its own submit; the host waits from ours."""
    if usage is None:
        return None
    ttft_s = None if usage.ttft_s is None else usage.ttft_s + line_s
    return attrs.evolve(usage, queue_s=usage.queue_s + line_s, ttft_s=ttft_s)


def _as_error(error: Exception) -> PDInferError:
    return error if isinstance(error, PDInferError) else PDInferError(f"{type(error).__name__}: {error}")
