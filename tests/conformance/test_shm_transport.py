"""What only shared memory can suffer: peers that name bytes they have not, memory that shrinks, and copies of pages
that were given to someone else while the copier was stopped."""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import mmap
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import CAN_SHARE, Memfd
from pdinfer.kv.transports.base import Link
from pdinfer.kv.transports.shm.sender import COUNT, REVOKED, RING_BYTES, SECTION_BYTES
from pdinfer.kv.transports.shm.transport import SCHEME, ShmTransport, same_host_transport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.framing import Header, MessageKind, digest_bytes
from tests.conformance.transport_suite import BytesMemory, End, MemfdMemory, Recorder, finished, wait_until

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="shared memory needs Linux")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def open_end() -> Iterator[Callable[..., End]]:
    """Makes registered ends that are closed after the test."""
    ends: list[End] = []

    def make(
        transport: ShmTransport | None = None,
        *,
        memory: BytesMemory | None = None,
        num_bytes: int = 64 * KIB,
        trusts: bool = True,
        digest: bool = True,
    ) -> End:
        transport = transport or ShmTransport(digest=digest)
        end = End(transport, memory or MemfdMemory(num_bytes), Recorder(trusts=trusts))
        end.receiver.hooks["place"] = lambda _, __, size: [(0, size)]
        end.endpoints = end.transport.register(end.memory, end.receiver)
        ends.append(end)
        return end

    yield make
    for end in ends:
        end.transport.close()
        assert not end.receiver.broken


# -- a peer by hand ---


class Peer:
    """The sending side of a link, byte by byte."""

    def __init__(self, end: End, num_bytes: int = 4 * KIB) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(5.0)
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
        """One write that names `spans`; `flip` changes its digest."""
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
        """Whether the other end has closed the connection, within the time-out."""
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


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def num_maps() -> int:
    gc.collect()
    return sum("memfd:pdinfer" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_peer_by_hand_is_understood(open_end: Callable[..., End]) -> None:
    """That the hostile ones below are refused for what they do, and not for being made by hand."""
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
    """However large the write: others must have their turn in between."""
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
    before, maps = num_descriptors(), num_maps()  # other tests of this process may have left some
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
    wait_until(lambda: num_descriptors() == before)
    assert num_maps() == maps


def keeps_writers_out() -> bool:
    """Whether this kernel has F_SEAL_FUTURE_WRITE (Linux 5.1)."""
    descriptor = os.memfd_create("probe", os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0x10)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_who_is_shown_a_pool_reads_all_of_it_and_writes_none() -> None:
    """Also not by opening the descriptor anew, which the mode of a memfd allows to any account."""
    memfd = Memfd(SIZE, "pool")
    memfd.view[:4] = b"ours"
    shown = memfd.readable()
    assert os.pread(shown, SIZE, 0) == bytes(memfd.view)
    with pytest.raises(OSError, match=r"(?i)not permitted|bad file descriptor|denied"):
        os.pwrite(shown, b"evil", 0)
    with pytest.raises(OSError, match=r"(?i)not permitted|denied"):
        mmap.mmap(shown, SIZE)
    assert os.fstat(shown).st_mode & 0o377 == 0
    with contextlib.suppress(PermissionError):  # root may open it all the same
        writable = os.open(f"/proc/self/fd/{shown}", os.O_RDWR)
        for write in (lambda: os.pwrite(writable, b"evil", 0), lambda: mmap.mmap(writable, SIZE)):
            with pytest.raises(PermissionError) if keeps_writers_out() else contextlib.nullcontext():
                write()
        os.close(writable)
    memfd.view[4:8] = b"mine"
    assert os.pread(shown, 8, 0)[4:] == b"mine"
    os.close(shown)
    memfd.close()


READER = """
import fcntl, mmap, os, sys
shown, uid, size = map(int, sys.argv[1:])
if uid:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
done = []
def attempt(name, call):
    try:
        call()
    except OSError:
        return
    done.append(name)
def opened(path, mode):
    descriptor = os.open(path, mode)
    attempt("write after open", lambda: os.pwrite(descriptor, b"evil", 0))
    attempt("map after open", lambda: mmap.mmap(descriptor, size))
    attempt("shrink after open", lambda: os.ftruncate(descriptor, 0))
    attempt("grow after open", lambda: os.ftruncate(descriptor, 2 * size))
    attempt("punch", lambda: os.posix_fallocate(descriptor, size, size))
    view = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    attempt("remove pages", lambda: view.madvise(mmap.MADV_REMOVE))
attempt("write", lambda: os.pwrite(shown, b"evil", 0))
attempt("map", lambda: mmap.mmap(shown, size))
attempt("shrink", lambda: os.ftruncate(shown, 0))
attempt("more seals", lambda: fcntl.fcntl(shown, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE))
for path in (f"/proc/self/fd/{shown}", f"/proc/{os.getpid()}/fd/{shown}"):
    for mode in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
        try:
            opened(path, mode)
        except OSError:
            pass
try:
    os.fchmod(shown, 0o666)
    opened(f"/proc/self/fd/{shown}", os.O_RDWR)
except OSError:
    pass
assert os.pread(shown, 4, 0) == b"ours"
print(done)
"""


@pytest.mark.parametrize("uid", [0, 65534], ids=["the same account", "nobody"])
def test_a_reader_in_another_process_alters_nothing_whoever_it_is(uid: int) -> None:
    """By its descriptor, by opening it anew, by changing its mode, its size or its seals."""
    if uid and os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    if not keeps_writers_out():
        pytest.skip("before Linux 5.1 a process of the same account can open it for writing; SECURITY.md says so")
    memfd = Memfd(SIZE, "pool")
    memfd.view[:4] = b"ours"
    shown = memfd.readable()
    command = [sys.executable, "-c", READER, str(shown), str(uid), str(SIZE)]
    said = subprocess.run(command, check=False, pass_fds=[shown], capture_output=True, text=True, timeout=60.0)
    assert (said.returncode, said.stdout.strip()) == (0, "[]"), said.stderr
    assert bytes(memfd.view) == b"ours" + bytes(SIZE - 4)
    memfd.view[:4] = b"mine"
    assert os.pread(shown, 4, 0) == b"mine"
    os.close(shown)
    memfd.close()


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
    wait_until(lambda: num_descriptors() == before)


def test_a_stranger_cannot_share(open_end: Callable[..., End]) -> None:
    end = open_end(trusts=False)
    before, maps = num_descriptors(), num_maps()
    with Peer(end) as peer:
        peer.share()
        assert peer.cut()
    assert "before its handshake" in str(end.receiver.wait("closed")[0].error)
    wait_until(lambda: num_descriptors() == before)
    assert num_maps() == maps


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
        link = end.transport.connect([f"{SCHEME}{folder}/peer"], timeout_s=5)
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


# -- pages that were given to someone else ---


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


@pytest.mark.parametrize("digest", [False, True])
def test_pages_reused_in_the_middle_of_a_copy(open_end: Callable[..., End], digest: bool) -> None:
    """The sender's end closes and its pages get other contents, between the moment the receiver begins to copy and the
    copy. A Finish that says all is well is in the receiver's socket already."""

    class Stopped(MemfdMemory):
        """A receiver that is stopped when it is about to copy."""

        def landing(self, spans: Spans) -> list[memoryview]:
            about_to_copy.set()
            assert reused.wait(10)
            return super().landing(spans)

    about_to_copy, reused = threading.Event(), threading.Event()
    sender = open_end(num_bytes=MIB, digest=digest)
    receiver = open_end(memory=Stopped(MIB), digest=digest)
    sender.memory.data[:] = b"\x01" * MIB
    link, theirs = sender.connect(receiver)
    transfer = sender.transport.write(link, b"w", [(0, MIB)])
    sender.transport.send(link, b"finish")
    assert about_to_copy.wait(10)
    time.sleep(0.1)  # all has left
    sender.transport.fence(link)
    assert transfer.done
    assert transfer.error is not None
    sender.memory.data[:] = b"\x02" * MIB
    reused.set()
    assert isinstance(receiver.receiver.wait("closed", 1, theirs)[0].error, TransferError)
    assert not receiver.receiver.of("placed") + receiver.receiver.of("received")


@pytest.mark.parametrize("ring", [False, True])
def test_a_transfer_is_done_only_when_the_peer_has_copied(open_end: Callable[..., End], ring: bool) -> None:
    sender = open_end(memory=BytesMemory(MIB) if ring else MemfdMemory(MIB))
    receiver = open_end(num_bytes=MIB)
    stopped = threading.Event()

    def place(_: Link, frame: bytes, size: int) -> Spans:
        if frame == b"1":
            assert stopped.wait(10)
        return [(0, size)]

    receiver.receiver.hooks["place"] = place
    link, _ = sender.connect(receiver)
    assert finished(sender.transport.write(link, b"0", [(0, MIB)])).error is None
    second = sender.transport.write(link, b"1", [(0, MIB)])
    receiver.receiver.wait("place", 2)
    time.sleep(0.05)
    assert not second.done
    stopped.set()
    assert finished(second).error is None


def test_a_full_ring_waits_without_blocking(open_end: Callable[..., End]) -> None:
    """Writes of several rings' worth, to a receiver that does not take them, while other links and frames go on."""
    sender = open_end(memory=BytesMemory(MIB))
    slow, quick = open_end(num_bytes=MIB), open_end(num_bytes=MIB)
    stopped = threading.Event()
    slow.receiver.hooks["place"] = lambda _, __, size: [(0, size)] if stopped.wait(10) else None
    link, _ = sender.connect(slow)
    other, _ = sender.connect(quick)
    started = time.monotonic()
    transfers = [sender.transport.write(link, b"w", [(0, MIB)]) for _ in range(3 * RING_BYTES // MIB)]
    assert time.monotonic() - started < 4
    assert finished(sender.transport.write(other, b"w", [(0, MIB)])).error is None
    assert not any(transfer.done for transfer in transfers)
    stopped.set()
    assert all(finished(transfer).error is None for transfer in transfers)


def test_two_full_rings_do_not_wait_for_each_other(open_end: Callable[..., End]) -> None:
    """What frees a ring must not queue behind what waits for the other ring."""
    left, right = (open_end(memory=BytesMemory(MIB)) for _ in "12")
    link, back = left.connect(right)
    transfers = []
    for _ in range(3 * RING_BYTES // MIB):
        transfers.append(left.transport.write(link, b"w", [(0, MIB)]))
        transfers.append(right.transport.write(back, b"w", [(0, MIB)]))
    assert all(finished(transfer).error is None for transfer in transfers)


def test_a_ring_carries_every_byte(open_end: Callable[..., End]) -> None:
    sender, receiver = open_end(memory=BytesMemory(MIB)), open_end(num_bytes=MIB)
    sender.memory.data[:] = os.urandom(MIB)
    link, _ = sender.connect(receiver)
    for count in range(1, 31):
        size = (count * 77_777) % MIB  # never divides a ring, so that sections wrap
        sender.transport.write(link, b"w", [(MIB - size, size)])
        assert receiver.receiver.wait("placed", count)[-1].error is None
        assert bytes(receiver.memory.data[:size]) == bytes(sender.memory.data[MIB - size :])


# -- processes ---

RECEIVE = """
import sys
from pdinfer.kv.transports.shm.transport import ShmTransport
from tests.conformance.transport_suite import Recorder, MemfdMemory
size = int(sys.argv[1])
memory, receiver = MemfdMemory(size), Recorder()
receiver.hooks["place"] = lambda _, __, n: [(0, n)]

def placed(link, frame, error):
    if error or set(memory.data[::4096]) != {1}:
        print("placed", error, set(memory.data[::4096]), flush=True)

receiver.hooks["placed"] = placed
receiver.hooks["received"] = lambda _, frame: print("received", frame.decode(), flush=True)
receiver.hooks["closed"] = lambda _, error: print("closed", flush=True)
transport = ShmTransport(digest=False)
print(transport.register(memory, receiver)[0], flush=True)
sys.stdin.read()
transport.close()
"""


@contextlib.contextmanager
def receiving(num_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """A process that receives, places at the start of its memory, and prints what it is told."""
    child = subprocess.Popen(
        [sys.executable, "-c", RECEIVE, str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_stopped_process_never_uses_a_torn_copy(open_end: Callable[..., End]) -> None:
    """SIGSTOP at some moment of many writes; this end closes, reuses its pages at once, and lets the other go on."""
    sender = open_end(num_bytes=MIB, digest=False)
    with receiving(MIB) as child:
        endpoint = line(child)
        cut_short = 0
        for delay in (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.014, 0.016, 0.02):
            sender.memory.data[:] = b"\x01" * MIB
            link = sender.transport.connect([endpoint], timeout_s=10)
            link.trusted = True
            transfers = [sender.transport.write(link, b"w", [(0, MIB)]) for _ in range(400)]
            sender.transport.send(link, b"finish")
            time.sleep(delay)
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.02)
            sender.transport.fence(link)
            assert all(transfer.done for transfer in transfers)
            sender.memory.data[:] = b"\x02" * MIB
            child.send_signal(signal.SIGCONT)
            told = []
            while (said := line(child)) != "closed":
                told.append(said)
            failed = any(transfer.error for transfer in transfers)
            assert told == ([] if failed else ["received finish"])
            cut_short += failed
        assert cut_short > 5


@pytest.mark.full
def test_a_killed_receiver_ends_the_transfers(open_end: Callable[..., End]) -> None:
    size = 32 * MIB
    sender = open_end(num_bytes=size, digest=False)
    with receiving(size) as child:
        link = sender.transport.connect([line(child)], timeout_s=10)
        link.trusted = True
        child.send_signal(signal.SIGSTOP)
        transfers = [sender.transport.write(link, b"w", [(0, size)]) for _ in range(3)]
        time.sleep(0.05)
        assert not any(transfer.done for transfer in transfers)
        child.kill()
        assert isinstance(sender.receiver.wait("closed", 1, link)[0].error, TransferError)
        assert all(transfer.error is not None for transfer in transfers)


def test_a_killed_sender_closes_the_link_and_frees_its_memory(open_end: Callable[..., End]) -> None:
    end = open_end(num_bytes=MIB)
    code = (
        "import sys, time; from pdinfer.kv.transports.shm.transport import ShmTransport; "
        "from tests.conformance.transport_suite import Recorder, MemfdMemory; "
        "t = ShmTransport(); t.register(MemfdMemory(1 << 20), Recorder()); "
        "link = t.connect([sys.argv[1]], timeout_s=5); link.trusted = True\n"
        "while True: t.write(link, b'w', [(0, 1 << 20)]); time.sleep(0.001)"
    )
    before, maps = num_descriptors(), num_maps()
    child = subprocess.Popen([sys.executable, "-c", code, end.endpoints[0]], cwd=Path(__file__).parents[2])
    try:
        end.receiver.wait("placed", 5)
        assert num_maps() == maps + 2  # the sender's two
    finally:
        child.kill()
        child.wait()
    assert isinstance(end.receiver.wait("closed")[0].error, TransferError)
    wait_until(lambda: num_descriptors() == before)
    assert num_maps() == maps


@pytest.mark.full
def test_links_free_what_they_mapped(open_end: Callable[..., End]) -> None:
    left, right = open_end(memory=BytesMemory(MIB)), open_end()
    descriptors, maps = num_descriptors(), num_maps()
    for _ in range(3):
        link, theirs = left.connect(right)
        assert finished(left.transport.write(link, b"w", [(0, 1000)])).error is None
        assert num_maps() == maps + 4
        left.transport.fence(link)
        right.receiver.wait("closed", 1, theirs)
        wait_until(lambda: (num_descriptors(), num_maps()) == (descriptors, maps))


# -- where it listens ---


def test_its_folder_is_private_and_removed(open_end: Callable[..., End]) -> None:
    end = open_end()
    path = Path(end.endpoints[0].removeprefix(SCHEME))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    end.transport.close()
    assert not path.parent.exists()


def test_a_folder_that_cannot_be_used_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="107 bytes"):
        ShmTransport().register(BytesMemory(8), Recorder())
    assert not list(long.iterdir())


def test_a_stale_socket_file_is_replaced(open_end: Callable[..., End], tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    end = open_end(ShmTransport(path))
    other = open_end()
    link, _ = other.connect(end)
    other.transport.send(link, b"f")
    end.receiver.wait("received")
    with pytest.raises(ConfigError, match="in use"):
        ShmTransport(path).register(BytesMemory(8), Recorder())
    other.transport.send(link, b"the first keeps its file")
    end.receiver.wait("received", 2)


def test_schemes_are_kept_apart(open_end: Callable[..., End], tmp_path: Path) -> None:
    end = open_end()
    sockets = SocketTransport(path=tmp_path / "unix.sock")
    endpoints = sockets.register(BytesMemory(8), Recorder())
    with pytest.raises(TransferError, match="shm:///path"):
        end.transport.connect(endpoints, timeout_s=1)
    with pytest.raises(TransferError, match="tcp://host:port or unix:///path"):
        sockets.connect(end.endpoints, timeout_s=1)
    sockets.close()


def test_digests_must_agree(open_end: Callable[..., End]) -> None:
    strict, plain = open_end(), open_end(digest=False)
    link, _ = strict.connect(plain)
    assert finished(strict.transport.write(link, b"w", [(0, 8)])).error is None
    link, theirs = plain.connect(strict)
    transfer = plain.transport.write(link, b"w", [(0, 8)])
    assert "digest=True" in str(strict.receiver.wait("closed", 1, theirs)[0].error)
    assert finished(transfer).error is not None


def test_the_same_host_gets_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_host_transport().name == "shm"
    monkeypatch.setattr("pdinfer.kv.transports.shm.transport.CAN_SHARE", False)
    assert same_host_transport().name == "tcp"
    with pytest.raises(ConfigError, match="SocketTransport"):
        ShmTransport()


def test_a_forked_child_is_refused(open_end: Callable[..., End]) -> None:
    left, right = open_end(), open_end()
    link, _ = left.connect(right)
    finished(left.transport.write(link, b"w", [(0, 8)]))
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: left.transport.send(link, b"f"),
            lambda: left.transport.write(link, b"w", []),
            lambda: left.transport.fence(link),
        ):
            try:
                call()
            except TransferError:
                refused += 1
        left.transport.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert finished(left.transport.write(link, b"w", [(0, 8)])).error is None
    assert Path(left.endpoints[0].removeprefix(SCHEME)).exists()
