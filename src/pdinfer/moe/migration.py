"""What has to be copied to go from one placement of experts to another, and what it costs."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

from pdinfer.checks import clip, is_int
from pdinfer.errors import ConfigError
from pdinfer.moe.placement import ExpertPlacement, Ints, check_ranks_per_node


@attrs.frozen(kw_only=True)
class ExpertMove:
    """Copy one expert's weights of one layer. Slots are those of `physical_to_logical_map`, 0..P-1."""

    layer: int
    expert: int
    source_rank: int
    source_slot: int
    destination_rank: int
    destination_slot: int


@attrs.frozen(kw_only=True)
class MigrationPlan:
    """The copies that turn one placement into another, ordered by layer and destination slot.

    Sources are slots of the old placement, and some are destinations too: a slot may be overwritten when all moves of
    its layer have been read.
    """

    moves: tuple[ExpertMove, ...]
    expert_bytes: int
    ranks_per_node: int

    @cached_property
    def bytes_between_ranks(self) -> int:
        """Bytes that leave a rank: copies from slot to slot of one rank are free."""
        return self.expert_bytes * sum(move.source_rank != move.destination_rank for move in self.moves)

    @cached_property
    def bytes_between_nodes(self) -> int:
        """Bytes that leave a node; part of `bytes_between_ranks`."""
        size = self.ranks_per_node
        return self.expert_bytes * sum(move.source_rank // size != move.destination_rank // size for move in self.moves)


def plan_migration(
    old: ExpertPlacement, new: ExpertPlacement, *, expert_bytes: int, ranks_per_node: int | None = None
) -> MigrationPlan:
    """Where each slot that changes takes its expert from: its own rank, else its node, else anywhere; among several
    holders the one that has sent the least. The same on every rank that asks. `expert_bytes` are those of one expert in
    one layer. Raises ConfigError where the placements differ in layers, experts, slots or ranks.
    """
    if not is_int(expert_bytes) or expert_bytes < 1:
        raise ConfigError(f"expert_bytes must be an int of at least 1, got {clip(expert_bytes)}")
    per_node = check_ranks_per_node(ranks_per_node, old.num_ranks)
    for name in ("num_layers", "num_logical_experts", "num_slots", "num_ranks"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise ConfigError(f"cannot migrate: the old placement has {name}={before}, the new one {after}")
    per_rank = old.slots_per_rank
    sent = [0] * old.num_ranks
    moves = []
    for layer, slot in np.argwhere(old.physical_to_logical_map != new.physical_to_logical_map).tolist():
        expert = int(new.physical_to_logical_map[layer, slot])
        rank = slot // per_rank
        source = min(
            (holder for holder in old.logical_to_all_physical_map[layer, expert].tolist() if holder >= 0),
            key=lambda holder: _distance(holder // per_rank, rank, per_node, sent),
        )
        if source // per_rank != rank:
            sent[source // per_rank] += 1
        moves.append(
            ExpertMove(
                layer=layer,
                expert=expert,
                source_rank=source // per_rank,
                source_slot=source,
                destination_rank=rank,
                destination_slot=slot,
            )
        )
    return MigrationPlan(moves=tuple(moves), expert_bytes=expert_bytes, ranks_per_node=per_node)


def _distance(source: int, destination: int, per_node: int, sent: list[int]) -> tuple[bool, bool, int]:
    return source != destination, source // per_node != destination // per_node, sent[source]


def count_arrivals(old: ExpertPlacement, new: ExpertPlacement) -> Ints:
    """Experts that each rank must be sent, per layer: those it holds in `new` and did not hold in `old`. [L, ranks]."""
    shape = (old.num_layers, old.num_ranks, old.slots_per_rank)
    before, after = old.physical_to_logical_map.reshape(shape), new.physical_to_logical_map.reshape(shape)
    arrivals: Ints = (after[..., :, None] != before[..., None, :]).all(-1).sum(-1)
    return arrivals
