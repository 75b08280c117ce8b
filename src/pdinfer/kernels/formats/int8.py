"""INT8 with a scale per row: the schemes W8A8_DYNAMIC and W8A8 of modelslim (https://gitee.com/ascend/msit). The second
has scales of activations that were found beforehand."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.floats import exact
from pdinfer.kernels.formats.format import Format, Rounding, Shape, Shard
from pdinfer.kernels.formats.fp8 import MIN_AMAX, quotient

INT8_MIN_AMAX = 1e-10


@attrs.frozen(eq=False, kw_only=True)
class _Int8(Format):
    numbers: Tensor
    scale: Tensor

    def floats_into(self, out: Tensor) -> None:
        out.copy_(self.numbers.float().mul_(self.scale))


@attrs.frozen(eq=False, kw_only=True)
class Int8Dynamic(_Int8):
    """int8 numbers and one float32 scale per row, [..., O, 1]. Activations are scaled per token at run time."""

    name = "w8a8_dynamic"
    scales_tokens = True

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Int8Dynamic:
        numbers = shape.tensor(shape.rows, shape.columns, torch.int8, device)
        return cls(numbers=numbers, scale=shape.tensor(shape.rows, 1, torch.float32, device))

    @classmethod
    def rounding(cls, *, ue8m0: bool) -> Rounding:
        return Rounding.INT8


@attrs.frozen(eq=False, kw_only=True)
class Int8Static(_Int8):
    """int8 numbers with one float32 scale per row, and a scale and offset for activations that were found beforehand.

    `input_scale` and `input_offset` are float32 [..., parts, 1]. `output_scale` (float32) and `output_offset` (int32)
    are [..., O, 1]: y = (x_int8 . numbers + output_offset) * output_scale. The checkpoint calls them deq_scale and
    quant_bias."""

    name = "w8a8"
    has_experts = False

    input_scale: Tensor
    input_offset: Tensor
    output_scale: Tensor
    output_offset: Tensor

    @property
    def bias(self) -> Tensor:
        """What `output_offset` adds beyond undoing `input_offset`: float32 [..., O, 1], 0 in a layer without bias."""
        input_offset = self.input_offset.double().repeat_interleave(
            self.numbers.shape[-2] // self.input_offset.shape[-2], -2
        )
        undone = input_offset * self.numbers.double().sum(-1, keepdim=True)
        return ((self.output_offset + undone) * self.output_scale).float()

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Int8Static:
        def new(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return shape.tensor(rows, 1, dtype, device)

        return cls(
            numbers=shape.tensor(shape.rows, shape.columns, torch.int8, device),
            scale=new(shape.rows),
            input_scale=new(1),
            input_offset=new(1),
            output_scale=new(shape.rows),
            output_offset=new(shape.rows, torch.int32),
        )

    def columns(self, shard: Shard) -> Int8Static:
        changed = super().columns(shard)
        undone = changed.input_offset.long() * changed.numbers.long().sum(-1, keepdim=True)
        kept = -undone
        if shard.index == 0:
            kept += self.output_offset + self.input_offset.long() * self.numbers.long().sum(-1, keepdim=True)
        return attrs.evolve(changed, output_offset=kept.to(torch.int32))


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


def int8_static_activation(x_TI: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return int8 [T, I]. `scale` and `offset` are float32 [1]."""
    return ((exact(x_TI) / scale).round() + offset).clamp(-128, 127).to(torch.int8)


def int8_sums(x_TI: Tensor, numbers_OI: Tensor) -> Tensor:
    """Return exact sums of int8 products, as float64, because torch multiplies integer matrices on few devices only."""
    return x_TI.double() @ numbers_OI.double().T
