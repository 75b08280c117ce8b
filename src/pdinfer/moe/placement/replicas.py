"""From the experts that a router chose to the slots that hold them: tables on the device, changed in place."""

from __future__ import annotations

import enum

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.moe.placement.placement import ExpertPlacement, Floats, Ints, Shares, check_ranks_per_node
from pdinfer.values import Value

GOLDEN = 2654435769
"""2^32 divided by the golden ratio. Its multiples modulo 2^32 lie evenly, also every n-th of them."""


class DispatchRule(enum.Enum):
    """Which of an expert's copies a token goes to.

    DYNAMIC: any copy, by the shares. STATIC: from a given rank always the same copy; the share of a copy says how many
    ranks use it. NEAREST: a copy on the token's rank, else on its node, else any; equally near copies alike, whatever
    their shares."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    NEAREST = "nearest"


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
        closely, and the same tokens go the same way each time."""
        place_T = torch.arange(len(ids_TK), device=ids_TK.device, dtype=torch.int64) * self.num_ranks + self.rank
        # 24 bits are exact in float32, and so stay below 1
        u_T = ((place_T * GOLDEN & 0xFFFFFFFF) >> 8).float() * 2.0**-24
        copy_TK = (u_T[:, None, None] >= self.until_EX[ids_TK]).sum(-1)
        return self.slots_EX[ids_TK, copy_TK].where(ids_TK >= 0, -1)


@attrs.frozen(eq=False, kw_only=True)
class ReplicaTables(Value):
    """What `candidates` returns for one rank as tensors [L, E, X], with room for the X copies of an expert that any
    placement of as many slots can have."""

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
        slots, until = candidates(placement, self.rule, rank=self.rank, ranks_per_node=self.ranks_per_node)
        missing = ((0, 0), (0, 0), (0, self.slots_LEX.shape[2] - slots.shape[2]))
        self.slots_LEX.copy_(torch.from_numpy(np.pad(slots, missing, constant_values=-1)))
        self.until_LEX.copy_(torch.from_numpy(np.pad(until, missing, constant_values=1)))

    def of_layer(self, row: int) -> LayerReplicas:
        return LayerReplicas(self.slots_LEX[row], self.until_LEX[row], self.rank, self.num_ranks)


def candidates(
    placement: ExpertPlacement, rule: DispatchRule, *, rank: int, ranks_per_node: int | None
) -> tuple[Ints, Shares]:
    """Return the slots that one rank sends tokens to, and where in [0, 1) the tokens of each end.

    Each token has a number u in [0, 1). It goes to slot i of `slots[layer, expert]` where `until[..., i - 1] <= u <
    until[..., i]`, so i is the number of bounds that u has reached. `slots` is int64 [L, E, most copies], padded with
    -1; `until` float32 alike, padded with 1 like its last bound.

    Node n has the ranks from `n * ranks_per_node` up to the first of the next node; without `ranks_per_node` there is
    one node. Raises ConfigError for uneven nodes."""
    per_node = check_ranks_per_node(ranks_per_node, placement.num_ranks)
    slots = placement.logical_to_all_physical_map
    if rule is DispatchRule.NEAREST:
        return slots, _bounds(_nearest(slots, slots // placement.slots_per_rank, rank, per_node))
    until = _bounds(_shares_by_expert(placement, slots))
    if rule is DispatchRule.DYNAMIC:
        return slots, until
    # Ranks stand at equal distances from 0 to 1. The rank at the first place changes with expert and layer, so that
    # rounding does not always favour the same ranks.
    turn = rank + np.arange(placement.num_layers)[:, None] + np.arange(placement.num_logical_experts)
    place = (turn % placement.num_ranks + 0.5) / placement.num_ranks
    chosen = np.take_along_axis(slots, (place[:, :, None] >= until).sum(2, keepdims=True), 2)
    return chosen, np.ones(chosen.shape, np.float32)


def _nearest(slots: Ints, ranks: Ints, rank: int, per_node: int) -> Floats:
    """Return equal shares for the nearest copies, which are on `ranks`, and 0 for the others: [L, E, most copies]."""
    here = ranks == rank
    near = (slots >= 0) & (ranks // per_node == rank // per_node)
    keep = np.where(here.any(2, keepdims=True), here, np.where(near.any(2, keepdims=True), near, slots >= 0))
    shares: Floats = keep / keep.sum(2, keepdims=True)
    return shares


def _shares_by_expert(placement: ExpertPlacement, slots: Ints) -> Floats:
    """Return the share of each copy: [L, E, most copies], 0 where there is no copy."""
    if placement.slot_shares is None:
        return (slots >= 0) / placement.logical_replica_counts[:, :, None]
    layers = np.arange(placement.num_layers)[:, None, None]
    return np.where(slots >= 0, placement.slot_shares[layers, slots], 0.0)


def _bounds(shares: Floats) -> Shares:
    """Return running sums of the shares, exactly 1 from the last share above 0 on."""
    last = shares.shape[2] - 1 - (shares > 0)[:, :, ::-1].argmax(2, keepdims=True)
    until = np.where(np.arange(shares.shape[2]) >= last, 1.0, np.cumsum(shares, axis=2))
    return until.astype(np.float32)
