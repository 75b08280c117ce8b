"""One side of a simulated link: what waits to leave it, what is on its way to it, and how that arrives.

    write ─► queue ─► (source is read, faults) ─► flight ─► place ─► pieces land ─► placed        two-sided
    write ─► queue ─► (the peer's slot is written, soon or after an error) ─► flight ─► place ─► copied ─► placed

Everything here happens in events of the simulation, so a frozen node reads, places and answers nothing, and a crashed
node cleans up nothing."""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Protocol

import attrs
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Link, Receiver, Transfer, check_arriving, check_placed
from pdinfer.testing.simulation import NetworkFaults, Placement, Simulation

MAX_PIECES = 3
RESET_SHARE = 0.5
"""The chance that a closed link takes along what was still on its way, as a TCP reset does."""


class ParcelKind(enum.Enum):
    """The kind of a parcel: the news of a new link, a frame, a write, or the end of the link."""

    OPEN = enum.auto()
    FRAME = enum.auto()
    WRITE = enum.auto()
    END = enum.auto()


@attrs.define(eq=False)
class Parcel:
    """One message. `source` is in the sender's memory, `payload` is what was read there, `digest` is of both frame and
    payload."""

    kind: ParcelKind
    frame: bytes = b""
    transfer: Transfer | None = None
    source: Spans = attrs.field(factory=list)
    ready: Callable[[], None] | None = None
    payload: bytes = b""
    digest: int = 0

    @property
    def num_bytes(self) -> int:
        return 0 if self.transfer is None else self.transfer.num_bytes

    def complete(self, error: TransferError | None = None) -> None:
        if self.transfer is not None and not self.transfer.done:
            self.transfer.complete(error)


class Weather(Protocol):
    """The part of a network that ends need."""

    simulation: Simulation
    faults: NetworkFaults
    fired: Counter[str]
    refusals: list[tuple[str, TransferError]]

    def blocked(self, one: str, other: str) -> bool: ...


@attrs.define(eq=False)
class End:
    """One side of a link, on `node`. `open` lasts until the link was closed from here or its end arrived; `gone` is set
    with the process. `waiting` counts arrivals that are due and stand after a payload that is landing, or after a
    partition. `unreported` are writes whose source was read, which the sender does not know yet. `eager` is a link that
    a caller waits for: its handshake takes no time."""

    network: Weather
    node: str
    link: Link
    memory: Memory
    receiver: Receiver
    placement: Placement
    eager: bool
    open: bool = True
    gone: bool = False
    peer: End = attrs.field(init=False)
    queue: deque[Parcel] = attrs.field(factory=deque)
    unreported: list[Parcel] = attrs.field(factory=list)
    inbound: deque[Parcel] = attrs.field(factory=deque)
    waiting: int = 0
    landing: bool = False
    mangled: bool = False
    last_arrival_s: float = 0.0
    last_done_s: float = 0.0

    # -- leaving ----------------------------------------------------------------------------------------------------

    def send(self, parcel: Parcel) -> None:
        """Queue a message. On a closed link, or one that leads nowhere, it is swallowed."""
        if not self.open or self.peer is self:
            parcel.complete(TransferError(f"the link to {self.link.endpoint} is closed"))
        elif self.eager and not (self.link.trusted and self.peer.link.trusted):
            self.peer.deliver(parcel)  # a caller waits for this handshake, and nothing could wake it
        elif parcel.kind is ParcelKind.FRAME and not self.queue:
            self._fly(parcel)
        else:
            self.queue.append(parcel)
            if len(self.queue) == 1:
                self._leave_soon()

    def _chance(self, name: str, share: float) -> bool:
        happens = share > 0 and self.network.simulation.rng.random() < share
        if happens:
            self.network.fired[name] += 1
        return happens

    def _leave_soon(self) -> None:
        faults, rng = self.network.faults, self.network.simulation.rng
        delay_s = rng.random() * faults.flight_s[0]
        if self._chance("late_read", faults.late_read):
            delay_s = rng.random() * faults.late_s
        self.network.simulation.later(delay_s, self._leave, node=self.node)

    def _leave(self) -> None:
        """Let the first message of the queue leave. Its source is read now, and not before."""
        if self.gone:
            return None
        parcel = self.queue[0]
        if not self.open:
            self._pop()
            parcel.complete(TransferError(f"the link to {self.link.endpoint} was closed"))
            return None
        if parcel.ready is not None:
            try:
                parcel.ready()
            except Exception as error:  # noqa: BLE001 - the contract: it closes the link, whatever it is
                self.shut(TransferError(f"a write's source did not become ready: {error!r}"))
                return self._leave()
        if parcel.kind is ParcelKind.WRITE and self.placement is Placement.THROUGH_SLOT:
            return self._write_slot(parcel)
        if parcel.kind is ParcelKind.WRITE:
            self._read(parcel)
            self._done(parcel)
        self._pop()
        self._fly(parcel)
        return None

    def _pop(self) -> None:
        self.queue.popleft()
        if self.queue:
            self._leave_soon()

    def _read(self, parcel: Parcel) -> None:
        if not self.link.same_memory:
            parcel.payload = b"".join(self.memory.read(parcel.source))
            parcel.digest = xxhash.xxh3_64_intdigest(parcel.frame + parcel.payload)

    def _done(self, parcel: Parcel, error: TransferError | None = None) -> None:
        """Tell the sender that its memory is no longer read, in the order of the writes."""
        faults, simulation = self.network.faults, self.network.simulation
        delay_s = simulation.rng.random() * faults.late_s if self._chance("late_done", faults.late_done) else 0.0
        self.last_done_s = max(self.last_done_s, simulation.clock.now_s + delay_s)

        self.unreported.append(parcel)

        def read() -> None:
            if not self.gone:
                self.unreported.remove(parcel)
                parcel.complete(error)

        simulation.later(self.last_done_s - simulation.clock.now_s, read, node=self.node)

    def _write_slot(self, parcel: Parcel) -> None:
        """Write into the peer's slot, the one-sided way: no code of the receiver runs when the bytes land, and no code
        of ours."""
        faults, simulation = self.network.faults, self.network.simulation
        delay_s = simulation.rng.uniform(*faults.flight_s)
        error: TransferError | None = None
        if self._chance("late_landing", faults.late_landing):
            delay_s = simulation.rng.random() * faults.late_s
            error = TransferError(f"a write to {self.link.endpoint} failed; it may still land")

        def land() -> None:
            if not self.queue:
                return  # our transport was closed, and its memory is out of the NIC's reach
            self._read(parcel)
            self._pop()
            if self.open and error is None:
                self._fly(parcel)
            self._done(parcel, error)

        simulation.later(delay_s, land)
        if error is not None:
            self.shut(error)

    def _fly(self, parcel: Parcel) -> None:
        frame, payload, num_copies = parcel.frame, parcel.payload, 1
        if parcel.kind in (ParcelKind.FRAME, ParcelKind.WRITE):
            rng = self.network.simulation.rng
            frame, payload, num_copies = _mangled(parcel, self.network.faults, rng, self._chance)
        if num_copies != 1 or frame is not parcel.frame:
            self.mangled = self.peer.mangled = True
        for _ in range(num_copies):
            self._send_off(attrs.evolve(parcel, frame=frame, payload=payload))

    def _send_off(self, parcel: Parcel) -> None:
        faults, simulation, peer = self.network.faults, self.network.simulation, self.peer
        delay_s = simulation.rng.uniform(*faults.flight_s)
        if self._chance("slow", faults.slow):
            delay_s = simulation.rng.random() * faults.slow_s
        peer.last_arrival_s = max(peer.last_arrival_s, simulation.clock.now_s + delay_s)
        peer.inbound.append(parcel)
        if len(peer.inbound) > 1 and self._chance("reorder", faults.reorder):
            peer.inbound[-1], peer.inbound[-2] = peer.inbound[-2], peer.inbound[-1]
            self.mangled = peer.mangled = True
        simulation.later(peer.last_arrival_s - simulation.clock.now_s, peer.arrive, node=peer.node)

    # -- arriving ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Take note that a message is due; see `resume`."""
        self.waiting += 1
        self.resume()

    def resume(self) -> None:
        """Take what is due, in order. Take nothing while a payload is landing or a partition stands between."""
        while self.open and self.waiting and self.inbound and not self.landing:
            if self.network.blocked(self.node, self.peer.node):
                return
            self.waiting -= 1
            self.link.heard_at = self.network.simulation.clock.now_s
            self.deliver(self.inbound.popleft())

    def deliver(self, parcel: Parcel) -> None:
        """Call the receiver. A TransferError from it closes the link."""
        self.network.simulation.note(parcel.frame)
        try:
            if parcel.kind is ParcelKind.OPEN:
                self.receiver.opened(self.link)
            elif parcel.kind is ParcelKind.FRAME:
                check_arriving(self.link, len(parcel.frame), is_write=False)
                self.receiver.received(self.link, parcel.frame)
            elif parcel.kind is ParcelKind.WRITE:
                self._place(parcel)
            else:
                self.ended(TransferError(f"{self.link.endpoint} closed the connection, or died"))
        except TransferError as error:
            self._refuse(error)

    def _refuse(self, error: TransferError) -> None:
        if self.open and not self.mangled:
            self.network.refusals.append((self.node, error))
        self.shut(error)

    def _place(self, parcel: Parcel) -> None:
        check_arriving(self.link, len(parcel.frame), is_write=True)
        spans = self.receiver.place(self.link, parcel.frame, parcel.num_bytes)
        if spans is None or not self.open:
            return
        check_placed(self.link, spans, self.memory, parcel.num_bytes)
        if self.link.same_memory:
            if spans != parcel.source:
                self.memory.copy_from(spans, self.memory, parcel.source)
            self.receiver.placed(self.link, parcel.frame, None)
        else:
            self._land(parcel, spans)

    def _land(self, parcel: Parcel, spans: Spans) -> None:
        """Make the payload visible piece by piece, with other events of this node in between."""
        simulation = self.network.simulation
        pieces = 1
        if len(spans) > 1 and self._chance("pieces", self.network.faults.pieces):
            pieces = simulation.rng.randint(2, MAX_PIECES)
        borders = sorted(simulation.rng.randrange(len(spans) + 1) for _ in range(pieces - 1))
        parts = [spans[start:stop] for start, stop in itertools.pairwise([0, *borders, len(spans)])]
        self.landing = True
        by_sender = self.placement is Placement.BY_SENDER

        def land(index: int, start: int) -> None:
            if not self.open and not by_sender:
                return
            part = parts[index]
            stop = start + sum(length for _, length in part)
            self._write(part, parcel.payload[start:stop])
            self.link.heard_at = simulation.clock.now_s
            if index + 1 < len(parts):
                delay_s = simulation.rng.uniform(*self.network.faults.flight_s)
                if self._chance("slow", self.network.faults.slow):
                    delay_s = simulation.rng.random() * self.network.faults.slow_s
                simulation.later(delay_s, lambda: land(index + 1, stop), node=self.node)
                return
            self.landing = False
            if not self.open:
                return
            try:
                self._verify(parcel)
            except TransferError as error:
                self._refuse(error)
            if len(parts) > 1:
                self.resume()

        if by_sender and self._chance("late_landing", self.network.faults.late_landing):
            self.landing = False  # nothing waits for it
            simulation.later(simulation.rng.random() * self.network.faults.late_s, lambda: land(0, 0))
            self.peer.shut(TransferError(f"a write to {self.peer.link.endpoint} failed; it may still land"))
        else:
            land(0, 0)

    def _write(self, spans: Spans, payload: bytes) -> None:
        landing = self.memory.landing(spans)
        start = 0
        for view in landing.views:
            view[:] = payload[start : start + len(view)]
            start += len(view)
        landing.commit()

    def _verify(self, parcel: Parcel) -> None:
        error = None
        if xxhash.xxh3_64_intdigest(parcel.frame + parcel.payload) != parcel.digest:
            error = TransferError(f"a write of {parcel.num_bytes} bytes from {self.link.endpoint} did not verify")
        self.receiver.placed(self.link, parcel.frame, error)

    # -- the end ----------------------------------------------------------------------------------------------------

    def shut(self, error: TransferError | None) -> None:
        """Close the link from this side. The peer learns of it after what is on its way, which may be lost."""
        if not self.open:
            return
        peer = self.peer
        if self.network.simulation.rng.random() < RESET_SHARE:
            peer.inbound.clear()
        if peer.open and not self.link.same_memory:
            self._send_off(Parcel(ParcelKind.END))
        self.ended(error)
        if self.link.same_memory:  # ends of one pool learn it together: a page never has two owners
            peer.ended(TransferError(f"{peer.link.endpoint} closed the link"))

    def ended(self, error: TransferError | None) -> None:
        if not self.open:
            return
        self.open = False
        # the first is being read at this moment: `_leave` or the NIC completes it
        dropped = [self.queue.pop() for _ in range(len(self.queue) - 1)]
        for parcel in reversed(dropped):
            parcel.complete(error or TransferError(f"the link to {self.link.endpoint} was closed"))
        self.receiver.closed(self.link, error)

    def finish(self) -> None:
        """Close the link with its transport: no memory of ours is read after this."""
        self.shut(None)
        self.gone = True
        for parcel in (*self.unreported, *self.queue):
            parcel.complete(TransferError(f"the transport of the link to {self.link.endpoint} was closed"))
        self.queue.clear()

    def vanish(self) -> None:
        """End this side with its process. Its kernel informs the peer."""
        self.gone = True
        if self.open:
            self.open = False
            if self.peer.open:
                self._send_off(Parcel(ParcelKind.END))


def _mangled(
    parcel: Parcel, faults: NetworkFaults, rng: Random, happens: Callable[[str, float], bool]
) -> tuple[bytes, bytes, int]:
    """Return the frame and the payload of a message after something on the way, and how often it arrives."""
    frame, payload = parcel.frame, parcel.payload
    if happens("drop", faults.drop):
        return frame, payload, 0
    if happens("duplicate", faults.duplicate):
        return frame, payload, 2
    if happens("truncate", faults.truncate):
        return frame[: rng.randrange(1, max(2, len(frame)))], payload, 1
    if happens("flip_frame", faults.flip_frame):
        return _flipped(frame, rng.randrange(8 * len(frame))), payload, 1
    if payload and happens("flip_payload", faults.flip_payload):
        return frame, _flipped(payload, rng.randrange(8 * len(payload))), 1
    return frame, payload, 1


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
