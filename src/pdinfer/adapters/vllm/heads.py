"""The layout of caches with keys and values per head, as vLLM's attention on a CPU keeps them: packed.

A block of a layer is in a form of the kernel's own, which depends on the instruction set that it was chosen for: with
AMX neither keys nor values are stored row by row. So blocks move whole, between engines with blocks of one size, and
the layout's format names the form: kernel, instruction set, what this CPU computes with, and the vLLM that has made it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from pdinfer.errors import ConfigError
from pdinfer.files import check_folder, read_json
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.shapes import AxisOrder, PageShape

NAMES_ONLY = frozenset({"_name_or_path", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"})
"""The fields of a config.json that no cached value depends on."""


def form_of(config: Any, layer_name: str, version: str) -> str:
    """Return what names the form of packed blocks, "" where vLLM's attention layer does not say how it packs."""
    layers = getattr(getattr(config, "compilation_config", None), "static_forward_context", {})
    isa = getattr(layers.get(layer_name), "isa", None)
    return f"vllm {version} cpu_attn {isa} {torch.backends.cpu.get_cpu_capability()}" if isa else ""


def has_heads(model: str) -> bool:
    """Return whether the model of a checkpoint caches keys and values per head, and no latents."""
    return read_json(check_folder(model) / "config.json").get("kv_lora_rank") is None


def packed_layout(model: str, cache: torch.Tensor, num_layers: int, block_size: int, form: str) -> KVLayout:
    """Return the layout of `num_layers` caches like `cache` [blocks, heads, block_size, keys and values of a head],
    without an id of the weights. Raises ConfigError for another shape or an unknown form."""
    if cache.dim() != 4 or cache.shape[2] != block_size:
        raise ConfigError(
            f"PDInferConnector serves caches of (blocks, heads, {block_size}, keys and values), and this model has "
            f"some of {tuple(cache.shape)}"
        )
    if not form:
        raise ConfigError(
            "PDInferConnector serves keys and values per head as vLLM's CPU_ATTN packs them, and this model has "
            "another attention, which does not say how it does"
        )
    _, num_heads, _, width = cache.shape
    part = KVComponent(
        name="kv",
        format=form,
        dtype=str(cache.dtype).removeprefix("torch."),
        width=width,
        token_bytes=width * cache.itemsize,
        layers=tuple(range(num_layers)),
        shape=PageShape(heads=range(num_heads), num_heads=num_heads, order=AxisOrder.LBHNC, packed=True),
    )
    return KVLayout(model_id=_model_id(model), weights_id=b"", page_size=block_size, components=(part,))


def _model_id(model: str) -> bytes:
    """Return SHA-256 of a checkpoint's config.json without the fields that are only names."""
    config = read_json(check_folder(model) / "config.json")
    computed = {name: value for name, value in config.items() if name not in NAMES_ONLY}
    return hashlib.sha256(b"pdinfer config.json 1\n" + json.dumps(computed, sort_keys=True).encode()).digest()
