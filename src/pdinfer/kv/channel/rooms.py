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

import math
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import attrs

from pdinfer.checks import within
from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel.tombstones import Tombstones
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, PeerKey, peer_key

MAX_OWED = 1 << 15
"""Answers to requests that were turned away while their decode was not linked; the oldest go first."""
MAX_PIECES = 64
"""Of a layer's tokens, for each writer: ranges announced with gaps between them. Honest writers leave one or two, since
they send in the order of the tokens."""
MAX_STATE_BYTES = 16 << 20
"""What hand-offs may carry beside KV, of all rooms that nobody has taken yet."""


class StaleFrame(TransferError):
    """A message for a room that is unknown, over, or another peer's: dropped and counted, never acted upon."""


@attrs.define
class Coverage:
    """Which tokens of which layers a room's writers have announced, and how many of them have arrived and verified.

    Per layer the announced tokens are sorted, disjoint ranges, at most `max_pieces`; neighbours are joined.
    """

    layers: range
    tokens: range
    max_pieces: float = math.inf
    _announced: dict[int, list[range]] = attrs.field(factory=dict)
    _num_missing: int = 0

    def __attrs_post_init__(self) -> None:
        self._num_missing = len(self.layers) * len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether every token of every layer has arrived."""
        return self._num_missing == 0

    def announce(self, layers: range, tokens: range) -> None:
        """A rectangle is about to arrive; TransferError when it leaves the grant or overlaps what came before."""
        inside = within(layers, self.layers) and within(tokens, self.tokens)
        if not inside or not layers or not tokens:
            raise TransferError(
                f"layers {_text(layers)} x tokens {_text(tokens)} is outside the grant's layers {_text(self.layers)} "
                f"x tokens {_text(self.tokens)}"
            )
        places = []
        for layer in layers:
            ranges = self._announced.setdefault(layer, [])
            at = bisect(ranges, tokens.start, key=lambda span: span.start)
            if (at and ranges[at - 1].stop > tokens.start) or (at < len(ranges) and ranges[at].start < tokens.stop):
                raise TransferError(f"tokens {_text(tokens)} of layer {layer} were announced twice")
            if len(ranges) >= self.max_pieces:
                raise TransferError(
                    f"layer {layer} was announced in more than {self.max_pieces} pieces with gaps between them; "
                    f"tokens are sent in order"
                )
            places.append((ranges, at))
        for ranges, at in places:
            _insert(ranges, at, tokens)

    def arrive(self, layers: range, tokens: range) -> None:
        """An announced rectangle is here and verified."""
        self._num_missing -= len(layers) * len(tokens)


def _insert(ranges: list[range], at: int, tokens: range) -> None:
    """Puts `tokens` between its neighbours, joined to those it touches."""
    first, last, start, stop = at, at, tokens.start, tokens.stop
    if at and ranges[at - 1].stop == start:
        first, start = at - 1, ranges[at - 1].start
    if at < len(ranges) and ranges[at].start == stop:
        last, stop = at + 1, ranges[at].stop
    ranges[first:last] = [range(start, stop)]


def _text(span: range) -> str:
    return f"[{span.start}, {span.stop})"


@attrs.define
class _Room:
    grant: PageGrant
    writers: dict[PeerKey, PeerAddress]
    coverage: Coverage
    expected_at: float
    first_byte_at: float | None = None
    last_byte_at: float | None = None
    words: dict[PeerKey, Handoff] = attrs.field(factory=dict)
    fault: TransferError | None = None
    stopped: bool = False
    stopping_since: float | None = None

    def silent(self) -> list[PeerKey]:
        return [writer for writer in self.writers if writer not in self.words]


@attrs.define
class Expected:
    """Decode's side. Methods return the peers to be told to stop, if any."""

    layers: range
    _rooms: dict[bytes, _Room] = attrs.field(factory=dict)
    _settled: list[Handoff] = attrs.field(factory=list)
    _state_bytes: int = 0

    def expect(self, grant: PageGrant, now: float) -> None:
        """From now on `grant`'s writers may write it."""
        if grant.room in self._rooms:
            raise TransferError(f"room {grant.room.hex()} is expected already")
        if not grant.writers:
            raise TransferError(f"room {grant.room.hex()} has no writer, so it could never settle")
        writers = {peer_key(writer): writer for writer in grant.writers}
        coverage = Coverage(self.layers, grant.tokens, MAX_PIECES * len(writers))
        self._rooms[grant.room] = _Room(grant, writers, coverage, now)

    def place(self, peer: PeerKey, room: bytes, layers: range, tokens: range, now: float) -> PageGrant:
        """A writer announces a payload: the grant that says where it goes. StaleFrame when it may not write."""
        state = self._rooms.get(room)
        if state is None or peer not in state.writers or peer in state.words:
            raise StaleFrame(f"a write for room {room.hex()} that this peer may not write")
        state.coverage.announce(layers, tokens)
        if state.first_byte_at is None:
            state.first_byte_at = now
        return state.grant

    def placed(
        self, room: bytes, layers: range, tokens: range, error: TransferError | None, now: float
    ) -> list[PeerKey]:
        """An announced payload is here. With an `error` it did not verify, and the room can only end ABORTED."""
        state = self._rooms.get(room)
        if state is None:
            return []
        if error is None:
            state.coverage.arrive(layers, tokens)
            state.last_byte_at = now
            return []
        state.fault = state.fault or error
        return self.stop(room)

    def said(self, peer: PeerKey, word: Handoff) -> list[PeerKey]:
        """A writer's last word. StaleFrame when it is not the room's writer or has spoken before."""
        state = self._rooms.get(word.room)
        if state is None or peer not in state.writers or peer in state.words:
            raise StaleFrame(f"a hand-off for room {word.room.hex()} that this peer does not owe")
        num_bytes = _state_bytes(word)
        if self._state_bytes + num_bytes > MAX_STATE_BYTES:
            error = TransferError(f"hand-offs brought more than {MAX_STATE_BYTES} bytes of state that nobody has taken")
            word, num_bytes = attrs.evolve(word, status=HandoffStatus.ABORTED, error=error, state=()), 0
        self._state_bytes += num_bytes
        state.words[peer] = word
        if len(state.words) == len(state.writers):
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

    def unanswered(self, now: float, patience_s: float) -> list[PeerKey]:
        """Writers that were asked to stop `patience_s` ago, as far as calls to this have seen, and have not spoken:
        only taking their access away can settle those rooms."""
        peers: list[PeerKey] = []
        for state in self._rooms.values():
            if state.stopped:
                if state.stopping_since is None:
                    state.stopping_since = now
                if now - state.stopping_since >= patience_s:
                    peers += state.silent()
        return list(dict.fromkeys(peers))

    def lost(self, peer: PeerKey, error: TransferError) -> dict[bytes, list[PeerKey]]:
        """The peer can write no more: it counts as having said ABORTED in every room it still owes a word. Per room
        the other writers, to be told to stop."""
        to_stop: dict[bytes, list[PeerKey]] = {}
        for state in [state for state in self._rooms.values() if peer in state.silent()]:
            room, writer = state.grant.room, state.writers[peer]
            to_stop[room] = self.said(
                peer, Handoff(room=room, writer=writer, status=HandoffStatus.ABORTED, error=error)
            )
        return to_stop

    def take_settled(self) -> list[Handoff]:
        """The words of every room settled since the last call, those of a room together. Each status is final: a
        room that did not verify gives ABORTED whatever its writers said."""
        settled, self._settled = self._settled, []
        self._state_bytes -= sum(map(_state_bytes, settled))
        return settled

    @property
    def has_settled(self) -> bool:
        return bool(self._settled)

    def _settle(self, state: _Room) -> None:
        del self._rooms[state.grant.room]
        whole = all(word.status is HandoffStatus.LANDED for word in state.words.values())
        if whole and state.fault is None and not state.coverage.complete:
            state.fault = TransferError("a hand-off said LANDED but not every granted token had arrived")
        first_s, last_s = (
            None if at is None else at - state.expected_at for at in (state.first_byte_at, state.last_byte_at)
        )
        for key, writer in state.writers.items():
            word = state.words[key]
            self._settled.append(
                attrs.evolve(
                    word,
                    writer=writer,  # whoever the word says it is from
                    status=word.status if state.fault is None else HandoffStatus.ABORTED,
                    error=word.error if state.fault is None else state.fault,
                    first_byte_s=first_s,
                    last_byte_s=last_s,
                )
            )


def _state_bytes(word: Handoff) -> int:
    return sum(len(state.data) for state in word.state)


@attrs.define
class Accepted:
    """Prefill's side: the rooms it may write, and per decode the rooms it must never write."""

    tombstones: Tombstones = attrs.field(factory=Tombstones)
    _rooms: dict[bytes, tuple[PeerKey, ...]] = attrs.field(factory=dict)
    _stops: dict[bytes, TransferError] = attrs.field(factory=dict)
    _owed: OrderedDict[tuple[bytes, PeerKey], None] = attrs.field(factory=OrderedDict)

    def turn_away(self, grant: PageGrant) -> None:
        """A request came and cannot be taken: every destination may wait for a word, which `linked` gives. One may have
        seen a link first that is not there yet, and have granted the room on that."""
        for destination in grant.destinations:
            self._owed[grant.room, peer_key(destination)] = None
        while len(self._owed) > MAX_OWED:
            self._owed.popitem(last=False)

    def linked(self, peer: PeerKey) -> list[bytes]:
        """There is a link to `peer`: the rooms that were turned away, to be answered ABORTED."""
        rooms = [room for room, destination in self._owed if destination == peer]
        for room in rooms:
            del self._owed[room, peer]
        return rooms

    def accept(self, grant: PageGrant) -> None:
        """A request with this grant was submitted; StaleFrame when one of its destinations has aborted the room before
        it arrived, TransferError when it is here already."""
        destinations = tuple(peer_key(destination) for destination in grant.destinations)
        if any(self.tombstones.has(peer, grant.room) for peer in destinations):
            raise StaleFrame(f"room {grant.room.hex()} was aborted before its request arrived")
        if grant.room in self._rooms:
            raise TransferError(f"room {grant.room.hex()} was submitted twice")
        self._rooms[grant.room] = destinations

    def writable(self, room: bytes) -> bool:
        return room in self._rooms

    def stop(self, peer: PeerKey, room: bytes, error: TransferError, now: float) -> bool:
        """Decode asks to stop. True when the room was never heard of: the answer ABORTED is due at once."""
        destinations = self._rooms.get(room)
        if destinations is None:
            self.tombstones.bury(peer, room, now)
            return True
        if peer in destinations:
            self._stops.setdefault(room, error)
        return False

    def lost(self, peer: PeerKey, error: TransferError) -> None:
        """A destination is gone: its rooms need no more work. It may come back over a new link, and requests that were
        on their way all the time come after it: tombstones stay."""
        for room, destinations in self._rooms.items():
            if peer in destinations:
                self._stops.setdefault(room, error)

    def finish(self, room: bytes) -> None:
        """The last word on the room is said."""
        self._rooms.pop(room, None)
        self._stops.pop(room, None)

    def take_stops(self) -> list[tuple[bytes, TransferError]]:
        """Rooms that someone asked to stop since the last call; each still needs its last word."""
        stops, self._stops = self._stops, {}
        return list(stops.items())

    @property
    def has_stops(self) -> bool:
        return bool(self._stops)


def by_room(words: Iterable[Handoff]) -> dict[bytes, list[Handoff]]:
    """The words of each room, rooms and words in the order in which they came."""
    rooms: dict[bytes, list[Handoff]] = {}
    for word in words:
        rooms.setdefault(word.room, []).append(word)
    return rooms


def first_error(words: Sequence[Handoff]) -> PDInferError:
    """Why a room did not land."""
    errors = [word.error for word in words if word.status is HandoffStatus.ABORTED and word.error is not None]
    return errors[0] if errors else TransferError("the writer aborted without saying why")
