"""Gated activations, and activations rounded to FP8 and INT8."""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.triton.configs import GROUPS_OF_ROWS, ROOM_SPLITS, of_width
from pdinfer.kernels.triton.launch import as_rows, fp8_rows_like, launch, need, rows_of_block
from pdinfer.kernels.triton.rounding import GROUP, largest, rounded_to_fp8, rounded_to_int8, to_fp8


def gated_silu(x_TJ: Tensor) -> Tensor:
    need(x_TJ.shape[-1] % 2 == 0, f"a gate and its values are of one width, together they have {x_TJ.shape[-1]}")
    out_TI = torch.empty((*x_TJ.shape[:-1], x_TJ.shape[-1] // 2), dtype=x_TJ.dtype, device=x_TJ.device)
    _by_groups(x_TJ, out_TI, None, gated=True)
    return out_TI


def gated_silu_fp8(x_TJ: Tensor, *, ue8m0: bool, counts_E: Tensor | None = None) -> FP8Rows:
    need(x_TJ.shape[-1] % 2 == 0, f"a gate and its values are of one width, together they have {x_TJ.shape[-1]}")
    rounded = fp8_rows_like(x_TJ, ue8m0, x_TJ.shape[-1] // 2)
    if counts_E is not None:
        (experts, room), given = x_TJ.shape[:2], tuple(counts_E.shape)
        need(given == (experts,), f"there is room for rows of {experts} experts, counts are {given}")
        # group by group, as a product in room reads them
        rounded = attrs.evolve(rounded, scales_TN=rounded.scales_TN.view(experts, -1, room).mT)
    _by_groups(x_TJ, None, rounded, gated=True, counts_E=counts_E)
    return rounded


def quantize_fp8(x_TI: Tensor, *, ue8m0: bool) -> FP8Rows:
    rounded = fp8_rows_like(x_TI, ue8m0)
    _by_groups(x_TI, None, rounded, gated=False)
    return rounded


def round_fp8(x_TI: Tensor, *, ue8m0: bool) -> Tensor:
    out_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype, device=x_TI.device)
    _by_groups(x_TI, out_TI, None, gated=False, ue8m0=ue8m0)
    return out_TI


def _by_groups(
    x: Tensor,
    out: Tensor | None,
    rounded: FP8Rows | None,
    *,
    gated: bool,
    ue8m0: bool | None = None,
    counts_E: Tensor | None = None,
) -> None:
    """Write x, or its activation, to `out` or rounded into `rounded`. With `ue8m0` what is in `out` is rounded too."""
    rows = as_rows(x)
    width = rows.shape[1] // 2 if gated else rows.shape[1]
    scales = None if rounded is None else rounded.scales_TN
    experts, room = (0, 0) if counts_E is None else x.shape[:2]
    launch(
        _groups_of_rows,
        (
            len(rows) if counts_E is None else experts * min(room, ROOM_SPLITS),
            triton.cdiv(width, GROUPS_OF_ROWS.tiles["GROUPS"] * GROUP.value),
        ),
        rows, out, None if rounded is None else rounded.numbers_TI, scales, counts_E, experts, room, rows.stride(0),
        *((0, 0) if scales is None else scales.stride()[-2:]), width,
        GATED=gated, ROUNDED=ue8m0 is not None, UE8M0=bool(ue8m0 if rounded is None else rounded.ue8m0),
        **GROUPS_OF_ROWS.constants,
    )  # fmt: skip


@triton.jit
def _groups_of_rows(
    x_ptr, out_ptr, numbers_ptr, scales_ptr, counts_ptr, num_experts, room, pitch, scales_row, scales_group, width,
    GATED: tl.constexpr, ROUNDED: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    if counts_ptr is None:
        row = tl.program_id(0).to(tl.int64)
        _write_groups(
            x_ptr, out_ptr, numbers_ptr, scales_ptr, row, row * scales_row, pitch, scales_group, width,
            GATED, ROUNDED, UE8M0, GROUPS,
        )  # fmt: skip
    else:
        before, first, stop, step = rows_of_block(counts_ptr, num_experts, room)
        for index in range(first, stop, step):
            scale_at = before * tl.cdiv(width, GROUP) + index * scales_row
            _write_groups(
                x_ptr, out_ptr, numbers_ptr, scales_ptr, before + index, scale_at, pitch, scales_group, width,
                GATED, ROUNDED, UE8M0, GROUPS,
            )  # fmt: skip


@triton.jit
def _write_groups(
    x_ptr, out_ptr, numbers_ptr, scales_ptr, row, scale_at, pitch, scales_group, width,
    GATED: tl.constexpr, ROUNDED: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write those groups of a row that a block of threads has."""
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * GROUP + tl.arange(0, GROUP)[None, :]
    there = at < width
    y = tl.load(x_ptr + row * pitch + at, there, 0).to(tl.float32)
    if GATED:
        y = y / (1 + tl.exp(-y)) * tl.load(x_ptr + row * pitch + width + at, there, 0).to(tl.float32)
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if numbers_ptr is not None:
        numbers, scale = to_fp8(y, 1, UE8M0)
        tl.store(numbers_ptr + row * width + at, numbers, there)
        tl.store(scales_ptr + scale_at + group * scales_group, scale, group * GROUP < width)
    else:
        if ROUNDED:
            y = rounded_to_fp8(y, 1, UE8M0)
        tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), there)


def round_int8(x_TI: Tensor) -> Tensor:
    rows = as_rows(x_TI)
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    padded = triton.next_power_of_2(rows.shape[1])
    launch(
        _round_rows_to_int8, (len(rows),),
        rows, out, rows.stride(0), rows.shape[1],
        WIDTH=padded, **of_width(padded).constants,
    )  # fmt: skip
    return out.view(x_TI.shape)


@triton.jit
def _round_rows_to_int8(x_ptr, out_ptr, pitch, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * pitch + at, at < width, 0).to(tl.float32)
    y = rounded_to_int8(x, largest(x, 0))
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), at < width)
