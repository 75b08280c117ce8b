"""The book of links: which links there are, who is at the other end of each, and which peers this end wants to reach.

The book only keeps state; `links` and `handshake` decide. Its lock is that of the channel's condition, so the loss of a
link and the end of its rooms are one change."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping

from pdinfer.errors import LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel.peer import Complaints, Occupied, Peer, PeerCounts, Totals, Wanted
from pdinfer.kv.channel.snapshot import LinkSnapshot
from pdinfer.kv.channel.wire import NONCE_BYTES
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transports.base import Link, Transport
from pdinfer.stats import PeerStats
from pdinfer.types import PeerAddress, PeerKey, peer_key

REDIAL_S = (0.1, 5.0)
"""Seconds before the first attempt to reach a peer again, and the most before a later one. The pause doubles."""
MAX_PAST = 32
"""How many peers without a link still appear in the stats, the latest to leave first. Every step's report carries
them."""
PAST_S = 120.0
"""How long such a peer appears there: twice as long as a lost peer is dialled."""

MAX_GUESTS = 256
"""How many peers may be linked that this end neither dialled nor gave anything to do. Past it the oldest gives way."""


class LinkBook:
    """The links of one channel. `changed` is the channel's condition. Its lock guards the book and is never held while
    the transport is called; it is notified when a handshake ends. `us` is the address of this end, known once the
    transport has an endpoint. `wanted` are the peers to dial whenever there is no link to them."""

    us: PeerAddress

    def __init__(
        self,
        transport: Transport,
        changed: threading.Condition,
        *,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.changed = changed
        self.clock = clock
        self._transport = transport
        self._random_bytes = random_bytes
        self.totals = Totals()
        self.wanted: dict[PeerKey, Wanted] = {}
        self._by_link: dict[Link, Peer] = {}
        self._linked: dict[PeerKey, Peer] = {}
        self._ledger: dict[PeerKey, PeerCounts] = {}  # in the order of their latest links
        self._complaints = Complaints(clock)

    def doubt(self) -> None:
        """Have the engine recover: news of the transport was noted half-way, and does not come again."""
        self._transport.in_doubt = True

    # -- who is there -----------------------------------------------------------------------------------------------

    def at(self, link: Link, *, dialled: bool = True) -> Peer:
        """Return the record of a link; make one when the link is new."""
        with self.changed:
            peer = self._by_link.get(link)
            if peer is None:
                nonce = self._random_bytes(NONCE_BYTES)
                peer = Peer(link, self._transport, nonce, dialled, self.clock(), self._complaints)
                self._by_link[link] = peer
            return peer

    def peers(self) -> list[Peer]:
        with self.changed:
            return list(self._by_link.values())

    def linked_at(self, endpoint: str, identity: PeerAddress | None = None) -> PeerAddress | None:
        """Return the linked peer that listens at an endpoint, or that has this identity, or None."""
        with self.changed:
            known = [peer.address for peer in self._linked.values() if peer.address is not None]
            key = None if identity is None else peer_key(identity)
            return next((peer for peer in known if endpoint in peer.endpoints or peer_key(peer) == key), None)

    def peer_at(self, key: PeerKey | None) -> Peer | None:
        """Return the record of the open link to a peer, or None."""
        with self.changed:
            return None if key is None else self._linked.get(key)

    def granted(self, addresses: Iterable[PeerAddress]) -> list[Peer | None]:
        """Return the records of the open links to these peers, None where there is none. The peers are no longer
        guests."""
        with self.changed:
            keys = list(map(peer_key, addresses))
            for key in keys:
                for counts in self.counts(key):
                    counts.granted = True
            return list(map(self._linked.get, keys))

    def tell(self, key: PeerKey, frame: bytes) -> None:
        """Send a frame to a peer. Without a link nothing is sent: both ends were told that it is gone."""
        if (peer := self.peer_at(key)) is not None:
            peer.post(frame)

    # -- links that open and close ----------------------------------------------------------------------------------

    def admit(self, peer: Peer, address: PeerAddress, layout: KVLayout) -> Peer | None:
        """Note that the link is open. Return the guest that has to give way for it, if there is one."""
        with self.changed:
            key = peer_key(address)
            peer.address = address
            peer.layout = layout
            peer.link.trusted = True
            counts = self._ledger[key] = self._ledger.pop(key, PeerCounts(address=address))
            counts.num_links += 1
            self._linked[key] = peer
            if key in self.wanted:
                self.wanted[key].attempts = 0
            self.changed.notify_all()
            linked = self._linked.keys() - self.wanted.keys()
            guests = [key for key, counts in self._ledger.items() if not counts.granted and key in linked]
            return self._linked[guests[0]] if len(guests) > MAX_GUESTS else None

    def refuse(self, peer: Peer, error: PDInferError) -> None:
        """Note why the link must not be open, or not any longer."""
        with self.changed:
            peer.refusal = error
            self.changed.notify_all()
        if not isinstance(error, Occupied):
            self._complaints.warn("the link to %s is refused or given up: %s", peer.link.endpoint, error)

    def give_up(self, peer: Peer, reason: str) -> None:
        """Close the link to a peer, which may come back over a new one."""
        self.refuse(peer, TransferError(reason))
        peer.fence()

    def abandon(self, peer: Peer) -> None:
        """Close a link that this end dialled in vain."""
        peer.fence()
        with self.changed:
            self._by_link.pop(peer.link, None)

    def close(self, link: Link, error: TransferError | None) -> tuple[PeerKey | None, TransferError]:
        """Note that the link is gone. Return which peer was there, None unless the link was open, and why it is
        gone."""
        with self.changed:
            peer = self._by_link.pop(link, None)
            if peer is None:
                peer = Peer(link, self._transport, b"", True, self.clock(), self._complaints)
            refusal = peer.refusal if isinstance(peer.refusal, TransferError) else None
            reason = refusal or error or TransferError("the connection was closed")
            peer.refusal = peer.refusal or reason
            if peer.dialled and peer.asked_for is None:
                self._by_link[link] = peer  # lost before the thread that dials could look: let it find out
            self.changed.notify_all()
            if peer.asked_for is not None and isinstance(peer.refusal, LayoutMismatch):
                self.wanted.pop(peer_key(peer.asked_for), None)
            if peer.address is None or self._linked.get(peer_key(peer.address)) is not peer:
                return None, reason
            key, now = peer_key(peer.address), self.clock()
            del self._linked[key]
            self._ledger[key].left_at = now
            self.forget_past(now)
            if (wanted := self.wanted.get(key)) is not None:
                wanted.lost_at, wanted.due, wanted.attempts = now, now + REDIAL_S[0], 1
            return key, reason

    def cut(self) -> None:
        """Close every link, whatever an interrupted call has left of the book. All wanted peers become due."""
        links = {*self._by_link, *(peer.link for peer in self._linked.values())}
        for link in links:
            self._transport.fence(link)
        with self.changed:
            self._by_link = {link: peer for link, peer in self._by_link.items() if link not in links}
            self._linked = {key: peer for key, peer in self._linked.items() if peer.link not in links}
            for wanted in self.wanted.values():
                wanted.lost_at = wanted.due = self.clock()

    # -- whom this end dials ----------------------------------------------------------------------------------------

    def want(self, address: PeerAddress, timeout_s: float) -> Wanted:
        """Note that the peer is to be dialled whenever there is no link to it. With `timeout_s` 0 it is due at once,
        otherwise the caller dials until the time is over."""
        with self.changed:
            now = self.clock()
            wanted = self.wanted.setdefault(peer_key(address), Wanted(address, now, math.inf))
            wanted.address, wanted.lost_at = address, now + timeout_s
            if timeout_s <= 0:
                wanted.due = now
            return wanted

    def forget_at(self, endpoint: str, now_there: PeerAddress) -> None:
        """Stop dialling the peers that listened at an endpoint where another one answers now."""
        for key, wanted in list(self.wanted.items()):
            if endpoint in wanted.address.endpoints and key != peer_key(now_there):
                del self.wanted[key]

    def is_dialling(self, key: PeerKey) -> bool:
        """Return whether this end is dialling the peer and has no answer yet."""
        with self.changed:
            return any(peer.is_pending and peer.key == key for peer in self._by_link.values())

    def redial_in_s(self) -> float:
        """Return in how many seconds the next missing peer is due, infinity when none is missing."""
        if self.wanted.keys() <= self._linked.keys():
            return math.inf
        missing = (wanted.due for key, wanted in list(self.wanted.items()) if key not in self._linked)
        return min(missing, default=math.inf) - self.clock()

    # -- what it tells ----------------------------------------------------------------------------------------------

    def counts(self, key: PeerKey) -> list[PeerCounts]:
        """Return the counts of a peer, if it is or was linked. They are to be changed under the lock."""
        return [self._ledger[key]] if key in self._ledger else []

    def forget_past(self, now: float) -> None:
        with self.changed:
            past = [key for key in self._ledger if key not in self._linked and key not in self.wanted]
            past.sort(key=self._left_at)
            late = [key for key in past if self._left_at(key) < now - PAST_S]
            for key in past[: max(len(late), len(past) - MAX_PAST)]:
                del self._ledger[key]

    def _left_at(self, key: PeerKey) -> float:
        return self._ledger[key].left_at

    def stats(self, inflight: Mapping[PeerKey, int], window_bytes: int) -> tuple[PeerStats, ...]:
        """Return the stats of every peer that is or was lately linked. `inflight` holds the bytes on their way to
        each."""
        with self.changed:
            return tuple(
                PeerStats(
                    address=counts.address,
                    connected=key in self._linked,
                    bytes_sent=counts.bytes_sent,
                    bytes_received=counts.bytes_received,
                    mb_per_s=counts.bytes_received / 1e6 / counts.receive_s if counts.receive_s else 0.0,
                    inflight_bytes=inflight.get(key, 0),
                    window_bytes=window_bytes,
                    retries=counts.num_links - 1,
                    frames_dropped=counts.frames_dropped,
                    step_age_s=self._step_age_s(key),
                )
                for key, counts in self._ledger.items()
            )

    def snapshot(self) -> tuple[LinkSnapshot, ...]:
        with self.changed:
            return tuple(peer.snapshot() for peer in self._by_link.values())

    def _step_age_s(self, key: PeerKey) -> float | None:
        peer = self.peer_at(key)
        return None if peer is None or peer.stepped_at is None else self.clock() - peer.stepped_at
