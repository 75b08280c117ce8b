"""What a channel holds at one moment: for tests and for finding faults. No engine acts upon it."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from pdinfer.types import HandoffStatus, PeerAddress
from pdinfer.values import Value


class ExpectedState(enum.Enum):
    """The state of a room that decode granted."""

    OPEN = "open"
    STOPPED = "stopped"
    DAMAGED = "damaged"


class AcceptedState(enum.Enum):
    """The state of a room at prefill."""

    OPEN = "open"
    STOPPING = "stopping"
    TOMBSTONE = "tombstone"
    TURNED_AWAY = "turned away"


@attrs.frozen(kw_only=True)
class LinkSnapshot(Value):
    """One link. `address` is None until the handshake is done."""

    endpoint: str
    address: PeerAddress | None
    num_frames_waiting: int
    num_writes_arriving: int


@attrs.frozen(kw_only=True)
class ExpectedRoom(Value):
    """A room that decode granted and that has not settled. `handoffs` has one status per writer that has finished.
    `num_pieces` is the number of announced ranges of tokens, over all layers and heads."""

    state: ExpectedState
    pages: tuple[int, ...]
    num_writers: int
    handoffs: tuple[HandoffStatus, ...]
    num_pieces: int


@attrs.frozen(kw_only=True)
class ChannelSnapshot(Value):
    """The links and rooms of one end.

    `wanted` are the peers that it dials whenever there is no link to them, `pushing` the rooms for which it still reads
    pages, `num_settled` the hand-offs that `poll` would return, `num_stops` the rooms that `poll_stops` would return.
    """

    links: tuple[LinkSnapshot, ...]
    wanted: tuple[PeerAddress, ...]
    expected: Mapping[bytes, ExpectedRoom]
    accepted: Mapping[bytes, AcceptedState]
    pushing: frozenset[bytes]
    num_settled: int
    num_stops: int
