"""The rules of a hand-off as two plain state machines: no I/O, no clock, no tensors.

Decode's side is `ReceiverRooms`: the rooms it has granted, what has arrived for each, and each writer's hand-off. A
room is *settled* once every writer has finished or is proven gone. Only then may its pages be adopted or returned.

    EXPECTED ──all hand-offs LANDED, coverage whole──► settled LANDED
        └────any hand-off ABORTED, writer lost, bytes did not verify, coverage short──► settled ABORTED

Prefill's side is `SenderRooms`: the rooms it may write. When it is asked to stop an unknown room, that room becomes a
tombstone, so that a request which comes later is refused.

    (unknown) ──accept──► OPEN ──finish──► (forgotten)        (unknown) ──stop──► tombstone
                            └──stop──► STOPPING ──finish──► (forgotten)
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import attrs

from pdinfer.checks import within
from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel.snapshot import AcceptedState, ExpectedRoom, ExpectedState
from pdinfer.kv.layout import text_of
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, PeerKey, peer_key

MAX_TOMBSTONES = 1 << 15
"""Limit over all peers together. Past it the peer with the most loses its oldest, so a flood pushes out its own."""
MAX_TOMBSTONE_PEERS = 256
"""Past it the peer that has been quiet for longest loses all of its tombstones."""
TOMBSTONE_S = 120.0
"""Twice as long as a lost peer is dialled: a request that has not come by then is not under way."""


MAX_OWED = 1 << 15
"""The most answers kept for requests that were turned away while their decode was not linked. The oldest go first."""
MAX_PIECES = 64
"""The most ranges of a layer's tokens with gaps between them, per writer of a room. Honest writers leave one or two,
since they send in the order of the tokens."""
MAX_STATE_BYTES = 16 << 20
"""The most state that hand-offs may bring next to KV, over all rooms that have not been taken."""
NO_HEADS = range(1)
"""The heads of pages without a head axis, for counting."""


@attrs.define
class Tombstones:
    """The aborted rooms of each peer and when they were aborted, the peer that was quiet for longest first."""

    _rooms: OrderedDict[Hashable, OrderedDict[bytes, float]] = attrs.field(factory=OrderedDict)

    def __len__(self) -> int:
        return sum(map(len, self._rooms.values()))

    def rooms(self) -> Iterator[bytes]:
        """Iterate over all rooms that some peer has aborted."""
        for rooms in self._rooms.values():
            yield from rooms

    def has(self, peer: Hashable, room: bytes) -> bool:
        return room in self._rooms.get(peer, ())

    def bury(self, peer: Hashable, room: bytes, now: float) -> None:
        """Note that the peer has aborted a room that is unknown here."""
        rooms = self._rooms.setdefault(peer, OrderedDict())
        self._rooms.move_to_end(peer)
        rooms[room] = now
        rooms.move_to_end(room)
        while len(self._rooms) > MAX_TOMBSTONE_PEERS:
            self._rooms.popitem(last=False)
        while len(self) > MAX_TOMBSTONES:
            most = max(self._rooms, key=lambda each: len(self._rooms[each]))
            self._pop_oldest(most)

    def decay(self, now: float) -> None:
        for peer in list(self._rooms):
            while (rooms := self._rooms.get(peer)) and next(iter(rooms.values())) < now - TOMBSTONE_S:
                self._pop_oldest(peer)

    def _pop_oldest(self, peer: Hashable) -> None:
        self._rooms[peer].popitem(last=False)
        if not self._rooms[peer]:
            del self._rooms[peer]


@attrs.define
class Coverage:
    """The tokens of each head of each layer that a room's writers have announced, and how many have not yet arrived and
    verified.

    The announced tokens of a head are sorted, disjoint ranges, at most `max_pieces` of them. Neighbours are joined."""

    layers: range
    tokens: range
    max_pieces: float = math.inf
    heads: range = NO_HEADS
    _announced: dict[int, list[range]] = attrs.field(factory=dict)
    _num_missing: int = 0

    def __attrs_post_init__(self) -> None:
        self._num_missing = len(self.layers) * len(self.tokens) * len(self.heads)

    @property
    def num_pieces(self) -> int:
        """The number of announced ranges, over all layers and heads."""
        return sum(map(len, self._announced.values()))

    def pieces(self, layer: int, head: int = 0) -> tuple[range, ...]:
        """Return the announced ranges of a layer's head, in order."""
        return tuple(self._announced.get(self._row(layer, head), ()))

    @property
    def complete(self) -> bool:
        return self._num_missing == 0

    def announce(self, layers: range, tokens: range, heads: range = NO_HEADS) -> None:
        """Note that a block is about to arrive. Raises TransferError when it leaves the grant or overlaps an earlier
        one."""
        inside = within(layers, self.layers) and within(tokens, self.tokens) and within(heads, self.heads)
        if not (inside and layers and tokens and heads):
            asked, granted = (layers, tokens, heads), (self.layers, self.tokens, self.heads)
            raise TransferError(f"{self._block(*asked)} is outside the grant's {self._block(*granted)}")
        places = []
        for row in [self._row(layer, head) for layer in layers for head in heads]:
            ranges = self._announced.setdefault(row, [])
            at = bisect(ranges, tokens.start, key=lambda span: span.start)
            if (at and ranges[at - 1].stop > tokens.start) or (at < len(ranges) and ranges[at].start < tokens.stop):
                raise TransferError(f"tokens {text_of(tokens)} of {self._named(row)} were announced twice")
            if len(ranges) >= self.max_pieces:
                raise TransferError(
                    f"{self._named(row)} was announced in more than {self.max_pieces} pieces with gaps between "
                    f"them; tokens are sent in order"
                )
            places.append((ranges, at))
        for ranges, at in places:
            _insert(ranges, at, tokens)

    def arrive(self, layers: range, tokens: range, heads: range = NO_HEADS) -> None:
        self._num_missing -= len(layers) * len(tokens) * len(heads)

    def _block(self, layers: range, tokens: range, heads: range) -> str:
        of_heads = "" if self.heads is NO_HEADS else f" x heads {text_of(heads)}"
        return f"layers {text_of(layers)} x tokens {text_of(tokens)}{of_heads}"

    def _row(self, layer: int, head: int) -> int:
        """Return the number of a head of a layer: without heads that of the layer."""
        return layer * self.heads.stop + head

    def _named(self, row: int) -> str:
        layer, head = divmod(row, self.heads.stop)
        return f"layer {layer}" if self.heads is NO_HEADS else f"head {head} of layer {layer}"


def _insert(ranges: list[range], at: int, tokens: range) -> None:
    """Insert `tokens` between its neighbours, and join it to those that it touches."""
    first, last, start, stop = at, at, tokens.start, tokens.stop
    if at and ranges[at - 1].stop == start:
        first, start = at - 1, ranges[at - 1].start
    if at < len(ranges) and ranges[at].start == stop:
        last, stop = at + 1, ranges[at].stop
    ranges[first:last] = [range(start, stop)]


class StaleFrame(TransferError):
    """A message for a room that is unknown, over, or another peer's. It is dropped and counted, never acted upon."""


@attrs.define
class _Room:
    grant: PageGrant
    writers: dict[PeerKey, PeerAddress]
    coverage: Coverage
    expected_at: float
    first_byte_at: float | None = None
    last_byte_at: float | None = None
    handoffs: dict[PeerKey, Handoff] = attrs.field(factory=dict)
    fault: TransferError | None = None
    given_up: PDInferError | None = None
    stopped: bool = False
    stopping_since: float | None = None

    def owing(self) -> list[PeerKey]:
        return [writer for writer in self.writers if writer not in self.handoffs]

    def snapshot(self) -> ExpectedRoom:
        stopped = ExpectedState.STOPPED if self.stopped else ExpectedState.OPEN
        return ExpectedRoom(
            state=stopped if self.fault is None else ExpectedState.DAMAGED,
            pages=self.grant.pages,
            num_writers=len(self.writers),
            handoffs=tuple(handoff.status for handoff in self.handoffs.values()),
            num_pieces=self.coverage.num_pieces,
        )


@attrs.define
class ReceiverRooms:
    """Decode's side: the rooms that it has granted. Methods return the writers that have to be told to stop."""

    layers: range
    heads: range = NO_HEADS
    _rooms: dict[bytes, _Room] = attrs.field(factory=dict)
    _settled: list[Handoff] = attrs.field(factory=list)
    _state_bytes: int = 0

    def __contains__(self, room: bytes) -> bool:
        return room in self._rooms

    def expect(self, grant: PageGrant, now: float) -> None:
        """Let the writers of `grant` write it from now on."""
        if grant.room in self._rooms:
            raise TransferError(f"room {grant.room.hex()} is expected already")
        if not grant.writers:
            raise TransferError(f"room {grant.room.hex()} has no writer, so it could never settle")
        writers = {peer_key(writer): writer for writer in grant.writers}
        coverage = Coverage(self.layers, grant.tokens, MAX_PIECES * len(writers), self.heads)
        self._rooms[grant.room] = _Room(grant, writers, coverage, now)

    def place(
        self, peer: PeerKey, room: bytes, layers: range, tokens: range, now: float, heads: range = NO_HEADS
    ) -> PageGrant:
        """Announce a payload from a writer. Return the grant that tells where it goes. Raises StaleFrame when the peer
        may not write it."""
        state = self._owed_by(peer, room, "a write")
        state.coverage.announce(layers, tokens, heads)
        if state.first_byte_at is None:
            state.first_byte_at = now
        return state.grant

    def placed(
        self,
        room: bytes,
        layers: range,
        tokens: range,
        error: TransferError | None,
        now: float,
        heads: range = NO_HEADS,
    ) -> list[PeerKey]:
        """Note that an announced payload has arrived. With an `error` it did not verify, and the room can only end
        ABORTED."""
        state = self._rooms.get(room)
        if state is None:
            return []
        if error is None:
            state.coverage.arrive(layers, tokens, heads)
            state.last_byte_at = now
            return []
        state.fault = state.fault or error
        return self.stop(room)

    def finished(self, peer: PeerKey, handoff: Handoff) -> list[PeerKey]:
        """Take a writer's hand-off. Raises StaleFrame when the peer is not a writer of the room or has finished
        before."""
        state = self._owed_by(peer, handoff.room, "a hand-off")
        num_bytes = _state_bytes(handoff)
        if self._state_bytes + num_bytes > MAX_STATE_BYTES:
            error = TransferError(f"hand-offs brought more than {MAX_STATE_BYTES} bytes of state that nobody has taken")
            handoff, num_bytes = attrs.evolve(handoff, status=HandoffStatus.ABORTED, error=error, state=()), 0
        self._state_bytes += num_bytes
        state.handoffs[peer] = handoff
        if len(state.handoffs) == len(state.writers):
            self._settle(state)
        elif handoff.status is HandoffStatus.ABORTED:
            return self.stop(handoff.room)
        return []

    def _owed_by(self, peer: PeerKey, room: bytes, what: str) -> _Room:
        """Return a room that the peer has yet to finish. Raises StaleFrame when there is none."""
        state = self._rooms.get(room)
        if state is None or peer not in state.writers or peer in state.handoffs:
            raise StaleFrame(f"{what} for room {room.hex()}, which this peer does not owe")
        return state

    def stop(self, room: bytes, error: PDInferError | None = None) -> list[PeerKey]:
        """Stop a room that is not wanted any more, for the host's own reason if there is an `error`. Return the writers
        that have not finished."""
        state = self._rooms.get(room)
        if state is None or state.stopped:
            return []
        state.given_up = error
        state.stopped = True
        return state.owing()

    def unanswered(self, now: float, patience_s: float) -> list[PeerKey]:
        """Return the writers that were asked to stop at least `patience_s` ago, counted from the first call that saw
        it, and have not finished. Only taking their access away can settle those rooms."""
        peers: list[PeerKey] = []
        for state in self._rooms.values():
            if state.stopped:
                if state.stopping_since is None:
                    state.stopping_since = now
                if now - state.stopping_since >= patience_s:
                    peers += state.owing()
        return list(dict.fromkeys(peers))

    def lost(self, peer: PeerKey, error: TransferError) -> dict[bytes, list[PeerKey]]:
        """Note that the peer cannot write any more, which counts as ABORTED in every room that it has not finished.
        Return the other writers of each of these rooms, to be told to stop."""
        to_stop: dict[bytes, list[PeerKey]] = {}
        for state in [state for state in self._rooms.values() if peer in state.owing()]:
            room, writer = state.grant.room, state.writers[peer]
            state.given_up = None  # how its writers came to stop is the better reason
            to_stop[room] = self.finished(
                peer, Handoff(room=room, writer=writer, status=HandoffStatus.ABORTED, error=error)
            )
        return to_stop

    def take_settled(self) -> list[Handoff]:
        """Return the hand-offs of every room settled since the last call, those of a room together. Each status is
        final: a room that did not verify is ABORTED, whatever status its writers sent."""
        settled, self._settled = self._settled, []
        self._state_bytes -= sum(map(_state_bytes, settled))
        return settled

    @property
    def num_settled(self) -> int:
        """The number of hand-offs that `take_settled` would return."""
        return len(self._settled)

    def snapshot(self) -> dict[bytes, ExpectedRoom]:
        return {room: state.snapshot() for room, state in self._rooms.items()}

    def _settle(self, state: _Room) -> None:
        del self._rooms[state.grant.room]
        whole = all(handoff.status is HandoffStatus.LANDED for handoff in state.handoffs.values())
        if whole and state.fault is None and not state.coverage.complete:
            state.fault = TransferError("a hand-off said LANDED but not every granted token had arrived")
        first_s, last_s = (
            None if at is None else at - state.expected_at for at in (state.first_byte_at, state.last_byte_at)
        )
        for key, writer in state.writers.items():
            handoff = state.handoffs[key]
            aborted = handoff.status is HandoffStatus.ABORTED
            self._settled.append(
                attrs.evolve(
                    handoff,
                    writer=writer,  # a hand-off speaks for its sender only, whichever writer it names
                    status=handoff.status if state.fault is None else HandoffStatus.ABORTED,
                    error=state.fault or (state.given_up if aborted else None) or handoff.error,
                    first_byte_s=first_s,
                    last_byte_s=last_s,
                )
            )


def _state_bytes(handoff: Handoff) -> int:
    return sum(len(state.data) for state in handoff.state)


@attrs.define
class SenderRooms:
    """Prefill's side: the rooms that it may write, and for each decode the rooms that it must never write."""

    tombstones: Tombstones = attrs.field(factory=Tombstones)
    _rooms: dict[bytes, tuple[PeerKey, ...]] = attrs.field(factory=dict)
    _stops: dict[bytes, TransferError] = attrs.field(factory=dict)
    _owed: OrderedDict[tuple[bytes, PeerKey], None] = attrs.field(factory=OrderedDict)

    def turn_away(self, grant: PageGrant) -> None:
        """Note that a request cannot be taken. Every destination may be waiting for a hand-off, even one that is not
        linked yet at this end: it may have seen the link first and granted the room then. See `linked`."""
        for destination in grant.destinations:
            self._owed[grant.room, peer_key(destination)] = None
        while len(self._owed) > MAX_OWED:
            self._owed.popitem(last=False)

    def linked(self, peer: PeerKey) -> list[bytes]:
        """Note that there is a link to `peer`. Return the rooms that were turned away, to be answered ABORTED."""
        rooms = [room for room, destination in self._owed if destination == peer]
        for room in rooms:
            del self._owed[room, peer]
        return rooms

    def accept(self, grant: PageGrant) -> None:
        """Open a room, since a request with this grant was submitted. Raises StaleFrame when one of its destinations
        has aborted the room before, TransferError when the room is open already."""
        destinations = tuple(peer_key(destination) for destination in grant.destinations)
        if any(self.tombstones.has(peer, grant.room) for peer in destinations):
            raise StaleFrame(f"room {grant.room.hex()} was aborted before its request arrived")
        if grant.room in self._rooms:
            raise TransferError(f"room {grant.room.hex()} was submitted twice")
        self._rooms[grant.room] = destinations

    def writable(self, room: bytes) -> bool:
        return room in self._rooms

    def stop(self, peer: PeerKey, room: bytes, error: TransferError, now: float) -> bool:
        """Note that decode asks to stop a room. Return whether the room is unknown; then ABORTED has to be answered
        now."""
        destinations = self._rooms.get(room)
        if destinations is None:
            self.tombstones.bury(peer, room, now)
            return True
        if peer in destinations:
            self._stops.setdefault(room, error)
        return False

    def lost(self, peer: PeerKey, error: TransferError) -> None:
        """Note that a destination is gone, so that its rooms need no more work. Tombstones stay: it may come back over
        a new link, followed by requests that were on their way all the time."""
        for room, destinations in self._rooms.items():
            if peer in destinations:
                self._stops.setdefault(room, error)

    def finish(self, room: bytes) -> None:
        self._rooms.pop(room, None)
        self._stops.pop(room, None)

    def take_stops(self) -> list[tuple[bytes, TransferError]]:
        """Return the rooms that decode asked to stop since the last call, with the reasons. Each still has to be
        finished."""
        stops, self._stops = self._stops, {}
        return list(stops.items())

    @property
    def num_stops(self) -> int:
        """The number of rooms that `take_stops` would return."""
        return len(self._stops)

    def snapshot(self) -> dict[bytes, AcceptedState]:
        states = dict.fromkeys(self.tombstones.rooms(), AcceptedState.TOMBSTONE)
        states.update(dict.fromkeys((room for room, _ in self._owed), AcceptedState.TURNED_AWAY))
        stopping, is_open = AcceptedState.STOPPING, AcceptedState.OPEN
        states.update((room, stopping if room in self._stops else is_open) for room in self._rooms)
        return states


def by_room(handoffs: Iterable[Handoff]) -> dict[bytes, list[Handoff]]:
    """Return the hand-offs of each room. Rooms and hand-offs keep the order in which they came."""
    rooms: dict[bytes, list[Handoff]] = {}
    for handoff in handoffs:
        rooms.setdefault(handoff.room, []).append(handoff)
    return rooms


def first_error(handoffs: Sequence[Handoff]) -> PDInferError:
    """Return why a room did not land."""
    aborted = [handoff for handoff in handoffs if handoff.status is HandoffStatus.ABORTED]
    errors = [handoff.error for handoff in aborted if handoff.error is not None]
    return errors[0] if errors else TransferError("the writer aborted without saying why")
