"""A stand-in for the library flash_mla on host tensors: its checks on a Hopper card, and what its kernels compute.

They round weights of the softmax to bfloat16, give the log-sum-exp of a row without a key as +inf, and multiply rows
that a causal mask hides by 0. Read at FlashMLA 9241ae3 (2026-04-29): csrc/api/dense_decode.h and
csrc/sm90/decode/dense/splitkv_mla.cuh; the older interfaces at c28eca9 and 261330b.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats import cache_rows

MULTIPROCESSORS = 132
TILE_ROWS = 64


def num_parts(rows: int) -> int:
    """Return how many parts a dense plan has where a sequence has so many rows: queries times heads."""
    return max(MULTIPROCESSORS // -(-rows // TILE_ROWS), 1)


@attrs.define
class Plan:
    """The plan of a newer version: of the first call that it is given to."""

    of: tuple[Any, ...] | None = None


def _lazy_metadata(*_: Any, **__: Any) -> tuple[Plan, None]:
    return Plan(), None


def _metadata(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert topk is None or (num_heads_q is not None and is_fp8_kvcache)
    assert num_q_tokens_per_head_k > 0
    assert num_heads_k == 1
    plan = cache_seqlens.new_tensor([-1 if topk is None else topk, num_q_tokens_per_head_k])
    parts = num_parts(num_q_tokens_per_head_k) if topk is None else MULTIPROCESSORS
    return plan.repeat(parts, 4), cache_seqlens.new_zeros(len(cache_seqlens) + 1)


def _dense_metadata(cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int) -> tuple[Tensor, Tensor]:
    return _metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)


def _with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Tensor | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, num_queries, num_heads, width = q.shape
    topk = None if indices is None else indices.shape[-1]
    if isinstance(tile_scheduler_metadata, Plan):
        assert num_splits is None
        shapes = (batch, num_queries, num_heads, k_cache.shape[1], causal, is_fp8_kvcache, topk)
        lens = cache_seqlens.tolist() if indices is None else None
        tile_scheduler_metadata.of = tile_scheduler_metadata.of or (shapes, lens)
        assert tile_scheduler_metadata.of == (shapes, lens)
    else:
        parts = num_parts(num_queries * num_heads) if topk is None else MULTIPROCESSORS
        assert tile_scheduler_metadata.shape == (parts, 8)
        assert tile_scheduler_metadata[0, :2].tolist() == [-1 if topk is None else topk, num_queries * num_heads]
        assert num_splits is not None
        assert num_splits.shape == (batch + 1,)
    assert batch > 0
    assert (q.dtype, cache_seqlens.dtype, block_table.dtype) == (torch.bfloat16, torch.int32, torch.int32)
    assert (q.device, cache_seqlens.device, block_table.device) == (k_cache.device,) * 3
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
    assert cache_seqlens.is_contiguous()
    assert cache_seqlens.shape == (batch,)
    assert len(block_table) == batch
    assert (width, head_dim_v) == (576, 512)
    assert k_cache.shape[1:3] == (64, 1)
    assert k_cache.data_ptr() % 16 == 0
    assert softmax_scale is not None
    if indices is not None:
        assert not causal
        assert is_fp8_kvcache
        return _sparse(q, k_cache, indices, softmax_scale)
    assert not is_fp8_kvcache
    assert k_cache.dtype == torch.bfloat16
    assert k_cache.shape[3] == 576
    assert num_queries == 1 or causal  # or drafts see each other
    assert int(cache_seqlens.min()) > 0
    out, lse = torch.empty_like(q[..., :512]), q.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
    for row, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[row, : math.ceil(length / 64)]
        rows = k_cache[pages, :, 0].flatten(0, 1)[:length].float()
        for query in range(num_queries):
            hidden = num_queries - 1 - query if causal else 0
            scores = q[row, query].float() @ rows.T * softmax_scale
            scores[:, max(0, length - hidden) :] = -torch.inf
            out[row, query], lse[row, :, query] = _attend(scores, rows[:, :512])
    return out, lse


def _sparse(q: Tensor, k_cache: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, num_queries, num_heads, _ = q.shape
    assert num_heads in (64, 128)
    assert k_cache.dtype == torch.uint8
    assert k_cache.shape[3] == k_cache.stride(1) == 656
    assert indices.dtype == torch.int32
    assert indices.stride(-1) == 1
    assert indices.shape[:2] == (batch, num_queries)
    assert indices.shape[2] % 64 == 0
    assert indices.shape[2] > 0
    slots = k_cache.flatten(0, 1)[:, 0]
    out, lse = torch.empty_like(q[..., :512]), q.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
    for row in range(batch):
        for query in range(num_queries):
            chosen = indices[row, query].long()
            rows = cache_rows.latents(slots[chosen.clamp_min(0)], 512, torch.bfloat16).float()
            rows[chosen < 0] = 0
            scores = q[row, query].float() @ rows.T * scale
            scores[:, chosen < 0] = -torch.inf
            out[row, query], lse[row, :, query] = _attend(scores, rows[:, :512])
    return out, lse


def _attend(scores_HS: Tensor, latents_SC: Tensor) -> tuple[Tensor, Tensor]:
    lse_H = scores_HS.logsumexp(-1)
    lonely_H = lse_H == -torch.inf
    weights_HS = (scores_HS - lse_H[:, None]).exp().to(torch.bfloat16).float()
    out_HC = (weights_HS @ latents_SC).masked_fill(lonely_H[:, None], 0)
    return out_HC.to(torch.bfloat16), lse_H.masked_fill(lonely_H, torch.inf)


def build(name: str) -> ModuleType:
    """Return the library of "2026", whose plan is lazy; of "2025", whose plan is a pair of tensors; or "dense", which
    is "2025" before it had sparse attention."""
    module = ModuleType("flash_mla")
    with_kvcache: Any = _with_kvcache
    if name == "dense":

        def with_kvcache(  # type: ignore[no-redef]
            q: Tensor,
            k_cache: Tensor,
            block_table: Tensor,
            cache_seqlens: Tensor,
            head_dim_v: int,
            tile_scheduler_metadata: Any,
            num_splits: Tensor | None,
            softmax_scale: float | None = None,
            causal: bool = False,
        ) -> tuple[Tensor, Tensor]:
            plan = (tile_scheduler_metadata, num_splits)
            return _with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, *plan, softmax_scale, causal)

    plans = {"dense": _dense_metadata, "2025": _metadata, "2026": _lazy_metadata}
    module.get_mla_metadata = plans[name]  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = with_kvcache  # type: ignore[attr-defined]
    return module
