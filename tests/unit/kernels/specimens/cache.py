"""Rotary positions and the cache of DeepSeek-V3 and V3.2: 128 heads of 128 and 64 elements, pages of 64 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels.formats.format import Rounding
from pdinfer.kernels.triton import cache
from tests.unit.kernels.aot import Specimen, empty

TOKENS = 4096


def pages(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return empty(1000, 64, width, dtype=dtype), empty(TOKENS, dtype=torch.int64)


def angles() -> tuple[Tensor, Tensor]:
    return empty(TOKENS, 32, dtype=torch.float32), empty(TOKENS, 32, dtype=torch.float32)


def latent() -> tuple[Tensor, Tensor]:
    """What kv_a_proj returns, in two parts."""
    return empty(TOKENS, 576).split((512, 64), -1)  # type: ignore[return-value]


def norm_rotate_store(width: int, dtype: torch.dtype, rounding: Rounding | None) -> None:
    cache.norm_rotate_store(*latent(), empty(512), 1e-6, *angles(), *pages(width, dtype), rounding=rounding)


KEY, TURNED_KEY = 1, 3
"""Narrow loads: all threads of a block load a key of 128 bytes at once, and its angles."""

SPECIMENS = (
    Specimen("rotate 128 heads", lambda: cache.rotate(empty(TOKENS, 128, 192)[..., 128:], *angles())),
    Specimen("rotate 64 heads by halves", lambda: cache.rotate(empty(TOKENS, 64, 64), *angles(), interleaved=False)),
    Specimen("store_latent in bfloat16", lambda: cache.store_latent(*pages(576, torch.bfloat16), *latent()), KEY),
    Specimen("store_latent in 656 bytes", lambda: cache.store_latent(*pages(656, torch.uint8), *latent()), KEY),
    Specimen("norm_rotate_store", lambda: norm_rotate_store(576, torch.bfloat16, None), TURNED_KEY),
    Specimen("norm_rotate_store, FP8", lambda: norm_rotate_store(576, torch.bfloat16, Rounding.FP8), TURNED_KEY),
    Specimen("norm_rotate_store, INT8", lambda: norm_rotate_store(576, torch.bfloat16, Rounding.INT8), TURNED_KEY),
    Specimen("norm_rotate_store in 656 bytes", lambda: norm_rotate_store(656, torch.uint8, Rounding.FP8), TURNED_KEY),
    Specimen(
        "store_index_keys in 132 bytes",
        lambda: cache.store_index_keys(*pages(132, torch.uint8), empty(TOKENS, 128)),
    ),
)
