"""Ranks that act together: the few collectives that pdinfer uses, over torch.distributed.

Every rank of a group makes the same calls in the same order. In a group of one rank, calls return what they were given.
`Topology.connect` makes the groups of an engine."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from pdinfer.errors import RankLost
from pdinfer.process.forked import OfOneProcess
from pdinfer.values import brief

LOOK_S = 0.3
"""Seconds that a rank waits for the others before it looks whether they live."""


@attrs.define(eq=False)
class Lookout:
    """The way in which a rank that waits for others learns that one is lost. `look` raises RankLost then.
    `engine.ranks` sets it, whose ranks send each other signs of life; without it a rank that stands still is missed
    when the deadline of a collective passes. What a lost rank holds up is abandoned, and torch keeps it, and the
    process at its end, until that deadline."""

    look: Callable[[], None] | None = None

    def watches(self, x: Tensor) -> bool:
        """Return whether to wait for a collective with `x` here. A device's stream waits for its own."""
        return self.look is not None and x.device.type == "cpu"

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective that `watches`, or has ended if it is None. Raises RankLost, or the RuntimeError with
        which it failed."""
        if work is None:
            return
        while self.look is not None and not work.is_completed():
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:  # this wait has ended, or the collective has failed: then the last one says so
                self.look()
        work.wait()

    def wait_apart(self, works: Sequence[dist.Work]) -> None:
        """Do the same for sends and receives. Ending a wait for one early breaks its connection, so a thread waits."""
        ended: Future[None] = Future()

        def wait() -> None:
            try:
                for work in works:
                    work.wait()
                ended.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised below
                ended.set_exception(error)

        threading.Thread(target=wait, name="pdinfer-exchange", daemon=True).start()
        while self.look is not None and not wait_for([ended], LOOK_S).done:
            self.look()
        ended.result()


@attrs.frozen(eq=False)
class Group(OfOneProcess):
    """Some `ranks` of the world; `ranks[rank]` is this one. `process_group` is None when this rank is alone.

    Every method raises RankLost when the others do not take part within the deadline with which the groups were made,
    or when the `lookout`, which all groups of a rank share, knows that one is lost.
    Tensors are contiguous, on the device of the group's backend (for gloo: the host), of the same dtype and row shape
    on all ranks. Every call is noted in `calls`, if given: ranks that stay in step note the same. `ends` is what has to
    end before the connections, since a library has built it on them; all groups of a rank share it."""

    __repr__ = brief

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    calls: list[str] | None = None
    lookout: Lookout = attrs.field(factory=Lookout)
    ends: list[Callable[[], None]] = attrs.field(factory=list)

    @property
    def _is_shared_by_fork(self) -> bool:
        """True if a forked child would share connections. A rank that is alone has none."""
        return self.process_group is not None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def graph_safe(self, device: torch.device) -> bool:
        """Whether its collectives of tensors on `device` can be captured in a CUDA graph. NCCL queues them on the
        stream, gloo waits for the device and exchanges on the host."""
        return self.process_group is None or _backend(self.process_group, device.type).name() == "nccl"

    def _meet(self, what: str, x: Tensor, start: Callable[..., dist.Work | None]) -> None:
        """Run a collective of `x`, unless this rank is alone, and wait for it."""
        if self.process_group is not None:
            with _calling(self, what, x):
                self.lookout.wait(start(group=self.process_group, async_op=self.lookout.watches(x)))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        self._meet("all_reduce", x, partial(dist.all_reduce, x))
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Take the largest number over ranks, in place."""
        self._meet("largest", x, partial(dist.all_reduce, x, op=dist.ReduceOp.MAX))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather [n, ...] of every rank, in rank order -> [size * n, ...]."""
        if self.process_group is None:
            return x
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        self._meet("all_gather", x, partial(dist.all_gather, list(_raw(gathered).chunk(self.size)), _raw(x)))
        return gathered

    def all_gather_begin(self, x: Tensor) -> Begun:
        """Do the same, and return before the rows have arrived."""
        if self.process_group is None:
            return Begun(self, "all_gather", None, x, x)
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        with _calling(self, "all_gather", x):
            parts = list(_raw(gathered).chunk(self.size))
            work = dist.all_gather(parts, _raw(x), group=self.process_group, async_op=True)
        return Begun(self, "all_gather", work, x, gathered)

    def all_gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather [counts[rank], ...] of every rank, in rank order -> [sum(counts), ...]. Syncs nothing."""
        if self.process_group is None:
            return x
        most = max(counts)
        # a gather takes equal shapes; padding costs less than a broadcast for each rank
        padded = x
        if len(x) < most:
            padded = x.new_zeros(most, *x.shape[1:])
            padded[: len(x)] = x
        gathered = self.all_gather(padded).view(self.size, most, *x.shape[1:])
        return torch.cat([gathered[rank, :count] for rank, count in enumerate(counts)])

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """Gather [n, m] of every rank -> [n, size * m], the columns of rank 0 first."""
        if self.process_group is None:
            return x
        return self.all_gather(x).view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def part(self, x: Tensor, together: int = 1) -> Tensor:
        """Return this rank's rows of an x that all ranks have, divided evenly in rank order.

        Each of `together` adjacent ranks gets the rows of all of them."""
        if self.process_group is None:
            return x
        # adjacent ranks form a block, which has the rows from its first rank's border to its last one's
        first = self.rank - self.rank % together
        return x[self._border(first, len(x)) : self._border(first + together, len(x))]

    def join(self, x: Tensor, total: int, together: int = 1) -> Tensor:
        """Undo `part`: return the `total` rows of all ranks."""
        if self.process_group is None or together == self.size:
            return x
        borders = [self._border(rank, total) for rank in range(self.size + 1)]
        first = borders[self.rank - self.rank % together]
        mine = x[borders[self.rank] - first : borders[self.rank + 1] - first]
        return self.all_gather_rows(mine, [stop - start for start, stop in itertools.pairwise(borders)])

    def _border(self, rank: int, total: int) -> int:
        return total * rank // self.size

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Copy x from the group's rank `source` to all ranks, in place."""
        self._meet("broadcast", x, partial(dist.broadcast, _raw(x), group_src=source))
        return x

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send the first send_counts[0] rows to rank 0, the next to rank 1, and so on.

        Returns [sum(receive_counts), ...], the rows from rank 0 first."""
        return self.all_to_all_begin(x, send_counts, receive_counts).wait()

    def all_to_all_begin(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Begun:
        """Do the same, and return before the rows have arrived."""
        if self.process_group is None:
            return Begun(self, "all_to_all", None, x, x)
        received = x.new_empty(sum(receive_counts), *x.shape[1:])
        with _calling(self, "all_to_all", x):
            work = dist.all_to_all_single(
                _raw(received),
                _raw(x),
                list(receive_counts),
                list(send_counts),
                group=self.process_group,
                async_op=True,
            )
        return Begun(self, "all_to_all", work, x, received)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to ranks of the group and fill others from ranks, all at once.

        Between two ranks, sends on one side have the order of receives on the other. A rank without any makes no call.
        """
        if self.process_group is None or not (sends or receives):
            return
        group = self.process_group
        with _calling(self, "exchange", None):
            ops = [dist.P2POp(dist.irecv, _raw(x), group=group, group_peer=rank) for rank, x in receives]
            ops += [dist.P2POp(dist.isend, _raw(x), group=group, group_peer=rank) for rank, x in sends]
            # one by one, those of a pair would share a stream of NCCL, and two ranks that trade wait in their receives
            started = dist.batch_isend_irecv(ops)
            if all(self.lookout.watches(x) for _, x in (*sends, *receives)):
                self.lookout.wait_apart(started)
            else:
                for work in started:
                    work.wait()


@attrs.frozen(eq=False)
class Begun:
    """A collective under way while this rank computes. It reads `x`, which must not change meanwhile."""

    group: Group
    what: str
    work: dist.Work | None
    x: Tensor
    result: Tensor

    def wait(self) -> Tensor:
        """Return the result; call it once. On a device, the stream waits instead of the host. Raises RankLost."""
        if self.work is not None:
            with _calling(self.group, self.what, None):
                if self.group.lookout.watches(self.x):
                    self.group.lookout.wait(self.work)
                else:
                    self.work.wait()
        return self.result


ALONE = Group("alone")
"""The group of a rank that shares nothing."""


@attrs.frozen(eq=False, kw_only=True)
class Groups(OfOneProcess):
    """The groups of one rank.

    `world` is all ranks. `attention` is the ranks that have the same requests, and hosts talk to its rank 0. Of these,
    `tp` ranks have every token and divide the heads, `cp` ranks divide the tokens of a prompt. `dense_tp` ranks divide
    the dense MLPs, `ep` ranks the experts."""

    __repr__ = brief

    world: Group
    attention: Group
    tp: Group
    cp: Group
    dense_tp: Group
    ep: Group
    owns_backend: bool = False

    @property
    def _is_shared_by_fork(self) -> bool:
        return self.world._is_shared_by_fork  # noqa: SLF001

    def close(self) -> None:
        """End what libraries have built on the connections, the last first, and the connections; torch.distributed if
        `Topology.connect` began it. A collective: call it on every rank, behind the engines. Without it they end with
        the process."""
        while self.world.ends:
            self.world.ends.pop()()
        if self.owns_backend:
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        groups = self.world, self.attention, self.tp, self.cp, self.dense_tp, self.ep
        for made in {each.process_group for each in groups} - {None}:
            with contextlib.suppress(ValueError):  # the host has ended all of torch.distributed
                dist.destroy_process_group(made)


@contextlib.contextmanager
def _calling(group: Group, what: str, x: Tensor | None) -> Iterator[None]:
    if group.calls is not None and x is not None:  # an exchange is not everybody's
        group.calls.append(f"{group.name}.{what}")
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise RankLost(
            f"{what} of group {group.name} (ranks {', '.join(map(str, group.ranks))}) failed on rank "
            f"{group.ranks[group.rank]}: {reason}; start all ranks anew"
        ) from error


def timeout_of(process_group: dist.ProcessGroup | None, kind: str) -> timedelta:
    """Return how long a collective of tensors on such a device may take, as set when the group was made."""
    assert process_group is not None
    timeout: timedelta = _backend(process_group, kind).options._timeout  # noqa: SLF001 - not public
    return timeout


def _backend(process_group: dist.ProcessGroup, kind: str) -> Any:
    """Return what carries tensors on such a device."""
    return process_group._get_backend(torch.device(kind))  # noqa: SLF001 - not public


IN_TOUCH_S = 5.0
"""Seconds after which ranks that work on their own hear of each other: well within the time that a collective may
take."""


class InTouch:
    """Contact between ranks while each does work of its own.

    That work may take one rank much longer than another, and longer than a collective may take. When a rank dies
    meanwhile, the others raise RankLost."""

    def __init__(self, group: Group, device: torch.device, *, every_s: float = IN_TOUCH_S) -> None:
        self._group = group
        self._device = device
        self._every_s = every_s
        self._due = time.monotonic() + every_s

    def going_on(self) -> None:
        """Say that the work goes on. Call it often; every `every_s` it waits until the others call it too."""
        if time.monotonic() >= self._due:
            self._all_are_done(0)
            self._due = time.monotonic() + self._every_s

    def done(self) -> None:
        """Wait until all ranks are done."""
        while not self._all_are_done(1):
            pass

    def _all_are_done(self, done: int) -> bool:
        return (
            int(self._group.all_reduce(torch.tensor([done], device=self._device, dtype=torch.int64)))
            == self._group.size
        )


def _raw(x: Tensor) -> Tensor:
    """Return the same bytes in a dtype that every backend carries: gloo has no float8."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else x
