"""Starts kernels: the only place that does, so that tests can compile or count instead. And tensors as kernels read and
write them: rows at a pitch, whose elements are adjacent."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import BLOCK

TMA_STEP = 4
"""A group's scales begin at 16-byte borders: at multiples of this many float32."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None, **constants: Any) -> None:
    """Start `kernel` on a grid of blocks, on the current stream of the device of its first tensor. An empty grid starts
    nothing. `constants` are its constexprs, with `num_warps` and `num_stages` among them. Does not sync the device."""
    if 0 in grid:
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    if device.type != "cuda":  # Triton's interpreter
        kernel[grid](*arguments, **constants)
        return
    with torch.cuda.device(device):
        triton.set_allocator(_scratch)  # of this thread
        kernel[grid](*arguments, **constants)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory for the descriptors that a kernel makes. torch aligns it to more than any kernel asks for."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def as_rows(x: Tensor) -> Tensor:
    """Return x as [rows, width] whose last axis has stride 1: a view where there can be one."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim != 2 else x
    return rows if rows.stride(1) == 1 else rows.contiguous()


def need(fits: bool, sentence: str) -> None:
    """Raise ValueError with the sentence where shapes do not fit: a kernel would read memory that is not theirs."""
    if not fits:
        raise ValueError(sentence)


def fp8_rows_like(x: Tensor, ue8m0: bool, width: int | None = None) -> FP8Rows:
    """Return room for x [..., I] rounded to FP8, or for rows of `width`. Scales of [T, I] are laid for TMA, because a
    product reads them group by group; those of other shapes are in rows."""
    shape = (*x.shape[:-1], x.shape[-1] if width is None else width)
    groups = -(-shape[-1] // BLOCK)
    numbers = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    if len(shape) != 2:
        scales = torch.empty((*shape[:-1], groups), dtype=torch.float32, device=x.device)
        return FP8Rows(numbers, scales, dtype=x.dtype, ue8m0=ue8m0)
    pitch = -(-shape[0] // TMA_STEP) * TMA_STEP
    scales = torch.empty((groups, pitch), dtype=torch.float32, device=x.device).T[: shape[0]]
    return FP8Rows(numbers, scales, dtype=x.dtype, ue8m0=ue8m0)


@triton.jit
def rows_of_block(counts_ptr, num_experts, room):
    """Return which rows of experts in room a block of threads has: the rows before those of its expert (int64), its
    first one there, where they end, and the step between them."""
    expert = tl.program_id(0) % num_experts
    stop = tl.load(counts_ptr + expert).to(tl.int32)
    return (expert * room).to(tl.int64), tl.program_id(0) // num_experts, stop, tl.num_programs(0) // num_experts
