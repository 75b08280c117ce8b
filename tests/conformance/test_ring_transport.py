"""Landing rings over an engine made for the tests, whose writes fail, hang and land late when told to."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import attrs
import pytest
import xxhash

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Landing, take
from pdinfer.kv.transports.base import Link, Transport
from pdinfer.kv.transports.one_sided.block import HostBlock, NamedEngine
from pdinfer.kv.transports.one_sided.ring import (
    MAX_SLOTS,
    PROBE_BYTES,
    Landed,
    RingIncoming,
    RingOffer,
    Signal,
    SignalMemory,
)
from pdinfer.kv.transports.one_sided.transport import RingTransport
from pdinfer.kv.transports.socket import SocketTransport
from tests.conformance.ring_network import FakeEngine, Network, Write, writers
from tests.conformance.transport_ends import BytesMemory, End, Recorder, anywhere, finished
from tests.conformance.transport_suite import TransportSuite
from tests.waiting import TIMEOUT_S, check_ends, wait_until

SLOT_BYTES = 1 << 12
NAME = "ring"


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause for a moment only, and let a limit pass in the tests that are about it."""
    monkeypatch.setattr("pdinfer.kv.transports.one_sided.writer.PAUSE_S", (0.01, 0.02))
    monkeypatch.setattr("pdinfer.kv.transports.one_sided.writer.MEND_S", TIMEOUT_S)
    monkeypatch.setattr("pdinfer.kv.transports.one_sided.transport.JOIN_S", TIMEOUT_S)


Pair = tuple[End, End, Link, Link]


@pytest.fixture
def pair(network: Network) -> Iterator[Callable[..., Pair]]:
    """Make two connected ends. The frame of a write names the offset where it goes."""
    ends: list[End] = []

    def make(
        num_bytes: int = 1 << 16,
        *,
        memory: Callable[[int], BytesMemory] = BytesMemory,
        left: dict[str, object] | None = None,
        **both: object,
    ) -> Pair:
        sizes: dict[str, object] = {"slot_bytes": SLOT_BYTES, "num_slots": 3, "timeout_s": 2 * TIMEOUT_S, **both}
        for more in ({**sizes, **(left or {})}, sizes):
            transport = RingTransport(NAME, network.segment, SocketTransport(), **more)  # type: ignore[arg-type]
            ends.append(End(transport, memory(num_bytes)))
            ends[-1].receiver.hooks["place"] = lambda _, frame, size: [(int(frame), size)]
        one, two = ends[-2:]
        one.memory.data[:] = random.Random(1).randbytes(num_bytes)
        return one, two, *one.connect(two)

    yield make
    network.unblock.set()
    for end in ends:
        end.transport.close()
        assert not end.receiver.broken
    assert not any(engine.memory for engine in network.engines.values()), "memory is still registered"
    assert not network.misuses


class TestSuite(TransportSuite):
    def make_pair(self) -> tuple[Transport, Transport]:
        network = Network()
        left, right = (RingTransport(NAME, network.segment, SocketTransport(), slot_bytes=1 << 18) for _ in "12")
        return left, right


def push(end: End, link: Link, offset: int, num_bytes: int) -> None:
    """Write from `offset` to the same offset."""
    end.transport.write(link, b"%d" % offset, [(offset, num_bytes)])


# -- where writes may land ---------------------------------------------------------------------------------------------


def test_a_write_takes_as_many_slots_as_it_needs_and_is_placed_once(
    pair: Callable[..., Pair], network: Network
) -> None:
    left, right, link, _ = pair()
    push(left, link, 5, 10 * SLOT_BYTES + 1)
    assert right.receiver.wait("placed")[0].error is None
    assert [len(right.receiver.of(name)) for name in ("place", "placed")] == [1, 1]
    assert right.memory.data[5 : 10 * SLOT_BYTES + 6] == left.memory.data[5 : 10 * SLOT_BYTES + 6]
    assert len(network.writes) == 11
    assert len({write.target for write in network.writes}) == 3


def test_nobody_is_given_memory_before_the_first_write(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, _ = pair()
    left.transport.send(link, b"hello")
    right.receiver.wait("received")
    assert not any(engine.memory for engine in network.engines.values())
    push(left, link, 0, 1)
    right.receiver.wait("placed")
    sender, receiver = network.engines.values()
    assert list(sender.memory.values()) == [SLOT_BYTES]
    assert list(receiver.memory.values()) == [3 * SLOT_BYTES + PROBE_BYTES]


def test_the_first_contact_does_not_wait_for_a_device(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, _ = pair()
    greeted: list[int] = []
    for _ in range(2):
        left.transport.write(link, b"0", [(0, 100)], ready=lambda: greeted.append(len(network.greetings)))
    right.receiver.wait("placed", 2)
    assert greeted == [1, 1]


def test_a_stranger_is_given_no_memory(pair: Callable[..., Pair], network: Network) -> None:
    left, right, _, _ = pair()
    right.receiver.hooks["opened"] = lambda link: setattr(link, "trusted", False)
    link, theirs = left.connect(right)
    push(left, link, 0, 1)
    assert "handshake" in str(right.receiver.wait("closed", 1, theirs)[0].error)
    assert not network.engines["host:1"].memory


def test_slots_of_different_sizes_fit(pair: Callable[..., Pair], network: Network) -> None:
    for size in (100, 10 * SLOT_BYTES):
        left, right, link, _ = pair(left={"slot_bytes": size})
        push(left, link, 0, 3 * SLOT_BYTES)
        assert right.receiver.wait("placed")[0].error is None
        assert right.memory.data[: 3 * SLOT_BYTES] == left.memory.data[: 3 * SLOT_BYTES]
        assert max(write.num_bytes for write in network.writes) == min(size, SLOT_BYTES)
        network.writes.clear()


# -- writes of which nothing is known ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["fail", "hang", "refuse"])
def test_a_write_that_failed_is_repeated_after_three_probes(
    pair: Callable[..., Pair], network: Network, fate: str
) -> None:
    left, right, link, _ = pair(timeout_s=0.05)
    network.fates.extend([fate, "land", "fail", "land", "land", "land"])
    push(left, link, 0, 100)
    left.transport.send(link, b"after it")
    assert right.receiver.wait("placed")[0].error is None
    right.receiver.wait("received")
    assert [call.name for call in right.receiver.calls[-3:]] == ["place", "placed", "received"]
    first, *probes, last = network.writes
    assert (first.source, first.target, first.num_bytes) == (last.source, last.target, last.num_bytes)
    assert [probe.num_bytes for probe in probes] == [PROBE_BYTES] * 5
    assert all(probe.target == probes[0].target for probe in probes)
    (ring,) = network.engines["host:1"].memory.items()
    assert probes[0].target == ring[0] + 3 * SLOT_BYTES


def test_what_lands_late_changes_nothing(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, _ = pair(timeout_s=0.02)
    network.fates.extend(["hang", "land", "land", "land", "land", "hang"])
    push(left, link, 0, SLOT_BYTES)
    right.receiver.wait("placed")
    push(left, link, SLOT_BYTES, SLOT_BYTES)
    right.receiver.wait("placed", 2)
    late = [write for write in network.payloads() if not write.status]
    assert len(late) == 2
    used = {write.target for write in network.payloads()}
    before = len(network.writes)

    def land_late(_: Write) -> None:
        for write in late:
            write.land()

    network.landed = land_late
    for start in range(2 * SLOT_BYTES, 1 << 16, 3 * SLOT_BYTES):
        push(left, link, start, min(3 * SLOT_BYTES, (1 << 16) - start))
    right.receiver.wait("placed", 7)
    assert [call.error for call in right.receiver.of("placed")] == [None] * 7
    assert right.memory.data == left.memory.data
    later = network.writes[before:]
    assert len({write.target for write in later}) == 1
    assert not {write.target for write in later} & used
    assert not {write.source for write in later} & {write.source for write in late}


def test_a_link_whose_slots_all_got_lost_is_closed(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, theirs = pair(timeout_s=0.02)
    for _ in range(3):
        network.fates.extend(["fail", "land", "land", "land", "land"])
    for n in range(4):
        push(left, link, n * SLOT_BYTES, SLOT_BYTES)
    assert "every slot" in str(left.receiver.wait("closed")[0].error)
    right.receiver.wait("closed", 1, theirs)
    assert len(right.receiver.of("placed")) == 3


def test_a_write_that_fails_twice_closes_the_link(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, theirs = pair()
    network.fates.extend(["fail", "land", "land", "land", "fail"])
    push(left, link, 0, 100)
    last = left.transport.write(link, b"1", [(0, 1)])
    assert "failed twice" in str(left.receiver.wait("closed")[0].error)
    right.receiver.wait("closed", 1, theirs)
    finished(last)
    assert not right.receiver.of("place")


def test_probing_ends(pair: Callable[..., Pair], network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdinfer.kv.transports.one_sided.writer.MEND_S", 0.3)
    left, right, link, theirs = pair(timeout_s=0.02)
    network.fates.extend(["fail", *itertools.islice(itertools.cycle(["land", "land", "fail", "hang"]), 400)])
    start = time.monotonic()
    push(left, link, 0, 100)
    assert "nothing reached it" in str(left.receiver.wait("closed")[0].error)
    assert time.monotonic() - start > 0.25
    right.receiver.wait("closed", 1, theirs)


def test_a_fence_does_not_wait_for_a_frozen_peer(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, theirs = pair()
    network.fates.append("hang")
    push(left, link, 0, SLOT_BYTES)
    wait_until(lambda: network.writes)
    start = time.monotonic()
    left.transport.fence(link)
    right.receiver.wait("closed", 1, theirs)
    wait_until(lambda: not any(engine.memory for engine in network.engines.values()))
    assert time.monotonic() - start < TIMEOUT_S
    assert [segment.retired_bytes for segment in network.segments] == [SLOT_BYTES, 3 * SLOT_BYTES + PROBE_BYTES]
    (late,) = network.writes
    late.land()
    link, _ = left.connect(right)
    push(left, link, 0, 1 << 16)
    right.receiver.wait("placed")
    late.land()
    assert right.memory.data == left.memory.data
    for engine in network.engines.values():
        assert not engine.past & engine.memory.keys(), "an address came back that a late write may hit"


def test_addresses_of_dead_rings_are_kept_but_not_their_memory(network: Network) -> None:
    segment = network.segment()
    mapped = [attrs.evolve(ring_of(segment)) for _ in range(5)]
    assert len({offer.address for offer in mapped}) == 5
    assert segment.retired_bytes == 5 * ((1 << 24) + PROBE_BYTES)
    assert resident_bytes(mapped) < 1 << 24


def ring_of(segment: NamedEngine) -> RingOffer:
    """Return the offer of a ring of 16 MiB that was filled and closed."""
    receiver, memory = Recorder(), BytesMemory(0)
    block = HostBlock(segment, (1 << 24) + PROBE_BYTES)
    offer = RingOffer(segment.name, block.address, 1 << 24, 1)
    ring = RingIncoming(Link("peer"), memory, receiver, block, offer, lambda _: None, digest=True)
    ctypes.memset(ring.offer.address, 1, 1 << 24)
    ring.close()
    return ring.offer


def resident_bytes(offers: list[RingOffer]) -> int:
    """Return the bytes of memory behind these rings. The kernel is asked page by page, because its table of mappings
    joins neighbours."""
    total = 0
    for offer in offers:
        resident = (ctypes.c_ubyte * (offer.slot_bytes // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.mincore(ctypes.c_void_p(offer.address), ctypes.c_size_t(offer.slot_bytes), resident)
        total += sum(page & 1 for page in resident) * mmap.PAGESIZE
    return total


def test_a_thread_that_hangs_in_the_engine_holds_up_nobody(
    pair: Callable[..., Pair], network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdinfer.kv.transports.one_sided.transport.JOIN_S", 0.1)
    left, right, link, theirs = pair()
    network.fates.append("block")
    push(left, link, 0, 100)
    queued = left.transport.write(link, b"1", [(0, 1)])
    wait_until(lambda: not network.fates)
    left.transport.fence(link)
    assert finished(queued).error is not None
    right.receiver.wait("closed", 1, theirs)
    other, _ = left.connect(right)
    push(left, other, 0, 100)
    right.receiver.wait("placed")
    left.transport.close()
    wait_until(lambda: len(writers()) == 1)  # another may be about to end
    (stuck,) = writers()
    assert stuck.daemon
    network.unblock.set()
    check_ends(stuck)
    network.engines["host:0"].memory.clear()  # this engine is gone


def test_a_link_does_not_look_dead_while_its_frames_wait(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, theirs = pair()
    network.fates.append("hang")
    push(left, link, 0, 100)
    left.transport.send(link, b"a beat")
    wait_until(lambda: network.writes)
    left.transport.send(link, b"another")
    heard = {theirs.heard_at}
    wait_until(lambda: heard.add(theirs.heard_at) or len(heard) > 2)
    assert left.receiver.num_ticks
    assert not right.receiver.of("received")
    network.writes[0].land()
    network.writes[0].status = 1
    assert [call.frame for call in right.receiver.wait("received", 2)] == [b"a beat", b"another"]


# -- bytes that do not verify ------------------------------------------------------------------------------------------


def test_bytes_that_changed_on_the_way_are_found(pair: Callable[..., Pair], network: Network) -> None:
    left, right, link, _ = pair()

    def flip(write: Write) -> None:
        if len(network.writes) == 2:
            value = ctypes.c_ubyte.from_address(write.target + 7)
            value.value ^= 1

    network.landed = flip
    push(left, link, 0, 3 * SLOT_BYTES)
    push(left, link, 0, 3 * SLOT_BYTES)
    bad, good = right.receiver.wait("placed", 2)
    assert "did not verify" in str(bad.error)
    assert good.error is None
    assert right.memory.data[: 3 * SLOT_BYTES] == left.memory.data[: 3 * SLOT_BYTES]


def test_the_digest_is_of_what_reached_the_pages(
    pair: Callable[..., Pair], network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot holds other bytes just while it is copied, and the right ones again when it might be verified."""

    def flip() -> None:
        value = ctypes.c_ubyte.from_address(network.writes[0].target)
        value.value ^= 255

    class Racing(BytesMemory):
        def landing(self, spans: Spans) -> Landing:
            flip()
            return super().landing(spans)

    class Digest:
        def __init__(self) -> None:
            self._digest = xxhash.xxh3_64()

        def update(self, data: memoryview) -> None:
            if right.memory.data[0]:
                flip()
            self._digest.update(data)

        def intdigest(self) -> int:
            return self._digest.intdigest()

    left, right, link, _ = pair(memory=Racing)
    left.memory.data[0] = 1
    monkeypatch.setattr("pdinfer.kv.transports.one_sided.block.xxhash", SimpleNamespace(xxh3_64=Digest))
    push(left, link, 0, 100)
    error = right.receiver.wait("placed")[0].error
    assert right.memory.data[:100] != left.memory.data[:100]
    assert error is not None


@pytest.mark.parametrize("sender", [True, False])
def test_digests_are_for_both_ends_or_for_none(pair: Callable[..., Pair], sender: bool) -> None:
    left, right, link, theirs = pair(digest=not sender, left={"digest": sender})
    push(left, link, 0, 100)
    if sender:
        assert right.receiver.wait("placed")[0].error is None
    else:
        assert "digest" in str(right.receiver.wait("closed", 1, theirs)[0].error)
        assert not right.receiver.of("placed")


# -- peers that lie ----------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Liar:
    """A peer that sends any signals it likes."""

    end: End
    link: Link

    def say(self, kind: int, body: bytes) -> None:
        self.end.transport.write(self.link, body, [(0, kind)])


@pytest.fixture
def liar(pair: Callable[..., Pair]) -> Iterator[tuple[Liar, End, Link]]:
    """Return (the peer, the honest end, the honest end's link)."""
    _, right, _, _ = pair()
    end = End(SocketTransport(), BytesMemory(32))
    end.receiver.hooks["place"] = anywhere
    link = end.transport.connect([right.endpoints[0].removeprefix("ring+")], timeout_s=TIMEOUT_S)
    link.trusted = True
    yield Liar(end, link), right, right.receiver.wait("opened", 2)[1].link
    end.transport.close()


def landed(total: int = 8, num_bytes: int = 8, slot: int = 0) -> bytes:
    """With the right digest of a slot that nobody has written."""
    return Landed(total, num_bytes, slot, xxhash.xxh3_64_intdigest(bytes(num_bytes & 15))).packed()


ASK, BEGIN, LANDED, CREDIT, OFFER = Signal.ASK, Signal.BEGIN, Signal.LANDED, Signal.CREDIT, Signal.OFFER
LIES = {
    "unknown": [(max(Signal) + 1, b"x")],
    "no kind": [(0, b"x")],
    "landed without a ring": [(LANDED, landed())],
    "begun without a ring": [(BEGIN, b"0")],
    "two rings": [(ASK, b"x"), (ASK, b"x")],
    "landed without a write": [(ASK, b"x"), (LANDED, landed())],
    "two writes at once": [(ASK, b"x"), (BEGIN, b"0"), (BEGIN, b"0")],
    "slot behind the ring": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(slot=3))],
    "slot far away": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(slot=2**32 - 1))],
    "more than a slot": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(SLOT_BYTES + 1, SLOT_BYTES + 1))],
    "more than the write": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(8, 9))],
    "more than any write": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(8, 2**64 - 1))],
    "a write without end": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(8, 0))],
    "a write that grows": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(8, 4)), (LANDED, landed(12, 4))],
    "larger than our memory": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed(2**64 - 1, 8))],
    "without a digest": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, Landed(8, 8, 0, None).packed())],
    "cut short": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed()[:-1])],
    "too long": [(ASK, b"x"), (BEGIN, b"0"), (LANDED, landed() + b"x")],
    "an offer nobody asked for": [(OFFER, RingOffer("h:1", 4096, 64, 1).packed())],
    "credit for nothing": [(CREDIT, b"\0\0\0\0")],
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_closes_the_link_and_places_nothing(liar: tuple[Liar, End, Link], name: str) -> None:
    peer, honest, link = liar
    for kind, body in LIES[name]:
        peer.say(kind, body)
    error = honest.receiver.wait("closed", 1, link)[0].error
    assert error is not None
    assert "callback failed" not in str(error) or name == "larger than our memory"
    assert not any(honest.memory.data)
    assert not honest.receiver.of("placed")


@pytest.mark.parametrize(
    "lie",
    [
        b"x",
        b"x" * 19,
        *(
            RingOffer(segment, address, slot_bytes, num_slots).packed()
            for segment, address, slot_bytes, num_slots in [
                ("host", 4096, 64, 1),
                (":1", 4096, 64, 1),
                ("host:", 4096, 64, 1),
                ("host:http", 4096, 64, 1),
                ("a host:1", 4096, 64, 1),
                ("h\0:1", 4096, 64, 1),
                ("h" * 256 + ":1", 4096, 64, 1),
                ("host:1", 0, 64, 1),
                ("host:1", 4096, 0, 1),
                ("host:1", 4096, 64, 0),
                ("host:1", 4096, 64, MAX_SLOTS + 1),
                ("host:1", 4096, 2**40 + 1, 1),
                ("host:1", 2**64 - 128, 64, 2),
            ]
        ),
    ],
)
def test_an_offer_that_is_no_ring_closes_the_link(liar: tuple[Liar, End, Link], lie: bytes) -> None:
    peer, honest, link = liar
    transfer = honest.transport.write(link, b"0", [(0, 8)])
    peer.end.receiver.wait("placed")
    peer.say(OFFER, lie)
    assert "ring" in str(honest.receiver.wait("closed", 1, link)[0].error)
    assert finished(transfer).error is not None


@pytest.mark.parametrize("lies", [["second"], ["lent"], ["lent", "back", "back"], ["endless"]])
def test_offers_and_credits_are_counted(liar: tuple[Liar, End, Link], network: Network, lies: list[str]) -> None:
    peer, honest, link = liar
    network.engines["peer:1"] = FakeEngine(network, "peer:1")
    memory = ctypes.create_string_buffer(1 << 10)
    network.engines["peer:1"].memory[ctypes.addressof(memory)] = 1 << 10
    offer = RingOffer("peer:1", ctypes.addressof(memory), 64, 2).packed()
    honest.transport.write(link, b"0", [(0, 8)])
    peer.end.receiver.wait("placed")
    peer.say(OFFER, offer)
    peer.end.receiver.wait("placed", 3)
    bodies = {"second": (OFFER, offer), "lent": (CREDIT, b"\1\0\0\0"), "back": (CREDIT, b"\0\0\0\0")}
    bodies["endless"] = (CREDIT, b"\xff" * 2000)  # a number with more digits than Python prints
    for lie in lies[1:] or lies:
        peer.say(*bodies[lie])
    error = honest.receiver.wait("closed", 1, link)[0].error
    assert error is not None
    assert "callback failed" not in str(error)
    network.engines["peer:1"].memory.clear()


def test_random_words_never_stop_the_transport(pair: Callable[..., Pair]) -> None:
    left, right, link, _ = pair()
    chance = random.Random(3)
    end = End(SocketTransport(), BytesMemory(32))
    end.receiver.hooks["place"] = anywhere
    for _ in range(100):
        peer = end.transport.connect([right.endpoints[0].removeprefix("ring+")], timeout_s=TIMEOUT_S)
        peer.trusted = True
        for _ in range(chance.randint(1, 6)):
            body = chance.choice([chance.randbytes(chance.randint(1, 40)), landed(), b"0"])
            end.transport.write(peer, body, [(0, chance.randint(0, max(Signal) + 1))])
        end.transport.send(peer, b"the end")
        end.transport.fence(peer)
    push(left, link, 100, 100)
    wait_until(lambda: right.memory.data[100:200] == left.memory.data[100:200])
    end.transport.close()


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_sizes_that_cannot_be(network: Network) -> None:
    for sizes in ({"slot_bytes": 0}, {"num_slots": 0}, {"num_slots": MAX_SLOTS + 1}, {"slot_bytes": 2**40}):
        with pytest.raises(ConfigError, match="slots"):
            RingTransport(NAME, network.segment, SocketTransport(), **sizes)  # type: ignore[arg-type]


def test_an_engine_made_for_the_transport_goes_with_it(network: Network) -> None:
    shared = network.segment()
    made: list[NamedEngine] = []

    def make() -> NamedEngine:
        made.append(network.segment())
        return made[-1]

    for segment in (shared, make):
        transport = RingTransport(NAME, segment, SocketTransport())
        transport.register(BytesMemory(8), Recorder())
        transport.close()
    assert shared.engine is not None
    assert [segment.engine for segment in made] == [None]


def test_a_port_in_use_leaves_no_engine_behind(network: Network) -> None:
    taken = SocketTransport()
    (endpoint,) = taken.register(BytesMemory(8), Recorder())
    made: list[NamedEngine] = []

    def make() -> NamedEngine:
        made.append(network.segment())
        return made[-1]

    transport = RingTransport(NAME, make, SocketTransport(port=int(endpoint.rpartition(":")[2])))
    with pytest.raises(ConfigError, match="in use"):
        transport.register(BytesMemory(8), Recorder())
    assert [segment.engine for segment in made] == [None]
    taken.close()


def test_a_plain_socket_is_no_ring(pair: Callable[..., Pair]) -> None:
    left, right, _, _ = pair()
    with pytest.raises(TransferError, match=r"ring\+tcp"):
        left.transport.connect([right.endpoints[0].removeprefix("ring+")], timeout_s=1)


def test_spans_are_taken_from_the_front() -> None:
    spans = deque([(0, 3), (10, 0), (20, 5)])
    assert take(spans, 0) == []
    assert take(spans, 2) == [(0, 2)]
    assert take(spans, 3) == [(2, 1), (10, 0), (20, 2)]
    assert take(spans, 3) == [(22, 3)]
    assert not spans


def test_words_survive_the_way() -> None:
    assert SignalMemory().num_bytes == max(Signal)
    for digest in (None, 0, 2**64 - 1):
        part = Landed(2**64 - 1, 2**63, 2**32 - 1, digest)
        assert Landed.parse(part.packed()) == part
    offer = RingOffer("[::1]:15999", 2**47, 1 << 24, 4)
    assert RingOffer.parse(offer.packed()) == offer
