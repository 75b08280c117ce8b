"""INT8 with a scale per row: the W8A8_DYNAMIC scheme of modelslim (https://gitee.com/ascend/msit)."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.exact import exact
from pdinfer.kernels.formats.format import Format, Rounding, Shape
from pdinfer.kernels.formats.fp8 import MIN_AMAX, quotient

INT8_MIN_AMAX = 1e-10


@attrs.frozen(eq=False, kw_only=True)
class Int8Dynamic(Format):
    """int8 numbers and one float32 scale per row, [..., O, 1]. Activations are scaled per token at run time."""

    name = "w8a8_dynamic"
    scales_tokens = True

    numbers: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Int8Dynamic:
        numbers = shape.tensor(shape.rows, shape.columns, torch.int8, device)
        return cls(numbers=numbers, scale=shape.tensor(shape.rows, 1, torch.float32, device))

    @classmethod
    def rounding(cls, *, ue8m0: bool) -> Rounding:
        return Rounding.INT8

    def floats_into(self, out: Tensor) -> None:
        out.copy_(self.numbers.float().mul_(self.scale))


def quantize_int8(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [O, I], float32 scales [O, 1]): amax / 127 per row."""
    floats_OI = matrix_OI.float()
    scale = floats_OI.abs().amax(-1, keepdim=True).clamp(min=MIN_AMAX) / 127
    return (floats_OI / scale).round_().to(torch.int8), scale


def int8_activation(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [T, I], scales [T, 1]): amax / 127 per token. A token of zeros stays zeros."""
    x = exact(x_TI)
    scale = quotient(x.abs().amax(-1, keepdim=True).clamp(min=INT8_MIN_AMAX), 127)
    return (x / scale).round().to(torch.int8), scale


def int8_sums(x_TI: Tensor, numbers_OI: Tensor) -> Tensor:
    """Return exact sums of int8 products, as float64, because torch multiplies integer matrices on few devices only."""
    return x_TI.double() @ numbers_OI.double().T
