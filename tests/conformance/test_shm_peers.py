"""What a hostile peer may do over shared memory: name bytes that it does not have, share memory that shrinks, or
lie."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import CAN_SHARE, Memfd
from pdinfer.kv.transports.shm.sender import COUNT, REVOKED, SECTION_BYTES
from pdinfer.kv.transports.shm.transport import SCHEME
from pdinfer.kv.transports.stream.framing import Header, MessageKind, digest_bytes
from tests.conformance.shm_ends import KIB, check_no_more_than, num_descriptors, num_maps, opened_ends
from tests.conformance.transport_ends import End, finished
from tests.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="shared memory needs Linux")


@pytest.fixture
def open_end() -> Iterator[Callable[..., End]]:
    with opened_ends() as make:
        yield make


class Peer:
    """The sending side of a link, byte by byte."""

    def __init__(self, end: End, num_bytes: int = 4 * KIB) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(end.endpoints[0].removeprefix(SCHEME))
        self.control = Memfd(mmap.PAGESIZE, "control")
        self.source = Memfd(num_bytes, "source")
        self.source.view[:] = bytes(n % 251 for n in range(num_bytes))

    def share(self, descriptors: Sequence[int] | None = None, num_bytes: int | None = None) -> None:
        message = Header(MessageKind.SHARE, COUNT.size).packed() + COUNT.pack(
            self.source.num_bytes if num_bytes is None else num_bytes
        )
        opened = [self.control.readable(), self.source.readable()]
        passed = opened if descriptors is None else descriptors
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        self.sock.sendmsg([message], rights)
        for descriptor in opened:
            os.close(descriptor)

    def write(self, spans: Spans, *, num_bytes: int | None = None, digest: bool = True, flip: int = 0) -> None:
        """Send one write that names `spans`. `flip` changes its digest."""
        size = sum(length for _, length in spans) if num_bytes is None else num_bytes
        start = Header(MessageKind.MAPPED, 1, size, digest).packed() + b"w"
        self.sock.sendall(start + spans_of(spans))
        if digest:
            found = xxhash.xxh3_64(start)
            for offset, length in spans:
                found.update(self.source.view[offset : offset + length])
            said = bytearray(digest_bytes(found))
            said[0] ^= flip
            self.sock.sendall(Header(MessageKind.DIGEST, 8).packed() + said)

    def close(self) -> None:
        self.sock.close()
        self.control.close()
        self.source.close()

    def cut(self) -> bool:
        """Whether the other end has closed the connection, within the timeout."""
        try:
            while self.sock.recv(1000):
                pass
        except ConnectionError:
            pass
        return True

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spans_of(spans: Spans) -> bytes:
    body = b"".join(struct.pack("<QQ", offset % 2**64, length % 2**64) for offset, length in spans)
    return Header(MessageKind.SPANS, len(body)).packed() + body


def test_a_peer_by_hand_is_understood(open_end: Callable[..., End]) -> None:
    """Show that the hostile peers below are refused for what they do, not for being made by hand."""
    end = open_end()
    with Peer(end) as peer:
        peer.share()
        peer.write([(100, 50), (0, 7), (4000, 96)])
        assert end.receiver.wait("placed")[0].error is None
        source = bytes(peer.source.view)
        assert bytes(end.memory.data[:153]) == source[100:150] + source[:7] + source[4000:]
        answer = peer.sock.recv(100)
        assert answer == Header(MessageKind.COPIED, COUNT.size).packed() + COUNT.pack(153)
        peer.write([(0, 10)], flip=1)
        assert "did not verify" in str(end.receiver.wait("placed", 2)[1].error)
        peer.write([(0, 10)])
        assert end.receiver.wait("placed", 3)[2].error is None


SIZE = 4 * KIB
HOSTILE_SPANS: dict[str, tuple[Spans, int | None]] = {
    "past the end": ([(SIZE - 4, 5)], None),
    "starts at the end": ([(SIZE, 1)], None),
    "far away": ([(2**63, 8)], None),
    "wraps around 64 bits": ([(2**64 - 4, 8)], None),
    "negative length": ([(0, 100), (0, -92)], 8),
    "huge length": ([(0, 2**64 - 1)], 8),
    "more than announced": ([(0, 9)], 8),
    "one bad among good": ([(0, 8)] * 50 + [(SIZE, 8)], None),
    "nothing": ([], 8),
    "only empty ones": ([(0, 0), (5, 0)], 8),
}


@pytest.mark.parametrize("name", HOSTILE_SPANS)
def test_spans_outside_what_was_shared_are_refused(open_end: Callable[..., End], name: str) -> None:
    end = open_end()
    spans, num_bytes = HOSTILE_SPANS[name]
    with Peer(end) as peer:
        peer.share()
        size = sum(length for _, length in spans) if num_bytes is None else num_bytes
        peer.sock.sendall(Header(MessageKind.MAPPED, 1, size, digested=True).packed() + b"w" + spans_of(spans))
        assert peer.cut()
    assert isinstance(end.receiver.wait("closed")[0].error, TransferError)
    assert not end.receiver.of("placed")
    assert not any(end.memory.data)


def test_a_section_is_bounded(open_end: Callable[..., End]) -> None:
    """However large the write is, others must have their turns in between."""
    end = open_end(num_bytes=2 * SECTION_BYTES)
    with Peer(end, SECTION_BYTES + 1) as peer:
        peer.share()
        peer.write([(0, SECTION_BYTES + 1)], digest=False, num_bytes=2 * SECTION_BYTES)
        assert peer.cut()


def test_memory_that_is_not_what_it_says_is_not_mapped(open_end: Callable[..., End], tmp_path: Path) -> None:
    def unsealed() -> int:
        descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SIZE)
        return descriptor

    def a_file() -> int:
        path = tmp_path / "file"
        path.write_bytes(bytes(SIZE))
        return os.open(path, os.O_RDONLY)

    def growing() -> int:
        descriptor = unsealed()
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        return descriptor

    end = open_end()
    before, maps = num_descriptors(), num_maps()
    cases: list[tuple[Callable[[], int] | None, int, str]] = [
        (unsealed, SIZE, "not sealed"),
        (growing, SIZE, "not sealed"),
        (a_file, SIZE, "cannot be mapped"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), SIZE, "cannot be mapped"),
        (None, SIZE + 1, "has 4096 bytes"),
        (None, SIZE - 1, "has 4096 bytes"),
        (None, 0, "has 4096 bytes"),
        (None, 2**64 - 1, "has 4096 bytes"),
    ]
    for count, (make, num_bytes, reason) in enumerate(cases, start=1):
        with Peer(end) as peer:
            source = make() if make else peer.source.readable()
            control = peer.control.readable()
            peer.share([control, source], num_bytes)
            assert peer.cut()
            os.close(source)
            os.close(control)
        assert reason in str(end.receiver.wait("closed", count)[-1].error)
    check_no_more_than(before, maps)


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_other_descriptors_than_two_are_closed(open_end: Callable[..., End], count: int) -> None:
    end = open_end()
    with Peer(end) as peer:
        end.receiver.wait("opened")
        before = num_descriptors()
        peer.share([peer.sock.fileno()] * count)
        assert peer.cut()
        end.receiver.wait("closed")
        wait_until(lambda: num_descriptors() < before)


def test_descriptors_beside_a_frame_are_closed_with_the_link(open_end: Callable[..., End]) -> None:
    end = open_end()
    before = num_descriptors()
    with Peer(end) as peer:
        frame = Header(MessageKind.FRAME, 1).packed() + b"f"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [peer.sock.fileno()] * 2))]
        peer.sock.sendmsg([frame], rights)
        end.receiver.wait("received")
        with contextlib.suppress(BrokenPipeError):
            peer.sock.sendmsg([frame], rights)
        assert peer.cut()
    assert "nothing asked for" in str(end.receiver.wait("closed")[0].error)
    wait_until(lambda: num_descriptors() <= before)


def test_a_stranger_cannot_share(open_end: Callable[..., End]) -> None:
    end = open_end(trusts=False)
    before, maps = num_descriptors(), num_maps()
    with Peer(end) as peer:
        peer.share()
        assert peer.cut()
    assert "before its handshake" in str(end.receiver.wait("closed")[0].error)
    check_no_more_than(before, maps)


WRITE_OF_8 = Header(MessageKind.MAPPED, 1, 8, digested=True).packed() + b"w"


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Header(MessageKind.SPANS, 16).packed() + bytes(16), id="spans of no write"),
        pytest.param(Header(MessageKind.DIGEST, 8).packed() + bytes(8), id="digest of no write"),
        pytest.param(Header(MessageKind.WRITE, 1, 4, digested=True).packed() + b"w" + bytes(12), id="inline payload"),
        pytest.param(Header(MessageKind.COPIED, 8).packed() + COUNT.pack(1), id="copied what was never named"),
        pytest.param(Header(MessageKind.COPIED, 9).packed() + bytes(9), id="copied of a wrong size"),
        pytest.param(Header(MessageKind.SHARE, 8).packed() + COUNT.pack(SIZE), id="shared twice"),
        pytest.param(Header(MessageKind.MAPPED, 1, 8).packed() + b"w", id="write without a digest"),
        pytest.param(WRITE_OF_8 + Header(MessageKind.FRAME, 1).packed() + b"f", id="frame inside a write"),
        pytest.param(WRITE_OF_8 + Header(MessageKind.SPANS, 15).packed() + bytes(15), id="half a span"),
        pytest.param(WRITE_OF_8 + spans_of([(0, 8)]) + spans_of([(0, 8)]), id="spans instead of the digest"),
    ],
)
def test_messages_where_they_do_not_belong(open_end: Callable[..., End], message: bytes) -> None:
    end = open_end()
    with Peer(end) as peer:
        peer.share()
        peer.sock.sendall(message)
        assert peer.cut()
    assert isinstance(end.receiver.wait("closed")[0].error, TransferError)
    assert not end.receiver.of("placed") + end.receiver.of("received")


def test_a_write_without_shared_memory(open_end: Callable[..., End]) -> None:
    end = open_end()
    with Peer(end) as peer:
        with contextlib.suppress(BrokenPipeError):  # it may be refused before all of it is said
            peer.write([(0, 8)])
        assert peer.cut()
    assert "shared no memory" in str(end.receiver.wait("closed")[0].error)


def test_copied_cannot_go_back(open_end: Callable[..., End]) -> None:
    end = open_end()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, tempfile.TemporaryDirectory() as folder:
        server.bind(f"{folder}/peer")
        server.listen()
        link = end.transport.connect([f"{SCHEME}{folder}/peer"], timeout_s=TIMEOUT_S)
        link.trusted = True
        transfer = end.transport.write(link, b"w", [(0, 100)])
        peer, _ = server.accept()
        with peer:
            peer.recv(1000)
            for total in (60, 59):
                assert not transfer.done
                peer.sendall(Header(MessageKind.COPIED, 8).packed() + COUNT.pack(total))
            assert "after 60 of 100" in str(end.receiver.wait("closed")[0].error)
    assert finished(transfer).error is not None


def test_a_revoked_write_is_never_placed(open_end: Callable[..., End]) -> None:
    end = open_end(digest=False)
    with Peer(end) as peer:
        peer.share()
        peer.control.view[0] = REVOKED
        with contextlib.suppress(BrokenPipeError):  # the link may be closed before the last of it is said
            peer.write([(0, 100)], digest=False)
            peer.sock.sendall(Header(MessageKind.FRAME, 6).packed() + b"finish")
        assert peer.cut()
    assert "closed the link while" in str(end.receiver.wait("closed")[0].error)
    assert not end.receiver.of("placed") + end.receiver.of("received")
