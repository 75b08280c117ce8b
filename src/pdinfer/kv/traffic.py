"""What moved between an end and each of its peers, over all the links they had."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from pdinfer.kv.protocol import PeerKey, peer_key
from pdinfer.types import ChannelStats, PeerAddress, PeerStats

MAX_REMEMBERED = 1024
"""Peers whose traffic is still told; past it those that went first are forgotten."""


@attrs.define(eq=False)
class Traffic:
    """The counts of one peer."""

    address: PeerAddress
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


class Ledger(dict[PeerKey, Traffic]):
    """The traffic of every peer that was welcome once, in the order in which they were last met."""

    def meet(self, address: PeerAddress, linked: Collection[PeerKey]) -> None:
        """A peer has a link, for the first time or again; `linked` are all that have one."""
        key = peer_key(address)
        traffic = self.pop(key, None)
        if traffic is None:
            traffic = Traffic(address)
        else:
            traffic.retries += 1
        self[key] = traffic
        gone = [key for key in self if key not in linked]
        for key in gone[: max(0, len(self) - MAX_REMEMBERED)]:
            del self[key]
