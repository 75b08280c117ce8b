"""What an engine holds at one moment: for tests and for finding faults. No engine acts upon it."""

from __future__ import annotations

import attrs

from pdinfer.engine.sequence import Prompt, Sequence
from pdinfer.types import PeerAddress, Request
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
