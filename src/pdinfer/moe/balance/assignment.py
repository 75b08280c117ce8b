"""Experts assigned to the slots of ranks, for many layers at once, and the passes that even out the load of ranks.

A pass takes one step in every layer at a time, so it costs a few numpy calls, whatever the number of layers. A "row"
below is one problem of assignment: a layer, or one node's part of it."""

from __future__ import annotations

import attrs
import numpy as np

from pdinfer.moe.placement.placement import Floats, Ints, Shares, count_replicas, slots_by_expert


def replicate(load_LE: Floats, num_slots: int, max_copies: int) -> Ints:
    """Return how many slots each expert gets: [L, E] -> [L, E], at most `max_copies` each.

    The next slot always goes to the expert with the highest load per copy, which makes that load as low as it can be.
    """
    rows = np.arange(len(load_LE))
    counts = np.ones(load_LE.shape, np.int64)
    per_copy = load_LE.copy()
    for _ in range(num_slots - load_LE.shape[1]):
        expert = per_copy.argmax(1)
        counts[rows, expert] += 1
        copies = counts[rows, expert]
        per_copy[rows, expert] = np.where(copies < max_copies, load_LE[rows, expert] / copies, -1.0)
    return counts


def deal(load_LE: Floats, counts_LE: Ints, num_ranks: int) -> Ints:
    """Deal copies to ranks, heaviest first: [L, num_ranks, slots per rank]. No expert is twice on a rank.

    Every rank gets one copy per round, and the heaviest of a round goes to the rank that has least. Copies of one
    expert are neighbours in that order, and there are at most as many as ranks. So they fall into one round, or into
    the end of one and the beginning of the next, where ranks that have the expert are passed over."""
    num_layers, num_experts = load_LE.shape
    num_slots = int(counts_LE[0].sum())
    rows = np.arange(num_layers)[:, None]
    experts = np.repeat(np.tile(np.arange(num_experts), num_layers), counts_LE.ravel()).reshape(num_layers, num_slots)
    weight = np.take_along_axis(load_LE / counts_LE, experts, 1)
    order = np.argsort(-weight, axis=1, kind="stable")
    shape = (num_layers, -1, num_ranks)
    experts = np.take_along_axis(experts, order, 1).reshape(shape)
    weight = np.take_along_axis(weight, order, 1).reshape(shape)
    table = np.empty((num_layers, num_ranks, experts.shape[1]), np.int64)
    rank_load = np.zeros((num_layers, num_ranks))
    for turn in range(experts.shape[1]):
        ranks = np.argsort(rank_load, axis=1, kind="stable")
        if turn:
            split = experts[:, turn - 1, -1:]
            free = np.take_along_axis(table[:, :, turn - 1] != split, ranks, 1)
            first = free & (free.cumsum(1) <= (experts[:, turn] == split).sum(1, keepdims=True))
            ranks = np.take_along_axis(ranks, np.argsort(~first, axis=1, kind="stable"), 1)
        table[rows, ranks, turn] = experts[:, turn]
        rank_load[rows, ranks] += weight[:, turn]
    return table


@attrs.frozen(eq=False)
class Assignment:
    """Which expert lies in each slot, and how much of its load that slot carries. The passes change it in place.

    `load_LE` is the load of experts. `experts`, int64 [L, ranks, slots per rank], is the expert of each slot, and
    `parts`, float64 of the same shape, what the slot carries. `rank_load` [L, ranks] is the sum of parts."""

    load_LE: Floats
    experts: Ints
    parts: Floats
    rank_load: Floats

    @classmethod
    def of(cls, load_LE: Floats, experts: Ints, shares: Floats | Shares | None = None) -> Assignment:
        """Assign to each slot its share of its expert's load: `shares` [L, P], or equal shares for all copies."""
        flat = experts.reshape(len(experts), -1)
        if shares is None:
            shares = 1 / np.take_along_axis(count_replicas(flat, load_LE.shape[1]), flat, 1)
        parts = (np.take_along_axis(load_LE, flat, 1) * shares).reshape(experts.shape)
        return cls(load_LE, experts.copy(), parts, parts.sum(2))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.experts)

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return int(self.experts.shape[1])

    @property
    def per_rank(self) -> int:
        """Slots per rank."""
        return int(self.experts.shape[2])

    def counts(self) -> Ints:
        """Return how many copies each expert has: [L, E]."""
        return count_replicas(self.experts.reshape(self.num_layers, -1), self.load_LE.shape[1])

    def slots_of(self, expert: Ints) -> Ints:
        """Return the slots of one expert per row, numbered over all ranks and padded with -1: [rows, copies]."""
        here = self.experts.reshape(self.num_layers, -1) == expert[:, None]
        slots = np.argsort(~here, axis=1, kind="stable")[:, : int(here.sum(1).max())]
        return np.where(np.take_along_axis(here, slots, 1), slots, -1)

    def balancedness(self) -> Floats:
        """Return the mean load of a rank over the highest, per layer: [L]; 1 where there is no load."""
        highest = self.rank_load.max(1)
        return np.where(highest > 0, self.rank_load.mean(1) / np.where(highest > 0, highest, 1.0), 1.0)

    def take(self, rows: Ints) -> Assignment:
        """Return a copy of those rows alone."""
        return Assignment(self.load_LE[rows], self.experts[rows], self.parts[rows], self.rank_load[rows])

    def put(self, rows: Ints, part: Assignment) -> None:
        """Write back rows that were taken."""
        self.experts[rows], self.parts[rows], self.rank_load[rows] = part.experts, part.parts, part.rank_load

    def reorder(self, slots: Ints) -> Assignment:
        """Return the assignment whose slot p holds what is in slot `slots[p]` here; [L, P], numbered over all ranks."""
        shape = self.experts.shape
        experts = np.take_along_axis(self.experts.reshape(slots.shape), slots, 1).reshape(shape)
        parts = np.take_along_axis(self.parts.reshape(slots.shape), slots, 1).reshape(shape)
        return Assignment(self.load_LE, experts, parts, parts.sum(2))

    def swap(self, rows: Ints, a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> None:
        """Exchange two slots, each given as (rank, slot within rank), once for each of `rows`."""
        (rank_a, slot_a), (rank_b, slot_b) = a, b
        at_a, at_b = (rows, rank_a, slot_a), (rows, rank_b, slot_b)
        change = self.parts[at_b] - self.parts[at_a]
        for table in (self.experts, self.parts):
            table[at_a], table[at_b] = table[at_b], table[at_a]
        self.rank_load[rows, rank_a] += change
        self.rank_load[rows, rank_b] -= change

    def fill(self, rows: Ints, slots: Ints) -> None:
        """Divide one expert per row over its slots so that the fullest of their ranks is as low as possible, like water
        over a floor. `slots` [rows, copies] is numbered over all ranks and padded with -1."""
        real = slots >= 0
        at = (rows[:, None], slots // self.per_rank, slots % self.per_rank)
        part = np.where(real, self.parts[at], 0.0)
        floor = np.where(real, self.rank_load[at[:2]] - part, np.inf)
        sums = np.cumsum(np.sort(floor, 1), 1)
        level = ((part.sum(1, keepdims=True) + sums) / np.arange(1, sums.shape[1] + 1)).min(1, keepdims=True)
        new = np.maximum(level - floor, 0.0)
        given = new.sum(1, keepdims=True)
        # where the floor is so high that rounding swallows or invents load
        new = np.where(given > 0, new * (part.sum(1, keepdims=True) / np.where(given > 0, given, 1.0)), part)
        row, copy = np.nonzero(real)
        where = (rows[row], at[1][row, copy], at[2][row, copy])
        self.parts[where] = new[row, copy]
        self.rank_load[where[:2]] = floor[row, copy] + new[row, copy]

    def spread(self, rows: Ints, sweeps: int) -> None:
        """Divide every replicated expert of those rows over its slots, one after another, `sweeps` times.

        Each division lowers the sum of squares of rank loads, which is smooth and convex in the parts. Repetition
        converges to the division whose fullest rank is the lowest that these slots allow."""
        if not len(rows):
            return
        part = self.take(rows)
        counts, index = part.counts(), np.arange(len(rows))
        slots = slots_by_expert(part.experts.reshape(len(rows), -1), counts)
        by_load = np.argsort(-np.where(counts > 1, part.load_LE, -1.0), axis=1, kind="stable")
        for _ in range(sweeps):
            for nth in range(int((counts > 1).sum(1).max())):
                expert = by_load[:, nth]
                live = np.nonzero(counts[index, expert] > 1)[0]
                expert = expert[live]
                part.fill(live, slots[live, expert, : int(counts[live, expert].max())])
        self.put(rows, part)


def swap_pairs(assignment: Assignment, enough_L: Floats, rounds: int) -> None:
    """Pair the fuller half of each row's ranks with the emptier half, and exchange the two experts that bring each pair
    closest to even.

    Every round makes other pairs and treats all of them at once, which is coarse and fast. Rows whose fullest rank has
    no more than `enough_L` are left alone."""
    half = assignment.num_ranks // 2
    for turn in range(rounds if half else 0):
        live = np.nonzero(assignment.rank_load.max(1) > enough_L)[0]
        if not len(live):
            break
        row = live[:, None]
        order = np.argsort(-assignment.rank_load[live], axis=1)
        full, empty = order[:, :half], np.roll(order[:, ::-1][:, :half], -turn, 1)
        gap = (assignment.rank_load[row, full] - assignment.rank_load[row, empty])[:, :, None, None]
        miss = np.abs(assignment.parts[row, full][..., :, None] - assignment.parts[row, empty][..., None, :] - gap / 2)
        same = assignment.experts[row, full][..., :, None] == assignment.experts[row, empty][..., None, :]
        miss[same.any(3)] = np.inf
        np.swapaxes(miss, 2, 3)[same.any(2)] = np.inf
        miss = miss.reshape(len(live), half, -1)
        best = miss.argmin(2)
        at, pair = np.nonzero(miss.min(2) < gap[..., 0, 0] / 2 * (1 - 1e-9))
        give, take = np.divmod(best[at, pair], assignment.per_rank)
        assignment.swap(live[at], (full[at, pair], give), (empty[at, pair], take))
