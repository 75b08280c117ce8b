"""Relief for the fullest rank of every layer, one exchange at a time."""

from __future__ import annotations

import math

import attrs
import numpy as np

from pdinfer.moe.balance.assignment import Assignment
from pdinfer.moe.placement.placement import Bools, Floats, Ints, count_replicas, find_twins

SWAP_MOVES, COPY_MOVES = 2, 1
MAX_ROUNDS = 200
PROGRESS = 1e-7  # what a step must gain at least, of the fullest rank's load


@attrs.frozen(kw_only=True, eq=False)
class Homes:
    """Where experts should be, if it matters.

    `node_LE` is the node of each expert's group, `rank_node` the node of each rank. `weight` is what it would cost if
    no expert were at home, in loads of a mean rank; infinity forbids it."""

    node_LE: Ints
    rank_node: Ints
    weight: float

    def take(self, rows: Ints) -> Homes:
        """Return the homes of those layers alone."""
        return attrs.evolve(self, node_LE=self.node_LE[rows])

    def price(self, away: Floats) -> Floats:
        """Return the price of load away from home. Load that comes home earns nothing where `weight` is infinite."""
        if math.isinf(self.weight):
            return np.where(away > 0, math.inf, 0.0)
        return away * (self.weight / len(self.rank_node))

    def at_home(self, layer: int, rank: int) -> Bools:
        """Return which experts are at home on a rank: [E]."""
        at_home: Bools = self.node_LE[layer] == self.rank_node[rank]
        return at_home

    def away(self, assignment: Assignment) -> Floats:
        """Return how much load is away from home, per layer: [L]."""
        rows = np.arange(assignment.num_layers)[:, None, None]
        at_home = self.node_LE[rows, assignment.experts] == self.rank_node[:, None]
        away: Floats = np.where(at_home, 0.0, assignment.parts).sum((1, 2))
        return away


@attrs.frozen(kw_only=True, eq=False)
class _Step:
    """The best step of each row: the load of the fuller of the two ranks after it, and the two slots.

    Where `copies` is set, the slot of the other rank takes a copy of the hot rank's expert instead of an exchange."""

    score: Floats
    copies: Bools
    hot: Ints
    hot_slot: Ints
    rank: Ints
    slot: Ints


def relieve(
    assignment: Assignment,
    *,
    enough_L: Floats,
    homes: Homes | None = None,
    may_copy: bool = False,
    max_moves: float = math.inf,
) -> int:
    """Lower the load of the fullest rank of each layer, and return the number of moves made.

    It ends when that load is `enough_L`, no step lowers it, or the moves are used up; the fullest layers come first. A
    step exchanges an expert of the fullest rank with one of another rank (two moves). With `may_copy`, it may instead
    put a copy of one of its experts in the place of a copy whose siblings can take over (one move)."""
    moves = 0
    copying = np.full(assignment.num_layers, may_copy)
    live = np.nonzero(assignment.rank_load.max(1) > enough_L)[0]
    for _ in range(MAX_ROUNDS):
        if not len(live):
            break
        part = assignment.take(live)
        step = _best_step(part, None if homes is None else homes.take(live), copying[live])
        highest = part.rank_load.max(1)
        chosen = np.nonzero(step.score < highest * (1 - PROGRESS))[0]
        chosen = chosen[np.argsort(-highest[chosen] / enough_L[live[chosen]], kind="stable")]
        cost = np.where(step.copies[chosen], COPY_MOVES, SWAP_MOVES)
        chosen = chosen[moves + cost.cumsum() <= max_moves]
        if not len(chosen):
            break
        swaps, copies = chosen[~step.copies[chosen]], chosen[step.copies[chosen]]
        assignment.swap(live[swaps], (step.hot[swaps], step.hot_slot[swaps]), (step.rank[swaps], step.slot[swaps]))
        copied = _copy(assignment, part, step, copies, live)
        copying[live[np.setdiff1d(copies, copied)]] = False
        moves += SWAP_MOVES * len(swaps) + COPY_MOVES * len(copied)
        live = live[np.sort(chosen)]
        live = live[assignment.rank_load[live].max(1) > enough_L[live]]
    return moves


def _best_step(part: Assignment, homes: Homes | None, copying: Bools) -> _Step:
    """Compare every slot of each row's fullest rank with every slot of the others, and return the best steps."""
    num_rows, per_rank = part.num_layers, part.per_rank
    rows = np.arange(num_rows)
    hot, highest = part.rank_load.argmax(1), part.rank_load.max(1)[:, None, None, None]
    mine, theirs = part.experts[rows, hot][:, :, None, None], part.experts[:, None]
    my_part, their_part = part.parts[rows, hot][:, :, None, None], part.parts[:, None]
    load = part.rank_load[:, None, :, None]
    same = mine == theirs
    holds = same.any(3, keepdims=True)  # [rows, my slots, ranks, 1]: the rank has my expert already
    score = np.maximum(highest - my_part + their_part, load - their_part + my_part)
    if homes is not None:
        my_home, their_home = (homes.node_LE[rows[:, None, None, None], expert] for expert in (mine, theirs))
        my_node, their_node = homes.rank_node[hot][:, None, None, None], homes.rank_node[None, None, :, None]
        leave = ((my_home != their_node).astype(float) - (my_home != my_node)) * my_part
        come = ((their_home != my_node).astype(float) - (their_home != their_node)) * their_part
        score = score + homes.price(leave + come)
    score = np.where(holds | same.any(1, keepdims=True), math.inf, score).reshape(num_rows, -1)
    best, lowest = score.argmin(1), score.min(1)
    copies = np.zeros(num_rows, bool)
    if copying.any():
        copied = np.maximum((highest + load - their_part) / 2, highest - my_part)
        if homes is not None:
            copied = copied + homes.price(leave / 2)
        spare = _spared(part) & copying[:, None, None]
        copied = np.where(holds | ~spare[:, None], math.inf, copied).reshape(num_rows, -1)
        copies = copied.min(1) < lowest
        best, lowest = np.where(copies, copied.argmin(1), best), np.minimum(copied.min(1), lowest)
    hot_slot, other = np.divmod(best, part.num_ranks * per_rank)
    rank, slot = np.divmod(other, per_rank)
    return _Step(score=lowest, copies=copies, hot=hot, hot_slot=hot_slot, rank=rank, slot=slot)


def _spared(part: Assignment) -> Bools:
    """Return which slots can be spared: [rows, ranks, slots] bool.

    The other copies of their expert can take the load without filling a rank more than halfway from the mean to the
    fullest."""
    level = (part.rank_load.mean(1) + part.rank_load.max(1)) / 2
    room = np.maximum(level[:, None] - part.rank_load, 0.0)[:, :, None] + np.zeros(part.per_rank)
    num_experts = part.load_LE.shape[1]
    flat = part.experts + np.arange(part.num_layers)[:, None, None] * num_experts
    total = np.bincount(flat.ravel(), room.ravel(), minlength=part.num_layers * num_experts)
    spared: Bools = (total[flat] - room >= part.parts) & (part.counts().ravel()[flat] > 1)
    return spared


def _copy(assignment: Assignment, part: Assignment, step: _Step, chosen: Ints, live: Ints) -> Ints:
    """Make those copies and divide the load of both experts anew. Return the rows in which that was better."""
    if not len(chosen):
        return chosen
    part = part.take(chosen)
    rows = np.arange(len(chosen))
    before = part.rank_load.copy()
    at = (rows, step.rank[chosen], step.slot[chosen])
    expert = part.experts[rows, step.hot[chosen], step.hot_slot[chosen]]
    gone = part.experts[at]
    part.experts[at] = -1
    left = part.slots_of(gone)
    heir = (rows, *np.divmod(left[:, 0], part.per_rank))
    part.parts[heir] += part.parts[at]
    part.rank_load[heir[:2]] += part.parts[at]
    part.rank_load[at[:2]] -= part.parts[at]
    part.parts[at] = 0.0
    part.fill(rows, left)
    part.experts[at] = expert
    part.fill(rows, part.slots_of(expert))
    better = np.nonzero(
        (part.rank_load.max(1) <= before.max(1) * (1 + PROGRESS))
        & ((part.rank_load**2).sum(1) < (before**2).sum(1) * (1 - PROGRESS))
    )[0]
    assignment.put(live[chosen[better]], part.take(better))
    kept: Ints = chosen[better]
    return kept


def adopt_counts(assignment: Assignment, counts_LE: Ints, homes: Homes | None) -> Assignment:
    """Return the assignment changed towards `counts_LE` copies of each expert, with equal shares.

    Each step takes the most loaded expert that has too few copies. It puts a copy in a slot of an expert that has too
    many, on the emptiest rank that lacks it, at home where that matters. It ends when no such step is left."""
    experts = assignment.experts.copy()
    num_layers = len(experts)
    rows = np.arange(num_layers)
    flat = experts.reshape(num_layers, -1)
    load_LE = assignment.load_LE
    undone = np.ones(load_LE.shape, bool)
    while True:
        now = count_replicas(flat, load_LE.shape[1])
        wanted = np.where((counts_LE > now) & undone, load_LE / now, -1.0)
        expert = wanted.argmax(1)
        parts = np.take_along_axis(load_LE / now, flat, 1).reshape(experts.shape)
        free = np.take_along_axis(now > counts_LE, flat, 1).reshape(experts.shape)
        free &= (experts != expert[:, None, None]).all(2, keepdims=True)
        if homes is not None:
            free &= (homes.node_LE[rows, expert][:, None] == homes.rank_node)[:, :, None]
        others = np.where(free, parts.sum(2, keepdims=True) - parts, math.inf).reshape(num_layers, -1)
        live = np.nonzero(wanted.max(1) >= 0)[0]
        if not len(live):
            return Assignment.of(load_LE, experts)
        done = live[np.isfinite(others.min(1)[live])]
        flat[done, others.argmin(1)[done]] = expert[done]
        stuck = np.setdiff1d(live, done)
        undone[stuck, expert[stuck]] = False


def part_twins(assignment: Assignment, homes: Homes | None, max_moves: float) -> int:
    """Replace the second copy of every expert that is twice on a rank, and return the number of moves made.

    Its place goes to the expert with most load per copy that the rank lacks, of those at home there if there are any.
    Copies in such a layer then have equal shares. Layers with the fewest twins come first, as long as the moves last.
    """
    twins = find_twins(assignment.experts)
    cost = twins.sum((1, 2))
    order = np.argsort(cost, kind="stable")
    order = order[cost[order] > 0]
    order = order[cost[order].cumsum() <= max_moves]
    for layer in order:
        experts, load = assignment.experts[layer], assignment.load_LE[layer]
        for rank, slot in np.argwhere(twins[layer]):
            counts = np.bincount(experts.ravel(), minlength=len(load))
            at_home = 1.0 if homes is None else homes.at_home(layer, rank)
            rating = at_home * load.sum() + load / counts
            rating[experts[rank]] = -1.0
            experts[rank, slot] = rating.argmax()
    if len(order):
        assignment.put(order, Assignment.of(assignment.load_LE[order], assignment.experts[order]))
    return int(cost[order].sum())
