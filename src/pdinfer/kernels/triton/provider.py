"""The provider "triton": which family has each op, and why it refuses. Imports Triton when the first op is taken."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType, ModuleType
from typing import Any

from pdinfer.kernels.spec import OpSpec

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "norms": ("rms_norm", "layer_norm", "add_rms_norm", "add_rms_norm_fp8"),
        "activations": ("gated_silu", "gated_silu_fp8", "quantize_fp8", "round_fp8", "round_int8"),
        "cache": ("rotate", "store_latent", "store_index_keys", "norm_rotate_store"),
        "experts": ("group_rows", "combine_rows", "combine_experts"),
        "pages": ("gather_pages", "scatter_pages"),
        "routing": ("route",),
        "draws": ("draw",),
        "products": ("linear_fp8", "linear_int8", "linear_int8_static"),
        "grouped": ("grouped_mlp", "grouped_mlp_fp8", "grouped_mlp_int8"),
        "mla_prefill": ("mla_prefill",),
        "mla_sparse": ("mla_sparse",),
        "index_topk": ("index_topk", "index_topk_decode"),
        "mla_decode": ("mla_decode",),
    }
)
"""The ops of each module beside this one. A family also has `refuses(op, spec)`, and may have `slow(op, spec)`, as a
provider has."""
OLDEST = (3, 4)
CAPABILITY = (9, 0)
_FAMILY_OF = MappingProxyType({op: family for family, ops in FAMILIES.items() for op in ops})


def __getattr__(name: str) -> Any:
    """Return an op, and import its family then."""
    if name not in _FAMILY_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_family(name), name)


def __dir__() -> list[str]:
    return [*globals(), *_FAMILY_OF]


def _family(op: str) -> ModuleType:
    return importlib.import_module(f"pdinfer.kernels.triton.{_FAMILY_OF[op]}")


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
    refusal: str | None = _family(op).refuses(op, spec)
    return refusal


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    family = _family(op)
    sentence: str | None = family.slow(op, spec) if hasattr(family, "slow") else None
    return sentence
