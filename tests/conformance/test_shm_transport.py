"""What only shared memory can suffer: copies of pages that were given to someone else, full rings, and processes that
stop or die. Hostile peers are in `test_shm_peers.py`."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv import fused
from pdinfer.kv.fused import FusedCopy
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import CAN_SHARE
from pdinfer.kv.memory import Landing
from pdinfer.kv.transports.base import Link
from pdinfer.kv.transports.shm.sender import RING_BYTES
from pdinfer.kv.transports.shm.transport import SCHEME, ShmTransport, same_host_transport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream import transport
from pdinfer.process import scratch
from tests.conformance.shm_ends import (
    MIB,
    check_no_more_than,
    num_descriptors,
    num_maps,
    opened_ends,
    receive,
    send_without_end,
)
from tests.conformance.transport_ends import BytesMemory, End, MemfdMemory, Recorder, finished
from tests.forks import apart, check_ended, context, fork
from tests.waiting import TIMEOUT_S

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="shared memory needs Linux")


@pytest.fixture
def open_end() -> Iterator[Callable[..., End]]:
    with opened_ends() as make:
        yield make


class Filling(socket.socket):
    """The socket of an end that dials. Once it `is_full`, it has room for the start of what a thread sends directly."""

    is_full = False

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        return super().send(data[:3] if self.is_full else data, flags)


def test_word_of_a_copy_does_not_come_in_the_middle_of_a_frame(
    open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame, of which the socket took the start, waits for the I/O thread, which makes a copy first."""
    sockets: list[Filling] = []

    def filling(*arguments: object, **more: object) -> tuple[socket.socket, str, OSError | None]:
        sock, endpoint, problem = dial(*arguments, **more)  # type: ignore[arg-type]
        sockets.append(Filling(fileno=sock.detach()))
        sockets[-1].setblocking(False)
        return sockets[-1], endpoint, problem

    dial = transport.dial
    monkeypatch.setattr(transport, "dial", filling)
    left, right = open_end(num_bytes=MIB), open_end(num_bytes=MIB)
    link, theirs = left.connect(right)
    assert finished(right.transport.write(theirs, b"greeting", [(0, MIB)])).error is None
    copies, sent = threading.Event(), threading.Event()

    def place(_: Link, frame: bytes, size: int) -> Spans:
        copies.set()
        assert sent.wait(TIMEOUT_S)
        return [(0, size)]

    left.receiver.hooks["place"] = place
    write = right.transport.write(theirs, b"w", [(0, MIB)])
    assert copies.wait(TIMEOUT_S)
    sockets[-1].is_full = True
    left.transport.send(link, b"frame")
    sent.set()
    assert [call.frame for call in right.receiver.wait("received", 1, theirs)] == [b"frame"]
    assert finished(write).error is None


# -- pages that were given to someone else ---


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("digest", [False, True])
def test_pages_reused_in_the_middle_of_a_copy(
    open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch, digest: bool, passes: int
) -> None:
    """The sender's end closes, and its pages get other contents, after the receiver has begun to copy and before it
    copies. A Finish that says all is well is already in the receiver's socket."""

    class Stopped(MemfdMemory):
        """A receiver that is stopped when it is about to copy."""

        def landing(self, spans: Spans) -> Landing:
            stop()
            return super().landing(spans)

    def stop() -> None:
        about_to_copy.set()
        assert reused.wait(TIMEOUT_S)

    def take(copies: FusedCopy, *where: object) -> int:
        stop()
        return copy_in_one_pass(copies, *where)  # type: ignore[arg-type]

    about_to_copy, reused = threading.Event(), threading.Event()
    copy_in_one_pass = FusedCopy.take
    monkeypatch.setattr(FusedCopy, "take", take)
    monkeypatch.setattr(fused, "MIN_BYTES", 0 if passes == 1 else MIB + 1)
    sender = open_end(num_bytes=MIB, digest=digest)
    receiver = open_end(memory=Stopped(MIB), digest=digest)
    sender.memory.data[:] = b"\x01" * MIB
    link, theirs = sender.connect(receiver)
    transfer = sender.transport.write(link, b"w", [(0, MIB)])
    sender.transport.send(link, b"finish")
    assert about_to_copy.wait(TIMEOUT_S)
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
            assert stopped.wait(TIMEOUT_S)
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
    """Writes of several rings' worth go to a receiver that does not take them, while other links and frames go on. Were
    one of them to wait, the receiver would wait in vain, and close the link."""
    sender = open_end(memory=BytesMemory(MIB))
    slow, quick = open_end(num_bytes=MIB), open_end(num_bytes=MIB)
    stopped = threading.Event()

    def place(_: Link, __: bytes, size: int) -> Spans:
        assert stopped.wait(TIMEOUT_S)
        return [(0, size)]

    slow.receiver.hooks["place"] = place
    link, _ = sender.connect(slow)
    other, _ = sender.connect(quick)
    transfers = [sender.transport.write(link, b"w", [(0, MIB)]) for _ in range(3 * RING_BYTES // MIB)]
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


@contextlib.contextmanager
def receiving(num_bytes: int) -> Iterator[tuple[Any, Connection]]:
    """Start a process that receives, and return what it tells as well."""
    told, theirs = context().Pipe()
    child = context().Process(target=receive, args=(theirs, num_bytes), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, told
    finally:
        child.kill()
        child.join()


def test_a_stopped_process_never_uses_a_torn_copy(open_end: Callable[..., End]) -> None:
    """SIGSTOP hits at some moment of many writes, until it was often in the middle. This end closes, reuses its pages
    at once, and lets the other go on. What the other had copied to the last byte, without this end knowing, it may
    use."""
    sender = open_end(num_bytes=MIB, digest=False)
    with receiving(MIB) as (child, told_by_child):
        endpoint = told_by_child.recv()
        cut_short, ends = 0, time.monotonic() + TIMEOUT_S
        for delay in itertools.cycle((0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.014, 0.016, 0.02)):
            sender.memory.data[:] = b"\x01" * MIB
            link = sender.transport.connect([endpoint], timeout_s=TIMEOUT_S)
            link.trusted = True
            transfers = [sender.transport.write(link, b"w", [(0, MIB)]) for _ in range(400)]
            sender.transport.send(link, b"finish")
            time.sleep(delay)
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(0.02)
            sender.transport.fence(link)
            assert all(transfer.done for transfer in transfers)
            sender.memory.data[:] = b"\x02" * MIB
            os.kill(child.pid, signal.SIGCONT)
            told = []
            while (said := told_by_child.recv()) != "closed":
                told.append(said)
            failed = any(transfer.error for transfer in transfers)
            assert told == ["finish after 400 writes"] or (failed and not told)
            cut_short += not told
            if cut_short > 5:
                break
            assert time.monotonic() < ends


@pytest.mark.full
def test_a_killed_receiver_ends_the_transfers(open_end: Callable[..., End]) -> None:
    size = 32 * MIB
    sender = open_end(num_bytes=size, digest=False)
    with receiving(size) as (child, told):
        link = sender.transport.connect([told.recv()], timeout_s=TIMEOUT_S)
        link.trusted = True
        os.kill(child.pid, signal.SIGSTOP)
        transfers = [sender.transport.write(link, b"w", [(0, size)]) for _ in range(3)]
        time.sleep(0.05)
        assert not any(transfer.done for transfer in transfers)
        child.kill()
        assert isinstance(sender.receiver.wait("closed", 1, link)[0].error, TransferError)
        assert all(transfer.error is not None for transfer in transfers)


def test_a_killed_sender_closes_the_link_and_frees_its_memory(open_end: Callable[..., End]) -> None:
    end = open_end(num_bytes=MIB)
    apart(int)  # what processes are forked off has descriptors, and stays
    before, maps = num_descriptors(), num_maps()
    child = context().Process(target=send_without_end, args=(end.endpoints[0],), daemon=True)
    child.start()
    try:
        end.receiver.wait("placed", 5)
        assert num_maps() == maps + 2  # the sender's two
    finally:
        child.kill()
        child.join()
        child.close()
    assert isinstance(end.receiver.wait("closed")[0].error, TransferError)
    check_no_more_than(before, maps)


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
        check_no_more_than(descriptors, maps)


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
    monkeypatch.setattr(scratch, "temporary_folder", lambda: long)
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

    def is_refused() -> None:
        assert left.num_refused(link, right) == 4
        left.transport.close()

    check_ended(fork(is_refused))
    assert finished(left.transport.write(link, b"w", [(0, 8)])).error is None
    assert Path(left.endpoints[0].removeprefix(SCHEME)).exists()
