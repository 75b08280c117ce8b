"""One stream socket as a link: what arrives is read straight into our memory, what leaves is read straight from it.

Both directions are written as generators that yield the buffers the socket must fill or empty next, so that the code
reads in the order of the bytes while the socket stays non-blocking.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

import attrs
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.framing import DIGEST_BYTES, HEADER, Buffers, Header, Kind, digest_bytes
from pdinfer.kv.layout import Spans
from pdinfer.kv.transport import Link, Memory, Receiver, Transfer, check_arriving, total_bytes

TURN_STEPS = 16
"""System calls a link may make before others have their turn; with BATCH_BYTES, 4 MiB."""
SCRATCH_BYTES = 1 << 16


@attrs.define(eq=False)
class Message:
    """A frame on its way out, and for a write the payload behind it."""

    frame: bytes
    transfer: Transfer | None = None
    source: Spans = attrs.field(factory=list)
    ready: Callable[[], None] | None = None

    def parts(self, memory: Memory) -> Iterator[Buffers]:
        """What goes on the wire; the memory is read when the part that needs it is asked for."""
        if self.transfer is None:
            yield Buffers([memoryview(Header(Kind.FRAME, len(self.frame), 0).packed() + self.frame)])
            return
        if self.ready is not None:
            self.ready()
        head = Header(Kind.WRITE, len(self.frame), self.transfer.num_bytes).packed() + self.frame
        digest = xxhash.xxh3_64()
        yield Buffers([memoryview(head), *memory.read(self.source)], digest)
        yield Buffers([memoryview(digest_bytes(digest))])
        self.transfer.complete()


class Connection:
    """One link's socket. Only the I/O thread calls its methods, except `queue`; each raises TransferError when the
    link must be closed. `gone` is set by the transport once `closed` has been called."""

    def __init__(
        self,
        sock: socket.socket,
        link: Link,
        memory: Memory,
        receiver: Receiver,
        clock: Callable[[], float],
        *,
        accepted: bool = False,
    ) -> None:
        self.sock = sock
        self.link = link
        self.accepted = accepted
        self.gone = threading.Event()
        self.closed = False
        self._memory = memory
        self._receiver = receiver
        self._clock = clock
        self.idle_since = clock()
        self._lock = threading.Lock()
        self._queue: deque[Message] = deque()
        self._leaving: Message | None = None
        self._outgoing = self._parts()
        self._emptying = Buffers()
        self._incoming = self._messages()
        self._filling = next(self._incoming)

    def queue(self, message: Message, wake: Callable[[], None]) -> bool:
        """Puts `message` behind the others, and calls `wake` when there were none; False when the link is closed.
        Any thread."""
        with self._lock:
            if self.closed:
                return False
            idle = self._leaving is None and not self._queue
            self._queue.append(message)
        if idle:
            wake()
        return True

    def transmit(self) -> bool:
        """Sends for one turn; whether more waits."""
        for _ in range(TURN_STEPS):
            while not self._emptying:
                part = next(self._outgoing, None)
                if part is None or self.closed:
                    return False
                self._emptying = part
            try:
                self._emptying.advance(self.sock.sendmsg(self._emptying.batch()))
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                raise self._lost(error) from error
        return True

    def receive(self) -> None:
        """Receives for one turn, calling the receiver for each message that is complete."""
        for _ in range(TURN_STEPS):
            try:
                count = self.sock.recvmsg_into(self._filling.batch())[0]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise TransferError(f"{self.link.endpoint} closed the connection, or died")
            self._filling.advance(count)
            while not self._filling:
                part = next(self._incoming, None)
                if part is None:
                    return
                self._filling = part

    def shut(self, error: TransferError) -> bool:
        """Closes the socket and fails what has not left; False when that was done before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            dropped = [self._leaving, *self._queue] if self._leaving else list(self._queue)
            self._queue.clear()
        with contextlib.suppress(OSError):
            # A forked child may still hold the descriptor; the peer must see the end all the same.
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        for message in dropped:
            if message.transfer is not None and not message.transfer.done:
                message.transfer.complete(error)
        # Their views would keep the memory alive, and they refer back to us.
        self._incoming, self._outgoing = iter(()), iter(())
        self._filling, self._emptying = Buffers(), Buffers()
        return True

    def _lost(self, error: OSError) -> TransferError:
        return TransferError(f"the connection to {self.link.endpoint} was lost: {error}")

    def _parts(self) -> Iterator[Buffers | None]:
        """Every part of every message to send; None when there is nothing to send now."""
        while True:
            with self._lock:
                self._leaving = self._queue.popleft() if self._queue else None
            if self._leaving is None:
                yield None
            else:
                yield from self._leaving.parts(self._memory)

    def _messages(self) -> Iterator[Buffers]:
        """Reads messages for ever. A callback may close the link, so each is followed by a look at `closed`."""
        while not self.closed:
            self.idle_since = self._clock()
            head = bytearray(HEADER.size)
            yield Buffers([memoryview(head)])
            header = Header.parse(bytes(head))
            check_arriving(self.link, header.frame_bytes, is_write=header.kind is Kind.WRITE)
            body = bytearray(header.frame_bytes)
            yield Buffers([memoryview(body)])
            if header.kind is Kind.FRAME:
                self._receiver.received(self.link, bytes(body))
            else:
                yield from self._payload(bytes(body), header.payload_bytes, xxhash.xxh3_64(head + body))

    def _payload(self, frame: bytes, num_bytes: int, digest: xxhash.xxh3_64) -> Iterator[Buffers]:
        """Reads a write's payload to where the receiver wants it, and verifies it."""
        spans = self._receiver.place(self.link, frame, num_bytes)
        if self.closed:
            return
        if spans is None:
            yield from self._discard(num_bytes + DIGEST_BYTES)
            return
        placed = total_bytes(spans, self._memory)
        if placed != num_bytes:
            raise TransferError(f"{self.link.endpoint} sent a write of {num_bytes} bytes for {placed} bytes of ours")
        landed = self._memory.landing(spans)
        yield Buffers(landed, digest)
        trailer = bytearray(DIGEST_BYTES)
        yield Buffers([memoryview(trailer)])
        error = None
        if trailer == digest_bytes(digest):
            self._memory.commit(spans, landed)
        else:
            error = TransferError(
                f"a write of {num_bytes} bytes from {self.link.endpoint} did not verify: "
                f"its digest is {trailer.hex()}, that of what arrived {digest_bytes(digest).hex()}"
            )
        self._receiver.placed(self.link, frame, error)

    def _discard(self, num_bytes: int) -> Iterator[Buffers]:
        scratch = memoryview(bytearray(min(num_bytes, SCRATCH_BYTES)))
        while num_bytes:
            step = scratch[:num_bytes]
            yield Buffers([step])
            num_bytes -= len(step)
