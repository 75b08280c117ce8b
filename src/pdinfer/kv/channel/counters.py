"""What has moved between an end and each of its peers, over all the links they have had."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from pdinfer.stats import ChannelStats, PeerStats
from pdinfer.types import PeerAddress, PeerKey, peer_key

MAX_PAST = 32
"""How many peers without a link still appear in the stats, the latest to leave first. Every step's report carries
them."""
PAST_S = 120.0
"""How long such a peer appears there: twice as long as a lost peer is dialled."""


@attrs.define(eq=False)
class PeerCounters:
    """The counts of one peer. `granted` is set once there has been a room between it and this end. Until then the peer
    is a guest: this host has given it nothing to do."""

    address: PeerAddress
    granted: bool = False
    left_at: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    receive_s: float = 0.0
    frames_dropped: int = 0
    retries: int = 0

    def stats(self, *, connected: bool, inflight_bytes: int, window_bytes: int, step_age_s: float | None) -> PeerStats:
        """Return a snapshot, completed with what the counters do not know."""
        return PeerStats(
            address=self.address,
            connected=connected,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            mb_per_s=self.bytes_received / 1e6 / self.receive_s if self.receive_s else 0.0,
            inflight_bytes=inflight_bytes,
            window_bytes=window_bytes,
            retries=self.retries,
            frames_dropped=self.frames_dropped,
            step_age_s=step_age_s,
        )


@attrs.define(eq=False)
class Totals:
    """The counts of one end over all its peers: the fields of ChannelStats. They change under the channel's lock."""

    bytes_sent: int = 0
    bytes_received: int = 0
    writes_sent: int = 0
    writes_received: int = 0
    receive_s: float = 0.0
    frames_dropped: int = 0
    writes_damaged: int = 0

    def stats(self, peers: tuple[PeerStats, ...]) -> ChannelStats:
        """Return a snapshot."""
        return ChannelStats(**attrs.asdict(self), peers=peers)


class Ledger(dict[PeerKey, PeerCounters]):
    """The counts of every peer that is linked or was linked lately, in the order of their latest links."""

    def meet(self, address: PeerAddress) -> None:
        """Note that a peer has a link, for the first time or again."""
        key = peer_key(address)
        counters = self.pop(key, None)
        if counters is None:
            counters = PeerCounters(address)
        else:
            counters.retries += 1
        self[key] = counters

    def grant(self, key: PeerKey) -> None:
        """Note that this host has given the peer something to do."""
        if key in self:
            self[key].granted = True

    def leave(self, key: PeerKey, now: float) -> None:
        """Note that the peer's link is closed."""
        if key in self:
            self[key].left_at = now

    def forget(self, now: float, kept: Collection[PeerKey]) -> None:
        """Drop the counts of peers that left long ago. Peers in `kept` have a link or are being dialled, and stay."""
        past = sorted((key for key in self if key not in kept), key=lambda key: self[key].left_at)
        late = [key for key in past if self[key].left_at < now - PAST_S]
        for key in past[: max(len(late), len(past) - MAX_PAST)]:
            del self[key]

    def guests(self, linked: Collection[PeerKey]) -> list[PeerKey]:
        """Return the peers in `linked` that have been given nothing to do, the longest linked first."""
        return [key for key, counters in self.items() if not counters.granted and key in linked]
