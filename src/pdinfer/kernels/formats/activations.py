"""Activations as values between ops: rounded to FP8 or INT8 with their scales, or at hand in both forms."""

from __future__ import annotations

from typing import Any, Self

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.fp8 import BLOCK
from pdinfer.values import Value


@attrs.frozen(eq=False)
class ScaledRows(Value):
    """Rows [..., I] that were rounded, and scales in float32 to multiply them with. `dtype` is that of the floats which
    were rounded, and so of what is computed from them. Axes before the last are those of the floats."""

    numbers_TI: Tensor
    scales_TN: Tensor
    dtype: torch.dtype = attrs.field(kw_only=True)

    @property
    def shape(self) -> torch.Size:
        """The shape of the floats."""
        return self.numbers_TI.shape

    @property
    def ndim(self) -> int:
        return self.numbers_TI.ndim

    @property
    def device(self) -> torch.device:
        return self.numbers_TI.device

    def __len__(self) -> int:
        return len(self.numbers_TI)

    def __getitem__(self, rows: Any) -> Self:
        """Return some rows, by any index of a tensor that leaves the last axis alone, with their scales row by row."""
        return self._with(self.numbers_TI[rows], self.scales_TN[rows].contiguous())

    def index_select(self, axis: int, index: Tensor) -> Self:
        """Do as that method of a tensor, along an axis before the last."""
        return self._with(self.numbers_TI.index_select(axis, index), self.scales_TN.index_select(axis, index))

    def new_empty(self, size: torch.Size | tuple[int, ...]) -> Tensor:
        """Return uninitialised floats of `dtype`."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def floats(self) -> Tensor:
        """Return the value of the rows, rounded to `dtype`."""
        return (self.numbers_TI.to(self.scales_TN.dtype) * self._scales()).to(self.dtype)

    def _with(self, numbers_TI: Tensor, scales_TN: Tensor) -> Self:
        return attrs.evolve(self, numbers_TI=numbers_TI, scales_TN=scales_TN)

    def _scales(self) -> Tensor:
        """Return the scales in a shape that numbers can be multiplied with."""
        return self.scales_TN


@attrs.frozen(eq=False)
class INT8Rows(ScaledRows):
    """Rows in int8, with a scale for each [..., 1], as `int8_activation` makes them."""


@attrs.frozen(eq=False)
class FP8Rows(ScaledRows):
    """Rows in e4m3, with a scale per row and 128 channels.

    `scales_TN` is float32 [..., ceil(I / 128)], powers of two with `ue8m0`. They are in memory row by row, or group by
    group at a pitch of a multiple of 16 bytes, which the TMA of a GPU loads.

    Where each expert has room for rows, `expected` is how many of them it gets if all get as many, and None where that
    is not known. Kernels may be chosen by it; results do not depend on it.

    `expert_S` is there where sorted rows lie in the tiles of a provider, which each belong to one expert: int32, the
    expert of each row, and -1 where it is nobody's."""

    ue8m0: bool = attrs.field(default=False, kw_only=True)
    expected: int | None = attrs.field(default=None, kw_only=True)
    expert_S: Tensor | None = attrs.field(default=None, kw_only=True)

    def _with(self, numbers_TI: Tensor, scales_TN: Tensor) -> Self:
        return attrs.evolve(self, numbers_TI=numbers_TI, scales_TN=scales_TN, expert_S=None)

    def _scales(self) -> Tensor:
        return self.scales_TN.repeat_interleave(BLOCK, -1)[..., : self.shape[-1]]


@attrs.frozen(eq=False)
class Rounded(Value):
    """The same activations twice: as floats, and as the `rows` that FP8 products read. Readers of both kinds follow a
    norm, and share one rounding."""

    floats_TI: Tensor
    rows: FP8Rows

    def __len__(self) -> int:
        return len(self.floats_TI)

    def __getitem__(self, part: slice) -> Rounded:
        return Rounded(self.floats_TI[part], self.rows[part])
