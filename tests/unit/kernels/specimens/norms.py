"""Norms of DeepSeek-V3: the residual stream, latents of queries, and index keys."""

from __future__ import annotations

import torch

from pdinfer.kernels.triton import norms
from tests.unit.kernels.aot import Specimen


def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(4096, width, dtype=dtype, device="meta")


def add_rms_norm_fp8(ue8m0: bool) -> None:
    norms.add_rms_norm_fp8(rows(7168), rows(7168), rows(7168)[0], 1e-6, ue8m0=ue8m0)


SPECIMENS = (
    Specimen("rms_norm of 7168", lambda: norms.rms_norm(rows(7168), rows(7168)[0], 1e-6)),
    Specimen("rms_norm of 1536", lambda: norms.rms_norm(rows(1536), rows(1536)[0], 1e-6)),
    Specimen("layer_norm of 128", lambda: norms.layer_norm(rows(128), rows(128)[0], rows(128)[0], 1e-6)),
    Specimen("add_rms_norm of 7168", lambda: norms.add_rms_norm(rows(7168), rows(7168), rows(7168)[0], 1e-6)),
    Specimen("add_rms_norm_fp8 of 7168", lambda: add_rms_norm_fp8(False)),
    Specimen("add_rms_norm_fp8 of 7168, ue8m0", lambda: add_rms_norm_fp8(True)),
)
