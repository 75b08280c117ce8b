"""Attention over pages of bfloat16, in both forms (`decode.c`, `prefill.c`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdinfer.kernels import compositions
from pdinfer.kernels.native import build, products
from pdinfer.kernels.native.calls import are, lacks
from pdinfer.kernels.native.rows import rotate
from pdinfer.kernels.torch import attention as torch_attention

PART_TOKENS = 1024
"""The longest part of a context that one thread reads in decode."""
KEYS = 4096
"""The keys and values expanded at a time in prefill: 64 MiB for 16 heads, whatever the length of the context."""
ABSORBED = ("heads_in", "rotate", "mla_decode", "heads_out")
"""The kernels of `mla_absorbed`."""


def mla_prefill(
    q_THQ: Tensor,
    pages_PGW: Tensor,
    kv_b_OC: Tensor,
    page_table_BM: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    v_head_dim: int,
    scale: float,
) -> Tensor:
    num_heads, rank = q_THQ.shape[1], kv_b_OC.shape[1]
    nope = kv_b_OC.shape[0] // num_heads - v_head_dim
    rope = q_THQ.shape[-1] - nope
    if v_head_dim % 64 or nope % 2 or rope % 2 or not are(torch.bfloat16, q_THQ, pages_PGW, kv_b_OC):
        return torch_attention.mla_prefill(
            q_THQ, pages_PGW, kv_b_OC, page_table_BM, query_lens, context_lens, v_head_dim=v_head_dim, scale=scale
        )
    page_size, q_THQ = pages_PGW.shape[1], q_THQ.contiguous()
    sums_THV = torch.zeros(*q_THQ.shape[:2], v_head_dim, dtype=torch.float32, device="cpu")
    largest_TH, total_TH = (
        torch.full(q_THQ.shape[:2], -math.inf, dtype=torch.float32, device="cpu"),
        torch.zeros(q_THQ.shape[:2], dtype=torch.float32, device="cpu"),
    )
    most = min(KEYS, max(context_lens, default=0))
    scratch = torch.empty(
        build.library().prefill_scratch(most, num_heads, nope + rope, v_head_dim), dtype=torch.int32, device="cpu"
    )
    first, step = 0, KEYS // page_size * page_size
    for row, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        at = slice(first, first + num_queries)
        for start in range(0, context if num_queries else 0, step):
            stop = min(start + step, context)
            table = page_table_BM[row, start // page_size : -(-stop // page_size)]
            cached = pages_PGW.index_select(0, table).flatten(0, 1)[: stop - start]
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
        first += num_queries
    return sums_THV.div_(total_TH[..., None]).to(q_THQ.dtype)


def mla_decode(
    q_latent_BQHC: Tensor,
    q_rope_BQHR: Tensor,
    pages_PGW: Tensor,
    page_table_BM: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    batch, num_queries, num_heads, rank = q_latent_BQHC.shape
    width = pages_PGW.shape[-1]
    readable = are(torch.bfloat16, q_latent_BQHC, q_rope_BQHR, pages_PGW) and are(torch.int64, context_lens_B)
    if not batch or rank % 32 or width % 32 or not readable:
        return torch_attention.mla_decode(
            q_latent_BQHC, q_rope_BQHR, pages_PGW, page_table_BM, context_lens_B, scale=scale
        )
    q_latent_BQHC, q_rope_BQHR = q_latent_BQHC.contiguous(), q_rope_BQHR.contiguous()
    page_table_BM = page_table_BM.to(torch.int32).contiguous()
    out = torch.empty_like(q_latent_BQHC)
    lacking = build.library().mla_decode(
        q_latent_BQHC.data_ptr(),
        q_rope_BQHR.data_ptr(),
        *_told(pages_PGW, page_table_BM, context_lens_B),
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
        raise lacks(lacking, f"attention over {context_lens_B.tolist()[:8]} tokens")
    return out


def _told(pages_PGW: Tensor, page_table_BM: Tensor, context_lens_B: Tensor) -> tuple[int, ...]:
    """Return what the kernel of decode learns of the cache."""
    batch, width = page_table_BM.shape
    return (pages_PGW.data_ptr(), page_table_BM.data_ptr(), width, pages_PGW.shape[1], context_lens_B.data_ptr(), batch)


_APART: Any = SimpleNamespace(
    heads_in=products.heads_in, rotate=rotate, mla_decode=mla_decode, heads_out=products.heads_out
)
"""The ops one by one, for what C does not take."""


def mla_absorbed(
    q_THQ: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    pages_PGW: Tensor,
    page_table_BM: Tensor,
    context_lens_B: Tensor,
    k_b_HNC: Tensor,
    v_b_HVC: Tensor,
    *,
    scale: float,
) -> Tensor:
    rows, (_, nope, rank), width = q_THQ.shape[0], k_b_HNC.shape, q_THQ.shape[2]
    dense = k_b_HNC.stride()[1:] == v_b_HVC.stride()[1:] == (rank, 1) and all(
        each.is_contiguous() for each in (q_THQ, pages_PGW, cos_TF, sin_TF)
    )
    floats = are(torch.bfloat16, q_THQ, pages_PGW, k_b_HNC, v_b_HVC) and are(torch.float32, cos_TF, sin_TF)
    few = 0 < rows <= products.FEW_HEAD_ROWS and are(torch.int64, context_lens_B)
    sizes = nope % 2 == rank % 128 == (width - nope) % 32 == v_b_HVC.shape[1] % 8 == 0
    if not (dense and floats and few and sizes):
        return compositions.mla_absorbed(
            _APART, q_THQ, cos_TF, sin_TF, pages_PGW, page_table_BM, context_lens_B, k_b_HNC, v_b_HVC, scale=scale
        )
    cache = pages_PGW, page_table_BM.to(torch.int32).contiguous(), context_lens_B
    return _absorbed(q_THQ, (cos_TF.data_ptr(), sin_TF.data_ptr()), cache, k_b_HNC, v_b_HVC, scale)


def _absorbed(
    q_THQ: Tensor,
    angles: tuple[int, int],
    cache: tuple[Tensor, Tensor, Tensor],
    k_b_HNC: Tensor,
    v_b_HVC: Tensor,
    scale: float,
) -> Tensor:
    (rows, heads, width), (_, nope, rank), outs = q_THQ.shape, k_b_HNC.shape, v_b_HVC.shape[1]
    rope, per_sequence, threads = width - nope, rows // cache[2].shape[0], torch.get_num_threads()
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
        *(latent, rotated, *_told(*cache), per_sequence, heads, rank + rope, rank),
        *(scale, PART_TOKENS, attended, threads),
    )
    lacking = lacking or library.heads_out(
        *(attended, heads * rank, rank, rows, heads, rank),
        *(values, v_b_HVC.stride(0), outs, out_THV.data_ptr(), threads),
    )
    if lacking:
        raise lacks(lacking, f"attention of {rows} tokens with {heads} heads")
    return out_THV
