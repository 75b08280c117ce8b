"""The thread that moves the bytes of a socket transport, when a turn of it fails."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdinfer.errors import TransferError
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.connection import StreamConnection
from tests.conformance.test_socket_transport import Clock, closed_by_peer, dialled
from tests.conformance.transport_ends import BytesMemory, End, Recorder, closing
from tests.waiting import check_returns, wait_until


@pytest.fixture
def open_end() -> Iterator[Callable[..., End]]:
    with closing() as ends:

        def make(*transport: SocketTransport) -> End:
            ends.append(End(*transport or [SocketTransport()], BytesMemory(1 << 16), Recorder()))
            return ends[-1]

        yield make


def port_of(end: End) -> int:
    return int(end.endpoints[0].rpartition(":")[2])


def test_a_failing_loop_closes_everything_loudly(
    open_end: Callable[..., End], caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(Clock):
        broken = False

        def __call__(self) -> float:
            if self.broken:
                raise OSError("no clock any more")
            return self.now

    clock = Breaking()
    left, right = open_end(), open_end(SocketTransport(clock=clock))
    link, _ = left.connect(right)
    clock.broken = True
    left.transport.send(link, b"wakes the loop")
    assert "I/O thread failed" in str(right.receiver.wait("closed")[0].error)
    assert left.receiver.wait("closed", 1, link)[0].error is not None
    wait_until(lambda: any(r.levelname == "CRITICAL" and r.name == "pdinfer" for r in caplog.records))
    clock.broken = False
    with pytest.raises(TransferError, match="closed"):
        right.transport.connect(left.endpoints, timeout_s=1)


def test_a_loop_that_fails_once_closes_its_links_and_goes_on(open_end: Callable[..., End]) -> None:
    class Failing(Clock):
        fails = False

        def __call__(self) -> float:
            if self.fails:
                self.fails = False
                raise MemoryError
            return self.now

    clock = Failing()
    left, right = open_end(), open_end(SocketTransport(clock=clock))
    link, _ = left.connect(right)
    clock.fails = True
    left.transport.send(link, b"wakes the loop")
    assert "I/O thread failed: MemoryError" in str(right.receiver.wait("closed")[0].error)
    left.receiver.wait("closed")
    link, _ = left.connect(right)
    left.transport.send(link, b"a new link")
    right.receiver.wait("received")


def test_a_newcomer_that_the_kernel_cannot_watch_is_closed_alone(
    open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = open_end(), open_end()
    link, _ = left.connect(right)
    register, is_full = selectors.DefaultSelector.register, [True]

    def scarce(selector: Any, sock: Any, *about: Any) -> Any:
        if is_full and isinstance(sock, socket.socket) and sock.getsockname()[1] == port_of(right):
            is_full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        return register(selector, sock, *about)

    monkeypatch.setattr(selectors.DefaultSelector, "register", scarce)
    with dialled(right) as newcomer:
        assert closed_by_peer(newcomer)
    assert "cannot be watched" in str(right.receiver.wait("closed")[0].error)
    left.transport.send(link, b"still here")
    right.receiver.wait("received")


def test_a_link_is_gone_whatever_fails_while_it_is_closed(
    open_end: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = open_end(), open_end()
    link, _ = left.connect(right)
    shut = StreamConnection.shut

    def fail(connection: StreamConnection, error: TransferError) -> bool:
        shut(connection, error)
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(StreamConnection, "shut", fail)
    check_returns(lambda: left.transport.fence(link))
    assert left.receiver.wait("closed", 1, link)[0].error is None
