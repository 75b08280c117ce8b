"""Loads and counts of engines, channels and Pairings, as plain values. Nothing here acts by itself.

The bounds in their types apply to what a peer sends (`pdinfer.bounds`).
"""

from __future__ import annotations

from typing import Annotated

import attrs

from pdinfer.bounds import (
    FEW,
    MANY,
    Count,
    Name,
    PageSize,
    Positive,
    Rate,
    Seconds,
    Text,
)
from pdinfer.types import FinishReason, PeerAddress


@attrs.frozen(kw_only=True)
class PeerStats:
    """One peer of a channel. Bytes, retries and dropped frames count since it was first connected. `connected` says
    whether there is an open link now. `mb_per_s` is the average speed while its payloads arrived. `inflight_bytes` were
    pushed and have not left our pages yet; above `window_bytes`, prefill takes no more prompts for this peer.
    `step_age_s` is how long ago the peer's engine looked at its channel: the age in its last beat plus the time since,
    None before the first beat."""

    address: PeerAddress
    connected: bool = False
    bytes_sent: Count = 0
    bytes_received: Count = 0
    mb_per_s: Rate = 0.0
    inflight_bytes: Count = 0
    window_bytes: Count = 0
    retries: Count = 0
    frames_dropped: Count = 0
    step_age_s: Seconds | None = None


@attrs.frozen(kw_only=True)
class ChannelStats:
    """Counts since the channel was made. `receive_s` is the sum of the times from each payload's announcement to its
    last byte."""

    bytes_sent: Count = 0
    bytes_received: Count = 0
    writes_sent: Count = 0
    writes_received: Count = 0
    receive_s: Seconds = 0.0
    frames_dropped: Count = 0
    writes_damaged: Count = 0
    peers: Annotated[tuple[PeerStats, ...], MANY] = ()


@attrs.frozen(kw_only=True)
class EngineLoad:
    """What the snapshots of both engines have in common.

    `num_tokens` were computed in `busy_s` seconds of model steps since the engine was made. `providers` are (op,
    provider) pairs. `step_age_s` is how long ago the engine's last step ended, as far as its client knows. It shows an
    engine that is alive and makes no progress, and is None for an engine in this process, which its host steps. Cached
    pages hold what ended requests left, and are evicted when pages are needed. `prefix_query_tokens` were looked up
    there, and `prefix_hit_tokens` of them were found. `placement_epoch` is the epoch of the placement of experts in
    use. `is_placement_staged` says whether another one is on its way, and `placement_error` why the last one was
    dropped."""

    address: PeerAddress
    num_free_pages: Count
    num_total_pages: Positive
    page_size: PageSize
    num_tokens: Count
    busy_s: Seconds
    transport: Name
    providers: Annotated[tuple[tuple[Name, Name], ...], FEW]
    kv: ChannelStats
    step_age_s: Seconds | None = None
    num_cached_pages: Count = 0
    prefix_query_tokens: Count = 0
    prefix_hit_tokens: Count = 0
    placement_epoch: Count = 0
    is_placement_staged: bool = False
    placement_error: Text = ""

    @property
    def num_available_pages(self) -> int:
        """Pages that a request can have now."""
        return self.num_free_pages + self.num_cached_pages

    @property
    def tokens_per_s(self) -> float:
        """Average speed while computing; 0 before the first step."""
        return self.num_tokens / self.busy_s if self.busy_s else 0.0


@attrs.frozen(kw_only=True)
class PrefillLoad(EngineLoad):
    """Snapshot of a prefill engine. `num_queued_tokens` are prompt tokens that are still to be computed, and
    `unsent_bytes` were pushed and not sent yet."""

    num_queued_requests: Count
    num_queued_tokens: Count
    unsent_bytes: Count


@attrs.frozen(kw_only=True)
class DecodeLoad(EngineLoad):
    """Snapshot of a decode engine. `num_running_tokens` is the context held by running and granted sequences.
    `num_draft_tokens` were proposed since the engine was made, and `num_accepted_tokens` of them were the model's own
    choice. `accept_length` is the average number of tokens that a sequence got in the last step: 1 without drafts, 0
    before the first step."""

    num_waiting_requests: Count
    num_waiting_tokens: Count
    num_granted_requests: Count
    num_running_requests: Count
    num_running_tokens: Count
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    accept_length: Rate = 0.0


@attrs.frozen(kw_only=True)
class LostPort:
    """A port that was lost `age_s` seconds ago, and the reason. `is_back` says whether it is in use again."""

    address: PeerAddress
    role: str
    age_s: float
    reason: str
    is_back: bool


@attrs.frozen(kw_only=True)
class PairingStats:
    """What a Pairing has to do, and what it did since it was made.

    `ended` counts requests by the reason in their last event. `num_retries` counts grants after a request's first one
    at its decode, `num_reroutes` requests that got another prefill, and `num_moved` requests that got another decode.
    `links_down` are the (prefill, decode) pairs that are not chosen because their channels have no link. `ports_lost`
    are the newest of `num_ports_lost` losses, oldest first. The ports in `ports_away` are lost and may come back.
    """

    num_queued_requests: int
    num_unfinished_requests: int
    ended: tuple[tuple[FinishReason, int], ...]
    num_retries: int
    num_reroutes: int
    num_moved: int
    num_ports_lost: int
    links_down: tuple[tuple[PeerAddress, PeerAddress], ...]
    ports_lost: tuple[LostPort, ...] = ()
    ports_away: tuple[PeerAddress, ...] = ()
