"""The book of links: which there are, who is at the other end of each, and which peers this end wants to reach.

It decides nothing and sends nothing. Its lock is that of the channel's condition, so that what a link means for rooms
can be settled together with it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping

from pdinfer.errors import LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel.complaints import Complaints
from pdinfer.kv.channel.counters import Ledger, PeerCounters
from pdinfer.kv.channel.frame_mac import NONCE_BYTES
from pdinfer.kv.channel.peer import Occupied, Peer, Wanted
from pdinfer.kv.channel.snapshot import LinkSnapshot
from pdinfer.kv.transports.base import Link, Transport
from pdinfer.stats import PeerStats
from pdinfer.types import PeerAddress, PeerKey, peer_key

REDIAL_S = (0.1, 5.0)
"""Seconds before the first and, doubling, before every later attempt to reach a peer again."""
MAX_GUESTS = 256
"""Links to peers that this end neither dialled nor gave anything to do: past it the oldest gives way to a newcomer."""


class LinkBook:
    """The links of one channel. `changed` is the channel's condition: its lock guards the book, is never held while the
    transport is called, and is notified when a handshake ends. `us` is this end, known once the transport has an
    endpoint."""

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
        self._by_link: dict[Link, Peer] = {}
        self._links: dict[PeerKey, Link] = {}
        self._wanted: dict[PeerKey, Wanted] = {}
        self._ledger = Ledger()
        self._complaints = Complaints(clock)

    # -- who is there -----------------------------------------------------------------------------------------------

    def at(self, link: Link, *, dialled: bool = True) -> Peer:
        """The record of a link, made when it is new."""
        with self.changed:
            peer = self._by_link.get(link)
            if peer is None:
                nonce = self._random_bytes(NONCE_BYTES)
                peer = Peer(link, self._transport, nonce, dialled, self.clock(), self._complaints)
                self._by_link[link] = peer
            return peer

    def peers(self) -> list[Peer]:
        """The records of all links, open or not."""
        with self.changed:
            return list(self._by_link.values())

    def link_to(self, key: PeerKey) -> Link | None:
        """The open link to a welcome peer."""
        with self.changed:
            return self._links.get(key)

    def peer_at(self, key: PeerKey) -> Peer | None:
        """The record of the open link to a welcome peer."""
        with self.changed:
            return self._by_link.get(self._links[key]) if key in self._links else None

    def granted(self, addresses: Iterable[PeerAddress]) -> list[Peer | None]:
        """The records of these peers' links, None where there is none; they are guests no more."""
        with self.changed:
            keys = list(map(peer_key, addresses))
            for key in keys:
                self._ledger.grant(key)
            return list(map(self.peer_at, keys))

    def tell(self, key: PeerKey, frame: bytes) -> None:
        """Sends to a peer; one that is gone needs no telling, since `closed` has said it on both sides."""
        if (peer := self.peer_at(key)) is not None:
            peer.post(frame)

    # -- links that open and close ----------------------------------------------------------------------------------

    def admit(self, peer: Peer, address: PeerAddress, layout_id: bytes) -> Peer | None:
        """The link is open; the guest who must give way for it, if any."""
        with self.changed:
            key = peer_key(address)
            peer.address = address
            peer.layout_id = layout_id
            peer.link.trusted = True
            self._links[key] = peer.link
            self._ledger.meet(address)
            if key in self._wanted:
                self._wanted[key].attempts = 0
            self.changed.notify_all()
            guests = self._ledger.guests(self._links.keys() - self._wanted.keys())
            return self.peer_at(guests[0]) if len(guests) > MAX_GUESTS else None

    def refuse(self, peer: Peer, error: PDInferError) -> None:
        """The link is not to be open, or no longer, because of `error`."""
        with self.changed:
            peer.refusal = error
            self.changed.notify_all()
        if not isinstance(error, Occupied):
            self._complaints.warn("the link to %s is refused or given up: %s", peer.link.endpoint, error)

    def give_up(self, peer: Peer, reason: str) -> None:
        """Closes the link to a peer; it may come back over a new one."""
        self.refuse(peer, TransferError(reason))
        peer.fence()

    def abandon(self, peer: Peer) -> None:
        """Closes a link that this end dialled in vain."""
        peer.fence()
        with self.changed:
            self._by_link.pop(peer.link, None)

    def close(self, link: Link, error: TransferError | None) -> tuple[PeerKey | None, TransferError]:
        """The link is gone: who was there, if anyone welcome was, and why it is gone."""
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
                self._wanted.pop(peer_key(peer.asked_for), None)
            if peer.address is None or self._links.get(peer_key(peer.address)) is not link:
                return None, reason
            key, now = peer_key(peer.address), self.clock()
            del self._links[key]
            self._ledger.leave(key, now)
            self.forget_past(now)
            if key in self._wanted:
                wanted = self._wanted[key]
                wanted.lost_at, wanted.due, wanted.attempts = now, now + REDIAL_S[0], 1
            return key, reason

    def cut(self) -> None:
        """Closes every link, whatever an interrupted call has left of the book, so that the wanted peers are due."""
        for link in (links := list(self._by_link)):
            self._transport.fence(link)
        with self.changed:
            self._by_link = {link: peer for link, peer in self._by_link.items() if link not in links}
            self._links = {key: link for key, link in self._links.items() if link not in links}
            for wanted in self._wanted.values():
                wanted.lost_at = wanted.due = self.clock()

    # -- whom this end dials ----------------------------------------------------------------------------------------

    def want(self, address: PeerAddress, timeout_s: float) -> Wanted:
        """From now on the peer is dialled when there is no link to it: at once with `timeout_s` 0, else by its caller
        until the time is over."""
        with self.changed:
            now = self.clock()
            wanted = self._wanted.setdefault(peer_key(address), Wanted(address, now, math.inf))
            wanted.address, wanted.lost_at = address, now + timeout_s
            if timeout_s <= 0:
                wanted.due = now
            return wanted

    def unwant(self, key: PeerKey) -> None:
        """The peer is dialled no more."""
        with self.changed:
            self._wanted.pop(key, None)

    def is_wanted(self, key: PeerKey) -> bool:
        """Whether the peer is dialled when there is no link to it."""
        return key in self._wanted

    def wants(self, wanted: Wanted) -> bool:
        """Whether the peer is still to be dialled."""
        return self._wanted.get(peer_key(wanted.address)) is wanted

    def wanted(self) -> list[Wanted]:
        """The peers that are to be dialled when there is no link to them."""
        return list(self._wanted.values())

    def is_dialling(self, key: PeerKey) -> bool:
        """Whether a link to the peer is on its way, dialled by this end."""
        with self.changed:
            return any(peer.is_pending and peer.key == key for peer in self._by_link.values())

    def begin_redial(self, wanted: Wanted) -> bool:
        """Whether the peer is due; if so, the next attempt comes later than this one did."""
        key = peer_key(wanted.address)
        with self.changed:
            now = self.clock()
            if not self.wants(wanted) or key in self._links or self.is_dialling(key) or now < wanted.due:
                return False
            low, high = REDIAL_S
            wanted.due = now + min(high, low * 2.0**wanted.attempts)
            wanted.attempts += 1
            return True

    # -- what it tells ----------------------------------------------------------------------------------------------

    def counters(self, key: PeerKey) -> PeerCounters | None:
        """The counts of a peer that was welcome once; for the channel to add to, under its lock."""
        return self._ledger.get(key)

    def forget_past(self, now: float) -> None:
        """Drops the counts of peers that are long gone."""
        with self.changed:
            self._ledger.forget(now, self._links.keys() | self._wanted.keys())

    def stats(self, inflight: Mapping[PeerKey, int], window_bytes: int) -> tuple[PeerStats, ...]:
        """A snapshot of every peer that is welcome or was lately; `inflight` are the bytes on their way to each."""
        with self.changed:
            return tuple(
                counters.stats(
                    connected=key in self._links,
                    inflight_bytes=inflight.get(key, 0),
                    window_bytes=window_bytes,
                    step_age_s=self._step_age_s(key),
                )
                for key, counters in self._ledger.items()
            )

    def snapshot(self) -> tuple[LinkSnapshot, ...]:
        """Every link, open or not."""
        with self.changed:
            return tuple(
                LinkSnapshot(
                    endpoint=peer.link.endpoint,
                    address=peer.address,
                    num_frames_waiting=peer.num_waiting,
                    num_writes_arriving=len(peer.arriving),
                )
                for peer in self._by_link.values()
            )

    def _step_age_s(self, key: PeerKey) -> float | None:
        peer = self.peer_at(key)
        return None if peer is None or peer.stepped_at is None else self.clock() - peer.stepped_at
