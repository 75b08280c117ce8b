"""Every field that a config.json may have: those that are read, those that change no output, and all others, which are
refused by name.

An unknown field may change what the model says, so it is never skipped in silence. null means "not given" everywhere.
`docs/howto/checkpoints.md` says what to do about a field that is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import attrs

from pdinfer.checks import clip
from pdinfer.config.families import Family
from pdinfer.config.rope import YarnScaling
from pdinfer.errors import ConfigError

MAX_NAMED = 10

FIELDS = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "hidden_size",
        "intermediate_size",
        "kv_lora_rank",
        "layer_types",
        "max_position_embeddings",
        "mla_quantize",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "quantization_config",
        "quantize",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "v_head_dim",
        "vocab_size",
    }
)
"""Read for every family."""

EXPERT_FIELDS = frozenset(
    {
        "first_k_dense_replace",
        "mlp_layer_types",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "routed_scaling_factor",
        "scoring_func",
        "topk_group",
        "topk_method",
    }
)
"""Read for families with experts."""

INDEXER_FIELDS = frozenset(
    {
        "index_head_dim",
        "index_n_heads",
        "index_skip_topk_offset",
        "index_topk",
        "index_topk_freq",
        "index_topk_pattern",
        "indexer_rope_interleave",
        "indexer_types",
    }
)
"""Read for families with sparse attention."""

WRAPPER_FIELDS = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "model_type",
        "quantization_config",
        "quantize",
        "text_config",
        "tie_word_embeddings",
        "torch_dtype",
    }
)
"""Read from a config.json that holds that of a text model."""

HARMLESS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "defaults of generation, which each request states itself": frozenset(
            {
                "bad_words_ids",
                "begin_suppress_tokens",
                "decoder_start_token_id",
                "diversity_penalty",
                "do_sample",
                "early_stopping",
                "encoder_no_repeat_ngram_size",
                "exponential_decay_length_penalty",
                "forced_bos_token_id",
                "forced_eos_token_id",
                "length_penalty",
                "max_length",
                "min_length",
                "no_repeat_ngram_size",
                "num_beam_groups",
                "num_beams",
                "num_return_sequences",
                "output_scores",
                "pad_token_id",
                "prefix",
                "remove_invalid_values",
                "repetition_penalty",
                "return_dict_in_generate",
                "sep_token_id",
                "suppress_tokens",
                "temperature",
                "top_k",
                "top_p",
                "typical_p",
                "use_cache",
            }
        ),
        "for training only": frozenset(
            {
                "attention_dropout",
                "aux_loss_alpha",
                "embedding_initializer_range",
                "ep_size",
                "finetuning_task",
                "initializer_range",
                "output_router_logits",
                "pretraining_tp",
                "router_aux_loss_coef",
                "seq_aux",
                "task_specific_params",
            }
        ),
        "bookkeeping of the library that wrote the file, and what its calls return": frozenset(
            {
                "_attn_implementation",
                "_attn_implementation_autoset",
                "_commit_hash",
                "_experts_implementation",
                "_name_or_path",
                "attn_implementation",
                "auto_map",
                "chunk_size_feed_forward",
                "custom_pipelines",
                "id2label",
                "is_decoder",
                "label2id",
                "name_or_path",
                "num_labels",
                "output_attentions",
                "output_hidden_states",
                "problem_type",
                "return_dict",
                "tf_legacy_loss",
                "tokenizer_class",
                "torchscript",
                "transformers_version",
                "trust_remote_code",
                "unsloth_fixed",
                "unsloth_version",
                "use_bfloat16",
                "use_return_dict",
            }
        ),
        "the rope dim in some files and another size in others; qk_nope_head_dim and qk_rope_head_dim count": frozenset(
            {"head_dim"}
        ),
        "about drafts alone, which change no token": frozenset({"index_share_for_mtp_iteration"}),
    }
)
"""Fields that change no output, by reason."""

HARMLESS_IN_WRAPPERS = frozenset(
    {
        "encoder_only",
        "ignore_index",
        "image_token_id",
        "language_only",
        "media_placeholder_token_id",
        "projection_hidden_size",
        "projection_layer_norm_eps",
        "use_unified_vision_chunk",
        "video_placeholder",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)
"""Fields about images, which are not read."""

OFF: Mapping[str, object] = MappingProxyType(
    {
        "add_cross_attention": False,
        "attention_bias": False,
        "attention_sink": False,
        "embedding_multiplier": 1,
        "hidden_act": "silu",
        "is_encoder_decoder": False,
        "logits_scaling": 1,
        "mla_scale_kv_lora": False,
        "mla_scale_q_lora": False,
        "mla_use_nope": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "partial_rotary_factor": 1,
        "pruned_heads": {},
        "residual_multiplier": 1,
        "rope_interleave": True,
        "router_jitter_noise": 0,
        "sandwich_norm": False,
        "scale_emb": 1,
        "tie_encoder_decoder": False,
        "use_bias": False,
        "use_qk_norm": False,
        "use_qkv_bias": False,
        "use_sliding_window": False,
        "zero_expert_num": 0,
    }
)
"""Fields that may only have this value, which says what is computed anyway. Every other value is refused."""

SAME_AS: Mapping[str, str] = MappingProxyType(
    {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
)
"""Second names of fields. They must repeat the field's value."""

ROPE_FIELDS = frozenset({"rope_theta", "rope_type"})
YARN_FIELDS = tuple(field.name for field in attrs.fields(YarnScaling))
ROPE_OFF: Mapping[str, object] = MappingProxyType(
    {"truncate": True, "partial_rotary_factor": 1, "attention_factor": None, "llama_4_scaling_beta": 0}
)

QUANTIZATION_FIELDS = frozenset({"quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt"})
QUANTIZATION_HARMLESS = frozenset({"modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"})
"""The files say which tensors are quantized. `dequantize` is a wish of the one who loads the model."""
QUANTIZATION_OFF: Mapping[str, object] = MappingProxyType({"expert_dtype": "fp8", "kv_cache_scheme": None})

_HARMLESS = frozenset[str]().union(*HARMLESS.values())


def check_fields(raw: Mapping[str, object], family: Family) -> None:
    """Refuse the fields of a text model's config.json that may change its output and that nothing here reads. Raises
    ConfigError with their names and values, and what to do."""
    read = FIELDS
    if family.has_experts:
        read |= EXPERT_FIELDS
    if family.indexer_rope_interleave is not None:
        read |= INDEXER_FIELDS
    for name, other in SAME_AS.items():
        if raw.get(name) is not None and raw[name] != raw.get(other):
            raise ConfigError(f"{name} {clip(raw[name])} must be absent or repeat {other} = {clip(raw.get(other))}")
    check_known(raw, read | _HARMLESS | SAME_AS.keys(), OFF, f"config.json of a {clip(raw.get('model_type'))}")


def check_wrapper_fields(raw: Mapping[str, object]) -> None:
    """Refuse such fields of a config.json that holds that of a text model as its `text_config`."""
    check_known(
        raw, WRAPPER_FIELDS | HARMLESS_IN_WRAPPERS | _HARMLESS, OFF, f"config.json of a {clip(raw['model_type'])}"
    )


def check_rope_fields(fields: Mapping[str, object], rope_type: object) -> None:
    """Refuse such fields of `rope_parameters` and `rope_scaling` together, for a `rope_type` that is supported."""
    read = ROPE_FIELDS.union(YARN_FIELDS) if rope_type == "yarn" else ROPE_FIELDS
    check_known(fields, read, ROPE_OFF, f"rope of type {rope_type}")


def check_quantization_fields(fields: Mapping[str, object]) -> None:
    """Refuse such fields of `quantization_config`."""
    check_known(fields, QUANTIZATION_FIELDS | QUANTIZATION_HARMLESS, QUANTIZATION_OFF, "quantization_config")


def check_known(raw: Mapping[str, object], known: Collection[str], off: Mapping[str, object], where: str) -> None:
    """Refuse fields that are not in `known`, unless they have the value that `off` gives. Raises ConfigError."""
    strange = list(_strange(raw, known, off))
    if strange:
        rest = f" and {len(strange) - MAX_NAMED} more" if len(strange) > MAX_NAMED else ""
        raise ConfigError(
            f"{', '.join(strange[:MAX_NAMED])}{rest}: unknown to {where}, and nothing here computes what it may "
            "change; check that model_type and architectures are the model's own, and leave out of a copy of "
            "config.json only what has no effect on inference"
        )


def _strange(raw: Mapping[str, object], known: Collection[str], off: Mapping[str, object]) -> Iterator[str]:
    for name, value in raw.items():
        if value is None or name in known:
            continue
        if name not in off:
            yield f"{clip(name).strip(chr(39))} {clip(value)}"
        elif value != off[name]:
            raise ConfigError(f"{name} {clip(value)} is not supported; it must be {clip(off[name])} or absent")
