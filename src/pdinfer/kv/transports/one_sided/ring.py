"""One-sided writes made safe: each peer writes into a landing ring of its own, never into pages.

    sender (RingWriter)                              receiver (Incoming)
    pages ─► send block ── one-sided write ──► ring slot ─► pages, verified there
                 └ LANDED (slot, size, digest) ──► │
                 ◄─────────────────── CREDIT (slot)┘

An engine answers a write with success, or with nothing that can be relied upon: a write that failed or took too long
may still land at any later time. But it can only land where it was sent, and that is never a page."""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable

import attrs

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Landing, Memory, take
from pdinfer.kv.transports.base import Link, Receiver, check_placed
from pdinfer.kv.transports.one_sided.block import RingBlock

PROBE_BYTES = 64
"""Room after the last slot of a ring that nobody reads. Probes, which only test whether writes arrive, go there."""
MAX_SLOTS = 1024
MAX_RING_BYTES = 1 << 40


class Signal(enum.IntEnum):
    """What the two ends of a ring say to each other."""

    ASK = 1
    """Please offer me a ring."""
    OFFER = 2
    """My ring for you, as an Offer."""
    BEGIN = 3
    """A write starts; its frame."""
    LANDED = 4
    """A part of the write is in a slot, as a Landed."""
    CREDIT = 5
    """That slot is free again, as a Credit."""
    ALIVE = 6
    """Nothing; it only keeps the link from looking dead while frames wait after a write."""


@attrs.frozen
class RingOffer:
    """A ring of `num_slots` slots at `address`, in the memory that peers know as `segment`, Mooncake's name for it.
    PROBE_BYTES follow the slots."""

    segment: str
    address: int
    slot_bytes: int
    num_slots: int

    _HEAD = struct.Struct("<QQI")

    def packed(self) -> bytes:
        return self._HEAD.pack(self.address, self.slot_bytes, self.num_slots) + self.segment.encode()

    @classmethod
    def parse(cls, data: bytes) -> RingOffer:
        """Return the offer in `data`. Raise TransferError when it does not describe a ring."""
        try:
            address, slot_bytes, num_slots = cls._HEAD.unpack_from(data)
            segment = data[cls._HEAD.size :].decode("ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise TransferError(f"a peer offered something that is not a ring: {error}") from error
        host, _, port = segment.rpartition(":")
        named = 0 < len(host) <= 255 and segment.isprintable() and " " not in host and port.isdecimal()
        sized = 1 <= num_slots <= MAX_SLOTS and 1 <= slot_bytes <= MAX_RING_BYTES // num_slots
        if not (named and sized and 0 < address <= 2**64 - PROBE_BYTES - num_slots * slot_bytes):
            raise TransferError(
                f"a peer offered {num_slots} slots of {slot_bytes} bytes at {address:#x} of {segment[:64]!r}, "
                f"which cannot be a ring"
            )
        return cls(segment, address, slot_bytes, num_slots)


@attrs.frozen
class Landed:
    """`num_bytes` of a write of `total` bytes lie in a slot. `digest` is their xxh3_64, or for memory of a device the
    number behind them, or None when the sender makes no digests."""

    total: int
    num_bytes: int
    slot: int
    digest: int | None

    _FORM = struct.Struct("<QQIBQ")

    def packed(self) -> bytes:
        return self._FORM.pack(self.total, self.num_bytes, self.slot, self.digest is not None, self.digest or 0)

    @classmethod
    def parse(cls, data: bytes) -> Landed:
        """Return the message in `data`. Raise TransferError for another size. The caller checks the numbers."""
        if len(data) != cls._FORM.size:
            raise TransferError(f"a peer reported a landed write in {len(data)} bytes, not {cls._FORM.size}")
        total, num_bytes, slot, has_digest, digest = cls._FORM.unpack(data)
        return cls(total, num_bytes, slot, digest if has_digest else None)


@attrs.frozen
class Credit:
    """A slot that may be written again."""

    slot: int

    _FORM = struct.Struct("<I")

    def packed(self) -> bytes:
        return self._FORM.pack(self.slot)

    @classmethod
    def parse(cls, data: bytes) -> Credit:
        """Return the message in `data`. Raise TransferError for another size. The caller checks whether the slot was
        lent."""
        if len(data) != cls._FORM.size:
            raise TransferError(f"a peer gave back a slot in {len(data)} bytes, not {cls._FORM.size}")
        return cls(*cls._FORM.unpack(data))


class SignalMemory:
    """The memory of the stream next to the engine: a `Signal` of value k travels as k bytes of it, whose contents mean
    nothing.

    So frames pass as they are, under the limits that the stream has for them anyway, and everything that concerns rings
    is a write, which is refused like every write until the link is trusted."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(max(Signal)))

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    block_bytes = num_bytes

    def read(self, spans: Spans) -> list[memoryview]:
        return [self._bytes[offset : offset + length] for offset, length in spans]

    def landing(self, spans: Spans) -> Landing:
        return Landing(self.read(spans))

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        raise ConfigError("the stream beside an engine runs between processes")


@attrs.define(eq=False)
class _Arriving:
    """A write that has not landed as a whole. `spans` are where the rest goes, None when the write is discarded."""

    frame: bytes
    total: int | None = None
    missing: int = 0
    spans: deque[tuple[int, int]] | None = None
    error: TransferError | None = None


@attrs.define(eq=False)
class RingIncoming:
    """The receiving direction of a link: a ring that only its peer knows (`offer`, the memory of `block`), and what
    lands in it.

    Belongs to the I/O thread. Each method raises TransferError when the link must be closed. `credit` is called with
    every slot that is free again."""

    _link: Link
    _memory: Memory
    _receiver: Receiver
    _block: RingBlock
    offer: RingOffer
    _credit: Callable[[int], None]
    _digest: bool = attrs.field(kw_only=True)
    _write: _Arriving | None = None
    _closed: bool = False

    def begin(self, frame: bytes) -> None:
        if self._write is not None:
            raise TransferError(f"{self._link.endpoint} began a write before the last one was whole")
        self._write = _Arriving(frame)

    def landed(self, part: Landed) -> None:
        """Place one part. Call the receiver's `place` before the first part and `placed` after the last."""
        write = self._write
        if write is None:
            raise TransferError(f"{self._link.endpoint} landed bytes without a write")
        if write.total is None:
            self._place(write, part.total)
            if self._closed:
                return
        self._check(write, part)
        write.missing -= part.num_bytes
        if part.num_bytes:
            if write.spans is not None:
                self._scatter(write, part, write.spans)
            self._credit(part.slot)
        if not write.missing:
            self._write = None
            if write.spans is not None:
                self._receiver.placed(self._link, write.frame, write.error)

    def _place(self, write: _Arriving, total: int) -> None:
        write.total = write.missing = total
        spans = self._receiver.place(self._link, write.frame, total)
        if self._closed or spans is None:
            return
        check_placed(self._link, spans, self._memory, total)
        write.spans = deque(spans)

    def _check(self, write: _Arriving, part: Landed) -> None:
        fits = 0 <= part.slot < self.offer.num_slots and part.num_bytes <= min(self.offer.slot_bytes, write.missing)
        if not fits or part.total != write.total or (write.missing and not part.num_bytes):
            raise TransferError(
                f"{self._link.endpoint} landed {part.num_bytes} bytes of {part.total} in slot {part.slot}; "
                f"{write.missing} of {write.total} are missing, in {self.offer.num_slots} slots of "
                f"{self.offer.slot_bytes}"
            )
        if self._digest and part.num_bytes and part.digest is None:
            raise TransferError(f"{self._link.endpoint} sends no digests; give both ends the same digest=")

    def _scatter(self, write: _Arriving, part: Landed, spans: deque[tuple[int, int]]) -> None:
        start = part.slot * self.offer.slot_bytes
        here = take(spans, part.num_bytes)
        expected = part.digest if self._digest else None
        found, landing = self._block.scatter(self._memory, here, start, expected=expected)
        if found == part.digest or not self._digest:
            landing.commit()
        else:
            write.error = TransferError(
                f"a write of {write.total} bytes from {self._link.endpoint} did not verify: "
                f"the digest of {part.num_bytes} of them is {part.digest:016x}, that of what arrived {found:016x}"
            )

    def close(self) -> None:
        """Stop placing. What lands late lands in memory that belongs to nobody. The ring is never clean, because this
        end does not know how much the peer still has under way."""
        self._closed = True
        self._block.release(clean=False)
