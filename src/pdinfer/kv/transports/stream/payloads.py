"""How the payloads of a link's writes travel: the part of a connection that transports differ in. Here, behind their
frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import attrs
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.memory import Memory, in_blocks
from pdinfer.kv.transports.base import Link, Receiver, check_arriving, check_placed
from pdinfer.kv.transports.queuing import WriteMessage
from pdinfer.kv.transports.stream.framing import DIGEST_BYTES, Buffers, Digest, Header, MessageKind, Read, digest_bytes

SCRATCH_BYTES = 1 << 16


class Payloads(Protocol):
    """How the payloads of one link travel. Called in the I/O thread. A TransferError closes the link."""

    descriptor_bytes: int
    """Room for the descriptors that a message may carry as ancillary data; 0 takes none."""

    def outgoing(self, message: WriteMessage) -> Iterator[Buffers | None]:
        """Yield what goes on the wire for a write, or None while it waits for the peer. Complete the transfer."""

    def whole(self, message: WriteMessage) -> bytes | None:
        """Return all of a write that is small enough to leave at once, or None when it needs `outgoing`. Any thread may
        call it when nothing is before the write."""

    def urgent(self) -> Buffers | None:
        """Return what goes before everything that is queued, even between the parts of a write."""

    @property
    def wants_turn(self) -> bool:
        """Whether arrivals have made something to send."""

    def took(self, descriptors: list[int]) -> None:
        """Take over descriptors that came with what has just arrived, or before it; they are ours to close."""

    def incoming(self, header: Header, head: bytes, read: Read) -> Iterator[Buffers]:
        """Read what follows a header of any kind but a frame's. `head` is that header as it came; `read` returns short
        pieces. May yield empty buffers, so that others have their turn."""

    def shut(self, error: TransferError) -> None:
        """End with the link: place nothing from now on, and fail the transfers that have left and are not done."""


@attrs.define(eq=False)
class InlinePayloads:
    """Payloads that follow their frame on the same stream. They are read from our memory and placed in it as they
    pass."""

    descriptor_bytes = 0
    wants_turn = False

    _link: Link
    _memory: Memory
    _receiver: Receiver
    _digest: bool = attrs.field(kw_only=True)
    _closed: bool = False

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

    def whole(self, message: WriteMessage) -> bytes | None:
        return None

    def urgent(self) -> Buffers | None:
        return None

    def took(self, descriptors: list[int]) -> None:
        raise AssertionError("there is no room for descriptors")

    def incoming(self, header: Header, head: bytes, read: Read) -> Iterator[Buffers]:
        """Read a write's payload to where the receiver wants it, and verify it."""
        check_arriving(self._link, header.frame_bytes, is_write=True)
        if header.kind is not MessageKind.WRITE:
            raise TransferError(f"{self._link.endpoint} sent a {header.kind.name} message; it shares memory, we do not")
        check_digested(self._link, header, required=self._digest)
        frame, num_bytes = (yield from read(header.frame_bytes)), header.payload_bytes
        spans = self._receiver.place(self._link, frame, num_bytes)
        if self._closed:
            return
        if spans is None:
            yield from _discard(num_bytes + (DIGEST_BYTES if header.digested else 0))
            return
        check_placed(self._link, spans, self._memory, num_bytes)
        digest = xxhash.xxh3_64(head + frame) if header.digested else None
        for part in in_blocks(spans, self._memory):
            landing = self._memory.landing(part)
            yield Buffers(landing.views, digest, payload=True)
            landing.commit()
        error = None
        if digest is not None:
            said = yield from read(DIGEST_BYTES)
            error = check_digest(self._link, num_bytes, said, digest)
        self._receiver.placed(self._link, frame, error)

    def shut(self, error: TransferError) -> None:
        self._closed = True


def check_digested(link: Link, header: Header, *, required: bool) -> None:
    """Raise TransferError for a write without a digest at an end that requires digests."""
    if required and not header.digested:
        raise TransferError(
            f"{link.endpoint} sends writes without a digest and this end requires one: "
            f"make both transports with digest=True, or both with digest=False"
        )


def check_digest(link: Link, num_bytes: int, said: bytes, digest: Digest) -> TransferError | None:
    """Return what is wrong with a payload whose sender's digest is `said`, or None."""
    if said == digest_bytes(digest):
        return None
    return TransferError(
        f"a write of {num_bytes} bytes from {link.endpoint} did not verify: "
        f"its digest is {said.hex()}, that of what arrived {digest_bytes(digest).hex()}"
    )


def _discard(num_bytes: int) -> Iterator[Buffers]:
    scratch = memoryview(bytearray(min(num_bytes, SCRATCH_BYTES)))
    while num_bytes:
        step = scratch[:num_bytes]
        yield Buffers([step], payload=True)
        num_bytes -= len(step)
