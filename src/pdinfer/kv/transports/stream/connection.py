"""One stream socket as a link: frames in order, and between them writes, whose payloads travel as `Payloads` says.

Both directions are generators that yield the buffers that the socket must fill or empty next, so the code reads in the
order of the bytes while the socket stays non-blocking."""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator

import attrs

from pdinfer.errors import TransferError
from pdinfer.kv.transports.base import Limits, Link, Message, Receiver, WriteMessage, check_arriving
from pdinfer.kv.transports.stream.endpoints import complete_dial
from pdinfer.kv.transports.stream.framing import (
    AHEAD_BYTES,
    HEADER,
    IOV_MAX,
    Ahead,
    Buffers,
    Header,
    MessageKind,
    Payloads,
    framed,
)
from pdinfer.process.locks import new_lock, open_lock

TURN_BYTES = 4 << 20
"""About how much a link may send or receive before others have their turn."""
STEP_BYTES = TURN_BYTES >> 6
"""How much of a turn a message or a system call costs, however short it is."""
DIRECT_BYTES = 1 << 16
"""Frames up to this size leave from the thread that sends them, when nothing is before them."""


@attrs.define(eq=False)
class StreamConnection:
    """One link's socket. Only the I/O thread calls its methods, except `queue`. Each method raises TransferError when
    the link must be closed. While `opening`, the socket is not connected yet. `gone` is set by the I/O thread once
    `closed` has been called. Frames that wait or arrive count in `limits`."""

    sock: socket.socket
    link: Link
    _payloads: Payloads
    _receiver: Receiver
    _clock: Callable[[], float]
    _limits: Limits[StreamConnection] = attrs.field(kw_only=True)
    opening: bool = attrs.field(default=False, kw_only=True)
    gone: threading.Event = attrs.field(factory=threading.Event)
    closed: bool = False
    num_messages: int = 0
    idle_since: float = attrs.field(init=False)
    _lock: threading.RLock = attrs.field(factory=new_lock)
    _queue: deque[Message] = attrs.field(factory=deque)
    _leaving: Message | None = None
    _rest: bytes = b""  # the rest of the queue's first message, when its start has left
    _busy: bool = False
    _outgoing: Iterator[Buffers | None] = attrs.field(init=False)
    _emptying: Buffers = attrs.field(factory=Buffers)
    _ahead: Ahead = attrs.field(factory=Ahead)
    _incoming: Iterator[Buffers] = attrs.field(init=False)
    _filling: Buffers = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.idle_since = self.link.heard_at = self._clock()
        self._outgoing, self._incoming = self._parts(), self._messages()
        self._filling = next(self._incoming)

    def queue(self, message: Message, wake: Callable[[], None]) -> bool:
        """Put `message` after the others, and call `wake` when there were none. Return False when the link is closed.
        Any thread may call it. A small message with nothing before it leaves at once, since waking the I/O thread takes
        longer than sending. When too much waits, some link is closed: this one or another."""
        with self._lock:
            if self.closed:
                return False
            idle = not self._busy and not self._queue and not self.opening
            if idle and self._leaves(message):
                return True
            self._queue.append(message)
            slowest = self._limits.waiting.take(self, message.cost_bytes)
        if idle:
            wake()
        if slowest is not None:
            self._limits.crowded(slowest, "does not read: too many bytes wait for it")
        return True

    def _leaves(self, message: Message) -> bool:
        """Send a small message from the calling thread. Return whether all of it has left."""
        if isinstance(message, WriteMessage):
            data = self._payloads.whole(message)
        else:
            data = framed(MessageKind.FRAME, message.frame) if len(message.frame) <= DIRECT_BYTES else None
        if data is None:
            return False
        sent = 0
        # Any error shows again in the I/O thread, which closes the link.
        with contextlib.suppress(OSError):
            sent = self.sock.send(data)
        self._rest = data[sent:]
        return not self._rest

    def opened(self) -> None:
        """Complete the connect of a socket that can be written to. Raise TransferError when it failed."""
        try:
            complete_dial(self.sock)
        except OSError as error:
            raise TransferError(f"cannot connect to {self.link.endpoint}: {error}") from error
        self.link.heard_at = self._clock()
        with self._lock:
            self.opening = False

    @property
    def wants_turn(self) -> bool:
        return self._payloads.wants_turn

    def transmit(self) -> bool:
        """Send for one turn. Return whether more can be sent when the socket takes it."""
        turn = TURN_BYTES
        while turn > 0:
            turn -= STEP_BYTES
            while not self._emptying:
                part = next(self._outgoing, None)
                if part is None or self.closed:
                    return False
                self._emptying = part
                turn -= part.weight
            try:
                sent = self._send(self._emptying)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                raise self._lost(error) from error
            self._emptying.advance(sent)
            turn -= sent
        return True

    def _send(self, part: Buffers) -> int:
        batch, _ = part.batch()
        if not part.descriptors:
            return self.sock.sendmsg(batch)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", part.descriptors))
        sent = self.sock.sendmsg(batch, [rights])
        part.descriptors = ()
        return sent

    def receive(self) -> bool:
        """Receive for one turn, and call the receiver for each message that is complete. Return whether more bytes that
        were read already wait for the next turn."""
        turn = TURN_BYTES
        while turn > 0:
            turn -= STEP_BYTES
            if not self._filling:
                part = next(self._incoming, None)
                if part is None or self.closed:
                    return False
                self.link.heard_at = self._clock()
                self._filling = part
                turn -= part.weight
            elif self._ahead:
                self._ahead.move(self._filling)
            else:
                try:
                    count = self._read()
                except (BlockingIOError, InterruptedError):
                    return False
                except OSError as error:
                    raise self._lost(error) from error
                turn -= count
        return bool(self._ahead) or not self._filling

    def _read(self) -> int:
        """Make one system call: fill the buffers that are wanted now and, when that is all of them, read ahead."""
        wanted, room = self._filling.batch()
        if room == self._filling.num_left and len(wanted) < IOV_MAX:
            wanted.append(self._ahead.scratch)
        count = self._read_descriptors(wanted) if self._payloads.descriptor_bytes else self.sock.recvmsg_into(wanted)[0]
        if not count:
            raise TransferError(f"{self.link.endpoint} closed the connection, or died")
        if self._filling.payload:
            self.link.heard_at = self._clock()
        self._filling.advance(min(count, room))
        self._ahead.came(max(0, count - room))
        return count

    def _read_descriptors(self, wanted: list[memoryview]) -> int:
        room = self._payloads.descriptor_bytes
        count, ancillary, flags, _ = self.sock.recvmsg_into(wanted, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._payloads.took(list(descriptors))
        if flags & socket.MSG_CTRUNC:
            raise TransferError(f"{self.link.endpoint} sent more descriptors than any message has")
        return count

    def let_go(self) -> None:
        """Open its lock if the calling thread holds it."""
        open_lock(self._lock)

    def shut(self, error: TransferError) -> bool:
        """Close the socket and fail what has not left. Return False when that was done before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            dropped = [self._leaving, *self._queue] if self._leaving else list(self._queue)
            self._queue.clear()
        self._limits.waiting.drop(self)
        self._limits.arriving.drop(self)
        with contextlib.suppress(OSError):
            # A forked child may still hold the descriptor; the peer must see the end all the same.
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        # Their views would keep the memory alive, and they refer back to us.
        self._incoming, self._outgoing = iter(()), iter(())
        self._filling, self._emptying = Buffers(), Buffers()
        self._payloads.shut(error)
        for message in dropped:
            if isinstance(message, WriteMessage) and not message.transfer.done:
                message.transfer.complete(error)
        return True

    def _lost(self, error: OSError) -> TransferError:
        return TransferError(f"the connection to {self.link.endpoint} was lost: {error}")

    def _parts(self) -> Iterator[Buffers | None]:
        """Yield every part of every message to send, or None when there is nothing to send now."""
        while True:
            with self._lock:
                if self._leaving is not None:
                    self._limits.waiting.give(self, self._leaving.cost_bytes)
                urgent = None if self._rest else self._payloads.urgent()  # not inside a message whose start has left
                message = self._leaving = self._queue.popleft() if self._queue and not urgent else None
                self._busy = urgent is not None or message is not None
                rest, self._rest = (b"", self._rest) if message is None else (self._rest, b"")
            if message is None:
                yield urgent
            elif rest or not isinstance(message, WriteMessage):
                yield Buffers([memoryview(rest or framed(MessageKind.FRAME, message.frame))])
            else:
                for part in self._payloads.outgoing(message):
                    if urgent := self._payloads.urgent():
                        yield urgent
                    yield part

    def _messages(self) -> Iterator[Buffers]:
        """Read messages for ever. A callback may close the link, so `closed` is checked after each message, and an
        empty part is yielded so that others have their turn."""
        while not self.closed:
            self.idle_since = self._clock()
            head = yield from self._ahead.read(HEADER.size)
            header = Header.parse(head)
            if header.kind is MessageKind.FRAME:
                check_arriving(self.link, header.frame_bytes, is_write=False)
                frame = yield from self._read_bytes(header.frame_bytes)
                self._receiver.received(self.link, frame)
            else:
                yield from self._payloads.incoming(header, head, self._read_bytes)
            self.num_messages += 1
            yield Buffers()

    def _read_bytes(self, num_bytes: int) -> Generator[Buffers, None, bytes]:
        """Read as `Ahead.read` does. A long message counts in the limits while only a part of it is here."""
        if num_bytes <= AHEAD_BYTES:
            return (yield from self._ahead.read(num_bytes))
        slowest = self._limits.arriving.take(self, num_bytes)
        if slowest is not None:
            self._limits.crowded(slowest, "sent a part of a frame, and so have too many others")
        data = yield from self._ahead.read(num_bytes)
        self._limits.arriving.give(self, num_bytes)
        return data
