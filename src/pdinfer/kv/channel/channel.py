"""One end of a KV channel: grants and hand-offs above, a transport below, and between them three roles.

    engine ──► KVChannel ──► HandoffSender      accept, push, finish, stops      prefill's side
                        ──► HandoffReceiver    expect, place, abort, poll       decode's side
                        ──► Links              connect, heartbeats, redial      both sides

Decode's end *expects* a grant, is *placed* upon, and *polls* hand-offs. Prefill's end *accepts* a grant, *pushes* what
it computes and *finishes*. An end can be both at once and has any number of peers.

Threads: callbacks of the transport come from its I/O thread, everything else from the thread that steps the engine.
One lock, that of the condition `_changed`, guards the state of all three roles, since what ends a link settles rooms on
both sides in the same moment. It is never held while the transport is called, so ends cannot wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.counters import Totals
from pdinfer.kv.channel.links import Links
from pdinfer.kv.channel.receiver import HandoffReceiver
from pdinfer.kv.channel.sender import HandoffSender
from pdinfer.kv.channel.snapshot import ChannelSnapshot
from pdinfer.kv.layout import Spans
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import Link, Transfer, Transport
from pdinfer.kv.transports.loopback import Interrupted, LoopbackHub, LoopbackTransport
from pdinfer.process.forked import OfOneProcess, refuse
from pdinfer.process.locks import new_lock
from pdinfer.stats import ChannelStats
from pdinfer.types import Handoff, PageGrant, PeerAddress, peer_key

WINDOW_BYTES = 64 << 20


class KVChannel(OfOneProcess):
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
        self._changed = threading.Condition(new_lock())
        self._listeners: list[Callable[[], None]] = []
        self._totals = Totals()
        self._links = Links(transport, pool.layout, self._changed, key=key, clock=clock, random_bytes=random_bytes)
        parts = pool, self._links.book, self._changed, self._totals, self._notify
        self._sender = HandoffSender(*parts)
        self._receiver = HandoffReceiver(*parts)
        self._looked_at = clock()
        self._in_doubt = False
        self._closed = False
        self.address = self._links.register(pool.memory, self)

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
        self._links.connect(peer, timeout_s=timeout_s)

    def drop_peer(self, peer: PeerAddress) -> None:
        """Closes the link for good; every room the peer still owed a word is settled ABORTED. Unknown peers are
        ignored."""
        self._links.drop(peer_key(peer))

    def connected(self, peer: PeerAddress) -> bool:
        """Whether there is an open link to this very peer."""
        return self._links.book.link_to(peer_key(peer)) is not None

    def shares_pool(self, peers: Iterable[PeerAddress]) -> bool:
        """Whether these peers' pages are in this end's own pool, so that computing into them is the transfer."""
        links = (self._links.book.link_to(peer_key(peer)) for peer in peers)
        return all(link is not None and link.same_memory for link in links)

    # -- decode's side ----------------------------------------------------------------------------------------------

    def expect(self, grant: PageGrant) -> None:
        """Lets the grant's writers write it. A writer that is not connected counts as lost at once."""
        self._receiver.expect(grant, self._clock())

    def expects(self, room: bytes) -> bool:
        """Whether writers of a room that is expected may hear of it: at once."""
        return True

    def abort(self, grant: PageGrant, error: PDInferError) -> None:
        """Asks the grant's writers to stop; `poll` gives their ABORTED (or a LANDED that was on its way)."""
        self._receiver.abort(grant, error)

    def poll(self) -> list[Handoff]:
        """Hand-offs of the rooms settled since the last call, each room's together. Their writers have stopped."""
        self._looked_at = self._clock()
        return self._receiver.take_settled()

    # -- prefill's side ---------------------------------------------------------------------------------------------

    def accept(self, grant: PageGrant) -> None:
        """Takes on a grant. TransferError when a destination aborted it before or is not connected, or when it was made
        for another layout than the one that decode showed in the handshake. Then every destination is told."""
        self._sender.accept(grant)

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
        return self._sender.push(grant, layers, tokens, pages, ready)

    def finish(self, grant: PageGrant, handoff: Handoff) -> Transfer:
        """This writer's last word, behind all its pushes. ABORTED is legal at any time. When the Transfer is done,
        nothing reads the pages that were pushed for this grant. ConfigError when the hand-off's state is too long to
        travel; the room is still open then."""
        return self._sender.finish(grant, handoff)

    def poll_stops(self) -> list[tuple[bytes, TransferError]]:
        """Accepted rooms that decode gave up or lost since the last call; each still needs `finish` with ABORTED."""
        self._looked_at = self._clock()
        return self._sender.take_stops()

    @property
    def unsent_bytes(self) -> int:
        """Bytes pushed and not yet out of our pages."""
        return self._sender.unsent_bytes

    def is_full(self, grant: PageGrant) -> bool:
        """Whether more than `window_bytes` are on their way to a destination of the grant: it takes them more slowly
        than they are made, and other peers should not wait for it."""
        return self._sender.most_inflight(map(peer_key, grant.destinations)) > self.window_bytes

    # -- both -------------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `poll` or `poll_stops` would give something."""
        with self._changed:
            return bool(self._receiver.rooms.num_settled or self._sender.rooms.num_stops)

    @property
    def stats(self) -> ChannelStats:
        """What moved so far."""
        return self._totals.stats(self._links.book.stats(self._sender.inflight(), self.window_bytes))

    def snapshot(self) -> ChannelSnapshot:
        """What this end holds at this moment, for who looks for a fault."""
        book = self._links.book
        with self._changed:
            receiving, sending = self._receiver.rooms, self._sender.rooms
            return ChannelSnapshot(
                links=book.snapshot(),
                wanted=tuple(wanted.address for wanted in book.wanted()),
                expected=receiving.snapshot(),
                accepted=sending.snapshot(),
                pushing=self._sender.pushing(),
                num_settled=receiving.num_settled,
                num_stops=sending.num_stops,
            )

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls `listener` from any thread whenever there may be news or a transfer is done."""
        self._listeners.append(listener)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until there is news or the time is over; tells whether there is."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.has_news or self._closed, timeout_s))

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything pushed has left; tells whether it has."""
        self._sender.flush()
        with self._changed:
            return bool(self._changed.wait_for(lambda: not self._sender.unsent_bytes, timeout_s))

    def close(self) -> None:
        """Closes every link and the transport; open rooms settle ABORTED. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.transport.close()
            self._notify()

    # -- after an interrupt or a loss -------------------------------------------------------------------------------

    @property
    def in_doubt(self) -> bool:
        """Whether it is time to recover: a host was interrupted inside one of our callbacks."""
        return self._in_doubt

    def recover(self) -> None:
        """Closes every link and forgets all rooms, after a call that was interrupted anywhere. Links go first, which
        proves that no peer writes any more; they come back as after any loss."""
        if isinstance(self.transport, LoopbackTransport):
            self.transport.cut()
        self._links.book.cut()
        with self._changed:
            self._receiver.forget()
            self._sender.forget()
            self._in_doubt = False

    def redial_in_s(self) -> float:
        """When `redial` would do something; infinity for a transport whose own thread dials lost peers."""
        return self._links.redial_in_s() if isinstance(self.transport, LoopbackTransport) else float("inf")

    def redial(self) -> None:
        """Dials the lost peers that are due."""
        if self.redial_in_s() <= 0:
            self._links.redial()

    # -- the transport's calls (Receiver) ---------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        self._links.opened(link)

    def received(self, link: Link, frame: bytes) -> None:
        peer = self._links.book.at(link)
        said = self._links.handshake.read(peer, frame)
        if said is None:
            self._sender.answer_turned_away(peer)
            return
        key, message = said
        if isinstance(message, wire.Finish):
            self._receiver.finished(key, message.handoff)
        elif isinstance(message, wire.Abort):
            self._sender.stop(peer, key, message, self._clock())
        elif isinstance(message, wire.Beat):
            self._links.beaten(peer, message.step_age_s)
        else:
            raise TransferError(f"a {type(message).__name__} frame does not belong on an open link")

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        return self._receiver.place(self._links.book.at(link), frame, num_bytes, self._clock())

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        self._receiver.placed(self._links.book.at(link), frame, error, self._clock())

    def tick(self) -> None:
        now = self._clock()
        self._sender.tick(now)
        self._receiver.tick(now)
        self._links.tick(max(0.0, now - self._looked_at))

    def closed(self, link: Link, error: TransferError | None) -> None:
        self._in_doubt |= isinstance(error, Interrupted)
        with self._changed:  # one block: no room may be made between the loss of a link and what it settles
            key, lost = self._links.book.close(link, error)
            to_stop = {} if key is None else self._receiver.lost(key, lost)
            if key is not None:
                self._sender.lost(key, lost)
        self._receiver.tell_to_stop(to_stop, lost)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in self._listeners:
            listener()
