"""One rank of a group, alone in a test. The test writes what the other ranks say."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from pdinfer.engine.ranks import messages as say
from pdinfer.engine.ranks.lockstep import Agreement, RankStatus
from pdinfer.errors import TransferError
from pdinfer.execution.drafting import Draft
from pdinfer.kv.transports.base import Transfer
from pdinfer.model.batch import Row
from pdinfer.parallel.groups import Group, Groups
from pdinfer.parallel.topology import Topology
from pdinfer.types import Handoff, HandoffStatus, NamedState, PageGrant, PeerAddress

LANDED, ABORTED = HandoffStatus.LANDED, HandoffStatus.ABORTED
DECODE = PeerAddress(b"decode", 1, 0, ("tcp://d:1",))
OTHER = PeerAddress(b"other", 1, 0, ("tcp://o:1",))
PREFILL = PeerAddress(b"prefill", 1, 0, ("tcp://p:1",))
SIZE, FOLLOWER = 3, 1
"""Ranks of the group, and which of them a follower is."""


def grant_of(room: bytes = b"r" * 16, num_tokens: int = 9) -> PageGrant:
    return PageGrant(
        room=room,
        request_id="a",
        writers=(PREFILL,),
        destinations=(DECODE,),
        tokens=range(num_tokens),
        pages=(4, 2, 7),
        generations=(3, 1, 5),
        layout_id=b"l" * 32,
    )


def handoff(room: bytes = b"r" * 16, status: HandoffStatus = LANDED, error: Exception | None = None) -> Handoff:
    return Handoff(room=room, writer=PREFILL, status=status, error=error)  # type: ignore[arg-type]


def agreement(*heard: tuple[int, say.Message], num_rows: int = 0, num_passes: int = 0) -> Agreement:
    """Return an agreement in which one rank has this many rows and passes."""
    return Agreement(
        (RankStatus(number=0), RankStatus(number=0, num_rows=num_rows, num_passes=num_passes)), tuple(heard)
    )


@attrs.define(eq=False)
class FakeLockstep:
    """Keeps what is told and what the rank says of itself. `next` holds the agreements to come, None when not due."""

    groups: Groups
    told: list[say.Message] = attrs.field(factory=list)
    said: list[dict[str, Any]] = attrs.field(factory=list)
    next: list[Agreement | None] = attrs.field(factory=list)
    begun: list[dict[str, int]] = attrs.field(factory=list)
    num_together: int = 0
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, rank: int) -> FakeLockstep:
        """Make the lockstep of one rank of the group."""
        return cls(attrs.evolve(Topology().apart(), attention=Group("attention", tuple(range(SIZE)), rank)))

    def tell(self, message: say.Message) -> None:
        self.told.append(message)

    def agree(self, **said: Any) -> Agreement | None:
        self.said.append(said)
        return self.next.pop(0)

    def begin(self, **said: int) -> None:
        self.begun.append(said)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self.num_together += 1
        yield

    def take(self) -> list[say.Message]:
        """Return what was told since the last call."""
        told, self.told = self.told, []
        return told


@attrs.define(eq=False)
class FakePool:
    """A pool in which every page is of generation 0, as in a follower's."""

    def generations(self, pages: Sequence[int]) -> tuple[int, ...]:
        return (0,) * len(pages)


@attrs.define(eq=False)
class FakeChannel:
    """Keeps what it is asked to do. `handoffs` and `stops` come next; `sent` holds what `finish` returned."""

    address: PeerAddress = PREFILL
    calls: list[tuple[Any, ...]] = attrs.field(factory=list)
    handoffs: list[Handoff] = attrs.field(factory=list)
    stops: list[tuple[bytes, TransferError]] = attrs.field(factory=list)
    refuses: set[bytes] = attrs.field(factory=set)
    linked: set[bytes] = attrs.field(factory=set)
    sent: list[Transfer] = attrs.field(factory=list)
    pool: FakePool = attrs.field(factory=FakePool)

    def connect(self, peer: PeerAddress, *, timeout_s: float) -> None:
        self.calls.append(("connect", peer, timeout_s))

    def drop_peer(self, peer: PeerAddress) -> None:
        self.calls.append(("drop_peer", peer))

    def connected(self, peer: PeerAddress) -> bool:
        return peer.engine_id in self.linked

    @property
    def stats(self) -> Any:
        peers = [
            attrs.make_class("Peer", ["address", "connected"])(peer, self.connected(peer)) for peer in (DECODE, OTHER)
        ]
        return attrs.make_class("Stats", ["peers"])(peers)

    def expect(self, grant: PageGrant) -> None:
        self.calls.append(("expect", grant))

    def abort(self, grant: PageGrant, error: Exception) -> None:
        self.calls.append(("abort", grant, str(error)))

    def accept(self, grant: PageGrant) -> None:
        if grant.room in self.refuses:
            raise TransferError("not here")
        self.calls.append(("accept", grant))

    def push(self, grant: PageGrant, *, layers: range, tokens: range, pages: Sequence[int], ready: Any = None) -> None:
        self.calls.append(("push", grant.room, layers, tokens, tuple(pages), ready))

    def finish(self, grant: PageGrant, handoff: Handoff) -> Transfer:
        self.calls.append(("finish", grant, handoff.status, handoff.error))
        self.sent.append(Transfer(0))
        return self.sent[-1]

    def poll(self) -> list[Handoff]:
        handoffs, self.handoffs = self.handoffs, []
        return handoffs

    def poll_stops(self) -> list[tuple[bytes, TransferError]]:
        stops, self.stops = self.stops, []
        return stops

    def is_full(self, grant: PageGrant) -> bool:
        return grant.room in self.refuses

    def drain(self, timeout_s: float) -> bool:
        self.calls.append(("drain", timeout_s))
        return True

    def close(self) -> None:
        self.calls.append(("close",))

    def take(self) -> list[tuple[Any, ...]]:
        """Return what it was asked since the last call."""
        calls, self.calls = self.calls, []
        return calls


def ready() -> None:
    """Stand in for what a runner may yield with a layer."""


@attrs.define(eq=False)
class FakeRunner:
    """Keeps what it is asked to run. A prefill has two layers. What is to be done while it waits, it does."""

    drafts: bool = False
    captured_passes: int = 0
    while_waiting: Callable[[], None] = lambda: None
    calls: list[tuple[Any, ...]] = attrs.field(factory=list)
    in_order: Sequence[int] | None = None
    """The order in which `decode` runs its rows, by default theirs."""

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, Any]]:
        for layer in range(2):
            self.calls.append(("layer", layer, list(rows)))
            yield layer, ready

    def forward(self, rows: Sequence[Row]) -> None:
        self.calls.append(("forward", list(rows)))

    def draft(self, states: Sequence[NamedState]) -> Draft:
        return Draft.of(torch.zeros(1, 2) if states else None)

    def do_while_waiting(self, work: Callable[[], None]) -> None:
        self.while_waiting = work

    def decode(
        self, rows: Sequence[Row], draws: Any, drafts: Sequence[Draft], *, num_passes: int, on_host: bool = False
    ) -> list[Any]:
        self.calls.append(("decode", list(rows), list(draws), list(drafts), num_passes, on_host))
        self.while_waiting()
        return [[row.tokens[0]] for row in rows]

    def order(self, rows: Sequence[Row]) -> list[int]:
        return list(self.in_order or range(len(rows)))
