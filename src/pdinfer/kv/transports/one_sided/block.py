"""Memory that a one-sided engine may read and write, on the host or on a device; the copies between it and pages."""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Protocol

import numpy as np
import xxhash
from torch import Tensor

from pdinfer.errors import TransferError
from pdinfer.kv.copies import WORD_BYTES, DeviceCopies
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Landing, Memory

ARRIVAL_S = 0.1
"""How long the last bytes of a write that has landed may be on their way between a NIC and a device: microseconds."""
CACHED_BYTES = 1 << 18
"""Bytes that are copied at once: a core's cache still holds them when the digest reads them."""


class RingEngine(Protocol):
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
    """An engine, the name by which peers address its memory, and the memory whose addresses must not be used again."""

    def __init__(self, engine: RingEngine, name: str) -> None:
        self.engine: RingEngine | None = engine
        self.name = name
        self._retired: list[mmap.mmap | Tensor] = []

    @property
    def retired_bytes(self) -> int:
        """Addresses that are kept from reuse; on the host they hold no memory."""
        return sum(map(len, self._retired))

    def retire(self, memory: mmap.mmap | Tensor) -> None:
        """Keep addresses. A late write then finds memory that belongs to nobody. If the addresses were given back, it
        would find whatever this process has there next."""
        self._retired.append(memory)

    def register(self, address: int, num_bytes: int, kind: str) -> None:
        """Let the engine read and write memory. Raise TransferError when it does not."""
        if self.engine is None:
            raise TransferError("the Mooncake engine is closed; make a new transport")
        if code := self.engine.batch_register_memory([address], [num_bytes]):
            raise TransferError(
                f"the Mooncake engine did not register {num_bytes} bytes of {kind} memory: it said {code}"
            )

    def withdraw(self, address: int) -> None:
        """Let no write into that memory start from now on."""
        if self.engine is not None:
            self.engine.batch_unregister_memory([address])

    def close(self) -> None:
        """Let go of the engine; close its transports first. It ends, and its ports close, when the last call into it
        has returned. Python stands still for about a second meanwhile."""
        self.engine = None


class RingBlock(Protocol):
    """Memory that the engine may read and write."""

    address: int

    tail_bytes: ClassVar[int]
    """The bytes behind what is gathered that a write takes along."""

    def gather(self, memory: Memory, spans: Spans, *, digest: bool) -> int | None:
        """Copy `spans` of a memory into the block, one after the other. Return a number by which their receiver knows
        them, if asked for."""

    def scatter(self, memory: Memory, spans: Spans, start: int, *, expected: int | None) -> tuple[int | None, Landing]:
        """Copy the block's bytes from `start` on to `spans` of a memory. Return the number by which they are known, if
        one is `expected`, and what is to be committed. The block may be written again when this returns."""

    def release(self, *, clean: bool) -> None:
        """Withdraw the block from the engine. `clean` promises that no write from it or into it is under way."""


MakeBlock = Callable[[int], RingBlock]
"""Makes a block of so many bytes. Raises TransferError when it cannot be registered."""


class HostBlock:
    """A block of host memory. What was gathered is known by its xxh3_64."""

    tail_bytes: ClassVar[int] = 0

    def __init__(self, segment: NamedEngine, num_bytes: int) -> None:
        self._segment = segment
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = memoryview(self._mapping)
        self.address = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        segment.register(self.address, num_bytes, "host")

    def gather(self, memory: Memory, spans: Spans, *, digest: bool) -> int | None:
        total = xxhash.xxh3_64()
        for piece, view in self._pieces(0, memory.read(spans)):
            piece[:] = view
            if digest:
                total.update(view)
        return total.intdigest() if digest else None

    def scatter(self, memory: Memory, spans: Spans, start: int, *, expected: int | None) -> tuple[int | None, Landing]:
        landing, total = memory.landing(spans), xxhash.xxh3_64()
        for piece, view in self._pieces(start, landing.views):
            view[:] = piece
            if expected is not None:
                total.update(view)  # and not the slot, which may be written meanwhile
        return total.intdigest() if expected is not None else None, landing

    def _pieces(self, position: int, views: Iterable[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield (piece of the block, piece of a view) of at most CACHED_BYTES, for views that follow each other in the
        block from `position` on."""
        for view in views:
            for start in range(0, len(view), CACHED_BYTES):
                piece = view[start : start + CACHED_BYTES]
                yield self._bytes[position : position + len(piece)], piece
                position += len(piece)

    def release(self, *, clean: bool) -> None:
        self._bytes.release()
        self._segment.withdraw(self.address)
        if not clean:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._segment.retire(self._mapping)


class DeviceBlock:
    """A block on the device of a pool, which the NIC reads and writes there. Nothing digests its bytes: they are known
    by a random number behind them. When the sender hears of a write it may be in the NIC still, and its last bytes are
    the last to reach the device, unless PCIe may reorder them."""

    tail_bytes: ClassVar[int] = WORD_BYTES

    def __init__(self, segment: NamedEngine, copies: DeviceCopies, num_bytes: int) -> None:
        self._segment, self._copies = segment, copies
        self._bytes_N = copies.lasting_block(num_bytes)
        self.address = self._bytes_N.data_ptr()
        segment.register(self.address, num_bytes, "device")

    def gather(self, memory: Memory, spans: Spans, *, digest: bool) -> int | None:
        self._copies.gather(spans, self._bytes_N)
        tail = secrets.token_bytes(self.tail_bytes)
        self._copies.store(tail, self._tail(spans, 0))
        return int.from_bytes(tail, "little")

    def scatter(self, memory: Memory, spans: Spans, start: int, *, expected: int | None) -> tuple[int | None, Landing]:
        tail_N, until = self._tail(spans, start), time.monotonic() + ARRIVAL_S
        while (found := int.from_bytes(self._copies.fetch(tail_N), "little")) != expected:
            if time.monotonic() > until:
                return found, Landing([])
        self._copies.scatter(spans, self._bytes_N[start:])
        return found, Landing([])

    def _tail(self, spans: Spans, start: int) -> Tensor:
        """Return the place behind the bytes of `spans` that lie from `start` on."""
        end = start + sum(length for _, length in spans)
        return self._bytes_N[end : end + self.tail_bytes]

    def release(self, *, clean: bool) -> None:
        self._segment.withdraw(self.address)
        if not clean:
            self._segment.retire(self._bytes_N)
