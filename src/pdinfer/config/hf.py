"""Fields of a Hugging Face config.json, in the spelling of transformers 4 or 5, read into plain values.

transformers 5 writes `rope_parameters` and `dtype` where files of version 4 and DeepSeek's own have `rope_theta` with
`rope_scaling`, and `torch_dtype`. `type` and `rope_type` are one field. A field that would change the output and is not
implemented is refused, and so is an unknown one. Fields without effect on inference are listed in `config.fields`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pdinfer.checks import clip, is_int
from pdinfer.config.families import FAMILIES, STRANGERS, Family, ScoringFunc, TopkMethod
from pdinfer.config.fields import (
    WRAPPER_FIELDS,
    YARN_FIELDS,
    check_fields,
    check_quantization_fields,
    check_rope_fields,
    check_wrapper_fields,
)
from pdinfer.config.packed import PackedWeights
from pdinfer.config.rope import YarnScaling
from pdinfer.errors import ConfigError
from pdinfer.log import log

MAX_EOS_IDS = 64
MAX_VOCAB = 1 << 24
MAX_LAYERS = 1024
SAMPLING_DEFAULTS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 1e-6, 1.0),
    ("top_k", 0, 1 << 24),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
)
"""Fields of generation_config.json about sampling, with their ranges."""

STORED_DTYPES = ("bfloat16", "float16", "float32")
SUPPORTED_WEIGHTS = (
    f"supported: weights stored as {', '.join(STORED_DTYPES)}, FP8 in blocks of 128 x 128 (quant_method fp8), INT8 "
    "(W8A8, W8A8_DYNAMIC) with a quant_model_description.json, INT4 or MXFP4 of compressed-tensors"
)
"""Advice for a checkpoint in another quantization; the end of an error message."""
FP8_FIELDS: Mapping[str, object] = MappingProxyType(
    {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
)
QUANTIZE = ("w8a8", "w8a8_dynamic")

SPARSE_LAYERS = ("deepseek_sparse_attention", "indexed_attention")
DENSE_LAYERS = ("full_attention",)

NONE: Mapping[str, object] = MappingProxyType(
    {"n_group": 1, "topk_group": 1, "n_shared_experts": 0, "num_nextn_predict_layers": 0, "norm_topk_prob": False}
)
"""The meaning of null in these fields."""

# A checkpoint's own code is never imported, and no option to do so exists.
IGNORED_CODE_FIELDS = ("auto_map", "trust_remote_code", "custom_pipelines")

Choice = TypeVar("Choice", bound=enum.Enum)


class IndexerType(enum.Enum):
    """The ways in which a layer with sparse attention has its tokens: its own choice, or that of the last full
    layer."""

    FULL = "full"
    SHARED = "shared"


def read_fields(raw: Mapping[str, object]) -> dict[str, Any]:
    """Return values for the fields of `ModelConfig`, unchecked, among others of `raw`.

    Raises ConfigError for what is unsupported, unknown or contradictory."""
    family = _family(raw)
    _check_architectures(raw, family)
    if family.text_models:
        raw = _text_config(raw, family)
    check_fields(raw, family)
    _refuse_unsupported(raw, family)
    ignored = [name for name in IGNORED_CODE_FIELDS if raw.get(name)]
    if ignored:
        log.warning("ignored %s of config.json: no model code is loaded", ", ".join(ignored))
    values: dict[str, Any] = {**raw, **_with_defaults(raw, family), **_experts(raw, family)}
    values["scoring_func"] = _member(ScoringFunc, "scoring_func", values["scoring_func"])
    values["topk_method"] = _member(TopkMethod, "topk_method", values["topk_method"])
    values["yarn"] = None
    values |= _rope(raw)
    values |= _indexer(raw, family)
    values["eos_token_ids"] = eos_ids(raw.get("eos_token_id"))
    values["dtype"] = _stored_dtype(raw)
    values["packed"] = _packed(raw)
    values["scale_fmt"] = None if values["packed"] is not None else _scale_fmt(raw)
    return values


def _with_defaults(raw: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the fields that may be absent or null. An absent field takes the family's default. A null one means what
    `NONE` says, and is like an absent one where `NONE` does not list it."""
    absent: dict[str, object] = {
        **NONE,
        "norm_topk_prob": family.norm_topk_prob[0],
        "scoring_func": family.scoring_func.value,
        "tie_word_embeddings": False,
        "topk_method": family.topk_methods[0].value,
        **family.defaults,
    }
    null = {**absent, **NONE}
    given = {name: raw.get(name, value) for name, value in absent.items()}
    return {name: null[name] if value is None else value for name, value in given.items()}


def _experts(raw: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return how many layers come before those with experts. For a family without experts, return that there are
    none."""
    if not family.has_experts:
        none = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")
        dense = {"first_k_dense_replace": raw.get("num_hidden_layers"), "routed_scaling_factor": 1.0}
        return {**dense, **dict.fromkeys(none, 0)}
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return {}
    num_layers, num_mtp = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers") or 0
    num_dense = kinds.count("dense") if isinstance(kinds, list) else 0
    wanted = raw.get("first_k_dense_replace")
    if (
        not isinstance(kinds, list)
        or kinds != ["dense"] * num_dense + ["sparse"] * (len(kinds) - num_dense)
        or (is_int(num_layers) and is_int(num_mtp) and not 0 <= len(kinds) - num_layers <= num_mtp)  # type: ignore[operator]
        or not (
            wanted in (None, num_dense, family.unread_dense_layers)
            or (is_int(wanted) and wanted >= len(kinds) == num_dense)  # type: ignore[operator]
        )
    ):
        first = "" if wanted is None else f" first_k_dense_replace = {clip(wanted)} times"
        raise ConfigError(
            f"mlp_layer_types must be{first} dense and then sparse, one for each of {clip(num_layers)} layers, "
            f"got {clip(kinds)}"
        )
    return {"first_k_dense_replace": num_dense}


def _text_config(raw: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the text model's config.json inside `raw`, together with what only the outside says."""
    check_wrapper_fields(raw)
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config of a {raw['model_type']} must be an object, got {clip(text)}")
    if text.get("model_type") not in family.text_models:
        raise ConfigError(
            f"model_type {clip(text.get('model_type'))} of text_config is not supported; supported: "
            f"{', '.join(family.text_models)}"
        )
    _check_architectures(text, FAMILIES[text["model_type"]])
    inside = dict(text)
    for name in sorted(WRAPPER_FIELDS - {"architectures", "model_type", "text_config"}):
        outer, inner = raw.get(name), text.get(name)
        if outer is None:
            continue
        # In a wrapper the outer tie counts, because text classes repeat their default.
        if name != "tie_word_embeddings" and inner not in (None, outer):
            raise ConfigError(f"{name} {clip(outer)} and {clip(inner)} of text_config must agree")
        inside[name] = outer
    return {**inside, "model_type": raw["model_type"]}


def eos_ids(value: object) -> tuple[int, ...]:
    """Return the ids in `eos_token_id`, which is null, an int or a list of ints. `ModelConfig` checks that they are in
    the vocabulary."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if len(ids) > MAX_EOS_IDS or not all(is_int(token) and 0 <= token < MAX_VOCAB for token in ids):  # type: ignore[operator]
        raise ConfigError(
            f"eos_token_id must be an int from 0 to {MAX_VOCAB - 1} or a list of at most {MAX_EOS_IDS} such ints, "
            f"got {clip(value)}"
        )
    return tuple(ids)


def ending_ids(raw: Mapping[str, object], generation: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids that end an answer: those of generation_config.json if it has any, else those of config.json,
    which in one that holds that of a text model may stand inside. Raises ConfigError as `eos_ids`."""
    text = raw.get("text_config")
    for source in (generation, raw, text if isinstance(text, Mapping) else {}):
        if source.get("eos_token_id") is not None:
            return eos_ids(source["eos_token_id"])
    return ()


def sampling_defaults(raw: Mapping[str, object]) -> dict[str, float | int]:
    """Return how generation_config.json would have tokens drawn, by the names of `SamplingParams`. What it does not
    say is not there; where it says not to draw, the temperature is 0. Raises ConfigError for impossible values."""
    found: dict[str, float | int] = {}
    for name, low, high in SAMPLING_DEFAULTS:
        value = raw.get(name)
        if value is None:
            continue
        is_number = is_int(value) or (isinstance(value, float) and name != "top_k")
        if not (is_number and low <= value <= high):  # type: ignore[operator]
            kind = "an int" if name == "top_k" else "a number"
            raise ConfigError(f"{name} must be {kind} from {low:g} to {high:g}, got {clip(value)}")
        found[name] = value  # type: ignore[assignment]
    draws = raw.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        raise ConfigError(f"do_sample must be true or false, got {clip(draws)}")
    return {**found, "temperature": 0.0} if draws is False else found


def _family(raw: Mapping[str, object]) -> Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = STRANGERS.get(model_type) if isinstance(model_type, str) else None
        because = f" ({why})" if why else ""
        raise ConfigError(f"model_type {clip(model_type)} is not supported{because}; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _check_architectures(raw: Mapping[str, object], family: Family) -> None:
    names = raw.get("architectures")
    if names is None or (isinstance(names, list | tuple) and all(name in family.architectures for name in names)):
        return
    raise ConfigError(
        f"architectures {clip(names)} is not that of a {clip(raw.get('model_type'))}, which is "
        f"{' or '.join(family.architectures)}; give model_type and architectures of the model itself"
    )


def _refuse_unsupported(raw: Mapping[str, object], family: Family) -> None:
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if kv_heads is not None and is_int(heads) and (not is_int(kv_heads) or kv_heads != heads):
        raise ConfigError(
            f"num_key_value_heads must divide num_attention_heads = {clip(heads)} evenly, and equal it in a model with "
            f"latent attention, got {clip(kv_heads)}"
        )
    kinds = raw.get("layer_types")
    supported = DENSE_LAYERS if family.indexer_rope_interleave is None else SPARSE_LAYERS
    if kinds is not None and not (isinstance(kinds, list) and all(kind in supported for kind in kinds)):
        raise ConfigError(
            f"layer_types {clip(kinds)} is not supported for a {raw['model_type']}; every layer must be "
            f"{' or '.join(supported)}"
        )
    nope, rope, head = (raw.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"))
    if head is not None and isinstance(nope, int) and isinstance(rope, int) and nope + rope != head:
        raise ConfigError(
            f"qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim = {clip(nope)} + {clip(rope)}, got {clip(head)}"
        )


def _packed(raw: Mapping[str, object]) -> PackedWeights | None:
    """Return what the config says of packed weights, or None where compressed-tensors has packed none."""
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "compressed-tensors":
        return None
    for name in ("quantize", "mla_quantize"):
        if raw.get(name) is not None:
            raise ConfigError(f"{name} {clip(raw[name])} does not go with weights that compressed-tensors packed")
    return PackedWeights.read(quantization)


def _scale_fmt(raw: Mapping[str, object]) -> object:
    """Return how the scales of FP8 activations are rounded. Refuses every quantization but FP8 in blocks. Which tensors
    are quantized does not matter here, because the files say it."""
    for name in ("quantize", "mla_quantize"):
        _check_quantize(name, raw.get(name))
    quantization = raw.get("quantization_config")
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    method = fields.get("quant_method")
    is_described = any(name == "model_quant_type" or name.endswith(".weight") for name in fields)
    if method == "ascend" or (method is None and is_described):  # modelslim's, whose description file decides
        _check_quantize("quantization_config: model_quant_type", fields.get("model_quant_type"))
        return None
    if method != "fp8":
        raise ConfigError(f"quantization_config: quant_method {clip(method)} is not supported; {SUPPORTED_WEIGHTS}")
    check_quantization_fields(fields)
    for name, value in FP8_FIELDS.items():
        if fields.get(name) not in (None, value):
            raise ConfigError(
                f"quantization_config: {name} {clip(fields[name])} is not supported, it must be {clip(value)}; "
                f"{SUPPORTED_WEIGHTS}"
            )
    if fields.get("weight_block_size") is None:
        raise ConfigError(f"quantization_config: weight_block_size is missing; {SUPPORTED_WEIGHTS}")
    scale_fmt = fields.get("scale_fmt")
    return None if scale_fmt == "float" else scale_fmt


def _check_quantize(name: str, value: object) -> None:
    """Check a field that names the main scheme of an INT8 export. The description file, which has a scheme per tensor,
    decides."""
    if value is not None and (not isinstance(value, str) or value.lower() not in QUANTIZE):
        raise ConfigError(f"{name} {clip(value)} is not supported; {SUPPORTED_WEIGHTS}")


def _member(kind: type[Choice], name: str, value: object) -> Choice:
    choices = {member.value: member for member in kind}
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {clip(value)}")
    return choices[value]


def _rope(raw: Mapping[str, object]) -> dict[str, object]:
    """Return `rope_theta`, and `yarn` where rope is stretched, from whichever spelling is there. Two spellings must
    agree."""
    fields: dict[str, object] = {}
    sources = {name: raw.get(name) for name in ("rope_scaling", "rope_parameters")}
    for name, source in sources.items():
        if source is not None and not isinstance(source, Mapping):
            raise ConfigError(f"{name} must be an object or null, got {clip(source)}")
        for key, value in (source or {}).items():
            _add_rope(fields, "rope_type" if key == "type" else key, value)
    if raw.get("rope_theta") is not None:
        _add_rope(fields, "rope_theta", raw["rope_theta"])
    rope_type = fields.get("rope_type") or "default"
    if rope_type not in ("default", "yarn"):
        raise ConfigError(f"rope_type {clip(rope_type)} is not supported; supported: default, yarn")
    check_rope_fields(fields, rope_type)
    rope = {"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}
    if rope_type == "default":
        return rope
    yarn: dict[str, Any] = {key: fields[key] for key in YARN_FIELDS if fields.get(key) is not None}
    for key in ("factor", "original_max_position_embeddings"):
        if key not in yarn:
            raise ConfigError(f"rope scaling of type yarn needs {key}, which is missing")
    return {**rope, "yarn": YarnScaling(**yarn)}


def _indexer(raw: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the fields of sparse attention. `indexer_types` has one entry per main layer."""
    if family.indexer_rope_interleave is None:
        return dict.fromkeys(("index_n_heads", "index_head_dim", "index_topk"))
    interleave = raw.get("indexer_rope_interleave")
    return {
        "indexer_rope_interleave": family.indexer_rope_interleave if interleave is None else interleave,
        "indexer_types": _indexer_types(raw),
    }


def _indexer_types(raw: Mapping[str, object]) -> tuple[IndexerType, ...]:
    """Read the types from the list itself, from a pattern such as "FSSS", or from GLM-5.2's schedule: of the layers
    from `index_skip_topk_offset - 1` on, every `index_topk_freq`-th is full, and all before are. Without any of them,
    every layer is full."""
    num_layers = raw.get("num_hidden_layers")
    count = min(num_layers, MAX_LAYERS) if isinstance(num_layers, int) else 0  # ModelConfig refuses others
    given, pattern = raw.get("indexer_types"), raw.get("index_topk_pattern")
    if given is None and isinstance(pattern, str):
        given = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern[: MAX_LAYERS + 1]]
    elif given is None:
        given = pattern
    if given is not None:
        if not isinstance(given, list | tuple) or len(given) < count:
            raise ConfigError(f"indexer_types must name each of the {count} layers, got {clip(given)}")
        return tuple(_member(IndexerType, "indexer_types", value) for value in given[:count])
    every, offset = (
        raw.get(name, default) for name, default in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
    )
    if not is_int(every) or not is_int(offset) or every < 1 or offset < 1:  # type: ignore[operator]
        raise ConfigError(
            f"index_topk_freq and index_skip_topk_offset must be ints of at least 1, got {clip(every)}, {clip(offset)}"
        )
    return tuple(
        IndexerType.SHARED if max(layer - offset + 1, 0) % every else IndexerType.FULL  # type: ignore[operator]
        for layer in range(count)
    )


def _add_rope(fields: dict[str, object], key: str, value: object) -> None:
    first = fields.setdefault(key, value)
    if first is not value and first != value:
        raise ConfigError(f"{key} of the rope fields is given twice, as {clip(first)} and as {clip(value)}")


def _stored_dtype(raw: Mapping[str, object]) -> object:
    given = {name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None}
    if len(given) == 2 and given["dtype"] != given["torch_dtype"]:
        raise ConfigError(f"dtype {clip(given['dtype'])} and torch_dtype {clip(given['torch_dtype'])} must agree")
    return next(iter(given.values()), "bfloat16")
