"""Rows of experts of DeepSeek-V3: 256 experts, of which a token has 8."""

from __future__ import annotations

import torch

from pdinfer.kernels.triton import experts
from tests.unit.kernels.aot import Specimen, empty


def combine_experts(tokens: int) -> None:
    chosen = empty(tokens, 8, dtype=torch.int64), empty(tokens, 8, dtype=torch.float32)
    experts.combine_experts(empty(tokens * 8, 7168), *chosen, empty(tokens, 7168), empty(tokens, 7168))


SPECIMENS = (
    # a row and a weight for each choice
    Specimen("combine_experts of 7168", lambda: combine_experts(4096), narrow=8),
    Specimen("group_rows of 256", lambda: experts.group_rows(empty(4096, 8, dtype=torch.int64), 256), narrow=12),
)
