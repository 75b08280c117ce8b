"""Every field of a config.json is read, listed as harmless, or refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.config import ModelConfig
from pdinfer.config.families import FAMILIES, STRANGERS
from pdinfer.config.fields import EXPERT_FIELDS, FIELDS, HARMLESS, INDEXER_FIELDS, OFF, SAME_AS
from pdinfer.errors import ConfigError
from pdinfer.testing import tiny_config_dict
from tests.unit.config.published_configs import (
    FP8,
    KIMI_K2_THINKING,
    KIMI_K25,
    MOONLIGHT,
    PUBLISHED,
    V3,
    V32,
    YARN,
    YOUTU,
)

ALL_HARMLESS = frozenset[str]().union(*HARMLESS.values())
KNOWN = FIELDS | EXPERT_FIELDS | INDEXER_FIELDS | ALL_HARMLESS | OFF.keys() | SAME_AS.keys()

ISSUE: dict[str, Any] = {
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192},
    "swiglu_limit": 10.0,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "mla_use_nope": True,
    "zero_expert_num": 256,
    "mla_scale_q_lora": True,
    "linear_attn_config": {"kda_layers": [1, 2, 3]},
    "hc_mult": 4,
    "scale_emb": 12,
    "sliding_window": 128,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "moe_latent_size": 3584,
    "use_qk_norm": True,
    "sandwich_norm": True,
}
"""Fields of relatives that change the output, all of which deepseek_v3 once accepted in silence."""
NO_EFFECT: dict[str, Any] = {
    "llama_4_scaling": None,
    "mla_use_nope": False,
    "zero_expert_num": 0,
    "mla_scale_q_lora": False,
    "scale_emb": 1,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 3,
    "partial_rotary_factor": 1.0,
    "use_qk_norm": False,
    "sandwich_norm": False,
    "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0, "partial_rotary_factor": 1.0},
    "num_experts": 8,
    "some_future_field": None,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_load(name: str) -> None:
    config = ModelConfig.from_dict(PUBLISHED[name])
    assert config.model_type == PUBLISHED[name]["model_type"]


def test_published_sizes() -> None:
    """The makers say: GLM-4.7-Flash 30B, Youtu-LLM 1.96B, Moonlight 16B, A.X-K1 519B."""
    sizes = {name: ModelConfig.from_dict(PUBLISHED[name]).num_parameters for name in PUBLISHED}
    assert round(sizes["GLM-4.7-Flash"] / 1e9) == 30
    assert round(sizes["Youtu-LLM-2B"] / 1e9, 2) == 1.96
    assert round(sizes["Moonlight-16B-A3B"] / 1e9) == 16
    assert round(sizes["A.X-K1"] / 1e9) == 519


@pytest.mark.parametrize("name", ISSUE)
def test_fields_of_relatives_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_dict(tiny_config_dict() | {name: ISSUE[name]})


@pytest.mark.parametrize("name", NO_EFFECT)
def test_values_that_mean_off_are_harmless(name: str) -> None:
    base = tiny_config_dict()
    assert ModelConfig.from_dict(base | {name: NO_EFFECT[name]}) == ModelConfig.from_dict(base)


@pytest.mark.parametrize("outside", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "default", "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta 0.1 is not supported"),
        ({"type": "yarn", **YARN, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta 0.1 is not supported"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_type": "default", "factor": 4.0}, "factor 4.0: unknown to rope of type default"),
        ({"factor": 4.0}, "factor 4.0: unknown to rope of type default"),
        ({**YARN, "attention_factor": 1.2}, "attention_factor 1.2 is not supported"),
        ({**YARN, "truncate": False}, "truncate False is not supported"),
        ({**YARN, "short_factor": [1.0]}, r"short_factor \[1.0\]: unknown to rope of type yarn"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention .*: unknown to rope"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_rope_fields_are_refused_by_name(outside: str, rope: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ModelConfig.from_dict(tiny_config_dict() | {"rope_scaling": None} | {outside: rope})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme .* is not supported"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme 'static' is not supported"),
        (FP8 | {"nestquant": {}}, "nestquant {}: unknown to quantization_config"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_quantization_fields_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    harmless = {"modules_to_not_convert": ["lm_head"], "dequantize": False, "scale_fmt": "float"}
    ModelConfig.from_dict(tiny_config_dict() | {"quantization_config": FP8 | harmless})
    with pytest.raises(ConfigError, match=told):
        ModelConfig.from_dict(tiny_config_dict() | {"quantization_config": fields})


def test_many_unknown_fields_are_told_together_and_clipped() -> None:
    many = {f"field_{at}": "x" * 1000 for at in range(30)}
    with pytest.raises(ConfigError, match=r"field_0 'x+…, field_1 .* and 20 more: unknown to") as caught:
        ModelConfig.from_dict(tiny_config_dict() | many)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(("name", "other"), SAME_AS.items())
def test_a_second_name_repeats_the_first(name: str, other: str) -> None:
    base = tiny_config_dict(num_nextn_predict_layers=1)
    assert ModelConfig.from_dict(base | {name: base[other]}) == ModelConfig.from_dict(base)
    with pytest.raises(ConfigError, match=f"{name} 7 must be absent or repeat {other} = {base[other]}"):
        ModelConfig.from_dict(base | {name: 7})


@pytest.mark.parametrize("names", [["MistralLarge3ForCausalLM"], ["DeepseekV3ForCausalLM", "Evil"], "Evil", [None], {}])
def test_architectures_are_those_of_the_family(names: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"architectures .* is not that of a 'deepseek_v3', which is DeepseekV3ForCau"
    ):
        ModelConfig.from_dict(tiny_config_dict(architectures=names))
    for absent in (None, []):
        ModelConfig.from_dict(tiny_config_dict(architectures=absent))


def test_mistral_large_3_as_other_engines_write_it_is_refused() -> None:
    scaling = {"original_max_position_embeddings": 8192, "beta": 0.1}
    mistral = V3 | {"llama_4_scaling": scaling, "quantization_config": None, "n_group": 1, "topk_group": 1}
    with pytest.raises(ConfigError, match=r"^llama_4_scaling \{'original_max_position_embeddings': 8192"):
        ModelConfig.from_dict(mistral)
    with pytest.raises(ConfigError, match="architectures"):
        ModelConfig.from_dict(mistral | {"architectures": ["MistralLarge3ForCausalLM"]})


def test_strangers_are_no_families_and_refused_with_a_reason() -> None:
    for model_type, reason in STRANGERS.items():
        assert model_type not in FAMILIES
        with pytest.raises(ConfigError, match=f"model_type '{model_type}' is not supported .{reason[:20]}"):
            ModelConfig.from_dict(tiny_config_dict(model_type=model_type))


@given(
    name=st.text(min_size=1),
    value=st.one_of(st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.just({"a": 1})),
)
def test_no_unknown_field_is_skipped(name: str, value: Any) -> None:
    if name not in KNOWN:
        with pytest.raises(ConfigError, match=r"unknown to config\.json of a 'deepseek_v3'"):
            ModelConfig.from_dict(tiny_config_dict() | {name: value})


# Against transformers: what its configuration classes have, and what its models read

OURS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "youtu", "axk1")
RELATIVES = ("axk2", "minicpm3", "mistral4", "longcat_flash", "hy_v4", "bailing_hybrid", "kimi_linear", "glm5_next")
RELATIVES += ("deepseek_v4", "mistral_large4")
SCHEDULE: dict[str, Any] = {"index_topk_freq": 2, "indexer_types": None, "num_hidden_layers": 6}
BASES: dict[str, dict[str, Any]] = {
    "deepseek_v2": tiny_config_dict("v2"),
    "deepseek_v3": tiny_config_dict("v3"),
    "deepseek_v32": tiny_config_dict("v32", **SCHEDULE),
    "glm_moe_dsa": tiny_config_dict("glm", **SCHEDULE),
    "glm4_moe_lite": tiny_config_dict(model_type="glm4_moe_lite", architectures=None),
    "youtu": {
        **{n: v for n, v in tiny_config_dict().items() if n in YOUTU},
        "model_type": "youtu",
        "architectures": None,
    }
    | {"rope_theta": 10000.0},
    "axk1": tiny_config_dict(model_type="axk1", architectures=None),
}


def _fields_of(model_type: str) -> dict[str, Any]:
    """Return all fields that a configuration of transformers has, those of its text model where it wraps one."""
    mapping = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    fields: dict[str, Any] = json.loads(json.dumps(mapping[model_type]().to_dict(), default=str))
    text: dict[str, Any] = fields.get("text_config", fields)
    return text


def _other_values(value: Any) -> list[Any]:
    """Yield values of the same kind that are not this one, and values of some other kinds."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2 + 0.5]
    if isinstance(value, str):
        return [value + "x"]
    return [1, True, 0.5, "x", [1], {"a": 1}]


@pytest.mark.parametrize("model_type", OURS)
def test_no_field_of_transformers_is_skipped(model_type: str) -> None:
    """Another value is refused, or gives another config, or the field is listed as harmless."""
    base = BASES[model_type]
    parsed = ModelConfig.from_dict(base)
    for name in sorted({*_fields_of(model_type), *base} - ALL_HARMLESS):
        for value in _other_values(base.get(name)):
            if value == OFF.get(name):
                continue
            try:
                changed = ModelConfig.from_dict(base | {name: value})
            except ConfigError:
                continue
            assert changed != parsed, f"{name} = {value!r} changes nothing"


@pytest.mark.parametrize("model_type", OURS)
def test_what_transformers_writes_is_read(model_type: str) -> None:
    """The files hold every default, as `to_dict` returns it."""
    fields = _fields_of(model_type)
    if fields.get("num_experts_per_tok", 1) is None:
        fields["num_experts_per_tok"] = 6
    config = ModelConfig.from_dict(fields)
    assert config.hidden_size == fields["hidden_size"]
    again = ModelConfig.from_dict({name: value for name, value in fields.items() if value is not None})
    assert again == config


@pytest.mark.parametrize("model_type", RELATIVES)
def test_no_field_of_a_relative_is_skipped(model_type: str) -> None:
    """Each value that it does not share with DeepSeek-V3 is refused under that name, unless it gives another config."""
    base = tiny_config_dict()
    parsed = ModelConfig.from_dict(base)
    for name, value in _fields_of(model_type).items():
        same = (base.get(name), OFF.get(name), {"rope_type": "default", "rope_theta": base["rope_theta"]})
        if value is None or name in ALL_HARMLESS or value in same:
            continue
        try:
            changed = ModelConfig.from_dict(base | {name: value})
        except ConfigError:
            continue
        assert changed != parsed, f"{name} = {value!r} changes nothing"


@pytest.mark.parametrize("model_type", sorted({*RELATIVES, "mistral4"}))
def test_a_relabelled_relative_is_refused(model_type: str) -> None:
    for label in (*OURS, "kimi_k2"):
        with pytest.raises(ConfigError):
            ModelConfig.from_dict(_fields_of(model_type) | {"model_type": label, "architectures": None})


READ_BUT_HARMLESS = {
    "attention_dropout": "in training",
    "head_dim": "rope's, always set to qk_rope_head_dim",
    "initializer_range": "of weights that are drawn",
    "output_router_logits": "returns more",
    "pad_token_id": "padding_idx, which has no effect forwards",
    "embedding_initializer_range": "of weights that are drawn",
    "_attn_implementation": "the same numbers",
    "_experts_implementation": "the same numbers",
    "chunk_size_feed_forward": "the same numbers",
    "use_cache": "the same numbers",
    "output_attentions": "returns more",
    "output_hidden_states": "returns more",
    "return_dict": "returns otherwise",
    "num_labels": "of a classifier",
}


@pytest.mark.parametrize("model_type", OURS)
def test_what_models_of_transformers_read_is_read_or_fixed_here(model_type: str) -> None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    source = Path(spec.origin).parent / "models" / model_type / f"modeling_{model_type}.py"
    read = set(re.findall(r"\bconfig\.([a-z_]\w*)", source.read_text())) & set(_fields_of(model_type))
    assert read >= {"hidden_size", "kv_lora_rank", "qk_rope_head_dim"}
    assert read & ALL_HARMLESS <= READ_BUT_HARMLESS.keys()
    assert read - ALL_HARMLESS <= KNOWN


def test_wrapped_text_models_are_read_like_others() -> None:
    inside = ModelConfig.from_dict(KIMI_K2_THINKING)
    wrapped = ModelConfig.from_dict(KIMI_K25)
    assert (wrapped.rope_theta, wrapped.yarn, wrapped.eos_token_ids) == (5e4, inside.yarn, (163585,))
    assert wrapped.num_parameters == inside.num_parameters
    assert wrapped.packed == inside.packed
    assert wrapped.packed is not None


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [
        (V3, {"n_group": ..., "topk_group": ...}, (8, 4, 1)),
        (V3, {"n_group": None, "topk_group": None}, (1, 1, 1)),
        (V32, {"n_shared_experts": ...}, (8, 4, 1)),
        (V3, {"n_shared_experts": None}, (8, 4, 0)),
        (
            MOONLIGHT | {"model_type": "glm4_moe_lite", "architectures": None},
            {"n_group": ..., "topk_group": ...},
            (1, 1, 2),
        ),
    ],
)
def test_absent_is_what_the_makers_class_says_and_null_is_none(
    base: dict[str, Any], change: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    raw = {name: value for name, value in (base | change).items() if value is not ...}
    config = ModelConfig.from_dict(raw)
    assert (config.n_group, config.topk_group, config.n_shared_experts) == expected


def test_dense_layers_from_their_kinds() -> None:
    kinds = {"first_k_dense_replace": None, "mlp_layer_types": ["dense", "dense", "sparse"]}
    assert ModelConfig.from_dict(tiny_config_dict() | kinds).first_k_dense_replace == 2
    longer = kinds | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}  # with that of an MTP layer
    assert ModelConfig.from_dict(tiny_config_dict(num_nextn_predict_layers=1) | longer).first_k_dense_replace == 1
    for wrong in (
        ["sparse", "dense", "sparse"],
        ["dense", "sparse"],
        ["dense", "moe", "sparse"],
        ["dense"] * 4,
        "dense",
        {},
    ):
        with pytest.raises(
            ConfigError, match="mlp_layer_types must be dense and then sparse, one for each of 3 layers"
        ):
            ModelConfig.from_dict(tiny_config_dict() | kinds | {"mlp_layer_types": wrong})
    with pytest.raises(ConfigError, match="must be first_k_dense_replace = 1 times dense"):
        ModelConfig.from_dict(tiny_config_dict() | kinds | {"first_k_dense_replace": 1})


@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize(
    ("num_layers", "said", "num_dense"), [(3, None, 1), (2, None, 0), (2, None, None), (4, 5, None), (4, 2, 2)]
)
def test_what_transformers_writes_beside_the_kinds_of_layers_is_no_contradiction(
    kind: str, num_layers: int, said: int | None, num_dense: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    fields: dict[str, Any] = {"num_hidden_layers": num_layers}
    if said is not None:
        fields["first_k_dense_replace"] = said
    if num_dense is not None:
        fields["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    written = json.loads(getattr(transformers, f"{kind}Config")(**fields).to_json_string())
    expected = written["mlp_layer_types"].count("dense")
    assert ModelConfig.from_dict(written).first_k_dense_replace == expected
    with pytest.raises(ConfigError, match="must be first_k_dense_replace = 7 times dense"):
        ModelConfig.from_dict(written | {"first_k_dense_replace": 7, "mlp_layer_types": ["sparse"] * num_layers})


def test_a_dense_model_has_no_experts() -> None:
    config = ModelConfig.from_dict(YOUTU)
    assert (config.n_routed_experts, config.first_k_dense_replace) == (0, 32)
    assert not any(map(config.is_moe_layer, range(32)))
    for name in ("n_routed_experts", "num_nextn_predict_layers", "n_group", "first_k_dense_replace"):
        with pytest.raises(ConfigError, match=f"{name} 4: unknown to config.json of a 'youtu'"):
            ModelConfig.from_dict(YOUTU | {name: 4})


def test_a_silent_youtu_ties_its_head() -> None:
    """Its own class does so; a DeepSeek does not."""
    silent = {name: value for name, value in YOUTU.items() if name != "tie_word_embeddings"}
    assert ModelConfig.from_dict(silent).tie_word_embeddings
    assert not ModelConfig.from_dict({n: v for n, v in V3.items() if n != "tie_word_embeddings"}).tie_word_embeddings


def test_a_model_without_experts_has_none_in_its_mtp_layer() -> None:
    none = dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"), 0)
    dense = tiny_config_dict(first_k_dense_replace=3, n_group=1, topk_group=1, **none)
    assert ModelConfig.from_dict(dense).n_routed_experts == 0
    for change in ({"num_nextn_predict_layers": 1}, {"first_k_dense_replace": 2}):
        with pytest.raises(ConfigError, match="n_routed_experts must be at least 1 in a model with experts, got 0"):
            ModelConfig.from_dict(dense | change)


@pytest.mark.parametrize(
    ("family", "kind"), [("v3", "indexed_attention"), ("v32", "full_attention"), ("glm", "sliding_attention")]
)
def test_kinds_of_layers_are_those_of_the_family(family: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"layer_types .'{kind}'. is not supported for a "):
        ModelConfig.from_dict(tiny_config_dict(family, layer_types=[kind]))
