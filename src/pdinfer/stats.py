"""Loads and counts of engines, channels and Pairings, as plain values. Nothing here acts by itself.

The bounds in their types apply to what a peer sends (`pdinfer.bounds`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Annotated, TypeVar, overload

import attrs
from msgspec import Meta

from pdinfer.bounds import FEW, MANY, Count, Name, PageSize, Positive, Rate, Seconds, Text
from pdinfer.types import FinishReason, Link, PeerAddress
from pdinfer.values import Value, as_table

L = TypeVar("L", bound="EngineLoad")


@attrs.frozen(kw_only=True)
class PeerStats(Value):
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
class ChannelStats(Value):
    """Counts since the channel was made. `receive_s` is the sum of the times from each payload's announcement to its
    last byte."""

    _repr_html_ = as_table

    bytes_sent: Count = 0
    bytes_received: Count = 0
    writes_sent: Count = 0
    writes_received: Count = 0
    receive_s: Seconds = 0.0
    frames_dropped: Count = 0
    writes_damaged: Count = 0
    peers: Annotated[tuple[PeerStats, ...], MANY] = ()


@attrs.frozen(kw_only=True)
class PrefillCost(Value):
    """The time that steps of a prefill take, fitted to the recent ones: `step_s` for each, and `token_s` for each token
    that it computes. A step has at most `chunk_tokens`, or any number of them when that is 0. Zeros mean that no step
    was measured."""

    step_s: Seconds = 0.0
    token_s: Seconds = 0.0
    chunk_tokens: Count = 0

    def seconds(self, num_tokens: float) -> float:
        """Return how many seconds the engine computes `num_tokens`, in as few steps as they need."""
        num_steps = max(1.0, num_tokens / self.chunk_tokens) if self.chunk_tokens else 1.0
        return num_steps * self.step_s + num_tokens * self.token_s if num_tokens else 0.0


@attrs.frozen(kw_only=True)
class DecodeCost(Value):
    """The time that steps of a decode take, fitted to the recent ones: `step_s` for each, `sequence_s` for each
    sequence in it and `token_s` for each token of their contexts. Zeros mean that no step was measured."""

    step_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    token_s: Seconds = 0.0

    def seconds(self, num_sequences: float, num_context_tokens: float) -> float:
        """Return how many seconds a step of these sequences takes, whose contexts have so many tokens together."""
        return self.step_s + num_sequences * self.sequence_s + num_context_tokens * self.token_s


MAX_SIZE_CLASSES = 54
"""One more than the bits of the largest count."""
_Classes = Annotated[tuple[Count, ...], Meta(max_length=MAX_SIZE_CLASSES)]


@attrs.frozen
class QueuedSizes(Value):
    """The prompts that an engine has not finished, by size: the tokens that are still to be computed for them, without
    those that its pages hold. Item i of both is about sizes of i bits: from 2**(i - 1) up to 2**i, 2**i excluded."""

    num_requests: _Classes = ()
    num_tokens: _Classes = ()

    @classmethod
    def of(cls, sizes: Iterable[int]) -> QueuedSizes:
        """Count prompts of these sizes."""
        return cls().plus(sizes)

    def plus(self, sizes: Iterable[int]) -> QueuedSizes:
        """Return these prompts and others of the given sizes."""
        num_requests, num_tokens = list(self.num_requests), list(self.num_tokens)
        for size in sizes:
            bits = size.bit_length()
            if (missing := bits + 1 - len(num_tokens)) > 0:
                num_requests += [0] * missing
                num_tokens += [0] * missing
            num_requests[bits] += 1
            num_tokens[bits] += size
        return QueuedSizes(tuple(num_requests), tuple(num_tokens))


@attrs.frozen(kw_only=True, slots=False)
class EngineLoad(Value):
    """The common part of both engines' snapshots.

    `num_tokens` were computed in `busy_s` seconds of model steps since the engine was made. `providers` are (op,
    provider) pairs. `step_age_s` is how long ago the engine's last step ended, as far as its client knows. It shows an
    engine that is alive and makes no progress, and is None for an engine in this process, which its host steps. Cached
    pages hold what ended requests left, and are evicted when pages are needed. `prefix_query_tokens` were looked up
    there, and `prefix_hit_tokens` of them were found. `placement_epoch` is the epoch of the placement of experts in
    use. `is_placement_staged` says whether another one is on its way, and `placement_error` why the last one was
    dropped. A token's latents in all layers have `token_bytes`, or 0 when they are not known.

    What a policy is shown leaves `transport`, `providers` and `kv` empty: they take long, and it does not need them."""

    _repr_html_ = as_table

    address: PeerAddress
    num_free_pages: Count
    num_total_pages: Positive
    page_size: PageSize
    token_bytes: Count = 0
    num_tokens: Count = 0
    busy_s: Seconds = 0.0
    transport: Name = ""
    providers: Annotated[tuple[tuple[Name, Name], ...], FEW] = ()
    kv: ChannelStats = ChannelStats()
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


@attrs.frozen(kw_only=True, slots=False)
class PrefillLoad(EngineLoad):
    """Snapshot of a prefill engine. `num_queued_tokens` are prompt tokens that are still to be computed, and those of
    prompts that wait to start count in full. `queued` has them by size, without those that are cached. `unsent_bytes`
    were pushed and not sent yet. `cost` says how long its steps take."""

    num_queued_requests: Count
    num_queued_tokens: Count
    unsent_bytes: Count = 0
    queued: QueuedSizes = QueuedSizes()
    cost: PrefillCost = PrefillCost()


@attrs.frozen(kw_only=True, slots=False)
class DecodeLoad(EngineLoad):
    """Snapshot of a decode engine. `num_running_tokens` is the context held by running and granted sequences.
    `num_draft_tokens` were proposed since the engine was made, and `num_accepted_tokens` of them were the model's own
    choice. `accept_length` is the average number of tokens that a sequence got in the last step: 1 without drafts, 0
    before the first step. At most `max_running_requests` hold pages at a time, or any number when that is 0. `cost`
    says how long its steps take."""

    num_waiting_requests: Count
    num_waiting_tokens: Count
    num_granted_requests: Count
    num_running_requests: Count
    num_running_tokens: Count
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    accept_length: Rate = 0.0
    max_running_requests: Count = 0
    cost: DecodeCost = DecodeCost()


def changed(load: L, **values: object) -> L:
    """Return the load with other values. It is what `attrs.evolve` does, ten times as fast: every choice of a pair
    changes two loads."""
    new = object.__new__(type(load))
    object.__setattr__(new, "__dict__", load.__dict__ | values)
    return new


def with_queued(load: PrefillLoad, num_tokens: int, sizes: Collection[int]) -> PrefillLoad:
    """Return the load with more prompts that wait to start, of `num_tokens` in all. `sizes` are what each has to
    compute."""
    return changed(
        load,
        num_queued_requests=load.num_queued_requests + len(sizes),
        num_queued_tokens=load.num_queued_tokens + num_tokens,
        queued=load.queued.plus(sizes),
    )


def with_waiting(load: DecodeLoad, num_tokens: Collection[int]) -> DecodeLoad:
    """Return the load with more requests that wait, each of so many tokens."""
    return changed(
        load,
        num_waiting_requests=load.num_waiting_requests + len(num_tokens),
        num_waiting_tokens=load.num_waiting_tokens + sum(num_tokens),
    )


def name_of(address: PeerAddress) -> str:
    """Return the name of an engine in metrics and records, and in the text of its address: the beginning of its id."""
    return address.engine_id.hex()[:8]


LinksByEnds = Mapping[PeerAddress, Mapping[PeerAddress, Link]]
"""The links of each prefill by their decodes."""


class Links(Sequence[Link]):
    """Links in a fixed order, which are also found by their ends. Equal to a tuple of the same links."""

    def __init__(self, links: Iterable[Link] = (), *, by_ends: LinksByEnds | None = None) -> None:
        if by_ends is None:
            found: dict[PeerAddress, dict[PeerAddress, Link]] = {}
            for link in links:
                found.setdefault(link.prefill, {})[link.decode] = link
            by_ends = found
        self.by_ends = by_ends

    @cached_property
    def _all(self) -> tuple[Link, ...]:
        return tuple(link for row in self.by_ends.values() for link in row.values())

    @overload
    def __getitem__(self, index: int) -> Link: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Link, ...]: ...

    def __getitem__(self, index: int | slice) -> Link | tuple[Link, ...]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __bool__(self) -> bool:
        return any(self.by_ends.values())

    def __eq__(self, other: object) -> bool:
        return self._all == (other._all if isinstance(other, Links) else other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return f"Links({self._all!r})"

    @classmethod
    def of(cls, links: Sequence[Link]) -> Links:
        """Return links that are found by their ends."""
        return links if isinstance(links, Links) else cls(links)

    def between(self, prefill: PeerAddress, decode: PeerAddress) -> Link | None:
        """Return the link between two ports, or None when they do not reach each other."""
        row = self.by_ends.get(prefill)
        return None if row is None else row.get(decode)

    def among(self, prefills: AbstractSet[PeerAddress], decodes: AbstractSet[PeerAddress]) -> Links:
        """Return the links between these ports."""
        return Links(
            by_ends={
                prefill: row if row.keys() <= decodes else {at: link for at, link in row.items() if at in decodes}
                for prefill, row in self.by_ends.items()
                if prefill in prefills
            }
        )

    def loaded(self, prefill: PeerAddress, decode: PeerAddress, num_bytes: int) -> Links:
        """Return the same links with so many bytes more for the one between two ports, if they reach each other."""
        link = self.between(prefill, decode)
        if link is None or not num_bytes:
            return self
        more = Link(
            prefill=prefill,
            decode=decode,
            bytes_per_s=link.bytes_per_s,
            inflight_bytes=link.inflight_bytes,
            backlog_bytes=link.backlog_bytes + num_bytes,
        )
        return Links(by_ends={**self.by_ends, prefill: {**self.by_ends[prefill], decode: more}})


@attrs.frozen(kw_only=True)
class LostPort(Value):
    """A port that was lost `age_s` seconds ago, and the reason. `is_back` says whether it is in use again."""

    address: PeerAddress
    role: str
    age_s: float
    reason: str
    is_back: bool


@attrs.frozen(kw_only=True)
class PairingStats(Value):
    """The work that a Pairing has, and what it did since it was made.

    `ended` counts requests by the reason in their last event. `num_retries` counts grants after a request's first one
    at its decode, `num_reroutes` requests that got another prefill, and `num_moved` requests that got another decode.
    `num_switches` counts ports that have changed their role.
    `links_down` are the (prefill, decode) pairs that are not chosen because their channels have no link. `ports_lost`
    are the newest of `num_ports_lost` losses, oldest first. The ports in `ports_away` are lost and may come back.
    `loads` are those of all ports in use, as policies see them. `together` has the ports of each engine that has
    several, the leaders of its ranks: they change their role together.
    `refused` counts the requests for which `submit` raised Overloaded, by reason."""

    _repr_html_ = as_table

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
    loads: tuple[PrefillLoad | DecodeLoad, ...] = ()
    refused: tuple[tuple[str, int], ...] = ()
    num_switches: int = 0
    together: tuple[tuple[PeerAddress, ...], ...] = ()
