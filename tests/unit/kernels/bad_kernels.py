"""Kernels that miss one gate each, or none."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x_ptr, y_ptr, out_ptr, width, pitch, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply ROWS rows of x by 64 columns of y."""
    row, column, inner = tl.arange(0, ROWS), tl.arange(0, 64), tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, 64), tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(x_ptr + row[:, None] * pitch + start + inner[None, :])
        y = tl.load(y_ptr + (start + inner)[:, None] * 64 + column[None, :])
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(out_ptr + row[:, None] * 64 + column[None, :], total)


@triton.jit
def copied(x_ptr, out_ptr, pitch, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + pitch + at))
