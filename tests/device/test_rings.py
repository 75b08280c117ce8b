"""Landing rings in a device's memory, which a NIC would write. Here an engine copies bytes of this process."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kv.copies import WORD_BYTES, DeviceCopies
from pdinfer.kv.transports import mooncake
from pdinfer.kv.transports.one_sided import block
from pdinfer.kv.transports.one_sided.ring import PROBE_BYTES
from pdinfer.kv.transports.one_sided.transport import RingTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.view import PageMemory
from tests.conformance.ring_network import Network, Write
from tests.conformance.test_ring_transport import SLOT_BYTES
from tests.conformance.transport_ends import End, Recorder, closing, finished
from tests.device.test_transfers import contents, pool_of, spans_of
from tests.forks import FAR_S
from tests.simulated.watch import Watch

LATE_BYTES = 32


@pytest.fixture
def ends(device: torch.device) -> Iterator[tuple[End, End, Network]]:
    """Two connected ends with pools on the device. What arrives goes to the tokens from which it was sent, in other
    pages."""
    network = Network()
    with closing() as made:
        for seed in range(2):
            pool: Any = pool_of(device, "latent", "index_k", seed=seed)
            sizes = {"slot_bytes": SLOT_BYTES, "num_slots": 3}
            transport = RingTransport("ring", network.segment, SocketTransport(), **sizes, digest=False, on_device=True)
            made.append(End(transport, pool))
        yield made[0], made[1], network
    assert not network.misuses


def test_pages_travel_from_one_device_to_the_other_without_the_host(ends: tuple[End, End, Network]) -> None:
    left, right, network = ends
    ours, theirs = left.memory, right.memory
    assert isinstance(ours, PageMemory)
    assert isinstance(theirs, PageMemory)
    source = spans_of(ours, range(3, 23), range(3))
    target = spans_of(theirs, range(3, 23), range(3), seed=9)
    right.receiver.hooks["place"] = lambda *_: target
    link, _ = left.connect(right)
    ready = ours.computed()
    with Watch(everywhere=True) as watch:
        for _ in range(2):
            assert finished(left.transport.write(link, b"w", source, ready=ready)).error is None
        right.receiver.wait("placed", 2)
    assert contents(theirs, target) == contents(ours, source)
    assert len(network.payloads()) == 2 * -(-sum(length for _, length in source) // (SLOT_BYTES - WORD_BYTES))
    assert watch.totals()["pageable"] == 0
    back = [count for line, count in watch.counts["pinned"].items() if "to the host" in line]
    assert sum(back) == len(network.payloads())  # the number behind each part, and nothing else
    sender, receiver = network.engines.values()
    assert set(sender.memory.values()) == {SLOT_BYTES}
    assert list(receiver.memory.values()) == [3 * SLOT_BYTES + PROBE_BYTES]


def written(ends: tuple[End, End, Network]) -> tuple[bytes, bytes, BaseException | None]:
    """Write pages once. Return what they hold at both ends, and what the receiver was told."""
    left, right, _ = ends
    ours: Any = left.memory
    theirs: Any = right.memory
    source, target = spans_of(ours, range(3, 13), range(3)), spans_of(theirs, range(3, 13), range(3), seed=9)
    right.receiver.hooks["place"] = lambda *_: target
    link, _ = left.connect(right)
    finished(left.transport.write(link, b"w", source, ready=ours.computed()))
    right.receiver.wait("placed", 1)
    (error,) = [call.error for call in right.receiver.calls if call.name == "placed"]
    return contents(ours, source), contents(theirs, target), error


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> deque[tuple[int, bytes]]:
    """The last bytes of parts, and their addresses, which are between the NIC and the device when the sender has heard
    that the parts have landed."""
    late: deque[tuple[int, bytes]] = deque()

    def land(write: Write) -> None:
        whole = ctypes.string_at(write.source, write.num_bytes)
        there = write.num_bytes - (LATE_BYTES if write.num_bytes > PROBE_BYTES else 0)
        ctypes.memmove(write.target, whole, there)
        late.append((write.target + there, whole[there:]))

    monkeypatch.setattr(Write, "land", land)
    return late


def test_pages_take_what_has_reached_the_device(
    ends: tuple[End, End, Network], held: deque[tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, num_looks = DeviceCopies.fetch, itertools.count()

    def looked(copies: DeviceCopies, block_N: torch.Tensor) -> bytes:
        if next(num_looks) % 3 == 2:
            while held:
                address, last = held.popleft()
                ctypes.memmove(address, last, len(last))
        return fetch(copies, block_N)

    monkeypatch.setattr(DeviceCopies, "fetch", looked)
    monkeypatch.setattr(block, "ARRIVAL_S", FAR_S)
    ours, theirs, error = written(ends)
    assert error is None
    assert theirs == ours


def test_what_never_reaches_the_device_does_not_verify(
    ends: tuple[End, End, Network], held: deque[tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "ARRIVAL_S", 0.0)
    _, _, error = written(ends)
    assert "did not verify" in str(error)


def test_rings_on_a_device_need_a_pool_there_and_no_digest() -> None:
    stream = SocketTransport()
    with pytest.raises(ConfigError, match="nothing digests what a NIC writes to a device"):
        RingTransport("ring", Network().segment, stream, on_device=True)
    with pytest.raises(ConfigError, match="slot_bytes divided by 8"):
        RingTransport("ring", Network().segment, stream, on_device=True, digest=False, slot_bytes=100)
    transport = RingTransport("ring", Network().segment, stream, on_device=True, digest=False)
    with pytest.raises(ConfigError, match="need a pool that lies there"):
        transport.register(pool_of(torch.device("cpu"), "latent"), Recorder())


def test_gpu_direct_is_refused_where_the_nic_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(reason: str, protocol: str = "rdma") -> None:
        with pytest.raises(BackendUnavailable, match=f"gpu_direct=True was asked for, and {reason}"):
            mooncake.MooncakeTransport(protocol=protocol, digest=False, gpu_direct=True)

    refused('protocol is "tcp"', "tcp")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("there is no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mooncake, "PEER_MEMORY", tmp_path / "nvidia_peermem")
    refused("the kernel module nvidia_peermem is not loaded")
    (tmp_path / "nvidia_peermem").mkdir()
    monkeypatch.setenv("MC_IB_PCI_RELAXED_ORDERING", "1")
    refused("MC_IB_PCI_RELAXED_ORDERING=1 lets the last bytes of a write arrive before others: set it to 0")
    monkeypatch.setenv("MC_IB_PCI_RELAXED_ORDERING", "0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    refused("PYTORCH_CUDA_ALLOC_CONF asks for expandable_segments, whose memory no NIC can write: take that out")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(mooncake, "_is_ordered", lambda device: device == 0)
    refused(r"CUDA devices \[1\] do not take ordered writes")
