"""Pages of DeepSeek-V3: 64 tokens of a layer in bfloat16 take 73.7 KB."""

from __future__ import annotations

import torch

from pdinfer.kernels.triton import cache
from tests.unit.kernels.aot import Specimen


def rows(number: int) -> torch.Tensor:
    return torch.empty(number, 64 * 576 * 2, dtype=torch.uint8, device="meta")


def chosen() -> torch.Tensor:
    return torch.empty(61 * 128, dtype=torch.int64, device="meta")


SPECIMENS = (
    Specimen("gather_pages of 73.7 KB", lambda: cache.gather_pages(rows(61_000), chosen(), rows(61 * 128))),
    Specimen("scatter_pages of 73.7 KB", lambda: cache.scatter_pages(rows(61_000), chosen(), rows(61 * 128))),
)
