"""Which states were seen together: of a request at decode and at prefill, of a room at both ends of its channel and on
the ranks of one engine, and of a room and the hand-offs of its several writers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.types import HandoffStatus

DECODE = ("waiting", "granted", "orphaned", "running", "granted again", "gone")
PREFILL = ("absent", "queued", "active", "sending")
EXPECTED = ("absent", "open", "stopped", "damaged")
ACCEPTED = ("absent", "open", "stopping", "tombstone", "turned away")
HANDOFFS = ("silent", "landed", "aborted")

NEVER = {
    ("gone", "absent"),  # no engine knows of it
    ("granted again", "absent"),  # known by its old prompt alone
    ("room", "absent", "absent"),
    ("room", "open", "tombstone"),  # only an abort makes a tombstone, and the room is stopped before one is sent
    ("room", "damaged", "turned away"),  # an end that turned a room away has never written it
    ("writers", "open", "aborted"),  # a writer that aborts stops the room
    ("decode ranks", "absent", "absent"),
    ("prefill ranks", "absent", "absent"),
    *(
        ("prefill ranks", "turned away", other) for other in ("open", "stopping", "turned away")
    ),  # followers are not told
}
"""Pairs that are impossible, or that cannot be observed."""


def request_states(decodes: Iterable[DecodeEngine], prefills: Iterable[PrefillEngine], seen: Counter[str]) -> None:
    """Count the (decode, prefill) states of every request that an engine knows."""
    decodes = list(decodes)
    granted: set[bytes | None] = set()
    orphans: set[bytes] = set()
    known: dict[str | None, str] = {}
    for decode in decodes:
        held = decode.snapshot()
        granted.update(one.room for one in held.granted)
        orphans |= held.orphans
        lines = ((held.waiting, "waiting"), (held.granted, "granted again"), (held.running, "running"))
        known.update({one.request_id: name for line, name in lines for one in line})
    prompts = set()
    for prefill in prefills:
        taken = prefill.snapshot()
        stages = ((taken.queued, "queued"), (taken.active, "active"), (taken.sending, "sending"))
        for prompt, name in [(prompt, name) for line, name in stages for prompt in line]:
            prompts.add(prompt.room)
            if prompt.room in granted:
                where = "granted"
            elif prompt.room in orphans:
                where = "orphaned"
            else:
                where = known.get(prompt.request.request_id, "gone")
            seen[f"request: {where} x {name}"] += 1
    for room in granted:
        if room not in prompts:
            seen["request: granted x absent"] += 1
    for room in orphans:
        if room not in prompts:
            seen["request: orphaned x absent"] += 1
    for where in known.values():
        if where != "granted again":
            seen[f"request: {where} x absent"] += 1


def room_states(decodes: Iterable[DecodeEngine], prefills: Iterable[PrefillEngine], seen: Counter[str]) -> None:
    """Count the (expected, accepted) states of every room that an end of a channel knows."""
    expected, accepted = {}, {}
    for decode in decodes:
        expected.update(_expected(decode.channel))
    for prefill in prefills:
        accepted.update(_accepted(prefill.channel))
    _count("room", expected, accepted, seen)


def rank_states(leader: KVChannel, followers: Sequence[KVChannel], seen: Counter[str]) -> None:
    """Count the states that a room has on the leader and on each follower of one engine, decode or prefill."""
    for follower in followers:
        _count("decode ranks", _expected(leader), _expected(follower), seen)
        _count("prefill ranks", _accepted(leader), _accepted(follower), seen)


def writer_states(ends: Iterable[KVChannel], seen: Counter[str]) -> None:
    """Count the states of rooms with several writers, and the hand-offs that were sent."""
    for end in ends:
        for room in end.receiver.rooms().values():
            if room.num_writers > 1:
                aborted = HandoffStatus.ABORTED in room.handoffs
                handoffs = "aborted" if aborted else "landed" if room.handoffs else "silent"
                seen[f"writers: {room.state.value} x {handoffs}"] += 1


def _expected(end: KVChannel) -> dict[bytes, str]:
    return {room: held.state.value for room, held in end.receiver.rooms().items()}


def _accepted(end: KVChannel) -> dict[bytes, str]:
    return {room: state.value for room, state in end.sender.rooms().items()}


def _count(what: str, ones: dict[bytes, str], others: dict[bytes, str], seen: Counter[str]) -> None:
    for room in ones.keys() | others.keys():
        seen[f"{what}: {ones.get(room, 'absent')} x {others.get(room, 'absent')}"] += 1


def missing(seen: Counter[str]) -> list[str]:
    """Return the pairs that were never seen."""
    wanted = [f"request: {d} x {p}" for d in DECODE for p in PREFILL if (d, p) not in NEVER]
    for what, ones, others in (
        ("room", EXPECTED, ACCEPTED),
        ("decode ranks", EXPECTED, EXPECTED),
        ("prefill ranks", ACCEPTED, ACCEPTED),
        ("writers", EXPECTED[1:], HANDOFFS),
    ):
        wanted += [f"{what}: {one} x {other}" for one in ones for other in others if (what, one, other) not in NEVER]
    return [name for name in wanted if not seen[name]]
