"""Kernels in C for bfloat16 models on x86 CPUs, compiled on first use (docs/decisions/): what is served, and attention.

An op whose shape gains nothing here goes to torch, and so do inputs that the kernels cannot read: other dtypes than
those they are made for, or strides. They use `torch.get_num_threads` threads.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.arguments import DecodeCache, PrefillCache
from pdinfer.kernels.native import build, fused, products, rows
from pdinfer.kernels.native.calls import are, lacks
from pdinfer.kernels.ops import name_of
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.process.compiled import cpu_flags

MODULES = (sys.modules[__name__], products, rows, fused)
KERNELS = {
    "linear[w8a8_dynamic]": "linear_int8",
    "grouped_mlp": "experts",
    "grouped_mlp[fp8]": "linear_fp8",
    "grouped_mlp[w8a8_dynamic]": "experts_int8",
    "grouped_mlp[strips]": "experts_strips",
    "grouped_mlp[fp8_strips]": "experts_fp8_strips",
    "draw": "draw_greedy",
}
"""The function of an op in C, where it has another name than in Python."""
PART_TOKENS = 1024
"""The longest part of a context that one thread reads in decode."""
KEYS = 4096
"""The keys and values expanded at a time in prefill: 64 MiB for 16 heads, whatever the length of the context."""


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
    reason = build.library().why_not(KERNELS.get(op, name_of(op)))
    if reason is not None:
        return str(reason)
    rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    if op.endswith("[strips]") and not build.library().strips_are_served():
        return "leaves many rows to torch on this CPU (AVX-512 BF16 and no AMX), which reads plain matrices"
    if op.endswith("[fp8_strips]") and not build.library().fp8_strips_are_served():
        return "is for CPUs whose products of bfloat16 are made of floats: with AVX2, and without AVX-512 BF16 and AMX"
    if op in ("mla_decode", "mla_prefill") and spec.kv_format == "fp8":
        return "reads pages of bfloat16, these are packed FP8"
    if op == "mla_prefill" and "amx_bf16" in cpu_flags():
        return "multiplies vectors, and torch's attention multiplies tiles on this CPU (AMX)"
    if op == "mla_decode" and rank is not None and rope is not None and (rank % 32 or rope % 32):
        return f"reads latents and rotary keys in steps of 32 elements, they have {rank} and {rope}"
    return None


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    if op.endswith("[fp8]") and not build.library().fp8_strips_are_served():
        return "takes longer to read FP8 weights than bfloat16 takes"
    return None


def mla_prefill(q_THQ: Tensor, kv_b_OC: Tensor, cache: PrefillCache, *, v_head_dim: int, scale: float) -> Tensor:
    num_heads, rank = q_THQ.shape[1], kv_b_OC.shape[1]
    nope = kv_b_OC.shape[0] // num_heads - v_head_dim
    rope = q_THQ.shape[-1] - nope
    if v_head_dim % 64 or nope % 2 or rope % 2 or not are(torch.bfloat16, q_THQ, cache.pages_PGW, kv_b_OC):
        return torch_attention.mla_prefill(q_THQ, kv_b_OC, cache, v_head_dim=v_head_dim, scale=scale)
    page_size, q_THQ = cache.page_size, q_THQ.contiguous()
    sums_THV = torch.zeros(*q_THQ.shape[:2], v_head_dim, dtype=torch.float32, device="cpu")
    largest_TH, total_TH = (
        torch.full(q_THQ.shape[:2], -math.inf, dtype=torch.float32, device="cpu"),
        torch.zeros(q_THQ.shape[:2], dtype=torch.float32, device="cpu"),
    )
    most = min(KEYS, max(cache.context_lens, default=0))
    scratch = torch.empty(
        build.library().prefill_scratch(most, num_heads, nope + rope, v_head_dim), dtype=torch.int32, device="cpu"
    )
    step = KEYS // page_size * page_size
    for at, pages_M, context in cache.sequences():
        num_queries = at.stop - at.start
        for start in range(0, context if num_queries else 0, step):
            stop = min(start + step, context)
            part_M = pages_M[start // page_size : -(-stop // page_size)]
            cached = cache.pages_PGW.index_select(0, part_M).flatten(0, 1)[: stop - start]
            kv_SHX = products.linear_or_torch(cached[:, :rank], kv_b_OC)
            build.library().mla_prefill(
                q_THQ[at].data_ptr(),
                kv_SHX.data_ptr(),
                cached[:, rank:].data_ptr(),
                cached.stride(0),
                num_queries,
                stop - start,
                num_heads,
                nope,
                rope,
                v_head_dim,
                context - num_queries - start,
                scale,
                scratch.data_ptr(),
                sums_THV[at].data_ptr(),
                largest_TH[at].data_ptr(),
                total_TH[at].data_ptr(),
                torch.get_num_threads(),
            )
    return sums_THV.div_(total_TH[..., None]).to(q_THQ.dtype)


def mla_decode(q_latent_BQHC: Tensor, q_rope_BQHR: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
    batch, num_queries, num_heads, rank = q_latent_BQHC.shape
    pages_PGW, lens_B, width = cache.pages_PGW, cache.lens_B, cache.pages_PGW.shape[-1]
    readable = are(torch.bfloat16, q_latent_BQHC, q_rope_BQHR, pages_PGW) and are(torch.int64, lens_B)
    if not batch or rank % 32 or width % 32 or not readable:
        return torch_attention.mla_decode(q_latent_BQHC, q_rope_BQHR, cache, scale=scale)
    q_latent_BQHC, q_rope_BQHR = q_latent_BQHC.contiguous(), q_rope_BQHR.contiguous()
    table_BM = cache.table_BM.to(torch.int32).contiguous()
    out = torch.empty_like(q_latent_BQHC)
    lacking = build.library().mla_decode(
        q_latent_BQHC.data_ptr(),
        q_rope_BQHR.data_ptr(),
        pages_PGW.data_ptr(),
        table_BM.data_ptr(),
        table_BM.shape[1],
        cache.page_size,
        lens_B.data_ptr(),
        batch,
        num_queries,
        num_heads,
        width,
        rank,
        scale,
        PART_TOKENS,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if lacking:
        raise lacks(lacking, f"attention over {lens_B.tolist()[:8]} tokens")
    return out
