"""Which slot of which rank holds which expert.

All ranks have the same number of slots: of P physical experts, rank r holds slots `r * P / num_ranks` up to the first
of rank r + 1. A logical expert (what the router chooses) lies in one slot or in several. Two copies on one rank are
legal, and DeepSeek's balancer makes such maps. Both are used, though they even out nothing."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from pdinfer.checks import check_int, clip, int_in, is_int, typed
from pdinfer.errors import ConfigError
from pdinfer.values import Value

MAX_EXPERTS = 1 << 16
MAX_RANKS = 1 << 16

SHARE_ERROR = 1e-5

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Shares = npt.NDArray[np.float32]
Array = TypeVar("Array", bound=npt.NDArray[Any])


def table_of(name: str, value: Any, kinds: str, columns: str = "slots") -> npt.NDArray[Any]:
    """Return nested lists or an array as a table of numbers, [layers, columns] with at least one of each, whose kind
    numpy has among `kinds`. Raises ConfigError for anything else."""
    try:
        table = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise ConfigError(f"{name} is not a table of [layers][{columns}] on the host: {clip(str(failure))}") from None
    if table.ndim != 2 or 0 in table.shape or table.dtype.kind not in kinds:
        raise ConfigError(
            f"{name} must be a table of {'numbers' if 'f' in kinds else 'ints'}, [layers][{columns}] with at least one "
            f"of each, got {table.dtype} of shape {table.shape}"
        )
    return table


def _int_map(value: Any) -> Ints:
    return _frozen(table_of("physical_to_logical_map", value, "iu").astype(np.int64))


def _share_map(value: Any) -> Shares | None:
    return None if value is None else _frozen(table_of("slot_shares", value, "iuf").astype(np.float32))


def _same(ours: Shares | None, theirs: Shares | None) -> bool:
    return ours is theirs or (ours is not None and theirs is not None and np.array_equal(ours, theirs))


class PlacementSizes(NamedTuple):
    """The sizes in which two placements must agree, for one to follow the other."""

    num_layers: int
    num_logical_experts: int
    num_slots: int
    num_ranks: int


@attrs.frozen(kw_only=True)
class ExpertPlacement(Value):
    """The expert in every slot, for every mixture-of-experts layer.

    `physical_to_logical_map` is int64 [L, P] and read-only, a copy of the argument (nested lists, an array).
    `slot_shares`, float32 [L, P] and read-only, is the part of its expert's tokens that each slot receives. The shares
    of an expert's slots sum to 1; None means equal shares. Placements compare by value. Raises ConfigError, with the
    values, for slots that do not divide over ranks, experts out of range, an expert without a slot, and shares that do
    not fit."""

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
        check_int("num_layers", num_layers, 1, MAX_EXPERTS)
        check_int("num_experts", num_experts, 1, MAX_EXPERTS)
        check_int("num_redundant", num_redundant, 0, MAX_EXPERTS)
        row = np.arange(num_experts + num_redundant) % num_experts
        return cls(
            physical_to_logical_map=np.tile(row, (num_layers, 1)), num_logical_experts=num_experts, num_ranks=num_ranks
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
        by_rank = self.physical_to_logical_map.reshape(self.num_layers, self.num_ranks, -1)
        return _frozen(find_twins(by_rank).reshape(self.num_layers, -1))

    @typed
    def slots_of(self, rank: int) -> range:
        """Return the slots that lie on a rank. Raises ConfigError when there is no such rank."""
        if not is_int(rank) or not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {clip(rank)} is outside 0..{self.num_ranks - 1} (num_ranks={self.num_ranks})")
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


def check_sizes(what: str, placement: ExpertPlacement, other: str, wanted: PlacementSizes | ExpertPlacement) -> None:
    """Raise ConfigError, with both values, for the first size that is not the one `wanted`."""
    for name in PlacementSizes._fields:
        ours, theirs = getattr(placement, name), getattr(wanted, name)
        if ours != theirs:
            raise ConfigError(f"{what} has {name} = {ours}, {other} {theirs}")


def _frozen(array: Array) -> Array:
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


def check_ranks_per_node(ranks_per_node: int | None, num_ranks: int) -> int:
    """Return the ranks of one node, all of them for None. Raises ConfigError where they do not divide `num_ranks`."""
    if ranks_per_node is None:
        return num_ranks
    check_int("ranks_per_node", ranks_per_node, 1)
    if num_ranks % ranks_per_node:
        raise ConfigError(f"ranks_per_node {clip(ranks_per_node)} does not divide {num_ranks} ranks")
    return ranks_per_node
