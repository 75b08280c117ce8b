"""The settings of a vLLM that change what it computes from its checkpoint: a part of the model's id, as no file has
them.

Two vLLMs of one checkpoint are one model only when these are equal. A setting with a value becomes a part of the id
(`folded`). One without a value that both ends could compare is refused at start: functions, and weights or a
configuration from elsewhere than the checkpoint's own files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from pdinfer.checks import clip
from pdinfer.errors import ConfigError

FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""The values of vLLM's load_format that read the safetensors files which a layout's ids are computed from."""
CACHE_DTYPES = ("auto", "float16", "bfloat16")
BY_VALUE = ("hf_overrides", "quantization_config", "model_class_overrides", "rope_scaling", "rope_theta")
"""The fields of vLLM's ModelConfig that change what it computes and are empty unless they were given. vLLM 0.32 has the
last two in hf_overrides, older ones have them next to it."""


def overrides(config: Any) -> dict[str, Any]:
    """Return the settings of a VllmConfig that cached values depend on and the checkpoint's files lack, as values of
    JSON: {} for a plain set-up. Raises ConfigError, in a sentence, for what cannot be compared by its value."""
    _check_files(config)
    model = config.model_config
    found = {name: _plain(value, name) for name in BY_VALUE if (value := getattr(model, name, None))}
    arch = getattr(model, "model_arch_config", None)
    if getattr(arch, "quantization_config", None) is None and (method := getattr(model, "quantization", None)):
        found["quantization"] = str(method)  # the checkpoint does not have it, so vLLM quantizes
    implementation = getattr(model, "model_impl", "auto")
    if (name := str(getattr(implementation, "value", implementation))) not in ("auto", "vllm"):
        found["model_impl"] = name
    stored = str(config.cache_config.cache_dtype)
    computed = str(getattr(model, "dtype", stored)).removeprefix("torch.")
    if stored not in ("auto", computed):
        found["dtype"] = computed  # of the cache the layout says it
    if getattr(getattr(config, "attention_config", None), "use_non_causal", False):
        found["use_non_causal"] = True
    if _rope_type(model) == "longrope":  # vLLM chooses the factors of all positions by it
        found["max_model_len"] = int(model.max_model_len)
    return found


def folded(model_id: bytes, changes: Mapping[str, Any]) -> bytes:
    """Return the id of a model with overrides: 32 bytes that depend on both, or `model_id` when there are no
    `changes`."""
    if not changes:
        return model_id
    text = json.dumps(changes, sort_keys=True)
    return hashlib.sha256(b"pdinfer told 1\n" + model_id + text.encode()).digest()


def _check_files(config: Any) -> None:
    """Refuse what comes from elsewhere than the checkpoint's config.json and safetensors files."""
    model, load = config.model_config, getattr(config, "load_config", None)
    if (name := str(getattr(load, "load_format", "auto"))) not in FORMATS:
        raise ConfigError(
            "PDInferConnector compares weights by the checkpoint's safetensors files, and load_format is "
            f"{clip(name)}, which gives vLLM others; use one of {', '.join(FORMATS)}"
        )
    if (name := str(getattr(model, "config_format", "auto"))) not in ("auto", "hf"):
        raise ConfigError(
            "PDInferConnector compares models by the checkpoint's config.json, and config_format is "
            f'{clip(name)}, which reads another file; use "auto" or "hf"'
        )
    if (path := getattr(model, "hf_config_path", None)) not in (None, model.model):
        raise ConfigError(
            f"PDInferConnector compares models by the checkpoint's config.json, and hf_config_path is {clip(path)}; "
            "put that config.json into the checkpoint's folder, or give what differs as hf_overrides"
        )
    if getattr(config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "PDInferConnector compares weights by the checkpoint's files, and with weight_transfer_config they "
            "change while vLLM runs; leave it out"
        )
    if (dtype := str(config.cache_config.cache_dtype)) not in CACHE_DTYPES:
        raise ConfigError(f"PDInferConnector hands over caches in the model's dtype, and kv_cache_dtype is {dtype}")


def _plain(value: Any, name: str) -> Any:
    """Return a value in the one form that JSON gives it, whoever wrote it: 2.0 is 2. Raises ConfigError for a function
    or an object, which is `name`."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return int(value) if value.is_integer() else value
        case torch.dtype():
            return str(value)
        case list() | tuple():
            return [_plain(part, name) for part in value]
        case dict() if all(type(key) is str for key in value):
            return {key: _plain(part, f"{name}.{key}") for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), name) for field in dataclasses.fields(value)}
    raise ConfigError(
        f"PDInferConnector compares models by values, and {clip(name)} is {clip(value)}; give it as "
        "numbers, text, lists, and dicts with names"
    )


def _rope_type(model: Any) -> str | None:
    text = getattr(model, "hf_text_config", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
