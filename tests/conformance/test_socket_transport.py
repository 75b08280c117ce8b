"""What only a socket can suffer: strangers at the port, bytes that change, processes that die, and addresses."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.transports.base import MAX_FRAME_BYTES, MAX_UNTRUSTED_FRAME_BYTES, Link
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.framing import HEADER, MAGIC, VERSION, Buffers, Header, MessageKind, digest_bytes
from pdinfer.kv.transports.stream.transport import ACCEPTS, PACE_S, Strangers
from tests.conformance.transport_ends import PATIENT, BytesMemory, End, Recorder, anywhere, closing, finished, say_alive
from tests.forks import check_ended, context, fork
from tests.waiting import TIMEOUT_S, check_returns, wait_until

STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "pickle": b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system",
    "version": HEADER.pack(MAGIC, VERSION + 1, MessageKind.FRAME, 0, 1, 0),
    "kind": HEADER.pack(MAGIC, VERSION, 7, 0, 1, 0),
    "flags": HEADER.pack(MAGIC, VERSION, MessageKind.WRITE, 2, 1, 0),
    "digest on a frame": HEADER.pack(MAGIC, VERSION, MessageKind.FRAME, 1, 1, 0),
    "empty frame": HEADER.pack(MAGIC, VERSION, MessageKind.FRAME, 0, 0, 0),
    "frame of 4 GiB": HEADER.pack(MAGIC, VERSION, MessageKind.FRAME, 0, 2**32 - 1, 0),
    "payload on a frame": HEADER.pack(MAGIC, VERSION, MessageKind.FRAME, 0, 1, 2**64 - 1) + b"x",
    "untrusted frame": HEADER.pack(MAGIC, VERSION, MessageKind.FRAME, 0, MAX_UNTRUSTED_FRAME_BYTES + 1, 0),
    "untrusted write": HEADER.pack(MAGIC, VERSION, MessageKind.WRITE, 0, 1, 2**64 - 1) + b"x",
}


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write_of(frame: bytes, payload: bytes, *, announced: int | None = None) -> bytes:
    """Return a write as it stands on the wire, with a correct digest."""
    size = len(payload) if announced is None else announced
    head = Header(MessageKind.WRITE, len(frame), size, digested=True).packed() + frame
    return head + payload + digest_bytes(xxhash.xxh3_64(head + payload))


def frame_of(frame: bytes) -> bytes:
    return Header(MessageKind.FRAME, len(frame), 0).packed() + frame


def dialled(end: End) -> socket.socket:
    """Open a bare connection to a TCP end."""
    host, port = end.endpoints[0].removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def closed_by_peer(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def open_end() -> Iterator[Callable[..., End]]:
    """Make registered socket ends that are closed after the test."""
    with closing() as ends:

        def make(transport: SocketTransport | None = None, *, trusts: bool = True, num_bytes: int = 1 << 16) -> End:
            ends.append(End(transport or SocketTransport(), BytesMemory(num_bytes), Recorder(trusts=trusts)))
            return ends[-1]

        yield make


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_closed_and_costs_little(open_end: Callable[..., End], name: str) -> None:
    end, friend = open_end(SocketTransport(strangers=PATIENT), trusts=False), open_end()
    link, _ = friend.connect(end)
    tracemalloc.start()
    with dialled(end) as stranger:
        stranger.sendall(STRANGERS[name])
        assert closed_by_peer(stranger)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 << 10
    (call,) = end.receiver.wait("closed")
    assert call.error is not None
    friend.transport.send(link, b"still served")
    assert end.receiver.wait("received")[0].frame == b"still served"


def test_a_trusted_peer_is_limited_too(open_end: Callable[..., End]) -> None:
    end = open_end()
    for message in (
        HEADER.pack(MAGIC, VERSION, MessageKind.FRAME, 0, MAX_FRAME_BYTES + 1, 0),
        write_of(b"w", b"", announced=2**64 - 1),
    ):
        end.receiver.hooks["place"] = lambda *_: [(0, 8)]
        with dialled(end) as peer:
            peer.sendall(message)
            assert closed_by_peer(peer)
    assert [c.error is not None for c in end.receiver.wait("closed", 2)] == [True, True]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=1, max_size=200), magic=st.booleans(), trusts=st.booleans())
def test_random_bytes_never_stop_the_transport(data: bytes, magic: bool, trusts: bool) -> None:
    with closing() as ends:
        ends.append(end := End(SocketTransport(), BytesMemory(64), Recorder(trusts=trusts)))
        with dialled(end) as stranger:
            stranger.sendall(MAGIC + bytes([VERSION]) + data if magic else data)
        end.receiver.wait("closed")
        with dialled(end) as friend:
            friend.sendall(frame_of(b"hello"))
            wait_until(lambda: any(c.frame == b"hello" for c in end.receiver.of("received")))


def test_any_cut_of_the_stream_means_the_same(open_end: Callable[..., End]) -> None:
    end = open_end()
    end.receiver.hooks["place"] = lambda _, frame, size: [(1, 3), (10, size - 3)] if frame == b"w" else None
    payload = random.Random(1).randbytes(100)
    stream = frame_of(b"one") + write_of(b"w", payload) + write_of(b"discard", payload) + frame_of(b"two")
    with dialled(end) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in stream:
            peer.sendall(bytes([byte]))
        end.receiver.wait("received", 2)
    assert [c.name for c in end.receiver.calls[:5]] == ["opened", "received", "place", "placed", "place"]
    assert end.memory.contents([(1, 3), (10, 97)]) == payload


@pytest.mark.parametrize("flipped", ["frame", "payload", "digest"])
def test_a_changed_byte_is_found_and_the_link_goes_on(open_end: Callable[..., End], flipped: str) -> None:
    end = open_end()
    end.receiver.hooks["place"] = anywhere
    message = bytearray(write_of(b"w", b"payload"))
    message[{"frame": HEADER.size, "payload": HEADER.size + 3, "digest": -1}[flipped]] ^= 1
    with dialled(end) as peer:
        peer.sendall(message + write_of(b"w", b"payload"))
        bad, good = end.receiver.wait("placed", 2)
        assert isinstance(bad.error, TransferError)
        assert "did not verify" in str(bad.error)
        assert good.error is None
        assert not end.receiver.of("closed")


@pytest.mark.parametrize("sent", [b"", MAGIC, frame_of(b"hello")[:-1], frame_of(b"hello"), frame_of(b"hello") + MAGIC])
def test_a_slow_stranger_is_cut(open_end: Callable[..., End], sent: bytes) -> None:
    clock, limits = Clock(), Strangers(first_message_s=10.0, message_s=20.0)
    end = open_end(SocketTransport(clock=clock, strangers=limits), trusts=False)
    whole = sent.startswith(frame_of(b"hello"))
    limit_s = limits.message_s if whole else limits.first_message_s
    with dialled(end) as stranger, dialled(end) as active:
        end.receiver.wait("opened", 2)
        stranger.sendall(sent)
        if whole:
            end.receiver.wait("received")
        clock.now += limit_s - 1
        active.sendall(frame_of(b"hello"))
        end.receiver.wait("received", 1 + whole)
        assert not end.receiver.of("closed")
        clock.now += 2
        assert closed_by_peer(stranger)
        active.sendall(frame_of(b"again"))
        end.receiver.wait("received", 2 + whole)
    assert f"no whole message for {limit_s:g} s" in str(end.receiver.of("closed")[0].error)


def test_a_trusted_link_may_be_idle(open_end: Callable[..., End]) -> None:
    clock = Clock()
    end, other = open_end(SocketTransport(clock=clock)), open_end(trusts=False)
    accepted = dialled(end)
    link = end.transport.connect(other.endpoints, timeout_s=TIMEOUT_S)
    end.receiver.wait("opened")
    clock.now += 1e6
    with dialled(end) as wakes:
        wakes.sendall(frame_of(b"x"))
        end.receiver.wait("received")
    accepted.sendall(frame_of(b"y"))
    end.receiver.wait("received", 2)
    end.transport.send(link, b"z")
    other.receiver.wait("received")
    accepted.close()


def test_a_newcomer_takes_the_place_of_who_has_waited_longest(open_end: Callable[..., End]) -> None:
    clock, limits = Clock(), Strangers(max_links=4, max_links_per_source=1)
    end = open_end(SocketTransport(clock=clock, strangers=limits), trusts=False)
    strangers = [dialled(end) for _ in range(4)]
    opened = end.receiver.wait("opened", 4)
    clock.now += limits.grace_s
    opened[0].link.trusted = True
    with dialled(end) as fifth, dialled(end) as newcomer:
        assert closed_by_peer(strangers[1])
        newcomer.sendall(frame_of(b"hello"))
        end.receiver.wait("received")
        strangers[0].sendall(frame_of(b"I am trusted"))
        end.receiver.wait("received", 2)
        fifth.sendall(frame_of(b"I am not"))
        end.receiver.wait("received", 3)
    assert "others want to get in" in str(end.receiver.of("closed")[0].error)
    for stranger in strangers:
        stranger.close()


def test_a_newcomer_waits_while_all_before_it_have_just_come(open_end: Callable[..., End]) -> None:
    """Otherwise a peer that comes often enough would leave no other the time for a handshake."""
    clock, limits = Clock(), Strangers(max_links=2)
    end = open_end(SocketTransport(clock=clock, strangers=limits), trusts=False)
    first, second = dialled(end), dialled(end)
    end.receiver.wait("opened", 2)
    with first, second, dialled(end) as third:
        third.sendall(frame_of(b"third"))
        first.sendall(frame_of(b"first"))
        end.receiver.wait("received")
        time.sleep(0.1)
        assert len(end.receiver.of("opened")) == 2
        clock.now += limits.grace_s + 1e-6
        second.sendall(frame_of(b"second"))  # wakes the thread, whose clock stands still
        assert closed_by_peer(first)
        end.receiver.wait("opened", 3)
        end.receiver.wait("received", 3)


def test_newcomers_come_in_at_a_pace(open_end: Callable[..., End]) -> None:
    """Otherwise strangers that come again at once would have the I/O thread to themselves."""
    clock, all_are_here = Clock(), threading.Event()
    end = open_end(SocketTransport(clock=clock), trusts=False)
    end.receiver.hooks["opened"] = lambda _: all_are_here.wait(TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(dialled(end)) for _ in range(2 * ACCEPTS)]
        all_are_here.set()
        crowd[0].sendall(frame_of(b"a look at all links"))
        end.receiver.wait("received")
        assert len(end.receiver.of("opened")) == ACCEPTS
        clock.now += PACE_S + 1e-6
        crowd[0].sendall(frame_of(b"wakes the thread, whose clock stands still"))
        end.receiver.wait("opened", 2 * ACCEPTS)


def test_who_is_out_of_descriptors_turns_out_a_stranger(
    open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = open_end(SocketTransport(strangers=PATIENT), trusts=False)
    accept, broken = socket.socket.accept, [True]

    def scarce(sock: socket.socket) -> object:
        if broken:
            broken.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    with dialled(end) as stranger:
        end.receiver.wait("opened")
        monkeypatch.setattr(socket.socket, "accept", scarce)
        with dialled(end) as newcomer:
            assert closed_by_peer(stranger)
            newcomer.sendall(frame_of(b"hello"))
            end.receiver.wait("received")
    assert "no more descriptors" in str(end.receiver.of("closed")[0].error)


@pytest.mark.parametrize("name", ["max_links", "max_links_per_source", "grace_s", "first_message_s", "message_s"])
def test_limits_that_let_nobody_in(name: str) -> None:
    for value in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match=f"^{name} must be"):
            Strangers(**{name: value})  # type: ignore[arg-type]


def test_parts_of_frames_are_bounded_together(open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch) -> None:
    """All links together have room for 16 of the longest frames that were announced and sent in part."""
    monkeypatch.setattr("pdinfer.kv.transports.stream.transport.MAX_ARRIVING_BYTES", 3 * MAX_FRAME_BYTES)
    end = open_end()
    long = frame_of(bytes(MAX_FRAME_BYTES))
    slow = [dialled(end) for _ in range(8)]
    for peer in slow:
        peer.sendall(long[:-1])
    end.receiver.wait("closed", 5)
    assert all("a part of a frame" in str(call.error) for call in end.receiver.of("closed"))
    assert end.transport.limits.arriving.num_bytes == 3 * MAX_FRAME_BYTES  # type: ignore[attr-defined]
    for peer in slow:
        peer.close()
    end.receiver.wait("closed", 8)
    assert end.transport.limits.arriving.num_bytes == 0  # type: ignore[attr-defined]
    with dialled(end) as honest:
        honest.sendall(long)
        end.receiver.wait("received")


def test_a_dead_process_closes_the_link(open_end: Callable[..., End], tmp_path: Path) -> None:
    end = open_end(SocketTransport(path=tmp_path / "end.sock"))
    child = context().Process(target=say_alive, args=(end.endpoints[0],), daemon=True)
    child.start()
    try:
        end.receiver.wait("received")
        os.kill(child.pid, signal.SIGSTOP)  # otherwise it may take all before it dies
        pending = end.transport.write(end.receiver.of("opened")[0].link, b"w", [(0, 1 << 16)] * 1000)
    finally:
        child.kill()
        child.join()
    (call,) = end.receiver.wait("closed")
    assert isinstance(call.error, TransferError)
    assert pending.error is not None


def test_outstanding_transfers_fail_when_the_transport_closes(open_end: Callable[..., End]) -> None:
    left, right = open_end(num_bytes=32 << 20), open_end(num_bytes=32 << 20)
    stuck = threading.Event()
    right.receiver.hooks["received"] = lambda *_: stuck.wait(TIMEOUT_S)
    link, _ = left.connect(right)
    left.transport.send(link, b"f")
    transfers = [left.transport.write(link, b"w", [(0, 32 << 20)]) for _ in range(3)]
    left.transport.close()
    assert all(t.done and t.error is not None for t in transfers)
    stuck.set()


def test_discarding_takes_no_memory(open_end: Callable[..., End]) -> None:
    end = open_end()
    message = write_of(b"w", bytes(8 << 20)) + frame_of(b"after")
    with dialled(end) as peer:
        end.receiver.wait("opened")
        tracemalloc.start()
        peer.sendall(message)
        end.receiver.wait("received")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 256 << 10


def test_a_closed_link_lets_go_of_the_memory(open_end: Callable[..., End]) -> None:
    end = open_end()
    end.receiver.hooks["place"] = anywhere
    with dialled(end) as peer:
        peer.sendall(write_of(b"w", b"part", announced=1000)[:-10])
        link = end.receiver.wait("place")[0].link
        end.transport.fence(link)
        end.memory.data.append(0)  # BufferError while anything still refers to the bytes


def test_a_big_transfer_does_not_starve_a_small_one(open_end: Callable[..., End]) -> None:
    left, right = open_end(num_bytes=64 << 20), open_end(num_bytes=64 << 20)
    sent = threading.Event()

    def place(_: Link, __: bytes, size: int) -> Spans:
        assert sent.wait(TIMEOUT_S)
        return [(0, size)]

    right.receiver.hooks["place"] = place
    big, _ = left.connect(right)
    small, theirs = left.connect(right)
    transfers = [left.transport.write(big, b"w", [(0, 64 << 20)]) for _ in range(4)]
    left.transport.send(small, b"beat")
    sent.set()
    for transfer in transfers:
        finished(transfer)
    right.receiver.wait("received", 1, theirs)
    last = right.receiver.wait("placed", 4)[-1]
    names = [call.name for call in right.receiver.calls[: right.receiver.calls.index(last)]]
    assert "received" in names


def test_a_frame_is_not_left_waiting_in_the_buffer(open_end: Callable[..., End]) -> None:
    end = open_end()
    with dialled(end) as peer:
        for count in range(1, 60):
            peer.sendall(b"".join(frame_of(b"%d" % n) for n in range(count)))
        end.receiver.wait("received", sum(range(1, 60)))


def test_close_from_inside_a_callback(open_end: Callable[..., End]) -> None:
    left, right = open_end(), open_end()
    right.receiver.hooks["received"] = lambda *_: right.transport.close()
    link, _ = left.connect(right)
    left.transport.send(link, b"f")
    left.receiver.wait("closed")
    right.transport.close()
    assert right.receiver.of("closed")[0].error is None


def test_a_forked_child_is_refused(open_end: Callable[..., End], tmp_path: Path) -> None:
    left, right = open_end(), open_end(SocketTransport(path=tmp_path / "end.sock"))
    link, _ = left.connect(right)

    def is_refused() -> None:
        assert left.num_refused(link, right) == 4
        left.transport.close()
        right.transport.close()

    check_ended(fork(is_refused))
    left.transport.send(link, b"the parent goes on")
    right.receiver.wait("received")
    assert (tmp_path / "end.sock").exists()


def test_an_end_with_digests_takes_no_write_without_one(open_end: Callable[..., End]) -> None:
    strict, plain = open_end(), open_end(SocketTransport(digest=False))
    for end in (strict, plain):
        end.receiver.hooks["place"] = anywhere
    link, _ = strict.connect(plain)
    assert finished(strict.transport.write(link, b"w", [(0, 8)])).error is None
    assert plain.receiver.wait("placed")[0].error is None
    link, theirs = plain.connect(strict)
    plain.transport.write(link, b"w", [(0, 8)])
    assert "digest=True" in str(strict.receiver.wait("closed", 1, theirs)[0].error)
    assert not strict.receiver.of("place")


@pytest.fixture
def full_backlog() -> Iterator[tuple[str, Callable[[], list[socket.socket]]]]:
    """Return (endpoint, accept) of a listener at which a connection stays half open until those before it are
    accepted."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        server.settimeout(TIMEOUT_S)
        address = server.getsockname()
        filler = socket.create_connection(address)
        accepted: list[socket.socket] = []

        def accept() -> list[socket.socket]:
            accepted.extend(server.accept()[0] for _ in range(2))
            return accepted

        yield f"tcp://127.0.0.1:{address[1]}", accept
        for sock in (filler, *accepted):
            sock.close()


@pytest.mark.parametrize("timeout_s", [0.0, 5.0])
def test_a_link_for_which_there_is_no_descriptor_fails_as_any_other(
    open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    """A channel dials lost peers again in its steps, which such a moment must not end."""
    end, other = open_end(), open_end()

    def scarce(*_: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", scarce)
    with pytest.raises(TransferError, match=r"cannot connect to .* within .* s: .*Too many open files"):
        end.transport.connect(other.endpoints, timeout_s=timeout_s)


def test_an_opening_link_takes_frames(
    open_end: Callable[..., End], full_backlog: tuple[str, Callable[[], list[socket.socket]]]
) -> None:
    end = open_end()
    endpoint, accept = full_backlog
    link = end.transport.connect([endpoint], timeout_s=0)
    end.transport.send(link, b"one")
    end.transport.send(link, b"two")
    time.sleep(0.05)
    assert not end.receiver.of("closed")
    ours = accept()[-1]
    expected = frame_of(b"one") + frame_of(b"two")
    assert ours.recv(len(expected), socket.MSG_WAITALL) == expected


def test_an_opening_link_can_be_fenced(
    open_end: Callable[..., End], full_backlog: tuple[str, Callable[[], list[socket.socket]]]
) -> None:
    end = open_end()
    link = end.transport.connect([full_backlog[0]], timeout_s=0)
    transfer = end.transport.write(link, b"w", [(0, 4)])
    end.transport.fence(link)
    assert transfer.error is not None
    assert [c.error for c in end.receiver.of("closed", link)] == [None]


@pytest.mark.parametrize("of", ["link", "thread"])
def test_a_fence_ends_when_an_interrupt_has_left_its_locks_closed(open_end: Callable[..., End], of: str) -> None:
    left, right = open_end(), open_end()
    link, _ = left.connect(right)
    transport: Any = left.transport
    lock = transport._connected(link)._lock if of == "link" else transport._io._lock
    check_returns(lambda: (lock.acquire(), transport.fence(link)))
    left.receiver.wait("closed")


def test_a_link_that_is_dialled_again_asks_no_resolver(
    open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = open_end(), open_end()
    endpoint = right.endpoints[0].replace("127.0.0.1", "localhost")
    left.transport.connect([endpoint], timeout_s=TIMEOUT_S)

    def resolver(*_: object, **__: object) -> None:
        raise AssertionError("the resolver may wait for seconds, and this may be the I/O thread")

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    link = left.transport.connect([endpoint], timeout_s=0)
    link.trusted = True
    left.transport.send(link, b"again")
    assert right.receiver.wait("received")[0].frame == b"again"


class TestAddresses:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "node-7", "::ffff:0.0.0.0"])
    def test_a_host_that_others_reach_must_be_meant(self, host: str) -> None:
        with pytest.raises(ConfigError, match="allow_remote"):
            SocketTransport(host=host).register(BytesMemory(8), Recorder())

    def test_a_key_lets_others_reach_us(self, open_end: Callable[..., End]) -> None:
        guarded = Recorder()
        guarded.authenticates = True
        transport = SocketTransport(host="0.0.0.0")
        try:
            assert transport.register(BytesMemory(8), guarded)
        finally:
            transport.close()

    @pytest.mark.parametrize("port", [-1, 65536, 70000, True, "80"])
    def test_ports_that_are_none(self, port: int) -> None:
        with pytest.raises(ConfigError, match="port"):
            SocketTransport(port=port)

    def test_a_port_in_use(self, open_end: Callable[..., End]) -> None:
        port = int(open_end().endpoints[0].rpartition(":")[2])
        transport = SocketTransport(port=port)
        with pytest.raises(ConfigError, match="in use"):
            transport.register(BytesMemory(8), Recorder())
        transport.close()

    def test_a_host_of_another_machine(self) -> None:
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
            SocketTransport(host="192.0.2.1", allow_remote=True).register(BytesMemory(8), Recorder())
        with pytest.raises(ConfigError, match=r"cannot listen on host '\.\.'"):  # no name can be encoded so
            SocketTransport(host="..", allow_remote=True).register(BytesMemory(8), Recorder())

    def test_a_wildcard_is_announced_by_name(self, open_end: Callable[..., End]) -> None:
        end = open_end(SocketTransport(host="0.0.0.0", allow_remote=True))
        assert end.endpoints[0].startswith(f"tcp://{socket.gethostname()}:")

    def test_peers_are_told_the_host_that_is_advertised(self, open_end: Callable[..., End]) -> None:
        right = open_end(SocketTransport(host="0.0.0.0", allow_remote=True, advertise="localhost"))
        assert right.endpoints[0].startswith("tcp://localhost:")
        left = open_end(SocketTransport(advertise="fd00::7"))
        assert left.endpoints[0].startswith("tcp://[fd00::7]:")
        link, _ = left.connect(right)
        left.transport.send(link, b"f")
        right.receiver.wait("received")

    @pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "tcp://a", "a:80", "a b", "[::1]", 7])
    def test_what_no_peer_can_dial_is_not_advertised(self, host: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="advertise must be"):
            SocketTransport(advertise=host)
        with pytest.raises(ConfigError, match="by its path"):
            SocketTransport(path=tmp_path / "s", advertise="a")

    def test_ipv6(self, open_end: Callable[..., End]) -> None:
        try:
            right = open_end(SocketTransport(host="::1"))
        except ConfigError:
            pytest.skip("this machine has no IPv6")
        assert right.endpoints[0].startswith("tcp://[::1]:")
        left = open_end()
        link, _ = left.connect(right)
        left.transport.send(link, b"f")
        right.receiver.wait("received")

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://127.0.0.1:x", "tcp://", "unix:///no/such.sock"])
    def test_nobody_there(self, open_end: Callable[..., End], endpoint: str) -> None:
        with pytest.raises(TransferError, match=endpoint):
            open_end().transport.connect([endpoint], timeout_s=1.0)

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "unix:///no/such.sock", "unix:///" + "x" * 200])
    def test_nobody_there_without_waiting(self, open_end: Callable[..., End], endpoint: str) -> None:
        end = open_end()
        link = end.transport.connect([endpoint], timeout_s=0)
        assert endpoint in str(end.receiver.wait("closed", 1, link)[0].error)

    @pytest.mark.parametrize("beyond", [1 << 16, 1 << 80])
    def test_a_port_has_16_bits(self, open_end: Callable[..., End], beyond: int) -> None:
        host, _, port = open_end().endpoints[0].rpartition(":")
        for timeout_s in (0.0, 1.0):
            with pytest.raises(TransferError, match="65535"):
                open_end().transport.connect([f"{host}:{int(port) + beyond}"], timeout_s=timeout_s)

    def test_connecting_needs_a_memory(self) -> None:
        with pytest.raises(ConfigError, match="register"):
            SocketTransport().connect(["tcp://127.0.0.1:1"], timeout_s=1.0)

    def test_a_socket_file_is_private_and_removed(self, open_end: Callable[..., End], tmp_path: Path) -> None:
        path = tmp_path / "end.sock"
        end = open_end(SocketTransport(path=path))
        assert end.endpoints == (f"unix://{path}",)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        end.transport.close()
        assert not path.exists()

    @pytest.mark.parametrize("kind", ["file", "link", "folder", "socket", "missing folder", "long", "nul"])
    def test_a_path_that_cannot_be_had(self, open_end: Callable[..., End], tmp_path: Path, kind: str) -> None:
        path = tmp_path / "end.sock"
        if kind == "file":
            path.write_text("mine")
        elif kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            open_end(SocketTransport(path=path))
        elif kind == "missing folder":
            path = tmp_path / "no" / "end.sock"
        elif kind == "long":
            path = tmp_path / ("x" * 200)
        else:
            path = Path("\0abstract")
        existed = os.path.lexists(path) if kind != "nul" else False
        with pytest.raises(ConfigError):
            SocketTransport(path=path).register(BytesMemory(8), Recorder())
        assert kind == "nul" or os.path.lexists(path) == existed

    def test_a_file_of_others_is_left_alone(self, open_end: Callable[..., End], tmp_path: Path) -> None:
        path = tmp_path / "end.sock"
        end = open_end(SocketTransport(path=path))
        path.unlink()
        path.write_text("someone else's")
        end.transport.close()
        assert path.read_text() == "someone else's"

    def test_a_path_excludes_a_port(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="both"):
            SocketTransport(path=tmp_path / "end.sock", port=1)


@given(lengths=st.lists(st.integers(0, 5), max_size=50), steps=st.lists(st.integers(1, 7), min_size=300, max_size=300))
def test_buffers_are_consumed_however_they_are_cut(lengths: list[int], steps: list[int]) -> None:
    data = random.Random(0).randbytes(sum(lengths))
    views, position = [], 0
    for length in lengths:
        views.append(memoryview(data)[position : position + length])
        position += length
    digest = xxhash.xxh3_64()
    buffers = Buffers(views, digest)
    seen = b""
    for step in steps:
        if not buffers:
            break
        batch, num_bytes = buffers.batch()
        assert num_bytes == sum(map(len, batch))
        taken = b"".join(batch)[:step]
        seen += taken
        buffers.advance(len(taken))
    assert seen == data
    assert digest.digest() == xxhash.xxh3_64(data).digest()


def test_the_wire_looks_like_this(open_end: Callable[..., End]) -> None:
    end = open_end()
    end.memory.data[:4] = b"abcd"
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = end.transport.connect([f"tcp://127.0.0.1:{server.getsockname()[1]}"], timeout_s=TIMEOUT_S)
        end.transport.send(link, b"hi")
        end.transport.write(link, b"w", [(2, 2), (0, 2)])
        peer, _ = server.accept()
    head = b"pdkv\x02\x02\x01\x00" + (1).to_bytes(4, "little") + (4).to_bytes(8, "little") + b"w" + b"cdab"
    expected = b"pdkv\x02\x01\x00\x00" + (2).to_bytes(4, "little") + bytes(8) + b"hi"
    expected += head + xxhash.xxh3_64(head).intdigest().to_bytes(8, "little")
    with peer:
        assert peer.recv(len(expected), socket.MSG_WAITALL) == expected
