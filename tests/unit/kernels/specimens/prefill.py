"""Attention with many queries, attention to chosen positions, and the choice, at the sizes of DeepSeek-V3.2."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, PrefillCache, TokenCache
from pdinfer.kernels.triton import index_topk, mla_prefill, mla_sparse
from tests.unit.kernels.aot import Specimen, empty

PAGES, PAGE_SIZE, CHOSEN = 1024, 64, 2048
PACKED = torch.uint8


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return empty(*shape, dtype=dtype)


def latents(pages: torch.dtype) -> Tensor:
    return empty(PAGES, PAGE_SIZE, 656 if pages == PACKED else 576, dtype=pages)


def index_keys(pages: torch.dtype) -> Tensor:
    return empty(PAGES, PAGE_SIZE, 132 if pages == PACKED else 128, dtype=pages)


def prefill(heads: int, pages: torch.dtype = torch.bfloat16) -> Tensor:
    """Two prompts, one of them behind a prefix."""
    return mla_prefill.mla_prefill(
        empty(1500, heads, 192),
        empty(heads * 256, 512),
        PrefillCache(latents(pages), integers(2, 64, dtype=torch.int32), (1000, 500), (1000, 4000)),
        v_head_dim=128,
        scale=0.1,
    )


def chosen(tokens: int, heads: int, pages: torch.dtype = torch.bfloat16) -> Tensor:
    return mla_sparse.mla_sparse(
        empty(tokens, heads, 512),
        empty(tokens, heads, 64),
        TokenCache(latents(pages), integers(tokens, 512, dtype=torch.int32), integers(tokens)),
        integers(tokens, CHOSEN),
        scale=0.1,
    )


def choose(pages: torch.dtype = torch.bfloat16) -> Tensor:
    return index_topk.index_topk(
        empty(1500, 64, 128),
        empty(1500, 64, dtype=torch.float32),
        PrefillCache(index_keys(pages), integers(2, 64, dtype=torch.int32), (1000, 500), (1000, 4000)),
        top_k=CHOSEN,
    )


def choose_in_decode(pages: torch.dtype = torch.bfloat16) -> Tensor:
    return index_topk.index_topk_decode(
        empty(64, 2, 64, 128),
        empty(64, 2, 64, dtype=torch.float32),
        DecodeCache(index_keys(pages), integers(64, 512, dtype=torch.int32), integers(64)),
        top_k=CHOSEN,
    )


# Tables of pages, tiles and lengths, scales, and packed index keys at multiples of 4 bytes are narrow loads
SPECIMENS = [
    Specimen("mla_prefill of 16 heads", lambda: prefill(16), narrow=6),
    Specimen("mla_prefill of 16 heads, packed", lambda: prefill(16, PACKED), narrow=9),
    Specimen("mla_sparse of 128 heads", lambda: chosen(1024, 128), narrow=36),
    Specimen("mla_sparse of 128 heads, packed", lambda: chosen(32, 128, PACKED), narrow=36),
    Specimen("mla_sparse of 64 heads", lambda: chosen(1024, 64), narrow=36),
    Specimen("mla_sparse of 64 heads, packed, in parts", lambda: chosen(32, 64, PACKED), narrow=36),
    Specimen("mla_sparse of 16 heads, packed", lambda: chosen(1024, 16, PACKED), narrow=28),
    Specimen("mla_sparse of 16 heads, in parts", lambda: chosen(64, 16), narrow=36, full=True),
    Specimen("index_topk", choose, narrow=8),
    Specimen("index_topk, packed", lambda: choose(PACKED), narrow=24),
    Specimen("index_topk_decode", choose_in_decode, narrow=4),
    Specimen("index_topk_decode, packed", lambda: choose_in_decode(PACKED), narrow=36),
]
