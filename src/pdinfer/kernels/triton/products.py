"""Products with weights: dense ones of quantized weights, and experts, which are two grouped products. The first one
ends with the activation, and in FP8 with the rounding that follows."""

from __future__ import annotations

from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.triton.activations import gated_silu_fp8, quantize_fp8
from pdinfer.kernels.triton.configs import of_gated_product, of_product
from pdinfer.kernels.triton.int8_rows import round_dynamic, round_gated, round_static
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
    return None


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    rows = x_TI if isinstance(x_TI, FP8Rows) else quantize_fp8(x_TI, ue8m0=weight.ue8m0)
    return multiply(Rows.of(rows), _of_fp8(weight), of_product(weight.numbers.dtype, len(rows)))


def _of_fp8(weight: FP8Blocks) -> Matrices:
    """Return FP8 blocks as matrices."""
    return Matrices.of(weight.numbers, parts=weight.parts, scales=weight.scale)


def linear_w8a8_dynamic(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    matrices = Matrices.of(weight.numbers, scales=weight.scale)
    return multiply(round_dynamic(Rows.of(x_TI)), matrices, of_product(weight.numbers.dtype, len(x_TI)))


def linear_w8a8(x_TI: Tensor, weight: Int8Static) -> Tensor:
    parts, offsets = len(weight.input_scale), weight.output_offset
    matrices = Matrices.of(weight.numbers, parts=parts, scales=weight.output_scale, offsets=offsets)
    return multiply(round_static(x_TI, weight), matrices, of_product(weight.numbers.dtype, len(x_TI)))


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    rows = Rows.of(x, counts_E)
    config = of_gated_product(gate_up_EJD.dtype, _each(rows), rows.form)
    assert config is not None, "only FP8 has a class without"
    hidden_SI = multiply_gated(rows, Matrices.of(gate_up_EJD, parts=2), config)
    return _multiply_experts(rows.with_numbers(hidden_SI), Matrices.of(down_EDI)).view(x.shape)


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
    wide_SJ = _multiply_experts(round_dynamic(rows), Matrices.of(gate_up.numbers, scales=gate_up.scale))
    matrices = Matrices.of(down.numbers, scales=down.scale)
    return _multiply_experts(round_gated(rows.with_numbers(wide_SJ)), matrices).view(x.shape)


def _multiply_experts(rows: Rows, matrices: Matrices) -> Tensor:
    return multiply(rows, matrices, of_product(matrices.numbers.dtype, _each(rows), rows.form))


def _each(rows: Rows) -> int:
    """Return the rows that an expert has room for, or on average."""
    assert rows.counts_E is not None
    return rows.room if rows.form == "room" else -(-len(rows) // len(rows.counts_E))
