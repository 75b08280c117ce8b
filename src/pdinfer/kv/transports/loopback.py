"""A transport inside one process: a frame is a function call, a write is a copy, or nothing when the pages are the
same.

Deliveries run in the thread that sends. Every end of a link has an inbox, which one thread at a time empties. A message
sent from inside a delivery, or while another thread delivers, waits in that inbox, so the order holds without a lock
around any callback."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from pdinfer.checks import typed
from pdinfer.errors import TransferError
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import (
    Link,
    Message,
    QueuingTransport,
    Receiver,
    Transfer,
    WriteMessage,
    check_arriving,
    check_placed,
)
from pdinfer.log import log
from pdinfer.process.locks import EXHAUSTED, new_lock

SCHEME = "loopback://"


class LoopbackHub:
    """The transports that can be reached in this process, by endpoint. Every transport of one hub sees every other.

    `lock` guards the hub and the links of all its transports, and is never held during a callback."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.numbers = itertools.count()
        self.transports: dict[str, LoopbackTransport] = {}


@attrs.define(eq=False)
class _Delivery:
    """One call to a receiver. `transfer` belongs to the sender, and is done when the call has ended or was dropped."""

    run: Callable[[], None]
    transfer: Transfer | None = None

    def complete(self, error: TransferError | None) -> None:
        if self.transfer is not None:
            self.transfer.complete(error)


@attrs.define(eq=False)
class _End:
    """One side of a link of `transport`, and what waits to be delivered to its owner. Both sides share `changed`."""

    transport: LoopbackTransport
    link: Link
    memory: Memory
    receiver: Receiver
    changed: threading.Condition
    peer: _End = attrs.field(init=False)
    inbox: deque[_Delivery] = attrs.field(factory=deque)
    deliverer: int | None = None
    closing: bool = False
    gone: bool = False

    def post(self, delivery: _Delivery) -> None:
        """Queue `delivery`, and deliver everything that waits unless a thread is already doing so."""
        with self.changed:
            accepted = not self.closing
            if accepted:
                self.inbox.append(delivery)
        if accepted:
            self.deliver()
        else:
            delivery.complete(TransferError(f"the link to {self.peer.link.endpoint} is closed"))

    def deliver(self) -> None:
        try:
            with self.changed:
                if self.deliverer is not None:
                    return
                self.deliverer = threading.get_ident()
            while True:
                with self.changed:
                    if not self.inbox:
                        self.deliverer = None
                        return
                    delivery = self.inbox.popleft()
                self._run(delivery)
        except BaseException:  # now, or the peer would begin a request before our recovery cuts the link
            self.transport.in_doubt = self.peer.transport.in_doubt = True
            raise

    def _run(self, delivery: _Delivery) -> None:
        error: TransferError | None = None
        try:
            delivery.run()
        except TransferError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - whatever a receiver raises
            if isinstance(raised, EXHAUSTED):  # before anything that asks for more
                self.transport.in_doubt = self.peer.transport.in_doubt = True
            log.exception("a callback failed; the link to %s is closed", self.link.endpoint)
            error = TransferError(f"a callback failed, so the link to {self.link.endpoint} was closed: {raised!r}")
        except BaseException:
            # Ctrl-C may hit the host while it delivers; the link must not stay with this thread.
            self.transport.in_doubt = self.peer.transport.in_doubt = True
            error = TransferError(f"the link to {self.link.endpoint} was closed: a delivery was interrupted")
            delivery.complete(error)
            self.cut()
            raise
        delivery.complete(error)
        if error is not None:
            self.shut(error)

    def shut(self, error: TransferError | None) -> None:
        """Close both sides: drop what waits and queue `closed`, with `error` here."""
        reason = TransferError(f"{self.peer.link.endpoint} closed the link" + (f": {error}" if error else ""))
        with self.changed:
            if self.closing:
                return
            dropped = [*self.inbox, *self.peer.inbox]
            self.closing_with(error)
            self.peer.closing_with(reason)
        for delivery in dropped:
            delivery.complete(error or TransferError(f"the link to {self.link.endpoint} was closed"))
        self.deliver()
        self.peer.deliver()

    def cut(self) -> None:
        """Close both sides as `shut` does, in whatever state an interrupted thread has left them."""
        sides = (self, self.peer)
        stuck = [side for side in sides if side.deliverer == threading.get_ident()]
        for side in sides:
            with side.changed:
                side.closing = side.gone
                side.deliverer = None if side in stuck else side.deliverer
            side.transport.in_doubt |= bool(stuck)
        self.shut(TransferError("a delivery was interrupted") if stuck else None)
        self.peer.shut(None)

    def closing_with(self, error: TransferError | None) -> None:
        self.closing = True
        self.inbox.clear()
        self.inbox.append(_Delivery(lambda: self._closed(error)))

    def _closed(self, error: TransferError | None) -> None:
        if self.gone:
            return
        try:
            self.receiver.closed(self.link, error)
        finally:
            with self.changed:
                self.gone = True
                self.changed.notify_all()

    def wait_gone(self) -> None:
        """Return when `closed` has been called. Inside a delivery of this very end, call it."""
        with self.changed:
            nested = self.deliverer == threading.get_ident()
            last = self.inbox.popleft() if nested and self.inbox else None
            if not nested:
                self.changed.wait_for(lambda: self.gone)
        if last is not None:
            self._run(last)


class LoopbackTransport(QueuingTransport):
    """Moves frames and bytes between engines of one process, found through `hub`.

    A write is done when `write` returns, unless it had to wait for a delivery of its link that was under way. A
    callback may fence its own link. Fencing from inside a callback a link to which another thread is delivering waits
    for that thread."""

    @typed
    def __init__(self, hub: LoopbackHub) -> None:
        self._hub = hub
        self._links: dict[Link, _End] = {}
        self._endpoint = ""
        self._closed = False

    @property
    def name(self) -> str:
        return "loopback"

    @property
    def ticks(self) -> bool:
        return False

    def _listen(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        with self._hub.lock:
            self._endpoint = f"{SCHEME}{next(self._hub.numbers)}"
            self._hub.transports[self._endpoint] = self
        return (self._endpoint,)

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        endpoint = next((e for e in endpoints if e.startswith(SCHEME)), None)
        if endpoint is None:
            raise TransferError(f"a loopback transport cannot reach {list(endpoints)}; it needs {SCHEME}<n>")
        with self._hub.lock:
            if (other := self._hub.transports.get(endpoint)) is None:
                raise TransferError(f"nothing is at {endpoint}: it was closed, or belongs to another LoopbackHub")
            ours, theirs = self._new_end(endpoint), other._new_end(self._endpoint)  # noqa: SLF001 - another of us
            ours.changed = theirs.changed
            ours.peer, theirs.peer = theirs, ours
            ours.link.same_memory = theirs.link.same_memory = ours.memory is theirs.memory
        theirs.post(_Delivery(lambda: theirs.receiver.opened(theirs.link)))
        return ours.link

    def _new_end(self, endpoint: str) -> _End:
        if self._closed:
            raise TransferError(f"the transport at {self._endpoint} is closed; make a new one")
        self._links = {link: end for link, end in self._links.items() if not end.gone}
        end = _End(self, Link(endpoint), *self._registered, threading.Condition(new_lock()))
        self._links[end.link] = end
        return end

    def _queue(self, link: Link, message: Message) -> bool:
        end = self._links.get(link)
        if end is None:
            return False
        if isinstance(message, WriteMessage):
            end.peer.post(_Delivery(partial(_place, end.peer, message, self._memory), message.transfer))
        else:
            end.peer.post(_Delivery(partial(_receive, end.peer, message.frame)))
        return True

    def fence(self, link: Link) -> None:
        end = self._links.get(link)
        if end is not None:
            end.shut(None)
            end.wait_gone()

    def cut(self) -> None:
        for end in list(self._links.values()):
            end.cut()
            end.wait_gone()

    def close(self) -> None:
        with self._hub.lock:
            self._closed = True
            self._hub.transports.pop(self._endpoint, None)
            links = list(self._links)
        for link in links:
            self.fence(link)


def _receive(end: _End, frame: bytes) -> None:
    check_arriving(end.link, len(frame), is_write=False)
    end.receiver.received(end.link, frame)


def _place(end: _End, message: WriteMessage, source: Memory) -> None:
    """Put a payload where the receiver wants it. Equal spans of one memory need no copy."""
    if message.ready is not None:
        message.ready()
    check_arriving(end.link, len(message.frame), is_write=True)
    _check_open(end)
    num_bytes = message.transfer.num_bytes
    spans = end.receiver.place(end.link, message.frame, num_bytes)
    _check_open(end)
    if spans is None:
        return
    check_placed(end.link, spans, end.memory, num_bytes)
    if end.memory is not source or spans != message.source:
        end.memory.copy_from(spans, source, message.source)
    end.receiver.placed(end.link, message.frame, None)


def _check_open(end: _End) -> None:
    """Raise TransferError when `ready` or `place`, which ran just now, closed the link."""
    if end.closing:
        raise TransferError(f"the link to {end.link.endpoint} was closed before its write was placed")
