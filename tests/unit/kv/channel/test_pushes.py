"""What reads prefill's pages: whatever completes in whatever order, the last word waits for all of it and no longer."""

from __future__ import annotations

import threading
from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdinfer.config import CacheConfig
from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.channel import pushes
from pdinfer.kv.channel.pushes import Group, Pushes
from pdinfer.kv.transports.base import Transfer
from pdinfer.types import HandoffStatus, PageGrant, PeerAddress, peer_key
from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.channels import LAYERS, Case, SmallModel, handoff

PEERS = tuple(PeerAddress(b"engine", 1, rank) for rank in range(3))
TOKENS = range(6)
LAYOUT = SmallModel().kv_layout(CacheConfig(page_size=4))


def grant_of(room: int, destinations: tuple[PeerAddress, ...]) -> PageGrant:
    return PageGrant(
        room=room.to_bytes(16, "big"),
        request_id="r",
        writers=(),
        destinations=destinations,
        tokens=TOKENS,
        pages=(0, 1),
        generations=(0, 0),
        layout_id=b"",
    )


@attrs.define(eq=False)
class Room:
    """What the machine knows of a room: writes that still read, and the transfer of its end."""

    grant: PageGrant
    layer: int = 0
    open: list[Transfer] = attrs.field(factory=list)
    reading: list[Group] = attrs.field(factory=list)
    end: Transfer | None = None


class PushesMachine(RuleBasedStateMachine):
    """Pushes beside a plain count of the writes that have not completed."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes = Pushes(LAYOUT, threading.Condition(threading.RLock()))
        self.rooms: list[Room] = []
        self.pushed: dict[Transfer, int] = {}
        self.failed: set[Transfer] = set()

    def write(self, groups: list[Group]) -> None:
        for group in groups:
            room = next(room for room in self.rooms if room.grant.room == group.grant.room)
            room.reading += [group] * len(group.grant.destinations)

    @rule(count=st.integers(1, 3))
    def accept(self, count: int) -> None:
        self.rooms.append(Room(grant_of(len(self.rooms), PEERS[:count])))

    @rule(data=st.data(), alone=st.booleans(), skip=st.integers(0, 1))
    @precondition(lambda self: any(room.end is None for room in self.rooms))
    def push(self, data: st.DataObject, alone: bool, skip: int) -> None:
        room = data.draw(st.sampled_from([room for room in self.rooms if room.end is None]))
        layer = min(room.layer + skip, LAYERS.stop - 1)
        tokens = range(data.draw(st.integers(0, 1)), TOKENS.stop)
        before = pushes.GROUP_BYTES
        pushes.GROUP_BYTES = 1 if alone else before
        try:
            transfer, groups = self.pushes.add(room.grant, range(layer, layer + 1), tokens, room.grant.pages, None)
        finally:
            pushes.GROUP_BYTES = before
        room.layer = (layer + 1) % LAYERS.stop
        if transfer not in room.open:
            room.open.append(transfer)
        self.write(groups)

    @rule(data=st.data(), fails=st.booleans())
    @precondition(lambda self: any(room.reading for room in self.rooms))
    def a_write_completes(self, data: st.DataObject, fails: bool) -> None:
        room = data.draw(st.sampled_from([room for room in self.rooms if room.reading]))
        group = room.reading.pop(data.draw(st.integers(0, len(room.reading) - 1)))
        if fails:
            self.failed.add(group.transfer)
        self.pushes.written(group, TransferError("lost") if fails else None)

    @rule(data=st.data())
    @precondition(lambda self: any(room.end is None for room in self.rooms))
    def finish(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from([room for room in self.rooms if room.end is None]))
        self.write(self.pushes.flush(room.grant.room))
        room.end = self.pushes.end(room.grant.room)

    @rule()
    def drain(self) -> None:
        self.write(self.pushes.flush_all())

    @invariant()
    def a_transfer_is_done_exactly_when_nothing_reads_for_it(self) -> None:
        for room in self.rooms:
            reading = {group.transfer for group in room.reading}
            held = self.pushes._open.get(room.grant.room)
            for transfer in room.open:
                waits = held is not None and held.transfer is transfer
                assert transfer.done == (transfer not in reading and not waits)
                if transfer.done:
                    assert (transfer.error is not None) == (transfer in self.failed)

    @invariant()
    def the_end_is_done_exactly_when_nothing_reads_for_the_room(self) -> None:
        for room in self.rooms:
            if room.end is not None:
                assert room.end.done == (not room.reading)

    @invariant()
    def bytes_on_their_way_are_counted(self) -> None:
        under_way = {transfer for room in self.rooms for transfer in room.open if not transfer.done}
        assert self.pushes.unsent_bytes == sum(transfer.num_bytes for transfer in under_way)
        inflight: Counter[tuple[bytes, int, int]] = Counter()
        for room in self.rooms:
            for transfer in room.open:
                for destination in room.grant.destinations:
                    inflight[peer_key(destination)] += 0 if transfer.done else transfer.num_bytes
        assert self.pushes.inflight() == dict(+inflight)
        assert self.pushes.most_inflight(map(peer_key, PEERS)) == max(inflight.values(), default=0)

    def teardown(self) -> None:
        for room in self.rooms:
            if room.end is None:
                self.write(self.pushes.flush(room.grant.room))
                room.end = self.pushes.end(room.grant.room)
            for group in room.reading:
                self.pushes.written(group, None)
            room.reading.clear()
            assert room.end.done
        parts = (self.pushes._open, self.pushes._writing, self.pushes._ended, self.pushes._unsent)
        assert not any(parts), "something is remembered of rooms that are over"
        assert not self.pushes.inflight()


TestPushes = PushesMachine.TestCase


# -- through a channel -------------------------------------------------------------------------------------------------


@pytest.fixture
def net() -> HandNet:
    return HandNet()


def test_the_window_is_each_peers_own(net: HandNet) -> None:
    case = Case("hand")
    prefill, full, free = net.end(), net.end(), net.end()
    prefill.window_bytes = 100
    grants = []
    for decode in (full, free):
        prefill.connect(decode.address, timeout_s=0)
        net.settle()
        grants.append(case.grant(decode, prefill))
        prefill.accept(grants[-1])
    both = attrs.evolve(grants[0], destinations=(free.address, full.address))
    pages = case.source(prefill, grants[0])
    prefill.push(grants[0], layers=range(2), tokens=range(4, 14), pages=pages)
    assert [prefill.is_full(grant) for grant in (*grants, both)] == [False, False, False]
    prefill.window_bytes = 79
    assert [prefill.is_full(grant) for grant in (*grants, both)] == [True, False, True]
    assert [stats.inflight_bytes for stats in prefill.stats.peers] == [80, 0]
    assert prefill.drain(0.0)
    assert not prefill.is_full(grants[0])


@pytest.mark.parametrize("when", ["first", "behind others"])
@pytest.mark.parametrize("error", [ConfigError("outside the memory"), TransferError("another process"), OSError("bug")])
def test_a_write_that_cannot_be_posted_completes_and_closes_the_link(
    net: HandNet, monkeypatch: pytest.MonkeyPatch, when: str, error: Exception
) -> None:
    """Behind a missing frame nothing verifies: the room could never land, and who waits must hear of it."""
    case = Case("hand")
    prefill, decode = net.end(), net.end()
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    grant = case.grant(decode, prefill)
    pages = case.source(prefill, grant)
    prefill.accept(grant)
    transfers = []

    def push() -> None:
        for layer in LAYERS:
            transfers.append(prefill.push(grant, layers=range(layer, layer + 1), tokens=grant.tokens, pages=pages))
            prefill.drain(0.0)

    def fail(*_: object, **__: object) -> Transfer:
        if when == "behind others" and len(transfers) < 2:
            push()  # another thread posts, and leaves its writes to the one that is sending
        raise error

    monkeypatch.setattr(prefill.transport, "write", fail)
    push()
    assert all(transfer.done and isinstance(transfer.error, TransferError) for transfer in transfers)
    assert repr(error) in str(transfers[0].error) or "not connected" in str(transfers[0].error)
    assert prefill.unsent_bytes == 0
    assert [room for room, _ in prefill.poll_stops()] == [grant.room]
    end = prefill.finish(grant, handoff(grant, prefill, HandoffStatus.ABORTED))
    assert end.done
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.ABORTED


def test_an_interrupt_while_sending_leaves_no_transfer_open(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("hand")
    prefill, decode = net.end(), net.end()
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    pages = case.source(prefill, grant)

    def interrupt(*_: object, **__: object) -> Transfer:
        raise KeyboardInterrupt

    monkeypatch.setattr(prefill.transport, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    assert prefill.unsent_bytes == 0
    assert prefill.finish(grant, handoff(grant, prefill, HandoffStatus.ABORTED)).done


def test_pages_of_another_pool_fail_their_push_and_nothing_else(net: HandNet) -> None:
    case = Case("hand")
    prefill, decode = net.end(), net.end()
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    with pytest.raises(ConfigError, match="not in a pool"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=(0, 1, 999, 2))
    assert prefill.unsent_bytes == 0
    pages = case.source(prefill, grant)
    case.push_all(prefill, grant, pages)
    prefill.finish(grant, handoff(grant, prefill))
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.LANDED


def test_a_hand_off_too_long_to_travel_leaves_its_room_open(net: HandNet) -> None:
    """So that its engine can still end it."""
    case = Case("hand")
    prefill, decode = net.end(), net.end()
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    too_long = handoff(grant, prefill, top_logprobs=((1, 0.5),) * 200_000)
    with pytest.raises(ConfigError, match="too long to travel"):
        prefill.finish(grant, too_long)
    decode.abort(grant, TransferError("not wanted"))
    net.settle()
    assert [room for room, _ in prefill.poll_stops()] == [grant.room]
    assert prefill.finish(grant, handoff(grant, prefill, HandoffStatus.ABORTED)).done
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.ABORTED


@given(st.integers(0, 3))
def test_an_end_without_writes_is_done(num_destinations: int) -> None:
    ends = Pushes(LAYOUT, threading.Condition(threading.RLock()))
    assert ends.end(grant_of(0, PEERS[:num_destinations]).room).done
