"""Starts kernels: the only place that does, so that tests can compile or count instead."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor


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
