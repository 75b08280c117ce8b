"""From the experts that a router chose to the slots that hold them: tables on the device, changed in place."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.moe.placement.placement import DispatchRule, ExpertPlacement, dispatch_table
from pdinfer.values import Value

GOLDEN = 2654435769
"""2^32 divided by the golden ratio. Its multiples modulo 2^32 lie evenly, also every n-th of them."""


@attrs.frozen(eq=False)
class LayerReplicas(Value):
    """The slots to which rank `rank` of `num_ranks` sends the tokens of one layer: views into `ReplicaTables`."""

    slots_EX: Tensor
    until_EX: Tensor
    rank: int
    num_ranks: int

    def __call__(self, ids_TK: Tensor) -> Tensor:
        """Map logical experts, int64, to physical ones, and -1 to -1. Syncs nothing.

        The choice between several copies follows from the token's place in the batch and the rank. So shares are met
        closely, and the same tokens go the same way each time.
        """
        place_T = torch.arange(len(ids_TK), device=ids_TK.device, dtype=torch.int64) * self.num_ranks + self.rank
        # 24 bits are exact in float32, and so stay below 1
        u_T = ((place_T * GOLDEN & 0xFFFFFFFF) >> 8).float() * 2.0**-24
        copy_TK = (u_T[:, None, None] >= self.until_EX[ids_TK]).sum(-1)
        return self.slots_EX[ids_TK, copy_TK].where(ids_TK >= 0, -1)


@attrs.frozen(eq=False, kw_only=True)
class ReplicaTables(Value):
    """A `DispatchTable` of one rank as tensors [L, E, X], with room for the X copies of an expert that any placement of
    as many slots can have."""

    rule: DispatchRule
    rank: int
    num_ranks: int
    ranks_per_node: int | None
    slots_LEX: Tensor
    until_LEX: Tensor

    @classmethod
    def build(
        cls,
        placement: ExpertPlacement,
        rule: DispatchRule,
        *,
        rank: int,
        ranks_per_node: int | None,
        device: torch.device,
    ) -> ReplicaTables:
        """Build the tables of a placement. Raises ConfigError where nodes are uneven."""
        most = placement.num_slots - placement.num_logical_experts + 1
        width = 1 if rule is DispatchRule.STATIC else most
        shape = (placement.num_layers, placement.num_logical_experts, width)
        tables = cls(
            rule=rule,
            rank=rank,
            num_ranks=placement.num_ranks,
            ranks_per_node=ranks_per_node,
            slots_LEX=torch.empty(shape, dtype=torch.int64, device=device),
            until_LEX=torch.empty(shape, dtype=torch.float32, device=device),
        )
        tables.put(placement)
        return tables

    def put(self, placement: ExpertPlacement) -> None:
        """Send tokens where `placement`, of the same sizes, says from now on. Tensors keep their addresses."""
        table = dispatch_table(placement, self.rule, rank=self.rank, ranks_per_node=self.ranks_per_node)
        missing = ((0, 0), (0, 0), (0, self.slots_LEX.shape[2] - table.slots.shape[2]))
        self.slots_LEX.copy_(torch.from_numpy(np.pad(table.slots, missing, constant_values=-1)))
        self.until_LEX.copy_(torch.from_numpy(np.pad(table.until, missing, constant_values=1)))

    def of_layer(self, row: int) -> LayerReplicas:
        return LayerReplicas(self.slots_LEX[row], self.until_LEX[row], self.rank, self.num_ranks)
