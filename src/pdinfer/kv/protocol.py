"""The rules of a hand-off as two plain state machines: no I/O, no clock, no tensors.

Decode's side is `Expected`: rooms it has granted, what has arrived for each, and each writer's last word. A room is
*settled* once every writer has spoken or is proven gone; only then may its pages be adopted or returned.

    EXPECTED ──all words LANDED, coverage whole──► settled LANDED
        └────any word ABORTED, writer lost, bytes did not verify, coverage short──► settled ABORTED

Prefill's side is `Accepted`: rooms it may write. A room it never heard of and is asked to stop becomes a tombstone, so
that a late submit with it is refused.

    (unknown) ──accept──► OPEN ──finish──► (forgotten)        (unknown) ──stop──► tombstone
                            └──stop──► STOPPING ──finish──► (forgotten)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import attrs

from pdinfer.errors import PDInferError, TransferError
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress

MAX_TOMBSTONES = 65536

PeerKey = tuple[bytes, int, int]
"""(engine_id, epoch, rank): who a peer is, wherever it can be reached."""


def peer_key(address: PeerAddress) -> PeerKey:
    """The identity in an address."""
    return address.engine_id, address.epoch, address.rank


class StaleFrame(TransferError):
    """A message for a room that is unknown, over, or another peer's: dropped and counted, never acted upon."""


@attrs.define
class Coverage:
    """Which tokens of which layers have arrived, as disjoint ranges per layer; those in order are joined."""

    layers: range
    tokens: range
    _arrived: dict[int, list[range]] = attrs.field(factory=dict)
    _num_missing: int = 0

    def __attrs_post_init__(self) -> None:
        self._num_missing = len(self.layers) * len(self.tokens)

    @property
    def complete(self) -> bool:
        return self._num_missing == 0

    def claim(self, layers: range, tokens: range) -> None:
        """Marks a rectangle as arrived; TransferError when it leaves the grant or overlaps what came before."""
        inside = _within(layers, self.layers) and _within(tokens, self.tokens)
        if not inside or not layers or not tokens:
            raise TransferError(
                f"layers {_text(layers)} x tokens {_text(tokens)} is outside the grant's layers {_text(self.layers)} "
                f"x tokens {_text(self.tokens)}"
            )
        for layer in layers:
            for range_ in self._arrived.get(layer, ()):
                if tokens.start < range_.stop and range_.start < tokens.stop:
                    raise TransferError(f"tokens {_text(tokens)} of layer {layer} arrived twice")
        for layer in layers:
            ranges = self._arrived.setdefault(layer, [])
            if ranges and ranges[-1].stop == tokens.start:
                ranges[-1] = range(ranges[-1].start, tokens.stop)
            else:
                ranges.append(tokens)
        self._num_missing -= len(layers) * len(tokens)


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _text(span: range) -> str:
    return f"[{span.start}, {span.stop})"


@attrs.define
class _Room:
    grant: PageGrant
    coverage: Coverage
    words: dict[PeerKey, Handoff] = attrs.field(factory=dict)
    fault: TransferError | None = None
    stopped: bool = False

    @property
    def writers(self) -> list[PeerKey]:
        return [peer_key(writer) for writer in self.grant.writers]

    def address_of(self, peer: PeerKey) -> PeerAddress:
        return next(writer for writer in self.grant.writers if peer_key(writer) == peer)

    def silent(self) -> list[PeerKey]:
        return [writer for writer in self.writers if writer not in self.words]


@attrs.define
class Expected:
    """Decode's side. Methods return the peers to be told to stop, if any."""

    layers: range
    _rooms: dict[bytes, _Room] = attrs.field(factory=dict)
    _settled: list[Handoff] = attrs.field(factory=list)

    def expect(self, grant: PageGrant) -> None:
        """From now on `grant`'s writers may write it."""
        if grant.room in self._rooms:
            raise TransferError(f"room {grant.room.hex()} is expected already")
        if not grant.writers:
            raise TransferError(f"room {grant.room.hex()} has no writer, so it could never settle")
        self._rooms[grant.room] = _Room(grant, Coverage(self.layers, grant.tokens))

    def place(self, peer: PeerKey, room: bytes, layers: range, tokens: range) -> PageGrant:
        """A writer announces a payload: the grant that says where it goes. StaleFrame when it may not write."""
        state = self._rooms.get(room)
        if state is None or peer not in state.writers or peer in state.words:
            raise StaleFrame(f"a write for room {room.hex()} that this peer may not write")
        state.coverage.claim(layers, tokens)
        return state.grant

    def damaged(self, room: bytes, error: TransferError) -> list[PeerKey]:
        """Bytes of the room did not verify: it can only end ABORTED."""
        state = self._rooms.get(room)
        if state is None:
            return []
        state.fault = state.fault or error
        return self.stop(room)

    def said(self, peer: PeerKey, word: Handoff) -> list[PeerKey]:
        """A writer's last word. StaleFrame when it is not the room's writer or has spoken before."""
        state = self._rooms.get(word.room)
        if state is None or peer not in state.writers or peer in state.words:
            raise StaleFrame(f"a hand-off for room {word.room.hex()} that this peer does not owe")
        state.words[peer] = attrs.evolve(word, writer=state.address_of(peer))  # whoever the word says it is from
        silent = state.silent()
        if not silent:
            self._settle(state)
        elif word.status is HandoffStatus.ABORTED:
            return self.stop(word.room)
        return []

    def stop(self, room: bytes) -> list[PeerKey]:
        """The room is not wanted any more: the writers that have not spoken yet."""
        state = self._rooms.get(room)
        if state is None or state.stopped:
            return []
        state.stopped = True
        return state.silent()

    def lost(self, peer: PeerKey, error: TransferError) -> dict[bytes, list[PeerKey]]:
        """The peer can write no more: it counts as having said ABORTED in every room it still owes a word. Per room
        the other writers, to be told to stop."""
        to_stop: dict[bytes, list[PeerKey]] = {}
        for state in [state for state in self._rooms.values() if peer in state.silent()]:
            room, writer = state.grant.room, state.address_of(peer)
            to_stop[room] = self.said(
                peer, Handoff(room=room, writer=writer, status=HandoffStatus.ABORTED, error=error)
            )
        return to_stop

    def take_settled(self) -> list[Handoff]:
        """The words of every room settled since the last call, those of a room together. Each status is final: a
        room that did not verify gives ABORTED whatever its writers said."""
        settled, self._settled = self._settled, []
        return settled

    @property
    def has_settled(self) -> bool:
        return bool(self._settled)

    def _settle(self, state: _Room) -> None:
        del self._rooms[state.grant.room]
        words = [state.words[writer] for writer in state.writers]
        whole = all(word.status is HandoffStatus.LANDED for word in words)
        if whole and state.fault is None and not state.coverage.complete:
            state.fault = TransferError("a hand-off said LANDED but not every granted token had arrived")
        if state.fault is not None:
            words = [attrs.evolve(word, status=HandoffStatus.ABORTED, error=state.fault) for word in words]
        self._settled += words


@attrs.define
class Accepted:
    """Prefill's side: the rooms it may write, and the rooms it must never write."""

    _rooms: dict[bytes, tuple[PeerKey, ...]] = attrs.field(factory=dict)
    _tombstones: OrderedDict[bytes, None] = attrs.field(factory=OrderedDict)
    _stops: list[tuple[bytes, TransferError]] = attrs.field(factory=list)

    def accept(self, grant: PageGrant) -> None:
        """A request with this grant was submitted; TransferError when the room was aborted before it arrived."""
        if grant.room in self._tombstones:
            raise TransferError(f"room {grant.room.hex()} was aborted before its request arrived")
        if grant.room in self._rooms:
            raise TransferError(f"room {grant.room.hex()} was submitted twice")
        self._rooms[grant.room] = tuple(peer_key(destination) for destination in grant.destinations)

    def writable(self, room: bytes) -> bool:
        return room in self._rooms

    def stop(self, peer: PeerKey, room: bytes, error: TransferError) -> bool:
        """Decode asks to stop. True when the room was never heard of: the answer ABORTED is due at once."""
        destinations = self._rooms.get(room)
        if destinations is None:
            self._tombstones[room] = None
            while len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
            return True
        if peer in destinations:
            self._stops.append((room, error))
        return False

    def lost(self, peer: PeerKey, error: TransferError) -> None:
        """A destination is gone: its rooms need no more work."""
        self._stops += [(room, error) for room, destinations in self._rooms.items() if peer in destinations]

    def finish(self, room: bytes) -> None:
        """The last word on the room is said."""
        self._rooms.pop(room, None)

    def take_stops(self) -> list[tuple[bytes, TransferError]]:
        """Rooms that someone asked to stop since the last call; each still needs its last word."""
        stops = [(room, error) for room, error in self._stops if room in self._rooms]
        self._stops = []
        return stops

    @property
    def has_stops(self) -> bool:
        return any(room in self._rooms for room, _ in self._stops)


def first_error(words: Sequence[Handoff]) -> PDInferError:
    """Why a room did not land."""
    errors = [word.error for word in words if word.status is HandoffStatus.ABORTED and word.error is not None]
    return errors[0] if errors else TransferError("the writer aborted without saying why")
