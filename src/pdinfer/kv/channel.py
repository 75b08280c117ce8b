"""One end of a KV channel: grants and hand-offs above, a transport below, the rules of `protocol` between.

Decode's end *expects* a grant, is *placed* upon, and *polls* hand-offs. Prefill's end *accepts* a grant, *pushes* what
it computes and *finishes*. An end can be both at once and has any number of peers.

Threads: callbacks of the transport come from its I/O thread, everything else from the thread that steps the engine.
One lock guards the state machines; it is never held while the transport is called, so ends cannot wait for each other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.kv import wire
from pdinfer.kv.layout import Spans
from pdinfer.kv.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.peers import Peers
from pdinfer.kv.pool import PagePool
from pdinfer.kv.protocol import Accepted, Expected, PeerKey, StaleFrame, peer_key
from pdinfer.kv.transport import Link, Transfer, Transport
from pdinfer.types import ChannelStats, Handoff, HandoffStatus, PageGrant, PeerAddress

GROUP_BYTES = 4 << 20
"""Pushes of consecutive layers are joined up to this size: below it a message's fixed cost shows."""

_log = logging.getLogger("pdinfer")


@attrs.define
class _Group:
    """Pushes of one room, same tokens, consecutive layers, not yet handed to the transport."""

    grant: PageGrant
    layers: range
    tokens: range
    pages: tuple[int, ...]
    transfer: Transfer
    ready: list[Callable[[], None]]


class KVChannel:
    """One end of a KV channel over `transport`, for the pages of `pool`.

    `address` is what peers need to reach and recognise this end: a new one for every object, so a restarted engine is a
    new peer. Raises ConfigError or TransferError when the transport cannot start.
    """

    def __init__(
        self,
        pool: PagePool,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.pool = pool
        self.transport = transport
        self.random_bytes = random_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._peers = Peers(transport, pool.layout, self._changed)
        self._expected = Expected(pool.layout.layers)
        self._accepted = Accepted()
        self._groups: dict[bytes, _Group] = {}
        self._unsent: set[Transfer] = set()
        self._last_writes: dict[bytes, Transfer] = {}
        self._stats = ChannelStats()
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
        """Opens a link and compares layouts; one end dials, not both. Connecting once more does nothing.

        Raises LayoutMismatch naming each field that differs, TransferError when the peer cannot be reached, does not
        answer in time, or is not the one that `peer` describes.
        """
        self._peers.connect(peer, timeout_s=timeout_s)

    def drop_peer(self, peer: PeerAddress) -> None:
        """Closes the link; every room the peer still owed a word is settled ABORTED. Unknown peers are ignored."""
        link = self._peers.link_to(peer_key(peer))
        if link is not None:
            self.transport.fence(link)

    def connected(self, peer: PeerAddress) -> bool:
        """Whether there is an open link to this very peer."""
        return self._peers.link_to(peer_key(peer)) is not None

    def shares_pool(self, grant: PageGrant) -> bool:
        """Whether the grant's pages are in this end's own pool, so that computing into them is the transfer."""
        links = self._links(grant.destinations)
        return all(link is not None and link.same_memory for link in links)

    # -- decode's side ----------------------------------------------------------------------------------------------

    def expect(self, grant: PageGrant) -> None:
        """Lets the grant's writers write it. A writer that is not connected counts as lost at once."""
        error = TransferError("the writer is not connected to this decode")
        with self._lock:
            self._expected.expect(grant)
            gone = [writer for writer in grant.writers if not self.connected(writer)]
            told = [self._expected.lost(peer_key(writer), error) for writer in gone]
        for rooms in told:
            self._tell_to_stop(rooms, error)
        if gone:
            self._notify()

    def abort(self, grant: PageGrant, error: PDInferError) -> None:
        """Asks the grant's writers to stop; `poll` gives their ABORTED (or a LANDED that was on its way)."""
        with self._lock:
            writers = self._expected.stop(grant.room)
        self._tell_to_stop({grant.room: writers}, error)

    def poll(self) -> list[Handoff]:
        """Hand-offs of the rooms settled since the last call, each room's together. Their writers have stopped."""
        with self._lock:
            return self._expected.take_settled()

    # -- prefill's side ---------------------------------------------------------------------------------------------

    def accept(self, grant: PageGrant) -> None:
        """Takes on a grant. TransferError when it was aborted before, when its decode is not connected, or when it was
        made for another layout than the one that decode showed in the handshake."""
        links = self._links(grant.destinations)
        if None in links or not links:
            raise TransferError("the grant's decode is not connected to this prefill")
        if any(self._peers.at(link).layout_id != grant.layout_id for link in links if link is not None):
            raise TransferError(f"the grant of room {grant.room.hex()} was made for another layout than its decode's")
        with self._lock:
            self._accepted.accept(grant)

    def push(
        self,
        grant: PageGrant,
        *,
        layers: range,
        tokens: range,
        pages: Sequence[int],
        ready: Callable[[], None] | None = None,
    ) -> Transfer:
        """Sends `tokens` of `layers` out of our `pages` (page i holds tokens from i * page_size). Never blocks.

        `ready`, if given, is called by the transport before it reads and may wait for a device. The pages must stay
        as they are until the Transfer is done. TransferError when the room is not open, ConfigError when the pages do
        not hold the tokens.
        """
        with self._lock:
            if not self._accepted.writable(grant.room):
                raise TransferError(f"room {grant.room.hex()} is not open for writing")
            if tokens.stop > len(pages) * self.pool.layout.page_size:
                raise ConfigError(f"tokens up to {tokens.stop} were pushed out of {len(pages)} pages")
            group = self._groups.get(grant.room)
            joins = (
                group is not None
                and group.layers.stop == layers.start
                and (group.tokens, group.pages) == (tokens, tuple(pages))
            )
        if group is not None and not joins:
            self._flush(grant.room)
        if group is None or not joins:
            group = _Group(grant, layers, tokens, tuple(pages), Transfer(0), [])
            with self._lock:
                self._groups[grant.room] = group
                self._unsent.add(group.transfer)
        group.layers = range(group.layers.start, layers.stop)
        group.transfer.num_bytes = self.pool.layout.payload_bytes(group.layers, tokens)
        if ready is not None:
            group.ready.append(ready)
        if group.transfer.num_bytes >= GROUP_BYTES or layers.stop == self.pool.layout.layers.stop:
            self._flush(grant.room)
        return group.transfer

    def finish(self, grant: PageGrant, handoff: Handoff) -> Transfer:
        """This writer's last word, behind all its pushes. ABORTED is legal at any time. When the Transfer is done,
        nothing reads the pages that were pushed for this grant."""
        self._flush(grant.room)
        with self._lock:
            self._accepted.finish(grant.room)
            last = self._last_writes.pop(grant.room, Transfer(0, done=True))
        for link in self._links(grant.destinations):
            if link is not None:
                self.transport.send(link, wire.encode(wire.Finish(handoff)))
        return last

    def poll_stops(self) -> list[tuple[bytes, TransferError]]:
        """Accepted rooms that decode gave up or lost since the last call; each still needs `finish` with ABORTED."""
        with self._lock:
            return self._accepted.take_stops()

    @property
    def unsent_bytes(self) -> int:
        """Bytes pushed and not yet out of our pages."""
        with self._lock:
            return sum(transfer.num_bytes for transfer in self._unsent)

    # -- both -------------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `poll` or `poll_stops` would give something."""
        with self._lock:
            return self._expected.has_settled or self._accepted.has_stops

    @property
    def stats(self) -> ChannelStats:
        """What moved so far."""
        return self._stats

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls `listener` from any thread whenever there may be news or a transfer is done."""
        self._listeners.append(listener)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until there is news or the time is over; tells whether there is."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.has_news or self._closed, timeout_s))

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything pushed has left; tells whether it has."""
        for room in list(self._groups):
            self._flush(room)
        with self._changed:
            return bool(self._changed.wait_for(lambda: not self._unsent, timeout_s))

    def close(self) -> None:
        """Closes every link and the transport; open rooms settle ABORTED. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.transport.close()
            self._notify()

    def __enter__(self) -> KVChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the transport's calls (Receiver) ---------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        self._peers.at(link)

    def received(self, link: Link, frame: bytes) -> None:
        message = wire.decode(frame)
        peer = self._peers.at(link)
        if peer.address is None:
            self._peers.greet(peer, message)
        elif isinstance(message, wire.Finish):
            self._finished(peer_key(peer.address), message.handoff)
        elif isinstance(message, wire.Abort):
            self._aborted(link, peer_key(peer.address), message)
        else:
            raise TransferError(f"a {type(message).__name__} frame does not belong on an open link")

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        message = wire.decode(frame)
        if not isinstance(message, wire.Data):
            raise TransferError(f"a payload was announced by a {type(message).__name__} frame")
        layout = self.pool.layout
        peer = self._peers.at(link)
        if peer.address is None:
            raise TransferError("a payload came before the handshake")
        with self._lock:
            try:
                grant = self._expected.place(peer_key(peer.address), message.room, message.layers, message.tokens)
            except StaleFrame:
                self._count(frames_dropped=1)
                return None
            peer.placing_since = self._clock()
        if num_bytes != layout.payload_bytes(message.layers, message.tokens):
            raise TransferError(f"a payload of {num_bytes} bytes does not hold the tokens it announces")
        if grant.generations != self.pool.generations(grant.pages):
            raise TransferError("granted pages changed hands while their room was open")
        return layout.spans(
            self.pool.num_pages,
            layers=message.layers,
            tokens=message.tokens,
            pages=grant.pages,
            first_token=grant.tokens.start,
        )

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        message = wire.decode(frame)
        assert isinstance(message, wire.Data)
        with self._lock:
            elapsed = self._clock() - self._peers.at(link).placing_since
            num_bytes = self.pool.layout.payload_bytes(message.layers, message.tokens)
            self._count(writes_received=1, bytes_received=num_bytes, receive_s=elapsed)
            if error is None:
                return
            self._count(writes_damaged=1)
            writers = self._expected.damaged(message.room, error)
        self._tell_to_stop({message.room: writers}, error)

    def closed(self, link: Link, error: TransferError | None) -> None:
        lost = error or TransferError("the connection was closed")
        with self._lock:
            address = self._peers.forget(link, lost)
            told = {} if address is None else self._expected.lost(peer_key(address), lost)
            if address is not None:
                self._accepted.lost(peer_key(address), lost)
        self._tell_to_stop(told, lost)
        self._notify()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _links(self, addresses: Iterable[PeerAddress]) -> list[Link | None]:
        return [self._peers.link_to(peer_key(address)) for address in addresses]

    def _finished(self, peer: PeerKey, word: Handoff) -> None:
        with self._lock:
            try:
                writers = self._expected.said(peer, word)
            except StaleFrame:
                self._count(frames_dropped=1)
                return
        self._tell_to_stop({word.room: writers}, word.error or TransferError("another writer aborted"))
        self._notify()

    def _aborted(self, link: Link, peer: PeerKey, message: wire.Abort) -> None:
        error = TransferError(str(message.error))
        with self._lock:
            unheard_of = self._accepted.stop(peer, message.room, error)
        if unheard_of:
            word = Handoff(room=message.room, writer=self.address, status=HandoffStatus.ABORTED, error=error)
            self.transport.send(link, wire.encode(wire.Finish(word)))
        self._notify()

    def _tell_to_stop(self, rooms: Mapping[bytes, Iterable[PeerKey]], error: PDInferError) -> None:
        for room, writers in rooms.items():
            for link in [link for writer in writers if (link := self._peers.link_to(writer)) is not None]:
                self.transport.send(link, wire.encode(wire.Abort(room, error)))

    def _flush(self, room: bytes) -> None:
        """Hands a room's joined pushes to the transport, one write per destination."""
        with self._lock:
            group = self._groups.pop(room, None)
            if group is None:
                return
            # writes of a link leave in order, so the last one of a room speaks for all
            self._last_writes[room] = group.transfer
        links = self._links(group.grant.destinations)
        source = self.pool.layout.spans(
            self.pool.num_pages, layers=group.layers, tokens=group.tokens, pages=group.pages, first_token=0
        )
        frame = wire.encode(wire.Data(room, group.layers, group.tokens))
        self._count(writes_sent=1, bytes_sent=group.transfer.num_bytes)
        waiting = len(links)
        problem: TransferError | None = None

        def sent(write: Transfer) -> None:
            nonlocal waiting, problem
            with self._changed:
                waiting -= 1
                problem = problem or write.error
                if not waiting:
                    self._unsent.discard(group.transfer)
                    group.transfer.complete(problem)
                    self._changed.notify_all()
            self._notify()

        def ready() -> None:
            for wait in group.ready:
                wait()

        for link in links:
            if link is None:
                Transfer(0, sent).complete(TransferError("the destination is not connected"))
            else:
                self.transport.write(link, frame, source, ready=ready if group.ready else None, then=sent)

    def _count(self, **more: float) -> None:
        with self._lock:
            values = {name: getattr(self._stats, name) + amount for name, amount in more.items()}
            self._stats = attrs.evolve(self._stats, **values)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in self._listeners:
            listener()
