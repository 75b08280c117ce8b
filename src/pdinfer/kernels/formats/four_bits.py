"""Four bits a weight, with a scale for every 32 inputs of a row: INT4 (compressed-tensors' pack-quantized, of which
Kimi-K2-Thinking is made) and MXFP4 (OCP Microscaling Formats, version 1.0, section 5.3).

Both hold two weights in a byte, the even column in the low half."""

from __future__ import annotations

from typing import ClassVar, Self

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.format import Format, Shape, Shard

GROUP = 32
"""The inputs of a row that share a scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of MXFP4's codes 0 to 7. Codes 8 to 15 are their negatives."""
MXFP4_LARGEST = 2
"""The exponent of 6, the largest of them, whose fraction is 1.5."""


@attrs.frozen(eq=False, kw_only=True)
class FourBits(Format):
    """Codes of 4 bits, uint8 [..., O, I / 2], and scales [..., O, I / 32]."""

    units = (1, GROUP)
    scale_dtype: ClassVar[torch.dtype]

    numbers: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Self:
        numbers = shape.tensor(shape.rows, shape.columns // 2, torch.uint8, device)
        scale = shape.tensor(shape.rows, shape.columns // GROUP, cls.scale_dtype, device)
        return cls(numbers=numbers, scale=scale)

    def columns(self, shard: Shard) -> Self:
        return self.map(shard.columns)

    def rows(self, rows: slice) -> Self:
        """Return a view of some rows."""
        return self.map(lambda tensor: tensor[..., rows, :])

    def values(self) -> Tensor:
        """Return what the codes stand for before scaling: float32 [..., O, I]."""
        raise NotImplementedError

    def floats_into(self, out: Tensor) -> None:
        groups = grouped(self.values()).mul_(self.scale_floats()[..., None])
        out.copy_(groups.flatten(-2))

    def scale_floats(self) -> Tensor:
        """Return the scales as float32."""
        return self.scale.float()


@attrs.frozen(eq=False, kw_only=True)
class Int4(FourBits):
    """Integers from -8 to 7, stored as the sum with 8, with scales in bfloat16."""

    name = "int4"
    scale_dtype = torch.bfloat16

    def values(self) -> Tensor:
        return codes_of(self.numbers).float().sub_(8)


@attrs.frozen(eq=False, kw_only=True)
class MXFP4(FourBits):
    """Floats of one sign, two exponent bits and one of fraction (E2M1), with powers of two as scales, of which the
    exponents are stored, float8_e8m0fnu as uint8."""

    name = "mxfp4"
    scale_dtype = torch.uint8

    def values(self) -> Tensor:
        half = torch.tensor(E2M1, dtype=torch.float32, device=self.numbers.device)
        return torch.cat((half, -half))[codes_of(self.numbers).long()]

    def scale_floats(self) -> Tensor:
        return self.scale.view(torch.float8_e8m0fnu).float()


def grouped(values: Tensor) -> Tensor:
    """Return a view [..., I / 32, 32] of values [..., I]."""
    return values.view(*values.shape[:-1], -1, GROUP)


def codes_of(numbers: Tensor) -> Tensor:
    """Return the codes of bytes [..., n]: uint8 [..., 2 n], the low half of each byte first."""
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def packed(codes: Tensor) -> Tensor:
    """Undo `codes_of`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def quantize_int4(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [O, I / 2], bfloat16 scales [O, I / 32]): amax / 7.5 of a group, as the min-max observer of
    compressed-tensors has it. I is a multiple of 32."""
    groups = grouped(matrix_OI.float())
    scale = (groups.abs().amax(-1) / 7.5).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    numbers = (groups / scale.float()[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8)
    return packed(numbers.flatten(-2)), scale


def quantize_mxfp4(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [O, I / 2], exponents uint8 [O, I / 32]). The scale of a group is the power of two that takes
    the exponent of its largest value to that of 6 (OCP Microscaling Formats, version 1.0, section 6.3); codes are the
    nearest, of two as near the even one."""
    groups = grouped(matrix_OI.float())
    _, exponent = torch.frexp(groups.abs().amax(-1))
    exponent = torch.where(groups.abs().amax(-1) > 0, exponent - 1 - MXFP4_LARGEST, -127).clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent[..., None])
    half = torch.tensor(E2M1, dtype=torch.float32, device=matrix_OI.device)
    middles = (half[1:] + half[:-1]) / 2
    size = scaled.abs()
    code = torch.bucketize(size, middles)  # how many middles are below: of two as near the lower code
    tied = (size == middles[code.clamp(max=6)]) & (code % 2 == 1)
    code = (code + tied).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return packed(code.flatten(-2)), (exponent + 127).to(torch.uint8)
