"""How the payloads of a link's writes travel: the part of a connection that transports differ in. Here, after their
frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import ClassVar

import attrs
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory, in_blocks
from pdinfer.kv.transports.base import Link, Receiver, WriteMessage, check_arriving, check_placed
from pdinfer.kv.transports.stream.framing import DIGEST_BYTES, Buffers, Digest, Header, MessageKind, Read, digest_bytes

SCRATCH_BYTES = 1 << 16


@attrs.define(eq=False)
class Payloads(ABC):
    """How the payloads of one link travel, with digests or without. Called in the I/O thread. A TransferError closes
    the link. What stands below `shut` is for payloads that do not travel on the stream."""

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
