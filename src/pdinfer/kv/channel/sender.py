"""Prefill's side of a channel: it accepts grants, pushes what the engine computes, and finishes rooms.

accept ──► push … push ──► finish          a decode may stop a room at any time: `take_stops`, then finish ABORTED
   └──► turned away: answered ABORTED as soon as there is a link to its decode

A grant comes from the host, or over the link from its decode: `offered`, then `take_offers`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import attrs

from pdinfer.checks import typed
from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.book import LinkBook
from pdinfer.kv.channel.offers import DECLINED, Offers
from pdinfer.kv.channel.peer import Peer, Write
from pdinfer.kv.channel.rooms import SenderRooms, StaleFrame
from pdinfer.kv.channel.snapshot import AcceptedState
from pdinfer.kv.layout import KVLayout, Spans, common
from pdinfer.kv.memory import Pages
from pdinfer.kv.transports.base import Transfer
from pdinfer.process.locks import EXHAUSTED
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerKey, peer_key

GROUP_BYTES = 4 << 20
"""Pushes of consecutive layers are joined up to this size, and up to a quarter of it when only the last layer is to
come: what leaves ahead of it is not waited for when prefill is done. Below that the fixed cost of a message shows."""


@attrs.define(eq=False)
class PushGroup:
    """A push, or several of one room with the same tokens and consecutive layers, which become one write to each
    destination. `heads` are those pushed, None where pages have none. `shares` are those of them that each destination
    gets."""

    grant: PageGrant
    layers: range
    tokens: range
    heads: range | None
    shares: Mapping[PeerKey, range | None]
    pages: tuple[int, ...]
    transfer: Transfer
    ready: list[Callable[[], None]]
    num_writes: int = 0
    error: TransferError | None = None

    def is_continued_by(self, push: PushGroup) -> bool:
        same = self.tokens == push.tokens and self.heads == push.heads and self.layers.stop == push.layers.start
        return same and self.pages == push.pages

    def join(self, push: PushGroup) -> None:
        self.layers = range(self.layers.start, push.layers.stop)
        self.transfer.num_bytes += push.transfer.num_bytes
        self.ready += push.ready

    def wait_ready(self) -> None:
        for wait in self.ready:
            wait()


@attrs.define(eq=False)
class Pushes:
    """The groups of one end. Methods take the lock of `changed`, which is notified when bytes have left."""

    _layout: KVLayout
    _changed: threading.Condition
    _open: dict[bytes, PushGroup] = attrs.field(factory=dict)
    _unsent: set[PushGroup] = attrs.field(factory=set)
    _ended: dict[bytes, Transfer] = attrs.field(factory=dict)

    def add(self, push: PushGroup) -> tuple[Transfer, list[PushGroup]]:
        """Add a push. Return its Transfer and the groups that have to be written now, in order."""
        full: list[PushGroup] = []
        with self._changed:
            group = self._open.get(push.grant.room)
            if group is not None and group.is_continued_by(push):
                group.join(push)
            else:
                full += [] if group is None else [self._take(group)]
                group = self._open[push.grant.room] = push
                self._unsent.add(push)
            num_missing = self._layout.layers.stop - push.layers.stop
            if not num_missing or group.transfer.num_bytes >= GROUP_BYTES // (1 if num_missing > 1 else 4):
                full.append(self._take(group))
        return group.transfer, full

    def flush(self, rooms: Collection[bytes] | None = None) -> list[PushGroup]:
        """Close the open groups, of these rooms or of all. Return them, to be written now."""
        with self._changed:
            return [self._take(group) for room, group in list(self._open.items()) if rooms is None or room in rooms]

    def end(self, room: bytes) -> Transfer:
        """Note that nothing more is pushed for the room. The Transfer is done when none of its pages are being read."""
        with self._changed:
            if room not in self.rooms():
                return Transfer(0, done=True)
            return self._ended.setdefault(room, Transfer(0))

    def written(self, group: PushGroup, error: TransferError | None) -> None:
        """Note that one of the group's writes no longer reads our memory."""
        with self._changed:
            group.num_writes -= 1
            group.error = group.error or error
            if group.num_writes:
                return
            self._unsent.discard(group)
            group.transfer.complete(group.error)
            room = group.grant.room
            if room in self._ended and room not in self.rooms():
                self._ended.pop(room).complete()
            self._changed.notify_all()

    def rooms(self) -> frozenset[bytes]:
        """Return the rooms whose pushes wait for more layers or are still being read."""
        with self._changed:
            return frozenset(group.grant.room for group in self._unsent)

    @property
    def unsent_bytes(self) -> int:
        """The bytes pushed and not yet read from our pages."""
        with self._changed:
            return sum(group.transfer.num_bytes for group in self._unsent)

    def inflight(self) -> Counter[PeerKey]:
        """Return the unsent bytes per destination."""
        inflight: Counter[PeerKey] = Counter()
        with self._changed:
            for group in self._unsent:
                for key, share in group.shares.items():
                    inflight[key] += self._layout.payload_bytes(group.layers, group.tokens, share)
        return inflight

    def _take(self, group: PushGroup) -> PushGroup:
        del self._open[group.grant.room]
        group.num_writes = len(group.shares)
        return group


class HandoffSender:
    """The rooms that this end writes out of `pool`, guarded by the lock of the book's condition. `notify` wakes those
    who wait for news; it is called without that lock. `pushes` are what they still send."""

    def __init__(self, pool: Pages, book: LinkBook, notify: Callable[[], None], *, takes_offers: bool) -> None:
        self._pool = pool
        self._book = book
        self._changed = book.changed
        self._notify = notify
        self._takes_offers = takes_offers
        self.forget()

    def forget(self) -> None:
        """Forget all rooms and pushes. Writes that are still under way complete in the state from before."""
        self._rooms = SenderRooms()
        self._offers = Offers(self._takes_offers)
        self.pushes = Pushes(self._pool.layout, self._changed)

    # -- what a host asks for: see `KVChannel` ----------------------------------------------------------------------

    def accept(self, grant: PageGrant) -> None:
        try:
            with self._changed:  # one block, so that a link which breaks meanwhile finds the room
                peers = self._book.granted(grant.destinations)
                if None in peers or not peers:
                    raise StaleFrame("the grant's decode is not connected to this prefill")
                if any(peer.layout is None or peer.layout.layout_id != grant.layout_id for peer in filter(None, peers)):
                    raise StaleFrame(f"the grant of {grant.room.hex()} was made for another layout than its decode's")
                self._rooms.accept(grant)
        except StaleFrame:
            with self._changed:
                self._rooms.turn_away(grant)
            for peer in filter(None, map(self._book.peer_at, map(peer_key, grant.destinations))):
                self.answer_turned_away(peer)
            raise

    def push(
        self,
        grant: PageGrant,
        layers: range,
        tokens: range,
        pages: Sequence[int],
        ready: Callable[[], None] | None,
        heads: range | None = None,
    ) -> Transfer:
        heads = self._pool.layout.part(tokens, heads)
        with self._changed:
            if not self._rooms.writable(grant.room):
                raise TransferError(f"room {grant.room.hex()} is not open for writing")
            size = self._pool.layout.page_size
            if tokens.stop > len(pages) * size:
                raise ConfigError(f"tokens up to {tokens.stop} were pushed out of {len(pages)} pages")
            read = pages[tokens.start // size : -(-tokens.stop // size)]
            if read and not 0 <= min(read) <= max(read) < self._pool.num_pages:
                raise ConfigError(f"page {max(read)} or {min(read)} is not in a pool of {self._pool.num_pages}")
        transfer = Transfer(self._pool.layout.payload_bytes(layers, tokens, heads))
        waits = [] if ready is None else [ready]
        push = PushGroup(grant, layers, tokens, heads, self._shares(grant, heads), tuple(pages), transfer, waits)
        transfer, groups = self.pushes.add(push)
        self._write(groups)
        return transfer

    def flush(self) -> None:
        self._write(self.pushes.flush())

    def finish(self, grant: PageGrant, handoff: Handoff) -> Transfer:
        frame = wire.encode(wire.Finish(handoff))
        self._write(self.pushes.flush((grant.room,)))
        with self._changed:
            self._rooms.finish(grant.room)
        for destination in grant.destinations:
            self._book.tell(peer_key(destination), frame)
        return self.pushes.end(grant.room)

    def take_stops(self) -> list[tuple[bytes, TransferError]]:
        with self._changed:
            return self._rooms.take_stops()

    def take_offers(self, rooms: Collection[bytes] | None = None) -> list[PageGrant]:
        with self._changed:
            return self._offers.take(rooms)

    @typed
    def decline(self, room: bytes) -> None:
        """Answer a grant that came over a link, or comes, for this room ABORTED: its request has ended here. That takes
        no step of the engine. A room that was accepted is not affected."""
        with self._changed:
            key = self._offers.decline(room)
        if key is not None and (peer := self._book.peer_at(key)) is not None:
            self.say_aborted(peer, room, TransferError(DECLINED))

    # -- what happens to its rooms ----------------------------------------------------------------------------------

    def offered(self, peer: Peer, key: PeerKey, message: wire.Offer) -> None:
        """Keep a grant that its decode sent over the link, or answer at once that nobody will write it."""
        room = message.grant.grant.room
        with self._changed:
            if self._rooms.writable(room):
                raise TransferError(f"room {room.hex()} was offered after it was accepted")
            why_not = self._offers.add(key, message.grant, self._book.us)
        if why_not:
            self.say_aborted(peer, room, TransferError(why_not))
        self._notify()

    def stop(self, peer: Peer, key: PeerKey, message: wire.Abort, now: float) -> None:
        """Note that decode has given a room up."""
        error = TransferError(str(message.error)[: wire.MAX_REASON_BYTES])
        with self._changed:
            unheard_of = self._offers.withdraw(key, message.room) or self._rooms.stop(key, message.room, error, now)
        if unheard_of:
            self.say_aborted(peer, message.room, TransferError("the room was aborted before its request came"))
        self._notify()

    def answer_turned_away(self, peer: Peer) -> None:
        """Answer the requests that were turned away before there was a link to the peer, if there is one now."""
        with self._changed:
            rooms = [] if peer.address is None else self._rooms.linked(peer_key(peer.address))
        for room in rooms:
            self.say_aborted(peer, room, TransferError("prefill turned its request away"))

    def say_aborted(self, peer: Peer, room: bytes, error: TransferError) -> None:
        """Finish a room that this end never wrote."""
        handoff = Handoff(room=room, writer=self._book.us, status=HandoffStatus.ABORTED, error=error)
        peer.post(wire.encode(wire.Finish(handoff)))

    def lost(self, key: PeerKey, error: TransferError) -> None:
        """Note that the link to the peer is gone: its rooms need no more work."""
        with self._changed:
            self._rooms.lost(key, error)
            self._offers.lost(key)

    def tick(self, now: float) -> None:
        with self._changed:
            self._rooms.tombstones.decay(now)

    # -- what it holds: called with the lock ------------------------------------------------------------------------

    @property
    def num_stops(self) -> int:
        """The number of rooms that `take_stops` would return."""
        return self._rooms.num_stops

    @property
    def has_news(self) -> bool:
        """Whether `take_stops` or `take_offers` would return anything."""
        return bool(self._rooms.num_stops or self._offers)

    def rooms(self) -> Mapping[bytes, AcceptedState]:
        return self._rooms.snapshot()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _shares(self, grant: PageGrant, heads: range | None) -> dict[PeerKey, range | None]:
        """Return those of `heads` that each destination of a grant holds, all of them for one that is lost."""
        keys = list(map(peer_key, grant.destinations))
        if heads is None:
            return dict.fromkeys(keys)
        peers = zip(keys, map(self._book.peer_at, keys), strict=True)
        return {key: heads if peer is None else common(heads, peer.heads) for key, peer in peers}

    def _write(self, groups: Iterable[PushGroup]) -> None:
        """Hand joined pushes to the transport, one write per destination."""
        layout = self._pool.layout
        for group in groups:
            sources: dict[range | None, Spans] = {}
            with self._changed:
                self._book.totals.writes_sent += 1
                self._book.totals.bytes_sent += group.transfer.num_bytes
            for key, heads in group.shares.items():
                if heads not in sources:
                    sources[heads] = layout.spans(
                        self._pool.memory_pages,
                        layers=group.layers,
                        tokens=group.tokens,
                        pages=group.pages,
                        first_token=0,
                        heads=heads,
                        by_token=layout.by_token,
                    )
                self._write_to(key, group, heads, sources[heads])

    def _write_to(self, key: PeerKey, group: PushGroup, heads: range | None, source: Spans) -> None:
        pushes, num_bytes = self.pushes, self._pool.layout.payload_bytes(group.layers, group.tokens, heads)

        def sent(write: Transfer) -> None:
            try:
                pushes.written(group, write.error)
            except EXHAUSTED:  # or else the pages would wait for a transfer that is done
                self._book.doubt()
                raise
            self._notify()

        peer = self._book.peer_at(key)
        if peer is None or (heads is not None and not heads):  # lost, or a rank that holds none of our heads
            lost = TransferError("the destination is not connected") if peer is None else None
            Transfer(num_bytes, sent).complete(lost)
            return
        for counts in self._book.counts(key):
            counts.bytes_sent += num_bytes
        frame = wire.encode(wire.Data(group.grant.room, group.layers, group.tokens, heads))
        peer.post(frame, Write(source, group.wait_ready if group.ready else None, sent))
