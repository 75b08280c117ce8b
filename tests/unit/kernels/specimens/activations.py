"""Activations of DeepSeek-V3: 8 experts of 4,096 tokens, and the rows of products in FP8 and INT8."""

from __future__ import annotations

import torch

from pdinfer.kernels.triton import activations
from tests.unit.kernels.aot import Specimen


def rows(width: int) -> torch.Tensor:
    return torch.empty(4096, width, dtype=torch.bfloat16, device="meta")


def in_room() -> object:
    """Room of DeepEP's low-latency mode, for 256 tokens of each of 32 ranks."""
    x = torch.empty(9, 8192, 4096, dtype=torch.bfloat16, device="meta")
    return activations.gated_silu_fp8(x, ue8m0=False, counts_E=torch.empty(9, dtype=torch.int32, device="meta"))


SPECIMENS = (
    Specimen("gated_silu of 2 x 2048", lambda: activations.gated_silu(rows(4096))),
    Specimen("gated_silu_fp8 of 2 x 2048", lambda: activations.gated_silu_fp8(rows(4096), ue8m0=False)),
    Specimen("gated_silu_fp8 of 2 x 2048, ue8m0", lambda: activations.gated_silu_fp8(rows(4096), ue8m0=True)),
    Specimen("gated_silu_fp8 of 2 x 2048, in room", in_room, narrow=1),
    Specimen("quantize_fp8 of 7168", lambda: activations.quantize_fp8(rows(7168), ue8m0=False)),
    Specimen("quantize_fp8 of 7168, ue8m0", lambda: activations.quantize_fp8(rows(7168), ue8m0=True)),
    Specimen("round_fp8 of 512", lambda: activations.round_fp8(rows(512), ue8m0=False)),
    Specimen("round_int8 of 7168", lambda: activations.round_int8(rows(7168))),
)
