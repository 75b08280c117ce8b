"""ModelConfig compared with transformers and with values computed by hand; the host's configurations and their
ranges."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from pdinfer.checks import clip
from pdinfer.config import (
    CacheConfig,
    EngineConfig,
    ExpertConfig,
    IndexerType,
    ModelConfig,
    PairingConfig,
    ScoringFunc,
    TopkMethod,
    YarnScaling,
)
from pdinfer.config.packed import PackedWeights
from pdinfer.errors import ConfigError
from tests.unit.config.published_configs import GLM_5, KIMI_K2, V3, V32
from tests.unit.config.small_configs import BASE, FAMILIES, KIMI_YARN, YARN


def _kind(raw: dict[str, Any]) -> Any:
    """Return the configuration class of transformers."""
    transformers = pytest.importorskip("transformers")
    return {
        "deepseek_v2": transformers.DeepseekV2Config,
        "deepseek_v3": transformers.DeepseekV3Config,
        "deepseek_v32": transformers.DeepseekV32Config,
        "glm_moe_dsa": transformers.GlmMoeDsaConfig,
        "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
        "youtu": transformers.YoutuConfig,
        "axk1": transformers.AXK1Config,
    }[raw["model_type"]]


@functools.cache
def _saved(name: str) -> dict[str, Any]:
    return _new_spelling(FAMILIES[name])


def _new_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` as transformers 5 saves it."""
    kind = _kind(raw)
    known = {name: value for name, value in raw.items() if name not in ("scoring_func", "model_type", "architectures")}
    if raw["model_type"] == "deepseek_v2":
        known.pop("num_nextn_predict_layers")
    saved: dict[str, Any] = json.loads(kind(**json.loads(json.dumps(known))).to_json_string())
    return saved


@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_give_one_config(name: str) -> None:
    old, new = FAMILIES[name], _saved(name)
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    expected = ModelConfig.from_dict(old)
    if old["model_type"] == "deepseek_v2":
        expected = attrs.evolve(expected, num_nextn_predict_layers=0)
    assert ModelConfig.from_dict(new) == expected
    assert ModelConfig.from_dict(new).fingerprint == expected.fingerprint


@pytest.mark.parametrize("name", FAMILIES)
def test_num_parameters_is_that_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    new = _saved(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(_kind(new)(**new))
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = ModelConfig.from_dict(new)
    num_biases = sum(bias.numel() for bias in biases)
    assert config.num_parameters == parameters + num_biases


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 1e6, "qk_rope_head_dim": 64},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN, "qk_rope_head_dim": 64},
        {"rope_scaling": KIMI_YARN, "rope_theta": 5e4, "qk_rope_head_dim": 64},
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
        {"rope_scaling": {key: YARN[key] for key in ("type", "factor", "original_max_position_embeddings")}},
        {"rope_scaling": YARN | {"mscale_all_dim": 0}},
        {"rope_scaling": YARN | {"mscale": None}},
        {"rope_scaling": YARN | {"factor": 1.0}},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 16}, "rope_theta": 100.0},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 6}},  # the blend has no width
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_rope_and_scale_are_those_of_transformers(changes: dict[str, Any]) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    rope_functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    raw = BASE | changes
    new = _new_spelling(raw)
    theirs = pytest.importorskip("transformers").DeepseekV3Config(**new)
    if new["rope_parameters"]["rope_type"] == "yarn":
        frequencies, factor = rope_functions["yarn"](theirs)
    else:
        frequencies, factor = modeling.DeepseekV3RotaryEmbedding.compute_default_rope_parameters(theirs)
    config = ModelConfig.from_dict(raw)
    assert config.inv_frequencies() == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert config.rope_attention_factor == pytest.approx(factor, rel=1e-12)
    scale = modeling.yarn_apply_mscale(theirs.rope_parameters, config.qk_head_dim**-0.5)
    assert config.softmax_scale == pytest.approx(scale, rel=1e-12)


def test_known_models() -> None:
    """The published size of V3 is 671B parameters, and m of YaRN with factor 40 is 1.3689."""
    v3 = ModelConfig.from_dict(V3)
    assert v3.num_parameters == 671_026_419_200
    assert v3.softmax_scale * math.sqrt(192) == pytest.approx(1.3689**2, rel=1e-4)
    assert v3.rope_attention_factor == 1.0
    assert (v3.is_moe_layer(2), v3.is_moe_layer(3), v3.is_moe_layer(61)) == (False, True, True)


@pytest.mark.parametrize(
    ("raw", "num_parameters", "per_indexer"),
    [
        # V3's 671,026,419,200 and 61 indexers
        (V32, 671_026_419_200 + 61 * 13_959_424, 1536 * 64 * 128 + 7168 * 128 + 64 * 7168 + 256),
        (KIMI_K2, 1_026_408_232_448, 0),  # "1T"
        (GLM_5, 743_911_218_432, 2048 * 32 * 128 + 6144 * 128 + 32 * 6144 + 256),  # "744B"
    ],
    ids=["V3.2", "Kimi-K2", "GLM-5"],
)
def test_models_of_other_families(raw: dict[str, Any], num_parameters: int, per_indexer: int) -> None:
    config = ModelConfig.from_dict(raw)
    assert config.num_parameters == num_parameters
    assert config.is_sparse is bool(per_indexer)
    without = attrs.evolve(config, model_type="deepseek_v3", index_topk=None, indexer_types=())
    assert config.num_parameters - without.num_parameters == config.num_hidden_layers * per_indexer


def test_which_layers_have_an_indexer() -> None:
    config = ModelConfig.from_dict(FAMILIES["glm-schedule"])
    assert [layer for layer in range(12) if config.has_indexer(layer)] == [0, 1, 2, 6, 9, 10, 11]
    pattern = FAMILIES["glm"] | {"index_topk_pattern": "FSFS"}
    assert [ModelConfig.from_dict(pattern).has_indexer(layer) for layer in range(5)] == [True, False, True, False, True]
    assert not any(ModelConfig.from_dict(BASE).has_indexer(layer) for layer in range(5))


def test_pairs_of_the_indexer_are_halves_in_v32_and_neighbours_in_glm() -> None:
    assert not ModelConfig.from_dict(FAMILIES["v3.2"]).indexer_rope_interleave
    assert ModelConfig.from_dict(FAMILIES["glm"]).indexer_rope_interleave
    assert not ModelConfig.from_dict(FAMILIES["glm"] | {"indexer_rope_interleave": False}).indexer_rope_interleave


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk": None}, "index_topk is missing; a glm_moe_dsa cannot be built without it"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_topk": 0}, "index_topk must be an int from 1 to"),
        ({"index_head_dim": 8}, "index_head_dim must be at least qk_rope_head_dim = 16"),
        ({"indexer_types": ["full"] * 3}, "indexer_types must name each of the 4 layers"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "indexer_types must be one of full, shared, got 'half'"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types: layer 0 is shared"),
        ({"index_topk_pattern": "FSX"}, "indexer_types must name each of the 4 layers"),
        ({"index_topk_pattern": "FSXF"}, "indexer_types must be one of full, shared, got 'X'"),
        ({"index_topk_freq": 0}, "index_topk_freq and index_skip_topk_offset must be ints of at least 1, got 0"),
        ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types must be first_k_dense_replace = 1 times dense"),
        (
            {"model_type": "deepseek_v3", "architectures": None},
            "index_n_heads 8, index_head_dim 32, index_topk 16: unk",
        ),
        ({"model_type": "deepseek_v4"}, "model_type 'deepseek_v4' is not supported (it is another architecture"),
        ({"model_type": "kimi_linear"}, "model_type 'kimi_linear' is not supported (most of its layers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_sparse_attention_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(FAMILIES["glm"] | changes)
    assert str(caught.value).startswith(words)


def test_families_fill_in_what_old_files_leave_out() -> None:
    silent = {name: value for name, value in BASE.items() if name not in ("scoring_func", "topk_method")}
    v3 = ModelConfig.from_dict(silent)
    assert (v3.scoring_func, v3.topk_method) == (ScoringFunc.SIGMOID, TopkMethod.NOAUX_TC)
    silent |= {
        "model_type": "deepseek_v2",
        "architectures": None,
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": None,
    }
    v2 = ModelConfig.from_dict(silent | {"n_shared_experts": None, "torch_dtype": None, "eos_token_id": None})
    assert (v2.scoring_func, v2.topk_method) == (ScoringFunc.SOFTMAX, TopkMethod.GREEDY)
    assert (v2.n_group, v2.topk_group, v2.norm_topk_prob, v2.n_shared_experts) == (1, 1, False, 0)
    assert (v2.dtype, v2.eos_token_ids) == ("bfloat16", ())


def test_fingerprint_covers_every_field_but_token_ids_and_number_formats() -> None:
    config = ModelConfig.from_dict(BASE | {"rope_scaling": YARN})
    assert config.yarn is not None
    changed: dict[str, Any] = {
        "model_type": "deepseek_v2",
        "scoring_func": ScoringFunc.SOFTMAX,
        "topk_method": TopkMethod.GREEDY,
        "q_lora_rank": None,
        "yarn": attrs.evolve(config.yarn, beta_fast=31.0),
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "qk_rope_head_dim": 18,
        "n_routed_experts": 32,
        "topk_group": 3,
        "n_group": 8,
        "rms_norm_eps": math.nextafter(config.rms_norm_eps, 1.0),
        "rope_theta": 10001.0,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 16,
        "indexer_rope_interleave": True,
        "indexer_types": (IndexerType.FULL, IndexerType.SHARED),
    }
    same = {
        "bos_token_id": 3,
        "eos_token_ids": (5,),
        "dtype": "float16",
        "scale_fmt": "ue8m0",
        "packed": PackedWeights("int4"),
    }
    for field in attrs.fields(ModelConfig):
        value = same.get(field.name, changed.get(field.name))
        if value is None and field.name != "q_lora_rank":
            value = getattr(config, field.name) - 1
        # The family's rules tie three fields together, so the change bypasses them.
        other = attrs.evolve(config)
        object.__setattr__(other, field.name, value)
        assert (other.fingerprint == config.fingerprint) is (field.name in same), field.name
    assert config.fingerprint == ModelConfig.from_dict(BASE | {"rope_scaling": YARN}).fingerprint
    assert len(config.fingerprint) == 32


def test_modelslim_says_its_scheme_in_quantization_config_too() -> None:
    raw = BASE
    for said in (
        {"quant_method": "ascend"},
        {"quant_method": "ascend", "model_quant_type": "W8A8", "version": "1.0.0", "group_size": 0},
        {"model_quant_type": "W8A8_DYNAMIC", "model.layers.0.self_attn.o_proj.weight": "W8A8_DYNAMIC"},
        {"quant_method": None, "model.embed_tokens.weight": "FLOAT"},
    ):
        assert ModelConfig.from_dict(raw | {"quantization_config": said}) == ModelConfig.from_dict(raw)
    with pytest.raises(ConfigError, match="model_quant_type 'W4A8_DYNAMIC' is not supported; supported:"):
        ModelConfig.from_dict(raw | {"quantization_config": {"model_quant_type": "W4A8_DYNAMIC"}})
    for strange in ({}, {"version": "1.0"}, {"quant_method": "awq", "model_quant_type": "W8A8"}):
        with pytest.raises(ConfigError, match="quant_method"):
            ModelConfig.from_dict(raw | {"quantization_config": strange})


def test_from_checkpoint_takes_eos_ids_of_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert ModelConfig.from_checkpoint(tmp_path).eos_token_ids == (1,)
    for given, expected in (([1, 7], (1, 7)), (9, (9,)), (None, (1,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given, "temperature": 0.6}))
        assert ModelConfig.from_checkpoint(str(tmp_path)).eos_token_ids == expected


def test_configs_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        CacheConfig().page_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig(3)  # type: ignore[misc]


def test_defaults() -> None:
    assert CacheConfig() == CacheConfig(
        page_size=64, kv_format="auto", num_pages=None, mem_fraction_static=None, memory="auto", prefix_cache=True
    )
    assert EngineConfig() == EngineConfig(
        max_running_requests=256,
        max_queued_requests=4096,
        chunked_prefill_size=4096,
        max_prefill_tokens=16384,
        max_total_tokens=None,
        growth_watermark=0.02,
        max_attempts=3,
        send_window_bytes=64 * 2**20,
        num_draft_tokens=0,
        num_threads=None,
        keep_freed_memory=True,
        trace=None,
    )
    assert PairingConfig() == PairingConfig(
        max_queued_requests=1024, max_queued_per_decode=256, default_deadline_s=None, connect_timeout_s=10.0
    )


@pytest.mark.parametrize(
    ("kind", "name", "value", "promised"),
    [
        (CacheConfig, "page_size", 0, "1 to 256"),
        (CacheConfig, "page_size", 257, "1 to 256"),
        (CacheConfig, "page_size", 2**30, "1 to 256"),
        (CacheConfig, "page_size", True, "1 to 256"),
        (CacheConfig, "page_size", 64.0, "1 to 256"),
        (CacheConfig, "num_pages", 0, "1 to 2147483647"),
        (CacheConfig, "num_pages", 2**31, "1 to 2147483647"),
        (CacheConfig, "num_pages", 10**5000, "bits"),
        (CacheConfig, "mem_fraction_static", 0.0, "greater than 0 and less than 1"),
        (CacheConfig, "mem_fraction_static", 1.0, "greater than 0 and less than 1"),
        (CacheConfig, "mem_fraction_static", math.nan, "greater than 0 and less than 1"),
        (CacheConfig, "mem_fraction_static", True, "greater than 0 and less than 1"),
        (CacheConfig, "kv_format", "fp4", "auto, bfloat16, float16, float32, fp8"),
        (CacheConfig, "kv_format", None, "auto, bfloat16, float16, float32, fp8"),
        (CacheConfig, "memory", "gpu", "auto, shared, pinned"),
        (CacheConfig, "prefix_cache", 1, "true or false"),
        (EngineConfig, "max_running_requests", 0, "from 1 to"),
        (EngineConfig, "max_queued_requests", "8", "from 1 to"),
        (EngineConfig, "chunked_prefill_size", 0, "-1 (unlimited)"),
        (EngineConfig, "chunked_prefill_size", -2, "-1 (unlimited)"),
        (EngineConfig, "chunked_prefill_size", True, "-1 (unlimited)"),
        (EngineConfig, "max_prefill_tokens", -1, "from 1 to"),
        (EngineConfig, "max_total_tokens", 0, "from 1 to"),
        (EngineConfig, "growth_watermark", -0.01, "at least 0 and at most 0.5"),
        (EngineConfig, "growth_watermark", 0.51, "at least 0 and at most 0.5"),
        (EngineConfig, "growth_watermark", math.nan, "at least 0 and at most 0.5"),
        (EngineConfig, "max_attempts", 0, "1 to 100"),
        (EngineConfig, "send_window_bytes", 0, "from 1 to"),
        (EngineConfig, "num_threads", 0, "1 to 1024"),
        (EngineConfig, "num_threads", 2.0, "1 to 1024"),
        (EngineConfig, "trace", "", "path of a folder"),
        (EngineConfig, "trace", True, "path of a folder"),
        (ExpertConfig, "num_redundant_experts", -1, "0 to 65536"),
        (ExpertConfig, "ep_dispatch_algorithm", "random", "static, dynamic, nearest"),
        (ExpertConfig, "ranks_per_node", 0, "1 to 65536"),
        (ExpertConfig, "moe_a2a_backend", "deepep", "auto, local, all_to_all, all_to_all_int8, deep_ep"),
        (ExpertConfig, "deepep_mode", "auto", "normal, low_latency, elastic"),
        (ExpertConfig, "deepep_config", "", "path of a file"),
        (ExpertConfig, "deepep_config", "tuned.json", 'moe_a2a_backend "deep_ep" in deepep_mode "normal"'),
        (ExpertConfig, "deepep_num_sms", 162, "4 to 160"),
        (ExpertConfig, "deepep_num_sms", 24, 'is for deepep_mode "elastic", got 24 for "normal"'),
        (ExpertConfig, "num_max_dispatch_tokens_per_rank", 65537, "1 to 65536"),
        (ExpertConfig, "two_batch_overlap", 1, "true or false"),
        (ExpertConfig, "expert_distribution_recorder_mode", "per_token", "off, window, stat"),
        (ExpertConfig, "expert_distribution_recorder_buffer_size", 0, "from 1 to"),
        (PairingConfig, "max_queued_requests", 0, "from 1 to"),
        (PairingConfig, "max_queued_per_decode", -5, "from 1 to"),
        (PairingConfig, "default_deadline_s", 0, "greater than 0"),
        (PairingConfig, "default_deadline_s", 1e9, "at most 2.592e+06"),
        (PairingConfig, "connect_timeout_s", math.inf, "at most 3600"),
    ],
    ids=lambda value: clip(value)[:30],
)
def test_settings_out_of_range(kind: type[Any], name: str, value: object, promised: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{name: value})
    assert str(caught.value).startswith(name)
    assert promised in str(caught.value)
    assert len(str(caught.value)) < 300


def test_cache_size_is_given_once() -> None:
    with pytest.raises(ConfigError, match=r"num_pages = 5 and mem_fraction_static = 0\.5"):
        CacheConfig(num_pages=5, mem_fraction_static=0.5)
    assert CacheConfig(page_size=3).page_size == 3


def test_yarn_directly() -> None:
    yarn = YarnScaling(factor=40, original_max_position_embeddings=4096)
    assert (yarn.factor, yarn.beta_fast, yarn.beta_slow) == (40.0, 32.0, 1.0)
    assert yarn.magnitude(1.0) == pytest.approx(1.3689, rel=1e-4)
