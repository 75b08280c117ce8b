"""Receiving ends of transports, and peers that send anything: on a socket, with descriptors, beside an engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import socket
import threading
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache

import attrs

from pdinfer.errors import TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import Memfd
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import (
    MAX_ARRIVING_BYTES,
    MAX_WAITING_BYTES,
    Budget,
    Limits,
    Link,
    Receiver,
    Transfer,
    WriteMessage,
    total_bytes,
)
from pdinfer.kv.transports.one_sided.block import NamedEngine
from pdinfer.kv.transports.one_sided.ring import RingOffer, Signal
from pdinfer.kv.transports.one_sided.transport import RingTransport
from pdinfer.kv.transports.shm.receiver import MappedPayloads
from pdinfer.kv.transports.shm.sender import REVOKED
from pdinfer.kv.transports.stream.connection import StreamConnection
from pdinfer.kv.transports.stream.framing import InlinePayloads
from tests.conformance.transport_ends import BytesMemory, MemfdMemory
from tests.forks import FAR_S
from tests.fuzz.peers import Deaf

MEMORY_BYTES = 8192
MAX_TURNS = 1000
"""More than any input of some thousand bytes can ask for."""
MAX_PIECES = 4
WAIT_S = FAR_S
SOURCE_BYTES = 4096
OUR_WRITE: Spans = [(0, 100), (200, 50)]
RING = RingOffer("peer:1", 1 << 40, 64, 2)
"""The offer of one of our peers that has behaved so far."""
RING_FRAME_HEAD = 3
Rights = tuple[int, int, "array[int]"]
"""Descriptors beside a message, as `sendmsg` takes them."""


class Host:
    """A receiver that does what frames ask it to, and notices when bytes change other than those it has granted.

    A frame "t…" makes its link trusted, and "!…" closes it from inside the call. A write "?…" is refused, "-…" gets
    less than it needs, "0…" is discarded. Any other write is placed in pieces, whose size its last byte gives.
    """

    authenticates = False

    def __init__(self, memory: BytesMemory) -> None:
        self.memory = memory
        self.close: Callable[[], None] = lambda: None
        self._known = bytes(memory.data)
        self._granted: Spans | None = None
        self._frame = b""
        self._over = False

    def opened(self, link: Link) -> None:
        self._check(None)

    def received(self, link: Link, frame: bytes) -> None:
        self._check(None)
        if frame.startswith(b"t"):
            link.trusted = True
        elif frame.startswith(b"!"):
            self.close()

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        self._check(None)
        assert link.trusted, "a write came before there was trust"
        if frame.startswith(b"?"):
            raise TransferError("no")
        if frame.startswith(b"!"):
            self.close()
        if frame.startswith((b"!", b"0")) or num_bytes > MEMORY_BYTES // 2:
            return None
        self._frame = frame
        self._granted = self._pieces(num_bytes // 2 if frame.startswith(b"-") else num_bytes, 1 + 8 * frame[-1])
        return self._granted

    def _pieces(self, num_bytes: int, size: int) -> Spans:
        """Return every other piece in the upper half, so that there is free space between them."""
        pieces = [(start, min(size, num_bytes - start)) for start in range(0, num_bytes, size)]
        return [(MEMORY_BYTES // 2 + start, length) for start, length in pieces[::2]] + pieces[1::2]

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        assert self._granted is not None, "a write was placed that had no place"
        assert frame == self._frame
        self._check(self._granted)
        self._granted = None

    def tick(self) -> None:
        pass

    def closed(self, link: Link, error: TransferError | None) -> None:
        self._check(self._granted)
        self._over = True

    def _check(self, granted: Spans | None) -> None:
        assert not self._over, "a call after the link was closed"
        now = bytearray(self.memory.data)
        self._known, known = bytes(now), self._known
        for offset, length in granted or []:
            now[offset : offset + length] = known[offset : offset + length]
        assert now == known, "bytes changed that nobody had granted"


def stream(data: bytes) -> None:
    """Bytes on a socket whose payloads travel behind their frames. In the first byte, 1 means trusted from the start, 2
    asks for digests, and the rest says how the bytes are cut."""
    flags, data = (data[0], data[1:]) if data else (0, b"")
    link = Link("tcp://peer", trusted=bool(flags & 1))
    host = Host(BytesMemory(MEMORY_BYTES))
    payloads = InlinePayloads(link, host.memory, host, digest=bool(flags & 2))
    _converse(
        host,
        link,
        lambda sock: StreamConnection(sock, link, payloads, host, _no_time, limits=_limits()),
        data,
        cut=flags >> 2,
    )


def mapped(data: bytes) -> None:
    """Bytes and descriptors on a socket whose payloads lie in shared memory. The first byte is as in `stream`. In the
    second byte, 7 says which descriptors come; 8 a write of ours is under way; 16 it is staged in a ring; 32 the peer
    takes its memory back; 64 the descriptors come with the second piece and not the first; 128 they also come with
    every later one."""
    flags, more, data = (data[0], data[1], data[2:]) if len(data) > 1 else (0, 0, b"")
    link = Link("shm://peer", trusted=bool(flags & 1))
    shown = _shown(revoked=bool(more & 32))
    memory = _own_memory()
    memory.memfd.view[:] = bytes(MEMORY_BYTES)
    host = Host(memory)
    payloads = MappedPayloads(link, memory, host, digest=bool(flags & 2), pool=None if more & 16 else memory.memfd)
    ours = Transfer(total_bytes(OUR_WRITE, memory))

    def connection(sock: socket.socket) -> StreamConnection:
        made = StreamConnection(sock, link, payloads, host, _no_time, limits=_limits())
        if more & 8:
            made.queue(WriteMessage(b"ours", ours, OUR_WRITE, None), lambda: None)
            made.transmit()
        else:
            ours.complete()
        return made

    chosen = shown.choices[more & 7]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", chosen))] if chosen else []
    first = more >> 6 & 1
    last = MAX_PIECES if more & 128 else first
    _converse(host, link, connection, data, cut=flags >> 2, rights=rights, having=range(first, last + 1))
    assert ours.done, "pages are kept for a link that is closed"


def _no_time() -> float:
    return 0.0


def _limits() -> Limits[StreamConnection]:
    """Those of a transport with this one link, which nothing crowds out."""
    return Limits(Budget(MAX_WAITING_BYTES, _no_time), Budget(MAX_ARRIVING_BYTES, _no_time), _crowded)


def _crowded(connection: StreamConnection, reason: str) -> None:
    raise AssertionError(f"one link alone had to give way: {reason}")


@attrs.frozen
class _Shown:
    """The descriptors that a peer may pass: good ones first, then too few, too many, and some of the wrong kind or
    size."""

    control: Memfd
    choices: tuple[tuple[int, ...], ...]


@cache
def _shown(*, revoked: bool) -> _Shown:
    control, source = Memfd(mmap.PAGESIZE, "control"), Memfd(SOURCE_BYTES, "source")
    source.view[:] = source_bytes()
    control.view[0] = REVOKED if revoked else 0
    good = control.readable(), source.readable()
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SOURCE_BYTES)
    larger = Memfd(MEMORY_BYTES, "larger").readable()
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    choices = (
        good,
        (),
        good[:1],
        (*good, null),
        (good[0], unsealed),
        (good[0], null),
        (null, good[1]),
        (larger, larger),
    )
    return _Shown(control, choices)


@cache
def _own_memory() -> MemfdMemory:
    return MemfdMemory(MEMORY_BYTES)


def source_bytes() -> bytes:
    """Return the bytes in the memory that a peer shows."""
    return bytes(n % 251 for n in range(SOURCE_BYTES))


def _converse(
    host: Host,
    link: Link,
    connect: Callable[[socket.socket], StreamConnection],
    data: bytes,
    *,
    cut: int,
    rights: Sequence[Rights] = (),
    having: Container[int] = (),
) -> None:
    """Let the peer send `data` in pieces, with `rights` beside those `having` them, and go. This end must then close
    the link with a TransferError, whatever it was in the middle of, and keep nothing."""
    num_open = _num_descriptors()
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        connection = connect(ours)
        host.close = lambda: _close(connection, host, TransferError("closed from inside"))
        try:
            for number, piece in enumerate(_pieces(data, cut)):
                theirs.sendmsg([piece], rights if number in having else [])
                _read(connection)
                if connection.closed:
                    break
            else:
                theirs.shutdown(socket.SHUT_WR)
                _read(connection)
            assert connection.closed, "the peer is gone and the link is not closed"
        except TransferError as error:
            _close(connection, host, error)
        finally:
            # Whatever was raised, the next input must find the descriptors that this one found.
            connection.shut(TransferError("over"))
        assert not connection.receive()
    assert _num_descriptors() <= num_open, "descriptors were left open"


def _pieces(data: bytes, cut: int) -> Iterator[bytes]:
    """Return at most MAX_PIECES pieces, so that system calls do not outnumber parsing; 0 does not cut."""
    size = max(len(data) // MAX_PIECES, cut) + 1 if cut else len(data) or 1
    return (data[start : start + size] for start in range(0, len(data), size))


def _read(connection: StreamConnection) -> None:
    """Turn by turn, as the I/O thread does, until nothing more has arrived."""
    for _ in range(MAX_TURNS):
        more = connection.receive()
        if connection.wants_turn and not connection.closed:
            connection.transmit()
        if connection.closed or not more:
            return
    raise AssertionError("no end of turns for so few bytes")


def _close(connection: StreamConnection, host: Host, error: TransferError) -> None:
    if connection.shut(error):
        host.closed(connection.link, error)


def _num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def ring(data: bytes) -> None:
    """Messages from the stream beside an engine. In the first byte, 1 asks for digests; 2 a write of ours waits for a
    ring; 4 the write has a ring and waits for slots. Messages follow, each u16 length, u8 kind (0 is a frame for the
    receiver), body."""
    flags, data = (data[0], data[1:]) if data else (0, b"")
    beside, engine = _Beside(), _Engine()
    transport = RingTransport(
        "ring", NamedEngine(engine, "here:1"), beside, slot_bytes=64, num_slots=2, digest=bool(flags & 1)
    )
    host = Host(BytesMemory(MEMORY_BYTES))
    transport.register(host.memory, host)
    link = Link("tcp://peer", trusted=True)
    host.close = lambda: transport.fence(link)
    transport.opened(link)
    ours = Transfer(0, done=True)
    error: TransferError | None = None
    with no_logged_bugs():
        try:
            if flags & 6:
                ours = transport.write(link, b"ours", OUR_WRITE)
            if flags & 4:
                _hear(transport, link, Signal.OFFER, RING.packed())
                beside.wait_for_landed(2)
            for kind, body in _messages(data):
                if beside.is_closed or beside.is_fenced:
                    break
                _hear(transport, link, kind, body)
        except TransferError as raised:
            error = raised
        finally:
            beside.lose(link, error)
            transport.close()
        for thread in threading.enumerate():
            if thread.name == "pdinfer-mooncake":
                thread.join(WAIT_S)
                assert not thread.is_alive(), "the writer outlives its link"
    assert ours.done, "pages are kept for a link that is closed"
    assert not engine.complaints, engine.complaints
    assert not engine.registered, "memory of a closed link is still open to its peer"


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) > RING_FRAME_HEAD:
        length = int.from_bytes(data[:2], "little")
        yield data[2], data[RING_FRAME_HEAD : RING_FRAME_HEAD + length] or b"\0"
        data = data[RING_FRAME_HEAD + length :]


def _hear(transport: RingTransport, link: Link, kind: int, body: bytes) -> None:
    """Report a message that has arrived, as the stream does."""
    if not kind:
        transport.received(link, body)
        return
    spans = transport.place(link, body, kind)
    assert spans == [(0, kind)]
    assert kind <= max(Signal)
    transport.placed(link, body, None)


class _Beside(Deaf):
    """The stream beside the engine, which sends nothing."""

    name = "beside"

    def __init__(self) -> None:
        self.is_closed = False
        self.is_fenced = False
        self._num_landed = 0
        self._io_thread = threading.get_ident()
        self._changed = threading.Condition()

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        self._receiver = receiver
        return ("tcp://here",)

    def write(
        self,
        link: Link,
        frame: bytes,
        source: Spans,
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        with self._changed:
            self._num_landed += source == [(0, Signal.LANDED)]
            self._changed.notify_all()
        return Transfer(0, then, done=True)

    def wait_for_landed(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_landed >= count, WAIT_S), "our write does not go on"

    def fence(self, link: Link) -> None:
        """Called from another thread, it only asks this one, which looks at `is_fenced` between two messages."""
        self.is_fenced = True
        if threading.get_ident() == self._io_thread:
            self.lose(link, None)

    def lose(self, link: Link, error: TransferError | None) -> None:
        """Lose the link, once."""
        if not self.is_closed:
            self.is_closed = True
            self._receiver.closed(link, error)


class _Engine:
    """An engine that takes every write, and rejects those that a real one could not even be given."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        self.registered.update(zip(addresses, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        for address in addresses:
            del self.registered[address]
        return 0

    def transfer_submit_write(self, segment: str, source: int, target: int, num_bytes: int) -> int:
        ours = any(start <= source and source + num_bytes <= start + size for start, size in self.registered.items())
        if not (ours and segment.isascii() and 0 < target <= target + num_bytes <= 1 << 64):
            self.complaints.append(f"a write of {num_bytes} bytes to {target:#x} of {segment!r}, from ours: {ours}")
        return next(self._numbers)

    def transfer_check_status(self, number: int) -> int:
        return 1


class _Alarm(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.records.append(record)


@contextlib.contextmanager
def no_logged_bugs() -> Iterator[None]:
    """Raise an error that was caught where it would stop a thread, and that was logged with its trace."""
    alarm = _Alarm()
    logger = logging.getLogger("pdinfer")
    logger.addHandler(alarm)
    try:
        yield
    finally:
        logger.removeHandler(alarm)
    for record in alarm.records:
        assert record.exc_info
        raise AssertionError(record.getMessage()) from record.exc_info[1]
