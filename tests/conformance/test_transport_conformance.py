"""The transport suite on every transport of this library."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdinfer.kv.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.socket import SocketTransport
from pdinfer.kv.transport import Transport
from tests.conformance.transport_suite import TransportSuite


class TestLoopback(TransportSuite):
    def make_pair(self) -> tuple[Transport, Transport]:
        hub = LoopbackHub()
        return LoopbackTransport(hub), LoopbackTransport(hub)


class TestTcp(TransportSuite):
    def make_pair(self) -> tuple[Transport, Transport]:
        return SocketTransport(), SocketTransport()


class TestUnix(TransportSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self._paths = (tmp_path / f"{n}.sock" for n in range(100))

    def make_pair(self) -> tuple[Transport, Transport]:
        return SocketTransport(path=next(self._paths)), SocketTransport(path=next(self._paths))
