"""Placements of experts: what is refused, what is derived, and what it takes to get from one to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.moe.placement.difference import count_arrivals, keep_slots, plan_migration
from pdinfer.moe.placement.placement import Floats, Ints, Shares
from pdinfer.moe.placement.replicas import DispatchRule, candidates

# Two ranks of three slots, one layer each way round.
BY_HAND = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 1, 2]]


def placement(table: Any, num_experts: int = 4, num_ranks: int = 2) -> pd.ExpertPlacement:
    return pd.ExpertPlacement(physical_to_logical_map=table, num_logical_experts=num_experts, num_ranks=num_ranks)


def by_rank(any_placement: pd.ExpertPlacement) -> Ints:
    return any_placement.physical_to_logical_map.reshape(any_placement.num_layers, any_placement.num_ranks, -1)


@st.composite
def placements(draw: st.DrawFn, like: pd.ExpertPlacement | None = None, *, twins: bool = False) -> pd.ExpertPlacement:
    """Draw any placement, or any of the same sizes as `like`. With `twins` an expert may be on a rank twice."""
    if like is None:
        num_ranks = draw(st.integers(1, 6))
        num_experts = draw(st.integers(num_ranks, 12))
        per_rank = draw(st.integers(-(-num_experts // num_ranks), num_experts))
        num_layers = draw(st.integers(1, 3))
    else:
        num_ranks, num_experts = like.num_ranks, like.num_logical_experts
        per_rank, num_layers = like.slots_per_rank, like.num_layers
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = np.arange(num_ranks * per_rank) % num_experts  # as many slots in a row as experts: never twice on a rank
    rows = []
    for _ in range(num_layers):
        if twins:
            more = rng.integers(0, num_experts, len(table) - num_experts)
            rows.append(rng.permutation(np.concatenate([np.arange(num_experts), more])))
            continue
        ranks = rng.permutation(rng.permutation(num_experts)[table].reshape(num_ranks, per_rank))
        rows.append(rng.permuted(ranks, axis=1).ravel())
    return placement(np.stack(rows), num_experts, num_ranks)


def test_what_is_derived_by_hand() -> None:
    derived = placement(BY_HAND)
    assert (derived.num_layers, derived.num_slots, derived.slots_per_rank) == (2, 6, 3)
    assert derived.slots_of(1) == range(3, 6)
    assert derived.logical_replica_counts.tolist() == [[2, 2, 1, 1], [1, 2, 2, 1]]
    assert derived.logical_to_all_physical_map.tolist() == [
        [[0, 4], [1, 5], [2, -1], [3, -1]],
        [[3, -1], [2, 4], [1, 5], [0, -1]],
    ]


def test_equal_by_value_and_never_written() -> None:
    table = np.array(BY_HAND)
    ours = placement(table)
    assert ours == placement(BY_HAND)
    assert hash(ours) == hash(placement(BY_HAND))
    assert ours != placement(BY_HAND[::-1])
    table[0, 0] = 3
    assert ours.physical_to_logical_map[0, 0] == 0
    for array in (ours.physical_to_logical_map, ours.logical_replica_counts, ours.logical_to_all_physical_map):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_trivial_goes_round() -> None:
    trivial = pd.ExpertPlacement.trivial(2, 4, 3, num_redundant=2)
    assert trivial.physical_to_logical_map.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert pd.ExpertPlacement.trivial(1, 4, 1) == placement([[0, 1, 2, 3]], num_ranks=1)


@pytest.mark.parametrize(
    ("table", "experts", "ranks", "says"),
    [
        ([[0, 1, 2]], 3, 2, "3 slots cannot be divided evenly over 2 ranks"),
        ([[0, 1, 2, 4]], 4, 2, "layer 0, slot 3 holds expert 4, outside 0..3"),
        ([[0, 1, 2, 3], [0, 1, -1, 3]], 4, 2, "layer 1, slot 2 holds expert -1"),
        ([[0, 1, 2, 0]], 4, 2, "layer 0 has no slot for expert 3; each of 4"),
        ([[0, 1], [1]], 2, 1, "not a table"),
        ([[0.0, 1.0]], 2, 1, "table of ints.*float64"),
        ([[True, False]], 2, 1, "table of ints.*bool"),
        ([0, 1], 2, 1, r"shape \(2,\)"),
        ([[]], 2, 1, r"shape \(1, 0\)"),
        ([["0", "1"]], 2, 1, "table of ints"),
        ([[0, 10**30]], 2, 1, "table of ints.*object"),
        ([[0, 1]], 0, 1, "num_logical_experts must be an int from 1"),
        ([[0, 1]], 2, True, "num_ranks must be an int from 1"),
    ],
)
def test_bad_placements_are_refused_with_the_values(table: Any, experts: Any, ranks: Any, says: str) -> None:
    with pytest.raises(pd.ConfigError, match=says):
        placement(table, experts, ranks)


def test_an_expert_twice_on_a_rank_is_legal_and_known() -> None:
    ours = placement([[0, 1, 2, 3, 2, 3, 2, 2], [2, 2, 0, 1, 3, 2, 1, 0]])
    assert ours.twins.astype(int).tolist() == [[0, 0, 0, 0, 0, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert not placement(BY_HAND).twins.any()
    assert ours.logical_replica_counts[0].tolist() == [1, 1, 4, 2]
    assert pd.ExpertPlacement.trivial(1, 4, 1, num_redundant=1).twins.tolist() == [[False] * 4 + [True]]


def test_a_trivial_placement_has_a_layer() -> None:
    with pytest.raises(pd.ConfigError, match="num_layers must be an int from 1"):
        pd.ExpertPlacement.trivial(0, 4, 1)


@given(placements(twins=True))
def test_maps_are_inverses(any_placement: pd.ExpertPlacement) -> None:
    slots = any_placement.logical_to_all_physical_map
    layers, experts, _ = np.nonzero(slots >= 0)
    assert (any_placement.physical_to_logical_map[layers, slots[slots >= 0]] == experts).all()
    assert ((slots >= 0).sum(2) == any_placement.logical_replica_counts).all()
    assert any_placement.logical_replica_counts.sum(1).tolist() == [any_placement.num_slots] * any_placement.num_layers


@given(st.data())
def test_a_migration_makes_the_new_placement_out_of_the_old_one(data: st.DataObject) -> None:
    old = data.draw(placements(twins=data.draw(st.booleans())))
    new = data.draw(placements(like=old, twins=data.draw(st.booleans())))
    per_node = data.draw(st.sampled_from([size for size in (1, 2, 3) if old.num_ranks % size == 0]))
    moves = plan_migration(old, new, ranks_per_node=per_node)
    table = old.physical_to_logical_map.copy()
    for move in moves:
        assert old.physical_to_logical_map[move.layer, move.source_slot] == move.expert
        assert move.source_slot in old.slots_of(move.source_rank)
        assert move.destination_slot in old.slots_of(move.destination_rank)
        table[move.layer, move.destination_slot] = move.expert
        holders = {
            slot // old.slots_per_rank
            for slot in np.flatnonzero(old.physical_to_logical_map[move.layer] == move.expert)
        }
        nodes = {rank // per_node for rank in holders}
        assert move.source_rank == move.destination_rank or move.destination_rank not in holders
        assert move.source_rank // per_node == move.destination_rank // per_node or (
            move.destination_rank // per_node not in nodes
        )
    assert (table == new.physical_to_logical_map).all()
    between_ranks = sum(move.source_rank != move.destination_rank for move in moves)
    assert between_ranks == count_arrivals(by_rank(old), by_rank(new)).sum()


def test_a_migration_by_hand() -> None:
    old = placement([[0, 1, 2, 3, 0, 2, 1, 3]], num_ranks=4)
    new = placement([[1, 0, 2, 3, 1, 2, 0, 3]], num_ranks=4)
    moves = plan_migration(old, new, ranks_per_node=2)
    assert [(move.source_slot, move.destination_slot) for move in moves] == [(1, 0), (0, 1), (6, 4), (4, 6)]
    assert plan_migration(old, old) == ()


def test_holders_share_the_sending() -> None:
    """Four ranks take expert 0 from two that have it."""
    old = placement([[0, 0, 1, 2, 3, 4]], num_experts=5, num_ranks=6)
    new = placement([[1, 2, 0, 0, 3, 4]], num_experts=5, num_ranks=6)
    moves = plan_migration(old, new)
    assert sorted(move.source_rank for move in moves if move.expert == 0) == [0, 1]


def test_a_migration_between_different_sizes_is_refused() -> None:
    old = placement(BY_HAND)
    with pytest.raises(pd.ConfigError, match="num_layers = 1, the old one has 2"):
        plan_migration(old, placement(BY_HAND[:1]))
    with pytest.raises(pd.ConfigError, match="ranks_per_node 3 does not divide 2 ranks"):
        plan_migration(old, old, ranks_per_node=3)


@given(st.data())
def test_keeping_slots_changes_places_and_nothing_else(data: st.DataObject) -> None:
    old = data.draw(placements())
    new = data.draw(placements(like=old))
    nodes = data.draw(st.sampled_from([size for size in (1, 2, 3) if old.num_ranks % size == 0]))
    slots = keep_slots(by_rank(old), by_rank(new), nodes)
    assert (np.sort(slots, axis=1) == np.arange(old.num_slots)).all()
    kept = np.take_along_axis(new.physical_to_logical_map, slots, 1).reshape(by_rank(new).shape)
    for layer in range(old.num_layers):
        assert sorted(map(sorted, kept[layer].tolist())) == sorted(map(sorted, by_rank(new)[layer].tolist()))
    stay = (kept[..., :, None] == by_rank(old)[..., None, :]).any(2)
    assert (kept[stay] == by_rank(old)[stay]).all()


def test_slots_are_all_kept_where_only_places_differ() -> None:
    old = placement([[0, 1, 2, 3, 4, 5, 6, 7]], num_experts=8, num_ranks=4)
    new = placement([[7, 6, 5, 4, 3, 2, 1, 0]], num_experts=8, num_ranks=4)
    slots = keep_slots(by_rank(old), by_rank(new), 2)
    assert new.physical_to_logical_map[0, slots[0]].tolist() == list(range(8))


SHARES = [[0.25, 1.0, 1.0, 1.0, 0.75, 0.0], [1.0, 0.5, 1.0, 1.0, 0.0, 0.5]]


def shared() -> pd.ExpertPlacement:
    table = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 1, 2]]
    return pd.ExpertPlacement(physical_to_logical_map=table, num_logical_experts=4, num_ranks=2, slot_shares=SHARES)


def test_shares_are_part_of_the_value() -> None:
    assert shared() == shared()
    assert shared() != placement(BY_HAND)
    assert shared().slot_shares is not None
    assert shared().slot_shares.tolist() == SHARES


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ([[0.5] * 6], r"slot_shares has shape \(1, 6\), the map of slots \(2, 6\)"),
        ([SHARES[0], [1.0, 0.5, 1.0, 1.0, 0.25, 0.5]], "layer 1: the shares of expert 1 sum to 1.25, not to 1"),
        ([SHARES[0], [1.0, 1.5, 1.0, 1.0, 0.0, -0.5]], "layer 1, slot 1 has share 1.5, outside"),
        ([SHARES[0], [1.0, float("nan"), 1.0, 1.0, 0.0, 0.5]], "layer 1, slot 1 has share nan"),
        ([[0.5], [1.0, 2.0]], "not a table"),
        ([["a"] * 6] * 2, "table of numbers"),
    ],
)
def test_bad_shares_are_refused(shares: Any, says: str) -> None:
    with pytest.raises(pd.ConfigError, match=says):
        pd.ExpertPlacement(physical_to_logical_map=BY_HAND, num_logical_experts=4, num_ranks=2, slot_shares=shares)


def picked(table: tuple[Ints, Shares], u: Floats) -> Ints:
    """Return the slot for each of `u`: [L, E, len(u)]."""
    slots, until = table
    return np.take_along_axis(slots, (u[:, None] >= until[:, :, None, :]).sum(3), 2)


@given(placements(twins=True), st.sampled_from(DispatchRule), st.integers(1, 3))
def test_a_rank_sends_only_where_the_expert_is(
    any_placement: pd.ExpertPlacement, rule: DispatchRule, per_node: int
) -> None:
    per_node = per_node if any_placement.num_ranks % per_node == 0 else 1
    u = np.array([0.0, 0.3, 0.5, 0.999999], np.float32)
    for rank in range(any_placement.num_ranks):
        slots = picked(candidates(any_placement, rule, rank=rank, ranks_per_node=per_node), u)
        layers, experts, _ = np.indices(slots.shape)
        assert (slots >= 0).all()
        assert (any_placement.physical_to_logical_map[layers, slots] == experts).all()


def test_dynamic_picks_by_shares() -> None:
    even = candidates(placement(BY_HAND), DispatchRule.DYNAMIC, rank=0, ranks_per_node=None)
    assert (even[0] == placement(BY_HAND).logical_to_all_physical_map).all()
    u = np.linspace(0, 0.999, 100, dtype=np.float32)
    assert np.bincount(picked(even, u)[0, 0]).tolist() == [50, 0, 0, 0, 50]
    uneven = candidates(shared(), DispatchRule.DYNAMIC, rank=0, ranks_per_node=None)
    assert np.bincount(picked(uneven, u)[0, 0]).tolist() == [25, 0, 0, 0, 75]
    assert np.bincount(picked(uneven, u)[0, 1]).tolist() == [0, 100]
    assert np.bincount(picked(uneven, u)[1, 1]).tolist() == [0, 0, 100]


@given(placements(twins=True))
def test_static_spreads_ranks_evenly_over_copies(any_placement: pd.ExpertPlacement) -> None:
    ranks = range(any_placement.num_ranks)
    tables = [candidates(any_placement, DispatchRule.STATIC, rank=rank, ranks_per_node=None) for rank in ranks]
    chosen = np.stack([slots[:, :, 0] for slots, _ in tables])
    for layer, expert in np.ndindex(any_placement.logical_replica_counts.shape):
        _, senders = np.unique(chosen[:, layer, expert], return_counts=True)
        copies = any_placement.logical_replica_counts[layer, expert]
        assert len(senders) == min(copies, any_placement.num_ranks)  # of several on a rank each has its senders
        assert senders.max() - senders.min() <= 1


def test_static_follows_shares() -> None:
    """There are four ranks, and one copy takes three quarters of the tokens."""
    ours = pd.ExpertPlacement(
        physical_to_logical_map=[[0, 0, 1, 2]], num_logical_experts=3, num_ranks=4, slot_shares=[[0.25, 0.75, 1, 1]]
    )
    tables = [candidates(ours, DispatchRule.STATIC, rank=rank, ranks_per_node=None) for rank in range(4)]
    chosen = [slots[0, 0, 0] for slots, _ in tables]
    assert sorted(chosen) == [0, 1, 1, 1]


def test_nearest_goes_to_its_rank_then_its_node_then_anywhere() -> None:
    ours = placement([[0, 1, 0, 2, 0, 3, 1, 4]], num_experts=5, num_ranks=4)
    near = candidates(ours, DispatchRule.NEAREST, rank=1, ranks_per_node=2)
    u = np.array([0, 0.34, 0.67], np.float32)
    assert picked(near, u)[0].tolist() == [[2] * 3, [1] * 3, [3] * 3, [5] * 3, [7] * 3]
    far = candidates(ours, DispatchRule.NEAREST, rank=3, ranks_per_node=1)
    assert picked(far, u)[0, :2].tolist() == [[0, 2, 4], [6] * 3]
