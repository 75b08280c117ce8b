"""One-sided writes made safe: each peer writes into a landing ring of its own, never into pages.

    sender (RingWriter)                              receiver (Incoming)
    pages ─► send block ── one-sided write ──► ring slot ─► pages, verified there
                 └ LANDED (slot, size, digest) ──► │
                 ◄─────────────────── CREDIT (slot)┘

An engine answers a write with success, or with nothing that can be relied upon: a write that failed or took too long
may still land at any later time. But it can only land where it was sent, and that is never a page.
"""

from __future__ import annotations

import enum
import mmap
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import attrs
import numpy as np
import xxhash

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Landing, Memory
from pdinfer.kv.transports.base import Link, Receiver, check_placed

PROBE_BYTES = 64
"""Room behind the last slot of a ring that nobody reads. Probes, which only test whether writes arrive, go there."""
CACHED_BYTES = 1 << 18
"""Bytes that are copied at once: a core's cache still holds them when the digest reads them."""
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
    """Nothing; it only keeps the link from looking dead while frames wait behind a write."""


@attrs.frozen
class Offer:
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
    def parse(cls, data: bytes) -> Offer:
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
    """`num_bytes` of a write of `total` bytes lie in a slot. `digest` is their xxh3_64, or None when the sender makes
    no digests."""

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
    """The memory of the stream beside the engine: a `Signal` of value k travels as k bytes of it, whose contents mean
    nothing.

    So frames pass as they are, under the limits that the stream has for them anyway, and everything that concerns rings
    is a write, which is refused like every write until the link is trusted.
    """

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


class Engine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. Addresses and sizes are plain ints, segments are names of
    peers."""

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """Return 0 when peers may write there from now on."""

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        """Return 0 when no write that starts from now on is let in. A write that is under way may go on."""

    def transfer_submit_write(self, segment: str, source: int, target: int, num_bytes: int) -> int:
        """Start a write and return its number, or 0 when it could not start."""

    def transfer_check_status(self, number: int) -> int:
        """Return 1 when the write has landed (its number is then void), 0 while it goes on, a negative number when it
        failed."""


class NamedEngine:
    """An engine, the name by which peers address its memory, and the addresses that must not be used again."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine: Engine | None = engine
        self.name = name
        self._retired: list[mmap.mmap] = []

    @property
    def retired_bytes(self) -> int:
        """Addresses, not memory, that are kept from reuse."""
        return sum(len(mapping) for mapping in self._retired)

    def retire(self, mapping: mmap.mmap) -> None:
        """Give back the memory and keep the addresses. A late write then finds pages that belong to nobody. If the
        addresses were unmapped, it would find whatever this process maps there next."""
        mapping.madvise(mmap.MADV_DONTNEED)
        self._retired.append(mapping)

    def close(self) -> None:
        """Let go of the engine; close its transports first. It ends, and its ports close, when the last call into it
        has returned. Python stands still for about a second meanwhile."""
        self.engine = None


class Block:
    """Memory that the engine may read and write. Raises TransferError when it cannot be registered."""

    def __init__(self, segment: NamedEngine, num_bytes: int) -> None:
        self._segment = segment
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = memoryview(self._mapping)
        self.address = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        engine = segment.engine
        if engine is None:
            raise TransferError("the Mooncake engine is closed; make a new transport")
        if code := engine.batch_register_memory([self.address], [num_bytes]):
            raise TransferError(
                f"the Mooncake engine did not register {num_bytes} bytes of host memory: it said {code}"
            )

    def release(self, *, clean: bool) -> None:
        """Withdraw the block from the engine. `clean` promises that no write from it or into it is under way."""
        self.bytes.release()
        if self._segment.engine is not None:
            self._segment.engine.batch_unregister_memory([self.address])
        if not clean:
            self._segment.retire(self._mapping)


def take(spans: deque[tuple[int, int]], num_bytes: int) -> Spans:
    """Remove spans of `num_bytes` in all from the front, and cut the last one. Return them."""
    taken = []
    while num_bytes:
        offset, length = spans.popleft()
        if length > num_bytes:
            spans.appendleft((offset + num_bytes, length - num_bytes))
            length = num_bytes
        taken.append((offset, length))
        num_bytes -= length
    return taken


def gather(views: Iterable[memoryview], block: memoryview, *, digest: bool) -> int | None:
    """Copy `views` one after the other into `block`. Return the xxh3_64 of what was read, if asked for."""
    total = xxhash.xxh3_64()
    for piece, view in _beside(block, views):
        piece[:] = view
        if digest:
            total.update(view)
    return total.intdigest() if digest else None


def scatter(block: memoryview, views: Iterable[memoryview], *, digest: bool) -> int | None:
    """Copy `block` into `views`. Return the xxh3_64 of what was written, if asked for: a slot that is written meanwhile
    may differ from it."""
    total = xxhash.xxh3_64()
    for piece, view in _beside(block, views):
        view[:] = piece
        if digest:
            total.update(view)
    return total.intdigest() if digest else None


def _beside(block: memoryview, views: Iterable[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield (piece of `block`, piece of a view) of at most CACHED_BYTES, for views that lie in the block one after the
    other."""
    position = 0
    for view in views:
        for start in range(0, len(view), CACHED_BYTES):
            piece = view[start : start + CACHED_BYTES]
            yield block[position : position + len(piece)], piece
            position += len(piece)


@attrs.define(eq=False)
class _Arriving:
    """A write that has not landed as a whole. `spans` are where the rest goes, None when the write is discarded."""

    frame: bytes
    total: int | None = None
    missing: int = 0
    spans: deque[tuple[int, int]] | None = None
    error: TransferError | None = None


class Incoming:
    """The receiving direction of a link: a ring that only its peer knows, and what lands in it.

    Belongs to the I/O thread. Each method raises TransferError when the link must be closed. `credit` is called with
    every slot that is free again.
    """

    def __init__(
        self,
        link: Link,
        segment: NamedEngine,
        memory: Memory,
        receiver: Receiver,
        *,
        slot_bytes: int,
        num_slots: int,
        digest: bool,
        credit: Callable[[int], None],
    ) -> None:
        self._link, self._memory, self._receiver = link, memory, receiver
        self._digest, self._credit = digest, credit
        self._block = Block(segment, slot_bytes * num_slots + PROBE_BYTES)
        self.offer = Offer(segment.name, self._block.address, slot_bytes, num_slots)
        self._write: _Arriving | None = None
        self._closed = False

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
        here = take(spans, part.num_bytes)
        landing = self._memory.landing(here)
        start = part.slot * self.offer.slot_bytes
        found = scatter(self._block.bytes[start : start + part.num_bytes], landing.views, digest=self._digest)
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
