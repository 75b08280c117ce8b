"""Faults between simulated nodes, as plain values."""

from __future__ import annotations

import enum

import attrs


@attrs.frozen(kw_only=True)
class NetworkFaults:
    """The faults of a network: chances from 0 to 1 per message, and how long things take at most.

    A message flies for `flight_s` (least, most), a `slow` one for up to `slow_s`. With `late_read`, a write's source is
    read late, by up to `late_s`; with `late_done`, its sender learns late that it is done. With `pieces`, a payload
    lands in pieces, with other events in between. `late_landing` is for one-sided transports: the sender hears that a
    write failed, and it lands all the same. The others change what arrives: no message, two, the wrong order, half of
    it, or a flipped bit. A transport over TCP does none of these; a wrong implementation of one might.
    """

    flight_s: tuple[float, float] = (0.0001, 0.002)
    slow: float = 0.0
    slow_s: float = 0.5
    late_read: float = 0.0
    late_done: float = 0.0
    late_s: float = 0.5
    pieces: float = 0.0
    late_landing: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    truncate: float = 0.0
    flip_frame: float = 0.0
    flip_payload: float = 0.0


class Placement(enum.Enum):
    """The writer of a payload into the receiver's memory, and the way: the receiver itself; in two steps, through a
    landing slot that the sender writes; or the sender. The last breaks page rule 0, and is there to show what that rule
    prevents."""

    BY_RECEIVER = "two-sided"
    THROUGH_SLOT = "one-sided"
    BY_SENDER = "one-sided, straight into pages"
