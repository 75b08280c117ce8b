"""FP8 blocks in the order in which CPU kernels multiply them."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.format import Format, Shape
from pdinfer.kernels.formats.fp8 import FP8Blocks, new_scales
from pdinfer.kernels.formats.strips import from_strips, into_strips, new_strips, part_of, shape_of


@attrs.frozen(eq=False, kw_only=True)
class FP8Strips(Format):
    """The numbers of `FP8Blocks` in the order of `Strips`, with the same scales: a permutation, in as many bytes."""

    name = "fp8_strips"
    strips_of = FP8Blocks

    numbers: Tensor
    scale: Tensor
    ue8m0: bool = False

    @property
    def parts(self) -> int:
        return self.numbers.shape[-4]

    @property
    def shape(self) -> tuple[int, int]:
        """The rows of all parts, and the columns."""
        return shape_of(self.numbers)

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> FP8Strips:
        numbers = new_strips(shape, torch.float8_e4m3fn, device)
        return cls(numbers=numbers, scale=new_scales(shape, device), ue8m0=ue8m0)

    def ordered(self) -> FP8Blocks:
        """Return the numbers in their order, as a new tensor, with these scales."""
        return FP8Blocks(numbers=from_strips(self.numbers), scale=self.scale, ue8m0=self.ue8m0, parts=self.parts)

    def part(self, index: int, parts: int) -> FP8Strips:
        scale = self.scale.chunk(parts, -2)[index]
        return attrs.evolve(self, numbers=part_of(self.numbers, index, parts), scale=scale)

    def fill(self, value: Format) -> None:
        """Write FP8 blocks: numbers to their places, and scales."""
        into_strips(self.numbers, value.numbers)
        self.scale.copy_(value.tensors["scale"])

    def floats_into(self, out: Tensor) -> None:
        self.ordered().floats_into(out)
