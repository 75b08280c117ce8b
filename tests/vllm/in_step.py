"""WatchedConnector for data-parallel ranks that share experts on a CPU, for which vLLM 0.32 lacks two collectives. vLLM
imports this module in every rank before it computes anything."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # type: ignore[import-not-found,unused-ignore]

from tests.vllm.watched import WatchedConnector

__all__ = ["WatchedConnector"]


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Return the rows of all ranks, of which rank r has `sizes[r]`."""
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Return this rank's rows, rank r's being `sizes[r]`, of the sum over all ranks."""
    assert dim == 0
    summed = input_.clone()
    torch.distributed.all_reduce(summed, group=self.device_group)
    sizes = sizes or [summed.shape[0] // self.world_size] * self.world_size
    return summed.split(sizes)[self.rank_in_group].contiguous()


for name in (all_gatherv, reduce_scatterv):
    if name.__name__ not in vars(CpuCommunicator):  # a later vLLM may have them
        setattr(CpuCommunicator, name.__name__, name)
