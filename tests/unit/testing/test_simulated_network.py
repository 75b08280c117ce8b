"""The test kit itself: virtual time, nodes that stop and die, and each fault of the network by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.transports.base import TICK_S, Link, Transfer
from pdinfer.testing import NetworkFaults, Placement, SimNetwork, Simulation
from pdinfer.testing.network import SimTransport
from tests.conformance.transport_ends import BytesMemory, Recorder


class Pair:
    """Two nodes with a link that was dialled without waiting, and what each node was told."""

    def __init__(self, faults: NetworkFaults | None = None, *, seed: int = 0, placement=Placement.BY_RECEIVER) -> None:
        self.simulation = Simulation(seed)
        self.network = SimNetwork(self.simulation, faults)
        self.nodes: dict[str, tuple[SimTransport, BytesMemory, Recorder]] = {}
        for node in "ab":
            transport, memory, recorder = (
                self.network.transport(node, placement=placement),
                BytesMemory(64),
                Recorder(),
            )
            recorder.hooks["place"] = lambda link, frame, num_bytes: [(0, num_bytes)]
            self.endpoints = transport.register(memory, recorder)
            self.nodes[node] = (transport, memory, recorder)
        self.transport, self.memory, self.ours = self.nodes["a"]
        self.theirs = self.nodes["b"][2]
        self.link = self.transport.connect(self.endpoints, timeout_s=0)
        self.link.trusted = True
        self.run()

    def run(self, seconds: float = 0.1) -> None:
        self.simulation.run(timeout_s=seconds)

    def arrived(self) -> list[bytes]:
        return [call.frame for call in self.theirs.calls if call.name == "received"]

    def their_link(self) -> Link:
        return self.theirs.of("opened")[0].link

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.transport.send(self.link, frame)

    def write(self, payload: bytes) -> Transfer:
        self.memory.data[: len(payload)] = payload
        return self.transport.write(self.link, b"w", [(0, len(payload))])


def test_events_happen_in_order_of_time_and_are_part_of_the_trace():
    def run(seed: int) -> tuple[list[int], str]:
        simulation, seen = Simulation(seed), []
        for number in range(6):
            simulation.later(number // 3, partial(seen.append, number))
        assert simulation.run(until=lambda: len(seen) == 6, timeout_s=10)
        assert simulation.clock() == 1
        return seen, simulation.trace

    runs = [run(seed) for seed in range(8)]
    assert all(sorted(seen[:3]) == [0, 1, 2] for seen, _ in runs)
    assert len({tuple(seen) for seen, _ in runs}) > 1, "what is due at once comes in any order"
    assert [run(seed) for seed in range(8)] == runs


def test_time_passes_though_nothing_happens():
    simulation = Simulation()
    assert not simulation.step()
    assert not simulation.run(timeout_s=5)
    assert simulation.clock() == 5


def test_a_frozen_node_catches_up_and_a_crashed_one_does_not():
    simulation, seen = Simulation(), []
    for node in ("frozen", "crashed"):
        simulation.later(1, partial(seen.append, node), node=node)
    simulation.freeze("frozen")
    simulation.crash("crashed")
    assert not simulation.running("frozen")
    assert simulation.alive("frozen")
    assert not simulation.alive("crashed")
    simulation.run(timeout_s=2)
    assert seen == []
    simulation.thaw("frozen")
    simulation.restart("crashed")
    simulation.run(timeout_s=2)
    assert seen == ["frozen"], "what a process had planned died with it"
    assert simulation.running("crashed")


def test_a_loop_runs_until_its_node_dies():
    simulation, turns = Simulation(), []
    simulation.every(0.1, lambda: turns.append(simulation.clock()), node="a")
    simulation.run(timeout_s=1)
    assert 8 <= len(turns) <= 12
    simulation.crash("a")
    count = len(turns)
    simulation.run(timeout_s=1)
    assert len(turns) == count


def test_frames_and_payloads_arrive_in_order():
    pair = Pair(NetworkFaults(slow=0.5, late_read=0.5, late_done=0.5, pieces=0.5))
    transfers = []
    for number in range(5):
        pair.send(bytes([65 + number]))
        transfers.append(pair.write(bytes(range(8))))
        pair.run(2)
    assert [call.frame for call in pair.theirs.calls if call.name in ("received", "placed")] == [
        frame for number in range(5) for frame in (bytes([65 + number]), b"w")
    ]
    assert bytes(pair.nodes["b"][1].data[:8]) == bytes(range(8))
    assert all(transfer.done and transfer.error is None for transfer in transfers)
    assert not pair.theirs.broken
    assert pair.network.refusals == []


def test_a_source_that_is_read_late_shows_what_is_there_then():
    pair = Pair(NetworkFaults(late_read=1.0))
    transfer = pair.write(b"old")
    pair.memory.data[:3] = b"new"
    assert not transfer.done
    pair.run(2)
    assert transfer.done
    assert bytes(pair.nodes["b"][1].data[:3]) == b"new"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("drop", lambda frames: len(frames) < 20),
        ("duplicate", lambda frames: len(frames) > 20),
        ("truncate", lambda frames: min(map(len, frames)) < 4),
        ("flip_frame", lambda frames: len(frames) == 20 and len(set(frames)) > 20 - len(set(frames) & FRAMES)),
        ("reorder", lambda frames: frames != sorted(frames) and len(frames) == 20),
    ],
)
def test_a_fault_of_frames(fault: str, check: Callable[[list[bytes]], bool]):
    pair = Pair()
    pair.network.faults = NetworkFaults(**{fault: 0.5})
    pair.send(*sorted(FRAMES))
    pair.run(1)
    assert check(pair.arrived())
    assert pair.network.fired[fault] > 0


FRAMES = {b"%04d" % number for number in range(20)}


def test_a_flipped_payload_does_not_verify():
    pair = Pair(NetworkFaults(flip_payload=1.0))
    pair.write(bytes(16))
    pair.run()
    assert "did not verify" in str(pair.theirs.of("placed")[0].error)


def test_nothing_passes_a_partition_until_it_is_healed():
    pair = Pair()
    pair.network.partition("a", "b")
    pair.send(b"1", b"2")
    pair.run(1)
    assert pair.arrived() == []
    with pytest.raises(TransferError, match="cannot connect"):
        pair.transport.connect(pair.endpoints, timeout_s=1)
    pair.network.heal()
    pair.run()
    assert pair.arrived() == [b"1", b"2"]


def test_both_ends_learn_of_a_cut():
    pair = Pair()
    assert pair.network.cut("a", "b") == 1
    pair.run(1)
    for recorder in (pair.ours, pair.theirs):
        (closed,) = recorder.of("closed")
        assert closed.error is not None
    assert pair.write(b"x").error is not None


def test_a_crash_closes_the_links_of_others_and_calls_nothing_here():
    pair = Pair()
    pair.simulation.crash("a")
    pair.run(1)
    assert pair.ours.of("closed") == []
    assert len(pair.theirs.of("closed")) == 1


def test_a_frozen_node_neither_hears_nor_ticks():
    pair = Pair()
    pair.simulation.freeze("b")
    ticks = pair.theirs.num_ticks
    pair.send(b"x")
    pair.run(10 * TICK_S)
    assert pair.arrived() == []
    assert pair.theirs.num_ticks == ticks
    assert pair.ours.num_ticks > ticks
    pair.simulation.thaw("b")
    pair.run(10 * TICK_S)
    assert pair.arrived() == [b"x"]
    assert pair.theirs.num_ticks > ticks
    assert pair.their_link().heard_at > 0


def test_a_fence_is_a_fence():
    pair = Pair()
    pair.network.faults = NetworkFaults(slow=1.0, pieces=1.0)
    pair.write(bytes(32))
    pair.nodes["b"][0].fence(pair.their_link())
    assert len(pair.theirs.of("closed")) == 1
    pair.run(5)
    assert pair.theirs.of("placed") == []
    assert len(pair.ours.of("closed")) == 1


def test_a_one_sided_write_that_failed_lands_in_a_slot_only():
    pair = Pair(NetworkFaults(late_landing=1.0), placement=Placement.THROUGH_SLOT)
    transfer = pair.write(b"late")
    pair.run(5)
    assert transfer.done
    assert transfer.error is not None
    assert pair.theirs.of("placed") == []
    assert bytes(pair.nodes["b"][1].data[:4]) == bytes(4)
    assert len(pair.theirs.of("closed")) == 1


def test_a_sender_that_writes_pages_itself_does_so_after_the_fence():
    pair = Pair(NetworkFaults(late_landing=1.0), placement=Placement.BY_SENDER)
    pair.write(b"late")
    assert pair.simulation.run(lambda: bool(pair.theirs.of("closed")), timeout_s=1)
    assert bytes(pair.nodes["b"][1].data[:4]) == bytes(4)
    pair.run(5)
    assert bytes(pair.nodes["b"][1].data[:4]) == b"late", "which is why page rule 0 forbids it"


def test_a_closed_transport_reads_nothing_more():
    pair = Pair(NetworkFaults(late_read=1.0, late_done=1.0))
    transfers = [pair.write(b"x") for _ in range(3)]
    pair.transport.close()
    assert all(transfer.done for transfer in transfers)
    pair.transport.close()
    with pytest.raises(TransferError, match="closed"):
        pair.transport.connect(pair.endpoints, timeout_s=1)


def test_what_cannot_be():
    pair = Pair()
    with pytest.raises(TransferError, match="cannot reach"):
        pair.transport.connect(("tcp://x:1",), timeout_s=1)
    with pytest.raises(ConfigError, match="one transport per channel"):
        pair.transport.register(BytesMemory(1), Recorder())
    nowhere = pair.transport.connect(("sim://nobody/0",), timeout_s=0)
    pair.run()
    assert pair.ours.of("closed")[0].link is nowhere


def test_a_receiver_that_refuses_closes_the_link_and_is_remembered():
    pair = Pair()

    def refuse(*_: object) -> None:
        raise TransferError("no")

    pair.theirs.hooks["received"] = refuse
    pair.send(b"x")
    pair.run()
    assert [node for node, _ in pair.network.refusals] == ["b"]
    assert len(pair.ours.of("closed")) == 1
