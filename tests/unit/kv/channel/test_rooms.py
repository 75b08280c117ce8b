"""The two state machines of a hand-off, each beside a plain model of its rules, in any order of events."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.channel import rooms
from pdinfer.kv.channel.rooms import MAX_PIECES, Coverage, ReceiverRooms, SenderRooms, StaleFrame, first_error
from pdinfer.types import Handoff, HandoffStatus, NamedState, PageGrant, PeerAddress, peer_key
from tests.slices import examples

LAYERS = range(2, 5)
TOKENS = range(4, 10)
PEERS = tuple(PeerAddress(b"engine", 1, rank, (f"tcp://host:{rank}",)) for rank in range(4))
ROOMS = tuple(bytes([n]) * 16 for n in range(3))
LANDED, ABORTED = HandoffStatus.LANDED, HandoffStatus.ABORTED


def grant_of(room: bytes, writers: tuple[PeerAddress, ...] = PEERS[:1], tokens: range = TOKENS) -> PageGrant:
    return PageGrant(
        room=room,
        request_id="r",
        writers=writers,
        destinations=(PEERS[3],),
        tokens=tokens,
        pages=(0,),
        generations=(0,),
        layout_id=b"",
    )


def handoff_of(room: bytes, writer: PeerAddress, status: HandoffStatus = LANDED) -> Handoff:
    error = TransferError("gave up") if status is ABORTED else None
    return Handoff(room=room, writer=writer, status=status, error=error)


@st.composite
def ranges(draw: st.DrawFn, outer: range) -> range:
    """Draw a range near `outer`: mostly inside it, sometimes empty or reaching beyond it."""
    start = draw(st.integers(outer.start - 1, outer.stop + 1))
    return range(start, draw(st.integers(start, outer.stop + 1)))


def cells(layers: range, tokens: range) -> set[tuple[int, int]]:
    return {(layer, token) for layer in layers for token in tokens}


class CoverageMachine(RuleBasedStateMachine):
    """Coverage next to sets of (layer, token). What is announced arrives later, in any order, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.coverage = Coverage(LAYERS, TOKENS)
        self.announced: set[tuple[int, int]] = set()
        self.coming: list[tuple[range, range]] = []
        self.arrived: set[tuple[int, int]] = set()

    @rule(layers=ranges(LAYERS), tokens=ranges(TOKENS))
    def announce(self, layers: range, tokens: range) -> None:
        new = cells(layers, tokens)
        if new and new <= cells(LAYERS, TOKENS) and not new & self.announced:
            self.coverage.announce(layers, tokens)
            self.announced |= new
            self.coming.append((layers, tokens))
        else:
            with pytest.raises(TransferError, match=r"outside the grant|announced twice"):
                self.coverage.announce(layers, tokens)

    @rule(data=st.data())
    @precondition(lambda self: len(self.announced) < len(LAYERS) * len(TOKENS))
    def announce_something_missing(self, data: st.DataObject) -> None:
        layer, token = data.draw(st.sampled_from(sorted(cells(LAYERS, TOKENS) - self.announced)))
        self.announce(range(layer, layer + 1), range(token, token + 1))

    @rule(data=st.data())
    @precondition(lambda self: self.coming)
    def arrive(self, data: st.DataObject) -> None:
        layers, tokens = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        self.coverage.arrive(layers, tokens)
        self.arrived |= cells(layers, tokens)

    @invariant()
    def is_complete_when_everything_arrived(self) -> None:
        assert self.coverage.complete == (self.arrived == cells(LAYERS, TOKENS))

    @invariant()
    def holds_as_few_ranges_as_there_are(self) -> None:
        for layer in LAYERS:
            tokens = [token for token in TOKENS if (layer, token) in self.announced]
            runs = [token for token in tokens if token - 1 not in tokens]
            held = self.coverage.pieces(layer)
            assert [span.start for span in held] == runs
            assert sorted(token for span in held for token in span) == tokens


@attrs.define
class ModelRoom:
    """What must be known of a room: which writers have not finished, what was announced, what arrived, any damage."""

    writers: tuple[PeerAddress, ...]
    expected_at: float
    finished: dict[PeerAddress, HandoffStatus] = attrs.field(factory=dict)
    announced: set[tuple[int, int]] = attrs.field(factory=set)
    coming: list[tuple[range, range]] = attrs.field(factory=list)
    arrived: set[tuple[int, int]] = attrs.field(factory=set)
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    damaged: bool = False
    stopped: bool = False

    @property
    def silent(self) -> list[PeerAddress]:
        return [writer for writer in self.writers if writer not in self.finished]

    @property
    def whole(self) -> bool:
        return not self.damaged and self.arrived == cells(LAYERS, TOKENS)

    def verdict(self) -> list[HandoffStatus]:
        """The final status of every handoff: the writers' own, unless the room did not verify."""
        landed = all(status is LANDED for status in self.finished.values())
        if self.damaged or (landed and not self.whole):
            return [ABORTED] * len(self.writers)
        return [self.finished[writer] for writer in self.writers]


class ReceiverMachine(RuleBasedStateMachine):
    """Decode's side with several rooms, up to three writers each, and one peer that writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver = ReceiverRooms(LAYERS)
        self.rooms: dict[bytes, ModelRoom] = {}
        self.due: list[tuple[bytes, ModelRoom, list[HandoffStatus]]] = []
        self.settled: Counter[bytes] = Counter()
        self.count = 0
        self.now = 100.0

    @rule(seconds=st.sampled_from([0.25, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def new_room(self) -> bytes:
        self.count += 1
        return self.count.to_bytes(16, "big")

    def spoke(self, room: bytes, writer: PeerAddress, status: HandoffStatus) -> list[PeerAddress]:
        """The model's side of a handoff; gives who must be told to stop."""
        state = self.rooms[room]
        state.finished[writer] = status
        if not state.silent:
            del self.rooms[room]
            self.due.append((room, state, state.verdict()))
            return []
        return self.stop(state) if status is ABORTED else []

    @staticmethod
    def stop(state: ModelRoom) -> list[PeerAddress]:
        first, state.stopped = not state.stopped, True
        return state.silent if first else []

    def draw_room(self, data: st.DataObject) -> tuple[bytes, ModelRoom]:
        room = data.draw(st.sampled_from(sorted(self.rooms)))
        return room, self.rooms[room]

    @rule(count=st.integers(1, 3))
    def expect(self, count: int) -> None:
        room = self.new_room()
        self.receiver.expect(grant_of(room, PEERS[:count]), self.now)
        self.rooms[room] = ModelRoom(PEERS[:count], self.now)

    @rule(data=st.data())
    @precondition(lambda self: self.rooms)
    def expect_twice(self, data: st.DataObject) -> None:
        room, state = self.draw_room(data)
        with pytest.raises(TransferError, match=f"room {room.hex()} is expected already"):
            self.receiver.expect(grant_of(room, state.writers), self.now)

    @rule(data=st.data(), layers=ranges(LAYERS), tokens=ranges(TOKENS))
    @precondition(lambda self: self.rooms)
    def place(self, data: st.DataObject, layers: range, tokens: range) -> None:
        room, state = self.draw_room(data)
        writer = data.draw(st.sampled_from(PEERS))
        new = cells(layers, tokens)
        if writer not in state.silent:
            with pytest.raises(StaleFrame):
                self.receiver.place(peer_key(writer), room, layers, tokens, self.now)
        elif new and new <= cells(LAYERS, TOKENS) and not new & state.announced:
            self.announced(room, writer, layers, tokens)
        else:
            with pytest.raises(TransferError, match=r"outside the grant|announced twice"):
                self.receiver.place(peer_key(writer), room, layers, tokens, self.now)

    def announced(self, room: bytes, writer: PeerAddress, layers: range, tokens: range) -> None:
        state = self.rooms[room]
        assert self.receiver.place(peer_key(writer), room, layers, tokens, self.now).room == room
        state.announced |= cells(layers, tokens)
        state.coming.append((layers, tokens))
        if state.first_byte_s is None:
            state.first_byte_s = self.now - state.expected_at

    @rule(data=st.data())
    @precondition(lambda self: self.rooms)
    def place_all_that_is_missing(self, data: st.DataObject) -> None:
        room, state = self.draw_room(data)
        missing = sorted(cells(LAYERS, TOKENS) - state.announced)
        for layer, token in data.draw(st.permutations(missing)):
            writer = data.draw(st.sampled_from(state.silent))
            self.announced(room, writer, range(layer, layer + 1), range(token, token + 1))

    @rule(data=st.data(), count=st.integers(1, 18))
    @precondition(lambda self: any(state.coming for state in self.rooms.values()))
    def payloads_arrive(self, data: st.DataObject, count: int) -> None:
        room = data.draw(st.sampled_from(sorted(room for room, state in self.rooms.items() if state.coming)))
        state = self.rooms[room]
        for _ in range(min(count, len(state.coming))):
            layers, tokens = state.coming.pop(data.draw(st.integers(0, len(state.coming) - 1)))
            assert self.receiver.placed(room, layers, tokens, None, self.now) == []
            state.arrived |= cells(layers, tokens)
            state.last_byte_s = self.now - state.expected_at

    @rule(data=st.data(), status=st.sampled_from([LANDED, LANDED, ABORTED]))
    @precondition(lambda self: self.rooms)
    def speak(self, data: st.DataObject, status: HandoffStatus) -> None:
        room, state = self.draw_room(data)
        writer = data.draw(st.sampled_from(PEERS))
        if writer not in state.silent:
            with pytest.raises(StaleFrame):
                self.receiver.finished(peer_key(writer), handoff_of(room, writer, status))
            return
        told = self.receiver.finished(peer_key(writer), handoff_of(room, writer, status))
        assert told == [peer_key(peer) for peer in self.spoke(room, writer, status)]

    @rule(writer=st.sampled_from(PEERS), data=st.data())
    def speak_of_an_unknown_room(self, writer: PeerAddress, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from([b"?" * 16, *self.settled]))
        with pytest.raises(StaleFrame):
            self.receiver.finished(peer_key(writer), handoff_of(room, writer))
        with pytest.raises(StaleFrame):
            self.receiver.place(peer_key(writer), room, LAYERS, TOKENS, self.now)
        assert not self.receiver.stop(room)
        assert not self.receiver.placed(room, LAYERS, TOKENS, TransferError("digest"), self.now)
        assert not self.receiver.placed(room, LAYERS, TOKENS, None, self.now)

    @rule(data=st.data())
    @precondition(lambda self: self.rooms)
    def stop_room(self, data: st.DataObject) -> None:
        room, state = self.draw_room(data)
        assert self.receiver.stop(room) == [peer_key(peer) for peer in self.stop(state)]

    @rule(data=st.data())
    @precondition(lambda self: any(state.coming for state in self.rooms.values()))
    def a_payload_is_damaged(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(sorted(room for room, state in self.rooms.items() if state.coming)))
        state = self.rooms[room]
        layers, tokens = state.coming.pop()
        state.damaged = True
        told = self.receiver.placed(room, layers, tokens, TransferError("digest"), self.now)
        assert told == [peer_key(peer) for peer in self.stop(state)]

    @rule(peer=st.sampled_from(PEERS))
    def lose(self, peer: PeerAddress) -> None:
        told = {}
        for room in [room for room, state in self.rooms.items() if peer in state.silent]:
            told[room] = [peer_key(other) for other in self.spoke(room, peer, ABORTED)]
        assert self.receiver.lost(peer_key(peer), TransferError("lost")) == told

    @rule()
    def take(self) -> None:
        handoffs = self.receiver.take_settled()
        for room, state, verdict in self.due:
            mine, handoffs = handoffs[: len(verdict)], handoffs[len(verdict) :]
            assert [handoff.room for handoff in mine] == [room] * len(verdict)
            assert [handoff.status for handoff in mine] == verdict
            assert [handoff.writer for handoff in mine] == list(PEERS[: len(verdict)])
            assert {(handoff.first_byte_s, handoff.last_byte_s) for handoff in mine} == {
                (state.first_byte_s, state.last_byte_s)
            }
            assert all((handoff.error is None) == (handoff.status is LANDED) for handoff in mine)
            self.settled[room] += 1
        assert not handoffs
        self.due = []

    @invariant()
    def settles_exactly_once(self) -> None:
        assert bool(self.receiver.num_settled) == bool(self.due)
        assert all(count == 1 for count in self.settled.values())
        assert not self.rooms.keys() & self.settled.keys()


class SenderMachine(RuleBasedStateMachine):
    """Prefill's side: rooms that are unknown, open, or must never be opened."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = SenderRooms()
        self.open: dict[bytes, list[PeerAddress]] = {}
        self.buried: set[tuple[PeerAddress, bytes]] = set()
        self.stops: list[bytes] = []

    @initialize()
    def begins_empty(self) -> None:
        assert not self.sender.num_stops
        assert self.sender.take_stops() == []

    @rule(room=st.sampled_from(ROOMS), destination=st.sampled_from(PEERS[:2]))
    def accept(self, room: bytes, destination: PeerAddress) -> None:
        grant = attrs.evolve(grant_of(room), destinations=(destination,))
        if (destination, room) in self.buried:
            with pytest.raises(TransferError, match="was aborted before its request arrived"):
                self.sender.accept(grant)
        elif room in self.open:
            with pytest.raises(TransferError, match="was submitted twice"):
                self.sender.accept(grant)
        else:
            self.sender.accept(grant)
            self.open[room] = [destination]

    @rule(room=st.sampled_from(ROOMS), peer=st.sampled_from(PEERS[:3]))
    def stop(self, room: bytes, peer: PeerAddress) -> None:
        unheard_of = self.sender.stop(peer_key(peer), room, TransferError("stop"), 0.0)
        assert unheard_of == (room not in self.open)
        if unheard_of:
            self.buried.add((peer, room))
        elif peer in self.open[room]:
            self.stops.append(room)

    @rule(peer=st.sampled_from(PEERS[:3]))
    def lose(self, peer: PeerAddress) -> None:
        self.sender.lost(peer_key(peer), TransferError("lost"))
        self.stops += [room for room, destinations in self.open.items() if peer in destinations]

    @rule(room=st.sampled_from(ROOMS))
    def finish(self, room: bytes) -> None:
        self.sender.finish(room)
        self.open.pop(room, None)
        self.stops = [stopped for stopped in self.stops if stopped != room]

    @rule()
    def take(self) -> None:
        assert {room for room, _ in self.sender.take_stops()} == set(self.stops)
        self.stops = []

    @invariant()
    def only_open_rooms_are_written(self) -> None:
        for room in ROOMS:
            assert self.sender.writable(room) == (room in self.open)
        assert bool(self.sender.num_stops) == bool(self.stops)


TestCoverage = CoverageMachine.TestCase
TestReceiverRooms = ReceiverMachine.TestCase
TestSenderRooms = SenderMachine.TestCase
TestCoverage.settings = examples(60, stateful_step_count=25)
TestReceiverRooms.settings = examples(120, stateful_step_count=40)
TestSenderRooms.settings = examples(60, stateful_step_count=30)


@given(st.permutations(range(TOKENS.start, TOKENS.stop)))
def test_tokens_may_arrive_in_any_order(order: list[int]) -> None:
    coverage = Coverage(LAYERS, TOKENS)
    for token in order:
        assert not coverage.complete
        coverage.announce(LAYERS, range(token, token + 1))
        coverage.arrive(LAYERS, range(token, token + 1))
    assert coverage.complete


def test_announcing_token_by_token_in_any_order_looks_at_few_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twenty thousand announcements looks at about log2 of the ranges there are."""
    count = 20_000
    looked_at = Counter[str]()

    def counting_bisect(ranges: list[range], start: int, key: Callable[[range], int]) -> int:
        def counted(span: range) -> int:
            looked_at["ranges"] += 1
            return key(span)

        return bisect.bisect(ranges, start, key=counted)

    monkeypatch.setattr(rooms, "bisect", counting_bisect)
    coverage = Coverage(range(1), range(count))
    order = list(range(count))
    random.Random(5).shuffle(order)
    for token in order:
        coverage.announce(range(1), range(token, token + 1))
        coverage.arrive(range(1), range(token, token + 1))
    assert coverage.complete
    assert coverage.pieces(0) == (range(count),)
    assert looked_at["ranges"] <= count * math.log2(count)


def test_a_refused_announcement_leaves_no_trace() -> None:
    """This holds also when only the last of its layers overlaps."""
    coverage = Coverage(LAYERS, TOKENS)
    coverage.announce(range(4, 5), TOKENS[2:3])
    with pytest.raises(TransferError, match="layer 4 were announced twice"):
        coverage.announce(LAYERS, TOKENS)
    coverage.announce(range(2, 4), TOKENS)


def test_a_refused_announcement_names_both_rectangles() -> None:
    with pytest.raises(TransferError) as info:
        Coverage(LAYERS, TOKENS).announce(range(2, 6), range(5, 7))
    assert all(part in str(info.value) for part in ("[2, 6)", "[5, 7)", "[2, 5)", "[4, 10)"))


@pytest.mark.parametrize("num_writers", [1, 2])
def test_landed_handoffs_without_all_bytes_are_aborted(num_writers: int) -> None:
    receiver, writers = ReceiverRooms(LAYERS), PEERS[:num_writers]
    receiver.expect(grant_of(ROOMS[0], writers), 0.0)
    for span in (TOKENS[:-1], TOKENS[-1:]):
        receiver.place(peer_key(PEERS[0]), ROOMS[0], LAYERS, span, 0.0)
    receiver.placed(ROOMS[0], LAYERS, TOKENS[:-1], None, 0.0)  # the last token was announced and is not here
    for writer in writers:
        receiver.finished(peer_key(writer), handoff_of(ROOMS[0], writer))
    for handoff in receiver.take_settled():
        assert handoff.status is ABORTED
        assert "not every granted token had arrived" in str(handoff.error)


def test_a_room_without_writers_is_refused() -> None:
    """It could never settle, and its pages would never come back."""
    receiver = ReceiverRooms(LAYERS)
    with pytest.raises(TransferError, match=f"room {ROOMS[0].hex()} has no writer"):
        receiver.expect(grant_of(ROOMS[0], ()), 0.0)
    receiver.expect(grant_of(ROOMS[0]), 0.0)


def test_a_handoff_is_its_writers_whatever_it_says() -> None:
    receiver = ReceiverRooms(LAYERS)
    receiver.expect(grant_of(ROOMS[0], PEERS[:2]), 0.0)
    receiver.finished(peer_key(PEERS[0]), handoff_of(ROOMS[0], PEERS[1], ABORTED))
    assert not receiver.num_settled, "the second writer has not finished"
    receiver.finished(peer_key(PEERS[1]), handoff_of(ROOMS[0], PEERS[3], ABORTED))
    assert [handoff.writer for handoff in receiver.take_settled()] == list(PEERS[:2])


def test_the_first_damage_is_the_reason() -> None:
    receiver = ReceiverRooms(LAYERS)
    receiver.expect(grant_of(ROOMS[0]), 0.0)
    for reason, span in (("first", TOKENS[:1]), ("second", TOKENS[1:])):
        receiver.place(peer_key(PEERS[0]), ROOMS[0], LAYERS, span, 0.0)
        receiver.placed(ROOMS[0], LAYERS, span, TransferError(reason), 0.0)
    receiver.finished(peer_key(PEERS[0]), handoff_of(ROOMS[0], PEERS[0]))
    assert str(receiver.take_settled()[0].error) == "first"


def test_one_writer_lost_tells_the_others_to_stop() -> None:
    receiver = ReceiverRooms(LAYERS)
    receiver.expect(grant_of(ROOMS[0], PEERS[:3]), 0.0)
    told = receiver.lost(peer_key(PEERS[1]), TransferError("lost"))
    assert told == {ROOMS[0]: [peer_key(PEERS[0]), peer_key(PEERS[2])]}
    assert not receiver.num_settled


def test_a_restarted_peer_is_a_stranger() -> None:
    receiver = ReceiverRooms(LAYERS)
    receiver.expect(grant_of(ROOMS[0]), 0.0)
    restarted = attrs.evolve(PEERS[0], epoch=2)
    with pytest.raises(StaleFrame):
        receiver.place(peer_key(restarted), ROOMS[0], LAYERS, TOKENS, 0.0)
    moved = attrs.evolve(PEERS[0], endpoints=("tcp://elsewhere:1",))
    receiver.place(peer_key(moved), ROOMS[0], LAYERS, TOKENS, 0.0)


def test_a_flood_of_tombstones_pushes_out_those_of_its_own_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MAX_TOMBSTONES", 4)
    sender = SenderRooms()
    decode, other = PEERS[3], PEERS[0]
    asked = [bytes([n]) * 16 for n in range(5)]
    assert sender.stop(peer_key(other), asked[4], TransferError("stop"), 0.0)
    for room in asked:
        assert sender.stop(peer_key(decode), room, TransferError("stop"), 0.0)
    assert len(sender.tombstones) == 4
    for room in asked[:2]:
        sender.accept(grant_of(room))
    for room in asked[2:]:
        with pytest.raises(TransferError, match="was aborted before"):
            sender.accept(grant_of(room))
    with pytest.raises(TransferError, match="was aborted before"):
        sender.accept(attrs.evolve(grant_of(asked[4]), destinations=(other,)))


def test_tombstones_are_kept_for_a_while() -> None:
    sender = SenderRooms()
    for at, room in enumerate(ROOMS):
        sender.stop(peer_key(PEERS[3]), room, TransferError("stop"), float(at))
    sender.tombstones.decay(rooms.TOMBSTONE_S + 0.5)
    assert len(sender.tombstones) == len(ROOMS) - 1
    sender.accept(grant_of(ROOMS[0]))
    with pytest.raises(TransferError, match="was aborted before"):
        sender.accept(grant_of(ROOMS[1]))
    sender.tombstones.decay(2 * rooms.TOMBSTONE_S)
    assert len(sender.tombstones) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=80))
def test_tombstones_count_themselves(buried: list[tuple[int, int]]) -> None:
    graves = rooms.Tombstones()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "MAX_TOMBSTONES", 12)
        patch.setattr(rooms, "MAX_TOMBSTONE_PEERS", 4)
        for now, (peer, room) in enumerate(buried):
            graves.bury((bytes([peer]), 0, 0), bytes([room]), now)
            assert graves.has((bytes([peer]), 0, 0), bytes([room])) or len(graves) == 12
            assert len(graves) == len(list(graves.rooms())) <= 12
            graves.decay(now + rooms.TOMBSTONE_S - 30)
            assert len(graves) == len(list(graves.rooms()))


def test_a_layer_in_too_many_pieces_is_no_honest_writers() -> None:
    """Each piece costs memory for as long as the room is open."""
    tokens = range(4 * MAX_PIECES)
    receiver = ReceiverRooms(LAYERS)
    receiver.expect(attrs.evolve(grant_of(ROOMS[0]), tokens=tokens), 0.0)
    writer = peer_key(PEERS[0])
    for start in tokens[: 2 * MAX_PIECES : 2]:
        receiver.place(writer, ROOMS[0], LAYERS, range(start, start + 1), 0.0)
    with pytest.raises(TransferError, match="sent in order"):
        receiver.place(writer, ROOMS[0], LAYERS, range(tokens.stop - 1, tokens.stop), 0.0)


def test_state_that_nobody_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MAX_STATE_BYTES", 100)
    receiver = ReceiverRooms(LAYERS)
    state = (NamedState(name="mtp.hidden", version=1, dtype="f", shape=(15,), data=bytes(60)),)

    def finish_with_state(room: bytes) -> None:
        receiver.expect(attrs.evolve(grant_of(room), tokens=range(0)), 0.0)
        receiver.finished(peer_key(PEERS[0]), attrs.evolve(handoff_of(room, PEERS[0]), state=state))

    for room in ROOMS[:2]:
        finish_with_state(room)
    landed, aborted = receiver.take_settled()
    assert (landed.status, aborted.status) == (LANDED, ABORTED)
    assert "more than 100 bytes" in str(aborted.error)
    finish_with_state(ROOMS[0])
    assert receiver.take_settled()[0].status is LANDED


def test_one_peers_tombstone_is_none_of_anothers_business() -> None:
    sender = SenderRooms()
    assert sender.stop(peer_key(PEERS[0]), ROOMS[0], TransferError("stop"), 0.0)
    sender.accept(grant_of(ROOMS[0]))


def test_the_first_error_of_aborted_handoffs() -> None:
    handoffs = [
        handoff_of(ROOMS[0], PEERS[0]),
        attrs.evolve(handoff_of(ROOMS[0], PEERS[1], ABORTED), error=ConfigError("mine")),
        handoff_of(ROOMS[0], PEERS[2], ABORTED),
    ]
    assert str(first_error(handoffs)) == "mine"
    silent = [attrs.evolve(handoffs[1], error=None)]
    assert isinstance(first_error(silent), TransferError)


def test_a_tombstone_outlives_the_link_over_which_the_abort_came() -> None:
    sender = SenderRooms()
    decode = peer_key(PEERS[3])
    assert sender.stop(decode, ROOMS[0], TransferError("stop"), 0.0)
    sender.lost(decode, TransferError("the link broke, and is dialled again"))
    with pytest.raises(TransferError, match="was aborted before"):
        sender.accept(grant_of(ROOMS[0]))


def test_tombstones_of_so_many_peers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MAX_TOMBSTONE_PEERS", 2)
    sender = SenderRooms()
    for peer, room in zip(PEERS, (*ROOMS, bytes(16)), strict=True):
        sender.stop(peer_key(peer), room, TransferError("stop"), 0.0)
    assert list(sender.tombstones.rooms()) == [*ROOMS, bytes(16)][2:]
