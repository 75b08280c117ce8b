"""Experts by torch: one after the other on a CPU, without a look at the counts on a device.

A device's decode step must not wait for the host, so that a CUDA graph can hold it. There experts run as one grouped
product where torch has it, and else each on all rows, of which it keeps its own. Many rows, which are prefill's, wait
for the counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows, INT8Rows, ScaledRows
from pdinfer.kernels.formats.format import Weight
from pdinfer.kernels.formats.four_bits import FourBits
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.weights import expert
from pdinfer.kernels.reference import gated_silu
from pdinfer.kernels.spec import DeviceSpec
from pdinfer.kernels.torch.products import (
    card,
    linear,
    linear_fp8,
    linear_int4,
    linear_w8a8_dynamic,
    multiply_int8,
    quantize_fp8,
)

FEW_ROWS = 1024
"""Up to this many rows (a decode step of 128 tokens with 8 experts each) every expert runs on all rows. Beyond it the
products that are thrown away would take longer than to wait for the counts."""
GROUPED_STEP = 8
"""A grouped product reads rows of a multiple of 16 bytes."""
GROUPED_MAX_EXPERTS = 1023


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    if x.ndim == 3 and x.device.type != "cpu":
        return torch.bmm(gated_silu(torch.bmm(x, gate_up_EJD.mT)), down_EDI.mT)
    if len(x) and x.ndim == 2 and groups(card(x.device), x, gate_up_EJD, down_EDI):
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(gated_silu(F.grouped_mm(x, gate_up_EJD.mT, offs=ends_E)), down_EDI.mT, offs=ends_E)
    return run_experts(linear, x, counts_E, gate_up_EJD, down_EDI)


def groups(device: DeviceSpec, x_SD: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> bool:
    """Return whether torch has a grouped product of these on a device, without a look at the counts there (torch's
    GroupedBlas.cpp)."""
    if device.type != "cuda" or device.capability is None or device.capability[0] not in (9, 10):
        return False
    return (
        hasattr(F, "grouped_mm")
        and x_SD.dtype == gate_up_EJD.dtype == down_EDI.dtype == torch.bfloat16
        and not any(size % GROUPED_STEP for size in down_EDI.shape[1:])
        and len(down_EDI) <= GROUPED_MAX_EXPERTS
    )


def grouped_mlp_fp8(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    if x.device.type != "cpu" and isinstance(x, Tensor):
        x = quantize_fp8(x, ue8m0=gate_up.ue8m0)  # once for all experts
    return run_experts(linear_fp8, x, counts_E, gate_up, down)


def grouped_mlp_w8a8_dynamic(x: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    return run_experts(linear_w8a8_dynamic, x, counts_E, gate_up, down)


def grouped_mlp_int8_rows(x_SD: INT8Rows, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    return run_experts(_linear_of_either, x_SD, counts_E, gate_up, down)


def _linear_of_either(x_TI: Tensor | INT8Rows, weight: Int8Dynamic) -> Tensor:
    """Multiply rows in int8, which the first product of an expert reads, or floats, which the second one does."""
    if isinstance(x_TI, INT8Rows):
        return multiply_int8(x_TI.numbers_TI, x_TI.scales_TN, weight, x_TI.dtype)
    return linear_w8a8_dynamic(x_TI, weight)


def grouped_mlp_int4(x: Tensor, counts_E: Tensor, gate_up: FourBits, down: FourBits) -> Tensor:
    return run_experts(linear_int4, x, counts_E, gate_up, down)


grouped_mlp_mxfp4 = grouped_mlp_int4


def run_experts(
    multiply: Callable[[Any, Any], Tensor], x: Tensor | ScaledRows, counts_E: Tensor, gate_up: Weight, down: Weight
) -> Tensor:
    """Run the grouped MLP with products of one expert."""
    if x.device.type == "cpu" or (x.ndim == 2 and len(x) > FEW_ROWS):
        return by_expert(multiply, gated_silu, x, counts_E, gate_up, down)

    def run(rows: Tensor | ScaledRows, index: int) -> Tensor:
        return multiply(gated_silu(multiply(rows, expert(gate_up, index))), expert(down, index))

    if x.ndim == 3:
        return torch.stack([run(x[index], index) for index in range(len(x))])
    row_S = torch.arange(len(x), device=x.device, dtype=torch.int64)
    expert_S = torch.searchsorted(counts_E.cumsum(0), row_S, right=True)
    out = x.new_empty(x.shape)
    for index in range(len(counts_E)):
        out = torch.where((expert_S == index)[:, None], run(x, index), out)
    return out


def by_expert(
    multiply: Callable[[Any, Any], Tensor],
    activate: Callable[[Tensor], Tensor],
    x: Tensor | ScaledRows,
    counts_E: Tensor,
    gate_up: Weight,
    down: Weight,
) -> Tensor:
    """Run the grouped MLP one expert at a time, for those experts that have rows. Reads the counts."""
    out = x.new_empty(x.shape)
    first = 0
    for index, count in enumerate(counts_E.tolist()):
        if count:
            rows = (index, slice(count)) if x.ndim == 3 else slice(first, first + count)
            hidden = activate(multiply(x[rows], expert(gate_up, index)))
            out[rows] = multiply(hidden, expert(down, index))
            first += count
    return out


def gather_rows(x_TD: Tensor, token_S: Tensor) -> Tensor:
    return x_TD.index_select(0, token_S)


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = torch.zeros(len(row_TK), y_SD.shape[1], device=y_SD.device, dtype=torch.float32)
    if not len(y_SD):
        return out_TD
    none_TK = row_TK < 0
    lacking = not y_SD.is_cpu or bool(none_TK.any())  # to look would make a device wait
    if lacking:
        row_TK, weights_TK = row_TK.clamp_min(0), weights_TK.masked_fill(none_TK, 0)
    for row_T, weight_T, none_T in zip(row_TK.unbind(1), weights_TK.unbind(1), none_TK.unbind(1), strict=True):
        y_TD = y_SD.index_select(0, row_T).float()
        if lacking:
            y_TD.masked_fill_(none_T[:, None], 0)
        out_TD.addcmul_(y_TD, weight_T[:, None])
    return out_TD
