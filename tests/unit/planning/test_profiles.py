"""Published deployments as data: every setting is there, its values validate and plan, and the docs show them all.

The lists of names are those of the published scripts, typed once more.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import attrs
import msgspec
import pytest

import pdinfer as pd
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig, PairingConfig, RemoteConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels import flash_mla
from pdinfer.kernels.ops import OP_NAMES
from pdinfer.planning import Profile, profile
from pdinfer.planning.profiles import OpCall, Setting, SettingValue, decoded, deployments
from tests.unit.config import published_configs

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/howto/deployments.md").read_text("utf-8")
V3, A3 = "deepseek-v3-h800-P3x3D4", "deepseek-v3.2-ascend-a3-P2D2"
CONFIGS = {
    "deepseek-v3-h800": ModelConfig.from_dict(published_configs.V3),
    "deepseek-v3.2-ascend-a3": ModelConfig.from_dict(published_configs.V32),
}
NAMES = [f"{found.name}-{cluster}" for found in deployments() for cluster in found.clusters]
OWNERS = {
    kind.__name__: {field.name for field in attrs.fields(kind)}
    for kind in (CacheConfig, EngineConfig, ExpertConfig, PairingConfig, RemoteConfig, pd.Topology)
} | {"load_model": {"mtp"}, "MooncakeTransport": {"devices"}, "Pairing": {"policy"}}
SETTINGS = {
    V3: """--nnodes --node-rank --dist-init-addr --tp --dp --max-running-requests --context-length --enable-dp-attention
        --enable-dp-lm-head --moe-dense-tp-size --enable-deepep-moe --deepep-mode --deepep-config --page-size
        --disable-radix-cache --mem-fraction-static --decode-log-interval --watchdog-timeout --log-requests
        --trust-remote-code --served-model-name --host --port --disaggregation-mode --disaggregation-ib-device
        --disaggregation-transfer-backend --chunked-prefill-size --max-prefill-tokens --max-total-tokens
        --disable-cuda-graph --cuda-graph-bs --ep-num-redundant-experts --enable-eplb --eplb-algorithm
        --ep-dispatch-algorithm --eplb-rebalance-num-iterations --init-expert-location
        --expert-distribution-recorder-mode --expert-distribution-recorder-buffer-size --disable-overlap-schedule
        mini_lb --cpus --shm-size --ulimit --device --cap-add --net --ipc
        MC_TE_METRIC SGLANG_TBO_DEBUG SGL_ENABLE_JIT_DEEPGEMM SGLANG_SET_CPU_AFFINITY
        SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_HACK_DEEPEP_NEW_MODE SGLANG_HACK_DEEPEP_NUM_SMS
        SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_SOCKET_IFNAME NCCL_IB_TC NCCL_IB_SL
        NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SPLIT_DATA_ON_QPS NCCL_MIN_NCHANNELS NVSHMEM_ENABLE_NIC_PE_MAPPING
        NVSHMEM_HCA_LIST NVSHMEM_IB_GID_INDEX EXPERT_DISTRIBUTION_PT_LOCATION DEEP_EP_CFG fused_moe_config""",
    A3: """--nnodes --node-rank --tp --dp --ep --enable-dp-attention --enable-dp-lm-head --moe-dense-tp-size
        --enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode --attn-cp-size --mem-fraction-static
        --chunked-prefill-size --max-prefill-tokens --max-running-requests --disable-cuda-graph --cuda-graph-max-bs
        --moe-a2a-backend --deepep-mode --quantization --speculative-algorithm --speculative-num-steps
        --speculative-eagle-topk --speculative-num-draft-tokens --disaggregation-transfer-backend
        --disaggregation-bootstrap-port --host --port --dist-init-addr --disable-radix-cache --watchdog-timeout
        --pd-disaggregation --policy --mini-lb --dataset-name --random-input-len --random-output-len
        --random-range-ratio --max-concurrency --num-prompts
        HCCL_BUFFSIZE TASK_QUEUE_ENABLE DEEP_NORMAL_MODE_USE_INT8_QUANT SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
        SGLANG_ENABLE_OVERLAP_PLAN_STREAM SGLANG_ENABLE_SPEC_V2 SGLANG_SCHEDULER_SKIP_ALL_GATHER HCCL_SOCKET_IFNAME
        GLOO_SOCKET_IFNAME PYTORCH_NPU_ALLOC_CONF SGLANG_SET_CPU_AFFINITY STREAMS_PER_DEVICE ASCEND_MF_STORE_URL
        http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ASCEND_LAUNCH_BLOCKING set_env cpufreq swappiness numa_balancing
        sched_migration_cost_ns""",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_a_deployment_is_named(name: str) -> None:
    named = set(re.findall(r"[\w-]+", " ".join(setting.name for setting in profile(name).settings)))
    assert not set(SETTINGS[name].split()) - named


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_of_ours_exists_and_is_set_once_in_a_role(name: str) -> None:
    for role in ("prefill", "decode", "host"):
        of_role = [s for s in profile(name).settings if s.role == role or (s.role == "both" and role != "host")]
        fields = [field for setting in of_role for field in setting.ours]
        assert len(fields) == len(set(fields))
        for owner, _, field in (text.partition(".") for text in fields):
            assert field in OWNERS[owner]


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_plans(name: str) -> None:
    """Weights, pages and steps fit, DeepEP has kernels for the sizes, and each pair of ranks sends each token once."""
    found = profile(name)
    deployment = name.rpartition("-")[0]
    plan = found.plan(CONFIGS[deployment])
    assert plan.num_ranks == sum(engine.topology.world_size for engine in found.prefill + found.decode)
    for planned, engine in zip(plan.engines, found.prefill + found.decode, strict=True):
        assert planned.weight_bytes < engine.device_bytes
        assert planned.num_pages is not None
        assert planned.num_pages > 0


def test_the_tiles_of_the_study_fit_no_rank_of_its_clusters() -> None:
    """Its file is for 257 experts of 256 channels on a rank."""
    setting = next(each for each in profile(V3).settings if each.name == "fused_moe_config")
    plans = [profile(name).plan(CONFIGS["deepseek-v3-h800"]) for name in NAMES if name.startswith("deepseek-v3-h800")]
    slots = {engine.placement.slots_per_rank for plan in plans for engine in plan.engines if engine.placement}
    channels = CONFIGS["deepseek-v3-h800"].moe_intermediate_size
    assert re.match(r"E=(\d+),N=(\d+),", setting.value).groups() == ("257", "256")  # type: ignore[union-attr]
    assert f"has {min(slots)} to {max(slots)} experts of {channels} channels" in setting.why


def test_pages_that_flash_mla_does_not_read_are_told() -> None:
    (setting,) = (each for each in pd.planning.profile(V3).settings if "CacheConfig.page_size" in each.ours)
    read = setting.ours["CacheConfig.page_size"] == flash_mla.PAGE_SIZE
    assert read or f"FlashMLA reads pages of {flash_mla.PAGE_SIZE} tokens alone" in setting.why


def test_the_h800_study_in_our_values() -> None:
    found = pd.planning.profile(V3)
    assert [engine.name for engine in found.prefill + found.decode] == ["P0", "P1", "P2", "D0"]
    prefill, decode = found.prefill[0], found.decode[0]
    assert (prefill.num_nodes, prefill.topology.dp_size, decode.topology.ep_size) == (3, 24, 32)
    assert prefill.cache == CacheConfig(page_size=32, prefix_cache=False, mem_fraction_static=0.81)
    assert prefill.engine.max_total_tokens == 131072
    assert prefill.engine.eplb_rebalance_num_iterations == 500
    assert prefill.engine.graph_batch_sizes == ()
    assert decode.engine.graph_batch_sizes == (256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert decode.engine.eplb_rebalance_num_iterations is None
    assert (prefill.experts.deepep_mode, decode.experts.deepep_mode) == ("normal", "low_latency")
    assert decode.experts.num_max_dispatch_tokens_per_rank == 256
    assert prefill.environment["NCCL_IB_GID_INDEX"] == "3"
    assert len(prefill.rdma_devices) == prefill.experts.ranks_per_node == 8
    assert found.remote == RemoteConfig(hung_s=86400.0)
    assert found.pairing == PairingConfig(connect_timeout_s=120.0)
    assert callable(getattr(pd.policy, found.policy))


def test_the_ascend_recipe_in_our_values() -> None:
    found = pd.planning.profile(A3)
    prefill, decode = found.prefill[0], found.decode[0]
    assert (prefill.topology.cp_size, prefill.topology.tp_size, prefill.topology.dp_size) == (32, 1, 1)
    assert (decode.topology.cp_size, decode.topology.tp_size, decode.topology.dp_size) == (1, 4, 8)
    assert (prefill.engine.num_draft_tokens, decode.engine.num_draft_tokens) == (0, 3)
    assert prefill.mtp
    assert decode.mtp
    assert (prefill.environment["HCCL_BUFFSIZE"], decode.environment["HCCL_BUFFSIZE"]) == ("1200", "400")
    assert decode.topology.dp_size * decode.engine.max_running_requests == 32


def test_every_op_has_what_a_provider_for_ascend_would_call() -> None:
    ops = profile(A3).ops
    assert [op.op for op in ops] == list(OP_NAMES)
    for op in ops:
        assert op.how
        assert op.suites
        texts = [(ROOT / suite).read_text("utf-8") for suite in op.suites]
        assert any(re.search(rf"(?<!\w){re.escape(op.op)}(?!\w)", text) for text in texts), (op.op, op.suites)


def table(found: Profile) -> str:
    """Return all settings as a table in Markdown, with what each is here."""
    return "\n".join(["| setting | of | theirs | ours |\n|---|---|---|---|", *map(_row, found.settings)])


def ops_table(found: Profile) -> str:
    rows = [
        f"| `{op.op}` | {', '.join(f'`{call}`' for call in op.calls) or 'none'} | {op.how} | {_suites(op)} |"
        for op in found.ops
    ]
    return "\n".join(["| op | would call | how | suite |\n|---|---|---|---|", *rows])


def _row(setting: Setting) -> str:
    fields = [f"`{field}={_shown(value)}`" for field, value in setting.ours.items()]
    variables = [f"`{name}={value}`" for name, value in setting.environment.items()]
    ours = "; ".join([", ".join(fields + variables)] * bool(fields or variables) + [setting.why] * bool(setting.why))
    return f"| `{setting.name}` | {setting.role} | {setting.value} | {ours} |"


def _shown(value: SettingValue) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


def _suites(op: OpCall) -> str:
    return ", ".join(f"`{suite}`" for suite in op.suites)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_docs_show_the_whole_table(name: str) -> None:
    assert table(profile(name)) in PAGE, "replace it with what `table(profile(name))` returns"


def test_the_docs_show_every_op() -> None:
    assert ops_table(profile(A3)) in PAGE, "replace it with what `ops_table(profile(name))` returns"


@pytest.mark.parametrize("name", ["deepseek-v3-h800", "P3x3D4", "deepseek-v4-h800-P9D9", "", None, 3])
def test_an_unknown_name_is_told_which_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no profile .*{V3}.*{A3}"):
        profile(name)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ("P1D2", r"P0 of 1 x 16 ranks: dp_size \* cp_size \* tp_size = 1 \* 32 \* 1 = 32, but world_size is 16"),
        ("P2D3", "D0 of 3 x 16 ranks: ep_size 32 does not divide world_size 48"),
    ],
)
def test_a_size_that_the_settings_do_not_divide_is_told_with_its_engine(cluster: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        profile(A3.replace("P2D2", cluster))


def _changed(**changes: object) -> bytes:
    data = (files("pdinfer.planning.profiles") / "deepseek-v3-h800.json").read_bytes()
    return msgspec.json.encode(msgspec.json.decode(data) | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"more": 1},
        {"ranks_per_node": "8"},
        {"settings": [{"name": "--x", "role": "both", "value": "1"}]},
        {"settings": [{"name": "--x", "role": "all", "value": "1", "why": "so"}]},
        {"settings": [{"name": "--x", "role": "both", "value": "1", "why": "so", "what": ""}]},
    ],
)
def test_a_file_is_read_strictly(changes: dict[str, object]) -> None:
    assert decoded(_changed(), "a.json") == deployments()[0]
    with pytest.raises(ConfigError, match=r"a\.json is no deployment"):
        decoded(_changed(**changes), "a.json")
