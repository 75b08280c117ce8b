"""Decode's side of a channel: it expects the rooms it granted, places what arrives, and settles each room once.

expect ──► place, placed … place, placed ──► finished by every writer ──► settled: `take_settled`
    └──► abort, or bytes that do not verify: the writers are told to stop, and still finish
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.book import LinkBook
from pdinfer.kv.channel.peer import Arriving, Peer
from pdinfer.kv.channel.rooms import NO_HEADS, ReceiverRooms, StaleFrame
from pdinfer.kv.channel.snapshot import ExpectedRoom
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Pages
from pdinfer.types import Handoff, PageGrant, PeerKey, peer_key

ANSWER_S = 10.0
"""How long a writer may take to answer an abort, since it may be inside a long step. After that its link is closed,
which frees the pages too."""
MUTE_S = 1.0
"""How long one may that is silent as well: heartbeats do not wait for a step."""


class HandoffReceiver:
    """The rooms that peers write into `pool`, guarded by the lock of the book's condition. `notify` wakes those who
    wait for news; it is called without that lock."""

    def __init__(self, pool: Pages, book: LinkBook, notify: Callable[[], None]) -> None:
        self._pool = pool
        self._book = book
        self._changed = book.changed
        self._notify = notify
        self.forget()

    def forget(self) -> None:
        """Forget all rooms."""
        heads = self._pool.layout.heads
        self._rooms = ReceiverRooms(self._pool.layout.layers, NO_HEADS if heads is None else heads)

    # -- what a host asks for: see `KVChannel` ----------------------------------------------------------------------

    def expect(self, grant: PageGrant, now: float) -> None:
        error = TransferError("the writer is not connected to this decode")
        self._pool.layout.part(grant.tokens)
        with self._changed:
            self._rooms.expect(grant, now)
            there = self._book.granted(grant.writers)
            gone = [writer for writer, peer in zip(grant.writers, there, strict=True) if peer is None]
            to_stop = [self._rooms.lost(peer_key(writer), error) for writer in gone]
        for rooms in to_stop:
            self.tell_to_stop(rooms, error)
        if gone:
            self._notify()

    def offer(self, grant: PageGrant) -> None:
        """Send an expected grant to its writers over their links, for hosts that have no way of their own. A writer
        that takes no offers answers ABORTED. Raises ConfigError for a grant that is too long to travel."""
        frame = wire.encode(wire.Offer(wire.PackedGrant.of(grant)))
        with self._changed:
            peers = [peer for peer in self._book.granted(grant.writers) if peer is not None]
        for peer in peers:
            peer.post(frame)

    def awaits(self, room: bytes) -> bool:
        """Return whether a writer of an expected room has yet to land it or to stop."""
        with self._changed:
            return room in self._rooms

    def abort(self, grant: PageGrant, error: PDInferError) -> None:
        with self._changed:
            writers = self._rooms.stop(grant.room, error)
        self.tell_to_stop({grant.room: writers}, error)

    def take_settled(self) -> list[Handoff]:
        with self._changed:
            return self._rooms.take_settled()

    # -- what arrives -----------------------------------------------------------------------------------------------

    def place(self, peer: Peer, frame: bytes, num_bytes: int, now: float) -> Spans | None:
        """Return where the payload of a frame goes, None when its room is over."""
        message = wire.decode(peer.verify(frame))
        if not isinstance(message, wire.Data):
            raise TransferError(f"a payload was announced by a {type(message).__name__} frame")
        if peer.address is None:
            raise TransferError("a payload came before the handshake")
        layout, key, heads = self._pool.layout, peer_key(peer.address), self._heads(message)
        with self._changed:
            try:
                grant = self._rooms.place(key, message.room, message.layers, message.tokens, now, heads)
            except StaleFrame:
                self._count_dropped(key)
                return None
            peer.arriving[frame] = Arriving(message, heads, num_bytes, now)
        if num_bytes != layout.payload_bytes(message.layers, message.tokens, message.heads):
            raise TransferError(f"a payload of {num_bytes} bytes does not hold the tokens it announces")
        if grant.generations != self._pool.generations(grant.pages):
            raise TransferError("granted pages changed hands while their room was open")
        try:
            return layout.spans(
                self._pool.memory_pages,
                layers=message.layers,
                tokens=message.tokens,
                pages=grant.pages,
                first_token=grant.tokens.start,
                heads=message.heads,
                by_token=peer.layout is not None and peer.layout.by_token,
            )
        except ConfigError as error:
            raise TransferError(f"a payload cannot be placed: {error}") from error

    def placed(self, peer: Peer, frame: bytes, error: TransferError | None, now: float) -> None:
        """Note that a placed payload has arrived whole, or did not verify because of `error`."""
        assert peer.address is not None
        with self._changed:
            arrived = peer.arriving.pop(frame)
            data, receive_s = arrived.data, now - arrived.since
            self._book.totals.writes_received += 1
            self._book.totals.writes_damaged += error is not None
            for counts in (self._book.totals, *self._book.counts(peer_key(peer.address))):
                counts.bytes_received += arrived.num_bytes
                counts.receive_s += receive_s
            writers = self._rooms.placed(data.room, data.layers, data.tokens, error, now, arrived.heads)
        if error is not None:
            self.tell_to_stop({data.room: writers}, error)

    def finished(self, key: PeerKey, handoff: Handoff) -> None:
        """Note that a writer has finished a room."""
        with self._changed:
            try:
                writers = self._rooms.finished(key, handoff)
            except StaleFrame:
                self._count_dropped(key)
                return
        self.tell_to_stop({handoff.room: writers}, handoff.error or TransferError("another writer aborted"))
        self._notify()

    def lost(self, key: PeerKey, error: TransferError) -> Mapping[bytes, Iterable[PeerKey]]:
        """Note that the link to the peer is gone. Return the other writers of each room, to be told without the
        lock."""
        with self._changed:
            return self._rooms.lost(key, error)

    def tick(self, now: float) -> None:
        """Close the links of writers that do not answer an abort."""
        with self._changed:
            late, owing = (self._rooms.unanswered(now, patience_s) for patience_s in (ANSWER_S, MUTE_S))
        for peer in filter(None, map(self._book.peer_at, owing)):
            silent_s = min(peer.silence.silent_s, now - peer.link.heard_at)
            if peer.key in late or silent_s >= MUTE_S:
                patience_s = ANSWER_S if peer.key in late else MUTE_S
                self._book.give_up(peer, f"it did not stop writing within {patience_s:g} s of being asked to")

    def tell_to_stop(self, rooms: Mapping[bytes, Iterable[PeerKey]], error: PDInferError) -> None:
        """Ask these writers of each room to stop."""
        for room, writers in rooms.items():
            for writer in writers:
                self._book.tell(writer, wire.encode(wire.Abort(room, error)))

    @property
    def num_settled(self) -> int:
        """The number of hand-offs that `take_settled` would return. Called with the lock."""
        return self._rooms.num_settled

    def rooms(self) -> Mapping[bytes, ExpectedRoom]:
        """Return the rooms that have not settled. Called with the lock."""
        return self._rooms.snapshot()

    def _heads(self, data: wire.Data) -> range:
        """Return the heads that a frame names. Raises TransferError when it names some and our pages have none, or the
        other way round."""
        if (data.heads is None) != (self._pool.layout.heads is None):
            these = (
                "heads, and these pages have none" if data.heads is not None else "no heads, and these pages have some"
            )
            raise TransferError(f"a payload names {these}")
        return NO_HEADS if data.heads is None else data.heads

    def _count_dropped(self, key: PeerKey) -> None:
        """Count a frame that was not acted upon. The lock must be held."""
        for counts in (self._book.totals, *self._book.counts(key)):
            counts.frames_dropped += 1
