"""Products with weights: dense ones of quantized weights, and experts, which are two grouped products. The first one
ends with the activation, and in FP8 with the rounding that follows."""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.four_bits import FourBits
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.triton.activations import gated_silu, gated_silu_fp8, quantize_fp8
from pdinfer.kernels.triton.configs import ROOM_SPLITS, Multiplied, of_gated_product, of_product, of_width
from pdinfer.kernels.triton.launch import launch, rows_of_block
from pdinfer.kernels.triton.product_kernel import silu
from pdinfer.kernels.triton.rounding import INT8_MIN_AMAX, to_even
from pdinfer.kernels.triton.tile_products import (
    TRITON_DTYPES,
    Matrices,
    Rows,
    multiply,
    multiply_gated,
    multiply_gated_fp8,
)


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return why these products are not for a model of `spec`, or None where they are."""
    if spec.dtype not in TRITON_DTYPES:
        return f"is for models of float32, bfloat16 and float16, not of {str(spec.dtype).removeprefix('torch.')}"
    if spec.dtype == torch.float16 and op.endswith(("[int4]", "[mxfp4]")):
        return "multiplies weights of four bits for models of float32 and bfloat16, not of float16"
    return None


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    rows = x_TI if isinstance(x_TI, FP8Rows) else quantize_fp8(x_TI, ue8m0=weight.ue8m0)
    return multiply(Rows.of(rows), _of_fp8(weight), of_product(weight.numbers.dtype, len(rows)))


def _of_fp8(weight: FP8Blocks) -> Matrices:
    return Matrices.of(weight.numbers, parts=weight.parts, scales=weight.scale)


def linear_w8a8_dynamic(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    matrices = Matrices.of(weight.numbers, scales=weight.scale)
    return multiply(_int8(Rows.of(x_TI)), matrices, of_product(weight.numbers.dtype, len(x_TI)))


def linear_w8a8(x_TI: Tensor, weight: Int8Static) -> Tensor:
    parts, offsets = len(weight.input_scale), weight.output_offset
    matrices = Matrices.of(weight.numbers, parts=parts, scales=weight.output_scale, offsets=offsets)
    return multiply(_int8(Rows.of(x_TI), weight), matrices, of_product(weight.numbers.dtype, len(x_TI)))


def linear_int4(x_TI: Tensor, weight: FourBits) -> Tensor:
    rows, matrices = Rows.of(x_TI), _of_four_bits(weight)
    return multiply(rows, matrices, of_product(_multiplied(rows, matrices), len(x_TI)))


linear_mxfp4 = linear_int4


def _of_four_bits(weight: FourBits, parts: int = 1) -> Matrices:
    return Matrices.of(weight.numbers, parts=parts, scales=weight.scale)


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    return _run(Rows.of(x, counts_E), Matrices.of(gate_up_EJD, parts=2), Matrices.of(down_EDI)).view(x.shape)


def grouped_mlp_int4(x: Tensor, counts_E: Tensor, gate_up: FourBits, down: FourBits) -> Tensor:
    return _run(Rows.of(x, counts_E), _of_four_bits(gate_up, parts=2), _of_four_bits(down)).view(x.shape)


grouped_mlp_mxfp4 = grouped_mlp_int4


def _run(rows: Rows, gate_up: Matrices, down: Matrices) -> Tensor:
    """Run experts on rows of floats."""
    config = of_gated_product(_multiplied(rows, gate_up), _each(rows), rows.form)
    if config is None:
        hidden_SI = gated_silu(_multiply_experts(rows, gate_up))
    else:
        hidden_SI = multiply_gated(rows, gate_up, config)
    return _multiply_experts(rows.with_numbers(hidden_SI), down)


def grouped_mlp_fp8(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    rows = Rows.of(quantize_fp8(x, ue8m0=gate_up.ue8m0) if isinstance(x, Tensor) else x, counts_E)
    matrices, config = _of_fp8(gate_up), of_gated_product(gate_up.numbers.dtype, _each(rows), rows.form)
    if config is None:
        hidden = gated_silu_fp8(_multiply_experts(rows, matrices), ue8m0=down.ue8m0)
    else:
        hidden = multiply_gated_fp8(rows, matrices, config, ue8m0=down.ue8m0)
    return _multiply_experts(rows.with_numbers(hidden), _of_fp8(down)).view(x.shape)


def grouped_mlp_w8a8_dynamic(x: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    rows = Rows.of(x, counts_E)
    wide_SJ = _multiply_experts(_int8(rows), Matrices.of(gate_up.numbers, scales=gate_up.scale))
    matrices = Matrices.of(down.numbers, scales=down.scale)
    return _multiply_experts(_int8(rows.with_numbers(wide_SJ), gated=True), matrices).view(x.shape)


def _multiply_experts(rows: Rows, matrices: Matrices) -> Tensor:
    return multiply(rows, matrices, of_product(_multiplied(rows, matrices), _each(rows), rows.form))


def _multiplied(rows: Rows, matrices: Matrices) -> Multiplied:
    """Return by what the config of a product is chosen. Four bits become what the rows are."""
    if matrices.kind not in ("int4", "mxfp4"):
        return matrices.numbers.dtype
    return rows.dtype if rows.dtype == torch.float32 else matrices.kind


def _each(rows: Rows) -> int:
    """Return the rows that an expert has room for, or on average."""
    assert rows.counts_E is not None
    return rows.room if rows.form == "room" else -(-len(rows) // len(rows.counts_E))


def _int8(x: Rows, weight: Int8Static | None = None, *, gated: bool = False) -> Rows:
    """Return rows of floats, or what `gated_silu` makes of them, as int8 with a scale per row, amax / 127. Rows after
    those of an expert stay undefined.

    With a weight they are int8 by the scale and offset of each of its parts, one part after the other. What is left to
    multiply sums with is 1, or NaN for a row that is not finite."""
    floats_SI, parts = x.numbers, 1 if weight is None else len(weight.input_scale)
    num_rows, width = len(floats_SI), floats_SI.shape[1] // (2 if gated else 1)
    numbers = torch.empty(parts * num_rows, width, dtype=torch.int8, device=floats_SI.device)
    scales = torch.empty(parts * num_rows, device=floats_SI.device, dtype=torch.float32)
    experts = num_rows // x.room if x.room else 1
    padded = triton.next_power_of_2(width)
    launch(
        _round_rows, (min(x.room, ROOM_SPLITS) * experts if x.form == "room" else num_rows, parts),
        floats_SI, numbers, scales, x.counts_E if x.form == "room" else None,
        None if weight is None else weight.input_scale, None if weight is None else weight.input_offset, num_rows,
        x.room, experts, floats_SI.stride(0), width,
        GATED=gated, WIDTH=padded, **of_width(padded).constants,
    )  # fmt: skip
    return attrs.evolve(x, numbers=numbers, scales=scales, per_part=weight is not None)


@triton.jit
def _round_rows(
    x_ptr, out_ptr, scale_ptr, counts_ptr, input_scale_ptr, input_offset_ptr,
    num_rows, room, num_experts, pitch, width, GATED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Round the rows that one block has: one, or with counts some of an expert's."""
    part = tl.program_id(1)
    at = tl.arange(0, WIDTH)
    there = at < width
    if counts_ptr is not None:
        before, first, stop, step = rows_of_block(counts_ptr, num_experts, room)
    else:
        before, first, step = 0, tl.program_id(0), 1
        stop = first + 1
    for index in range(first, stop, step):
        row = tl.cast(before + index, tl.int64)
        x = tl.load(x_ptr + row * pitch + at, there, 0).to(tl.float32)
        if GATED:
            x = silu(x) * tl.load(x_ptr + row * pitch + width + at, there, 0).to(tl.float32)
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        lost = tl.sum(0 * x)  # NaN for a row that is not finite, which integers cannot show
        x = tl.where(0 * x == 0, x, 0)
        if input_scale_ptr is not None:
            x = to_even(tl.div_rn(x, tl.load(input_scale_ptr + part))) + tl.load(input_offset_ptr + part)
            x = tl.clamp(x, -128.0, 127.0)
            scale = 1 + lost
        else:
            scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x)), INT8_MIN_AMAX), 127.0)
            x = to_even(tl.div_rn(x, scale))
            scale += lost
        row += part * num_rows
        tl.store(out_ptr + row * width + at, x.to(tl.int8), there)
        tl.store(scale_ptr + row, scale)
