"""Plans that use all nodes and fit, ranked by what simulations saw, and why the others lost."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

import attrs
import pytest

from pdinfer import bench, planning
from pdinfer.config import ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.planning.calibration import Cost, StepCost
from pdinfer.planning.search import SearchedPlan, _is_better
from pdinfer.planning.simulation import Cluster
from pdinfer.testing import tiny_config
from tests.unit.config import published_configs
from tests.unit.planning.published import V3

H800, SLO = planning.hardware("H800"), bench.SLO(ttft_s=2.0, tpot_s=0.1)


def load(prompt_tokens: int, output_tokens: int, rate: float = 20.0) -> bench.Load:
    return bench.open_loop(rate, 10, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


@cache
def found(nodes: int = 6, prompt_tokens: int = 2000, output_tokens: int = 400) -> tuple[SearchedPlan, ...]:
    return planning.search(V3, H800, load(prompt_tokens, output_tokens), nodes=nodes, slo=SLO, keep=2)


def test_plans_use_all_nodes_and_are_checked_clusters() -> None:
    plans = found()
    assert len({plan.name for plan in plans}) == len(plans) > 3
    for plan in plans:
        assert plan.cluster.num_ranks == 6 * 8
        for engine in plan.cluster.engines:
            assert engine.device_bytes == 80e9
            assert engine.topology.ep_size == engine.topology.world_size >= 16  # a node does not hold the weights


def test_every_rank_of_an_engine_is_simulated_as_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share one pool and one queue would divide every burst evenly, which no routing does."""
    seen: list[Cluster] = []

    def watching(cluster: Cluster, *args: Any, **more: Any) -> bench.Summary:
        seen.append(cluster)
        return planning.simulate(cluster, *args, **more)

    monkeypatch.setattr(sys.modules[SearchedPlan.__module__], "simulate", watching)  # the function hides its module
    best = planning.search(V3, H800, load(500, 10), nodes=6, slo=SLO, keep=1)[0].cluster
    (made,) = {id(cluster): cluster for cluster in seen}.values()
    for side, count, plans in (
        (made.prefill, made.num_prefills, best.prefill),
        (made.decode, made.num_decodes, best.decode),
    ):
        assert (count, side.ranks) == (len(plans), plans[0].topology.world_size)
        assert side.num_pages == plans[0].num_pages


def test_the_best_comes_first_and_the_others_say_why_they_lost() -> None:
    for plans in (found(6, 8000, 20), found()):  # attainment decides, and where it is equal, capacity
        (best, second), rest = plans[:2], plans[2:]
        assert best.attainment is not None
        assert second.attainment is not None
        assert (best.attainment, best.capacity) > (second.attainment, second.capacity)
        assert best.is_pareto
        assert not best.why_not
        assert f"where {best.name} attains" in second.why_not
        for plan in rest:
            assert plan.attainment is None
            assert f"({plan.binding})" in plan.why_not
            assert plan.capacity <= second.capacity
    assert found(6, 8000, 20)[0].attainment != found(6, 8000, 20)[1].attainment


def test_what_was_simulated_is_drawn_by_plan() -> None:
    """Two plans with three seeds each make six points, in goodput per GPU of all 48."""
    simulated = [plan for plan in found() if plan.runs]
    assert [plan.name for plan in simulated] == [plan.name for plan in found() if plan.attainment is not None]
    columns = bench.plots.goodput_frontier({plan.name: plan.runs for plan in simulated}).columns
    assert sorted(columns["run"]) == sorted(3 * [plan.name for plan in simulated])
    for plan in simulated:
        drawn = columns["goodput_per_gpu"][columns["run"] == plan.name]
        assert drawn.mean() * 48 == pytest.approx(plan.goodput, rel=1e-3)


def test_a_plan_that_another_beats_in_everything_is_not_pareto() -> None:
    plan = attrs.evolve(found()[0], attainment=0.9, capacity=2.0, mean_ttft_ms=5.0, mean_tpot_ms=5.0)
    for name, better, worse in (
        ("attainment", 0.95, 0.8),
        ("capacity", 3.0, 1.0),
        ("mean_ttft_ms", 4.0, 6.0),
        ("mean_tpot_ms", 4.0, 6.0),
    ):
        assert _is_better(attrs.evolve(plan, **{name: better}), plan)
        assert not _is_better(attrs.evolve(plan, **{name: worse}), plan)
    assert not _is_better(plan, plan)
    assert not _is_better(attrs.evolve(plan, capacity=3.0, mean_ttft_ms=6.0), plan)


def test_equal_searches_give_equal_plans() -> None:
    again = planning.search(V3, H800, load(2000, 400), nodes=6, slo=SLO, keep=2)
    assert [attrs.evolve(plan, cluster=None) for plan in again] == [
        attrs.evolve(plan, cluster=None) for plan in found()
    ]  # type: ignore[arg-type]


def test_what_the_traffic_needs_gets_the_nodes() -> None:
    def decode_ranks(plans: tuple[SearchedPlan, ...]) -> int:
        return sum(engine.topology.world_size for engine in plans[0].cluster.decode)

    assert decode_ranks(found(6, 8000, 20)) < decode_ranks(found(6, 500, 2000))


def test_the_side_that_limits_is_named() -> None:
    plans = {plan.name: plan for plan in found(6, 8000, 20)}
    assert plans["P2D4"].binding.startswith("prefill: ")
    plans = {plan.name: plan for plan in found(6, 500, 2000)}
    assert plans["P4D2"].binding.startswith("decode: ")
    long = {plan.name: plan for plan in found(6, 20_000, 4000)}
    assert long["P3D3"].binding == "decode: KV pages"


def test_a_calibrated_cost_counts() -> None:
    slow = StepCost(prior=lambda rows: 0.0, fixed_s=0.0, scale=4.0)
    cost = Cost(prefill=slow, decode=attrs.evolve(slow, scale=1.0), errors={}, flat=(), at_bounds=())
    before = {plan.name: plan.capacity for plan in found(6, 8000, 20)}
    plans = planning.search(V3, H800, load(8000, 20), nodes=6, slo=SLO, keep=1, cost=cost)
    assert {plan.name: plan.capacity for plan in plans}["P2D4"] == pytest.approx(before["P2D4"] / 4)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"no prefill and decode share 2 nodes of H800: .*do not fit into"):
        planning.search(V3, H800, load(2000, 400), nodes=2, slo=SLO)
    with pytest.raises(ConfigError, match="nodes must be an int from 2 to 128, got 1"):
        planning.search(V3, H800, load(2000, 400), nodes=1, slo=SLO)
    with pytest.raises(ConfigError, match="slo"):
        planning.search(V3, H800, load(2000, 400), nodes=4, slo=2.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the load has no request"):
        planning.search(V3, H800, bench.Load(mode="burst", arrivals=()), nodes=4, slo=SLO)


def test_a_refusal_is_about_the_role_that_does_not_fit() -> None:
    """A decode of 40 ranks fits; DeepEP's kernels for prefill are for other numbers of ranks."""
    with pytest.raises(ConfigError, match=r"2 nodes of H800: prefill of 1 node: DeepEP's normal kernels [^;]*$"):
        planning.search(V3, H800, load(2000, 400), nodes=2, slo=SLO, ranks_per_node=40)
    held = r"prefill of 4 nodes: \d+ tokens of KV .* hold no request of 10000010; decode of \d nodes: \d+ tokens"
    with pytest.raises(ConfigError, match=f"5 nodes of H800: {held}"):
        planning.search(V3, H800, load(10_000_000, 10), nodes=5, slo=SLO)
    with pytest.raises(ConfigError, match="ranks_per_node must be an int from 1 to 1024, got 0"):
        planning.search(V3, H800, load(2000, 400), nodes=6, slo=SLO, ranks_per_node=0)


def test_a_size_whose_pages_hold_no_request_is_dropped() -> None:
    """A prefill of 2 nodes holds 8,768 tokens, a third of what one of 3 does. Nor has a step more prompts than that."""
    assert [plan.name for plan in found(6, 8900, 20)] == ["P3D3"]
    rates = {plan.name: plan.capacity for plan in found(6, 2000, 400) if plan.binding.startswith("prefill: ")}
    fast = {plan.name: plan.capacity for plan in found(6, 2000, 1) if plan.binding.startswith("prefill: ")}
    assert rates["P2D4"] < fast["P2D4"]
    assert rates["P3D3"] == fast["P3D3"]


@pytest.mark.parametrize("slo", [bench.SLO(tpot_s=0.01), bench.SLO(ttft_s=0.1)])
def test_an_slo_that_no_rate_keeps_is_told(slo: bench.SLO) -> None:
    """By every plan that was simulated. One whose decode is too slow for a single sequence names that as what binds."""
    for plan in planning.search(V3, H800, load(2000, 400), nodes=6, slo=slo, keep=2)[:2]:
        assert plan.attainment == 0.0
        assert re.match(
            r"the SLO cannot be met at any rate: a request that is alone takes (29\d|300)(\.\d)? ms to its first token "
            r"and 2[89](\.\d+)? ms for each other one; loosen a limit, .*; closed forms allow",
            plan.why_not,
        )
        assert ("a step of one sequence takes longer than TPOT" in plan.binding) == (slo.tpot_s is not None)


def test_a_load_of_which_nothing_is_in_time_says_whether_less_would_be() -> None:
    """Of 600 prompts at once on 32 ranks none is there in time."""
    arrivals = bench.burst(600, prompt_tokens=2000, output_tokens=2).arrivals
    tight, told = bench.SLO(e2e_s=0.4), dict[float | None, str]()
    for deadline_s in (None, 0.01):
        due = tuple(attrs.evolve(each, deadline_s=deadline_s) for each in arrivals)
        (best,) = planning.search(V3, H800, bench.Load(mode="burst", arrivals=due), nodes=4, slo=tight, keep=1)
        told[deadline_s] = best.why_not
    assert told[None].startswith("no request keeps the SLO at this load, and 100% of those that are alone do; closed")
    assert told[0.01].startswith("none of the requests ends even alone: they are refused, or their deadlines pass; cl")


def test_an_engine_of_one_rank_spreads_no_experts() -> None:
    """And who waits is told how many ways to divide the nodes were tried."""
    told: list[tuple[int, int]] = []
    small, progress = ModelConfig.from_dict(published_configs.V2_LITE), lambda *done: told.append(done)
    plans = planning.search(small, H800, load(500, 50), nodes=3, slo=SLO, ranks_per_node=1, keep=1, progress=progress)
    assert {plan.name for plan in plans} >= {"P1D2x1", "P2x1D1"}
    assert plans[0].attainment == 1.0
    assert told == [(1, 2), (2, 2), (1, 3), (2, 3), (3, 3)]


def test_other_parts_and_models_are_searched_too() -> None:
    """An H20 keeps FP8 weights, so that a node of 8 holds the model; and a model without experts has no all-to-all."""
    plans = planning.search(V3, planning.hardware("H20-141G"), load(500, 50), nodes=2, slo=SLO, keep=1)
    assert [plan.name for plan in plans] == ["P1D1"]
    assert plans[0].cluster.prefill[0].rank_weights.quantized > 50e9
    a3 = planning.hardware("A3")
    stored = {"stored": "w8a8_dynamic", "weights": "stored"}
    plans = planning.search(V3, a3, load(500, 50), nodes=2, slo=SLO, keep=1, ranks_per_node=32, **stored)  # type: ignore[arg-type]
    assert plans[0].cluster.decode[0].rank_weights.quantized > 30e9
    with pytest.raises(ConfigError, match='or weights="stored"'):
        planning.search(V3, a3, load(500, 50), nodes=2, slo=SLO, ranks_per_node=32, stored="w8a8_dynamic")
    dense = tiny_config(
        first_k_dense_replace=3, num_hidden_layers=3, num_nextn_predict_layers=0, torch_dtype="bfloat16"
    )
    plans = planning.search(dense, H800, load(500, 50), nodes=2, slo=SLO, keep=1, stored="float")
    assert plans[0].attainment == 1.0
    assert "all-to-all" not in plans[0].binding
