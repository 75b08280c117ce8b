"""The placement of experts for a load: even over ranks, near the previous placement, and near their group's node.

    deal      copies go to ranks heaviest first, pairs of ranks even out    (assignment)
    relieve   the fullest rank of each layer, one exchange at a time        (exchange)
    spread    uneven shares for the copies of an expert                     (assignment)

With a previous placement, relieving and spreading start from it. A layer is laid out anew only where that does not come
near enough to the best layout known for it."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from pdinfer.checks import as_float, clip, float_in, int_in, typed
from pdinfer.errors import ConfigError
from pdinfer.moe.balance.assignment import Assignment, deal, replicate, swap_pairs
from pdinfer.moe.balance.deepseek import check_divides, check_load, scaled
from pdinfer.moe.balance.exchange import Homes, adopt_counts, part_twins, relieve
from pdinfer.moe.placement.difference import count_arrivals, keep_slots
from pdinfer.moe.placement.placement import MAX_EXPERTS, MAX_RANKS, ExpertPlacement, Floats, check_sizes, find_twins

EVEN = 0.9995  # balancedness at which a layer is left alone
PAIR_ROUNDS = 8
SWEEPS = 3
CYCLES = 3


@attrs.frozen(kw_only=True)
class _Sizes:
    num_ranks: int = attrs.field(validator=int_in(1, MAX_RANKS))
    num_redundant: int = attrs.field(validator=int_in(0, MAX_EXPERTS))
    num_groups: int = attrs.field(validator=int_in(1, MAX_EXPERTS))
    num_nodes: int = attrs.field(validator=int_in(1, MAX_RANKS))
    cross_node_weight: float
    tolerance: float = attrs.field(validator=float_in(0.0, 1.0, low_included=True), converter=as_float)

    def check(self, num_experts: int) -> None:
        """Raise ConfigError where experts, slots, ranks and nodes do not divide."""
        weight, slots = self.cross_node_weight, num_experts + self.num_redundant
        if weight < 0:
            raise ConfigError(f"cross_node_weight must be a number of at least 0, got {clip(weight)}")
        check_divides("experts + num_redundant =", slots, "num_ranks", self.num_ranks)
        check_divides("num_ranks", self.num_ranks, "num_nodes", self.num_nodes)
        check_divides("experts", num_experts, "num_groups", self.num_groups)
        if weight and self.num_groups % self.num_nodes:
            raise ConfigError(
                f"cross_node_weight {weight} needs groups that divide over nodes, got num_groups {self.num_groups} and "
                f"num_nodes {self.num_nodes}; use cross_node_weight 0"
            )
        if slots > num_experts * self.num_ranks // self.packs:
            raise ConfigError(
                f"{slots} slots on {self.num_ranks} ranks are more than {num_experts} experts can fill without lying "
                "twice on one rank; lower num_redundant"
            )

    @property
    def packs(self) -> int:
        """Into how many packs experts are dealt first: one per node where the node matters, else one."""
        return self.num_nodes if self.cross_node_weight else 1


@typed
def solve_placement(
    load: Any,
    *,
    num_ranks: int,
    num_redundant: int = 0,
    num_groups: int = 1,
    num_nodes: int = 1,
    cross_node_weight: float = 0.0,
    previous: ExpertPlacement | None = None,
    max_moves: int | None = None,
    tolerance: float = 0.005,
) -> ExpertPlacement:
    """Return a placement of `experts + num_redundant` slots on which `load` falls evenly. Deterministic.

    `load` is [layers, experts], as `check_load` takes it. Copies of an expert always lie on different ranks. They take
    unequal shares (`slot_shares`) where that evens out the ranks.

    `cross_node_weight`: experts come in `num_groups` groups, and a token is routed to few of them, so a group that
    stays on one node costs less traffic. The weight is what it would cost, in loads of a mean rank, if all load were
    served away from its group's node: 0 looks at balance alone, `math.inf` keeps every group on a node.

    `previous`: experts stay where they are in a layer whose fullest rank then has at most `tolerance`, in loads of a
    mean rank, more than in a new layout. Other layers are laid out anew, on the ranks and slots that have most of their
    experts. `max_moves` bounds the experts that ranks must be sent (bytes over bytes of an expert). The worst layers
    come first, and 0 changes shares alone. Where `previous` has an expert twice on a rank, a copy of another expert
    takes the place of the second, one move each; layers for which `max_moves` does not allow that stay as they are.

    Raises ConfigError for sizes that do not divide, loads that `check_load` refuses, and a previous placement of other
    sizes."""
    load_LE = scaled(check_load(load), 0)
    sizes = _Sizes(
        num_ranks=num_ranks,
        num_redundant=num_redundant,
        num_groups=num_groups,
        num_nodes=num_nodes,
        cross_node_weight=cross_node_weight,
        tolerance=tolerance,
    )
    sizes.check(load_LE.shape[1])
    if max_moves is not None and (previous is None or max_moves < 0):
        raise ConfigError(f"max_moves must be an int of at least 0, beside a previous placement, got {clip(max_moves)}")
    anew = _lay_out(load_LE, sizes)
    if previous is None:
        return _placement(anew)
    check_sizes("the previous placement", previous, "asked for are", _placement(anew))
    return _placement(_follow(previous, anew, sizes, math.inf if max_moves is None else max_moves))


def _lay_out(load_LE: Floats, sizes: _Sizes) -> Assignment:
    """Return the best known assignment, whatever the previous placement."""
    (num_layers, num_experts), packs = load_LE.shape, sizes.packs
    rows, ranks = num_layers * packs, sizes.num_ranks // packs
    grouped = load_LE.reshape(num_layers, sizes.num_groups, -1)
    groups = np.tile(np.arange(sizes.num_groups), (num_layers, 1, 1))
    if packs > 1:
        groups = deal(grouped.sum(2), np.ones_like(groups[:, 0]), packs)
    size = grouped.shape[2]
    of_pack = (groups[..., None] * size + np.arange(size)).reshape(num_layers, packs, -1)
    pack_load = np.take_along_axis(load_LE[:, None], of_pack, 2).reshape(rows, -1)
    counts = replicate(pack_load, (num_experts + sizes.num_redundant) // packs, ranks)
    assignment = Assignment.of(pack_load, deal(pack_load, counts, ranks))
    # No rank of a layer gets below the mean of its fullest node, so other nodes need not either.
    floor = assignment.rank_load.mean(1).reshape(num_layers, packs).max(1)
    enough = np.repeat(floor, packs) / EVEN
    swap_pairs(assignment, enough, PAIR_ROUNDS)
    relieve(assignment, enough_L=enough)
    experts = np.take_along_axis(of_pack.reshape(rows, -1), assignment.experts.reshape(rows, -1), 1)
    whole = Assignment.of(load_LE, experts.reshape(num_layers, sizes.num_ranks, -1))
    if not math.isinf(sizes.cross_node_weight):
        floor = whole.rank_load.mean(1)
    _even_out(whole, floor / EVEN, sizes, max_moves=math.inf, may_copy=False)
    return whole


def _even_out(assignment: Assignment, enough_L: Floats, sizes: _Sizes, max_moves: float, may_copy: bool) -> int:
    """Spread and relieve in turns, as long as moves are made. Return the number of moves."""
    homes = _homes(assignment, sizes)
    total = 0
    for _ in range(CYCLES):
        assignment.spread(np.nonzero(assignment.rank_load.max(1) > enough_L)[0], SWEEPS)
        left = max_moves - total
        moves = relieve(assignment, enough_L=enough_L, homes=homes, may_copy=may_copy, max_moves=left)
        total += moves
        if not moves:
            break
    return total


def _follow(previous: ExpertPlacement, anew: Assignment, sizes: _Sizes, max_moves: float) -> Assignment:
    """Return the previous placement, changed only until it comes near enough to the new layout."""
    table = previous.physical_to_logical_map.reshape(anew.experts.shape)
    start = Assignment.of(anew.load_LE, table, previous.slot_shares)
    moves = part_twins(start, _homes(start, sizes), max_moves)
    fit = np.nonzero(~find_twins(start.experts).any((1, 2)))[0]
    start.put(fit, _improve(start.take(fit), anew.take(fit), sizes, max_moves - moves))
    return start


def _improve(start: Assignment, anew: Assignment, sizes: _Sizes, max_moves: float) -> Assignment:
    """Return layers that come near enough to the new layout: by single steps, else by adopting its replica counts, else
    by taking it as it is."""
    enough = start.rank_load.mean(1) * (1 / anew.balancedness() + sizes.tolerance)
    kept = start.take(np.arange(start.num_layers))
    _even_out(kept, enough, sizes, max_moves, may_copy=True)
    arrivals = count_arrivals(start.experts, kept.experts).sum(1)
    for adopt in (True, False):
        gain = _score(kept, sizes) - _score(anew, sizes)
        behind = np.nonzero(gain > sizes.tolerance + 1e-6)[0]
        behind = behind[np.argsort(-gain[behind], kind="stable")]
        if not len(behind):
            break
        old, other = start.take(behind), anew.take(behind)
        if adopt:
            other = adopt_counts(old, other.counts(), _homes(old, sizes))
            _even_out(other, enough[behind], sizes, max_moves=math.inf, may_copy=False)
        else:
            other = other.reorder(keep_slots(old.experts, other.experts, sizes.num_nodes))
        needed = count_arrivals(old.experts, other.experts).sum(1)
        better = _score(other, sizes) < _score(kept.take(behind), sizes)
        more = np.where(better, needed - arrivals[behind], 0)
        better &= arrivals.sum() + np.maximum(more, 0).cumsum() <= max_moves
        chosen = np.nonzero(better)[0]
        kept.put(behind[chosen], other.take(chosen))
        arrivals[behind[chosen]] = needed[chosen]
    return kept


def _score(assignment: Assignment, sizes: _Sizes) -> Floats:
    """Return the load of the fullest rank plus the price of load away from home, in loads of a mean rank: [L]."""
    mean = assignment.rank_load.mean(1)
    homes = _homes(assignment, sizes)
    price = np.zeros(assignment.num_layers) if homes is None else homes.price(homes.away(assignment))
    return 1 / assignment.balancedness() + price / np.where(mean > 0, mean, 1.0)


def _homes(assignment: Assignment, sizes: _Sizes) -> Homes | None:
    """Return the homes of experts, the node with most of the slots of their group; None where they do not matter."""
    if not sizes.cross_node_weight:
        return None
    node = np.arange(sizes.num_ranks) // (sizes.num_ranks // sizes.num_nodes)
    group_size = assignment.load_LE.shape[1] // sizes.num_groups
    held = np.zeros((assignment.num_layers, sizes.num_groups, sizes.num_nodes), np.int64)
    layer = np.arange(assignment.num_layers)[:, None, None]
    np.add.at(held, (layer, assignment.experts // group_size, node[:, None]), 1)
    home = np.repeat(held.argmax(2), group_size, axis=1)
    return Homes(node_LE=home, rank_node=node, weight=float(sizes.cross_node_weight))


def _placement(assignment: Assignment) -> ExpertPlacement:
    shape = (assignment.num_layers, -1)
    table, parts = assignment.experts.reshape(shape), assignment.parts.reshape(shape)
    load, counts = (np.take_along_axis(of_expert, table, 1) for of_expert in (assignment.load_LE, assignment.counts()))
    even = 1.0 / counts
    shares = np.where(load > 0, parts / np.where(load > 0, load, 1.0), even)
    return ExpertPlacement(
        physical_to_logical_map=table,
        num_logical_experts=assignment.load_LE.shape[1],
        num_ranks=assignment.num_ranks,
        slot_shares=None if np.allclose(shares, even) else shares,
    )
