"""Strips: the order in which CPU kernels multiply matrices, 32 rows at a time, a permutation of any numbers.

A tensor of strips is [..., strips, I / 32, parts, 2 / parts, 16, 32]. A strip is 32 rows, 16 of each part where there
are two matrices, one below the other. For every 32 columns it holds, of each 16 of its rows, 16 pairs of neighbouring
columns; a pair is 16 rows of 2. Weights of four bits have words of 8 columns instead of pairs, [..., 4, 64] bytes, and
their scales are [..., 1, 16]."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Self

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import Format, Shape
from pdinfer.kernels.formats.four_bits import MXFP4, FourBits, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks, new_scales

STRIP = 32
"""The rows of a strip of weights, and the columns of one of its steps."""


def fit(shape: Shape) -> bool:
    """Return whether matrices of that shape are whole strips."""
    return shape.parts in (1, 2) and shape.rows % STRIP == shape.columns % STRIP == 0


def new_strips(shape: Shape, dtype: torch.dtype, device: torch.device, last: tuple[int, int] = (16, STRIP)) -> Tensor:
    """Return uninitialised strips of matrices that fit. `last` are the last two sizes."""
    parts, strips = shape.parts, shape.parts * shape.rows // STRIP
    size = (shape.experts, strips, shape.columns // STRIP, parts, 2 // parts, *last)
    return torch.empty(size, dtype=dtype, device=device)


def shape_of(strips: Tensor) -> tuple[int, int]:
    """Return the rows of all parts, and the columns."""
    count, steps, parts, halves = strips.shape[-6:-2]
    return 16 * count * parts * halves, STRIP * steps


def from_strips(strips: Tensor) -> Tensor:
    """Return the numbers in their order, [..., O, I], as a new tensor."""
    in_rows = torch.einsum("...snphwo->...pshonw", _words(strips, strips)).contiguous()
    return in_rows.view(strips.dtype).reshape(*strips.shape[:-6], shape_of(strips)[0], -1)


def into_strips(strips: Tensor, matrix_OI: Tensor) -> None:
    """Write numbers [..., O, I] to their places."""
    words, in_rows = _words(strips, strips), _words(strips, matrix_OI.contiguous())
    count, steps, parts, halves, of_a_step, _ = words.shape[-6:]
    in_rows = in_rows.view(*words.shape[:-6], parts, count, halves, 16, steps, of_a_step)
    words.copy_(torch.einsum("...pshonw->...snphwo", in_rows))


def part_of(strips: Tensor, index: int, parts: int) -> Tensor:
    """Return a view of one of the `parts` matrices."""
    return strips.chunk(parts, -4)[index]


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _words(strips: Tensor, numbers: Tensor) -> Tensor:
    """Return a view of what stays together as one number: the neighbours that strips have of each of 16 rows."""
    return numbers.view(_WORDS[strips.shape[-1] * strips.itemsize // 16])


@attrs.frozen(eq=False)
class InStrips(Format):
    """Matrices whose tensors lie in strips. Every product asks for `parts` and `shape`, so they are found once."""

    numbers: Tensor

    @cached_property
    def parts(self) -> int:
        return self.numbers.shape[-4]

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The rows of all parts, and the columns."""
        return shape_of(self.numbers)

    def part(self, index: int, parts: int) -> Self:
        return self.map(lambda strips: part_of(strips, index, parts))

    def fill(self, value: Format) -> None:
        """Write a value of the format `strips_of`: numbers to their places."""
        for strips, tensor in zip(self.tensors.values(), value.tensors.values(), strict=True):
            into_strips(strips, tensor)

    def floats_into(self, out: Tensor) -> None:
        ordered = self.ordered()
        (Plain(ordered) if isinstance(ordered, Tensor) else ordered).floats_into(out)


@attrs.frozen(eq=False)
class Strips(InStrips):
    """Matrices of bfloat16 in the order in which CPU kernels multiply them, in as many bytes."""

    name = "strips"
    strips_of = Plain
    holds_floats = True

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Strips:
        return cls(new_strips(shape, dtype, device))

    def ordered(self) -> Tensor:
        """Return the bfloat16 values in their order, [..., O, I], as a new tensor."""
        return from_strips(self.numbers)

    def fill(self, value: Format) -> None:
        """Write the value of a weight of any format to its places."""
        floats = self.numbers.new_empty(*self.numbers.shape[:-6], *self.shape)
        value.floats_into(floats)
        into_strips(self.numbers, floats)


@attrs.frozen(eq=False, kw_only=True)
class FP8Strips(InStrips):
    """The numbers of `FP8Blocks` in the order of `Strips`, with the same scales: a permutation, in as many bytes."""

    name = "fp8_strips"
    strips_of = FP8Blocks

    scale: Tensor
    ue8m0: bool = False

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


@attrs.frozen(eq=False, kw_only=True)
class FourBitStrips(InStrips):
    """Weights of four bits in strips, and their scales: a permutation, in as many bytes. Eight columns of a row stay
    together, as a word of 32 bits."""

    strips_of: ClassVar[type[FourBits]]

    scale: Tensor

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Self:
        numbers = new_strips(shape, torch.uint8, device, (STRIP // 8, 64))
        return cls(numbers=numbers, scale=new_strips(shape, cls.strips_of.scale_dtype, device, (1, 16)))

    def ordered(self) -> FourBits:
        """Return the codes and the scales in their order, as new tensors."""
        return self.strips_of(numbers=from_strips(self.numbers), scale=from_strips(self.scale))


@attrs.frozen(eq=False, kw_only=True)
class Int4Strips(FourBitStrips):
    """`Int4` in strips."""

    name = "int4_strips"
    strips_of = Int4


@attrs.frozen(eq=False, kw_only=True)
class MXFP4Strips(FourBitStrips):
    """`MXFP4` in strips."""

    name = "mxfp4_strips"
    strips_of = MXFP4
