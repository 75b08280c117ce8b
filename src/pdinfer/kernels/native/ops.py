"""Kernels in C for bfloat16 models on x86 CPUs, compiled on first use (docs/decisions/): what is served.

An op whose shape gains nothing here goes to torch, and so do inputs that the kernels cannot read: other dtypes than
those they are made for, or strides. They use `torch.get_num_threads` threads."""

from __future__ import annotations

import torch

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.native import attention, build, products, rows
from pdinfer.kernels.ops import name_of
from pdinfer.kernels.spec import OpSpec
from pdinfer.process.compiled import cpu_flags

MODULES = (attention, products, rows)
KERNELS = {
    "linear[w8a8_dynamic]": "linear_int8",
    "grouped_mlp": "experts",
    "grouped_mlp[fp8]": "linear_fp8",
    "grouped_mlp[w8a8_dynamic]": "experts_int8",
    "grouped_mlp[strips]": "experts_strips",
    "grouped_mlp[fp8_strips]": "experts_fp8_strips",
    **dict.fromkeys(("linear[int4]", "linear[mxfp4]"), "linear_four_bits"),
    **dict.fromkeys(("linear[int4_strips]", "linear[mxfp4_strips]"), "linear_four_bits"),
    **dict.fromkeys(("grouped_mlp[int4]", "grouped_mlp[mxfp4]"), "experts_four_bits"),
    **dict.fromkeys(("grouped_mlp[int4_strips]", "grouped_mlp[mxfp4_strips]"), "experts_four_bits"),
    "draw": "draw_greedy",
    "gated_mlp": "experts",
}
"""The function of an op in C, where it has another name than in Python."""


def kernels_of(op: str) -> tuple[str, ...]:
    """Return the functions in C that an op calls."""
    return attention.ABSORBED if op == "mla_absorbed" else (KERNELS.get(op, name_of(op)),)


def unavailable(spec: OpSpec) -> str | None:
    """Return a sentence when this machine or dtype cannot have these kernels, and None when it can."""
    if spec.device.type != "cpu":
        return f"is for CPUs, device is {spec.device}"
    if spec.dtype != torch.bfloat16:
        return f"is for bfloat16, the model runs in {spec.dtype}"
    try:
        build.library()
    except BackendUnavailable as error:
        return str(error)
    return None


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return a sentence when the kernel of an op is not there or was not made for these sizes, else None."""
    if reason := next(filter(None, map(build.library().why_not, kernels_of(op))), None):
        return str(reason)
    rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    if op.endswith("[strips]") and not build.library().strips_are_served():
        return "leaves many rows to torch on this CPU (AVX-512 BF16 and no AMX), which reads plain matrices"
    if op.endswith("[fp8_strips]") and not build.library().fp8_strips_are_served():
        return "is for CPUs whose products of bfloat16 are made of floats: with AVX2, and without AVX-512 BF16 and AMX"
    if op in ("mla_decode", "mla_absorbed", "mla_prefill") and spec.kv_format == "fp8":
        return "reads pages of bfloat16, these are packed FP8"
    if op == "mla_prefill" and "amx_bf16" in cpu_flags():
        return "multiplies vectors, and torch's attention multiplies tiles on this CPU (AMX)"
    if op in ("mla_decode", "mla_absorbed") and rank is not None and rope is not None and (rank % 32 or rope % 32):
        return f"reads latents and rotary keys in steps of 32 elements, they have {rank} and {rope}"
    return None


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    if op.endswith("[fp8]") and not build.library().fp8_strips_are_served():
        return "takes longer to read FP8 weights than bfloat16 takes"
    return None
