"""One end of a KV channel: grants and hand-offs above, a transport below, the rules of `protocol` between.

Decode's end *expects* a grant, is *placed* upon, and *polls* hand-offs. Prefill's end *accepts* a grant, *pushes* what
it computes and *finishes*. An end can be both at once and has any number of peers.

Threads: callbacks of the transport come from its I/O thread, everything else from the thread that steps the engine.
One lock guards the state machines; it is never held while the transport is called, so ends cannot wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.counters import Totals
from pdinfer.kv.channel.links import Peers
from pdinfer.kv.channel.peer import Peer, Write
from pdinfer.kv.channel.pushes import Group, Pushes
from pdinfer.kv.channel.recovery import Recoverable
from pdinfer.kv.channel.rooms import Accepted, Expected, StaleFrame
from pdinfer.kv.layout import Spans
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import Link, Transfer, Transport
from pdinfer.kv.transports.loopback import Interrupted, LoopbackHub, LoopbackTransport
from pdinfer.process.forked import refuse
from pdinfer.process.locks import new_lock
from pdinfer.stats import ChannelStats
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, PeerKey, peer_key

WINDOW_BYTES = 64 << 20
ANSWER_S = 10.0
"""A writer's answer to an abort; it may be inside a long step. Then its link is closed, which frees the pages too."""


class KVChannel(Recoverable):
    """One end of a KV channel over `transport`, for the pages of `pool`.

    `address` is what peers need to reach and recognise this end: a new one for every object, so a restarted engine is a
    new peer. With a `key` (at least 16 random bytes, the same on every end) frames carry an HMAC, and nobody without it
    gets further than a first frame. `window_bytes` may be set: past it a peer `is_full`. Raises ConfigError or
    TransferError when the transport cannot start.
    """

    def __init__(
        self,
        pool: PagePool,
        transport: Transport,
        *,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        refuse(pool)
        self.authenticates = key is not None
        self.window_bytes = WINDOW_BYTES
        self.pool = pool
        self.transport = transport
        self.random_bytes = random_bytes
        self._clock = clock
        self._lock = new_lock()
        self._changed = threading.Condition(self._lock)
        self._peers = Peers(transport, pool.layout, self._changed, key=key, clock=clock, random_bytes=random_bytes)
        self._expected = Expected(pool.layout.layers)
        self._accepted = Accepted()
        self._pushes = Pushes(pool.layout, self._changed)
        self._looked_at = clock()
        self._totals = Totals()
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        engine_id, epoch = random_bytes(16), int.from_bytes(random_bytes(7), "little")
        endpoints = transport.register(pool.memory, self)
        self.address = self._peers.us = PeerAddress(engine_id, epoch, 0, endpoints)

    @classmethod
    def loopback(cls, *pools: PagePool) -> tuple[KVChannel, ...]:
        """One end per pool, all in this process. Ends given the *same* pool exchange pages without copying."""
        hub = LoopbackHub()
        return tuple(cls(pool, LoopbackTransport(hub)) for pool in pools)

    # -- peers ------------------------------------------------------------------------------------------------------

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Opens a link and compares layouts. Either end may dial, or both; a second call does nothing. A link that
        breaks is dialled again by itself. With `timeout_s` 0 it does not wait, and goes on dialling until `connected`
        or for a minute. Raises LayoutMismatch naming each field that differs, TransferError when the peer cannot be
        reached, does not answer in time, or is not the one that `peer` describes."""
        self._peers.connect(peer, timeout_s=timeout_s)

    def drop_peer(self, peer: PeerAddress) -> None:
        """Closes the link for good; every room the peer still owed a word is settled ABORTED. Unknown peers are
        ignored."""
        self._peers.drop(peer_key(peer))

    def connected(self, peer: PeerAddress) -> bool:
        """Whether there is an open link to this very peer."""
        return self._peers.link_to(peer_key(peer)) is not None

    def shares_pool(self, peers: Iterable[PeerAddress]) -> bool:
        """Whether these peers' pages are in this end's own pool, so that computing into them is the transfer."""
        links = (self._peers.link_to(peer_key(peer)) for peer in peers)
        return all(link is not None and link.same_memory for link in links)

    # -- decode's side ----------------------------------------------------------------------------------------------

    def expect(self, grant: PageGrant) -> None:
        """Lets the grant's writers write it. A writer that is not connected counts as lost at once."""
        error = TransferError("the writer is not connected to this decode")
        with self._lock:
            self._expected.expect(grant, self._clock())
            there = self._peers.granted(grant.writers)
            gone = [writer for writer, peer in zip(grant.writers, there, strict=True) if peer is None]
            told = [self._expected.lost(peer_key(writer), error) for writer in gone]
        for rooms in told:
            self._tell_to_stop(rooms, error)
        if gone:
            self._notify()

    def expects(self, room: bytes) -> bool:
        """Whether writers of a room that is expected may hear of it: at once."""
        return True

    def abort(self, grant: PageGrant, error: PDInferError) -> None:
        """Asks the grant's writers to stop; `poll` gives their ABORTED (or a LANDED that was on its way)."""
        with self._lock:
            writers = self._expected.stop(grant.room)
        self._tell_to_stop({grant.room: writers}, error)

    def poll(self) -> list[Handoff]:
        """Hand-offs of the rooms settled since the last call, each room's together. Their writers have stopped."""
        with self._lock:
            self._looked_at = self._clock()
            return self._expected.take_settled()

    # -- prefill's side ---------------------------------------------------------------------------------------------

    def accept(self, grant: PageGrant) -> None:
        """Takes on a grant. TransferError when a destination aborted it before or is not connected, or when it was made
        for another layout than the one that decode showed in the handshake. Then every destination is told."""
        try:
            with self._lock:  # one block, so that a link which breaks meanwhile finds the room
                peers = self._peers.granted(grant.destinations)
                if None in peers or not peers:
                    raise StaleFrame("the grant's decode is not connected to this prefill")
                if any(peer.layout_id != grant.layout_id for peer in peers if peer is not None):
                    raise StaleFrame(f"the grant of {grant.room.hex()} was made for another layout than its decode's")
                self._accepted.accept(grant)
        except StaleFrame:
            with self._lock:
                self._accepted.turn_away(grant)
            for peer in filter(None, map(self._peers.peer_at, map(peer_key, grant.destinations))):
                self._answer_turned_away(peer)
            raise

    def push(
        self,
        grant: PageGrant,
        *,
        layers: range,
        tokens: range,
        pages: Sequence[int],
        ready: Callable[[], None] | None = None,
    ) -> Transfer:
        """Sends `tokens` of `layers` out of our `pages` (page i holds tokens from i * page_size). Never blocks. The
        transport calls `ready` before it reads; it may wait for a device. The pages stay as they are until the Transfer
        is done. TransferError when the room is not open, ConfigError for pages without those tokens."""
        with self._lock:
            if not self._accepted.writable(grant.room):
                raise TransferError(f"room {grant.room.hex()} is not open for writing")
            size = self.pool.layout.page_size
            if tokens.stop > len(pages) * size:
                raise ConfigError(f"tokens up to {tokens.stop} were pushed out of {len(pages)} pages")
            read = pages[tokens.start // size : -(-tokens.stop // size)]
            if read and not 0 <= min(read) <= max(read) < self.pool.num_pages:
                raise ConfigError(f"page {max(read)} or {min(read)} is not in a pool of {self.pool.num_pages}")
        transfer, groups = self._pushes.add(grant, layers, tokens, pages, ready)
        self._write(groups)
        return transfer

    def finish(self, grant: PageGrant, handoff: Handoff) -> Transfer:
        """This writer's last word, behind all its pushes. ABORTED is legal at any time. When the Transfer is done,
        nothing reads the pages that were pushed for this grant. ConfigError when the hand-off's state is too long to
        travel; the room is still open then."""
        frame = wire.encode(wire.Finish(handoff))
        self._write(self._pushes.flush(grant.room))
        with self._lock:
            self._accepted.finish(grant.room)
        for destination in grant.destinations:
            self._tell(peer_key(destination), frame)
        return self._pushes.end(grant.room)

    def poll_stops(self) -> list[tuple[bytes, TransferError]]:
        """Accepted rooms that decode gave up or lost since the last call; each still needs `finish` with ABORTED."""
        with self._lock:
            self._looked_at = self._clock()
            return self._accepted.take_stops()

    @property
    def unsent_bytes(self) -> int:
        """Bytes pushed and not yet out of our pages."""
        return self._pushes.unsent_bytes

    def is_full(self, grant: PageGrant) -> bool:
        """Whether more than `window_bytes` are on their way to a destination of the grant: it takes them more slowly
        than they are made, and other peers should not wait for it."""
        return self._pushes.most_inflight(map(peer_key, grant.destinations)) > self.window_bytes

    # -- both -------------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `poll` or `poll_stops` would give something."""
        with self._lock:
            return self._expected.has_settled or self._accepted.has_stops

    @property
    def stats(self) -> ChannelStats:
        """What moved so far."""
        return self._totals.stats(self._peers.stats(self._pushes.inflight(), self.window_bytes))

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls `listener` from any thread whenever there may be news or a transfer is done."""
        self._listeners.append(listener)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until there is news or the time is over; tells whether there is."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.has_news or self._closed, timeout_s))

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything pushed has left; tells whether it has."""
        self._write(self._pushes.flush_all())
        with self._changed:
            return bool(self._changed.wait_for(lambda: not self._pushes.unsent_bytes, timeout_s))

    def close(self) -> None:
        """Closes every link and the transport; open rooms settle ABORTED. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.transport.close()
            self._notify()

    # -- the transport's calls (Receiver) ---------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        self._peers.open(self._peers.at(link, dialled=False))

    def received(self, link: Link, frame: bytes) -> None:
        peer = self._peers.at(link)
        message = self._peers.read(peer, frame)
        if message is None:
            self._answer_turned_away(peer)
        elif peer.address is None:
            return
        elif isinstance(message, wire.Finish):
            self._finished(peer_key(peer.address), message.handoff)
        elif isinstance(message, wire.Abort):
            self._aborted(peer, peer_key(peer.address), message)
        elif isinstance(message, wire.Beat):
            peer.stepped_at = self._clock() - message.step_age_s
        else:
            raise TransferError(f"a {type(message).__name__} frame does not belong on an open link")

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        peer = self._peers.at(link)
        message = wire.decode(peer.unseal(frame))
        if not isinstance(message, wire.Data):
            raise TransferError(f"a payload was announced by a {type(message).__name__} frame")
        if peer.address is None:
            raise TransferError("a payload came before the handshake")
        layout, now, key = self.pool.layout, self._clock(), peer_key(peer.address)
        with self._lock:
            try:
                grant = self._expected.place(key, message.room, message.layers, message.tokens, now)
            except StaleFrame:
                self._dropped(key)
                return None
            peer.placing[frame] = (message, num_bytes, now)
        if num_bytes != layout.payload_bytes(message.layers, message.tokens):
            raise TransferError(f"a payload of {num_bytes} bytes does not hold the tokens it announces")
        if grant.generations != self.pool.generations(grant.pages):
            raise TransferError("granted pages changed hands while their room was open")
        first, pages = grant.tokens.start, grant.pages
        return layout.spans(
            self.pool.num_pages, layers=message.layers, tokens=message.tokens, pages=pages, first_token=first
        )

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        peer, now = self._peers.at(link), self._clock()
        assert peer.address is not None
        with self._lock:
            message, num_bytes, since = peer.placing.pop(frame)
            self._totals.writes_received += 1
            self._totals.bytes_received += num_bytes
            self._totals.receive_s += now - since
            self._totals.writes_damaged += error is not None
            if (traffic := self._peers.traffic(peer_key(peer.address))) is not None:
                traffic.bytes_received += num_bytes
                traffic.receive_s += now - since
            writers = self._expected.placed(message.room, message.layers, message.tokens, error, now)
        if error is not None:
            self._tell_to_stop({message.room: writers}, error)

    def tick(self) -> None:
        now = self._clock()
        with self._lock:
            mute = self._expected.unanswered(now, ANSWER_S)
            self._accepted.tombstones.decay(now)
        for peer in mute:
            self._peers.give_up(peer, f"it did not stop writing within {ANSWER_S:g} s of being asked to")
        self._peers.tick(max(0.0, now - self._looked_at))

    def closed(self, link: Link, error: TransferError | None) -> None:
        self._in_doubt |= isinstance(error, Interrupted)
        with self._lock:
            lost = self._peers.reason(link) or error or TransferError("the connection was closed")
            address = self._peers.forget(link, lost)
            told = {} if address is None else self._expected.lost(peer_key(address), lost)
            if address is not None:
                self._accepted.lost(peer_key(address), lost)
        self._tell_to_stop(told, lost)
        self._notify()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _finished(self, peer: PeerKey, word: Handoff) -> None:
        with self._lock:
            try:
                writers = self._expected.said(peer, word)
            except StaleFrame:
                self._dropped(peer)
                return
        self._tell_to_stop({word.room: writers}, word.error or TransferError("another writer aborted"))
        self._notify()

    def _aborted(self, peer: Peer, key: PeerKey, message: wire.Abort) -> None:
        error = TransferError(str(message.error)[: wire.MAX_REASON_BYTES])
        with self._lock:
            unheard_of = self._accepted.stop(key, message.room, error, self._clock())
        if unheard_of:
            self._say_aborted(peer, message.room, TransferError("the room was aborted before its request came"))
        self._notify()

    def _answer_turned_away(self, peer: Peer) -> None:
        """If there is a link, rooms whose request was turned away get their answer."""
        with self._lock:
            rooms = [] if peer.address is None else self._accepted.linked(peer_key(peer.address))
        for room in rooms:
            self._say_aborted(peer, room, TransferError("prefill turned its request away"))

    def _say_aborted(self, peer: Peer, room: bytes, error: TransferError) -> None:
        word = Handoff(room=room, writer=self.address, status=HandoffStatus.ABORTED, error=error)
        self._peers.post(peer, wire.Finish(word))

    def _tell_to_stop(self, rooms: Mapping[bytes, Iterable[PeerKey]], error: PDInferError) -> None:
        for room, writers in rooms.items():
            for writer in writers:
                self._tell(writer, wire.encode(wire.Abort(room, error)))

    def _tell(self, key: PeerKey, frame: bytes) -> None:
        """Sends to a peer; one that is gone needs no telling, since `closed` has said it on both sides."""
        if (peer := self._peers.peer_at(key)) is not None:
            peer.post(self.transport, frame)

    def _write(self, groups: Iterable[Group]) -> None:
        """Hands joined pushes to the transport, one write per destination."""
        for group in groups:
            source = self.pool.layout.spans(
                self.pool.num_pages, layers=group.layers, tokens=group.tokens, pages=group.pages, first_token=0
            )
            num_bytes = group.transfer.num_bytes
            with self._lock:
                self._totals.writes_sent += 1
                self._totals.bytes_sent += num_bytes
            for destination in group.grant.destinations:
                key = peer_key(destination)

                def sent(write: Transfer, group: Group = group, pushes: Pushes = self._pushes) -> None:
                    pushes.written(group, write.error)
                    self._notify()

                peer = self._peers.peer_at(key)
                if peer is None:
                    Transfer(num_bytes, sent).complete(TransferError("the destination is not connected"))
                    continue
                if (traffic := self._peers.traffic(key)) is not None:
                    traffic.bytes_sent += num_bytes
                frame = wire.encode(wire.Data(group.grant.room, group.layers, group.tokens))
                peer.post(self.transport, frame, Write(source, group.wait_ready if group.ready else None, sent))

    def _dropped(self, key: PeerKey) -> None:
        """Counts a frame that was not acted upon; with the lock held."""
        self._totals.frames_dropped += 1
        if (traffic := self._peers.traffic(key)) is not None:
            traffic.frames_dropped += 1

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in self._listeners:
            listener()
