"""Payloads that stay where they are: the sender says which bytes of a shared memfd they are, and the receiver copies.

The messages on the control stream:

    SHARE   size, and two descriptors: the sender's control page and its source, the pool itself or a ring     once
    MAPPED  frame, size of the payload   ──► receiver.place
    SPANS   pieces of the source         ──► the receiver's I/O thread copies them        until the size is reached
    DIGEST  of header, frame and payload                                                  when the sender digests
                                         ◄── COPIED: how many bytes of this link, so far, are no longer needed
"""

from __future__ import annotations

import mmap
import operator
import os
import socket
import struct
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import attrs
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.fused import SPAN_BYTES, FusedCopy, FusedDigest, loops_for
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import Memfd, PeerMemfd
from pdinfer.kv.memory import Memory, in_blocks
from pdinfer.kv.transports.base import WriteMessage, check_arriving
from pdinfer.kv.transports.shm.sender import COUNT, PIECE_BYTES, REVOKED, SECTION_BYTES, Lender, packed_spans
from pdinfer.kv.transports.stream.framing import (
    DIGEST_BYTES,
    HEADER,
    Buffers,
    Header,
    MessageKind,
    Payloads,
    Read,
    framed,
)
from pdinfer.process.locks import new_lock

NUM_DESCRIPTORS = 2
COPY_SPEED = 4
"""How much faster a copy is than a socket: the divisor of what a copy costs of a link's turn."""


@attrs.define(eq=False)
class MappedPayloads(Payloads):
    """One link's payloads through shared memory. `pool` is the memfd that holds `memory`, if one does."""

    descriptor_bytes: ClassVar[int] = socket.CMSG_SPACE(NUM_DESCRIPTORS * struct.calcsize("i"))

    _pool: Memfd | None = attrs.field(kw_only=True)
    _lender: Lender = attrs.field(init=False)
    _descriptors: list[int] = attrs.field(factory=list)
    _control: PeerMemfd | None = None
    _source: PeerMemfd | None = None
    _copied: int = 0
    _told: int = 0
    _tells: bool = False
    _order: threading.RLock = attrs.field(factory=new_lock)

    @_lender.default
    def _lend(self) -> Lender:
        return Lender(self._memory, self._pool, digest=self._digest)

    def outgoing(self, message: WriteMessage) -> Iterator[Buffers | None]:
        return self._lender.parts(message)

    def whole(self, message: WriteMessage) -> bytes | None:
        return self._lender.whole(message)

    def urgent(self) -> Buffers | None:
        if not self._tells:
            return None
        self._tells = False
        self._told = self._copied
        return Buffers([memoryview(framed(MessageKind.COPIED, COUNT.pack(self._copied)))])

    @property
    def wants_turn(self) -> bool:
        return self._tells or self._lender.can_go_on

    def took(self, descriptors: list[int]) -> None:
        self._descriptors += descriptors
        if len(self._descriptors) > NUM_DESCRIPTORS:
            raise TransferError(f"{self._link.endpoint} sent descriptors that nothing asked for")

    def incoming(self, header: Header, head: bytes, read: Read) -> Iterator[Buffers]:
        check_arriving(self._link, header.frame_bytes, is_write=True)
        match header.kind:
            case MessageKind.SHARE:
                yield from self._shared(header, read)
            case MessageKind.COPIED:
                yield from self._told_copied(header, read)
            case MessageKind.MAPPED:
                yield from self._write(header, head, read)
            case kind:
                raise TransferError(f"{self._link.endpoint} sent a {kind.name} message where none belongs")

    def shut(self, error: TransferError) -> None:
        super().shut(error)
        self._lender.revoke(error)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        for memfd in (self._control, self._source):
            if memfd is not None:
                memfd.close()

    def _shared(self, header: Header, read: Read) -> Iterator[Buffers]:
        size = yield from _body(header, COUNT.size, read)
        if self._source is not None or len(self._descriptors) != NUM_DESCRIPTORS:
            raise TransferError(f"{self._link.endpoint} shared memory twice, or without its descriptors")
        control, source = self._descriptors
        self._descriptors = [source]
        self._control = PeerMemfd(control, mmap.PAGESIZE)
        self._descriptors = []
        self._source = PeerMemfd(source, *COUNT.unpack(size))

    def _told_copied(self, header: Header, read: Read) -> Iterator[Buffers]:
        body = yield from _body(header, COUNT.size, read)
        self._lender.copied(*COUNT.unpack(body))

    def _write(self, header: Header, head: bytes, read: Read) -> Iterator[Buffers]:
        """Copy a payload to where the receiver wants it, and verify it."""
        if self._source is None:
            raise TransferError(f"{self._link.endpoint} sent a write and has shared no memory")
        num_bytes = header.payload_bytes
        frame, spans = yield from self._placed(header, read)
        if self._closed:
            return
        targets = None if spans is None else self._targets(spans, head + frame if header.digested else None, num_bytes)
        missing = num_bytes
        while missing:
            section = yield from self._section(self._source, missing, read)
            if targets is not None:
                targets.copy(self._source, section)
            missing -= section.num_bytes
            self._copied += section.num_bytes
            # A ring must not run dry. A pool's pages are not waited for before the write is over.
            self._tells |= not missing or self._copied - self._told >= self._source.num_bytes // 4
            yield Buffers(weight=section.num_bytes // COPY_SPEED)
        said = (yield from self._next(MessageKind.DIGEST, read, DIGEST_BYTES)) if header.digested else b""
        if targets is None:
            return
        self._check_revoked()
        error = None if targets.digest is None else self._verified(num_bytes, said, targets.digest)
        if error is None:
            targets.commit()
        self._receiver.placed(self._link, frame, error)

    def _targets(self, spans: Spans, start: bytes | None, num_bytes: int) -> _Targets | _FusedTargets:
        """Return where a payload goes. It is digested after `start`, unless that is None."""
        loops = None if self._pool is None else loops_for(num_bytes)
        if loops is None or self._pool is None:
            return _Targets(spans, self._memory, None if start is None else xxhash.xxh3_64(start))
        digest = None if start is None else FusedDigest(loops, start)
        return _FusedTargets(FusedCopy(loops, self._pool.address, packed_spans(spans), digest), digest)

    def _section(self, source: PeerMemfd, missing: int, read: Read) -> Generator[Buffers, None, _Section]:
        """Return the next pieces, all of which lie in `source`."""
        body = yield from self._next(MessageKind.SPANS, read)
        if len(body) % SPAN_BYTES:
            raise TransferError(f"{self._link.endpoint} sent spans of {len(body)} bytes; each has {SPAN_BYTES}")
        numbers = struct.unpack(f"<{len(body) // 8}Q", body)
        offsets, lengths = numbers[::2], numbers[1::2]
        size = sum(lengths)
        if not 0 < size <= min(missing, SECTION_BYTES):
            raise TransferError(
                f"{self._link.endpoint} names {size} bytes at once; {missing} are missing, the limit is {SECTION_BYTES}"
            )
        if (
            max(offsets) > source.num_bytes - max(lengths)
            and max(map(operator.add, offsets, lengths)) > source.num_bytes
        ):
            raise TransferError(f"{self._link.endpoint} names bytes outside its memory of {source.num_bytes} bytes")
        return _Section(body, offsets, lengths, size)

    def _next(self, kind: MessageKind, read: Read, num_bytes: int | None = None) -> Generator[Buffers, None, bytes]:
        """Return the body of the next message, which must be of this kind. The peer's COPIED may come between."""
        while True:
            header = Header.parse((yield from read(HEADER.size)))
            check_arriving(self._link, header.frame_bytes, is_write=True)
            if header.kind is kind:
                return (yield from _body(header, num_bytes or header.frame_bytes, read))
            if header.kind is not MessageKind.COPIED:
                raise TransferError(f"{self._link.endpoint} sent {header.kind.name} inside a write, not {kind.name}")
            yield from self._told_copied(header, read)

    def _check_revoked(self) -> None:
        """Raise TransferError when the peer may have reused what we copied."""
        # Where loads may overtake each other (ARM), the copies must be over before the page is read: two pairs of
        # acquire and release keep everything before the first release ahead of everything after the last acquire.
        for _ in range(2):
            with self._order:
                pass
        if self._control is None or self._control.view[0] == REVOKED:
            raise TransferError(f"{self._link.endpoint} closed the link while its memory was being copied")


@attrs.frozen(eq=False)
class _Section:
    """Pieces of the peer's memory, `num_bytes` in all, as they came and as numbers."""

    spans: bytes
    offsets: Sequence[int]
    lengths: Sequence[int]
    num_bytes: int


@attrs.frozen(eq=False)
class _FusedTargets:
    """Where a payload goes in memory that is known by its address."""

    _copies: FusedCopy
    digest: FusedDigest | None

    def copy(self, source: PeerMemfd, section: _Section) -> None:
        self._copies.take(source.address, section.spans)

    def commit(self) -> None:
        """Do nothing: what was written is in the memory."""


class _Targets:
    """Where a payload goes, piece by piece. What was copied is digested while the core's cache holds it."""

    def __init__(self, spans: Spans, memory: Memory, digest: xxhash.xxh3_64 | None) -> None:
        self._landings = (memory.landing(part) for part in in_blocks(spans, memory))
        self._landing = next(self._landings)
        self._next = 0
        self._rest = memoryview(b"")
        self.digest = digest

    def copy(self, source: PeerMemfd, section: _Section) -> None:
        """Copy the pieces with plain slices, which keep the interpreter lock: given back to a busy host, it would be
        gone for 5 ms each time."""
        offsets, lengths = section.offsets, section.lengths
        alike = self._landing.views[self._next : self._next + len(lengths)]
        if self._rest or max(lengths) > PIECE_BYTES or lengths != tuple(map(len, alike)):
            self._copy_cut(source.view, offsets, lengths)
            return
        self._next += len(lengths)
        update = None if self.digest is None else self.digest.update
        for piece, offset, length in zip(alike, offsets, lengths, strict=True):
            piece[:] = source.view[offset : offset + length]
            if update is not None:
                update(piece)

    def _copy_cut(self, source: memoryview, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy pieces that are long, or that are cut differently from their targets."""
        rest = self._rest
        for offset, length in zip(offsets, lengths, strict=True):
            end = offset + length
            while offset < end:
                while not rest:
                    rest = self._view()
                step = min(end - offset, len(rest), PIECE_BYTES)
                piece, rest = rest[:step], rest[step:]
                piece[:] = source[offset : offset + step]
                if self.digest is not None:
                    self.digest.update(piece)
                offset += step
        self._rest = rest

    def _view(self) -> memoryview:
        if self._next == len(self._landing.views):
            self._landing.commit()
            self._landing, self._next = next(self._landings), 0
        self._next += 1
        return self._landing.views[self._next - 1]

    def commit(self) -> None:
        """Commit what is not committed yet, once all is filled."""
        self._landing.commit()


def _body(header: Header, num_bytes: int, read: Read) -> Generator[Buffers, None, bytes]:
    """Read what follows a header, which can have only one size."""
    if header.frame_bytes != num_bytes:
        raise TransferError(f"a {header.kind.name} message has {num_bytes} bytes, not {header.frame_bytes}")
    return (yield from read(num_bytes))
