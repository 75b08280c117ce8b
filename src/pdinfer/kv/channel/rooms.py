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

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import attrs

from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel.coverage import Coverage
from pdinfer.kv.channel.snapshot import AcceptedState, ExpectedRoom, ExpectedState
from pdinfer.kv.channel.tombstones import Tombstones
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, PeerKey, peer_key

MAX_OWED = 1 << 15
"""The most answers kept for requests that were turned away while their decode was not linked. The oldest go first."""
MAX_PIECES = 64
"""The most ranges of a layer's tokens with gaps between them, per writer of a room. Honest writers leave one or two,
since they send in the order of the tokens."""
MAX_STATE_BYTES = 16 << 20
"""The most state that hand-offs may bring beside KV, over all rooms that have not been taken."""


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
    stopped: bool = False
    stopping_since: float | None = None

    def owing(self) -> list[PeerKey]:
        """Return the writers that have not finished."""
        return [writer for writer in self.writers if writer not in self.handoffs]

    def snapshot(self) -> ExpectedRoom:
        """Return the room as it is now."""
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
    _rooms: dict[bytes, _Room] = attrs.field(factory=dict)
    _settled: list[Handoff] = attrs.field(factory=list)
    _state_bytes: int = 0

    def expect(self, grant: PageGrant, now: float) -> None:
        """Let the writers of `grant` write it from now on."""
        if grant.room in self._rooms:
            raise TransferError(f"room {grant.room.hex()} is expected already")
        if not grant.writers:
            raise TransferError(f"room {grant.room.hex()} has no writer, so it could never settle")
        writers = {peer_key(writer): writer for writer in grant.writers}
        coverage = Coverage(self.layers, grant.tokens, MAX_PIECES * len(writers))
        self._rooms[grant.room] = _Room(grant, writers, coverage, now)

    def place(self, peer: PeerKey, room: bytes, layers: range, tokens: range, now: float) -> PageGrant:
        """Announce a payload from a writer. Return the grant that tells where it goes. Raises StaleFrame when the peer
        may not write it."""
        state = self._rooms.get(room)
        if state is None or peer not in state.writers or peer in state.handoffs:
            raise StaleFrame(f"a write for room {room.hex()} that this peer may not write")
        state.coverage.announce(layers, tokens)
        if state.first_byte_at is None:
            state.first_byte_at = now
        return state.grant

    def placed(
        self, room: bytes, layers: range, tokens: range, error: TransferError | None, now: float
    ) -> list[PeerKey]:
        """Note that an announced payload has arrived. With an `error` it did not verify, and the room can only end
        ABORTED."""
        state = self._rooms.get(room)
        if state is None:
            return []
        if error is None:
            state.coverage.arrive(layers, tokens)
            state.last_byte_at = now
            return []
        state.fault = state.fault or error
        return self.stop(room)

    def finished(self, peer: PeerKey, handoff: Handoff) -> list[PeerKey]:
        """Take a writer's hand-off. Raises StaleFrame when the peer is not a writer of the room or has finished
        before."""
        state = self._rooms.get(handoff.room)
        if state is None or peer not in state.writers or peer in state.handoffs:
            raise StaleFrame(f"a hand-off for room {handoff.room.hex()} that this peer does not owe")
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

    def stop(self, room: bytes) -> list[PeerKey]:
        """Stop a room that is not wanted any more. Return the writers that have not finished."""
        state = self._rooms.get(room)
        if state is None or state.stopped:
            return []
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
        """Return the rooms that have not settled."""
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
            self._settled.append(
                attrs.evolve(
                    handoff,
                    writer=writer,  # a hand-off speaks for its sender only, whichever writer it names
                    status=handoff.status if state.fault is None else HandoffStatus.ABORTED,
                    error=handoff.error if state.fault is None else state.fault,
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
        """Forget a room that this end has finished."""
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
        """Return the state of every room that is remembered."""
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
