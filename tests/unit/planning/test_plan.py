"""Plans for clusters are made, and refused, with plain numbers and without the hardware."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from pdinfer.checkpoint.quantize import quantize_checkpoint, quantized_names
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig
from pdinfer.diagnosis.affinity import CpuAffinity
from pdinfer.errors import BackendUnavailable, ConfigError, LayoutMismatch
from pdinfer.model import load_plan
from pdinfer.model.destinations import Destinations
from pdinfer.model.load import load_model
from pdinfer.parallel.topology import Topology
from pdinfer.planning import ClusterPlan, EnginePlan, profile, rank_memory
from pdinfer.planning.rank_memory import STORED, PublishedWeights
from pdinfer.planning.shapes import engine_nodes
from pdinfer.testing import tiny_config, tiny_config_dict, write_checkpoint
from tests.unit.config import published_configs

V3_SIZES = {
    "vocab_size": 129280,
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


def h800(text: str, config: ModelConfig, weights: str = "auto") -> ClusterPlan:
    found = profile(f"deepseek-v3-h800-{text}")
    prefill, decode = (
        tuple(attrs.evolve(engine, weights=weights) for engine in engines) for engines in (found.prefill, found.decode)
    )
    return attrs.evolve(found, prefill=prefill, decode=decode).plan(config)


@pytest.mark.parametrize(
    ("text", "ranks", "slots", "pairs"),
    [
        ("P3x3D4", 104, [12, 12, 12, 9], 3 * 24 * 32),
        ("P4D9", 104, [9, 4], 32 * 72),
        ("P4D6", 80, [9, 6], 32 * 48),
        ("P2D2", 32, [18, 18], 16 * 16),
        ("P4D2", 48, [9, 18], 32 * 16),
        ("P2D4", 48, [18, 9], 16 * 32),
    ],
)
def test_the_deployments_fit(text: str, ranks: int, slots: list[int], pairs: int) -> None:
    plan = h800(text, V3)
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
    """DeepSeek-V3.2 runs on 32 ranks a side: one prompt at a time over all of them, and eight decodes of four ranks."""
    prefill = EnginePlan(name="P", config=V32, topology=Topology(world_size=32, cp_size=32, ep_size=32), mtp=True)
    topology = Topology(world_size=32, dp_size=8, tp_size=4, ep_size=32)
    plan = ClusterPlan(prefill=(prefill,), decode=(attrs.evolve(prefill, name="D", topology=topology),))
    assert [(writers, written) for _, writers, _, written in plan.pairs()] == [
        (range(32), range(4 * group, 4 * group + 4)) for group in range(8)
    ]
    assert plan.decode[0].placement is not None
    assert plan.decode[0].placement.slots_per_rank == 8
    assert plan.prefill[0].layout.token_bytes == 62 * (2 * 576 + 2 * 128)


NORMAL = ExpertConfig(num_redundant_experts=32, moe_a2a_backend="deep_ep")
LOW_LATENCY = attrs.evolve(NORMAL, deepep_mode="low_latency")


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
        ({"device": "tpu"}, "device must be 'cpu', 'cuda' or a card such as 'H200', got 'tpu'"),
        ({"device": None}, "device must be 'cpu', 'cuda' or a card such as 'H200', got None"),
        ({"weights": "best"}, 'P: weights must be "auto", "stored" or "float"'),
        ({"stored": "int3"}, "P: stored must be one of float, fp8, w8a8_dynamic, int4, mxfp4, got 'int3'"),
        ({"device_bytes": 0}, "device_bytes must be an int from 1"),
        ({"cache": CacheConfig(kv_format="float32")}, 'P: kv_format "float32" was asked for and the model runs in'),
        ({"mtp": True, "config": attrs.evolve(V3, num_nextn_predict_layers=0)}, "P: mtp=True and the config has no"),
        ({"engine": EngineConfig(num_draft_tokens=2)}, "P: num_draft_tokens is 2, which needs mtp=True"),
        ({"other_engine": EngineConfig(num_draft_tokens=2)}, "P: num_draft_tokens is 2, which needs mtp=True"),
        ({"other_engine": EngineConfig()}, "P: other_engine is for one rank, and one of 8 keeps its role"),
        ({"experts": ExpertConfig(moe_a2a_backend="local")}, 'P: moe_a2a_backend "local" is for one rank .* over 8'),
        (
            {"topology": Topology(world_size=72, dp_size=72, ep_size=72), "experts": NORMAL},
            "P: DeepEP's normal kernels exist for 2, .* ranks, ep_size is 72",
        ),
        (
            {"topology": Topology(world_size=12, dp_size=12, ep_size=12), "experts": LOW_LATENCY},
            "P: DeepEP needs 2 to 8 ranks or a multiple of 8, ep_size is 12",
        ),
        (
            {"config": attrs.evolve(V3, hidden_size=7000), "experts": LOW_LATENCY},
            "P: DeepEP's low-latency kernels exist for hidden sizes .*, hidden_size is 7000",
        ),
        (
            {"experts": attrs.evolve(LOW_LATENCY, num_max_dispatch_tokens_per_rank=512)},
            "P: num_max_dispatch_tokens_per_rank must be from 1 to 511",
        ),
        (
            {"config": attrs.evolve(V3, dtype="float16"), "experts": NORMAL},
            "P: DeepEP carries rows of bfloat16, the model runs in torch.float16",
        ),
    ],
)
def test_an_engine_that_cannot_be_loaded_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        engine(**changes)


def test_a_plan_reads_the_scheme_of_its_checkpoint_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(scheme: str, config: ModelConfig) -> Callable[[str], bool]:
        asked.append(scheme)
        return quantized_names(scheme, config)

    monkeypatch.setattr(rank_memory, "quantized_names", noted)
    PublishedWeights(config=V3, stored="float").stored_as("model.norm.weight")
    published = PublishedWeights(config=V3, stored="fp8")
    kinds = {published.stored_as(f"model.layers.{layer}.self_attn.o_proj.weight").name for layer in range(61)}
    assert (asked, kinds) == (["fp8"], {"fp8"})


def test_deep_ep_between_cpus_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match=r'P: moe_a2a_backend "deep_ep" carries rows .* device is cpu'):
        engine(device="cpu", experts=LOW_LATENCY)


@pytest.mark.parametrize("name", ["P9D4", "P2x9D4"])
def test_a_cluster_without_kernels_for_its_size_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="P0: DeepEP's normal kernels exist for"):
        h800(name, V3)


GIB = 1 << 30
MODES = [
    # P2 and D2 of the study: 117 GiB as bfloat16, on cards of 80 GB
    (16, "H800", "fp8", "stored", 61.75),
    (16, "H800", "fp8", "auto", 61.75),
    (16, "A100", "fp8", "auto", 117.72),  # which does not multiply FP8
    (16, "H800", "fp8", "float", 117.72),
    (16, "H800", "float", "stored", 117.72),
    (72, "A100", "fp8", "stored", 28.44),
]


@pytest.mark.parametrize(("num_ranks", "device", "stored", "weights", "gib"), MODES)
def test_a_rank_needs_room_for_what_it_would_load(
    num_ranks: int, device: str, stored: str, weights: str, gib: float
) -> None:
    shape: dict[str, Any] = {
        "device": device,
        "topology": Topology(world_size=num_ranks, dp_size=num_ranks, ep_size=num_ranks),
        "experts": ExpertConfig(num_redundant_experts=32),
        "stored": stored,
        "weights": weights,
    }
    plan = engine(**shape)
    assert plan.weight_bytes / GIB == pytest.approx(gib, abs=0.005)
    assert f"{gib} GiB of weights per rank" in str(plan)
    page = plan.layout.page_bytes
    least = plan.weight_bytes + plan.driver_bytes + page
    assert engine(**shape, device_bytes=least).num_pages is None
    assert engine(**shape, device_bytes=least + 4 * page, cache=CacheConfig(num_pages=5)).num_pages == 5
    half = CacheConfig(mem_fraction_static=0.5)
    assert engine(**shape, device_bytes=2 * least + 6 * page, cache=half).num_pages == 4
    for changes, pages in (
        ({"device_bytes": least - 1}, "1 page"),
        ({"device_bytes": least + 4 * page - 1, "cache": CacheConfig(num_pages=5)}, "5 pages"),
        ({"device_bytes": 2 * least - 2, "cache": half}, "1 page"),
    ):
        told = rf'P: {gib} GiB of weights per rank \(weights="{weights}", stored: {stored}.* and {pages} of KV, .* do'
        with pytest.raises(ConfigError, match=told) as refused:
            engine(**shape, **changes)
        assert ('or weights="stored"' in str(refused.value)) == (stored == "fp8" and gib > 100)


def test_what_a_rank_holds_decides_and_not_what_the_files_hold() -> None:
    assert h800("P2D2", V3).decode[0].num_pages == 629
    with pytest.raises(ConfigError, match=r"P0: 117\.72 GiB .*, do not fit into mem_fraction_static 0\.81 of 79\.10"):
        h800("P2D2", V3, weights="float")
    with pytest.raises(ConfigError, match=r"P0: 104\.58 GiB .*use more ranks$"):
        h800("P1D2", V3)  # the study too says that 2 nodes are the least


SMALL = tiny_config_dict(
    "v3", num_hidden_layers=2, num_nextn_predict_layers=1, hidden_size=64, moe_intermediate_size=32
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SMALL in each format."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "float", SMALL, mtp=True)
    for stored in STORED:
        if stored != "float":
            quantize_checkpoint(folder / "float", folder / stored, scheme=stored)
    return folder


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("weights", ["auto", "stored", "float"])
def test_a_plan_knows_the_bytes_that_a_model_takes(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stored: str, weights: str
) -> None:
    made: list[Destinations] = []

    def keep(*arguments: Any) -> Destinations:
        made.append(Destinations(*arguments))
        return made[-1]

    monkeypatch.setattr(load_plan, "Destinations", keep)
    with caplog.at_level(logging.INFO, "pdinfer"):
        model = load_model(checkpoints / stored, weights=weights, mtp=True)
    plan = engine(
        config=ModelConfig.from_dict(SMALL),
        topology=Topology(),
        stored=stored,
        weights=weights,
        mtp=True,
        device="cpu",
    )
    assert plan.weight_bytes == made[0].num_bytes == made[1].num_bytes
    assert plan.layout.components == model.kv_layout(plan.cache).components
    assert f"rank 0 of 1 loads {plan.weight_bytes / GIB:.2f} GiB of weights onto cpu" in caplog.text


GRIDS = [
    {"tp_size": 2, "dp_size": 2, "ep_size": 4},
    {"tp_size": 2, "cp_size": 2, "ep_size": 2, "moe_dense_tp_size": 2},
]


@pytest.mark.parametrize("sizes", GRIDS)
def test_every_rank_holds_as_much(sizes: dict[str, int]) -> None:
    config = ModelConfig.from_dict(tiny_config_dict("v3"))
    held = {
        engine(config=config, topology=Topology(**sizes, world_size=4, rank=rank)).weight_bytes for rank in range(4)
    }
    assert len(held) == 1
    whole = engine(config=config, topology=Topology()).weight_bytes
    assert whole / 4 < held.pop() < whole


def test_steps_that_deep_ep_was_not_made_for_are_refused() -> None:
    decode = engine(name="D", experts=LOW_LATENCY)
    told = r"is 128, and a step may have 256 tokens on a rank: D: max_running_requests \* .* = 256 \* \(1 \+ 0\)"
    with pytest.raises(ConfigError, match=told):
        ClusterPlan(prefill=(engine(),), decode=(decode,))
    fits = attrs.evolve(decode, engine=EngineConfig(max_running_requests=128))
    ClusterPlan(prefill=(engine(),), decode=(fits,))
    drafting = attrs.evolve(fits, mtp=True, engine=EngineConfig(max_running_requests=64, num_draft_tokens=2))
    with pytest.raises(ConfigError, match=r"192 tokens on a rank: .* = 64 \* \(1 \+ 2\)"):
        ClusterPlan(prefill=(engine(mtp=True),), decode=(drafting,))
    with pytest.raises(ConfigError, match="4096 tokens on a rank: D: chunked_prefill_size = 4096"):
        ClusterPlan(prefill=(fits,), decode=(fits,))


def test_pages_of_different_bytes_are_refused() -> None:
    large = engine(name="D", cache=CacheConfig(page_size=128))
    with pytest.raises(ConfigError, match=r"4497408 bytes in P and 8994816 in D \(page_size 64 and 128\)"):
        ClusterPlan(prefill=(engine(),), decode=(engine(), large))
    with pytest.raises(LayoutMismatch, match=r"ours mla.bfloat16.512\+64.* theirs mla.e4m3.512\+64"):
        ClusterPlan(prefill=(engine(),), decode=(engine(cache=CacheConfig(kv_format="fp8")),))
    with pytest.raises(
        LayoutMismatch, match=r"P and D1: .* theirs latent,mtp.latent; .*; give both mtp=True, or neither$"
    ):
        ClusterPlan(prefill=(engine(),), decode=(engine(), engine(name="D1", mtp=True)))
    with pytest.raises(LayoutMismatch, match=r"P and P: .*model_id"):
        ClusterPlan(prefill=(engine(),), decode=(engine(config=attrs.evolve(V3, rope_theta=5e5)),))
    with pytest.raises(ConfigError, match="engines on both sides, got 1 prefill and 0 decode"):
        ClusterPlan(prefill=(engine(),), decode=())


def test_clusters_are_named_by_their_nodes() -> None:
    assert engine_nodes("P3x3D4") == ((3, 3, 3), (4,))
    assert engine_nodes("P4D2x9") == ((4,), (9, 9))
    assert engine_nodes("P4D9") == ((4,), (9,))
    assert engine_nodes("4P9D") == ((1,) * 4, (1,) * 9)
    for text in (
        "",
        "P3",
        "D4P3",
        "P0D1",
        "P3x0D1",
        "P3xD1",
        "p3d4",
        "P3D4 ",
        "P1000D1",
        "P3x3xD4",
        "0P1D",
        "4P4D9",
        None,
    ):
        with pytest.raises(ConfigError, match='named like "4P9D"'):
            engine_nodes(text)  # type: ignore[arg-type]


def kimi(name: str, ranks: int, **changes: Any) -> EnginePlan:
    """Return an engine of Kimi-K2-Thinking on cards of 141 GB, planned from its config.json alone."""
    return engine(
        name=name,
        config=ModelConfig.from_dict(published_configs.KIMI_K2_THINKING),
        topology=Topology(world_size=ranks, dp_size=ranks, ep_size=ranks),
        device="H200",
        **{"device_bytes": 141 * 10**9, "cache": CacheConfig(mem_fraction_static=0.8), **changes},
    )


def test_kimi_k2_in_four_bits_takes_what_the_published_files_do() -> None:
    """532 GiB of experts, divided over 4 nodes of a prefill and 2 of a decode, and 22 GiB on each rank."""
    plan = ClusterPlan(prefill=(kimi("P", 32),), decode=(kimi("D", 16),))
    experts = 384 * 60 * 3 * 2048 * 7168 * 9 // 16  # 4 bits, and 16 for every 32
    assert experts / GIB == pytest.approx(531.6, abs=0.1)
    alone = kimi("alone", 1, device_bytes=None, cache=CacheConfig())
    for each in (*plan.engines, alone):
        weights = each.rank_weights
        assert weights.quantized == experts // each.topology.world_size
        assert weights.floats / GIB == pytest.approx(22.1, abs=0.1)
    assert [each.num_pages for each in plan.engines] == [15590, 11624]
    assert '55.36 GiB of weights per rank (weights="auto", stored: int4; 140.27 GiB as bfloat16)' in str(plan)
    with pytest.raises(
        ConfigError, match=r'D: 140\.27 GiB .*, do not fit into .*; use more ranks, or weights="stored"'
    ):
        kimi("D", 16, weights="float")


def test_a_plan_counts_what_its_dispatcher_takes() -> None:
    """`mem_fraction_static` is for weights and pages, and all of it has to fit the device."""
    (decode,) = h800("P2D2", V3).decode
    beside = decode.buffer_bytes + decode.room_bytes + decode.graph_bytes
    least = decode.weight_bytes + decode.driver_bytes + beside + decode.layout.page_bytes
    one = CacheConfig(page_size=32)
    attrs.evolve(decode, cache=one, device_bytes=least)
    told = r"1\.00 GiB of drivers .* do not fit into .* beside 4\.03 GiB of .* and 0\.55 GiB of captured steps .*; use"
    with pytest.raises(ConfigError, match=told):
        attrs.evolve(decode, cache=one, device_bytes=least - 1)


def test_a_plan_of_both_roles_has_memory_for_the_one_that_needs_more() -> None:
    prefill, decode = EngineConfig(chunked_prefill_size=512), EngineConfig(graph_batch_sizes=(1, 64))
    alone, both, back = (
        engine(config=tiny_config(), topology=Topology(), engine=one, other_engine=other, device_bytes=4 * GIB)
        for one, other in ((prefill, None), (prefill, decode), (decode, prefill))
    )
    assert alone.graph_bytes == 0 < both.graph_bytes == back.graph_bytes
    assert both.weight_bytes == alone.weight_bytes


def halves(num_gpus: int) -> tuple[CpuAffinity, ...]:
    """A host of two sockets of 8 CPUs."""
    share = 16 // num_gpus
    return tuple(
        CpuAffinity(numa_node=2 * at // num_gpus, cpus=f"{share * at}-{share * at + share - 1}")
        for at in range(num_gpus)
    )


def test_a_plan_tells_where_the_ranks_of_a_host_run() -> None:
    plan = profile("deepseek-v3-h800-P2D4").plan(V3, cpu_affinity=(*halves(8)[:7], None))
    for engine in plan.engines:
        told = str(engine).partition("; CPUs of a host: ")[2].split(", ")
        assert told[:2] == ["rank 0 on 0-1 of NUMA node 0", "rank 1 on 2-3 of NUMA node 0"]
        assert told[4] == "rank 4 on 8-9 of NUMA node 1"
        assert told[7:] == ["rank 7 on CPUs that are not known"]
    assert "CPUs of a host" not in str(profile("deepseek-v3-h800-P2D4").plan(V3))


def test_a_host_may_have_more_gpus_than_ranks_but_not_fewer() -> None:
    alone = EnginePlan(name="D", config=V3, topology=Topology(), cpu_affinity=halves(2))
    assert str(alone).endswith("; CPUs of a host: rank 0 on 0-7 of NUMA node 0")
    told = "P0: 8 ranks run on a host, and cpu_affinity is that of 4 GPUs: set ranks_per_node of the experts, or ask"
    with pytest.raises(ConfigError, match=told):
        profile("deepseek-v3-h800-P2D4").plan(V3, cpu_affinity=halves(4))
    with pytest.raises(ConfigError, match="cpu_affinity must be"):
        EnginePlan(name="D", config=V3, topology=Topology(), cpu_affinity=("0-3",))  # type: ignore[arg-type]
