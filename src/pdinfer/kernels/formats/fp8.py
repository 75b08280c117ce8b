"""FP8 blocks: e4m3 numbers with a scale per block of 128 x 128 (DeepSeek-V3 report, arXiv 2412.19437, section 3.3)."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.format import Format, Rounding, Shape, Shard

BLOCK = 128
"""The rows and columns of weights that share an FP8 scale, and the channels of an activation that share one."""
CUBLAS_OUTPUTS_STEP = 16
FP8_MAX = 448.0
MIN_AMAX = 1e-12
"""The amax assumed for a block or a row of zeros, so that its scale is not zero."""


@attrs.frozen(eq=False, kw_only=True)
class FP8Blocks(Format):
    """e4m3 numbers with one float32 scale per block of 128 x 128. Blocks at the edges are smaller.

    `scale` is [..., parts * ceil(O / parts / 128), ceil(I / 128)]. With `ue8m0` activations get power-of-two scales."""

    name = "fp8"
    units = (BLOCK, BLOCK)

    numbers: Tensor
    scale: Tensor
    ue8m0: bool = False
    parts: int = 1

    @property
    def scale_of_row(self) -> Tensor:
        """Return the scales of every row: float32 [..., O, ceil(I / 128)]."""
        rows = self.numbers.shape[-2] // self.parts
        of_part = [scale.repeat_interleave(BLOCK, -2)[..., :rows, :] for scale in self.scale.chunk(self.parts, -2)]
        return torch.cat(of_part, -2)

    @property
    def is_whole(self) -> bool:
        """Whether cuBLAS reads this matrix: dense, of even sizes, and with no block that ends inside of it."""
        rows, columns = self.numbers.shape
        ends_inside = columns % BLOCK or (self.parts > 1 and rows // self.parts % BLOCK)
        return not ends_inside and not rows % CUBLAS_OUTPUTS_STEP and self.numbers.is_contiguous()

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> FP8Blocks:
        return cls(
            numbers=shape.tensor(shape.rows, shape.columns, torch.float8_e4m3fn, device),
            scale=new_scales(shape, device),
            ue8m0=ue8m0,
            parts=shape.parts,
        )

    @classmethod
    def rounding(cls, *, ue8m0: bool) -> Rounding:
        return Rounding.FP8_UE8M0 if ue8m0 else Rounding.FP8

    def part(self, index: int, parts: int) -> FP8Blocks:
        return attrs.evolve(super().part(index, parts), parts=1)

    def columns(self, shard: Shard) -> FP8Blocks:
        return self.map(shard.columns)

    def floats_into(self, out: Tensor) -> None:
        dequantize_fp8(self.numbers, self.scale_of_row, out)


def new_scales(shape: Shape, device: torch.device) -> Tensor:
    """Return uninitialised scales of the blocks of matrices."""
    return shape.tensor(-(-shape.rows // BLOCK), -(-shape.columns // BLOCK), torch.float32, device)


def quantize_fp8(matrix_OI: Tensor, *, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Return (e4m3 [O, I], float32 scales [ceil(O / 128), ceil(I / 128)]): amax / 448 per block, or the next power of
    two."""
    rows, columns = matrix_OI.shape
    padded = torch.nn.functional.pad(matrix_OI.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=MIN_AMAX) / FP8_MAX
    if ue8m0:
        scale = to_power_of_two(scale)
    numbers = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(padded.shape)
    return numbers[:rows, :columns].to(torch.float8_e4m3fn), scale


def quotient(x: Tensor, by: float) -> Tensor:
    """Return x / by, rounded once on every device. On CUDA torch multiplies by the reciprocal of a number."""
    return x / x.new_full((), by)


def to_power_of_two(scale: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each (positive) scale: what ue8m0 can represent. NaN and
    infinity stay as they are."""
    fraction, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
    return torch.where(fraction.isfinite(), power, scale)


def dequantize_fp8(numbers: Tensor, scale_of_row: Tensor, out: Tensor) -> None:
    """Do as `dequantize` for some rows [..., rows, I] and their scales [..., rows, ceil(I / 128)]."""
    for block in range(scale_of_row.shape[-1]):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        out[..., columns] = e4m3_to_float(numbers[..., columns]).mul_(scale_of_row[..., block, None])


def any_nan(numbers: Tensor) -> bool:
    """Return whether e4m3 numbers hold NaN, which is all ones below the sign. A maximum is found at the speed of
    memory; a comparison of bytes, and `any` over what it writes, at a tenth of it."""
    return numbers.numel() > 0 and int(numbers.view(torch.int8).bitwise_and(0x7F).max()) == 0x7F


def e4m3_to_float(numbers: Tensor) -> Tensor:
    """Return float8_e4m3fn as float32, exactly and NaN as NaN, in a fresh tensor."""
    # In the place of float16's exponent and mantissa the values are 2^8 too small. The bit above them then holds a copy
    # of the sign and must become 0. Only for NaN, which is seven ones, adding one carries into that bit, and a 1 there
    # makes it float16's NaN. Torch converts e4m3 one by one on a CPU; this is several times as fast.
    bits = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    bits ^= (bits + 0x80).bitwise_and_(0x4000)
    return bits.view(torch.float16).float().mul_(256)
