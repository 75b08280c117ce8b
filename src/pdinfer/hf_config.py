"""What a Hugging Face config.json may say, in the spelling of transformers 4 or 5, read into plain values.

transformers 5 writes `rope_parameters` and `dtype` where files of 4 and DeepSeek's own have `rope_theta` with
`rope_scaling`, and `torch_dtype`; `type` and `rope_type` are one field. What would change the output and is not
implemented is refused; what has no effect on inference is ignored. `head_dim` is ignored: it is the rope dim in files
that transformers 5 wrote.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import attrs

from pdinfer.checks import clip, is_int
from pdinfer.errors import ConfigError

MAX_EOS_IDS = 64
MAX_LAYERS = 1024
MAX_TOP_K = 1 << 24

STORED_DTYPES = ("bfloat16", "float16", "float32")
SUPPORTED_WEIGHTS = (
    f"supported: weights stored as {', '.join(STORED_DTYPES)}, as FP8 in blocks of 128 x 128 (quant_method fp8), or as "
    "INT8 (W8A8, W8A8_DYNAMIC) with a quant_model_description.json"
)
"""What to do about a checkpoint that is quantized otherwise, as the end of an error message."""
FP8_FIELDS: Mapping[str, object] = MappingProxyType(
    {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
)
QUANTIZE = ("w8a8", "w8a8_dynamic")

# A checkpoint's own code is never imported, and no option to do so exists.
IGNORED_CODE_FIELDS = ("auto_map", "trust_remote_code", "custom_pipelines")

# Fields whose other values would change the output; absent and null mean the value given here.
FIXED_FIELDS: Mapping[str, object] = MappingProxyType(
    {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }
)
FIXED_YARN_FIELDS: Mapping[str, object] = MappingProxyType(
    {"truncate": True, "partial_rotary_factor": 1, "attention_factor": None}
)
YARN_FIELDS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)

Choice = TypeVar("Choice", bound=enum.Enum)


class ScoringFunc(enum.Enum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class TopkMethod(enum.Enum):
    """How experts are chosen from scores; NOAUX_TC adds a correction bias for the choice, not for the weights."""

    GREEDY = "greedy"
    GROUP_LIMITED_GREEDY = "group_limited_greedy"
    NOAUX_TC = "noaux_tc"


class IndexerType(enum.Enum):
    """Whether a layer of a model with sparse attention chooses tokens itself or takes the last full layer's choice."""

    FULL = "full"
    SHARED = "shared"


@attrs.frozen(kw_only=True)
class Family:
    """What a `model_type` implies where its config.json is silent, and what it may say. The first is the default.

    `indexer_rope_interleave` is None in families without an indexer.
    """

    scoring_func: ScoringFunc
    topk_methods: tuple[TopkMethod, ...]
    norm_topk_prob: tuple[bool, ...]
    indexer_rope_interleave: bool | None = None


_V3 = Family(scoring_func=ScoringFunc.SIGMOID, topk_methods=(TopkMethod.NOAUX_TC,), norm_topk_prob=(True, False))

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # norm_topk_prob: the first code of V2 then drops routed_scaling_factor, transformers ignores the field.
        "deepseek_v2": Family(
            scoring_func=ScoringFunc.SOFTMAX,
            topk_methods=(TopkMethod.GREEDY, TopkMethod.GROUP_LIMITED_GREEDY),
            norm_topk_prob=(False,),
        ),
        "deepseek_v3": _V3,
        "deepseek_v32": attrs.evolve(_V3, indexer_rope_interleave=False),
        "glm_moe_dsa": attrs.evolve(_V3, indexer_rope_interleave=True),
        "kimi_k2": _V3,
    }
)

# Relatives of these families, and why they are none.
STRANGERS: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v4": "it is another architecture (compressed attention with sinks, hyper-connections), not MLA",
        "kimi_k25": "it wraps a text model for images: export the text model, with tensors named model.*, as a "
        "checkpoint of its own",
    }
)


def read_fields(raw: Mapping[str, object]) -> dict[str, Any]:
    """Values for the fields of `ModelConfig`, unchecked, among others of `raw`; `yarn` is None or a dict of fields.

    Raises ConfigError for what is not supported or contradicts itself.
    """
    family = _family(raw)
    _refuse_unsupported(raw)
    ignored = [name for name in IGNORED_CODE_FIELDS if raw.get(name)]
    if ignored:
        logging.getLogger("pdinfer").warning("ignored %s of config.json: no model code is loaded", ", ".join(ignored))
    defaults: dict[str, object] = {
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "scoring_func": family.scoring_func.value,
        "topk_method": family.topk_methods[0].value,
        "norm_topk_prob": family.norm_topk_prob[0],
    }
    values: dict[str, Any] = dict(raw)
    values |= {name: value for name, value in defaults.items() if raw.get(name) is None}
    values["scoring_func"] = _member(ScoringFunc, "scoring_func", values["scoring_func"])
    values["topk_method"] = _member(TopkMethod, "topk_method", values["topk_method"])
    values["yarn"] = None
    values |= _rope(raw)
    values |= _indexer(raw, family)
    values["eos_token_ids"] = eos_ids(raw.get("eos_token_id"))
    values["dtype"] = _stored_dtype(raw)
    values["scale_fmt"] = _scale_fmt(raw)
    return values


def eos_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id`: null, an int or a list of ints. That they are in the vocabulary is for `ModelConfig` to check."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if len(ids) > MAX_EOS_IDS or not all(is_int(token) for token in ids):
        raise ConfigError(f"eos_token_id must be an int or a list of at most {MAX_EOS_IDS} ints, got {clip(value)}")
    return tuple(ids)


def check_generation(raw: Mapping[str, object]) -> None:
    """Refuse a generation_config.json with impossible sampling defaults, though none is used: the file is broken."""
    for name, high in (("temperature", 100.0), ("top_p", 1.0), ("top_k", float(MAX_TOP_K))):
        value = raw.get(name)
        number = isinstance(value, float) or is_int(value)
        if value is not None and not (number and 0 <= value <= high):  # type: ignore[operator]
            raise ConfigError(f"{name} must be a number from 0 to {high:g}, got {clip(value)}")


def _family(raw: Mapping[str, object]) -> Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = STRANGERS.get(model_type) if isinstance(model_type, str) else None
        because = f" ({why})" if why else ""
        raise ConfigError(f"model_type {clip(model_type)} is not supported{because}; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _refuse_unsupported(raw: Mapping[str, object]) -> None:
    for name, value in FIXED_FIELDS.items():
        _check_fixed(raw, name, value)
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if kv_heads is not None and is_int(heads) and (not is_int(kv_heads) or kv_heads != heads):
        raise ConfigError(
            f"num_key_value_heads must divide num_attention_heads = {clip(heads)} evenly, and equal it in a model with "
            f"latent attention, got {clip(kv_heads)}"
        )
    kinds, num_dense, num_layers = (
        raw.get(name) for name in ("mlp_layer_types", "first_k_dense_replace", "num_hidden_layers")
    )
    if isinstance(kinds, list) and isinstance(num_dense, int) and isinstance(num_layers, int):
        dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
        if dense != list(range(min(num_dense, len(kinds)))) or len(kinds) < num_layers:
            raise ConfigError(
                f"mlp_layer_types must be first_k_dense_replace = {clip(num_dense)} times dense and then sparse, "
                f"got {clip(kinds)}"
            )
    nope, rope, head = (raw.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"))
    if head is not None and isinstance(nope, int) and isinstance(rope, int) and nope + rope != head:
        raise ConfigError(
            f"qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim = {clip(nope)} + {clip(rope)}, got {clip(head)}"
        )


def _scale_fmt(raw: Mapping[str, object]) -> object:
    """How the scales of FP8 activations are rounded. Refuses every quantization but FP8 in blocks; which tensors are
    quantized is not asked here, because the files say it."""
    _check_quantize(raw.get("quantize"))
    quantization = raw.get("quantization_config")
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    if fields.get("quant_method") != "fp8":
        method = clip(fields.get("quant_method"))
        raise ConfigError(f"quantization_config: quant_method {method} is not supported; {SUPPORTED_WEIGHTS}")
    for name, value in FP8_FIELDS.items():
        if fields.get(name) not in (None, value):
            raise ConfigError(
                f"quantization_config: {name} {clip(fields[name])} is not supported, it must be {clip(value)}; "
                f"{SUPPORTED_WEIGHTS}"
            )
    if fields.get("weight_block_size") is None:
        raise ConfigError(f"quantization_config: weight_block_size is missing; {SUPPORTED_WEIGHTS}")
    return fields.get("scale_fmt")


def _check_quantize(value: object) -> None:
    """`quantize` of an INT8 export names its main scheme; the description file has one per tensor, and counts."""
    if value is not None and (not isinstance(value, str) or value.lower() not in QUANTIZE):
        raise ConfigError(f"quantize {clip(value)} is not supported; {SUPPORTED_WEIGHTS}")


def _check_fixed(fields: Mapping[str, object], name: str, expected: object) -> None:
    value = fields.get(name)
    if value is not None and value != expected:
        raise ConfigError(f"{name} {clip(value)} is not supported; it must be {clip(expected)} or absent")


def _member(kind: type[Choice], name: str, value: object) -> Choice:
    choices = {member.value: member for member in kind}
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {clip(value)}")
    return choices[value]


def _rope(raw: Mapping[str, object]) -> dict[str, object]:
    """`rope_theta`, and `yarn` where rope is stretched, from whichever spelling is there; both must agree."""
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
    rope = {"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}
    if rope_type == "default":
        return rope
    if rope_type != "yarn":
        raise ConfigError(f"rope_type {clip(rope_type)} is not supported; supported: default, yarn")
    for key, value in FIXED_YARN_FIELDS.items():
        _check_fixed(fields, key, value)
    yarn = {key: fields[key] for key in YARN_FIELDS if fields.get(key) is not None}
    for key in ("factor", "original_max_position_embeddings"):
        if key not in yarn:
            raise ConfigError(f"rope scaling of type yarn needs {key}, which is missing")
    return {**rope, "yarn": yarn}


def _indexer(raw: Mapping[str, object], family: Family) -> dict[str, object]:
    """The fields of sparse attention; `indexer_types` has one entry per main layer."""
    if family.indexer_rope_interleave is None:
        if raw.get("index_topk") is not None:
            raise ConfigError(
                f"index_topk {clip(raw['index_topk'])} asks for sparse attention, which a {raw['model_type']} does not "
                f"have; a DeepSeek-V3.2 has model_type deepseek_v32"
            )
        return dict.fromkeys(("index_n_heads", "index_head_dim", "index_topk"))
    interleave = raw.get("indexer_rope_interleave")
    return {
        "indexer_rope_interleave": family.indexer_rope_interleave if interleave is None else interleave,
        "indexer_types": _indexer_types(raw),
    }


def _indexer_types(raw: Mapping[str, object]) -> tuple[IndexerType, ...]:
    """From the list itself, a pattern such as "FSSS", or GLM-5.2's schedule: of the layers from
    `index_skip_topk_offset - 1` on, every `index_topk_freq`-th is full; all before are. Without any, every layer is."""
    num_layers = raw.get("num_hidden_layers")
    count = min(num_layers, MAX_LAYERS) if isinstance(num_layers, int) else 0  # ModelConfig says what is wrong with it
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
