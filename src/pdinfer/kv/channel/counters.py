"""What moved between an end and each of its peers, over all the links they had."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from pdinfer.stats import ChannelStats, PeerStats
from pdinfer.types import PeerAddress, PeerKey, peer_key

MAX_PAST = 32
"""Peers without a link whose counts are still told, those that went last: each step's report carries them."""
PAST_S = 120.0
"""For how long it is: twice what a lost peer is dialled for."""


@attrs.define(eq=False)
class PeerCounters:
    """The counts of one peer. `granted` once a room was made for it or of it: until then it is a guest, whom this host
    has given nothing to do."""

    address: PeerAddress
    granted: bool = False
    left_at: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    receive_s: float = 0.0
    frames_dropped: int = 0
    retries: int = 0

    def stats(self, *, connected: bool, inflight_bytes: int, window_bytes: int, step_age_s: float | None) -> PeerStats:
        """A snapshot, with what only others know."""
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
    """The counts of one end, over all its peers: the fields of ChannelStats, to add to under the channel's lock."""

    bytes_sent: int = 0
    bytes_received: int = 0
    writes_sent: int = 0
    writes_received: int = 0
    receive_s: float = 0.0
    frames_dropped: int = 0
    writes_damaged: int = 0

    def stats(self, peers: tuple[PeerStats, ...]) -> ChannelStats:
        """A snapshot."""
        return ChannelStats(**attrs.asdict(self), peers=peers)


class Ledger(dict[PeerKey, PeerCounters]):
    """The counts of every peer that is welcome or was lately, in the order in which they were last met."""

    def meet(self, address: PeerAddress) -> None:
        """A peer has a link, for the first time or again."""
        key = peer_key(address)
        counters = self.pop(key, None)
        if counters is None:
            counters = PeerCounters(address)
        else:
            counters.retries += 1
        self[key] = counters

    def grant(self, key: PeerKey) -> None:
        """This host has given the peer something to do."""
        if key in self:
            self[key].granted = True

    def leave(self, key: PeerKey, now: float) -> None:
        """The peer's link is closed."""
        if key in self:
            self[key].left_at = now

    def forget(self, now: float, kept: Collection[PeerKey]) -> None:
        """Drops who is past, but for those that went last; `kept` have a link or are dialled."""
        past = sorted((key for key in self if key not in kept), key=lambda key: self[key].left_at)
        late = [key for key in past if self[key].left_at < now - PAST_S]
        for key in past[: max(len(late), len(past) - MAX_PAST)]:
            del self[key]

    def guests(self, linked: Collection[PeerKey]) -> list[PeerKey]:
        """Those of `linked` that were given nothing to do yet, the one met first in front."""
        return [key for key, counters in self.items() if not counters.granted and key in linked]
