"""Decode attention of DeepSeek-V3: 128 heads, or 16 of them on each of 8 ranks, one query of a sequence or more."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdinfer.kernels.arguments import DecodeCache
from pdinfer.kernels.triton import configs
from pdinfer.kernels.triton.mla_decode import mla_decode
from tests.unit.kernels.aot import Specimen


def decode(
    heads: int, queries: int = 1, *, packed: bool = False, page_size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], torch.Tensor]:
    """Return a call for 64 sequences of up to 8192 tokens."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pages = empty(9000, page_size, 656, dtype=torch.uint8) if packed else empty(9000, page_size, 576)
    table, lens = empty(64, 8192 // page_size, dtype=torch.int32), empty(64, dtype=torch.int64)
    q_latent, q_rope = empty(64, queries, heads, 512), empty(64, queries, heads, 64)
    return lambda: mla_decode(q_latent, q_rope, DecodeCache(pages, table, lens), scale=0.1)


NARROW = 16
"""Logarithms of 8 parts, which are loaded for their maximum and again for what they weigh."""

SPECIMENS = (
    Specimen("mla_decode, 16 heads", decode(16), NARROW),
    Specimen("mla_decode, 16 heads, 2 queries", decode(16, 2), NARROW),
    Specimen("mla_decode, 128 heads", decode(128), NARROW),
    Specimen("mla_decode, 16 heads, packed", decode(16, packed=True), NARROW),
    Specimen("mla_decode, 16 heads, 2 queries, packed", decode(16, 2, packed=True), NARROW),
    Specimen("mla_decode, 128 heads, packed", decode(128, packed=True), NARROW),
    *(
        Specimen(f"mla_decode, {heads} heads, pages of {size}", decode(heads, page_size=size), NARROW, full=True)
        for heads in (16, 32, 128)
        for size in (16, 32)
    ),
    *(
        Specimen(
            f"mla_decode, {heads} heads, packed, pages of 16",
            decode(heads, page_size=16, packed=True),
            NARROW,
            full=True,
        )
        for heads in (16, 32, 128)
    ),
    Specimen(
        "mla_decode, 16 heads, float32",
        decode(16, dtype=torch.float32),
        NARROW,
        configs.of_decode(16, "float32").exception,
        full=True,
    ),
)
