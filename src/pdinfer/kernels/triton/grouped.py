"""Experts: two grouped products, whose first ends with the activation, and in FP8 with the rounding that follows."""

from __future__ import annotations

from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.triton import products
from pdinfer.kernels.triton.activations import gated_silu_fp8, quantize_fp8
from pdinfer.kernels.triton.configs import of_gated_product, of_product
from pdinfer.kernels.triton.int8_rows import round_dynamic, round_gated
from pdinfer.kernels.triton.tile_products import Matrices, Rows, multiply, multiply_gated, multiply_gated_fp8


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return why these experts are not for a model of `spec`, or None where they are."""
    return products.refuses(op, spec)


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    rows = Rows.of(x, counts_E)
    config = of_gated_product(gate_up_EJD.dtype, _each(rows), rows.form)
    assert config is not None, "only FP8 has a class without"
    hidden_SI = multiply_gated(rows, Matrices.of(gate_up_EJD, parts=2), config)
    return _multiply(rows.with_numbers(hidden_SI), Matrices.of(down_EDI)).view(x.shape)


def grouped_mlp_fp8(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    rows = Rows.of(quantize_fp8(x, ue8m0=gate_up.ue8m0) if isinstance(x, Tensor) else x, counts_E)
    matrices, config = products.of_fp8(gate_up), of_gated_product(gate_up.numbers.dtype, _each(rows), rows.form)
    if config is None:
        hidden = gated_silu_fp8(_multiply(rows, matrices), ue8m0=down.ue8m0)
    else:
        hidden = multiply_gated_fp8(rows, matrices, config, ue8m0=down.ue8m0)
    return _multiply(rows.with_numbers(hidden), products.of_fp8(down)).view(x.shape)


def grouped_mlp_int8(x: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    rows = Rows.of(x, counts_E)
    wide_SJ = _multiply(round_dynamic(rows), Matrices.of(gate_up.numbers, scales=gate_up.scale))
    matrices = Matrices.of(down.numbers, scales=down.scale)
    return _multiply(round_gated(rows.with_numbers(wide_SJ)), matrices).view(x.shape)


def _multiply(rows: Rows, matrices: Matrices) -> Tensor:
    return multiply(rows, matrices, of_product(matrices.numbers.dtype, _each(rows), rows.form))


def _each(rows: Rows) -> int:
    """Return the rows that an expert has room for, or on average."""
    assert rows.counts_E is not None
    return rows.room if rows.form == "room" else -(-len(rows) // len(rows.counts_E))
