"""Sizes that DeepEP's kernels cannot serve are refused with the values before a kernel runs; so are bad tuned files."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.moe.dispatchers.choose import check_dispatcher, choose_dispatcher
from pdinfer.moe.dispatchers.deep_ep import DeepEPLowLatency, DeepEPNormal
from pdinfer.moe.dispatchers.deep_ep_elastic import DeepEPElastic
from pdinfer.moe.dispatchers.deep_ep_limits import DeepEPChunks, DeepEPConfig, ExpertSizes
from pdinfer.parallel.groups import Group
from pdinfer.testing import random_model, tiny_config
from tests.conformance import fake_deep_ep
from tests.conformance.dispatch_suite import OPS
from tests.conformance.libraries import check_parameters

V3 = ExpertSizes(num_ranks=32, num_experts=288, hidden_size=7168, top_k=8, dtype=torch.bfloat16)
BOTH = [
    ({"num_experts": 290}, "290 physical experts cannot be divided evenly over 32 ranks"),
    ({"dtype": torch.float16}, "DeepEP carries rows of bfloat16, the model runs in torch.float16"),
]
NORMAL = [
    ({"num_ranks": 1}, "normal kernels exist for 2, 4, 8, 16, .* 160 ranks, ep_size is 1"),
    ({"num_ranks": 72}, "ep_size is 72"),
    ({"hidden_size": 1004}, "multiple of 16 bytes here; hidden_size 1004 in bfloat16 is 2008"),
    ({"top_k": 33}, "at most 32 experts, num_experts_per_tok is 33"),
    *BOTH,
]
LOW_LATENCY = [
    ({"num_ranks": 1}, 128, "needs 2 to 8 ranks or a multiple of 8, ep_size is 1"),
    ({"num_ranks": 12}, 128, "ep_size is 12"),
    ({"hidden_size": 7000}, 128, "hidden sizes 2048, .* 8192, hidden_size is 7000"),
    ({"top_k": 12}, 128, "at most 11 experts, num_experts_per_tok is 12"),
    ({}, 0, "num_max_dispatch_tokens_per_rank must be from 1 to 511, got 0"),
    ({}, 512, "got 512: .*NVSHMEM_QP_DEPTH = 1024"),
    ({"num_ranks": 2}, 3, "multiple of 4, got 3 \\* 2"),
    *((changes, 128, match) for changes, match in BOTH),
]
ELASTIC = [
    ({"num_ranks": 1}, "elastic kernels are for 2 to 1024 ranks, ep_size is 1"),
    ({"num_ranks": 1025, "num_experts": 1025}, "ep_size is 1025"),
    ({"num_ranks": 1024, "num_experts": 3072}, "at most 2048 physical experts, .* there are 3072 on 1024 ranks"),
    ({"num_ranks": 2, "num_experts": 514}, "256 of a rank; there are 514 on 2 ranks"),
    ({"hidden_size": 1000}, "multiple of 32 bytes here; hidden_size 1000 in bfloat16 is 2000"),
    ({"top_k": 33}, "at most 32 experts, num_experts_per_tok is 33"),
    *BOTH,
]


def test_the_sizes_of_the_deployments_are_accepted() -> None:
    V3.check_normal()
    attrs.evolve(V3, num_ranks=72).check_low_latency(256)
    attrs.evolve(V3, num_ranks=144).check_low_latency(128)
    for num_ranks in (32, 72, 144):
        attrs.evolve(V3, num_ranks=num_ranks).check_elastic()


@pytest.mark.parametrize(("changes", "match"), NORMAL)
def test_limits_of_the_normal_kernels(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        attrs.evolve(V3, **changes).check_normal()


@pytest.mark.parametrize(("changes", "num_max_tokens", "match"), LOW_LATENCY)
def test_limits_of_the_low_latency_kernels(changes: dict[str, object], num_max_tokens: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        attrs.evolve(V3, **changes).check_low_latency(num_max_tokens)


@pytest.mark.parametrize("num_ranks", [8, 32, 72])
@pytest.mark.parametrize("room", [1, 128, 256, 511])
def test_a_plan_knows_what_the_library_asks_for_few_tokens(num_ranks: int, room: int) -> None:
    """In whole steps of NVSHMEM's heap, and with its workspace."""
    for hidden in (2048, 7168):
        sizes = attrs.evolve(V3, num_ranks=num_ranks, hidden_size=hidden)
        asked = fake_deep_ep.Buffer.get_low_latency_rdma_size_hint(room, hidden, num_ranks, sizes.num_experts)
        planned = sizes.low_latency_bytes(room) - (32 << 20)
        assert planned % (1 << 29) == 0
        assert 0 <= planned - (asked - 128) < 1 << 29


def test_what_the_buffers_of_the_study_take() -> None:
    """4 GiB in decode; in prefill 0.35 GiB for NVLink, and one step of the heap."""
    heap, workspace = 1 << 29, 32 << 20
    assert V3.low_latency_bytes(256) == 8 * heap + workspace
    for num_ranks, nvlink, rdma in ((8, 335_709_824, 0), (16, 377_673_984, heap), (32, 377_675_264, heap)):
        assert DeepEPConfig.of_library(num_ranks).buffer_bytes(7168, num_ranks) == nvlink + rdma + workspace
    tuned = DeepEPChunks(num_sms=40, num_max_nvl_chunked_recv_tokens=512)
    assert tuned.buffer_bytes(7168, 8) == 20 * 8 * (4 * 5 + 512 * (14336 + 2056)) + workspace


def test_buffers_between_nodes_that_are_too_large_are_refused(tmp_path: Path) -> None:
    """Each part has less than 2 GiB there, and within a node more."""
    tuned = DeepEPChunks(num_sms=24, num_max_rdma_chunked_recv_tokens=1280)
    row = 14336 + 2056 + 16
    received = 1284  # the next multiple of 6
    needed = 2 * 12 * 4 * (4 * 18 + received * row)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(attrs.asdict(DeepEPConfig(normal_dispatch=tuned, normal_combine=tuned))))
    options = pd.moe.ExpertConfig(moe_a2a_backend="deep_ep", deepep_config=path)
    check_dispatcher(V3, options, torch.device("cuda"))
    assert needed < 1 << 31 < needed * 6 // 4
    with pytest.raises(ConfigError, match=rf"pieces of 256 and 1284 .* and {needed * 6 // 4} bytes .* for 48 ranks"):
        check_dispatcher(attrs.evolve(V3, num_ranks=48), options, torch.device("cuda"))
    wide = DeepEPChunks(num_sms=64, num_max_nvl_chunked_recv_tokens=1024)
    assert wide.buffer_bytes(7168, 8) > 1 << 32
    with pytest.raises(ConfigError, match="lower num_sms or what is received"):
        wide.buffer_bytes(7168, 16)


def test_what_the_buffers_of_the_second_api_take() -> None:
    """0.22 GiB in decode over 4 nodes, and 2.28 with room for a chunk of prefill; within a node no rows wait twice."""
    step = 2 << 20
    sizes = ((32, 256, 8, 113), (32, 4096, 8, 1168), (32, 256, None, 64), (8, 4096, 8, 233))
    for num_ranks, room, ranks_per_node, steps in sizes:
        found = attrs.evolve(V3, num_ranks=num_ranks).elastic_bytes(room, ranks_per_node)
        assert found == steps * step


@pytest.mark.parametrize(("depth", "taken", "refused"), [("4096", 1024, 1025), ("128", 63, 64), ("2048", 1023, 1024)])
def test_queues_are_as_long_as_the_environment_says(
    depth: str, taken: int, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", depth)
    V3.check_low_latency(taken)
    with pytest.raises(ConfigError, match=f"from 1 to {taken}, got {refused}: .*NVSHMEM_QP_DEPTH = {depth}"):
        V3.check_low_latency(refused)


def test_queues_of_no_length_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "many")
    with pytest.raises(ConfigError, match="NVSHMEM_QP_DEPTH must be a plain number, got 'many'"):
        V3.check_low_latency(128)


@pytest.mark.parametrize(("changes", "match"), ELASTIC)
def test_limits_of_the_elastic_kernels(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        attrs.evolve(V3, **changes).check_elastic()


@pytest.mark.parametrize(
    ("mode", "num_ranks", "on_node", "told"),
    [
        ("elastic", 12, 8, "as many ranks on each node: ep_size 12 is no multiple of ranks_per_node 8"),
        ("elastic", 12, 4, None),
        ("elastic", 6, 8, None),
        ("normal", 8, 4, 'join 8 neighbours over NVLink, ranks_per_node is 4 and ep_size 8: use deepep_mode "elastic"'),
        ("normal", 24, 12, "ranks_per_node is 12 and ep_size 24"),
        ("normal", 4, 4, None),
        ("normal", 32, 16, None),
        ("normal", 32, None, None),
    ],
)
def test_nodes_must_be_like_those_of_the_kernels(
    mode: str, num_ranks: int, on_node: int | None, told: str | None
) -> None:
    options = pd.moe.ExpertConfig(moe_a2a_backend="deep_ep", deepep_mode=mode, ranks_per_node=on_node)
    sizes = attrs.evolve(V3, num_ranks=num_ranks, num_experts=8 * num_ranks)
    with contextlib.nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        check_dispatcher(sizes, options, torch.device("cuda"))


def test_a_step_with_more_tokens_than_a_rank_may_bring_is_refused() -> None:
    dispatcher = DeepEPElastic(buffer=None, sizes=V3, max_tokens=4, index_dtype=torch.int64)
    assert (dispatcher.max_tokens, dispatcher.max_live, dispatcher.graph_safe) == (4, None, True)
    with pytest.raises(ConfigError, match="5 tokens on this rank and num_max_dispatch_tokens_per_rank is 4"):
        dispatcher.dispatch_begin(torch.zeros(5, 7168), torch.zeros(5, 8, dtype=torch.int64), torch.ones(5, 8))


def test_a_step_that_does_not_fit_is_refused_before_the_kernels() -> None:
    dispatcher = DeepEPLowLatency(buffer=None, sizes=V3, max_tokens=4, index_dtype=torch.int64)
    five = torch.zeros(5, 7168, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="5 tokens on this rank and num_max_dispatch_tokens_per_rank is 4"):
        dispatcher.dispatch_begin(five, torch.zeros(5, 8, dtype=torch.int64), torch.ones(5, 8))
    dispatcher.live = 2
    with pytest.raises(ConfigError, match="holds 2 batches at once, a third was begun"):
        dispatcher.dispatch_begin(five[:1], torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_for_experts_in_fp8_are_rounded_by_the_kernel(ue8m0: bool) -> None:
    """It stores the scales of a group of channels side by side. 2 tokens with 8 experts each on all of 32 ranks are 1.8
    rows for each of 288 experts."""
    scales_EGN, asked = torch.rand(9, 7168 // 128, 128), []

    def kernel(x_TD: torch.Tensor, *_: Any, **options: Any) -> tuple[Any, ...]:
        asked.append((x_TD.dtype, options))
        numbers_END = torch.zeros(9, 128, 7168, dtype=torch.float8_e4m3fn)
        return (numbers_END, scales_EGN.mT), torch.zeros(9, dtype=torch.int32), None, None, lambda: None

    buffer = SimpleNamespace(low_latency_dispatch=kernel)
    dispatcher = DeepEPLowLatency(buffer=buffer, sizes=V3, max_tokens=4, index_dtype=torch.int64)
    x_TD = torch.zeros(2, 7168, dtype=torch.bfloat16)
    both = Rounded(x_TD, OPS.quantize_fp8(x_TD, ue8m0=ue8m0))
    room = dispatcher.dispatch_end(dispatcher.dispatch_begin(both, torch.zeros(2, 8).long(), torch.ones(2, 8)))
    assert asked == [(torch.bfloat16, {"use_fp8": True, "round_scale": ue8m0, "return_recv_hook": True})]
    assert isinstance(room.x_END, FP8Rows)
    assert (room.x_END.dtype, room.x_END.ue8m0) == (torch.bfloat16, ue8m0)
    assert torch.equal(room.x_END.scales_TN, scales_EGN.mT)
    assert room.x_END.expected == 2


def test_a_batch_that_came_back_makes_room() -> None:
    dispatcher = DeepEPLowLatency(buffer=None, sizes=V3, max_tokens=4, index_dtype=torch.int64, live=2)
    dispatcher.combine_end(SimpleNamespace(hook=lambda: None, result=torch.zeros(1, 8)))
    assert dispatcher.live == 1


def test_options_reach_the_dispatcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for kind in (DeepEPNormal, DeepEPLowLatency, DeepEPElastic):
        monkeypatch.setattr(kind, "connect", lambda *given, **named: asked.append(given[2:]))
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"normal_dispatch": {"num_sms": 24}, "normal_combine": {"num_sms": 24}}))
    for changes in (
        {"deepep_config": path},
        {"deepep_mode": "low_latency", "num_max_dispatch_tokens_per_rank": 96},
        {"deepep_mode": "elastic", "num_max_dispatch_tokens_per_rank": 4096, "deepep_num_sms": 24},
    ):
        options = pd.moe.ExpertConfig(moe_a2a_backend="deep_ep", **changes)
        choose_dispatcher(Group("ep"), V3, options, OPS, torch.device("cuda"))
    assert asked == [(OPS, DeepEPConfig.read(path)), (96,), (4096, 24)]


def test_kernels_take_multiprocessors_in_pairs() -> None:
    with pytest.raises(ConfigError, match="deepep_num_sms must be even"):
        pd.moe.ExpertConfig(deepep_mode="elastic", deepep_num_sms=25)


def engine(kind: type[pd.DecodeEngine | pd.PrefillEngine], config: pd.EngineConfig, **changes: object) -> None:
    """Make an engine whose model dispatches at most 4 tokens per rank. `changes` concern its topology and experts."""
    model = random_model(tiny_config(num_nextn_predict_layers=1), mtp=True)
    model.experts.dispatcher = DeepEPLowLatency(buffer=None, sizes=V3, max_tokens=4, index_dtype=torch.int64)
    model.experts.two_batch_overlap = bool(changes.get("two_batch_overlap", False))
    tp_size = changes.get("tp_size", 1)
    model = attrs.evolve(model, topology=pd.Topology(world_size=tp_size, tp_size=tp_size))
    (channel,) = pd.KVChannel.loopback(pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=4)))
    with kind(model, channel, config):
        pass


@pytest.mark.parametrize(
    ("running", "drafts", "changes", "told"),
    [
        (
            5,
            0,
            {},
            r"is 4, and a step may have 5 tokens on a rank: max_running_requests .* = 5 \* \(1 \+ 0\);",
        ),
        (2, 2, {}, r"may have 6 tokens on a rank: .* = 2 \* \(1 \+ 2\)"),
        (9, 0, {"tp_size": 2}, "may have 5 tokens on a rank: "),
        (5, 1, {"two_batch_overlap": True}, "may have 6 tokens on a rank in each of two batches"),
        (9, 0, {"two_batch_overlap": True}, "may have 5 tokens on a rank in each of two batches"),
        (17, 0, {"two_batch_overlap": True, "tp_size": 2}, "may have 5 tokens on a rank in each of two batches"),
    ],
)
def test_an_engine_with_larger_steps_than_can_be_dispatched_is_refused(
    running: int, drafts: int, changes: dict[str, object], told: str
) -> None:
    config = pd.EngineConfig(max_running_requests=running, num_draft_tokens=drafts)
    with pytest.raises(ConfigError, match=told):
        engine(pd.DecodeEngine, config, **changes)
    engine(pd.DecodeEngine, attrs.evolve(config, max_running_requests=running - 1), **changes)


def test_a_prefill_with_larger_steps_than_can_be_dispatched_is_refused() -> None:
    engine(pd.PrefillEngine, pd.EngineConfig(chunked_prefill_size=4))
    for config, told in (
        (pd.EngineConfig(chunked_prefill_size=5), "5 tokens on a rank: chunked_prefill_size = 5"),
        (
            pd.EngineConfig(chunked_prefill_size=-1, max_prefill_tokens=4),
            "512 tokens .* runs prompts of up to 512",
        ),
        (pd.EngineConfig(chunked_prefill_size=-1, max_prefill_tokens=600), "600 tokens"),
    ):
        with pytest.raises(ConfigError, match=told):
            engine(pd.PrefillEngine, config)


@pytest.mark.parametrize(
    ("library", "match"),
    [
        (None, "deep_ep cannot be imported"),
        (SimpleNamespace(Buffer=SimpleNamespace()), "has no Buffer.dispatch"),
        (SimpleNamespace(Buffer=SimpleNamespace(dispatch=print)), "no topk_idx_t"),
    ],
)
def test_without_the_library(library: object, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    with pytest.raises(BackendUnavailable, match=f'{match}.*moe_a2a_backend="all_to_all"'):
        DeepEPNormal.connect(Group("ep"), V3, OPS, device=torch.device("cpu"))


def test_the_deep_ep_of_sgl_kernel_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name and the methods, and there `use_fp8=True` sends INT8."""
    methods = SimpleNamespace(dispatch=print, combine=print, low_latency_dispatch=print, low_latency_combine=print)
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=methods, Config=print))
    with pytest.raises(BackendUnavailable, match=r"low_latency_dispatch, or no topk_idx_t"):
        DeepEPLowLatency.connect(Group("ep"), V3, 128, device=torch.device("cpu"))


def test_the_second_api_is_known_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    first = SimpleNamespace(Buffer=SimpleNamespace(dispatch=print), topk_idx_t=torch.int64)
    monkeypatch.setitem(sys.modules, "deep_ep", first)
    with pytest.raises(BackendUnavailable, match=r"this deep_ep has no ElasticBuffer.dispatch"):
        DeepEPElastic.connect(Group("ep"), V3, 128, device=torch.device("cpu"))


def test_a_tuned_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deepep_tuned.json"
    path.write_text(
        json.dumps(
            {
                "normal_dispatch": {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 16},
                "normal_combine": {"num_sms": 24, "num_max_rdma_chunked_recv_tokens": 128},
            }
        )
    )
    config = DeepEPConfig.read(path)
    assert config.normal_dispatch.num_sms == 24
    assert config.normal_dispatch == DeepEPChunks(num_sms=24, num_max_nvl_chunked_send_tokens=16)
    assert config.normal_combine == DeepEPChunks(num_sms=24, num_max_rdma_chunked_recv_tokens=128)


SIGNATURES = {
    (fake_deep_ep.Config, "__init__"): "num_sms num_max_nvl_chunked_send_tokens num_max_nvl_chunked_recv_tokens "
    "num_max_rdma_chunked_send_tokens num_max_rdma_chunked_recv_tokens",
    (fake_deep_ep.Buffer, "__init__"): "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
    (fake_deep_ep.Buffer, "get_low_latency_rdma_size_hint"): "num_max_dispatch_tokens_per_rank hidden num_ranks "
    "num_experts",
    (fake_deep_ep.Buffer, "get_dispatch_layout"): "topk_idx num_experts previous_event async_finish "
    "allocate_on_comm_stream",
    (fake_deep_ep.Buffer, "dispatch"): "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens config previous_event async_finish "
    "allocate_on_comm_stream",
    (fake_deep_ep.Buffer, "combine"): "x handle topk_weights bias config previous_event async_finish "
    "allocate_on_comm_stream",
    (fake_deep_ep.Buffer, "low_latency_dispatch"): "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 async_finish "
    "return_recv_hook",
    (fake_deep_ep.Buffer, "low_latency_combine"): "x topk_idx topk_weights handle use_logfmt zero_copy async_finish "
    "return_recv_hook out combine_wait_recv_cost_stats",
    (fake_deep_ep.ElasticBuffer, "__init__"): "group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk "
    "use_fp8_dispatch deterministic allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute sl_idx "
    "num_allocated_qps num_cpu_timeout_secs num_gpu_timeout_secs explicitly_destroy",
    (fake_deep_ep.ElasticBuffer, "dispatch"): "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts "
    "num_max_tokens_per_rank expert_alignment num_sms num_qps previous_event previous_event_before_epilogue "
    "async_with_compute_stream allocate_on_comm_stream handle do_handle_copy do_cpu_sync do_expand do_zero_padding "
    "use_tma_aligned_col_major_sf",
    (fake_deep_ep.ElasticBuffer, "combine"): "x handle topk_weights bias num_sms num_qps previous_event "
    "previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream",
}
"""The parameters of the library at dd758ca (2026-07-14), in order."""


@pytest.mark.parametrize(("kind", "method"), SIGNATURES, ids=lambda each: getattr(each, "__name__", each))
def test_the_stand_in_is_called_as_the_library_is(kind: type, method: str) -> None:
    check_parameters(getattr(kind, method), SIGNATURES[kind, method])


def test_what_is_taken_is_taken_by_the_library() -> None:
    """It rounds what is received over RDMA up to a multiple of what is sent, and wants twice as much."""
    for receive in range(2, 18):
        for send in range(1, receive):
            sizes = {"num_max_rdma_chunked_send_tokens": send, "num_max_rdma_chunked_recv_tokens": receive}
            fake_deep_ep.Config(**attrs.asdict(DeepEPChunks(**sizes)))


@pytest.mark.parametrize(
    ("dispatch", "match"),
    [
        (None, "normal_dispatch must be an object, got None"),
        ({"num_sms": 24}, "num_sms 24 and normal_combine 20"),
        ({"num_sms": 7}, "num_sms must be even, got 7"),
        ({"num_sms": True}, "num_sms must be an int"),
        ({"sms": 20}, "unknown keys \\['sms'\\]"),
        ({"num_max_nvl_chunked_send_tokens": 256}, "num_max_nvl_chunked_send_tokens must be less than .* 256 and 256"),
        ({"num_max_rdma_chunked_send_tokens": 300}, "num_max_rdma_chunked_send_tokens must be .* 300 and 256"),
    ],
)
def test_a_bad_tuned_file_is_refused(dispatch: object, match: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"normal_dispatch": dispatch, "normal_combine": {}}))
    with pytest.raises(ConfigError, match=f"bad.json: .*{match}"):
        DeepEPConfig.read(path)
