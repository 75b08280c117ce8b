"""Attention over pages of bfloat16, in both forms (`decode.c`, `prefill.c`)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdinfer.kernels import compositions
from pdinfer.kernels.arguments import DecodeCache, PrefillCache
from pdinfer.kernels.native import build, products
from pdinfer.kernels.native.rows import rotate
from pdinfer.kernels.torch import attention as torch_attention

PART_TOKENS = 1024
"""The longest part of a context that one thread reads in decode."""
KEYS = 4096
"""The keys and values expanded at a time in prefill: 64 MiB for 16 heads, whatever the length of the context."""
ABSORBED = ("heads_in", "rotate", "mla_decode", "heads_out")
"""The kernels of `mla_absorbed`."""


def mla_prefill(q_THQ: Tensor, kv_b_OC: Tensor, cache: PrefillCache, *, v_head_dim: int, scale: float) -> Tensor:
    num_heads, rank = q_THQ.shape[1], kv_b_OC.shape[1]
    nope = kv_b_OC.shape[0] // num_heads - v_head_dim
    rope = q_THQ.shape[-1] - nope
    readable = q_THQ.dtype == cache.pages_PGW.dtype == kv_b_OC.dtype == torch.bfloat16
    if v_head_dim % 64 or nope % 2 or rope % 2 or not readable:
        return torch_attention.mla_prefill(q_THQ, kv_b_OC, cache, v_head_dim=v_head_dim, scale=scale)
    library, page_size, q_THQ = build.library(), cache.page_size, q_THQ.contiguous()
    sums_THV = torch.zeros(*q_THQ.shape[:2], v_head_dim, dtype=torch.float32, device="cpu")
    largest_TH, total_TH = (
        torch.full(q_THQ.shape[:2], -math.inf, dtype=torch.float32, device="cpu"),
        torch.zeros(q_THQ.shape[:2], dtype=torch.float32, device="cpu"),
    )
    most = min(KEYS, max(cache.context_lens, default=0))
    num_scratch = library.prefill_scratch(most, num_heads, nope + rope, v_head_dim)
    scratch = torch.empty(num_scratch, dtype=torch.int32, device="cpu")
    step = KEYS // page_size * page_size
    for at, pages_M, context in cache.sequences():
        num_queries = at.stop - at.start
        for start in range(0, context if num_queries else 0, step):
            stop = min(start + step, context)
            part_M = pages_M[start // page_size : -(-stop // page_size)]
            cached = cache.pages_PGW.index_select(0, part_M).flatten(0, 1)[: stop - start]
            kv_SHX = products.linear_or_torch(cached[:, :rank], kv_b_OC)
            library.mla_prefill(
                q_THQ[at].data_ptr(), kv_SHX.data_ptr(), cached[:, rank:].data_ptr(), cached.stride(0), num_queries,
                stop - start, num_heads, nope, rope, v_head_dim, context - num_queries - start, scale,
                scratch.data_ptr(), sums_THV[at].data_ptr(), largest_TH[at].data_ptr(), total_TH[at].data_ptr(),
                torch.get_num_threads(),
            )  # fmt: skip
    return sums_THV.div_(total_TH[..., None]).to(q_THQ.dtype)


def mla_decode(q_latent_BQHC: Tensor, q_rope_BQHR: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
    batch, num_queries, num_heads, rank = q_latent_BQHC.shape
    width = cache.pages_PGW.shape[-1]
    readable = q_latent_BQHC.dtype == q_rope_BQHR.dtype == cache.pages_PGW.dtype == torch.bfloat16
    if not batch or rank % 32 or width % 32 or not readable or cache.lens_B.dtype != torch.int64:
        return torch_attention.mla_decode(q_latent_BQHC, q_rope_BQHR, cache, scale=scale)
    q_latent_BQHC, q_rope_BQHR = q_latent_BQHC.contiguous(), q_rope_BQHR.contiguous()
    table_BM, out = cache.table_BM.to(torch.int32).contiguous(), torch.empty_like(q_latent_BQHC)
    lacking = build.library().mla_decode(
        q_latent_BQHC.data_ptr(), q_rope_BQHR.data_ptr(), *_paged(cache, table_BM), num_queries, num_heads, width, rank,
        scale, PART_TOKENS, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if lacking:
        raise products.lacks(lacking, f"attention over {cache.lens_B.tolist()[:8]} tokens")
    return out


def _paged(cache: DecodeCache, table_BM: Tensor) -> tuple[int, ...]:
    """Return what the kernel of decode takes of a cache, whose table is dense int32 here."""
    batch, width = table_BM.shape
    return cache.pages_PGW.data_ptr(), table_BM.data_ptr(), width, cache.page_size, cache.lens_B.data_ptr(), batch


_APART: Any = SimpleNamespace(
    heads_in=products.heads_in, rotate=rotate, mla_decode=mla_decode, heads_out=products.heads_out
)
"""The ops one by one, for what C does not take."""


def mla_absorbed(
    q_THQ: Tensor, cos_TF: Tensor, sin_TF: Tensor, cache: DecodeCache, k_b_HNC: Tensor, v_b_HVC: Tensor, *, scale: float
) -> Tensor:
    rows, (_, nope, rank), width = q_THQ.shape[0], k_b_HNC.shape, q_THQ.shape[2]
    dense = k_b_HNC.stride()[1:] == v_b_HVC.stride()[1:] == (rank, 1) and all(
        each.is_contiguous() for each in (q_THQ, cache.pages_PGW, cos_TF, sin_TF)
    )
    floats = q_THQ.dtype == cache.pages_PGW.dtype == k_b_HNC.dtype == v_b_HVC.dtype == torch.bfloat16
    angles = cos_TF.dtype == sin_TF.dtype == torch.float32
    few = 0 < rows <= products.FEW_HEAD_ROWS and cache.lens_B.dtype == torch.int64
    sizes = nope % 2 == rank % 128 == (width - nope) % 32 == v_b_HVC.shape[1] % 8 == 0
    if not (dense and floats and angles and few and sizes):
        return compositions.mla_absorbed(_APART, q_THQ, cos_TF, sin_TF, cache, k_b_HNC, v_b_HVC, scale=scale)
    return _absorbed(q_THQ, (cos_TF.data_ptr(), sin_TF.data_ptr()), cache, k_b_HNC, v_b_HVC, scale)


def _absorbed(
    q_THQ: Tensor, angles: tuple[int, int], cache: DecodeCache, k_b_HNC: Tensor, v_b_HVC: Tensor, scale: float
) -> Tensor:
    table_BM = cache.table_BM.to(torch.int32).contiguous()
    (rows, heads, width), (_, nope, rank), outs = q_THQ.shape, k_b_HNC.shape, v_b_HVC.shape[1]
    rope, per_sequence, threads = width - nope, rows // table_BM.shape[0], torch.get_num_threads()
    out_THV, between = q_THQ.new_empty(rows, heads, outs), q_THQ.new_empty(rows, heads, 2 * rank + rope)
    size, q = q_THQ.itemsize, q_THQ.data_ptr()
    latent = between.data_ptr()
    attended = latent + size * rows * heads * rank
    rotated = attended + size * rows * heads * rank
    library, keys, values = build.library(), k_b_HNC.data_ptr(), v_b_HVC.data_ptr()
    lacking = library.heads_in(
        *(q, heads * width, width, rows, heads, nope), *(keys, k_b_HNC.stride(0), rank), latent, threads
    )
    library.rotate(q + size * nope, heads * width, width, rows, heads, rope // 2, *angles, rotated, threads)
    lacking = lacking or library.mla_decode(
        *(latent, rotated, *_paged(cache, table_BM), per_sequence, heads, rank + rope, rank),
        *(scale, PART_TOKENS, attended, threads),
    )
    lacking = lacking or library.heads_out(
        *(attended, heads * rank, rank, rows, heads, rank),
        *(values, v_b_HVC.stride(0), outs, out_THV.data_ptr(), threads),
    )
    if lacking:
        raise products.lacks(lacking, f"attention of {rows} tokens with {heads} heads")
    return out_THV
