"""Reads of prefill's pages: in whatever order they complete, the end of a room waits for all of them and no longer."""

from __future__ import annotations

import threading
from collections import Counter

import attrs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdinfer.config import CacheConfig
from pdinfer.errors import TransferError
from pdinfer.kv.channel import sender
from pdinfer.kv.channel.sender import Pushes, PushGroup
from pdinfer.kv.transports.base import Transfer
from pdinfer.types import PageGrant, PeerAddress, peer_key
from tests.unit.kv.channel.channels import LAYERS, SmallModel

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


def push_of(grant: PageGrant, layers: range, tokens: range) -> PushGroup:
    shares, transfer = dict.fromkeys(map(peer_key, grant.destinations)), Transfer(LAYOUT.payload_bytes(layers, tokens))
    return PushGroup(grant, layers, tokens, None, shares, grant.pages, transfer, [])


@attrs.define(eq=False)
class Room:
    """What the machine knows of a room: the writes that still read its pages, and the transfer of its end."""

    grant: PageGrant
    layer: int = 0
    open: list[Transfer] = attrs.field(factory=list)
    reading: list[PushGroup] = attrs.field(factory=list)
    end: Transfer | None = None


class PushesMachine(RuleBasedStateMachine):
    """Pushes next to a plain count of the writes that have not completed."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes = Pushes(LAYOUT, threading.Condition(threading.RLock()))
        self.rooms: list[Room] = []
        self.pushed: dict[Transfer, int] = {}
        self.failed: set[Transfer] = set()
        self.written: set[Transfer] = set()

    def write(self, groups: list[PushGroup]) -> None:
        for group in groups:
            room = next(room for room in self.rooms if room.grant.room == group.grant.room)
            room.reading += [group] * len(group.grant.destinations)
            self.written.add(group.transfer)

    @rule(count=st.integers(1, 3))
    def accept(self, count: int) -> None:
        self.rooms.append(Room(grant_of(len(self.rooms), PEERS[:count])))

    @rule(data=st.data(), alone=st.booleans(), skip=st.integers(0, 1))
    @precondition(lambda self: any(room.end is None for room in self.rooms))
    def push(self, data: st.DataObject, alone: bool, skip: int) -> None:
        room = data.draw(st.sampled_from([room for room in self.rooms if room.end is None]))
        layer = min(room.layer + skip, LAYERS.stop - 1)
        tokens = range(data.draw(st.integers(0, 1)), TOKENS.stop)
        before = sender.GROUP_BYTES
        sender.GROUP_BYTES = 1 if alone else before
        try:
            transfer, groups = self.pushes.add(push_of(room.grant, range(layer, layer + 1), tokens))
        finally:
            sender.GROUP_BYTES = before
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
        self.write(self.pushes.flush((room.grant.room,)))
        room.end = self.pushes.end(room.grant.room)

    @rule()
    def drain(self) -> None:
        self.write(self.pushes.flush())

    @invariant()
    def a_transfer_is_done_exactly_when_nothing_reads_for_it(self) -> None:
        for room in self.rooms:
            reading = {group.transfer for group in room.reading}
            for transfer in room.open:
                assert transfer.done == (transfer in self.written and transfer not in reading)
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

    def teardown(self) -> None:
        for room in self.rooms:
            if room.end is None:
                self.write(self.pushes.flush((room.grant.room,)))
                room.end = self.pushes.end(room.grant.room)
            for group in room.reading:
                self.pushes.written(group, None)
            room.reading.clear()
            assert room.end.done
        assert not self.pushes.rooms(), "something is remembered of rooms that are over"
        assert not self.pushes.unsent_bytes
        assert not self.pushes.inflight()


TestPushes = PushesMachine.TestCase


@given(st.integers(0, 3))
def test_an_end_without_writes_is_done(num_destinations: int) -> None:
    ends = Pushes(LAYOUT, threading.Condition(threading.RLock()))
    assert ends.end(grant_of(0, PEERS[:num_destinations]).room).done
