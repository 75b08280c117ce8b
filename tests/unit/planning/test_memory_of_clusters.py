"""What the ranks and hosts of whole clusters hold: the sizes of a study of DeepSeek-V3 and of a recipe for Ascend, and
three sizes more that the study's nodes could have been.

`clusters.csv` has the first prefill engine and the decode engine of each. The formulas stand here once more, in plain
arithmetic.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.parallel.topology import Topology
from pdinfer.planning import ClusterPlan, EnginePlan, profile
from pdinfer.testing import tiny_config
from tests.unit.config import published_configs

LINES = Path(__file__).with_name("clusters.csv").read_text("utf-8").splitlines()
ROWS = list(csv.DictReader(LINES))
V3, V32 = (ModelConfig.from_dict(sizes) for sizes in (published_configs.V3, published_configs.V32))
GIB, MIB = 1 << 30, 1 << 20
H800_BYTES, A3_BYTES = 84_932_978_278, 64_000_000_000


def planned(cluster: str) -> ClusterPlan:
    if cluster == "A3":
        return profile("deepseek-v3.2-ascend-a3-P2D2").plan(V32)
    return profile(f"deepseek-v3-h800-{cluster}").plan(V3)


@pytest.mark.parametrize("cluster", {row["cluster"]: None for row in ROWS})
def test_a_plan_has_the_numbers_of_its_cluster(cluster: str) -> None:
    plan = planned(cluster)
    found = []
    for engine, host in ((plan.prefill[0], plan.hosts[0]), (plan.decode[0], plan.hosts[-1])):
        assert engine.placement is not None
        sizes = (engine.topology.world_size, engine.placement.slots_per_rank, engine.weight_bytes)
        memory = (engine.buffer_bytes, engine.room_bytes, engine.graph_bytes, engine.num_pages)
        of_host = (host.num_links, host.rank_bytes)
        found.append([cluster, engine.name, *map(str, sizes + memory + of_host)])
    assert found == [list(row.values()) for row in ROWS if row["cluster"] == cluster]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['cluster']} {row['engine']}")
def test_the_numbers_follow_from_the_formulas(row: dict[str, str]) -> None:
    """288 slots (256 on Ascend), 256 tokens of each rank (8), rows of 7168 numbers, experts of 2048. Steps of 256, 128,
    …, 1 sequences (4, 2, 1, each with three drafts) are captured for two kinds of draws over 129,280 tokens."""
    is_h800, is_decode = row["cluster"] != "A3", row["engine"] == "D0"
    slots, tokens = (288, 256) if is_h800 else (256, 8)
    assert int(row["ranks"]) * int(row["slots"]) == slots
    if is_decode:
        rows = slots * tokens  # of all ranks, for each expert
        asked = 4 * rows * (2 * 7168 + 4 * 56) + 2 * (4 * slots)
        heap = -(-asked // (512 * MIB)) * 512 * MIB
        assert int(row["buffer_bytes"]) == heap + 32 * MIB
        in_fp8 = (7168 + 4 * 56) + 2 * 4096 + (2048 + 4 * 16) + 2 * 7168
        in_floats = 2 * (7168 + 4096 + 2048 + 7168)
        assert int(row["room_bytes"]) == rows * (in_fp8 if is_h800 else in_floats)
        all_captured, largest = (511, 256) if is_h800 else (7 * 4, 4 * 4)
        assert int(row["graph_bytes"]) == 129280 * (2 * 4 * all_captured + 2 * largest)
    device, token_bytes = (H800_BYTES, 61 * 1152) if is_h800 else (A3_BYTES, 62 * (1152 + 256))
    share = 0.81 if is_h800 else 0.79 if is_decode else 0.73
    page_bytes = (32 if is_h800 else 64) * token_bytes
    assert int(row["pages"]) == (int(device * share) - int(row["weight_bytes"]) - GIB) // page_bytes > 0
    beside = int(row["buffer_bytes"]) + int(row["room_bytes"]) + int(row["graph_bytes"])
    assert device * share + beside <= device
    of_link = 4 * 4 * MIB + 64 if is_decode else 2 * 4 * MIB
    assert int(row["host_bytes"]) == int(row["links"]) * of_link


def test_what_is_in_use_is_what_the_study_saw() -> None:
    """65 of 79 GB on P2 and 70 on D2, with 0.81 for weights and pages."""
    for engine, seen in zip(planned("P2D2").engines, (65, 70), strict=True):
        static = H800_BYTES * 0.81
        beside = engine.buffer_bytes + engine.room_bytes + engine.graph_bytes
        assert (static + beside) / GIB == pytest.approx(seen, abs=1.0)


def test_text_says_where_memory_goes_and_what_a_pool_has() -> None:
    prefill, decode = map(str, planned("P2D2").engines)
    assert "1.00 GiB of drivers and NCCL (an estimate), 0.88 GiB of DeepEP's buffer; 1.32 GiB remain" in prefill
    assert (
        "4.03 GiB of DeepEP's buffer, 2.20 GiB of rows at experts, 0.55 GiB of captured steps (an estimate); 1.32 GiB "
        "remain of mem_fraction_static 0.81 for 629 pages of 32 tokens, 2248704 bytes each, 20128 tokens; 8.24 GiB of "
        "79.10 GiB are left for steps"
    ) in decode
    assert "a prompt" not in prefill + decode
    given = attrs.evolve(planned("P2D2").decode[0], cache=CacheConfig(page_size=32, num_pages=100))
    assert "(an estimate); 100 pages of 32 tokens, 2248704 bytes each, 3200 tokens; 9.35 GiB of 79.10" in str(given)


def test_links_take_threads_and_memory_of_hosts() -> None:
    """P4D9 is 32 ranks that write to 72."""
    plan = planned("P4D9")
    assert [(host.num_threads, host.rank_bytes // MIB) for host in plan.hosts] == [(72, 576), (0, 512)]
    assert (
        "P0: 72 links per rank, over MooncakeTransport 72 threads that write and 576 MiB of send blocks, 4.50 "
        in str(plan)
    )
    assert "D0: 32 links per rank, over MooncakeTransport 512 MiB of rings, 4.00 GiB on a host of 8 ranks" in str(plan)
    of_several = [(host.name, host.num_links) for host in planned("P3x3D4").hosts]
    assert of_several == [("P0", 32), ("P1", 32), ("P2", 32), ("D0", 72)]


def test_a_pool_that_is_smaller_than_the_published_prompt_is_told() -> None:
    prefill, decode = planned("A3").engines
    told = "a prompt of 131072 tokens does not fit: it needs 2048 pages, which mem_fraction_static 0.89 holds"
    assert told in str(prefill)
    assert "a prompt of" not in str(decode)
    assert "a prompt of" not in str(attrs.evolve(prefill, cache=CacheConfig(page_size=64, mem_fraction_static=0.89)))
    longer = str(attrs.evolve(prefill, prompt_tokens=1 << 18))
    assert longer.endswith("it needs 4096 pages, more than the device has")
    given = str(attrs.evolve(prefill, cache=CacheConfig(page_size=64, num_pages=2047)))
    assert given.endswith("does not fit: it needs 2048 pages")


def decode_of(**changes: Any) -> EnginePlan:
    return attrs.evolve(planned("P2D2").decode[0], **changes)


def test_a_fraction_that_leaves_nothing_for_dispatch_is_refused() -> None:
    """The next that fits is named, and does fit."""
    at = CacheConfig(page_size=32, mem_fraction_static=0.93)
    told = (
        r"D0: mem_fraction_static 0\.93 of 79\.10 GiB leaves 5\.54 GiB beside weights and pages, less than 4\.03 GiB "
        r"of DeepEP's buffer and 2\.20 GiB of rows at experts and 0\.55 GiB of captured steps \(an estimate\); it may "
        r"be at most 0\.91"
    )
    with pytest.raises(ConfigError, match=told):
        decode_of(cache=at)
    decode_of(cache=attrs.evolve(at, mem_fraction_static=0.91))


def fp8(outputs: int, inputs: int) -> int:
    """The bytes of a matrix, with a scale of 4 for each 128 x 128."""
    return outputs * inputs + 4 * -(-outputs // 128) * -(-inputs // 128)


def v3_bytes(slots: int, *, mtp: bool) -> int:
    """The weights of a rank with so many experts of each layer: in FP8, but in bfloat16 kv_b_proj, norms, the embedding
    and the head, and in float32 routers."""
    hidden, inner = 7168, 2048
    in_fp8 = fp8(1536, hidden) + fp8(128 * 192, 1536) + fp8(576, hidden) + fp8(hidden, 128 * 128)
    attention = in_fp8 + 2 * (128 * 256 * 512 + 1536 + 512 + 2 * hidden)
    expert = 2 * fp8(inner, hidden) + fp8(hidden, inner)
    layer = attention + (slots + 1) * expert + 4 * (256 * hidden + 256)
    dense = attention + 2 * fp8(18432, hidden) + fp8(hidden, 18432)
    drafts = mtp * (layer + 2 * (2 * hidden * hidden + 3 * hidden))
    return 58 * layer + 3 * dense + 2 * (2 * 129280 * hidden + hidden) + drafts


@pytest.mark.parametrize(
    ("ranks", "redundant", "tokens", "num_drafts", "gigabytes"),
    [(7, 3, 128, 0, 141), (8, 8, 256, 3, 141), (40, 24, 256, 0, 80), (48, 32, 256, 1, 64), (144, 32, 511, 0, 96)],
)
def test_other_sizes_follow_from_the_formulas(
    ranks: int, redundant: int, tokens: int, num_drafts: int, gigabytes: int
) -> None:
    """Ranks that are no power of two, copies of a few experts alone, drafts, and cards of other makers' sizes."""
    most, slots = tokens // (1 + num_drafts), (256 + redundant) // ranks
    plan = EnginePlan(
        name="D",
        config=V3,
        topology=Topology(world_size=ranks, dp_size=ranks, ep_size=ranks),
        cache=CacheConfig(page_size=32, mem_fraction_static=0.85),
        engine=EngineConfig(max_running_requests=most, num_draft_tokens=num_drafts, graph_batch_sizes=(most, 1)),
        experts=ExpertConfig(
            moe_a2a_backend="deep_ep",
            deepep_mode="low_latency",
            num_redundant_experts=redundant,
            num_max_dispatch_tokens_per_rank=tokens,
        ),
        mtp=num_drafts > 0,
        stored="fp8",
        device="H800",
        device_bytes=gigabytes * 10**9,
    )
    weights, rows = v3_bytes(slots, mtp=num_drafts > 0), ranks * slots * tokens
    asked = 4 * rows * (2 * 7168 + 4 * 56) + 2 * -(-4 * ranks * slots // 128) * 128
    assert plan.weight_bytes == weights
    assert plan.buffer_bytes == -(-asked // (512 * MIB)) * 512 * MIB + 32 * MIB
    assert plan.room_bytes == rows * (7168 + 4 * 56 + 2 * 4096 + 2048 + 4 * 16 + 2 * 7168)
    assert plan.graph_bytes == (1 + num_drafts) * 129280 * (2 * 4 * (most + 1) + 2 * most)
    page_bytes = 32 * 1152 * (61 + (num_drafts > 0))
    assert plan.num_pages == (gigabytes * 10**9 * 85 // 100 - weights - GIB) // page_bytes > 0


def test_what_is_beside_weights_and_pages_is_lowered_where_these_would_fit() -> None:
    """All sizes of captured steps up to 256 keep 31.75 GiB."""
    captured = attrs.evolve(decode_of().engine, graph_batch_sizes=tuple(range(1, 257)))
    told = (
        r"D0: 61\.75 GiB .* 1 page of KV, 62\.76 GiB together, do not fit into 79\.10 GiB beside 4\.03 GiB of DeepEP's "
        r"buffer and 2\.20 GiB of rows at experts and 31\.75 GiB of captured steps \(an estimate\); use more ranks, or "
        r"a lower num_max_dispatch_tokens_per_rank, or fewer graph_batch_sizes$"
    )
    with pytest.raises(ConfigError, match=told):
        decode_of(engine=captured)
    with pytest.raises(ConfigError, match=r"mem_fraction_static 0\.7 of 79\.10 GiB beside .*; use more ranks$"):
        decode_of(cache=CacheConfig(page_size=32, mem_fraction_static=0.7))
    few = CacheConfig(page_size=32, mem_fraction_static=0.75)  # 59.33 GiB: two slots of experts are 5.07
    with pytest.raises(ConfigError, match=r"use more ranks, or fewer num_redundant_experts$"):
        decode_of(cache=few)
    decode_of(cache=few, experts=attrs.evolve(decode_of().experts, num_redundant_experts=0))
    with pytest.raises(
        ConfigError, match=r"20000 pages of KV, .* into 79\.10 GiB beside .*; use more ranks, or fewer num_p"
    ):
        decode_of(cache=CacheConfig(page_size=32, num_pages=20000))


def test_experts_have_room_for_the_rows_that_may_come() -> None:
    rows = 288 * 256
    plan = decode_of()
    assert decode_of(experts=attrs.evolve(plan.experts, two_batch_overlap=True)).room_bytes == 2 * plan.room_bytes
    floats = decode_of(stored="float", device_bytes=None)
    assert floats.room_bytes == rows * 2 * (7168 + 4096 + 2048 + 7168)
    assert decode_of(experts=attrs.evolve(plan.experts, deepep_mode="normal")).room_bytes == 0


def test_the_second_api_has_a_buffer_and_room_in_captured_steps() -> None:
    """Two nodes of 8: what comes over NVLink, one row each of what goes to other nodes, and what comes from there."""
    elastic = attrs.evolve(decode_of().experts, deepep_mode="elastic")
    plan = decode_of(experts=elastic)
    sent = (16 * 256 + 256 + 2 * (256 + 1280)) * (2 * 7168 + 128)
    returned = (8 * 2 * 256 + 2 * 256 + 2 * (256 + 1280)) * (2 * 7168 + 64)
    assert plan.buffer_bytes == -(-max(sent, returned) // (2 * MIB)) * 2 * MIB + 14 * MIB
    assert plan.room_bytes == 16 * 256 * 8 * 32032
    assert decode_of(experts=elastic, engine=EngineConfig(graph_batch_sizes=())).room_bytes == 0


def test_captured_steps_keep_the_logits_of_their_tokens() -> None:
    """Drafts multiply tokens, and what is asked for twice is captured once."""
    plan = decode_of()

    def asked(*sizes: int, num_drafts: int = 0, **changes: Any) -> int:
        config = EngineConfig(graph_batch_sizes=sizes, num_draft_tokens=num_drafts)
        return decode_of(engine=config, mtp=num_drafts > 0, **changes).graph_bytes

    logits = 4 * V3.vocab_size
    assert asked(8, 8) == asked(8) == 8 * (2 * logits + logits // 2)
    assert asked(8, 2) - asked(8) == 2 * 2 * logits
    assert asked() == 0
    alone: dict[str, Any] = {"topology": Topology(), "experts": ExpertConfig(), "device_bytes": None}
    assert asked(8, num_drafts=2, **alone) == 3 * asked(8, **alone) == 3 * asked(8) == asked(8, num_drafts=2)
    shared = Topology(world_size=16, dp_size=4, tp_size=4, ep_size=16)
    assert asked(8, topology=shared) == asked(8)
    assert asked(8, experts=attrs.evolve(plan.experts, deepep_mode="normal")) == 0
    assert asked(8, experts=attrs.evolve(plan.experts, moe_a2a_backend="all_to_all")) == 0


def test_ranks_without_experts_capture_their_steps() -> None:
    """They have nothing to dispatch, whatever would carry it."""
    dense = tiny_config(n_routed_experts=0, first_k_dense_replace=3)
    engine = EngineConfig(graph_batch_sizes=(8,))
    alone = EnginePlan(name="D", config=dense, topology=Topology(), engine=engine)
    ranks = attrs.evolve(alone, topology=Topology(world_size=2, dp_size=2, ep_size=2))
    assert ranks.graph_bytes == alone.graph_bytes > 0


def test_a_cluster_knows_what_its_decodes_capture_when_none_is_named() -> None:
    """Powers of two, up to what may run."""
    plan = planned("P2D2")
    (prefill,), (decode,) = plan.prefill, plan.decode
    elastic = attrs.evolve(decode.experts, deepep_mode="elastic")
    open_plan = attrs.evolve(decode, engine=EngineConfig(max_running_requests=100), experts=elastic)
    assert (open_plan.graph_bytes, open_plan.room_bytes) == (0, 0)
    (named,) = attrs.evolve(plan, decode=(open_plan,)).decode
    assert named.engine.graph_batch_sizes == (1, 2, 4, 8, 16, 32, 64, 100)
    assert named.graph_bytes == 129280 * (2 * 4 * 227 + 2 * 100)
    assert named.room_bytes == 16 * 256 * 8 * 32032
    assert attrs.evolve(plan, prefill=(attrs.evolve(prefill, engine=EngineConfig()),)).prefill[0].graph_bytes == 0
    assert attrs.evolve(plan, decode=(decode,)).decode == (decode,)
    least = open_plan.weight_bytes + open_plan.driver_bytes + open_plan.buffer_bytes + open_plan.layout.page_bytes
    tight = attrs.evolve(open_plan, cache=CacheConfig(page_size=32), device_bytes=least + named.graph_bytes)
    with pytest.raises(ConfigError, match=r"D0: .* do not fit into .* of rows at experts and .* of captured steps"):
        attrs.evolve(plan, decode=(tight,))


def test_a_cpu_has_neither_drivers_nor_buffers() -> None:
    engine = EngineConfig(graph_batch_sizes=(8,))
    plan = EnginePlan(name="P", config=V3, topology=Topology(), engine=engine, device="cpu", device_bytes=2000 * GIB)
    assert (plan.driver_bytes, plan.buffer_bytes, plan.room_bytes, plan.graph_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize(("redundant", "ranks", "next_one"), [(0, 72, 32), (32, 64, 64), (0, 24, 8), (5, 8, 8)])
def test_a_refused_number_of_slots_names_the_next(redundant: int, ranks: int, next_one: int) -> None:
    topology = Topology(world_size=ranks, dp_size=ranks, ep_size=ranks)
    with pytest.raises(ConfigError, match=rf"; num_redundant_experts = {next_one} is the next that fits$"):
        EnginePlan(name="D", config=V3, topology=topology, experts=ExpertConfig(num_redundant_experts=redundant))
    EnginePlan(name="D", config=V3, topology=topology, experts=ExpertConfig(num_redundant_experts=next_one))


@pytest.mark.parametrize(
    ("cluster", "redundant", "next_one", "told"),
    [("P2D2", 33, 48, r"64\.13 GiB of weights .* do not fit into"), ("P5D2", 32, 64, "DeepEP's normal kernels exist")],
)
def test_a_next_number_of_slots_that_does_not_fit_is_told_with_the_reason(
    cluster: str, redundant: int, next_one: int, told: str
) -> None:
    found = profile(f"deepseek-v3-h800-{cluster}").prefill[0]
    experts = attrs.evolve(found.experts, num_redundant_experts=redundant)
    with pytest.raises(ConfigError, match=rf"^P0: .* with num_redundant_experts = {next_one}, .* divides: {told}"):
        attrs.evolve(found, experts=experts).plan(V3)


def test_a_fraction_that_is_named_holds_to_the_last_page() -> None:
    """Of devices with less than a hundredth to spare, more decimal places are told."""
    plan = decode_of()
    beside = plan.buffer_bytes + plan.room_bytes + plan.graph_bytes
    static = plan.weight_bytes + plan.driver_bytes + plan.layout.page_bytes
    tight: dict[str, Any] = {"device_bytes": static + beside + MIB, "prompt_tokens": 32}
    with pytest.raises(ConfigError, match="it may be at most ") as refused:
        decode_of(**tight, cache=CacheConfig(page_size=32, mem_fraction_static=0.99))
    decode_of(**tight, cache=CacheConfig(page_size=32, mem_fraction_static=float(str(refused.value).split()[-1])))
    room: dict[str, Any] = {
        "device_bytes": static + beside + 4096 * plan.layout.page_bytes,
        "prompt_tokens": 32 * 4095,
    }
    named = re.search(r"which mem_fraction_static (\S+) holds", str(decode_of(**room)))
    assert named is not None
    held = decode_of(**room, cache=CacheConfig(page_size=32, mem_fraction_static=float(named[1])))
    assert held.num_pages == 4095
