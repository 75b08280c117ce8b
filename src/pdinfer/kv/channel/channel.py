"""One end of a KV channel: grants and hand-offs above, a transport below, and between them three roles.

    engine ──► KVChannel ──► sender      HandoffSender     accept, push, finish, stops      prefill's side
                        ──► receiver    HandoffReceiver   expect, place, abort, poll       decode's side
                        ──► links       Links             connect, heartbeats, redial      both sides
    transport ──► Arrivals ──► the three

Decode's end *expects* a grant, is *placed* upon, and *polls* hand-offs. Prefill's end *accepts* a grant, *pushes* what
it computes and *finishes*. An end can be both at once and has any number of peers.

Threads: callbacks of the transport come from its I/O thread, everything else from the thread that steps the engine.
One lock, that of the condition `_changed`, guards the state of all three roles, because the loss of a link settles
rooms on both sides in the same moment. It is never held while the transport is called, so two ends cannot deadlock."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import attrs

from pdinfer.checks import MAX_WAIT_S, typed
from pdinfer.errors import PDInferError, TransferError
from pdinfer.identity import NO_TENSORS
from pdinfer.inbox import tell
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.book import LinkBook
from pdinfer.kv.channel.links import ChannelLinks, Handshake
from pdinfer.kv.channel.receiver import HandoffReceiver
from pdinfer.kv.channel.sender import HandoffSender
from pdinfer.kv.channel.snapshot import ChannelSnapshot
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Pages
from pdinfer.kv.transports.base import Link, Transfer, Transport
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import EXHAUSTED, new_lock
from pdinfer.stats import ChannelStats, PeerStats
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, peer_key

WINDOW_BYTES = 64 << 20

Arrival = TypeVar("Arrival", bound=Callable[..., Any])


class KVChannel(OfOneProcess):
    """One end of a KV channel over `transport`, for the pages of `pool`: a PagePool, or those of another engine.

    `address` is what peers need to reach and recognise this end. It is new for every object, so a restarted engine is a
    new peer. What few hosts need is asked of its `sender`, `receiver` and `links`. With a `key` (at least 16 random
    bytes, the same on every end) frames carry an HMAC, and a peer without the key gets no further than a first frame.
    With `takes_offers` decodes may send their grants over the link, for `poll_offers`; otherwise such a grant is
    answered ABORTED at once. `window_bytes` may be set; past it a peer `is_full`. `engine` is the one that was made
    over this end: there can be only one, and once its host has dropped it the next tick closes this end. Once
    the transport is `in_doubt` it is time to `recover`. Raises ConfigError, TransferError or Overloaded when the
    transport cannot start."""

    @typed
    def __init__(
        self,
        pool: Pages,
        transport: Transport,
        *,
        key: bytes | None = None,
        takes_offers: bool = False,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.takes_offers = takes_offers
        self.window_bytes = WINDOW_BYTES
        self.pool = pool
        self.transport = transport
        self.random_bytes = random_bytes
        self._clock = clock
        self._changed = threading.Condition(new_lock())
        self._listeners: list[Callable[[], None]] = []
        book = LinkBook(transport, self._changed, clock=clock, random_bytes=random_bytes)
        handshake = Handshake(book, pool.layout, getattr(pool, "tensors", NO_TENSORS), key)
        self.links = ChannelLinks(transport, book, handshake)
        self.sender = HandoffSender(pool, book, self.wake, takes_offers=takes_offers)
        self.receiver = HandoffReceiver(pool, book, self.wake)
        self.looked_at = clock()
        self.is_closed = False
        self.engine: weakref.ref[object] | None = None
        self.arrivals = ChannelArrivals(self, authenticates=key is not None)
        engine_id, epoch = random_bytes(16), int.from_bytes(random_bytes(7), "little")
        endpoints = transport.register(pool.memory, self.arrivals)
        self.address = book.us = PeerAddress(engine_id, epoch, 0, endpoints)

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return f"{type(self).__name__}({self.address}, over {self.transport.name}, {self.pool}{closed})"

    @classmethod
    @typed
    def loopback(cls, *pools: Pages) -> tuple[KVChannel, ...]:
        """Make one end per pool, all in this process. Ends of the *same* pool exchange pages without copying."""
        hub = LoopbackHub()
        return tuple(cls(pool, LoopbackTransport(hub)) for pool in pools)

    # -- peers ------------------------------------------------------------------------------------------------------

    @typed
    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Open a link and compare layouts. Either end may dial, or both; a second call does nothing. A link that breaks
        is dialled again automatically. With `timeout_s` 0 the call does not wait, and dialling goes on until
        `connected`, for at most a minute. Raises LayoutMismatch, which names each field that differs, and TransferError
        when the peer cannot be reached, does not answer in time, or is not the one that `peer` describes."""
        self.links.connect(peer, timeout_s=min(timeout_s, MAX_WAIT_S))

    @typed
    def drop_peer(self, peer: PeerAddress) -> None:
        """Close the link for good. Every room that the peer has not finished settles ABORTED. An unknown peer is
        ignored."""
        self.links.drop(peer_key(peer))

    @typed
    def connected(self, peer: PeerAddress) -> bool:
        """Return whether there is an open link to this very peer."""
        return self.links.book.peer_at(peer_key(peer)) is not None

    @typed
    def shares_pool(self, peers: Iterable[PeerAddress]) -> bool:
        """Return whether the pages of these peers are in this end's own pool, so that computing into them is the
        transfer."""
        linked = map(self.links.book.peer_at, map(peer_key, peers))
        return all(peer is not None and peer.link.same_memory for peer in linked)

    # -- decode's side ----------------------------------------------------------------------------------------------

    @typed
    def expect(self, grant: PageGrant) -> None:
        """Let the grant's writers write it. A writer that is not connected counts as lost at once."""
        self.receiver.expect(grant, self._clock())

    def expects(self, room: bytes) -> bool:
        """Return whether the writers of an expected room may be told of it, which is at once."""
        return True

    @typed
    def abort(self, grant: PageGrant, error: PDInferError) -> None:
        """Ask the grant's writers to stop. `poll` returns their ABORTED, with `error`, or a LANDED that was on its
        way."""
        self.receiver.abort(grant, error)

    def poll(self) -> list[Handoff]:
        """Return the hand-offs of the rooms settled since the last call, each room's together. Their writers have
        stopped."""
        self.looked_at = self._clock()
        return self.receiver.take_settled()

    # -- prefill's side ---------------------------------------------------------------------------------------------

    @typed
    def accept(self, grant: PageGrant) -> None:
        """Accept a grant. Raises TransferError when a destination aborted it before or is not connected, or when it was
        made for another layout than the one that decode showed in the handshake. Then every destination is told."""
        self.sender.accept(grant)

    @typed
    def push(
        self,
        grant: PageGrant,
        *,
        layers: range,
        tokens: range,
        pages: Sequence[int],
        ready: Callable[[], None] | None = None,
        heads: range | None = None,
    ) -> Transfer:
        """Send `tokens` of `layers` out of our `pages` (page i holds tokens from i * page_size). Each destination gets
        those of `heads`, by default all that this rank holds, that it holds too. Never blocks. The
        transport calls `ready` in the thread that reads the pages, before it does. The pages must not change until the
        Transfer is done. Raises TransferError when the room is not open, ConfigError for pages without those
        tokens or heads, and for parts of packed pages."""
        try:
            return self.sender.push(grant, layers, tokens, pages, ready, heads)
        except BaseException as error:
            self._doubt(error)
            raise

    @typed
    def finish(self, grant: PageGrant, handoff: Handoff) -> Transfer:
        """Finish a room with this writer's hand-off, after all its pushes. ABORTED is allowed at any time. When the
        Transfer is done, the pages that were pushed for this grant are no longer read. Raises ConfigError when the
        hand-off's state is too long to travel; the room stays open then."""
        try:
            return self.sender.finish(grant, handoff)
        except BaseException as error:
            self._doubt(error)
            raise

    def poll_offers(self, rooms: Collection[bytes] | None = None) -> list[PageGrant]:
        """Return the grants that came over links since the last call, in order; with `rooms` only those for them, and
        the others wait. Each is to be accepted and finished, with ABORTED if nobody will write it."""
        self.looked_at = self._clock()
        return self.sender.take_offers(rooms)

    def poll_stops(self) -> list[tuple[bytes, TransferError]]:
        """Return the accepted rooms that decode gave up, or whose link was lost, since the last call, with the reasons.
        Each still needs `finish` with ABORTED."""
        self.looked_at = self._clock()
        return self.sender.take_stops()

    @typed
    def is_full(self, grant: PageGrant) -> bool:
        """Return whether more than `window_bytes` are on their way to a destination of the grant. It takes them more
        slowly than they are made, and other peers should not wait for it."""
        inflight = self.sender.pushes.inflight()
        return any(inflight[peer_key(peer)] > self.window_bytes for peer in grant.destinations)

    # -- both -------------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `poll`, `poll_stops` or `poll_offers` would return anything."""
        with self._changed:
            return bool(self.receiver.num_settled) or self.sender.has_news

    @property
    def stats(self) -> ChannelStats:
        """What has moved so far."""
        return ChannelStats(**attrs.asdict(self.links.book.totals), peers=self.peers())

    def peers(self) -> tuple[PeerStats, ...]:
        """Return what `stats` says of every peer that is linked, or was lately."""
        return self.links.book.stats(self.sender.pushes.inflight(), self.window_bytes)

    def snapshot(self) -> ChannelSnapshot:
        """Return what this end holds at this moment, for finding faults."""
        book = self.links.book
        with self._changed:
            return ChannelSnapshot(
                links=book.snapshot(),
                wanted=tuple(wanted.address for wanted in book.wanted.values()),
                expected=self.receiver.rooms(),
                accepted=self.sender.rooms(),
                pushing=self.sender.pushes.rooms(),
                num_settled=self.receiver.num_settled,
                num_stops=self.sender.num_stops,
            )

    @typed
    def notify(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, from any thread, whenever there may be news or a transfer is done."""
        self._listeners.append(listener)

    @typed
    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is news or the time is over. Return whether there is news."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.has_news or self.is_closed, min(timeout_s, MAX_WAIT_S)))

    @typed
    def drain(self, timeout_s: float) -> bool:
        """Wait until everything pushed has left or the time is over. Return whether it has left."""
        self.sender.flush()
        with self._changed:
            return bool(self._changed.wait_for(lambda: not self.sender.pushes.unsent_bytes, min(timeout_s, MAX_WAIT_S)))

    def close(self) -> None:
        """Close every link and the transport. Open rooms settle ABORTED. A second call does nothing, or what the first
        has not come to."""
        self.is_closed = True
        self.transport.close()
        self.wake()

    def vacate(self, listener: Callable[[], None]) -> None:
        """Close every link for good, and let go of the engine, which has no room open, and of its `listener`. Another
        engine may then be made over this end, whose address stays."""
        self.links.book.wanted.clear()
        for peer in self.links.book.peers():
            peer.fence()
        self._listeners = [other for other in self._listeners if other != listener]
        self.engine = None

    # -- after an interrupt or a loss -------------------------------------------------------------------------------

    def _doubt(self, error: BaseException) -> None:
        """Be in doubt after any exception that is not ours: half of what was to be sent may have left."""
        if not isinstance(error, PDInferError):
            self.transport.in_doubt = True

    def recover(self) -> None:
        """Close every link and forget all rooms, after a call that was interrupted at any line. Links go first, which
        proves that no peer writes any more. They come back as after any loss."""
        self.transport.cut()
        self.links.book.cut()
        with self._changed:
            self.receiver.forget()
            self.sender.forget()
            self.transport.in_doubt = False

    def redial_in_s(self) -> float:
        """Return in how many seconds a step has to call `links.redial`, infinity where a thread of the transport does
        it."""
        return float("inf") if self.transport.ticks else self.links.book.redial_in_s()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        tell(self._listeners)


def turn_away(channel: KVChannel, grant: PageGrant, error: PDInferError) -> bool:
    """Answer a grant that nobody will write. Return False where no decode waits for that: it gave it up, or is gone."""
    try:
        channel.accept(grant)
    except TransferError:
        return False
    aborted = Handoff(room=grant.room, writer=channel.address, status=HandoffStatus.ABORTED, error=error)
    channel.finish(grant, aborted)
    return True


def _doubted(arrival: Arrival) -> Arrival:
    """Have the engine recover after an arrival that was noted half-way, since the process was out of something."""

    @functools.wraps(arrival)
    def call(self: ChannelArrivals, /, *args: Any) -> Any:
        try:
            return arrival(self, *args)
        except EXHAUSTED:
            self._book.doubt()
            raise

    return cast(Arrival, call)


class ChannelArrivals:
    """What the transport tells of `channel` (its `Receiver`): each call goes to the role that it is about."""

    def __init__(self, channel: KVChannel, *, authenticates: bool) -> None:
        self.authenticates = authenticates
        self._channel = channel
        self._sender, self._receiver, self._book = channel.sender, channel.receiver, channel.links.book

    def opened(self, link: Link) -> None:
        self._channel.links.handshake.open(self._book.at(link, dialled=False))

    @_doubted
    def received(self, link: Link, frame: bytes) -> None:
        peer = self._book.at(link)
        if peer.refusal is not None or peer.address is None:
            self._channel.links.handshake.read(peer, frame)
            self._sender.answer_turned_away(peer)
            return
        key, message = peer_key(peer.address), wire.decode(peer.verify(frame))
        if isinstance(message, wire.Finish):
            self._receiver.finished(key, message.handoff)
        elif isinstance(message, wire.Abort):
            self._sender.stop(peer, key, message, self._book.clock())
        elif isinstance(message, wire.Offer):
            self._sender.offered(peer, key, message)
        elif isinstance(message, wire.Beat):
            peer.stepped_at = self._book.clock() - message.step_age_s
        else:
            raise TransferError(f"a {type(message).__name__} frame does not belong on an open link")

    @_doubted
    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        return self._receiver.place(self._book.at(link), frame, num_bytes, self._book.clock())

    @_doubted
    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        self._receiver.placed(self._book.at(link), frame, error, self._book.clock())

    def tick(self) -> None:
        if self._channel.engine is not None and self._channel.engine() is None:
            self._channel.close()  # nobody else would: the transport's thread, which calls this, holds the pages
            return
        now = self._book.clock()
        self._sender.tick(now)
        self._receiver.tick(now)
        self._channel.links.tick(max(0.0, now - self._channel.looked_at))

    def closed(self, link: Link, error: TransferError | None) -> None:
        try:
            with (
                self._book.changed
            ):  # one block, so that no room is made between the loss of a link and the end of its rooms
                key, lost = self._book.close(link, error)
                to_stop = {} if key is None else self._receiver.lost(key, lost)
                if key is not None:
                    self._sender.lost(key, lost)
            self._receiver.tell_to_stop(to_stop, lost)
        except BaseException:  # nobody says it once more
            self._book.doubt()
            raise
        finally:
            self._channel.wake()
