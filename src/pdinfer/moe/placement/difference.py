"""What has to be copied to get from one placement of experts to another, and what it costs."""

from __future__ import annotations

import attrs
import numpy as np

from pdinfer.checks import typed
from pdinfer.moe.placement.placement import ExpertPlacement, Floats, Ints, check_ranks_per_node, check_sizes
from pdinfer.values import Value


@attrs.frozen(kw_only=True)
class ExpertMove(Value):
    """One copy of an expert's weights in one layer. Slots are those of `physical_to_logical_map`, 0..P-1."""

    layer: int
    expert: int
    source_rank: int
    source_slot: int
    destination_rank: int
    destination_slot: int


@typed
def plan_migration(
    old: ExpertPlacement, new: ExpertPlacement, *, ranks_per_node: int | None = None
) -> tuple[ExpertMove, ...]:
    """Return the copies that turn `old` into `new`, ordered by layer and destination slot: the same for every rank.

    Sources are slots of `old`, and some are also destinations: a slot may be overwritten once all moves of its layer
    have been read.

    A slot that changes takes its expert from its own rank, else from its node, else from any rank; among several
    holders, from the one that has sent the least. Raises ConfigError where the placements differ in layers, experts,
    slots or ranks."""
    per_node = check_ranks_per_node(ranks_per_node, old.num_ranks)
    check_sizes("the new placement", new, "the old one has", old)
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
    return tuple(moves)


def _distance(source: int, destination: int, per_node: int, sent: list[int]) -> tuple[bool, bool, int]:
    return source != destination, source // per_node != destination // per_node, sent[source]


def count_arrivals(old: Ints, new: Ints) -> Ints:
    """Count the experts that each rank must be sent: those it holds in `new` and did not hold in `old`. Both maps are
    [L, ranks, slots per rank], the result is [L, ranks]."""
    arrivals: Ints = (new[..., :, None] != old[..., None, :]).all(-1).sum(-1)
    return arrivals


def keep_slots(old: Ints, new: Ints, num_nodes: int) -> Ints:
    """Reorder `new` so that many experts stay where they are in `old`.

    Nodes, ranks of a node and slots of a rank change places with their like. Both maps are [L, ranks, slots per rank].
    The result, [L, P], is the slot of `new` to put into each slot, numbered over all ranks."""
    num_layers, num_ranks, per_rank = old.shape
    by_node = (num_layers, num_nodes, -1)
    node = _match(_overlap(old.reshape(by_node), new.reshape(by_node)))
    overlap = _overlap(old, new)
    node_of = np.arange(num_ranks) // (num_ranks // num_nodes)
    foreign = node[:, node_of][:, :, None] != node_of
    rank = _match(np.where(foreign, -1.0, overlap))
    new = np.take_along_axis(new, rank[:, :, None], 1)
    same = old[..., :, None] == new[..., None, :]
    stays, arrived = same.any(3), ~same.any(2)
    slot = np.empty_like(old)
    order = np.argsort(stays, axis=2, kind="stable")
    np.put_along_axis(slot, order, np.argsort(~arrived, axis=2, kind="stable"), 2)
    slot = np.where(stays, same.argmax(3), slot)
    slots: Ints = (rank[:, :, None] * per_rank + slot).reshape(num_layers, -1)
    return slots


def _overlap(old: Ints, new: Ints) -> Floats:
    """Count the experts that every part of `old` has in common with every part of `new`: [L, parts, parts]."""
    num_layers, parts, _ = old.shape
    at = (np.arange(num_layers)[:, None, None], np.arange(parts)[:, None])
    held = np.zeros((2, num_layers, parts, int(old.max()) + 1))
    held[0][(*at, old)] = held[1][(*at, new)] = 1.0
    common: Floats = held[0] @ held[1].swapaxes(1, 2)
    return common


def _match(overlap: Floats) -> Ints:
    """Pair each first index with one second index, the pair with most in common first: [L, parts, parts] -> [L, parts].

    Pairs below 0 are taken only when nothing else is left."""
    num_layers, parts, _ = overlap.shape
    rows = np.arange(num_layers)
    overlap = overlap.copy()
    chosen = np.empty((num_layers, parts), np.int64)
    for _ in range(parts):
        first, second = np.divmod(overlap.reshape(num_layers, -1).argmax(1), parts)
        chosen[rows, first] = second
        overlap[rows, first] = overlap[rows, :, second] = -2.0
    return chosen
