"""The provider "triton": which family has each op, and why it refuses. Imports Triton when the first op is taken."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType, ModuleType
from typing import Any

from pdinfer.kernels.ops import function_of
from pdinfer.kernels.spec import OpSpec

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "norms": ("rms_norm", "layer_norm", "add_rms_norm", "add_rms_norm_fp8"),
        "activations": ("gated_silu", "gated_silu_fp8", "quantize_fp8", "round_fp8", "round_int8"),
        "cache": (
            *("rotate", "store_latent", "store_index_keys", "norm_rotate_store"),
            *("gather_pages", "scatter_pages"),
        ),
        "experts": ("group_rows", "combine_rows", "combine_experts"),
        "routing": ("route",),
        "draws": ("draw",),
        "mla_prefill": ("mla_prefill",),
        "mla_sparse": ("mla_sparse",),
        "index_topk": ("index_topk", "index_topk_decode"),
        "mla_decode": ("mla_decode",),
        "products": (
            *("linear[fp8]", "linear[w8a8_dynamic]", "linear[w8a8]", "linear[int4]", "linear[mxfp4]"),
            *("grouped_mlp", "grouped_mlp[fp8]", "grouped_mlp[w8a8_dynamic]"),
            *("grouped_mlp[int4]", "grouped_mlp[mxfp4]"),
        ),
    }
)
"""The ops of each module in this folder. A family may have `refuses(op, spec)`, as a provider may."""
PLACES = MappingProxyType({op: family for family, ops in FAMILIES.items() for op in ops})
"""The family of each op that it has."""
OLDEST = (3, 4)
CAPABILITY = (9, 0)


def function(op: str) -> Any:
    """Return the function of an op, and import its family then."""
    return function_of(_family(op), op)


def _family(op: str) -> ModuleType:
    return importlib.import_module(f"pdinfer.kernels.triton.{PLACES[op]}")


def unavailable(spec: OpSpec) -> str | None:
    """Return why nothing of it can run on a device, or None: it takes CUDA cards, and CPUs where TRITON_INTERPRET=1
    makes Triton run kernels in Python."""
    device = spec.device
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "is for CUDA, device is cpu (TRITON_INTERPRET=1 is for tests)"
    elif device.type != "cuda":
        return f"is for CUDA, device is {device}"
    elif device.capability is None or device.capability < CAPABILITY:
        known = "an unknown one" if device.capability is None else "{}.{}".format(*device.capability)
        return f"is for compute capability 9.0 and more, {device} has {known}"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "is not installed; pip install 'pdinfer[triton]'"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"must be 3.4 or newer, found {version}"
    return None


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return why the op's family does not serve it for these sizes and formats, or None where it does."""
    reason: str | None = None
    if hasattr(family := _family(op), "refuses"):
        reason = family.refuses(op, spec)
    return reason
