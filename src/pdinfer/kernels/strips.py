"""The order in which CPU kernels multiply matrices: strips of 32 rows, a permutation of any numbers.

A tensor of strips is [..., strips, I / 32, parts, 2 / parts, 16, 32]. A strip is 32 rows, 16 of each part where there
are two matrices, one below the other. For every 32 columns it holds, of each 16 of its rows, 16 pairs of neighbouring
columns; a pair is 16 rows of 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIP = 32
"""The rows of a strip of weights, and the columns of one of its steps."""


def new_strips(
    experts: int, parts: int, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return uninitialised strips of `parts` matrices [rows, columns] per expert."""
    shape = (experts, parts * rows // STRIP, columns // STRIP, parts, 2 // parts, 16, STRIP)
    return torch.empty(shape, dtype=dtype, device=device)


def shape_of(strips: Tensor) -> tuple[int, int]:
    """Return the rows of all parts, and the columns."""
    count, steps, parts, halves = strips.shape[-6:-2]
    return 16 * count * parts * halves, STRIP * steps


def from_strips(strips: Tensor) -> Tensor:
    """Return the numbers in their order, [..., O, I], as a new tensor."""
    in_rows = torch.einsum("...snphwo->...pshonw", _pairs(strips)).contiguous()
    return in_rows.view(strips.dtype).reshape(*strips.shape[:-6], *shape_of(strips))


def into_strips(strips: Tensor, matrix_OI: Tensor) -> None:
    """Write numbers [..., O, I] to their places."""
    pairs, in_rows = _pairs(strips), _pairs(matrix_OI.contiguous())
    count, steps, parts, halves = pairs.shape[-6:-2]
    in_rows = in_rows.view(*pairs.shape[:-6], parts, count, halves, 16, steps, 16)
    pairs.copy_(torch.einsum("...pshonw->...snphwo", in_rows))


def _pairs(numbers: Tensor) -> Tensor:
    """Return a view of each pair of columns as one number."""
    return numbers.view(torch.int16 if numbers.itemsize == 1 else torch.int32)
