"""From the experts that a router chose to the slots that hold them: tables on the device, changed in place."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.moe.placement import DispatchRule, ExpertPlacement, dispatch_table


@attrs.frozen(eq=False)
class LayerReplicas:
    """The slots that a rank sends tokens to, for one layer: views into `ReplicaTables`."""

    slots_EX: Tensor
    counts_E: Tensor
    rank: int

    def __call__(self, ids_TK: Tensor) -> Tensor:
        """Logical experts, int64, to physical ones. An expert's copies take turns by token, and different ranks begin
        with different ones: spread as evenly as chance would, and the same each time. Syncs nothing."""
        turn_T = torch.arange(self.rank, self.rank + len(ids_TK), device=ids_TK.device)
        return self.slots_EX[ids_TK, turn_T[:, None] % self.counts_E[ids_TK]]


@attrs.frozen(eq=False, kw_only=True)
class ReplicaTables:
    """A `DispatchTable` of one rank as tensors [L, E, X] and [L, E], X being the most copies that any placement of as
    many slots can have."""

    rule: DispatchRule
    rank: int
    ranks_per_node: int | None
    slots_LEX: Tensor
    counts_LE: Tensor

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
        """Raises ConfigError where nodes are uneven."""
        num_layers, num_experts = placement.num_layers, placement.num_logical_experts
        most = min(placement.num_ranks, placement.num_slots - num_experts + 1)
        width = 1 if rule is DispatchRule.STATIC else most
        tables = cls(
            rule=rule,
            rank=rank,
            ranks_per_node=ranks_per_node,
            slots_LEX=torch.empty(num_layers, num_experts, width, dtype=torch.int64, device=device),
            counts_LE=torch.empty(num_layers, num_experts, dtype=torch.int64, device=device),
        )
        tables.put(placement)
        return tables

    def put(self, placement: ExpertPlacement) -> None:
        """Sends tokens where `placement`, of the same sizes, says from now on: tensors keep their addresses."""
        table = dispatch_table(placement, self.rule, rank=self.rank, ranks_per_node=self.ranks_per_node)
        missing = self.slots_LEX.shape[2] - table.slots.shape[2]
        slots = np.pad(table.slots, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
        self.slots_LEX.copy_(torch.from_numpy(slots))
        self.counts_LE.copy_(torch.from_numpy(np.array(table.counts)))

    def of_layer(self, row: int) -> LayerReplicas:
        return LayerReplicas(self.slots_LEX[row], self.counts_LE[row], self.rank)
