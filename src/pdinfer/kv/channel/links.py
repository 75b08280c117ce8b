"""Who is at the other end of each link: the handshake, the heartbeats, and the book of open links.

    connecting end ── Open (nonce) ──────► ◄── Open (nonce) ── accepting end
                   ── Hello (who, layout) ──►
                   ◄── Welcome or Reject ───
                   ◄── Beat … Beat ──►

Everything behind the two Open frames is sealed (`kv.channel.frame_mac`). Both ends compare layouts, so either may
refuse; no payload moves before both agree. There is one link per pair of ends: when both dial at once, that of the
lesser identity stays. A link that breaks is dialled again by the end that dialled it, until its owner drops the peer or
the peer has not been reached for RELINK_S.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping

import attrs

from pdinfer.errors import LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.complaints import Complaints
from pdinfer.kv.channel.counters import Ledger, Traffic
from pdinfer.kv.channel.frame_mac import NONCE_BYTES, check_key
from pdinfer.kv.channel.greeting import check_greeting, check_open, refusal
from pdinfer.kv.channel.peer import Occupied, Peer, Wanted
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transports.base import Link, Transport
from pdinfer.stats import PeerStats
from pdinfer.types import PeerAddress, PeerKey, peer_key

SILENT_S = 2.2
"""A link on which nothing arrived for this long is dead: with the tick that notices it, a loss is known within 3 s."""
MAX_TICK_S = 1.1
"""Of the time between two ticks no more counts as silence: when it was this end that slept, nobody was heard."""
HANDSHAKE_S = 10.0
REDIAL_S = (0.1, 5.0)
"""Seconds before the first and, doubling, before every later attempt to reach a peer again."""
RELINK_S = 60.0
MAX_GUESTS = 256
"""Links to peers that this end neither dialled nor gave anything to do: past it the oldest gives way to a newcomer."""
_log = logging.getLogger("pdinfer")


class Peers:
    """The links of one channel. `changed` is the channel's condition: its lock guards this book, is never held while
    the transport is called, and is notified when a handshake ends. `us` is set once the transport has an endpoint."""

    us: PeerAddress

    def __init__(
        self,
        transport: Transport,
        layout: KVLayout,
        changed: threading.Condition,
        *,
        key: bytes | None,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        check_key(key)
        self._transport = transport
        self._layout = attrs.evolve(layout)  # without what a layout keeps of itself once asked: that would travel too
        self._changed = changed
        self._key = key
        self._clock = clock
        self._random_bytes = random_bytes
        self._by_link: dict[Link, Peer] = {}
        self._links: dict[PeerKey, Link] = {}
        self._wanted: dict[PeerKey, Wanted] = {}
        self._ledger = Ledger()
        self._complaints = Complaints(clock)
        self._ticked_at = clock()

    # -- the book ---------------------------------------------------------------------------------------------------

    def at(self, link: Link, *, dialled: bool = True) -> Peer:
        """The record of a link, made when it is new."""
        with self._changed:
            peer = self._by_link.get(link)
            if peer is None:
                nonce = self._random_bytes(NONCE_BYTES)
                peer = self._by_link[link] = Peer(link, nonce, dialled, self._clock(), self._complaints)
            return peer

    def link_to(self, key: PeerKey) -> Link | None:
        """The open link to a welcome peer."""
        with self._changed:
            return self._links.get(key)

    def peer_at(self, key: PeerKey) -> Peer | None:
        """The record of the open link to a welcome peer."""
        with self._changed:
            return self._by_link.get(self._links[key]) if key in self._links else None

    def granted(self, addresses: Iterable[PeerAddress]) -> list[Peer | None]:
        """The records of these peers' links, None where there is none; they are guests no more."""
        with self._changed:
            keys = list(map(peer_key, addresses))
            for key in keys:
                self._ledger.grant(key)
            return list(map(self.peer_at, keys))

    def traffic(self, key: PeerKey) -> Traffic | None:
        """The counts of a peer that was welcome once; for the channel to add to, under its lock."""
        return self._ledger.get(key)

    def stats(self, inflight: Mapping[PeerKey, int], window_bytes: int) -> tuple[PeerStats, ...]:
        """A snapshot of every peer that is welcome or was lately; `inflight` are the bytes on their way to each."""
        with self._changed:
            return tuple(
                traffic.stats(
                    connected=key in self._links,
                    inflight_bytes=inflight.get(key, 0),
                    window_bytes=window_bytes,
                    step_age_s=self._step_age_s(key),
                )
                for key, traffic in self._ledger.items()
            )

    def _step_age_s(self, key: PeerKey) -> float | None:
        peer = self.peer_at(key)
        return None if peer is None or peer.stepped_at is None else self._clock() - peer.stepped_at

    # -- connecting -------------------------------------------------------------------------------------------------

    def connect(self, address: PeerAddress, *, timeout_s: float) -> None:
        """Opens a link and shakes hands; see `KVChannel.connect`."""
        key, now = peer_key(address), self._clock()
        if key == peer_key(self.us):
            raise TransferError("this is the end's own address; a channel has no link to itself")
        with self._changed:
            if key in self._links:
                return
            is_new = key not in self._wanted
            wanted = self._wanted.setdefault(key, Wanted(address, now, math.inf))
            wanted.address, wanted.lost_at = address, now + timeout_s
            if timeout_s <= 0:
                wanted.due = now
        if timeout_s <= 0:
            self._redial(wanted, now)
            return
        try:
            self._reach(wanted, timeout_s)
        except BaseException:
            if is_new:
                self._unwant(key)
            raise

    def drop(self, key: PeerKey) -> None:
        """Closes the link to this peer, or what is to become one, and dials it no more."""
        self._unwant(key)
        with self._changed:
            links = [peer.link for peer in self._by_link.values() if peer.key == key]
        for link in links:
            self._transport.fence(link)

    def _unwant(self, key: PeerKey) -> None:
        with self._changed:
            self._wanted.pop(key, None)

    def _reach(self, wanted: Wanted, timeout_s: float) -> None:
        """Dials until there is a link to the peer, whichever end's it is."""
        key, left = peer_key(wanted.address), timeout_s
        while True:
            problem = self._answer(self._dial(wanted, left), left)
            with self._changed:
                if isinstance(problem, Occupied):
                    self._changed.wait_for(lambda: key in self._links, REDIAL_S[0])
                    left -= REDIAL_S[0]
                if problem is None or key in self._links:
                    return
            if not isinstance(problem, Occupied) or left <= 0:
                raise problem

    def _answer(self, peer: Peer, timeout_s: float) -> PDInferError | None:
        """Waits for the handshake's end. When it is not a link, says why, and closes what there is of one."""
        with self._changed:
            self._changed.wait_for(lambda: not peer.is_pending or peer.key in self._links, timeout_s)
            if peer.address is not None:
                return None
            problem = peer.refusal
        self._abandon(peer)
        return problem or TransferError(f"{peer.link.endpoint} did not answer the handshake within {timeout_s} s")

    def _redial(self, wanted: Wanted, now: float) -> None:
        """Dials, when it is due, without waiting for the answer."""
        key = peer_key(wanted.address)
        with self._changed:
            pending = any(peer.is_pending and peer.key == key for peer in self._by_link.values())
            if self._wanted.get(key) is not wanted or key in self._links or pending or now < wanted.due:
                return
            low, high = REDIAL_S
            wanted.due = now + min(high, low * 2.0**wanted.attempts)
            wanted.attempts += 1
        try:
            self._dial(wanted, 0.0)
        except TransferError as error:
            _log.info("a peer cannot be dialled: %s", error)

    def _dial(self, wanted: Wanted, timeout_s: float) -> Peer:
        """The peer may be heard before `connect` returns and it is known who should answer. So who dialled is said by
        whoever comes second: this thread, or the one that reads the peer's first frame."""
        peer = self.at(self._transport.connect(wanted.address.endpoints, timeout_s=timeout_s))
        key = peer_key(wanted.address)
        with self._changed:
            if key in self._links:
                self._refuse(peer, Occupied("the peer has dialled this end meanwhile"))
            elif self._wanted.get(key) is not wanted:
                self._refuse(peer, TransferError("the peer was dropped while it was dialled"))
            if peer.refusal is not None:
                return peer
            peer.asked_for = wanted.address
            is_sealed = peer.is_sealed
        self.open(peer)
        if is_sealed:
            self._introduce(peer)
        return peer

    def _abandon(self, peer: Peer) -> None:
        """Closes a link that this end dialled in vain."""
        self._transport.fence(peer.link)
        with self._changed:
            self._by_link.pop(peer.link, None)

    # -- the handshake ----------------------------------------------------------------------------------------------

    def open(self, peer: Peer) -> None:
        """This end's first frame, sent once."""
        version = (wire.MAJOR, wire.MINOR)
        peer.open(self._transport, wire.encode(wire.Open(version, peer.nonce, self._key is not None)))

    def read(self, peer: Peer, frame: bytes) -> wire.Message | None:
        """The message in a frame of an open link; None when the frame was one of the handshake. TransferError when it
        does not verify, or was sent in spite of a refusal."""
        if peer.refusal is not None:
            raise TransferError(f"{peer.link.endpoint} went on after it was refused: {peer.refusal}")
        if not peer.is_sealed:
            self._meet(peer, wire.decode(frame))
            return None
        if peer.address is not None:
            return wire.decode(peer.unseal(frame))
        try:
            unsealed = peer.unseal(frame)
        except TransferError as error:
            self._reject(peer, error)
            return None
        self._greet(peer, wire.decode(unsealed))
        return None

    def _meet(self, peer: Peer, message: wire.Message) -> None:
        """The first frame of the other end: from here on the link is sealed, and who dialled says who it is."""
        if not isinstance(message, wire.Open):
            raise TransferError(f"a link begins with its peer's nonce, not with a {type(message).__name__} frame")
        self.open(peer)
        if (error := check_open(message, keyed=self._key is not None)) is not None:
            self._refuse(peer, error)
        else:
            with self._changed:
                peer.begin_session(message.nonce, self._key)
                is_asked = peer.asked_for is not None
            if is_asked:
                self._introduce(peer)

    def _introduce(self, peer: Peer) -> None:
        """Says who dialled."""
        self.post(peer, wire.Hello(self.us, self._layout))

    def _greet(self, peer: Peer, message: wire.Message) -> None:
        """A sealed frame on a link that is not open yet. Anything but a handshake closes it."""
        if isinstance(message, wire.Reject):
            self._refuse(peer, refusal(message))
        elif isinstance(message, wire.Hello | wire.Welcome):
            try:
                check_greeting(peer, message, self.us, self._layout)
                crowded = self._admit(peer, message)
            except PDInferError as error:
                self._reject(peer, error)
            else:
                peer.flush(self._transport)
                if crowded is not None:
                    self._give_up(crowded, f"{crowded.link.endpoint} had nothing to do here, and others came")
        else:
            raise TransferError(f"a {type(message).__name__} frame came before the handshake")

    def post(self, peer: Peer, message: wire.Message) -> None:
        """Sends a sealed frame."""
        peer.post(self._transport, wire.encode(message))

    def reason(self, link: Link) -> TransferError | None:
        """Why this end gave the link up, if it did."""
        with self._changed:
            refusal = self._by_link[link].refusal if link in self._by_link else None
            return refusal if isinstance(refusal, TransferError) else None

    def forget(self, link: Link, error: TransferError) -> PeerAddress | None:
        """The link is gone: who was there, if anyone welcome was."""
        with self._changed:
            peer = self._by_link.pop(link, None) or Peer(link, b"", True, self._clock(), self._complaints)
            peer.refusal = peer.refusal or error
            if peer.dialled and peer.asked_for is None:
                self._by_link[link] = peer  # lost before the thread that dials could look: let it find out
            self._changed.notify_all()
            if peer.asked_for is not None and isinstance(peer.refusal, LayoutMismatch):
                self._wanted.pop(peer_key(peer.asked_for), None)
            if peer.address is None or self._links.get(peer_key(peer.address)) is not link:
                return None
            key, now = peer_key(peer.address), self._clock()
            del self._links[key]
            self._ledger.leave(key, now)
            self._ledger.forget(now, self._links.keys() | self._wanted.keys())
            if key in self._wanted:
                wanted = self._wanted[key]
                wanted.lost_at, wanted.due, wanted.attempts = now, now + REDIAL_S[0], 1
            return peer.address

    def _admit(self, peer: Peer, message: wire.Hello | wire.Welcome) -> Peer | None:
        """Opens the link; the guest who must give way for it, if any. One link per identity: were there two, closing
        either would count as proof that the peer writes no more, while the other still does. A Welcome is queued
        first, so that nothing another thread says overtakes it."""
        with self._changed:
            key = peer_key(message.address)
            if key in self._links:
                raise Occupied("this peer has an open link already; drop that one before opening another")
            if isinstance(message, wire.Hello):
                crossed = any(other.is_pending and other.key == key for other in self._by_link.values())
                if crossed and peer_key(self.us) < key:
                    raise Occupied("both ends dial, and it is the other one's link that stays")
                peer.queue(wire.encode(wire.Welcome(self.us, self._layout)))
            peer.address = message.address
            peer.layout_id = message.layout.layout_id
            peer.link.trusted = True
            self._links[key] = peer.link
            self._ledger.meet(message.address)
            if key in self._wanted:
                self._wanted[key].attempts = 0
            self._changed.notify_all()
            guests = self._ledger.guests(self._links.keys() - self._wanted.keys())
            return self.peer_at(guests[0]) if len(guests) > MAX_GUESTS else None

    def _refuse(self, peer: Peer, error: PDInferError) -> None:
        with self._changed:
            peer.refusal = error
            self._changed.notify_all()
        if not isinstance(error, Occupied):
            self._complaints.warn("the link to %s is refused or given up: %s", peer.link.endpoint, error)

    def _reject(self, peer: Peer, error: PDInferError) -> None:
        """Refuses, and tells an end that dialled why. It closes the link; if it goes on instead, this end does."""
        self._refuse(peer, error)
        if not peer.dialled:
            peer.post(self._transport, wire.rejection(error, again=isinstance(error, Occupied)))

    # -- heartbeats -------------------------------------------------------------------------------------------------

    def tick(self, step_age_s: float) -> None:
        """Beats on every open link, gives up those that are silent, dials those that are missing."""
        now, beat = self._clock(), wire.encode(wire.Beat(step_age_s))
        with self._changed:
            passed_s, self._ticked_at = min(now - self._ticked_at, MAX_TICK_S), now
            peers = list(self._by_link.values())
            self._ledger.forget(now, self._links.keys() | self._wanted.keys())
        for peer in peers:
            silent_s = peer.silent_s = min(now - peer.link.heard_at, peer.silent_s + passed_s)
            if peer.address is None:
                if peer.dialled and peer.refusal is not None:
                    self._abandon(peer)
                elif now - peer.since > HANDSHAKE_S:
                    self._give_up(peer, f"{peer.link.endpoint} did not finish its handshake in {HANDSHAKE_S:g} s")
            elif silent_s > SILENT_S:
                reason = f"nothing came from {peer.link.endpoint} for {silent_s:.1f} s"
                self._give_up(peer, f"{reason}: it hangs, is frozen or cannot be reached")
            else:
                peer.post(self._transport, beat)
        self.redial()

    def redial(self) -> None:
        """Dials the peers that are missing, when they are due."""
        for key, want in list(self._wanted.items()):
            if self._clock() - want.lost_at <= RELINK_S or self.link_to(key) is not None:
                self._redial(want, self._clock())
            else:
                _log.warning("a peer could not be reached for %g s and is not dialled again", RELINK_S)
                self._unwant(key)

    def redial_in_s(self) -> float:
        """When `redial` would dial; infinity when no peer is missing."""
        due = (want.due for key, want in list(self._wanted.items()) if key not in self._links)
        return min(due, default=math.inf) - self._clock()

    def cut(self) -> None:
        """Closes every link, whatever an interrupted call has left of the book; `redial` makes new ones."""
        for link in (links := list(self._by_link)):
            self._transport.fence(link)
        with self._changed:
            self._by_link = {link: peer for link, peer in self._by_link.items() if link not in links}
            self._links = {key: link for key, link in self._links.items() if link not in links}
            for want in self._wanted.values():
                want.lost_at = want.due = self._clock()

    def give_up(self, key: PeerKey, reason: str) -> None:
        """Closes the link to a peer; it may come back over a new one."""
        peer = self.peer_at(key)
        if peer is not None:
            self._give_up(peer, reason)

    def _give_up(self, peer: Peer, reason: str) -> None:
        self._refuse(peer, TransferError(reason))
        self._transport.fence(peer.link)
