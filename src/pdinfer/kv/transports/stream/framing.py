"""How messages lie on a byte stream: a fixed header, the frame, and for a write its payload and a digest.

    magic  version  kind  flags  frame_bytes  payload_bytes │ frame │ payload │ digest
      4       1      1      2        4             8                              8       little-endian

The digest is xxh3_64 of the header, frame and payload of a write. It is present when the header's flag DIGESTED is set.
It detects bytes that the network or a bug has changed; it proves nothing about who sent them."""

from __future__ import annotations

import enum
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import ClassVar, Protocol

import attrs
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory, in_blocks
from pdinfer.kv.transports.base import Link, Receiver, WriteMessage, check_arriving, check_placed

MAGIC = b"pdkv"
VERSION = 2
HEADER = struct.Struct("<4sBBHIQ")
DIGESTED = 1
DIGEST_BYTES = 8
IOV_MAX = 1024
AHEAD_BYTES = 1 << 14
BATCH_BYTES = 4 << 20
"""Bytes per system call, so that no link keeps the others waiting."""
DIGESTED_BATCH_BYTES = 1 << 18
"""The same for bytes that are digested: as much as a core's cache still holds when the digest reads them again."""


class MessageKind(enum.IntEnum):
    """What follows a header: a frame alone, or a frame, a payload and its digest. The other kinds belong to payloads
    that do not travel on the stream; see `kv/transports/shm/receiver.py`."""

    FRAME = 1
    WRITE = 2
    SHARE = 3
    MAPPED = 4
    SPANS = 5
    DIGEST = 6
    COPIED = 7


_KINDS = {kind.value: kind for kind in MessageKind}


@attrs.frozen
class Header:
    """The fixed start of every message, checked."""

    kind: MessageKind
    frame_bytes: int
    payload_bytes: int = 0
    digested: bool = False

    def packed(self) -> bytes:
        flags = DIGESTED if self.digested else 0
        return HEADER.pack(MAGIC, VERSION, self.kind, flags, self.frame_bytes, self.payload_bytes)

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Return the header in `data`. Raise TransferError with what is wrong. The caller checks the sizes before it
        allocates."""
        magic, version, kind, flags, frame_bytes, payload_bytes = HEADER.unpack(data)
        if magic != MAGIC:
            raise TransferError(f"not a pdinfer peer: a message starts with {MAGIC!r}, this one with {data!r}")
        if version != VERSION:
            raise TransferError(f"the peer speaks version {version} of the stream format, this end {VERSION}")
        known = _KINDS.get(kind)
        is_write = known is MessageKind.WRITE or known is MessageKind.MAPPED
        if known is None or flags & ~DIGESTED or (flags and not is_write):
            raise TransferError(f"message of unknown kind {kind}, flags {flags:#06x}")
        if payload_bytes and not is_write:
            raise TransferError(
                f"a {known.name} message announced a payload of {payload_bytes} bytes; only writes have one"
            )
        return cls(known, frame_bytes, payload_bytes, bool(flags))


def framed(kind: MessageKind, body: bytes) -> bytes:
    """Return a message that has no payload."""
    return Header(kind, len(body)).packed() + body


class Digest(Protocol):
    """A digest of what a write has carried so far."""

    def intdigest(self) -> int: ...


def digest_bytes(digest: Digest) -> bytes:
    """Return the digest as it stands on the wire."""
    return digest.intdigest().to_bytes(DIGEST_BYTES, "little")


class Buffers:
    """Host buffers that a socket empties or fills from the front, however the kernel cuts them.

    `digest`, when given, is fed every byte just after the kernel has read or written it. `descriptors` leave with the
    first byte. `weight` is how many bytes were moved to make this part. With `payload`, every byte that
    arrives shows that the peer is alive. Without it only the last byte does: a damaged length would otherwise be waited
    for as long as the peer sends anything. False when nothing is left."""

    def __init__(
        self,
        views: Iterable[memoryview] = (),
        digest: xxhash.xxh3_64 | None = None,
        *,
        descriptors: Sequence[int] = (),
        weight: int = 0,
        payload: bool = False,
    ) -> None:
        # The kernel would report a batch of empty buffers as the end of the stream.
        self._views = list(filter(len, views))
        self._ends = list(accumulate(map(len, self._views)))
        self._next = 0
        self._position = 0
        self._digest = digest
        self.descriptors = descriptors
        self.weight = weight
        self.payload = payload
        self._batch_bytes = BATCH_BYTES if digest is None else DIGESTED_BATCH_BYTES

    def __bool__(self) -> bool:
        return self._next < len(self._views)

    @property
    def num_left(self) -> int:
        return self._ends[-1] - self._position if self._ends else 0

    def fill(self, data: memoryview) -> int:
        """Fill the front with bytes that are already here. Return how many of `data` were taken."""
        count = 0
        while self and count < len(data):
            view = self._views[self._next]
            step = min(len(view), len(data) - count)
            view[:step] = data[count : count + step]
            self.advance(step)
            count += step
        return count

    def batch(self) -> tuple[list[memoryview], int]:
        """Return (buffers, bytes in them) for the next system call, within the limits for both."""
        limit = self._position + self._batch_bytes
        stop = min(bisect_left(self._ends, limit, self._next) + 1, self._next + IOV_MAX)
        batch = self._views[self._next : stop]
        end = self._ends[self._next + len(batch) - 1]
        if end > limit:
            batch[-1] = batch[-1][: limit - end]
            end = limit
        return batch, end - self._position

    def advance(self, count: int) -> None:
        """Remove `count` bytes from the front."""
        first = self._next
        self._position += count
        self._next = bisect_right(self._ends, self._position, first)
        taken = self._views[first : self._next]
        if self:
            view = self._views[self._next]
            cut = len(view) - (self._ends[self._next] - self._position)
            taken.append(view[:cut])
            self._views[self._next] = view[cut:]
        if self._digest is not None:
            for view in taken:
                self._digest.update(view)


Read = Callable[[int], Generator[Buffers, None, bytes]]
"""Gives the next bytes of a stream, as many as are asked for; see `Ahead.read`."""


class Ahead:
    """Bytes that were read beyond what was wanted, so that small messages do not take two system calls each."""

    def __init__(self) -> None:
        self.scratch = memoryview(bytearray(AHEAD_BYTES))
        self._data = self.scratch[:0]

    def __bool__(self) -> bool:
        return len(self._data) > 0

    def came(self, num_bytes: int) -> None:
        """Take note that so many bytes of `scratch` were read. The bytes there before are used up."""
        self._data = self.scratch[:num_bytes]

    def move(self, part: Buffers) -> None:
        self._data = self._data[part.fill(self._data) :]

    def read(self, num_bytes: int) -> Generator[Buffers, None, bytes]:
        """Return the next bytes of the stream. Ask the socket for them only when they are not here."""
        if num_bytes <= len(self._data):
            data, self._data = bytes(self._data[:num_bytes]), self._data[num_bytes:]
            return data
        body = bytearray(num_bytes)
        yield Buffers([memoryview(body)])
        return bytes(body)


SCRATCH_BYTES = 1 << 16


@attrs.define(eq=False)
class Payloads(ABC):
    """How the payloads of one link travel, in which transports differ, with digests or without. Called in the I/O
    thread. A TransferError closes the link. What stands below `shut` is for payloads that do not travel on the
    stream."""

    descriptor_bytes: ClassVar[int] = 0
    """Room for the descriptors that a message may carry as ancillary data."""

    _link: Link
    _memory: Memory
    _receiver: Receiver
    _digest: bool = attrs.field(kw_only=True)
    _closed: bool = attrs.field(init=False, default=False)

    @abstractmethod
    def outgoing(self, message: WriteMessage) -> Iterator[Buffers | None]:
        """Yield what goes on the wire for a write, or None while it waits for the peer. Complete the transfer."""

    @abstractmethod
    def incoming(self, header: Header, head: bytes, read: Read) -> Iterator[Buffers]:
        """Read what follows a header of any kind but a frame's. `head` is that header as it came; `read` returns short
        pieces. May yield empty buffers, so that others have their turn."""

    def shut(self, error: TransferError) -> None:
        """End with the link: place nothing from now on, and fail the transfers that have left and are not done."""
        self._closed = True

    def whole(self, message: WriteMessage) -> bytes | None:
        """Return all of a write that is small enough to leave at once, or None when it needs `outgoing`. Any thread may
        call it when nothing is before the write."""
        return None

    def urgent(self) -> Buffers | None:
        """Return what goes before everything that is queued, even between the parts of a write."""
        return None

    @property
    def wants_turn(self) -> bool:
        """Whether arrivals have made something to send."""
        return False

    def took(self, descriptors: list[int]) -> None:
        """Take over descriptors that came with what has just arrived, or before it; they are ours to close."""
        raise AssertionError("there is no room for descriptors")

    def _placed(self, header: Header, read: Read) -> Generator[Buffers, None, tuple[bytes, Spans | None]]:
        """Read the frame of a write. Return it, and where the receiver wants the payload. Raise TransferError for a
        write without a digest at an end that requires digests."""
        if self._digest and not header.digested:
            raise TransferError(
                f"{self._link.endpoint} sends writes without a digest and this end requires one: "
                f"make both transports with digest=True, or both with digest=False"
            )
        frame = yield from read(header.frame_bytes)
        spans = self._receiver.place(self._link, frame, header.payload_bytes)
        if spans is not None and not self._closed:
            check_placed(self._link, spans, self._memory, header.payload_bytes)
        return frame, spans

    def _verified(self, num_bytes: int, said: bytes, digest: Digest) -> TransferError | None:
        """Return what is wrong with a payload whose sender's digest is `said`, or None."""
        if said == digest_bytes(digest):
            return None
        return TransferError(
            f"a write of {num_bytes} bytes from {self._link.endpoint} did not verify: "
            f"its digest is {said.hex()}, that of what arrived {digest_bytes(digest).hex()}"
        )


@attrs.define(eq=False)
class InlinePayloads(Payloads):
    """Payloads that follow their frame on the same stream. They are read from our memory and placed in it as they
    pass."""

    def outgoing(self, message: WriteMessage) -> Iterator[Buffers | None]:
        if message.ready is not None:
            message.ready()
        header = Header(MessageKind.WRITE, len(message.frame), message.transfer.num_bytes, self._digest)
        head = memoryview(header.packed() + message.frame)
        digest = xxhash.xxh3_64() if self._digest else None
        before = [head]
        for part in in_blocks(message.source, self._memory):
            yield Buffers([*before, *self._memory.read(part)], digest)
            before = []
        if digest is not None:
            yield Buffers([memoryview(digest_bytes(digest))])
        message.transfer.complete()

    def incoming(self, header: Header, head: bytes, read: Read) -> Iterator[Buffers]:
        check_arriving(self._link, header.frame_bytes, is_write=True)
        if header.kind is not MessageKind.WRITE:
            raise TransferError(f"{self._link.endpoint} sent a {header.kind.name} message; it shares memory, we do not")
        frame, spans = yield from self._placed(header, read)
        if self._closed:
            return
        if spans is None:
            yield from _discard(header.payload_bytes + (DIGEST_BYTES if header.digested else 0))
            return
        digest = xxhash.xxh3_64(head + frame) if header.digested else None
        for part in in_blocks(spans, self._memory):
            landing = self._memory.landing(part)
            yield Buffers(landing.views, digest, payload=True)
            landing.commit()
        error = None
        if digest is not None:
            said = yield from read(DIGEST_BYTES)
            error = self._verified(header.payload_bytes, said, digest)
        self._receiver.placed(self._link, frame, error)


def _discard(num_bytes: int) -> Iterator[Buffers]:
    scratch = memoryview(bytearray(min(num_bytes, SCRATCH_BYTES)))
    while num_bytes:
        step = scratch[:num_bytes]
        yield Buffers([step], payload=True)
        num_bytes -= len(step)
