"""Plans for clusters that nobody has at hand are made, and refused, with plain numbers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from pdinfer.cluster import ClusterPlan, EnginePlan, engine_nodes, h800_cluster
from pdinfer.config import CacheConfig, ExpertConfig, ModelConfig
from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.testing import tiny_config_dict
from pdinfer.topology import Topology

V3_SIZES = {
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}
V3 = ModelConfig.from_dict(tiny_config_dict("v3", **V3_SIZES))
V32 = ModelConfig.from_dict(tiny_config_dict("v32", **V3_SIZES, index_n_heads=64, index_head_dim=128, index_topk=2048))


@pytest.mark.parametrize(
    ("text", "ranks", "slots", "pairs"),
    [
        ("P3x3D4", 104, [12, 12, 12, 9], 3 * 24 * 32),
        ("P4D9", 104, [9, 4], 32 * 72),
        ("P4D6", 80, [9, 6], 32 * 48),
        ("P2D2", 32, [18, 18], 16 * 16),
    ],
)
def test_the_deployments_fit(text: str, ranks: int, slots: list[int], pairs: int) -> None:
    plan = h800_cluster(text, V3)
    assert plan.num_ranks == ranks
    for engine, count in zip(plan.engines, slots, strict=True):
        placement = engine.placement
        assert placement is not None
        assert (placement.num_slots, placement.slots_per_rank) == (288, count)
        held = {int(expert) for expert in placement.physical_to_logical_map[0]}
        assert held == set(range(256))
        assert engine.layout.token_bytes == 70272  # which the study's transfer counters tell too
        assert engine.layout.page_bytes == 32 * 70272
    ways = list(plan.pairs())
    assert len(ways) == pairs
    for index, engine in enumerate(plan.prefill):
        written = {(prefill.name, rank) for prefill, writers, _, _ in ways for rank in writers}
        assert {(f"P{index}", rank) for rank in range(engine.topology.world_size)} <= written
    reached = {rank for _, _, _, destinations in ways for rank in destinations}
    assert reached == set(range(plan.decode[0].topology.world_size))
    assert f"{ranks} ranks, {pairs} pairs" in str(plan)
    assert f"D0: {plan.decode[0].topology.world_size} ranks, data parallel" in str(plan)


def test_context_parallel_prefill_writes_to_tensor_parallel_decode() -> None:
    """DeepSeek-V3.2 on 32 ranks a side: one prompt at a time over all, and eight decodes of four ranks."""
    prefill = EnginePlan(name="P", config=V32, topology=Topology(world_size=32, cp_size=32, ep_size=32), mtp=True)
    topology = Topology(world_size=32, dp_size=8, tp_size=4, ep_size=32)
    plan = ClusterPlan(prefill=(prefill,), decode=(attrs.evolve(prefill, name="D", topology=topology),))
    assert [(writers, written) for _, writers, _, written in plan.pairs()] == [
        (range(32), range(4 * group, 4 * group + 4)) for group in range(8)
    ]
    assert plan.decode[0].placement is not None
    assert plan.decode[0].placement.slots_per_rank == 8
    assert plan.prefill[0].layout.token_bytes == 62 * (2 * 576 + 2 * 128)


def engine(**changes: Any) -> EnginePlan:
    values: dict[str, Any] = {"name": "P", "config": V3, "topology": Topology(world_size=8, dp_size=8, ep_size=8)}
    return EnginePlan(**values | changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"topology": Topology(world_size=72, dp_size=72, ep_size=72), "name": "D1"},
            r"D1: ep_size 72 does not divide n_routed_experts \+ num_redundant_experts = 256 \+ 0 = 256",
        ),
        (
            {
                "topology": Topology(world_size=64, dp_size=64, ep_size=64),
                "experts": ExpertConfig(num_redundant_experts=32),
            },
            r"ep_size 64 does not divide n_routed_experts \+ num_redundant_experts = 256 \+ 32 = 288",
        ),
        ({"topology": Topology(world_size=3, tp_size=3)}, "P: tp_size 3 does not divide num_attention_heads = 128"),
        (
            {"topology": Topology(world_size=5, tp_size=5, moe_dense_tp_size=5)},
            "tp_size 5 does not divide num_attention_heads = 128",
        ),
        (
            {"topology": Topology(), "experts": ExpertConfig(num_redundant_experts=1)},
            "rank 0 of 1 holds expert 0 twice",
        ),
    ],
)
def test_an_engine_that_cannot_be_loaded_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        engine(**changes)


def test_pages_of_different_bytes_are_refused() -> None:
    large = engine(name="D", cache=CacheConfig(page_size=128))
    with pytest.raises(ConfigError, match=r"4497408 bytes in P and 8994816 in D \(page_size 64 and 128\)"):
        ClusterPlan(prefill=(engine(),), decode=(engine(), large))
    with pytest.raises(LayoutMismatch, match=r"ours mla.bfloat16.512\+64.* theirs mla.e4m3.512\+64"):
        ClusterPlan(prefill=(engine(),), decode=(engine(cache=CacheConfig(kv_format="fp8")),))
    with pytest.raises(LayoutMismatch, match="model_id"):
        ClusterPlan(prefill=(engine(),), decode=(engine(config=attrs.evolve(V3, rope_theta=5e5)),))
    with pytest.raises(ConfigError, match="engines on both sides, got 1 prefill and 0 decode"):
        ClusterPlan(prefill=(engine(),), decode=())


def test_clusters_are_named_by_their_nodes() -> None:
    assert engine_nodes("P3x3D4") == ((3, 3, 3), (4,))
    assert engine_nodes("P4D2x9") == ((4,), (9, 9))
    for text in ("", "P3", "D4P3", "P0D1", "P3x0D1", "P3xD1", "p3d4", "P3D4 ", "P1000D1", "P3x3xD4"):
        with pytest.raises(ConfigError, match='named like "P3x3D4"'):
            engine_nodes(text)
