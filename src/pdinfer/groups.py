"""Ranks that act together: the few collectives that pdinfer uses, over torch.distributed.

Every rank of a group makes the same calls in the same order. A group of one rank is the smallest: its calls return what
they were given. `Topology.connect` makes the groups of an engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from pdinfer.errors import RankLost


@attrs.frozen(eq=False)
class Group:
    """`ranks` of the world, of which `ranks[rank]` is this one. `process_group` is None when it is alone.

    Every method raises RankLost when the others do not take part within the deadline the groups were made with. Tensors
    are contiguous, on the device of the group's backend (for gloo: the host), of the same dtype and row shape on all
    ranks. With `calls` every call is noted there: ranks that stay in step note the same.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    calls: list[str] | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.process_group is not None:
            with self._calling("all_reduce", x):
                dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of every rank, in rank order -> [size * n, ...]."""
        if self.process_group is None:
            return x
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        with self._calling("all_gather", x):
            dist.all_gather(list(_raw(gathered).chunk(self.size)), _raw(x), group=self.process_group)
        return gathered

    def all_gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """[counts[rank], ...] of every rank, in rank order -> [sum(counts), ...]. Syncs nothing."""
        if self.process_group is None:
            return x
        most = max(counts)
        padded = x
        if len(x) < most:
            padded = x.new_zeros(most, *x.shape[1:])
            padded[: len(x)] = x
        gathered = self.all_gather(padded).view(self.size, most, *x.shape[1:])
        return torch.cat([gathered[rank, :count] for rank, count in enumerate(counts)])

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """What the group's rank `source` has, in place."""
        if self.process_group is not None:
            with self._calling("broadcast", x):
                dist.broadcast(_raw(x), group=self.process_group, group_src=source)
        return x

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """The first send_counts[0] rows go to rank 0, the next to rank 1, and so on -> [sum(receive_counts), ...], the
        rows from rank 0 first."""
        if self.process_group is None:
            return x
        received = x.new_empty(sum(receive_counts), *x.shape[1:])
        with self._calling("all_to_all", x):
            dist.all_to_all_single(
                _raw(received), _raw(x), list(receive_counts), list(send_counts), group=self.process_group
            )
        return received

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Sends tensors to ranks of the group and fills others from ranks, all at once. Between two ranks the order of
        sends on one side is that of receives on the other; a rank without any makes no call."""
        if self.process_group is None or not (sends or receives):
            return
        group = self.process_group
        with self._calling("exchange", None):
            works = [dist.irecv(_raw(x), group=group, group_src=rank) for rank, x in receives]
            works += [dist.isend(_raw(x), group=group, group_dst=rank) for rank, x in sends]
            for work in works:
                if work is not None:
                    work.wait()

    @contextlib.contextmanager
    def _calling(self, what: str, x: Tensor | None) -> Iterator[None]:
        if self.calls is not None and x is not None:  # an exchange is not everybody's
            self.calls.append(f"{self.name}.{what}")
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise RankLost(
                f"{what} of group {self.name} (ranks {', '.join(map(str, self.ranks))}) failed on rank "
                f"{self.ranks[self.rank]}: {reason}; start all ranks anew"
            ) from error


@attrs.frozen(eq=False, kw_only=True)
class Groups:
    """The groups of one rank. `world` is everybody; `attention` are the ranks that have the same requests, its rank 0
    is the one hosts talk to; `tp` of these share every token and divide the heads, `cp` divide the tokens of a prompt.
    `dense_tp` divide the dense MLPs, `ep` the experts."""

    world: Group
    attention: Group
    tp: Group
    cp: Group
    dense_tp: Group
    ep: Group
    owns_backend: bool = False

    @classmethod
    def single(cls) -> Groups:
        """Those of a rank that is alone."""
        return cls(
            world=Group("world"),
            attention=Group("attention"),
            tp=Group("tp"),
            cp=Group("cp"),
            dense_tp=Group("dense_tp"),
            ep=Group("ep"),
        )

    def close(self) -> None:
        """Ends the connections, when `Topology.connect` began them."""
        if self.owns_backend and dist.is_initialized():
            dist.destroy_process_group()


def _raw(x: Tensor) -> Tensor:
    """The same bytes in a dtype that every backend carries: gloo has no float8."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else x
