"""Products with weights by torch: floats, FP8 blocks and INT8.

What a CUDA card and its torch can multiply is data: `card` says what the card is, and the functions that choose a
product take its spec. Shapes that these products do not take go to floats, which is slow and right."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels import reference
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.floats import exact, not_finite
from pdinfer.kernels.formats.four_bits import FourBits
from pdinfer.kernels.formats.fp8 import BLOCK, FP8Blocks, dequantize_fp8
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static, int8_activation, int8_static_activation
from pdinfer.kernels.formats.int8 import int8_sums as exact_int8_sums
from pdinfer.kernels.spec import DeviceSpec
from pdinfer.log import log

WEIGHT_BLOCK_BYTES = 8 << 20
"""The memory for the rows of a quantized matrix that are floats at one time."""
FP8_ROWS_STEP = 4
"""cuBLAS reads the scales of activations in steps of 16 bytes: the number of rows is a multiple of this."""
INT8_LEAST_ROWS = 32
"""With 16 rows or fewer torch refuses an INT8 product on CUDA."""
INT8_COLUMNS_STEP = 8
INT8_CAPABILITY = (8, 0)


@functools.cache
def card(device: torch.device) -> DeviceSpec:
    """Return what a device is."""
    return DeviceSpec.of(device)


def why_no_fp8(device: DeviceSpec) -> str | None:
    """Return why torch does not multiply FP8 blocks on a device, or None where it does (torch's ScaledBlas.cpp)."""
    if not device.is_hopper:
        return f"torch multiplies FP8 blocks on Hopper cards, not on {device}"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} cannot multiply FP8 blocks, 2.10 can"
    # a torch without CUDA is asked about cards that are elsewhere
    if torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split("."))) < (12, 9):
        return f"torch was built for CUDA {torch.version.cuda}, which cannot multiply FP8 blocks; 12.9 can"
    return None


def has_int8(device: DeviceSpec) -> bool:
    """Return whether torch multiplies INT8 matrices on a CUDA card."""
    return device.type == "cuda" and device.capability is not None and device.capability >= INT8_CAPABILITY


def sum_in_float32(device: torch.device) -> None:
    """Let products of bfloat16 and float16 on CUDA be summed in float32 alone, in this process and from now on.

    Torch's default allows cuBLAS to round parts of a sum, which depend on the number of rows; ops promise one rounding.
    """
    matmul = torch.backends.cuda.matmul
    if device.type == "cuda" and matmul.allow_bf16_reduced_precision_reduction:
        log.info("products on CUDA are summed in float32: reduced-precision reductions are off in this process")
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI)


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    # a card keeps 14 bits of sums of FP8 products (arXiv 2412.19437, section 3.3.2), too few for float32
    if x_TI.dtype == torch.bfloat16 and why_no_fp8(card(x_TI.device)) is None and weight.is_whole:
        return _by_blocks(x_TI if isinstance(x_TI, FP8Rows) else quantize_fp8(x_TI, ue8m0=weight.ue8m0), weight)
    rounded_TI = x_TI.floats() if isinstance(x_TI, FP8Rows) else round_fp8(x_TI, ue8m0=weight.ue8m0)
    scale_of_row = weight.scale_of_row
    out = rounded_TI.new_empty(len(rounded_TI), len(weight.numbers))
    step = max(1, WEIGHT_BLOCK_BYTES // (rounded_TI.shape[1] * rounded_TI.itemsize))
    for first in range(0, len(weight.numbers), step):
        rows_OI = slice(first, first + step)
        floats_OI = torch.empty(weight.numbers[rows_OI].shape, dtype=rounded_TI.dtype, device=rounded_TI.device)
        dequantize_fp8(weight.numbers[rows_OI], scale_of_row[rows_OI], floats_OI)
        out[:, rows_OI] = F.linear(rounded_TI, floats_OI)
    return out


def linear_int4(x_TI: Tensor, weight: FourBits) -> Tensor:
    """Multiply in float32, which holds every product of a number and its scale."""
    x, num_outs = exact(x_TI), len(weight.numbers)
    out = x_TI.new_empty(len(x), num_outs)
    step = max(1, WEIGHT_BLOCK_BYTES // (x.shape[1] * x.itemsize))
    for first in range(0, num_outs, step):
        rows_OI = slice(first, first + step)
        some = weight.rows(rows_OI)
        floats_OI = x.new_empty(len(some.numbers), x.shape[1])
        some.floats_into(floats_OI)
        out[:, rows_OI] = F.linear(x, floats_OI)
    return out


linear_mxfp4 = linear_int4


def _by_blocks(rows: FP8Rows, weight: FP8Blocks) -> Tensor:
    """Multiply FP8 numbers on a Hopper card.

    Scales of rows [T, N] lie row by row of one block of channels, strides (1, T), and T is padded. Those of the matrix
    are transposed and padded, [ceil(I / 128) to a multiple of 4, ceil(O / 128)], and the first axis is the dense one
    (cuBLAS 12.9, section on 128-element and 128 x 128 block scaling; pytorch/pytorch#166752)."""
    num_rows = len(rows)
    padding = -num_rows % FP8_ROWS_STEP
    numbers_TI, scales_NT = rows.numbers_TI, rows.scales_TN.new_ones(rows.scales_TN.shape[1], num_rows + padding)
    scales_NT[:, :num_rows] = rows.scales_TN.T
    if padding:
        numbers_TI = F.pad(numbers_TI.view(torch.uint8), (0, 0, 0, padding)).view(numbers_TI.dtype)
    scale = weight.scale
    if scale.shape[1] % 4:
        scale = F.pad(scale, (0, -scale.shape[1] % 4))
    y_TO = F.scaled_mm(
        numbers_TI.contiguous(),
        weight.numbers.T,
        scales_NT.T,
        F.ScalingType.BlockWise1x128,
        scale.contiguous().T,
        F.ScalingType.BlockWise128x128,
        output_dtype=rows.dtype,
    )
    return y_TO[:num_rows]


def quantize_fp8(x_TI: Tensor, *, ue8m0: bool) -> FP8Rows:
    if x_TI.shape[-1] % BLOCK:
        return reference.quantize_fp8(x_TI, ue8m0=ue8m0)
    # what the reference does block by block is done at once
    blocks_NB = reference.quantize_fp8(x_TI.reshape(-1, BLOCK), ue8m0=ue8m0)
    numbers, scales = (
        blocks_NB.numbers_TI.view(x_TI.shape),
        blocks_NB.scales_TN.view(*x_TI.shape[:-1], x_TI.shape[-1] // BLOCK),
    )
    return FP8Rows(numbers, scales, dtype=x_TI.dtype, ue8m0=ue8m0)


def round_fp8(x_TI: Tensor, *, ue8m0: bool) -> Tensor:
    return quantize_fp8(x_TI, ue8m0=ue8m0).floats()


def linear_w8a8_dynamic(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    return multiply_int8(*int8_activation(x_TI), weight, x_TI.dtype)


def multiply_int8(numbers_TI: Tensor, scale_T1: Tensor, weight: Int8Dynamic, dtype: torch.dtype) -> Tensor:
    """Multiply rows that were rounded to int8 -> [T, O] in `dtype`."""
    return (int8_sums(numbers_TI, weight.numbers) * scale_T1 * weight.scale.squeeze(-1)).to(dtype)


def linear_w8a8(x_TI: Tensor, weight: Int8Static) -> Tensor:
    inputs = zip(weight.input_scale, weight.input_offset, strict=True)
    sums = [
        int8_sums(int8_static_activation(x_TI, scale, offset), numbers)
        for (scale, offset), numbers in zip(inputs, weight.numbers.chunk(len(weight.input_scale)), strict=True)
    ]
    y = (torch.cat(sums, -1) + weight.output_offset.squeeze(-1)) * weight.output_scale.squeeze(-1)
    return (y + not_finite(x_TI)).to(x_TI.dtype)


def int8_sums(x_TI: Tensor, numbers_OI: Tensor) -> Tensor:
    """Return exact sums of int8 products."""
    if x_TI.device.type == "cpu":
        # torch 2.13 does not write sums of one product
        return exact_int8_sums(x_TI, numbers_OI) if x_TI.shape[1] == 1 else _int_mm(x_TI, numbers_OI)
    if not has_int8(card(x_TI.device)) or any(size % INT8_COLUMNS_STEP for size in numbers_OI.shape):
        return exact_int8_sums(x_TI, numbers_OI)
    padding = max(0, INT8_LEAST_ROWS - len(x_TI))
    return _int_mm(F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI, numbers_OI)[: len(x_TI)]


def _int_mm(x_TI: Tensor, numbers_OI: Tensor) -> Tensor:
    return torch._int_mm(x_TI, numbers_OI.T)  # noqa: SLF001 the only one that torch has


def heads_in(x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
    return torch.bmm(x_THN.transpose(0, 1), weight_HNC).transpose(0, 1)


def heads_out(x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    return torch.bmm(x_THC.transpose(0, 1), weight_HVC.transpose(1, 2)).transpose(0, 1)
