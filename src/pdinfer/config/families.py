"""The model families: what a `model_type` implies, and what its config.json may say. A family is one row of `FAMILIES`;
`STRANGERS` are relatives that are not supported."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import attrs


class ScoringFunc(enum.Enum):
    """The function from router logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class TopkMethod(enum.Enum):
    """The rule by which experts are chosen from scores; NOAUX_TC adds a correction bias for the choice, not for the
    weights."""

    GREEDY = "greedy"
    GROUP_LIMITED_GREEDY = "group_limited_greedy"
    NOAUX_TC = "noaux_tc"


class AttentionKind(enum.Enum):
    """The kind of attention that the layers have. `model.attention` has the class for each."""

    MLA = "mla"


@attrs.frozen(kw_only=True)
class Family:
    """The defaults of a `model_type` where its config.json is silent, and the values that this may have.

    The first of `topk_methods` and of `norm_topk_prob` is the default. `defaults` are those of other fields, taken from
    the makers' configuration class (transformers 5.23). `attention` computes the layers' attention. Without
    `has_experts` every MLP is dense. `indexer_rope_interleave` is None in families without an indexer. With
    `moe_output_norm` the output of the experts is normed before it is added. With `optional_correction_bias` a router
    without that tensor has zeros. `text_models` are the model types that a wrapper for images may hold as its
    `text_config`. `unread_dense_layers` is the default that transformers' class writes as `first_k_dense_replace`
    whatever the `mlp_layer_types` are that it reads. `tensor_prefixes` are pairs of what tensor names begin with in the
    files, and here."""

    architectures: tuple[str, ...]
    scoring_func: ScoringFunc
    topk_methods: tuple[TopkMethod, ...]
    norm_topk_prob: tuple[bool, ...]
    attention: AttentionKind = AttentionKind.MLA
    defaults: Mapping[str, object] = MappingProxyType({})
    has_experts: bool = True
    indexer_rope_interleave: bool | None = None
    moe_output_norm: bool = False
    optional_correction_bias: bool = False
    text_models: tuple[str, ...] = ()
    unread_dense_layers: int | None = None
    tensor_prefixes: tuple[tuple[str, str], ...] = ()


_V3 = Family(
    architectures=("DeepseekV3ForCausalLM",),
    scoring_func=ScoringFunc.SIGMOID,
    topk_methods=(TopkMethod.NOAUX_TC,),
    norm_topk_prob=(True, False),
    defaults=MappingProxyType({"n_group": 8, "topk_group": 4, "n_shared_experts": 1}),
)
_UNGROUPED: Mapping[str, object] = MappingProxyType({"n_group": 1, "topk_group": 1, "n_shared_experts": 1})
_AXK1 = attrs.evolve(_V3, architectures=("AXK1ForCausalLM",), moe_output_norm=True, optional_correction_bias=True)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # With norm_topk_prob the first code of V2 drops routed_scaling_factor, and transformers ignores the field.
        "deepseek_v2": Family(
            architectures=("DeepseekV2ForCausalLM",),
            scoring_func=ScoringFunc.SOFTMAX,
            topk_methods=(TopkMethod.GREEDY, TopkMethod.GROUP_LIMITED_GREEDY),
            norm_topk_prob=(False,),
            defaults=MappingProxyType({**_UNGROUPED, "n_shared_experts": 2}),
        ),
        "deepseek_v3": _V3,
        "deepseek_v32": attrs.evolve(
            _V3, architectures=("DeepseekV32ForCausalLM",), indexer_rope_interleave=False, unread_dense_layers=3
        ),
        "glm_moe_dsa": attrs.evolve(
            _V3,
            architectures=("GlmMoeDsaForCausalLM",),
            defaults=_UNGROUPED,
            indexer_rope_interleave=True,
            unread_dense_layers=3,
        ),
        "glm4_moe_lite": attrs.evolve(_V3, architectures=("Glm4MoeLiteForCausalLM",), defaults=_UNGROUPED),
        "kimi_k2": attrs.evolve(_V3, architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")),
        "kimi_k25": attrs.evolve(
            _V3,
            architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
            text_models=("deepseek_v3", "kimi_k2"),
            tensor_prefixes=(
                ("language_model.model.blocks.", "model.layers."),  # as transformers 5.23 saves it
                ("language_model.", ""),
                ("model.language_model.", "model."),
            ),
        ),
        "youtu": attrs.evolve(
            _V3,
            architectures=("YoutuForCausalLM",),
            has_experts=False,
            defaults=MappingProxyType({"tie_word_embeddings": True}),
        ),
        "axk1": _AXK1,
        "AXK1": _AXK1,  # before transformers had a class for it
    }
)

# Relatives that are not supported, and why.
STRANGERS: Mapping[str, str] = MappingProxyType(
    {
        "axk2": "it gates norms and the output of attention",
        "bailing_hybrid": "most of its layers are linear attention",
        "deepseek_v4": "it is another architecture (compressed attention with sinks, hyper-connections), not MLA",
        "glm5_next": "most of its layers are linear attention, and it has hyper-connections",
        "hy_v4": "it has attention sinks, an output gate and several residual streams",
        "kimi_k3": "most of its layers are linear attention",
        "kimi_linear": "most of its layers are linear attention",
        "longcat_flash": "it has two attentions per layer and experts that compute nothing",
        "minicpm3": "it scales embeddings, residuals and logits",
        "mistral4": "it scales queries by their position and routes with a softmax",
        "mistral_large4": "it scales queries by their position and shares KV between layers",
    }
)
