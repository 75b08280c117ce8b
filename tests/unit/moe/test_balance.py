"""Balancing experts: DeepSeek's published results, and what our solver promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.moe import solve_placement
from pdinfer.moe.balance.assignment import Assignment
from pdinfer.moe.balance.exchange import Homes, part_twins
from pdinfer.moe.placement.difference import count_arrivals
from pdinfer.moe.placement.placement import Floats, Ints

# The example of https://github.com/deepseek-ai/EPLB: 12 experts, 16 replicas, 4 groups, 2 nodes, 8 GPUs.
PUBLISHED = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


def by_rank(placement: pd.ExpertPlacement) -> Ints:
    return placement.physical_to_logical_map.reshape(placement.num_layers, placement.num_ranks, -1)


def rank_load(placement: pd.ExpertPlacement, load: Any) -> Floats:
    """Return the load of each rank under `load`: [L, ranks]."""
    load = np.asarray(load, np.float64)
    table = placement.physical_to_logical_map
    shares = placement.slot_shares
    if shares is None:
        shares = 1 / np.take_along_axis(placement.logical_replica_counts, table, 1)
    return (np.take_along_axis(load, table, 1) * shares).reshape(*by_rank(placement).shape).sum(2)


def balancedness(loads: Floats) -> Floats:
    """Return the balancedness per layer."""
    return loads.mean(1) / loads.max(1)


def lognormal(num_layers: int, num_experts: int, seed: int = 0) -> Floats:
    return np.round(1e4 * np.random.default_rng(seed).lognormal(0, 0.8, (num_layers, num_experts)))


FAR_APART = {"num_ranks": 4, "num_redundant": 4, "num_groups": 2, "num_nodes": 2, "cross_node_weight": 0.3}
"""Sizes with which an expert of little load shares ranks with one of 1e30 times as much."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, dict[str, Any]]:
    """Draw any load with sizes that fit."""
    num_nodes = draw(st.integers(1, 3))
    num_ranks = num_nodes * draw(st.integers(1, 4))
    num_groups = num_nodes * draw(st.integers(1, 2))
    num_experts = num_groups * draw(st.integers(1, 4))
    least, most = -(-num_experts // num_ranks), num_experts // num_nodes
    slots = draw(st.integers(least, max(least, min(most, least + 3)))) * num_ranks
    weight = draw(st.sampled_from([0.0, 0.3, math.inf]))
    seed = draw(st.integers(0, 2**32))
    kind = draw(st.sampled_from(["even", "skewed", "zero", "sparse", "apart", "huge", "tiny", "any"]))
    rng = np.random.default_rng(seed)
    load = np.ones((2, num_experts)) if kind == "even" else np.round(rng.pareto(1.0, (2, num_experts)) * 1000)
    if kind == "zero":
        load[0] = 0
    if kind == "sparse":
        load[:, 1:] = 0
    if kind == "apart":
        load[:, ::2] *= 1e18
    if kind == "huge":
        load = 1e305 * (1 + load / load.max())
    if kind == "tiny":
        load *= 5e-324
    if kind == "any":
        load = 10.0 ** rng.uniform(-300, 300, load.shape)
    return load, {
        "num_ranks": num_ranks,
        "num_redundant": slots - num_experts,
        "num_groups": num_groups,
        "num_nodes": num_nodes,
        "cross_node_weight": weight,
    }


def test_the_published_example() -> None:
    phy2log, log2phy, logcnt = pd.rebalance_experts(PUBLISHED, 16, 4, 2, 8)
    assert phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert logcnt.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    assert log2phy[0, :7].tolist() == [[12, -1], [15, 13], [11, -1], [6, -1], [7, 5], [0, 2], [1, -1]]


def test_groups_that_do_not_divide_over_nodes_are_balanced_globally() -> None:
    phy2log, _, _ = pd.rebalance_experts(torch.tensor(PUBLISHED), 16, 3, 2, 8)
    assert phy2log.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    placement = pd.ExpertPlacement(physical_to_logical_map=phy2log, num_logical_experts=12, num_ranks=8)
    assert np.argwhere(placement.twins).tolist() == [[0, 15], [1, 13]]  # as DeepSeek has it


@given(problems())
def test_deepseeks_maps_are_inverses(problem: tuple[Floats, dict[str, Any]]) -> None:
    load, sizes = problem
    num_slots = load.shape[1] + sizes["num_redundant"]
    groups, nodes, gpus = sizes["num_groups"], sizes["num_nodes"], sizes["num_ranks"]
    phy2log, log2phy, logcnt = pd.rebalance_experts(load, num_slots, groups, nodes, gpus)
    layers, experts, nth = np.nonzero(log2phy >= 0)
    assert (phy2log[layers, log2phy[layers, experts, nth]] == experts).all()
    assert (logcnt.sum(1) == num_slots).all()
    assert ((log2phy >= 0).sum(2) == logcnt).all()
    assert logcnt.min() >= 1


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ([[1, 2], [3, math.nan]], "layer 1, expert 1 has load nan"),
        ([[1, 2], [-1, 3]], "layer 1, expert 0 has load -1"),
        ([[math.inf, 2]], "layer 0, expert 0 has load inf"),
        ([[1, 10**400]], "layer 0, expert 1 has load an int of 1329 bits"),
        ([[-(10**30), 2]], "layer 0, expert 0 has load -1000000000000000000000000000000;"),
        ([[None, 2]], "must be a table of numbers"),
        ([[True, False]], "must be a table of numbers"),
        ([1, 2], r"shape \(2,\)"),
        ([[1, 2], [3]], "not a table"),
        ([["1", "2"]], "must be a table of numbers"),
        ([[]], "at least one of each"),
        (torch.ones(1, 2, device="meta"), "on the host"),
    ],
)
def test_what_is_no_load_is_refused(load: Any, says: str) -> None:
    with pytest.raises(pd.ConfigError, match=says):
        solve_placement(load, num_ranks=1)
    with pytest.raises(pd.ConfigError, match=says):
        pd.rebalance_experts(load, 2, 1, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_ranks": 3}, r"experts \+ num_redundant = 8 cannot be divided evenly over num_ranks 3"),
        ({"num_ranks": 4, "num_nodes": 3}, "num_ranks 4 cannot be divided evenly over num_nodes 3"),
        ({"num_ranks": 4, "num_groups": 3}, "experts 8 cannot be divided evenly over num_groups 3"),
        ({"num_ranks": 2, "num_redundant": 10}, "18 slots on 2 ranks are more than 8 experts can fill"),
        ({"num_ranks": 4, "num_nodes": 2, "cross_node_weight": 1.0}, "needs groups that divide over nodes"),
        ({"num_ranks": 4, "cross_node_weight": -1.0}, "cross_node_weight must be a number of at least 0, got -1"),
        ({"num_ranks": 4, "cross_node_weight": math.nan}, "cross_node_weight must be float, got nan"),
        ({"num_ranks": 4, "cross_node_weight": 10**400}, "cross_node_weight must be float, got an int of 1329 bits"),
        ({"num_ranks": 4, "previous": "x"}, r"previous must be ExpertPlacement \| None, got 'x'"),
        ({"num_ranks": 0}, "num_ranks must be an int from 1"),
        ({"num_ranks": 4, "num_redundant": -4}, "num_redundant must be an int from 0"),
        ({"num_ranks": 4, "tolerance": -1.0}, "tolerance must be a finite number"),
        ({"num_ranks": 4, "max_moves": 3}, "max_moves must be an int of at least 0, beside a previous placement"),
        (
            {"num_ranks": 4, "previous": pd.ExpertPlacement.trivial(1, 8, 2)},
            "previous placement has num_ranks = 2, asked for are 4",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(pd.ConfigError, match=says):
        solve_placement(np.ones((1, 8)), **arguments)


def test_deepseeks_sizes_are_checked() -> None:
    with pytest.raises(pd.ConfigError, match="num_replicas 15 cannot be divided evenly over num_gpus 8"):
        pd.rebalance_experts(PUBLISHED, 15, 4, 2, 8)
    with pytest.raises(pd.ConfigError, match="num_replicas 8 is less than the 12 experts"):
        pd.rebalance_experts(PUBLISHED, 8, 4, 2, 8)


@given(problems())
@example((np.array([[1.0, 1e30, 1.0, 1.0]]), FAR_APART))
def test_a_solution_is_a_placement_of_all_load(problem: tuple[Floats, dict[str, Any]]) -> None:
    """A placement by itself proves that no expert is missing and that shares sum to one."""
    load, sizes = problem
    placement = solve_placement(load, **sizes)
    assert not placement.twins.any()
    assert placement.num_slots == load.shape[1] + sizes["num_redundant"]
    assert rank_load(placement, load).sum(1) == pytest.approx(load.sum(1))


@given(problems(), st.data())
def test_an_expert_twice_on_a_rank_is_never_made_and_goes_as_moves_allow(
    problem: tuple[Floats, dict[str, Any]], data: st.DataObject
) -> None:
    load, sizes = problem
    num_layers, num_experts = load.shape
    more = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=(n := sizes["num_redundant"]), max_size=n))
    row = np.random.default_rng(data.draw(st.integers(0, 99))).permutation([*range(num_experts), *more])
    previous = pd.ExpertPlacement(
        physical_to_logical_map=[row] * num_layers, num_logical_experts=num_experts, num_ranks=sizes["num_ranks"]
    )
    assert not solve_placement(load, previous=previous, **sizes).twins.any()
    budget = data.draw(st.integers(0, 6))
    bounded = solve_placement(load, previous=previous, max_moves=budget, **sizes)
    arrivals = count_arrivals(by_rank(previous), by_rank(bounded)).sum()
    assert arrivals <= budget
    per_layer = int(previous.twins[0].sum())
    repaired = num_layers if per_layer == 0 else min(num_layers, budget // per_layer)
    assert bounded.twins.sum() == (num_layers - repaired) * per_layer


def test_twins_make_room_for_experts_that_are_at_home_and_cheap_layers_come_first() -> None:
    load = np.array([[1.0, 1, 1, 9], [1, 1, 1, 9]])
    experts = np.array([[[0, 0, 0], [2, 3, 1]], [[0, 0, 1], [2, 3, 1]]])
    homes = Homes(node_LE=np.array([[0, 0, 1, 1]] * 2), rank_node=np.array([0, 1]), weight=1.0)
    assignment = Assignment.of(load, experts)
    assert part_twins(assignment, homes, 1) == 1
    assert assignment.experts.tolist() == [[[0, 0, 0], [2, 3, 1]], [[0, 3, 1], [2, 3, 1]]]
    assert part_twins(assignment, homes, math.inf) == 2
    assert assignment.experts[0].tolist() == [[0, 1, 3], [2, 3, 1]]


def test_loads_of_any_size_are_taken() -> None:
    """Only proportions matter: powers of two change nothing, even beyond the range of float32 and float64."""
    load = lognormal(2, 16)
    ours, theirs = solve_placement(load, num_ranks=4, num_redundant=4), pd.rebalance_experts(load, 20, 4, 2, 4)
    for factor in (2.0**-1000, 2.0**-140, 2.0**115, 2.0**1000):
        assert solve_placement(load * factor, num_ranks=4, num_redundant=4) == ours
        for got, expected in zip(pd.rebalance_experts(load * factor, 20, 4, 2, 4), theirs, strict=True):
            assert (got == expected).all()
    huge = [[10**30, 2**64, 3 * 10**30, 0]]
    assert pd.rebalance_experts(huge, 6, 1, 1, 2)[2].tolist() == [[1, 1, 3, 1]]
    assert solve_placement(np.array([[2**64 - 1, 5]], np.uint64), num_ranks=2).num_slots == 2


def test_float32_sums_that_overflow_leave_no_expert_out() -> None:
    phy2log, _, _ = pd.rebalance_experts(np.full((2, 256), 3e38), 288, 8, 4, 32)
    assert [len(set(row)) for row in phy2log.tolist()] == [256, 256]


def test_groups_stay_on_a_node_where_crossing_is_forbidden() -> None:
    load = lognormal(3, 32)
    sizes = {"num_ranks": 8, "num_redundant": 8, "num_groups": 4, "num_nodes": 2}
    for weight, most in ((math.inf, 1), (0.0, 2)):
        placement = solve_placement(load, cross_node_weight=weight, **sizes)
        nodes = by_rank(placement).reshape(3, 2, -1)
        spread = [
            len({node for node in (0, 1) if group in nodes[layer, node] // 8})
            for layer in range(3)
            for group in range(4)
        ]
        assert max(spread) == most


def test_crossing_nodes_buys_balance_at_the_price_that_is_set() -> None:
    load = lognormal(4, 64)
    sizes = {"num_ranks": 16, "num_redundant": 16, "num_groups": 8, "num_nodes": 4}
    levels, homes = [], []
    for weight in (0.0, 0.3, math.inf):
        placement = solve_placement(load, cross_node_weight=weight, **sizes)
        levels.append(balancedness(rank_load(placement, load)).mean())
        group = by_rank(placement).reshape(4, 4, -1) // 8
        held = np.stack([(group == number).sum(2) for number in range(8)], axis=1)
        homes.append(held.max(2).sum() / held.sum())
    assert levels[0] > 0.998
    assert levels[0] > levels[2]
    assert levels[1] > levels[2]
    assert homes[0] < homes[1] < homes[2] == 1.0


def test_shares_even_out_what_copies_alone_cannot() -> None:
    """Expert 0 has half of all tokens, and experts of unequal load lie beside its two copies."""
    placement = solve_placement([[60, 35, 5, 20]], num_ranks=2, num_redundant=2)
    assert rank_load(placement, [[60, 35, 5, 20]]).tolist() == [[60.0, 60.0]]


@given(problems(), st.integers(0, 2**32), st.one_of(st.none(), st.integers(0, 12)))
def test_a_budget_of_moves_is_kept(problem: tuple[Floats, dict[str, Any]], seed: int, max_moves: int | None) -> None:
    load, sizes = problem
    previous = solve_placement(load, **sizes)
    later = load * np.random.default_rng(seed).lognormal(0, 0.5, load.shape)
    placement = solve_placement(later, previous=previous, max_moves=max_moves, **sizes)
    arrivals = count_arrivals(by_rank(previous), by_rank(placement)).sum()
    assert max_moves is None or arrivals <= max_moves
    assert rank_load(placement, later).sum(1) == pytest.approx(later.sum(1))


def test_following_a_drift_moves_little_and_stays_even() -> None:
    load = lognormal(4, 64)
    sizes = {"num_ranks": 16, "num_redundant": 16}
    previous = solve_placement(load, **sizes)
    later = load * np.random.default_rng(1).lognormal(0, 0.3, load.shape)
    before = balancedness(rank_load(previous, later)).mean()
    levels, moves = {}, {}
    for name, budget in (("nothing", 0), ("little", 24), ("any", None)):
        followed = solve_placement(later, previous=previous, max_moves=budget, **sizes)
        levels[name] = balancedness(rank_load(followed, later)).mean()
        moves[name] = count_arrivals(by_rank(previous), by_rank(followed)).sum()
    assert before <= levels["nothing"] < levels["little"] < levels["any"]
    assert levels["any"] > 0.99
    assert moves["nothing"] == 0
    anew = solve_placement(later, **sizes)
    assert moves["any"] < count_arrivals(by_rank(previous), by_rank(anew)).sum() / 2


def test_nothing_moves_where_nothing_changed() -> None:
    load = lognormal(3, 32)
    sizes = {"num_ranks": 8, "num_redundant": 8, "num_groups": 4, "num_nodes": 2}
    for weight in (0.0, math.inf):
        placement = solve_placement(load, cross_node_weight=weight, **sizes)
        again = solve_placement(load, cross_node_weight=weight, previous=placement, **sizes)
        assert (again.physical_to_logical_map == placement.physical_to_logical_map).all()


def test_a_layer_laid_out_anew_keeps_the_ranks_and_slots_it_can() -> None:
    """The loads of two experts change places, so a new layout differs in names alone."""
    load = lognormal(1, 16)
    previous = solve_placement(load, num_ranks=4)
    later = load.copy()
    hot, cold = load[0].argmax(), load[0].argmin()
    later[0, [hot, cold]] = load[0, [cold, hot]]
    followed = solve_placement(later, num_ranks=4, previous=previous, tolerance=0)
    assert count_arrivals(by_rank(previous), by_rank(followed)).sum() <= 2


def test_the_solver_is_deterministic_and_takes_tensors() -> None:
    load = lognormal(2, 16)
    sizes = {"num_ranks": 4, "num_redundant": 4}
    assert solve_placement(load, **sizes) == solve_placement(torch.tensor(load), **sizes)
    assert solve_placement(load, **sizes) == solve_placement(load.tolist(), **sizes)


@pytest.mark.parametrize("num_ranks", [8, 18, 36])
def test_the_solver_is_more_even_than_deepseeks(num_ranks: int) -> None:
    """A quarter of EP32, EP72 and EP144: 64 experts, 8 copies."""
    load = lognormal(6, 64, seed=3)
    ours = balancedness(rank_load(solve_placement(load, num_ranks=num_ranks, num_redundant=8), load))
    phy2log, _, logcnt = pd.rebalance_experts(load, 72, 1, 1, num_ranks)
    theirs = balancedness(np.take_along_axis(load / logcnt, phy2log, 1).reshape(6, num_ranks, -1).sum(2))
    assert (ours >= theirs - 1e-6).all()  # shares are float32
    assert ours.mean() > theirs.mean()
    assert num_ranks == 36 or ours.mean() > 0.99
