"""A transport over any engine that writes one-sided: a stream carries frames, the engine payloads.

    send ────────────────────────────┐          ┌──► received
    write ─► pdinfer-mooncake thread ┤ stream ──┤
                    │                └──────────┴──► place, placed     (the stream's I/O thread)
                    └─────── engine ──► ring ──────────┘

Beside the frames the stream carries what the two ends of a ring say to each other (`ring.Signal`)."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.kv.copies import WORD_BYTES, DeviceCopies
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import (
    MAX_WAITING_BYTES,
    Budget,
    Link,
    Message,
    QueuingTransport,
    Receiver,
    Transport,
    WriteMessage,
)
from pdinfer.kv.transports.one_sided.block import DeviceBlock, HostBlock, MakeBlock, NamedEngine
from pdinfer.kv.transports.one_sided.ring import (
    MAX_RING_BYTES,
    MAX_SLOTS,
    PROBE_BYTES,
    Credit,
    Landed,
    RingIncoming,
    RingOffer,
    Signal,
    SignalMemory,
)
from pdinfer.kv.transports.one_sided.writer import RingWriter
from pdinfer.log import log
from pdinfer.process.locks import new_lock

SLOT_BYTES = 4 << 20
"""Small enough for the cache that cores share: what is gathered is sent from there, and what lands is copied from
there."""
NUM_SLOTS = 4
TIMEOUT_S = 10.0
JOIN_S = 2.0
"""How long `close` waits, in all, for threads that are inside the engine."""


_running: weakref.WeakSet[RingTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close every transport before Python ends: a daemon thread that comes back from the engine while Python ends takes
    the process down with SIGABRT."""
    for transport in list(_running):
        transport.close()


class RingTransport(QueuingTransport, Receiver):
    """Frames over `stream`, payloads through a one-sided engine into a ring that the receiver makes for each peer.

    `segment` is an engine to share, or makes one that is closed with the transport. A link on which the peer writes has
    a ring of `num_slots` slots of `slot_bytes`. A link on which we write has up to two blocks of `slot_bytes`, and one
    more for each write that got lost. All of them are made when first needed, in host memory, or with `on_device` where
    the pool is. With `digest`, which must be the same on both ends, each slot is verified after it was copied. Without
    it, nothing tells a good slot from one that was hit late or by a stranger; on a device, which both ends then have, a
    random number behind each part says that the part is there. A write that has not landed after
    `timeout_s` counts as failed. The `ready` of a write runs in its link's own thread."""

    _engine: NamedEngine
    _make_block: MakeBlock

    def __init__(
        self,
        name: str,
        segment: NamedEngine | Callable[[], NamedEngine],
        stream: Transport,
        *,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
        digest: bool = True,
        timeout_s: float = TIMEOUT_S,
        on_device: bool = False,
    ) -> None:
        if not 1 <= num_slots <= MAX_SLOTS or not 1 <= slot_bytes <= MAX_RING_BYTES // num_slots:
            raise ConfigError(
                f"a ring cannot have {num_slots} slots of {slot_bytes} bytes; use 1 to {MAX_SLOTS} slots and at most "
                f"{MAX_RING_BYTES} bytes in all"
            )
        if on_device and (digest or slot_bytes % WORD_BYTES or slot_bytes == WORD_BYTES):
            raise ConfigError(
                f"nothing digests what a NIC writes to a device, which copies {WORD_BYTES} bytes at once: give "
                f"digest=False and slot_bytes divided by {WORD_BYTES}, more than those"
            )
        self._name = name
        self._on_device = on_device
        self._segment, self._stream = segment, stream
        self._slot_bytes, self._num_slots, self._timeout_s = slot_bytes, num_slots, timeout_s
        self._digest = digest or on_device  # what lies on a device is known by a number too
        self._lock = new_lock()
        self._writers: dict[Link, RingWriter] = {}
        self._rings: dict[Link, RingIncoming] = {}
        self._signals: dict[Link, Signal] = {}
        self._reasons: dict[Link, TransferError] = {}
        self._threads: list[threading.Thread] = []
        self._waiting: Budget[RingWriter] = Budget(MAX_WAITING_BYTES, time.monotonic)

    @property
    def name(self) -> str:
        return self._name

    def _listen(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        """Start the engine, unless it is a shared one, and listen. Raise what either of them raises."""
        copies = _copies_of(memory) if self._on_device else None
        self._engine = engine = self._segment if isinstance(self._segment, NamedEngine) else self._segment()
        if copies is None:
            self._make_block = partial(HostBlock, engine)
        else:
            self._make_block = partial(DeviceBlock, engine, copies)
        _running.add(self)
        try:
            return tuple(f"{self.name}+{endpoint}" for endpoint in self._stream.register(SignalMemory(), self))
        except PDInferError:
            self._close_engine()
            raise

    @property
    def authenticates(self) -> bool:
        """Whether the receiver above authenticates; asked by the stream, whose receiver this is."""
        return self._owned is not None and self._receiver.authenticates

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        prefix = f"{self.name}+"
        ours = [endpoint.removeprefix(prefix) for endpoint in endpoints if endpoint.startswith(prefix)]
        if not ours:
            raise TransferError(f"{self.name} cannot reach {list(endpoints)}; it needs {prefix}tcp://host:port")
        return self._stream.connect(ours, timeout_s=timeout_s)

    def _queue(self, link: Link, message: Message) -> bool:
        writer = self._writers.get(link)
        if writer is None and isinstance(message, WriteMessage):
            writer = self._open_writer(link)
            if writer is None:
                return False
        if writer is None:
            self._stream.send(link, message.frame)
            return True
        return writer.queue(message)

    def fence(self, link: Link) -> None:
        """Withdraw the peer's ring. A one-sided write that lands later lands in memory that belongs to nobody."""
        self._stream.fence(link)

    def close(self) -> None:
        """Close every link, within some seconds. A thread that hangs in the engine does not hold it up; the engine then
        ends with that thread."""
        if self._owned is None:
            return
        self._stream.close()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        if stuck := sum(thread.is_alive() for thread in self._threads):
            log.warning("%d writes hang in the %s engine: it ends with them", stuck, self.name)
        self._close_engine()

    def _close_engine(self) -> None:
        if self._engine is not self._segment:
            self._engine.close()

    def _open_writer(self, link: Link) -> RingWriter | None:
        """Start the sending direction of a link at its first write. Return None when the link is closed."""
        with self._lock:
            if link in self._writers:
                return self._writers[link]
            writer = RingWriter(
                link=link,
                segment=self._engine,
                memory=self._memory,
                make_block=self._make_block,
                slot_bytes=self._slot_bytes,
                tail_bytes=(DeviceBlock if self._on_device else HostBlock).tail_bytes,
                digest=self._digest,
                timeout_s=self._timeout_s,
                waiting=self._waiting,
                send=partial(self._stream.send, link),
                say=partial(self._say, link),
                fail=partial(self._fail, link),
            )
            # Known before it asks: `closed`, which may come at once, must find it.
            self._writers[link] = writer
            if not self._say(link, Signal.ASK):
                self._writers.pop(link, None)
                return None
            writer.thread.start()
            self._threads = [thread for thread in self._threads if thread.is_alive()] + [writer.thread]
        return writer

    def _say(self, link: Link, signal: Signal, body: bytes = b"\0") -> bool:
        """Send a signal. Return False when the link is known to be closed."""
        return self._stream.write(link, body, [(0, signal)]).error is None

    def _fail(self, link: Link, error: TransferError) -> None:
        """Close a link for a reason that `closed` then passes on. Do nothing when the link is already closed."""
        with self._lock:
            if link not in self._writers:
                return
            self._reasons[link] = error
        self._stream.fence(link)

    # What the stream calls, from its I/O thread.

    def opened(self, link: Link) -> None:
        self._receiver.opened(link)

    def received(self, link: Link, frame: bytes) -> None:
        self._receiver.received(link, frame)

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        try:
            self._signals[link] = Signal(num_bytes)
        except ValueError as error:
            raise TransferError(f"{link.endpoint} sent a signal that this version does not know: {error}") from error
        return [(0, num_bytes)]

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        if error is not None:
            raise error
        signal = self._signals.pop(link)
        if signal is Signal.ASK:
            self._offer(link)
        elif signal in (Signal.BEGIN, Signal.LANDED):
            ring = self._rings.get(link)
            if ring is None:
                raise TransferError(f"{link.endpoint} writes without having asked for a ring")
            if signal is Signal.BEGIN:
                ring.begin(frame)
            else:
                ring.landed(Landed.parse(frame))
        elif signal in (Signal.OFFER, Signal.CREDIT):
            writer = self._writers.get(link)
            if writer is None:
                raise TransferError(f"{link.endpoint} offers a ring that nobody asked for")
            if signal is Signal.OFFER:
                writer.offered(RingOffer.parse(frame))
            else:
                writer.credited(Credit.parse(frame).slot)

    def tick(self) -> None:
        """Tell peers that this end lives while a frame waits after a write, since such a frame cannot."""
        with self._lock:
            busy = [link for link, writer in self._writers.items() if writer.is_busy]
        for link in busy:
            self._say(link, Signal.ALIVE)
        self._receiver.tick()

    def closed(self, link: Link, error: TransferError | None) -> None:
        with self._lock:
            writer = self._writers.pop(link, None)
            reason = self._reasons.pop(link, None) or error
        self._signals.pop(link, None)
        ring = self._rings.pop(link, None)
        if ring is not None:
            ring.close()
        if writer is not None:
            writer.shut(reason or TransferError(f"the link to {link.endpoint} was closed by this end"))
        self._receiver.closed(link, reason)

    def _offer(self, link: Link) -> None:
        if link in self._rings:
            raise TransferError(f"{link.endpoint} asked for a second ring")

        def credit(slot: int) -> None:
            self._say(link, Signal.CREDIT, Credit(slot).packed())

        block = self._make_block(self._slot_bytes * self._num_slots + PROBE_BYTES)
        offer = RingOffer(self._engine.name, block.address, self._slot_bytes, self._num_slots)
        self._rings[link] = RingIncoming(link, self._memory, self._receiver, block, offer, credit, digest=self._digest)
        self._say(link, Signal.OFFER, offer.packed())


def _copies_of(memory: Memory) -> DeviceCopies:
    """Return the copies of a pool on a device. Raise ConfigError for another memory."""
    copies = getattr(memory, "copies", None)
    if not isinstance(copies, DeviceCopies):
        raise ConfigError("rings on a device need a pool that lies there, and this one is in main memory")
    return copies
