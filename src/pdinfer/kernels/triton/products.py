"""Dense products with quantized weights."""

from __future__ import annotations

from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.int8_static import Int8Static
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.triton.activations import quantize_fp8
from pdinfer.kernels.triton.configs import of_product
from pdinfer.kernels.triton.int8_rows import round_dynamic, round_static
from pdinfer.kernels.triton.tile_products import TRITON_DTYPES, Matrices, Rows, multiply


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return why these products are not for a model of `spec`, or None where they are."""
    if spec.dtype not in TRITON_DTYPES:
        return f"is for models of float32, bfloat16 and float16, not of {str(spec.dtype).removeprefix('torch.')}"
    return None


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    rows = x_TI if isinstance(x_TI, FP8Rows) else quantize_fp8(x_TI, ue8m0=weight.ue8m0)
    return multiply(Rows.of(rows), of_fp8(weight), of_product(weight.numbers.dtype, len(rows)))


def of_fp8(weight: FP8Blocks) -> Matrices:
    """Return FP8 blocks as matrices."""
    return Matrices.of(weight.numbers, parts=weight.parts, scales=weight.scale)


def linear_int8(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    matrices = Matrices.of(weight.numbers, scales=weight.scale)
    return multiply(round_dynamic(Rows.of(x_TI)), matrices, of_product(weight.numbers.dtype, len(x_TI)))


def linear_int8_static(x_TI: Tensor, weight: Int8Static) -> Tensor:
    parts, offsets = len(weight.input_scale), weight.output_offset
    matrices = Matrices.of(weight.numbers, parts=parts, scales=weight.output_scale, offsets=offsets)
    return multiply(round_static(x_TI, weight), matrices, of_product(weight.numbers.dtype, len(x_TI)))
