"""What an engine shows of its requests: all that it holds at one moment, for tests and for finding faults, and in its
trace their stages, their bytes on the channel, and arrows between engines. No engine acts upon it.

Engines call the functions only when they have a trace."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from pdinfer.engine.sequence import Prompt, Sequence
from pdinfer.scheduling.decode import DecodeScheduler
from pdinfer.trace import CHANNEL, REQUESTS, Trace, Values
from pdinfer.types import FinishReason, PageGrant, PeerAddress, Request
from pdinfer.values import Value


@attrs.frozen(kw_only=True)
class PromptSnapshot(Value):
    """A request at prefill. `room` is where its hand-off goes. `pages` is its page table, empty before it starts."""

    request: Request
    room: bytes
    pages: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt) -> PromptSnapshot:
        return cls(request=prompt.request, room=prompt.grant.room, pages=tuple(prompt.pages))


@attrs.frozen(kw_only=True)
class PrefillSnapshot(Value):
    """The prompts of a prefill engine: those that have not started, those under way, and those that were handed off and
    have bytes that have not left."""

    queued: tuple[PromptSnapshot, ...]
    active: tuple[PromptSnapshot, ...]
    sending: tuple[PromptSnapshot, ...]


@attrs.frozen(kw_only=True)
class SequenceSnapshot(Value):
    """A request at decode. `room` is that of its grant, while it has one. `pages` is its page table, and `spare` are
    the pages kept for its growth. `attempts` counts its grants."""

    request_id: str
    request: Request
    writers: tuple[PeerAddress, ...]
    room: bytes | None
    pages: tuple[int, ...]
    spare: tuple[int, ...]
    attempts: int

    @classmethod
    def of(cls, sequence: Sequence) -> SequenceSnapshot:
        return cls(
            request_id=sequence.request_id,
            request=sequence.request,
            writers=sequence.writers,
            room=None if sequence.grant is None else sequence.grant.room,
            pages=tuple(sequence.pages),
            spare=tuple(sequence.spare),
            attempts=sequence.attempts,
        )


@attrs.frozen(kw_only=True)
class DecodeSnapshot(Value):
    """The requests of a decode engine, by what they have: no page, granted pages, or pages with their whole context.
    `orphans` are the rooms that were given up and have writers that have not stopped yet."""

    waiting: tuple[SequenceSnapshot, ...]
    granted: tuple[SequenceSnapshot, ...]
    running: tuple[SequenceSnapshot, ...]
    orphans: frozenset[bytes]

    @classmethod
    def of(cls, scheduler: DecodeScheduler[Sequence], orphans: Iterable[bytes]) -> DecodeSnapshot:
        lines = scheduler.waiting, scheduler.granted, scheduler.running
        waiting, granted, running = (tuple(map(SequenceSnapshot.of, line)) for line in lines)
        return cls(waiting=waiting, granted=granted, running=running, orphans=frozenset(orphans))


def show_prompt(trace: Trace, prompt: Prompt, now: float) -> None:
    """Show a prompt that prefill has handed off. The arrow to decode begins here, unless it was aborted."""
    marks = (("queue", prompt.submitted_at), ("prefill", prompt.started_at or None), ("", now))
    values: Values = {
        "tokens": prompt.num_tokens,
        "cached_tokens": prompt.num_cached,
        "room": prompt.grant.room.hex(),
        "end": "landed" if prompt.landed else "aborted",
    }
    trace.show(REQUESTS, prompt.request.request_id or "", marks, values, now=now)
    if prompt.landed:
        trace.depart(_arrow(prompt.grant))


def show_sent(trace: Trace, prompt: Prompt, now: float) -> None:
    """Show the bytes of a prompt on the channel, now that all have left."""
    if prompt.pushed_at is not None:
        values: Values = {"tokens": len(prompt.grant.tokens), "room": prompt.grant.room.hex()}
        marks = (("", prompt.pushed_at), ("", now))
        trace.show(CHANNEL, prompt.request.request_id or "", marks, values, now=now)


def show_landed(trace: Trace, sequence: Sequence, grant: PageGrant, now: float) -> None:
    """Show the bytes of a room that decode has just taken over, and end the arrow from prefill."""
    trace.arrive(_arrow(grant))
    first_s, last_s = sequence.timeline.first_byte_s, sequence.timeline.last_byte_s
    if first_s is not None and last_s is not None:
        marks = (("", sequence.submitted_at + first_s), ("", sequence.submitted_at + last_s))
        values: Values = {"tokens": len(grant.tokens), "room": grant.room.hex()}
        trace.show(CHANNEL, sequence.request_id, marks, values, now=now)


def show_sequence(trace: Trace, sequence: Sequence, reason: FinishReason, now: float) -> None:
    """Show a request that ends at decode. The stages are those of its last attempt."""
    timeline, since = sequence.timeline, sequence.submitted_at
    marks = (
        ("wait for pages", since),
        ("wait for KV", None if timeline.granted_s is None else since + timeline.granted_s),
        ("decode", None if timeline.committed_s is None else since + timeline.committed_s),
        ("", now),
    )
    values: Values = {"tokens": sequence.num_tokens, "attempts": sequence.attempts, "end": reason.value}
    trace.show(REQUESTS, sequence.request_id, marks, values, now=now)


def _arrow(grant: PageGrant) -> str:
    return grant.room[:8].hex()
