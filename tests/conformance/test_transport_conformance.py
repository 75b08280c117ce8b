"""The transport suite on every transport of this library."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdinfer.kv import fused
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import CAN_SHARE
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Transport
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.transports.shm.transport import ShmTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream import io_thread
from tests.conformance.transport_ends import BytesMemory, End, MemfdMemory
from tests.conformance.transport_suite import ProcessTransportSuite, TransportSuite
from tests.waiting import check_ends, started


class TestLoopback(TransportSuite):
    def make_pair(self) -> tuple[Transport, Transport]:
        hub = LoopbackHub()
        return LoopbackTransport(hub), LoopbackTransport(hub)

    def test_an_interrupted_host_leaves_no_link_behind(self, pair: tuple[End, End]) -> None:
        left, right = pair

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        right.receiver.hooks["place"] = interrupt
        link, theirs = left.connect(right)
        with pytest.raises(KeyboardInterrupt):
            left.transport.write(link, b"w", [(0, 1)])
        assert len(left.receiver.of("closed", link)) == len(right.receiver.of("closed", theirs)) == 1
        check_ends(started(right.transport.fence, theirs))

    def test_the_same_bytes_of_one_memory_are_not_copied(self) -> None:
        class Uncopied(BytesMemory):
            def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
                raise AssertionError("copied")

        hub, memory = LoopbackHub(), Uncopied(8)
        left, right = (End(LoopbackTransport(hub), memory) for _ in "12")
        right.receiver.hooks["place"] = lambda *_: [(2, 4)]
        link, _ = left.connect(right)
        assert left.transport.write(link, b"w", [(2, 4)]).error is None
        assert len(right.receiver.of("placed")) == 1
        assert left.transport.write(link, b"w", [(3, 4)]).error is not None


class StreamSuite(ProcessTransportSuite):
    """Their I/O thread is the same, and ticks more often here: no test needs its ticks to be far apart."""

    tick_s = 0.1

    @pytest.fixture(autouse=True)
    def ticks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(io_thread, "TICK_S", self.tick_s)


class TestTcp(StreamSuite):
    def make_pair(self) -> tuple[Transport, Transport]:
        return SocketTransport(), SocketTransport()


class TestUnix(StreamSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self._paths = (tmp_path / f"{n}.sock" for n in range(100))

    def make_pair(self) -> tuple[Transport, Transport]:
        return SocketTransport(path=next(self._paths)), SocketTransport(path=next(self._paths))


@pytest.mark.skipif(not CAN_SHARE, reason="shared memory needs Linux")
class TestShm(StreamSuite):
    """Both ends have their memory in a memfd, and payloads of all sizes are copied and digested in one pass."""

    digest = True

    @pytest.fixture(autouse=True)
    def passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused, "MIN_BYTES", 241)

    def make_pair(self) -> tuple[Transport, Transport]:
        return ShmTransport(digest=self.digest), ShmTransport(digest=self.digest)

    def make_memory(self, num_bytes: int, *, staged: bool = False) -> BytesMemory:
        return MemfdMemory(num_bytes, staged=staged)


@pytest.mark.full
class TestShmWithoutDigest(TestShm):
    digest = False


class TestShmInTwoPasses(TestShm):
    """No compiler is at hand."""

    @pytest.fixture(autouse=True)
    def passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused, "MIN_BYTES", 1 << 62)


class TestShmThroughARing(TestShm):
    """Neither end has its memory in a memfd: payloads are staged."""

    def make_memory(self, num_bytes: int, *, staged: bool = False) -> BytesMemory:
        return BytesMemory(num_bytes, staged=staged)


@pytest.mark.full
class TestTcpWithoutDigest(StreamSuite):
    def make_pair(self) -> tuple[Transport, Transport]:
        return SocketTransport(digest=False), SocketTransport(digest=False)


@pytest.mark.parametrize("suite", [TestShmWithoutDigest, TestTcpWithoutDigest])
def test_payloads_arrive_without_a_digest(suite: type[TransportSuite]) -> None:
    """Nothing else of a link knows whether there is one."""
    for staged in (False, True):
        suite().test_writes_are_placed_byte_for_byte(staged)
    suite().test_thousands_of_spans()
