"""Which states were seen together: of a request at decode and at prefill, and of a room at both ends of its channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdinfer.decode import DecodeEngine
from pdinfer.prefill import PrefillEngine
from pdinfer.sequence import SequenceState

DECODE = ("waiting", "granted", "orphaned", "running", "granted again", "gone")
PREFILL = ("absent", "queued", "active", "sending")
EXPECTED = ("absent", "open", "stopped", "damaged")
ACCEPTED = ("absent", "open", "stopping", "tombstone", "turned away")

NEVER = {
    ("gone", "absent"),  # nobody knows of it
    ("granted again", "absent"),  # known by its old prompt alone
    ("room", "absent", "absent"),
    ("room", "open", "tombstone"),  # only an abort makes a tombstone, and the room is stopped before one is sent
    ("room", "damaged", "turned away"),  # who turned a room away has never written it
}
"""Pairs that cannot be, or cannot be seen."""


def request_states(decodes: Iterable[DecodeEngine], prefills: Iterable[PrefillEngine], seen: Counter[str]) -> None:
    """Counts the (decode, prefill) states of every request that an engine knows."""
    decodes = list(decodes)
    granted, orphans, known = {}, set(), {}
    for decode in decodes:
        granted.update(decode._granted)
        orphans.update(decode._tables._orphans)
        known.update(decode._sequences)
    prompts = set()
    for prefill in prefills:
        lines = ((prefill._queue, "queued"), (prefill._active, "active"), (prefill._sending, "sending"))
        for grant, name in [(prompt.grant, name) for line, name in lines for prompt in line]:
            prompts.add(grant.room)
            if grant.room in granted:
                where = "granted"
            elif grant.room in orphans:
                where = "orphaned"
            elif grant.request_id not in known:
                where = "gone"
            else:
                state = known[grant.request_id].state
                where = "granted again" if state is SequenceState.GRANTED else state.name.lower()
            seen[f"request: {where} x {name}"] += 1
    for room in granted:
        if room not in prompts:
            seen["request: granted x absent"] += 1
    for room in orphans:
        if room not in prompts:
            seen["request: orphaned x absent"] += 1
    for sequence in known.values():
        if sequence.state is not SequenceState.GRANTED:
            seen[f"request: {sequence.state.name.lower()} x absent"] += 1


def room_states(decodes: Iterable[DecodeEngine], prefills: Iterable[PrefillEngine], seen: Counter[str]) -> None:
    """Counts the (expected, accepted) states of every room that an end of a channel knows."""
    expected = {}
    for decode in decodes:
        for room, state in decode.channel._expected._rooms.items():
            expected[room] = "damaged" if state.fault else "stopped" if state.stopped else "open"
    accepted = {}
    for prefill in prefills:
        side = prefill.channel._accepted
        for tombstones in side._tombstones.values():
            accepted.update(dict.fromkeys(tombstones, "tombstone"))
        accepted.update(dict.fromkeys((room for room, _ in side._owed), "turned away"))
        accepted.update((room, "stopping" if room in side._stops else "open") for room in side._rooms)
    for room in expected.keys() | accepted.keys():
        seen[f"room: {expected.get(room, 'absent')} x {accepted.get(room, 'absent')}"] += 1


def missing(seen: Counter[str]) -> list[str]:
    """The pairs that were never seen."""
    wanted = [f"request: {d} x {p}" for d in DECODE for p in PREFILL if (d, p) not in NEVER]
    wanted += [f"room: {e} x {a}" for e in EXPECTED for a in ACCEPTED if ("room", e, a) not in NEVER]
    return [name for name in wanted if not seen[name]]
