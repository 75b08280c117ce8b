"""From the experts that a router chose to the slots that hold them: tables on the device, changed in place."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.moe.placement import DispatchRule, ExpertPlacement, dispatch_table

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Multiples of it, without what is before the point, fill 0 to 1 as evenly as any sequence does (Weyl)."""
TURNS_APART = 7919


@attrs.frozen(eq=False)
class LayerReplicas:
    """The slots that a rank sends tokens to, for one layer: views into `ReplicaTables`."""

    slots_EX: Tensor
    until_EX: Tensor
    rank: int

    def __call__(self, ids_TK: Tensor) -> Tensor:
        """Logical experts, int64, to physical ones. Tokens take turns through an expert's copies, by their shares, and
        different ranks begin elsewhere: spread more evenly than by chance, and the same each time. Syncs nothing."""
        if self.slots_EX.shape[1] == 1:
            return self.slots_EX[ids_TK, 0]
        turn_T = torch.arange(1, len(ids_TK) + 1, device=ids_TK.device, dtype=torch.float64)
        at_T = ((turn_T + self.rank * TURNS_APART) * GOLDEN_RATIO).frac().float()
        which_TK = (at_T[:, None, None] >= self.until_EX[ids_TK]).sum(-1)
        return self.slots_EX[ids_TK, which_TK]


@attrs.frozen(eq=False, kw_only=True)
class ReplicaTables:
    """A `DispatchTable` of one rank as tensors [L, E, X], X being the most copies that any placement of as
    many slots can have."""

    rule: DispatchRule
    rank: int
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
        """Raises ConfigError where nodes are uneven."""
        num_layers, num_experts = placement.num_layers, placement.num_logical_experts
        most = min(placement.num_ranks, placement.num_slots - num_experts + 1)
        width = 1 if rule is DispatchRule.STATIC else most
        tables = cls(
            rule=rule,
            rank=rank,
            ranks_per_node=ranks_per_node,
            slots_LEX=torch.empty(num_layers, num_experts, width, dtype=torch.int64, device=device),
            until_LEX=torch.empty(num_layers, num_experts, width, dtype=torch.float32, device=device),
        )
        tables.put(placement)
        return tables

    def put(self, placement: ExpertPlacement) -> None:
        """Sends tokens where `placement`, of the same sizes, says from now on: tensors keep their addresses."""
        table = dispatch_table(placement, self.rule, rank=self.rank, ranks_per_node=self.ranks_per_node)
        missing = self.slots_LEX.shape[2] - table.slots.shape[2]
        for into, values, filler in ((self.slots_LEX, table.slots, -1), (self.until_LEX, table.until, 1)):
            padded = np.pad(values, ((0, 0), (0, 0), (0, missing)), constant_values=filler)
            into.copy_(torch.from_numpy(padded))

    def of_layer(self, row: int) -> LayerReplicas:
        return LayerReplicas(self.slots_LEX[row], self.until_LEX[row], self.rank)
