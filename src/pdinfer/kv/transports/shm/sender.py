"""The sender's half of payloads through shared memory: it names pieces of a memfd, and waits until they are copied.

Only its own process writes a pool, and a receiver copies at its own pace. A receiver that was stopped in the middle of
a copy may go on after this end has closed the link and its pages hold something else. So before this end lets go of any
page, it writes REVOKED to its control page. A receiver counts a copy only when REVOKED is not there after the copy."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import attrs
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.fused import FusedDigest, loops_for
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import Memfd
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Transfer, WriteMessage
from pdinfer.kv.transports.stream.framing import Buffers, Digest, Header, MessageKind, digest_bytes, framed

RING_BYTES = 8 << 20
STAGED_SECTION_BYTES = 2 << 20
"""The part of a payload that is staged and named at once, so that a ring holds several."""
DIGESTED_SECTION_BYTES = 4 << 20, 8 << 20
"""The part that is named at once when it is digested where it lies, at first and at most. The sender digests a section
while the receiver copies the one before; each is twice as long, since each costs both ends the same time besides."""
SECTION_BYTES = 16 << 20
"""The same without a digest, or while the receiver still has a first section to copy. It is the most that a receiver
accepts."""
SECTION_SPANS = 4096
PIECE_BYTES = 72 << 10
"""Bytes that are copied and digested at once: still in the core's cache, and below the size from which xxhash releases
the interpreter lock, which a busy host gives back 5 ms later."""
COUNT = struct.Struct("<Q")
REVOKED = 1
DIRECT_BYTES = 1 << 16
DIRECT_SPANS = 256
"""The largest write that is digested and named in the thread that writes; that takes some 20 us."""


@attrs.define(eq=False)
class Lender:
    """What one link's peer may read. `pool` is the memfd that holds `memory`. Without one, payloads are staged in a
    ring of RING_BYTES, where they wait for a slow receiver. Used in the I/O thread, except for `whole`."""

    _memory: Memory
    _pool: Memfd | None
    _digest: bool = attrs.field(kw_only=True)
    _ring: Memfd | None = None
    _control: Memfd | None = None
    _revoked: bool = False
    # Bytes over the life of the link: of writes begun, of those named to the peer, of those it has copied.
    _begun: int = 0
    _named: int = 0
    _copied: int = 0
    _awaited: int = 0
    _outstanding: deque[tuple[int, Transfer]] = attrs.field(factory=deque)

    @property
    def can_go_on(self) -> bool:
        """Whether a payload waits for room in the ring and there is room now."""
        return 0 < self._awaited <= RING_BYTES - (self._named - self._copied)

    def parts(self, message: WriteMessage) -> Iterator[Buffers | None]:
        if message.ready is not None:
            message.ready()
        if self._revoked:
            return
        if self._control is None:
            yield from self._offer()
        costs = self._digest or self._ring is not None
        for named in self._naming(message):
            yield named and Buffers([memoryview(named[0])], weight=named[1] if costs else 0)

    def whole(self, message: WriteMessage) -> bytes | None:
        """Return a small write in one piece, once the peer knows our pool. Any thread may call it while `parts` is not
        running."""
        small = 0 < message.transfer.num_bytes <= DIRECT_BYTES and len(message.source) <= DIRECT_SPANS
        if not small or message.ready or self._pool is None or self._control is None:
            return None
        return b"".join(named[0] for named in self._naming(message) if named)

    def _naming(self, message: WriteMessage) -> Iterator[tuple[bytes, int] | None]:
        """Yield (messages that name a section, bytes in it), one section after the other, or None while the ring is
        full."""
        total_bytes = message.transfer.num_bytes
        self._begun += total_bytes
        self._outstanding.append((self._begun, message.transfer))
        header = Header(MessageKind.MAPPED, len(message.frame), total_bytes, self._digest)
        start = header.packed() + message.frame
        digest = self._new_digest(start, total_bytes)
        part = [start]
        costs = self._digest or self._ring is not None
        for section, num_bytes in _sections(message.source, *self._section_bytes()):
            spans, views = packed_spans(section), list[memoryview]()
            if isinstance(digest, FusedDigest) and self._pool is not None:
                digest.read(self._pool.address, spans)
            elif costs:
                views = self._memory.read(section)
            if isinstance(digest, xxhash.xxh3_64):
                feed(digest, views)
            if self._ring is not None:
                self._awaited = num_bytes
                while not self.can_go_on:
                    yield None
                self._awaited = 0
                spans = packed_spans(self._staged(self._ring, views, num_bytes))
            self._named += num_bytes
            part.append(framed(MessageKind.SPANS, spans))
            if self._named == self._begun:
                part.append(_trailer(digest))
            yield b"".join(part), num_bytes
            part = []
        if not total_bytes:
            yield start + _trailer(digest), 0
            self._settle()

    def _section_bytes(self) -> tuple[int, int]:
        if self._ring is not None:
            return STAGED_SECTION_BYTES, STAGED_SECTION_BYTES
        is_waited_for = self._named - self._copied < DIGESTED_SECTION_BYTES[0]
        return DIGESTED_SECTION_BYTES if self._digest and is_waited_for else (SECTION_BYTES, SECTION_BYTES)

    def _new_digest(self, start: bytes, num_bytes: int) -> xxhash.xxh3_64 | FusedDigest | None:
        if not self._digest:
            return None
        loops = None if self._pool is None else loops_for(num_bytes)
        return xxhash.xxh3_64(start) if loops is None else FusedDigest(loops, start)

    def _offer(self) -> Iterator[Buffers]:
        """Show the peer our control page and source."""
        self._control = Memfd(mmap.PAGESIZE, "control")
        if self._pool is None:
            self._ring = Memfd(RING_BYTES, "ring")
        source = self._pool or self._ring
        assert source is not None
        with contextlib.ExitStack() as opened:
            descriptors = []
            for memfd in (self._control, source):
                descriptors.append(memfd.readable())
                opened.callback(os.close, descriptors[-1])
            size = framed(MessageKind.SHARE, COUNT.pack(source.num_bytes))
            yield Buffers([memoryview(size)], descriptors=descriptors)

    def _staged(self, ring: Memfd, views: Sequence[memoryview], num_bytes: int) -> Spans:
        """Copy a section to the next place in the ring. Return that place."""
        start = self._named % RING_BYTES
        position = start
        for view in views:
            while len(view):
                step = min(len(view), RING_BYTES - position)
                ring.view[position : position + step] = view[:step]
                view = view[step:]
                position = (position + step) % RING_BYTES
        first = min(num_bytes, RING_BYTES - start)
        return [(start, first), (0, num_bytes - first)] if num_bytes > first else [(start, first)]

    def copied(self, total: int) -> None:
        """Take note that the peer has copied `total` bytes since the link was opened. Raise TransferError when it
        cannot have."""
        if not self._copied <= total <= self._named:
            raise TransferError(f"a peer says that it copied {total} bytes, after {self._copied} of {self._named}")
        self._copied = total
        self._settle()

    def _settle(self) -> None:
        while self._outstanding and self._outstanding[0][0] <= self._copied:
            self._outstanding.popleft()[1].complete()

    def revoke(self, error: TransferError) -> None:
        """Forbid the peer to use what it has not copied yet, then give up the memory that it was shown."""
        self._revoked = True
        if self._control is not None:
            self._control.view[0] = REVOKED
        while self._outstanding:
            self._outstanding.popleft()[1].complete(error)
        for memfd in (self._control, self._ring):
            if memfd is not None:
                memfd.close()


def _trailer(digest: Digest | None) -> bytes:
    """Return the message after the last section of a write, none without a digest."""
    return b"" if digest is None else framed(MessageKind.DIGEST, digest_bytes(digest))


def feed(digest: xxhash.xxh3_64, views: Sequence[memoryview]) -> None:
    """Digest `views` in pieces that keep the interpreter lock."""
    for view in views:
        for start in range(0, len(view), PIECE_BYTES):
            digest.update(view[start : start + PIECE_BYTES])


def packed_spans(spans: Spans) -> bytes:
    """Return offsets and lengths in turn, 8 bytes each."""
    return struct.pack(f"<{2 * len(spans)}Q", *chain.from_iterable(spans))


def _sections(source: Spans, limit: int, most: int) -> Iterator[tuple[Spans, int]]:
    """Yield (spans, bytes) of at most `limit` bytes and SECTION_SPANS spans. The limit doubles from section to section,
    up to `most`. A span that fits into a section is not cut."""
    section: Spans = []
    size = 0
    for offset, length in source:
        if section and (size + length > limit or len(section) == SECTION_SPANS):
            yield section, size
            section, size, limit = [], 0, min(2 * limit, most)
        while length > limit:
            yield [(offset, limit)], limit
            offset, length, limit = offset + limit, length - limit, min(2 * limit, most)
        if length:
            section.append((offset, length))
            size += length
    if section:
        yield section, size
