"""Which slot of which rank holds which expert, and which copy of an expert a rank sends its tokens to.

All ranks have the same number of slots: of P physical experts, rank r holds slots `r * P / num_ranks` up to the first
of rank r + 1. A logical expert (what the router chooses) lies in one slot or in several. Two copies on one rank are
legal, and DeepSeek's balancer makes such maps. Both are used, though they even out nothing.
"""

from __future__ import annotations

import enum
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdinfer.checks import clip, int_in, typed
from pdinfer.errors import ConfigError
from pdinfer.values import Value

MAX_EXPERTS = 1 << 16
MAX_RANKS = 1 << 16

SHARE_ERROR = 1e-5

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Shares = npt.NDArray[np.float32]


def _int_map(value: Any) -> Ints:
    """Return a read-only int64 copy of a [layers, slots] table of ints. Raises ConfigError for anything else."""
    try:
        table = np.asarray(value)
    except (TypeError, ValueError) as failure:
        raise ConfigError(f"physical_to_logical_map is not a table of [layers][slots]: {clip(str(failure))}") from None
    if table.ndim != 2 or 0 in table.shape or table.dtype.kind not in "iu":
        raise ConfigError(
            "physical_to_logical_map must be a table of ints, [layers][slots] with at least one of each, got "
            f"{table.dtype} of shape {table.shape}"
        )
    table = table.astype(np.int64)
    table.flags.writeable = False
    return table


def _share_map(value: Any) -> Shares | None:
    """Return a read-only float32 copy of a [layers, slots] table, or None. Raises ConfigError for anything else."""
    if value is None:
        return None
    try:
        table = np.asarray(value)
    except (TypeError, ValueError) as failure:
        raise ConfigError(f"slot_shares is not a table of [layers][slots]: {clip(str(failure))}") from None
    if table.dtype.kind not in "iuf":
        raise ConfigError(f"slot_shares must be a table of numbers, [layers][slots], got {table.dtype}")
    shares = table.astype(np.float32)
    shares.flags.writeable = False
    return shares


def _same(ours: Shares | None, theirs: Shares | None) -> bool:
    return ours is theirs or (ours is not None and theirs is not None and np.array_equal(ours, theirs))


@attrs.frozen(kw_only=True)
class ExpertPlacement(Value):
    """The expert in every slot, for every mixture-of-experts layer.

    `physical_to_logical_map` is int64 [L, P] and read-only, a copy of the argument (nested lists, an array).
    `slot_shares`, float32 [L, P] and read-only, is the part of its expert's tokens that each slot receives. The shares
    of an expert's slots sum to 1; None means equal shares. Placements compare by value. Raises ConfigError, with the
    values, for slots that do not divide over ranks, experts out of range, an expert without a slot, and shares that do
    not fit.
    """

    physical_to_logical_map: Ints = attrs.field(
        converter=_int_map, eq=attrs.cmp_using(eq=np.array_equal), hash=False, repr=False
    )
    num_logical_experts: int = attrs.field(validator=int_in(1, MAX_EXPERTS))
    num_ranks: int = attrs.field(validator=int_in(1, MAX_RANKS))
    slot_shares: Shares | None = attrs.field(
        default=None, converter=_share_map, eq=attrs.cmp_using(eq=_same), hash=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        slots, ranks, experts = self.num_slots, self.num_ranks, self.num_logical_experts
        if slots % ranks:
            raise ConfigError(f"{slots} slots cannot be divided evenly over {ranks} ranks")
        table = self.physical_to_logical_map
        if (outside := np.argwhere((table < 0) | (table >= experts))).size:
            layer, slot = outside[0]
            raise ConfigError(
                f"layer {layer}, slot {slot} holds expert {table[layer, slot]}, outside 0..{experts - 1} "
                f"(num_logical_experts={experts})"
            )
        if (missing := np.argwhere(self.logical_replica_counts == 0)).size:
            layer, expert = missing[0]
            raise ConfigError(f"layer {layer} has no slot for expert {expert}; each of {experts} experts needs one")
        if self.slot_shares is not None:
            self._check_shares(self.slot_shares)

    def _check_shares(self, shares: Shares) -> None:
        table = self.physical_to_logical_map
        if shares.shape != table.shape:
            raise ConfigError(f"slot_shares has shape {shares.shape}, the map of slots {table.shape}")
        if (bad := np.argwhere(~((shares >= 0) & (shares <= 1 + SHARE_ERROR)))).size:
            layer, slot = bad[0]
            raise ConfigError(f"layer {layer}, slot {slot} has share {shares[layer, slot]}, outside 0..1")
        sums = np.zeros((self.num_layers, self.num_logical_experts))
        np.add.at(sums, (np.arange(self.num_layers)[:, None], table), shares)
        if (bad := np.argwhere(abs(sums - 1) > SHARE_ERROR)).size:
            layer, expert = bad[0]
            raise ConfigError(f"layer {layer}: the shares of expert {expert} sum to {sums[layer, expert]}, not to 1")

    @classmethod
    @typed
    def trivial(cls, num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
        """Return the placement with expert `p % num_experts` in slot p, in every layer."""
        for name, value, least in (
            ("num_layers", num_layers, 1),
            ("num_experts", num_experts, 1),
            ("num_redundant", num_redundant, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_EXPERTS:
                raise ConfigError(f"{name} must be an int from {least} to {MAX_EXPERTS}, got {clip(value)}")
        row = np.arange(num_experts + num_redundant) % num_experts
        return cls(
            physical_to_logical_map=np.tile(row, (num_layers, 1)),
            num_logical_experts=num_experts,
            num_ranks=num_ranks,
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.physical_to_logical_map.shape[0])

    @property
    def num_slots(self) -> int:
        """P, over all ranks."""
        return int(self.physical_to_logical_map.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """P / num_ranks."""
        return self.num_slots // self.num_ranks

    @cached_property
    def twins(self) -> Bools:
        """The slots whose expert also lies in an earlier slot of the same rank: bool [L, P], read-only."""
        found = find_twins(self.physical_to_logical_map.reshape(self.num_layers, self.num_ranks, -1))
        found.flags.writeable = False
        return found.reshape(self.num_layers, -1)

    @typed
    def slots_of(self, rank: int) -> range:
        """Return the slots that lie on a rank. Raises ConfigError when there is no such rank."""
        _check_rank(rank, self)
        return range(rank * self.slots_per_rank, (rank + 1) * self.slots_per_rank)

    @cached_property
    def logical_replica_counts(self) -> Ints:
        """How many slots hold each expert: [L, E], read-only."""
        return _frozen(count_replicas(self.physical_to_logical_map, self.num_logical_experts))

    @cached_property
    def logical_to_all_physical_map(self) -> Ints:
        """The slots that hold each expert, ascending and padded with -1: [L, E, most copies], read-only."""
        table, counts = self.physical_to_logical_map, self.logical_replica_counts
        return _frozen(slots_by_expert(table, counts))


def _frozen(array: Ints) -> Ints:
    array.flags.writeable = False
    return array


def count_replicas(table: Ints, num_experts: int) -> Ints:
    """Count how often each of `num_experts` occurs in every row: [L, P] -> [L, E]."""
    num_layers = len(table)
    flat = table + np.arange(num_layers)[:, None] * num_experts
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def find_twins(table_LRS: Ints) -> Bools:
    """Return whether the expert of each slot is also in an earlier slot of its rank; bool, in the shape of the map."""
    order = np.argsort(table_LRS, axis=2, kind="stable")
    experts = np.take_along_axis(table_LRS, order, 2)
    same = np.zeros(table_LRS.shape, np.bool_)
    same[:, :, 1:] = experts[:, :, 1:] == experts[:, :, :-1]
    found = np.empty_like(same)
    np.put_along_axis(found, order, same, 2)
    return found


def slots_by_expert(table: Ints, counts: Ints) -> Ints:
    """Invert a map from slots to experts: [L, P], with its counts [L, E] -> [L, E, counts.max()], padded with -1."""
    num_layers, num_slots = table.shape
    slots = np.argsort(table, axis=1, kind="stable")
    experts = np.take_along_axis(table, slots, axis=1)
    first = np.cumsum(counts, axis=1) - counts
    nth = np.arange(num_slots) - np.take_along_axis(first, experts, axis=1)
    result = np.full((num_layers, counts.shape[1], int(counts.max())), -1, np.int64)
    result[np.arange(num_layers)[:, None], experts, nth] = slots
    return result


def _check_rank(rank: int, placement: ExpertPlacement) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < placement.num_ranks:
        raise ConfigError(
            f"rank {clip(rank)} is outside 0..{placement.num_ranks - 1} (num_ranks={placement.num_ranks})"
        )


def check_ranks_per_node(ranks_per_node: int | None, num_ranks: int) -> int:
    """Return the ranks of one node, all of them for None. Raises ConfigError where they do not divide `num_ranks`."""
    if ranks_per_node is None:
        return num_ranks
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
        raise ConfigError(f"ranks_per_node must be an int of at least 1, got {clip(ranks_per_node)}")
    if num_ranks % ranks_per_node:
        raise ConfigError(f"ranks_per_node {clip(ranks_per_node)} does not divide {num_ranks} ranks")
    return ranks_per_node


class DispatchRule(enum.Enum):
    """Which of an expert's copies a token goes to.

    DYNAMIC: any copy, by the shares. STATIC: from a given rank always the same copy; the share of a copy says how many
    ranks use it. NEAREST: a copy on the token's rank, else on its node, else any; equally near copies alike, whatever
    their shares.
    """

    STATIC = "static"
    DYNAMIC = "dynamic"
    NEAREST = "nearest"


@attrs.frozen(kw_only=True, eq=False)
class DispatchTable(Value):
    """The slots that one rank sends tokens to.

    Each token has a number u in [0, 1). It goes to slot i of `slots[layer, expert]` where `until[..., i - 1] <= u <
    until[..., i]`, so i is the number of bounds that u has reached.

    `slots` is int64 [L, E, most candidates], padded with -1; `until` float32 alike, padded with 1 like its last bound.
    """

    slots: Ints
    until: Shares


@typed
def dispatch_table(
    placement: ExpertPlacement, rule: DispatchRule, *, rank: int, ranks_per_node: int | None = None
) -> DispatchTable:
    """Return where one source rank sends its tokens under a rule.

    Node n has the ranks from `n * ranks_per_node` up to the first of the next node; without `ranks_per_node` there is
    one node. Raises ConfigError for a rank that does not exist and for uneven nodes.
    """
    _check_rank(rank, placement)
    per_node = check_ranks_per_node(ranks_per_node, placement.num_ranks)
    slots = placement.logical_to_all_physical_map
    if rule is DispatchRule.NEAREST:
        ranks = slots // placement.slots_per_rank
        here = ranks == rank
        near = (slots >= 0) & (ranks // per_node == rank // per_node)
        keep = np.where(here.any(2, keepdims=True), here, np.where(near.any(2, keepdims=True), near, slots >= 0))
        order = np.argsort(~keep, axis=2, kind="stable")[:, :, : int(keep.sum(2).max())]
        slots, keep = np.take_along_axis(slots, order, 2), np.take_along_axis(keep, order, 2)
        return DispatchTable(slots=_frozen(np.where(keep, slots, -1)), until=_bounds(keep / keep.sum(2, keepdims=True)))
    until = _bounds(_shares_by_expert(placement, slots))
    if rule is DispatchRule.DYNAMIC:
        return DispatchTable(slots=slots, until=until)
    # Ranks stand at equal distances from 0 to 1. The rank at the first place changes with expert and layer, so that
    # rounding does not always favour the same ranks.
    turn = rank + np.arange(placement.num_layers)[:, None] + np.arange(placement.num_logical_experts)
    place = (turn % placement.num_ranks + 0.5) / placement.num_ranks
    chosen = np.take_along_axis(slots, (place[:, :, None] >= until).sum(2, keepdims=True), 2)
    return DispatchTable(slots=_frozen(chosen), until=np.ones(chosen.shape, np.float32))


def _shares_by_expert(placement: ExpertPlacement, slots: Ints) -> Floats:
    """Return the share of each copy: [L, E, most copies], 0 where there is no copy."""
    if placement.slot_shares is None:
        return (slots >= 0) / placement.logical_replica_counts[:, :, None]
    layers = np.arange(placement.num_layers)[:, None, None]
    return np.where(slots >= 0, placement.slot_shares[layers, slots], 0.0)


def _bounds(shares: Floats) -> Shares:
    """Return running sums of the shares, exactly 1 from the last share above 0 on."""
    last = shares.shape[2] - 1 - (shares > 0)[:, :, ::-1].argmax(2, keepdims=True)
    until = np.where(np.arange(shares.shape[2]) >= last, 1.0, np.cumsum(shares, axis=2)).astype(np.float32)
    until.flags.writeable = False
    return until
