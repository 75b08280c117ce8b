"""Expanded attention of many queries per sequence: the context is copied out of its pages once, keys and values of each
head are one product with it, and tiles of queries of all sequences attend in one launch (FlashAttention-2, arXiv
2307.08691, algorithm 1)."""

from __future__ import annotations

import math

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.arguments import PrefillCache
from pdinfer.kernels.triton.configs import of_prefill
from pdinfer.kernels.triton.launch import launch, need
from pdinfer.kernels.triton.tiles import (
    copy_latents,
    dot,
    need_queries,
    padded,
    padded_parts,
    table_of,
    tiles_of,
    upcasts,
    weigh,
)

EXPANDED_BYTES = 512 << 20
"""The memory for keys and values: heads of a long context are expanded in groups that fit."""


def mla_prefill(q_THQ: Tensor, kv_b_OC: Tensor, cache: PrefillCache, *, v_head_dim: int, scale: float) -> Tensor:
    (num_tokens, num_heads, head_dim), (rows, rank) = q_THQ.shape, kv_b_OC.shape
    nope = rows // num_heads - v_head_dim
    rope = head_dim - nope
    need(rows == num_heads * (nope + v_head_dim) and nope > 0 and rope > 0, "kv_b has no rows for all heads")
    need_queries(cache, num_tokens)
    out_THV = q_THQ.new_empty(num_tokens, num_heads, v_head_dim)
    if not num_tokens:
        return out_THV
    config = of_prefill(q_THQ.dtype)
    # those that read most start first, so that none is left alone at the end
    tiles = sorted(tiles_of(cache, config.tiles["BLOCK_Q"]), key=lambda tile: -tile.end)
    table = table_of(tiles, 4, q_THQ.device)
    c_SC, k_rope_SR = copy_latents(cache, rank, rope, q_THQ.dtype)
    q_TN = padded_parts(q_THQ, (nope, rope), -1).flatten(1)
    kv_b_HOC = padded_parts(kv_b_OC.view(num_heads, -1, rank), (nope, v_head_dim), 1)
    kv_b_HOC = F.pad(kv_b_HOC, (0, c_SC.shape[1] - rank)) if c_SC.shape[1] > rank else kv_b_HOC
    group = max(1, EXPANDED_BYTES // (len(c_SC) * kv_b_HOC.shape[1] * c_SC.element_size()))
    for first in range(0, num_heads, group):
        kv_b = kv_b_HOC[first : first + group]
        kv_SN = F.linear(c_SC, kv_b.flatten(0, 1))
        launch(
            _attend, (len(table), len(kv_b)),
            q_TN, kv_SN, k_rope_SR, out_THV, table, num_tokens, len(c_SC), q_TN.shape[1], kv_SN.shape[1],
            out_THV.stride(0), first, v_head_dim, scale * math.log2(math.e),
            NOPE=padded(nope), ROPE=padded(rope), VALUE=padded(v_head_dim), UPCAST=upcasts(q_TN), **config.constants,
        )  # fmt: skip
    return out_THV


@triton.jit
def _attend(
    q_ptr, kv_ptr, rope_ptr, out_ptr, tiles_ptr, num_tokens, num_rows, q_pitch, kv_pitch, out_pitch, first_head,
    v_head_dim, scale, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries in one head. `scale` is that of the softmax in base 2."""
    tile, own = tl.program_id(0), tl.program_id(1)
    head = first_head + own
    first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
    position, row = tl.load(tiles_ptr + tile * 4 + 2), tl.load(tiles_ptr + tile * 4 + 3)
    # rows of the next sequence's queries come along, and are not stored
    q_nope_at = tl.make_tensor_descriptor(q_ptr, [num_tokens, q_pitch], [q_pitch, 1], [BLOCK_Q, NOPE])
    q_rope_at = tl.make_tensor_descriptor(q_ptr, [num_tokens, q_pitch], [q_pitch, 1], [BLOCK_Q, ROPE])
    q_nope = q_nope_at.load([first_token, head * (NOPE + ROPE)])
    q_rope = q_rope_at.load([first_token, head * (NOPE + ROPE) + NOPE])
    k_at = tl.make_tensor_descriptor(kv_ptr, [num_rows, kv_pitch], [kv_pitch, 1], [BLOCK_S, NOPE])
    v_at = tl.make_tensor_descriptor(kv_ptr, [num_rows, kv_pitch], [kv_pitch, 1], [BLOCK_S, VALUE])
    k_rope_at = tl.make_tensor_descriptor(rope_ptr, [num_rows, ROPE], [ROPE, 1], [BLOCK_S, ROPE])
    column = own * (NOPE + VALUE)
    last = position + tl.arange(0, BLOCK_Q)

    out = tl.zeros([BLOCK_Q, VALUE], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    lowest = tl.full([BLOCK_Q], float("inf"), tl.float32)
    seen_by_all = (position + 1) // BLOCK_S * BLOCK_S
    for start in range(0, seen_by_all, BLOCK_S):
        at = row + start
        scores = dot(q_nope, k_at.load([at, column]).T, None, UPCAST)
        scores = dot(q_rope, k_rope_at.load([at, 0]).T, scores, UPCAST) * scale
        lowest = tl.minimum(lowest, tl.min(scores, 1))
        out, total, highest = weigh(scores, v_at.load([at, column + NOPE]), out, total, highest, UPCAST)
    for start in range(seen_by_all, position + count, BLOCK_S):
        at = row + start
        scores = dot(q_nope, k_at.load([at, column]).T, None, UPCAST)
        scores = dot(q_rope, k_rope_at.load([at, 0]).T, scores, UPCAST) * scale
        future = (start + tl.arange(0, BLOCK_S))[None, :] > last[:, None]
        lowest = tl.minimum(lowest, tl.min(tl.where(future, 0, scores), 1))
        scores = tl.where(future, float("-inf"), scores)
        out, total, highest = weigh(scores, v_at.load([at, column + NOPE]), out, total, highest, UPCAST)

    out = out / (total + lowest * 0)[:, None]
    token, value = tl.arange(0, BLOCK_Q), tl.arange(0, VALUE)
    out_at = out_ptr + (first_token + token).to(tl.int64)[:, None] * out_pitch + head * v_head_dim + value[None, :]
    there = (token < count)[:, None] & (value < v_head_dim)[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), there)
