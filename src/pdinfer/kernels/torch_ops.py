"""Fast eager torch: batched where the reference loops, in the tensors' own dtype where rounding allows it.

Norms and routing stay float32. Attention is in `torch_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels import reference, row_formats, torch_attention
from pdinfer.kernels.activations import FP8Rows
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.weight_formats import FP8Blocks, Int8Dynamic, Int8Static, Weight, dequantize_fp8, expert

WEIGHT_BLOCK_BYTES = 8 << 20
"""The memory for the rows of an FP8 matrix that are floats at one time."""

route = reference.route
group_rows = reference.group_rows
rms_norm = reference.rms_norm
layer_norm = reference.layer_norm
quantize_fp8 = reference.quantize_fp8
round_fp8 = reference.round_fp8
round_int8 = reference.round_int8
index_topk = torch_attention.index_topk
mla_prefill = torch_attention.mla_prefill
mla_decode = torch_attention.mla_decode
mla_sparse = torch_attention.mla_sparse


def unavailable(spec: OpSpec) -> str | None:
    """Return None: eager torch runs on every device."""
    return None


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI)


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    rounded_TI = x_TI.floats() if isinstance(x_TI, FP8Rows) else round_fp8(x_TI, ue8m0=weight.ue8m0)
    scale_of_row = weight.scale_of_row
    out = rounded_TI.new_empty(len(rounded_TI), len(weight.numbers))
    step = max(1, WEIGHT_BLOCK_BYTES // (rounded_TI.shape[1] * rounded_TI.itemsize))
    for first in range(0, len(weight.numbers), step):
        rows = slice(first, first + step)
        floats_OI = torch.empty(weight.numbers[rows].shape, dtype=rounded_TI.dtype, device=rounded_TI.device)
        dequantize_fp8(weight.numbers[rows], scale_of_row[rows], floats_OI)
        out[:, rows] = F.linear(rounded_TI, floats_OI)
    return out


def linear_int8(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    numbers, scale = reference.int8_activation(x_TI)
    return (int8_sums(numbers, weight.numbers) * scale * weight.scale.squeeze(-1)).to(x_TI.dtype)


def linear_int8_static(x_TI: Tensor, weight: Int8Static) -> Tensor:
    inputs = zip(weight.input_scale, weight.input_offset, strict=True)
    sums = [
        int8_sums(reference.int8_static_activation(x_TI, scale, offset), numbers)
        for (scale, offset), numbers in zip(inputs, weight.numbers.chunk(len(weight.input_scale)), strict=True)
    ]
    y = (torch.cat(sums, -1) + weight.output_offset.squeeze(-1)) * weight.output_scale.squeeze(-1)
    return (y + reference.not_finite(x_TI)).to(x_TI.dtype)


def int8_sums(x_TI: Tensor, numbers_OI: Tensor) -> Tensor:
    """Return exact sums of int8 products."""
    # CUDA's integer product needs aligned shapes, and that of torch 2.13 for CPUs does not write sums of one product.
    if x_TI.device.type != "cpu" or x_TI.shape[1] == 1:
        return reference.int8_sums(x_TI, numbers_OI)
    return torch._int_mm(x_TI, numbers_OI.T)  # noqa: SLF001 the only one that torch has


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    if not op.startswith(("linear_", "grouped_mlp_")):
        return None
    if op.endswith("_fp8"):
        return "makes floats of FP8 weights in every call"
    return "has no fused INT8 kernel" if op.endswith(("_int8", "_int8_static")) else None


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
    if not interleaved:
        return reference.rotate(x_THR, cos_TF, sin_TF, interleaved=False)
    x = x_THR.float()
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x_THR.dtype)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
    rows_TW = row_formats.latent_rows(c_TC, k_rope_TR, pages_PGW.dtype)
    pages_PGW.view(-1, pages_PGW.shape[-1]).index_copy_(0, slots_T, rows_TW)


def store_index_keys(pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
    rows_TY = row_formats.index_rows(keys_TY, pages_PGY.dtype)
    pages_PGY.view(-1, pages_PGY.shape[-1]).index_copy_(0, slots_T, rows_TY)


def heads_in(x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
    return torch.bmm(x_THN.transpose(0, 1), weight_HNC).transpose(0, 1)


def heads_out(x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    return torch.bmm(x_THC.transpose(0, 1), weight_HVC.transpose(1, 2)).transpose(0, 1)


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = torch.zeros(len(row_TK), y_SD.shape[1], device=y_SD.device)
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


def gated_silu(x_TJ: Tensor) -> Tensor:
    gate, up = x_TJ.chunk(2, -1)
    return F.silu(gate) * up if x_TJ.dtype == torch.float32 else reference.gated_silu(x_TJ)


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    return by_expert(linear, gated_silu, x, counts_E, gate_up_EJD, down_EDI)


def grouped_mlp_fp8(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    return by_expert(linear_fp8, gated_silu, x, counts_E, gate_up, down)


def grouped_mlp_int8(x: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    return by_expert(linear_int8, gated_silu, x, counts_E, gate_up, down)


def by_expert(
    multiply: Callable[[Any, Any], Tensor],
    activate: Callable[[Tensor], Tensor],
    x: Tensor | FP8Rows,
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


def gather_pages(pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
    torch.index_select(pool_NW, 0, rows_S, out=into_SW)


def scatter_pages(pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
    pool_NW.index_copy_(0, rows_S, from_SW)
