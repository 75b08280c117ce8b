"""What the trace of an engine shows of requests: their stages, their bytes on the channel, and arrows between engines.

Engines call these functions only when they have a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from pdinfer.engine.sequence import Prompt, Sequence
from pdinfer.trace import CHANNEL, REQUESTS, Slice, Trace
from pdinfer.types import FinishReason, PageGrant

Values = Mapping[str, float | str]


def show_prompt(trace: Trace, prompt: Prompt, now: float) -> None:
    """Show a prompt that prefill has handed off. The arrow to decode begins here, unless it was aborted."""
    marks = (("queue", prompt.submitted_at), ("prefill", prompt.started_at or None), ("", now))
    values: Values = {
        "tokens": prompt.num_tokens,
        "cached_tokens": prompt.num_cached,
        "room": prompt.grant.room.hex(),
        "end": "landed" if prompt.landed else "aborted",
    }
    trace.show(REQUESTS, _slice(prompt.request.request_id, marks, now, values))
    if prompt.landed:
        trace.depart(_arrow(prompt.grant))


def show_sent(trace: Trace, prompt: Prompt, now: float) -> None:
    """Show the bytes of a prompt on the channel, now that all have left."""
    if prompt.pushed_at is not None:
        values: Values = {"tokens": len(prompt.grant.tokens), "room": prompt.grant.room.hex()}
        trace.show(CHANNEL, _slice(prompt.request.request_id, (("", prompt.pushed_at), ("", now)), now, values))


def show_landed(trace: Trace, sequence: Sequence, grant: PageGrant, now: float) -> None:
    """Show the bytes of a room that decode has just taken over, and end the arrow from prefill."""
    trace.arrive(_arrow(grant))
    first_s, last_s = sequence.timeline.first_byte_s, sequence.timeline.last_byte_s
    if first_s is not None and last_s is not None:
        marks = (("", sequence.submitted_at + first_s), ("", sequence.submitted_at + last_s))
        values: Values = {"tokens": len(grant.tokens), "room": grant.room.hex()}
        trace.show(CHANNEL, _slice(sequence.request_id, marks, now, values))


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
    trace.show(REQUESTS, _slice(sequence.request_id, marks, now, values))


def _arrow(grant: PageGrant) -> str:
    return grant.room[:8].hex()


def _slice(request_id: str | None, marks: Iterable[tuple[str, float | None]], now: float, values: Values) -> Slice:
    """Make a slice from the first mark to the last. Between two marks that are known lies a stage with the first's
    name."""
    known = [(name, at) for name, at in marks if at is not None]

    def stages() -> Iterator[Slice]:
        for (name, began), (_, ended) in pairwise(known):
            if name:
                yield Slice(name, now - began, now - max(began, ended))

    return Slice(request_id or "", now - known[0][1], now - known[-1][1], values, tuple(stages()))
