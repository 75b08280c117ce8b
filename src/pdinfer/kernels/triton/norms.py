"""Norms of rows, alone, behind the addition to the residual stream, and before the rounding to FP8. A block has a row
in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.triton.configs import of_width
from pdinfer.kernels.triton.launch import as_rows, fp8_rows_like, launch, need
from pdinfer.kernels.triton.rounding import GROUP, to_fp8

WIDEST = 32768
"""Elements of a row that fit in the registers of a block."""


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out, _ = _norm(x_TD, None, weight_D, None, eps, None)
    return out


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    out, _ = _norm(x_TD, None, weight_D, bias_D, eps, None)
    return out


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _norm(x_TD, residual_TD, weight_D, None, eps, None)


def add_rms_norm_fp8(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, *, ue8m0: bool
) -> tuple[Rounded, Tensor]:
    rounded = fp8_rows_like(x_TD, ue8m0)
    out, total = _norm(x_TD, residual_TD, weight_D, None, eps, rounded)
    return Rounded(out, rounded), total


def _norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    rounded: FP8Rows | None,
) -> tuple[Tensor, Tensor]:
    """Return the norm, and what it is of. Write what it is rounded to into `rounded`."""
    rows, width = as_rows(x_TD), x_TD.shape[-1]
    need(weight_D.shape == (width,), f"a norm of rows of {width} needs as many weights, got {tuple(weight_D.shape)}")
    need(width <= WIDEST, f"a norm takes rows of up to {WIDEST} elements, got {width}")
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    residual, total = None, None
    if residual_TD is not None:
        need(residual_TD.shape == x_TD.shape, f"rows {tuple(x_TD.shape)} are added to {tuple(residual_TD.shape)}")
        residual, total = as_rows(residual_TD), torch.empty_like(out)
    scales = None if rounded is None else rounded.scales_TN
    groups = triton.next_power_of_2(triton.cdiv(width, GROUP.value))
    launch(
        _norm_rows, (len(rows),),
        rows, residual, weight_D.contiguous(), None if bias_D is None else bias_D.contiguous(), total, out,
        None if rounded is None else rounded.numbers_TI, scales, rows.stride(0),
        0 if residual is None else residual.stride(0), *((0, 0) if scales is None else scales.stride()), width, eps,
        UE8M0=rounded is not None and rounded.ue8m0, GROUPS=groups, **of_width(groups * GROUP.value).constants,
    )  # fmt: skip
    return out.view(x_TD.shape), x_TD if total is None else total.view(x_TD.shape)


@triton.jit
def _norm_rows(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, numbers_ptr, scales_ptr, x_pitch, residual_pitch,
    scales_row, scales_group, width, eps,
    UE8M0: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Normalise a row. With a bias it is centred first."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    at = group * GROUP + tl.arange(0, GROUP)[None, :]
    there = at < width
    x = tl.load(x_ptr + row * x_pitch + at, there, 0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_pitch + at, there, 0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + at, x, there)
        x = x.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(there, x - tl.sum(x) / width, 0)
    mean = tl.sum(x * x) / width
    # 0 would pass for the factor of a row whose squares overflow
    y = x * (tl.rsqrt(mean + eps) + 0 * mean) * tl.load(weight_ptr + at, there, 0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, there, 0).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + at, y, there)
    if numbers_ptr is not None:
        numbers, scale = to_fp8(y.to(tl.float32), 1, UE8M0)
        tl.store(numbers_ptr + row * width + at, numbers, there)
        tl.store(scales_ptr + row * scales_row + group * scales_group, scale, group * GROUP < width)
