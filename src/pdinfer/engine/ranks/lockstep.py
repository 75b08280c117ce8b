"""Ranks move together: before each step of the model, all learn in one small collective what all are about to do.

    rank 0   has rows ─ notify ─►│        │ model, with its rows   │ agree … no rank has rows: wait
    rank 1   sleeps ── wakes ───►│ agree  │ model, with none       │ agree …
    rank 2   sleeps ── wakes ───►│        │ model, with none       │ agree …

After an idle agreement, a rank takes part in the next one when it has work itself, when it is notified, or after
BEAT_S. So a lost notification costs no more than that, and a rank that died is noticed even without work. One that
stands still is noticed by its silence (`wakeup`), in whichever collective the others wait for it. Between agreements
each rank decides alone. What must be the same on all ranks is decided from the agreement alone.

Behind a step of the model all ranks meet again, so a rank may `begin` that agreement while its device computes, and
need not wait for it later. Others may not: it is the same collective."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import msgspec
import numpy as np
import torch
from torch import Tensor

from pdinfer.bounds import cause
from pdinfer.engine.ranks.messages import Message, decode, encode
from pdinfer.engine.ranks.wakeup import Wakeup
from pdinfer.errors import ConfigError, RankLost
from pdinfer.inbox import Inbox
from pdinfer.moe.migration.migration import ExpertStatus
from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.parallel.groups import Begun, Group, Groups

BEAT_S = 0.1
"""The interval at which ranks agree when none has work."""


@attrs.frozen(kw_only=True)
class RankStatus:
    """What a rank says of itself in the agreement of this number: rows it has for the model, as far as it knows, passes
    of the MTP layer it needs to draft after them, whether it closes, whether nothing keeps it from that or from
    changing its role, and how many bytes it has for its attention group. The status of its experts, an `ExpertStatus`,
    follows."""

    number: int
    num_rows: int = 0
    num_passes: int = 0
    is_closing: int = 0
    may_close: int = 0
    may_change: int = 0
    num_bytes: int = 0


@attrs.frozen
class Agreement:
    """What all ranks know now: everybody's status, and the messages in this rank's attention group: (rank in the
    group, message)."""

    statuses: tuple[RankStatus, ...]
    heard: tuple[tuple[int, Message], ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the model runs. It runs on all ranks or on none."""
        return any(status.num_rows for status in self.statuses)

    @property
    def num_passes(self) -> int:
        """How often the MTP layer runs before the model."""
        return max(status.num_passes for status in self.statuses)


class Lockstep:
    """One rank's part in the common sequence of steps. All ranks make it together. `rebalancing` does its part in each
    agreement. `wake` is called from any thread when a step would do something. Once `lost` is set, every `agree` raises
    it. The ranks are `closing` once one of them closes, or none has anything against it; they are `changing` their role
    once none has anything against that. A leader has until it was asked to, and while it has rows. Either agreement is
    the last one."""

    def __init__(
        self,
        groups: Groups,
        rebalancing: Rebalancing,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = groups
        self._rebalancing = rebalancing
        self.lost: RankLost | None = None
        self.closing = self.changing = False
        self.may_close = self.may_change = groups.attention.rank > 0
        self._wake = wake
        self.clock = clock
        self._outbox: Inbox[Message] = Inbox()
        self._number = 0
        self._notified = -1
        self._is_active = True
        self._leaves = False
        self._begun: Begun | None = None
        self._agreed_at = clock()
        self._wakeup = Wakeup(groups.world, self._hear)
        groups.world.lookout.look = self._wakeup.check

    def tell(self, message: Message) -> None:
        """Send a message with the next agreement, from the leader to its followers or from a follower to its leader.
        Any thread may call it."""
        self._outbox.put(message)
        self._wake()

    def due_in_s(self) -> float:
        """Return in how many seconds to take part in an agreement although this rank has no rows; 0 for now."""
        if self._is_active or self._notified == self._number or self._outbox.peek() or self.lost is not None:
            return 0.0
        if self._rebalancing.has_news:
            return 0.0
        return max(0.0, self._agreed_at + BEAT_S - self.clock())

    def agree(self, *, num_rows: int = 0, num_passes: int = 0, is_closing: bool = False) -> Agreement | None:
        """Meet all ranks and return what all agreed on. Return None, without a collective, when this rank has nothing
        to say and is not due. An agreement that was begun comes first; rows that it does not know of run in its step,
        or meet the others once more if it has none. Raise RankLost when a rank does not come within the deadline of the
        groups."""
        if self.lost is not None:
            raise self.lost
        self._leaves = self._leaves or is_closing
        has_news = bool(num_rows) or is_closing
        if self._begun is not None:
            begun, self._begun = self._begun, None
            agreement = self._agreed(begun.wait)
            if agreement.runs or self.closing or not has_news:
                return agreement
        if not has_news and self.due_in_s():
            return None
        messages = self._outbox.take()
        data = encode(messages) if messages else b""
        row = self._row(num_rows, num_passes, len(data))
        return self._agreed(lambda: self.groups.world.all_gather(row), data)

    def begin(self, *, num_rows: int, num_passes: int) -> None:
        """Begin the next agreement, once this rank has queued all collectives of the step that runs. What comes later
        goes into the one after it. With `num_rows` the model runs, whatever rows this rank has by then. Orders name
        tokens that are not drawn yet, so this is for ranks without followers. Does nothing when the ranks close, or
        this one is lost."""
        if not self.closing and self.lost is None:
            row = self._row(num_rows, num_passes, 0)
            with self.together():
                self._begun = self.groups.world.all_gather_begin(row)

    def _row(self, num_rows: int, num_passes: int, num_bytes: int) -> Tensor:
        """Return what this rank says in its next agreement, int64 [1, …], and wake those that sleep."""
        ours = RankStatus(
            number=self._number,
            num_rows=num_rows,
            num_passes=num_passes,
            is_closing=int(self._leaves),
            may_close=int(self.may_close and not num_rows),
            may_change=int(self.may_change and not num_rows),
            num_bytes=num_bytes,
        )
        if not self._is_active and self._notified != self._number:
            self._wakeup.notify(self._number)
        self._number += 1
        row = *attrs.astuple(ours), *self._rebalancing.status().to_ints()
        return torch.tensor([row], dtype=torch.int64, device="cpu")

    def _agreed(self, gather: Callable[[], Tensor], data: bytes = b"") -> Agreement:
        """Do what follows from the rows of all ranks."""
        with self.together():
            table = gather().tolist()
            statuses = tuple(RankStatus(**dict(zip(_FIELDS, row, strict=False))) for row in table)
            self._check_numbers(statuses)
            agreement = Agreement(statuses, self._exchange(data, statuses))
            experts = [ExpertStatus.from_ints(row[len(_FIELDS) :]) for row in table]
            migrates = self._rebalancing.agreed(experts, runs=agreement.runs)
        is_over = all(status.may_close for status in statuses)
        self.closing = is_over or any(status.is_closing for status in statuses)
        self.changing = not self.closing and all(status.may_change for status in statuses)
        self._is_active = agreement.runs or migrates
        self._agreed_at = self.clock()
        return agreement

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Enclose what all ranks do in the same way. A rank that leaves it early cannot catch up with the others and
        has to stop: what it raised becomes a RankLost."""
        try:
            yield
        except RankLost as error:
            self.lost = self.lost or error
            raise
        except BaseException as error:
            rank = self.groups.world.rank
            self.lost = self.lost or RankLost(
                f"rank {rank} left a step that all ranks run together ({cause(error)}); start all ranks anew"
            )
            if isinstance(error, Exception):
                raise self.lost from error
            raise

    def close(self) -> None:
        """Stop listening to the other ranks. A second call does nothing."""
        self.groups.world.lookout.look = None
        self._wakeup.close(as_agreed=self.closing or self.changing)

    def _hear(self, number: int) -> None:
        if number == self._number:
            self._notified = number
            self._wake()

    def _check_numbers(self, statuses: Sequence[RankStatus]) -> None:
        numbers = [status.number for status in statuses]
        if len(set(numbers)) > 1:
            listing = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers))
            raise RankLost(
                f"ranks met in different agreements, {listing}: all must step the same engine, the only one over their "
                "groups; start all ranks anew"
            )

    def _exchange(self, data: bytes, statuses: Sequence[RankStatus]) -> tuple[tuple[int, Message], ...]:
        """Send the leader's orders to all ranks of the attention group, and the followers' reports to the leader. Where
        there are none, there is no collective."""
        group = self.groups.attention
        if group.size == 1:
            return ()
        sizes = [statuses[rank].num_bytes for rank in group.ranks]
        heard: list[tuple[int, Message]] = []
        if sizes[0]:
            orders = _tensor(data) if group.rank == 0 else torch.empty(sizes[0], dtype=torch.uint8, device="cpu")
            group.broadcast(orders)
            if group.rank:
                heard += [(0, message) for message in decode(_bytes(orders))]
        if any(sizes[1:]):
            counts = [0, *sizes[1:]]
            reports = torch.split(group.all_gather_rows(_tensor(data if group.rank else b""), counts), counts)
            if group.rank == 0:
                heard += [
                    (rank, message)
                    for rank, report in enumerate(reports)
                    if len(report)
                    for message in decode(_bytes(report))
                ]
        return tuple(heard)


_FIELDS = tuple(field.name for field in attrs.fields(RankStatus))


def gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Return the `data` of every rank of the group, in rank order. Meant for data that is exchanged only once."""
    counts = group.all_gather(torch.tensor([len(data)], dtype=torch.int64, device="cpu")).tolist()
    return [_bytes(part) for part in torch.split(group.all_gather_rows(_tensor(data), counts), counts)]


def compare(world: Group, limits: Mapping[str, object]) -> None:
    """Raise ConfigError, on every rank, for the first of `limits` that is not the same on all."""
    everybody = [msgspec.msgpack.decode(data) for data in gather_bytes(world, msgspec.msgpack.encode(limits))]
    for name in sorted({name for theirs in everybody for name in theirs}):
        values = [theirs.get(name) for theirs in everybody]
        if any(value != values[0] for value in values):
            listing = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            raise ConfigError(f"{name} must be the same on all ranks of an engine; it is {listing}")


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _bytes(x: Tensor) -> bytes:
    return x.numpy().tobytes()
