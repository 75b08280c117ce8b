"""The real Mooncake engine over TCP: the suite, a channel, and peers that die, freeze and fork."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import xxhash

from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports import mooncake
from pdinfer.kv.transports.base import Link, Transport
from pdinfer.kv.transports.mooncake import MooncakeEngine, MooncakeTransport
from pdinfer.kv.transports.one_sided import writer
from pdinfer.testing.simulation import VirtualClock
from tests.backends import ROOT, child_environment, need_mooncake
from tests.conformance.mooncake_peer import serve
from tests.conformance.ring_network import writers
from tests.conformance.transport_ends import BytesMemory, End, anywhere, closing, finished
from tests.conformance.transport_suite import TransportSuite
from tests.forks import check_ended, context, fork
from tests.unit.kv.channel.channels import Case, handoff, pool_of, settled
from tests.waiting import TIMEOUT_S, wait_until

SLOT_BYTES = 1 << 20
MEMORY_BYTES = 16 << 20


@pytest.fixture(scope="module")
def engines() -> tuple[MooncakeEngine, MooncakeEngine]:
    """Make two engines for all tests, since one takes a second to end."""
    need_mooncake()
    return MooncakeEngine(), MooncakeEngine()


class TestMooncake(TransportSuite):
    keeps_connections = True

    @pytest.fixture(autouse=True)
    def with_engines(self, engines: tuple[MooncakeEngine, MooncakeEngine]) -> None:
        self._engines = engines

    def make_pair(self) -> tuple[Transport, Transport]:
        left, right = (MooncakeTransport(engine=engine, slot_bytes=SLOT_BYTES) for engine in self._engines)
        return left, right

    def test_nothing_leaks(self) -> None:
        # An engine opens up to four connections to a peer, when as many writes are under way, and keeps them.
        with self.ends(8 << 20) as (left, right):
            right.receiver.hooks["place"] = anywhere
            links = [left.connect(right)[0] for _ in range(6)]
            for link in links:
                left.transport.write(link, b"w", [(0, 8 << 20)])
            right.receiver.wait("placed", 6)
        super().test_nothing_leaks()


@attrs.define
class MooncakeCase(Case):
    """Ends of a channel over the two engines in turn."""

    engines: tuple[MooncakeEngine, ...] = ()

    def end(self, pool: PagePool | None = None) -> KVChannel:
        engine = self.engines[len(self.open) % 2]
        self.open.append(KVChannel(pool or pool_of(), MooncakeTransport(engine=engine, slot_bytes=16)))
        return self.open[-1]


@pytest.mark.parametrize("sizes", [(4, 4), (2, 8), (8, 2)])
def test_a_channel_hands_over_pages_of_any_size(
    engines: tuple[MooncakeEngine, MooncakeEngine], sizes: tuple[int, int]
) -> None:
    case = MooncakeCase("mooncake", engines=engines)
    prefill, decode = case.pair(*sizes)
    for start in (0, 8):
        grant = case.grant(decode, prefill, tokens=range(start, start + 11))
        prefill.accept(grant)
        pages = case.source(prefill, grant)
        case.push_all(prefill, grant, pages)
        finished(prefill.finish(grant, handoff(grant, prefill)))
        assert [handoff.error for handoff in settled(decode)] == [None]
        assert case.arrived(decode, grant) == case.sent(prefill, grant.tokens, pages)
    for end in case.open:
        end.close()


# -- peers in processes of their own -----------------------------------------------------------------------------------


class Process:
    """`mooncake_peer` in a process of its own."""

    def __init__(self) -> None:
        self._told, theirs = context().Pipe()
        self._process = context().Process(target=serve, args=(theirs, MEMORY_BYTES, SLOT_BYTES), daemon=True)
        self._process.start()
        theirs.close()

    @cached_property
    def endpoint(self) -> str:
        return self._told.recv()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture(scope="module")
def peers(engines: object) -> Iterator[tuple[Process, Process]]:
    """Start a peer that a test may kill, and one for all other tests."""
    started = Process(), Process()
    yield started
    for process in started:
        process.end()


@pytest.fixture
def peer(peers: tuple[Process, Process]) -> Process:
    return peers[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Let no time pass for those who write, unless a test says so: they give up on nothing because it is slow."""
    clock = VirtualClock()
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=clock, sleep=lambda _: time.sleep(0.001)))
    return clock


@pytest.fixture
def sender(engines: tuple[MooncakeEngine, MooncakeEngine], clock: VirtualClock) -> Iterator[End]:
    """Make our end, with random bytes, which gives up on a write after half a second."""
    transport = MooncakeTransport(engine=engines[0], slot_bytes=SLOT_BYTES, timeout_s=0.5)
    with closing() as ends:
        ends.append(end := End(transport, BytesMemory(MEMORY_BYTES)))
        end.memory.data[:] = random.Random(9).randbytes(MEMORY_BYTES)
        yield end


def dial(end: End, process: Process) -> Link:
    link = end.transport.connect([process.endpoint], timeout_s=TIMEOUT_S)
    link.trusted = True
    return link


def answer(end: End, link: Link) -> str:
    """Return the peer's sum of its memory, once it has placed everything that was sent before, undamaged."""
    count = sum(call.frame.startswith(b"sum") for call in end.receiver.of("received", link)) + 1
    end.transport.send(link, b"sum")
    wait_until(lambda: len(sums(end, link)) == count)
    assert not any(b"damaged" in call.frame for call in end.receiver.of("received", link))
    return sums(end, link)[-1]


def sums(end: End, link: Link) -> list[str]:
    frames = [call.frame for call in end.receiver.of("received", link)]
    return [frame[4:].decode() for frame in frames if frame.startswith(b"sum")]


def digest_of(end: End) -> str:
    return f"{xxhash.xxh3_64_intdigest(end.memory.data):016x}"


def test_a_peer_that_dies_in_the_middle_of_a_write(sender: End, peers: tuple[Process, Process]) -> None:
    first, second = peers
    link = dial(sender, first)
    transfers = [sender.transport.write(link, b"0", [(0, MEMORY_BYTES)]) for _ in range(20)]
    sender.receiver.wait("received", 1, link)
    first.signal(signal.SIGKILL)
    assert sender.receiver.wait("closed", 1, link)[0].error is not None
    for transfer in transfers:
        finished(transfer)
    assert transfers[-1].error is not None
    wait_until(lambda: not writers())
    other = dial(sender, second)
    sender.transport.write(other, b"0", [(0, MEMORY_BYTES)])
    assert answer(sender, other) == digest_of(sender)


class Freezing:
    """An engine of which no write lands while its peers are frozen. The kernel may take some megabytes in their place,
    and then the engine says that these have landed."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.is_frozen = engine, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def transfer_check_status(self, number: int) -> int:
        return 0 if self.is_frozen else self._engine.transfer_check_status(number)


def test_a_peer_that_freezes_and_thaws_gets_the_write_once_more(
    engines: tuple[MooncakeEngine, MooncakeEngine],
    sender: End,
    peer: Process,
    clock: VirtualClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def given_up() -> bool:
        clock.advance(0.1)
        return "may land late" in caplog.text

    monkeypatch.setattr(engines[0], "engine", engine := Freezing(engines[0].engine))
    link = dial(sender, peer)
    sender.transport.write(link, b"0", [(0, MEMORY_BYTES)])
    assert answer(sender, link) == digest_of(sender)
    for _ in range(2):
        caplog.clear()
        sender.memory.data.reverse()
        peer.signal(signal.SIGSTOP)
        engine.is_frozen = True
        sender.transport.write(link, b"0", [(0, MEMORY_BYTES)])
        wait_until(given_up)
        time.sleep(0.2)
        peer.signal(signal.SIGCONT)
        engine.is_frozen = False
        assert answer(sender, link) == digest_of(sender)
    assert not sender.receiver.of("closed", link)


def test_a_frozen_peer_is_given_up_at_once_and_what_lands_late_lands_nowhere(sender: End, peer: Process) -> None:
    link = dial(sender, peer)
    sender.transport.write(link, b"0", [(0, MEMORY_BYTES)])
    assert answer(sender, link) == digest_of(sender)
    peer.signal(signal.SIGSTOP)
    transfers = [sender.transport.write(link, b"0", [(0, MEMORY_BYTES)]) for _ in range(2)]
    time.sleep(0.3)
    sender.transport.fence(link)
    wait_until(lambda: not writers())
    assert all(transfer.done for transfer in transfers)
    sender.memory.data[:] = random.Random(10).randbytes(MEMORY_BYTES)
    peer.signal(signal.SIGCONT)
    link = dial(sender, peer)
    for _ in range(3):
        sender.memory.data.reverse()
        sender.transport.write(link, b"0", [(0, MEMORY_BYTES)])
        assert answer(sender, link) == digest_of(sender)


def test_closing_does_not_wait_for_a_frozen_peer(peer: Process) -> None:
    transport = MooncakeTransport(slot_bytes=SLOT_BYTES)
    end = End(transport, BytesMemory(MEMORY_BYTES))
    link = dial(end, peer)
    transport.write(link, b"0", [(0, MEMORY_BYTES)])
    answer(end, link)
    peer.signal(signal.SIGSTOP)
    for _ in range(3):
        transport.write(link, b"0", [(0, MEMORY_BYTES)])
    time.sleep(0.3)
    began = time.monotonic()
    transport.close()
    assert time.monotonic() - began < TIMEOUT_S
    wait_until(lambda: not writers())
    peer.signal(signal.SIGCONT)


def test_a_forked_child_is_refused_and_can_end(engines: tuple[MooncakeEngine, MooncakeEngine]) -> None:
    left, right = (End(MooncakeTransport(engine=engine), BytesMemory(64)) for engine in engines)
    right.receiver.hooks["place"] = anywhere
    link, _ = left.connect(right)
    left.transport.write(link, b"w", [(0, 64)])
    right.receiver.wait("placed")

    def is_refused() -> None:
        assert left.num_refused(link, right) == 4
        left.transport.close()
        for engine in engines:
            engine.close()  # what joins threads that this process does not have never returns

    check_ended(fork(is_refused))
    left.transport.write(link, b"w", [(0, 64)])
    right.receiver.wait("placed", 2)
    for end in (left, right):
        end.transport.close()


@pytest.mark.full
def test_a_host_that_never_closes_ends_all_the_same(engines: object) -> None:
    program = """
import sys
from tests.conformance.mooncake_peer import Peer
one, two = Peer(1 << 20, 1 << 16), Peer(1 << 20, 1 << 16)
link = one.transport.connect(two.endpoints, timeout_s=60)
link.trusted = True
one.transport.write(link, b"0", [(0, 1 << 20)])
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=child_environment(), timeout=TIMEOUT_S, check=True)


# -- what is not there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), "mooncake-transfer-engine-non-cuda"),
        (ImportError("libnuma.so.1: cannot open shared object file: No such file"), r"libnuma .*Debian: libnuma1\)"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), r"Debian: libibverbs1\)"),
        (OSError("libcurl.so.4: cannot open shared object file"), r"Debian: libcurl4\)"),
        (ImportError("libcudart.so.12: cannot open shared object file"), "without it install mooncake-.*-non-cuda"),
        (ImportError("undefined symbol: x"), "libibverbs1 librdmacm1 libnuma1 libcurl4"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(mooncake.importlib, "import_module", refuse)
    with pytest.raises(BackendUnavailable, match=sentence):
        MooncakeTransport()


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake.importlib, "import_module", lambda _: None)
    monkeypatch.setattr(mooncake.importlib.metadata, "version", lambda _: "0.3.12.post2")
    with pytest.raises(BackendUnavailable, match=r"0\.3\.12\.post2.*0\.3\.13"):
        MooncakeTransport()


def test_rdma_needs_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mooncake, "RDMA_DEVICES", tmp_path)
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    with pytest.raises(BackendUnavailable, match="no RDMA device"):
        MooncakeTransport(protocol="rdma")
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(BackendUnavailable, match=r"\['mlx5_1'\]; this machine has \['mlx5_0'\]"):
        MooncakeTransport(protocol="rdma", devices=("mlx5_1",))
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(BackendUnavailable, match="MC_FORCE_TCP"):
        MooncakeTransport(protocol="rdma", devices=("mlx5_0",))


def test_the_environment_is_set_where_it_was_not_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mooncake.importlib, "import_module", lambda _: None)
    monkeypatch.setattr(mooncake.importlib.metadata, "version", lambda _: "0.3.13")
    monkeypatch.setenv("MC_TCP_SLICE_SIZE", "4096")
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    with caplog.at_level("INFO", "pdinfer"):
        MooncakeTransport()
    assert os.environ["MC_TCP_SLICE_SIZE"] == "4096"
    assert "'MC_FORCE_TCP': '1'" in caplog.text
    assert "'MC_TCP_SLICE_SIZE': '4096'" in caplog.text
    assert "MC_TCP_PROTO" not in os.environ
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(BackendUnavailable, match="MC_TCP_PROTO"):
        MooncakeTransport()


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": "udp"},
        {"devices": "mlx5_0", "protocol": "rdma"},
        {"devices": ("a,b",), "protocol": "rdma"},
        {"devices": ("mlx5_0",)},
        {"port": -1},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MooncakeTransport(**wrong)  # type: ignore[arg-type]
