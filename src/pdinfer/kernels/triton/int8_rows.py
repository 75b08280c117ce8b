"""Activations in INT8, for the products that read them."""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.formats.int8 import Int8Static
from pdinfer.kernels.triton.configs import INT8_SPLITS, of_width
from pdinfer.kernels.triton.launch import launch
from pdinfer.kernels.triton.product_kernel import silu
from pdinfer.kernels.triton.rounding import INT8_MIN_AMAX, to_even
from pdinfer.kernels.triton.tile_products import Rows


def round_dynamic(x: Rows) -> Rows:
    """Return rows of floats as int8 with a scale per row, amax / 127. Rows behind those of an expert stay undefined."""
    return _round(x, None, gated=False)


def round_gated(x: Rows) -> Rows:
    """Return `round_dynamic` of what `gated_silu` makes of the rows, which are half as wide."""
    return _round(x, None, gated=True)


def round_static(x_TI: Tensor, weight: Int8Static) -> Rows:
    """Return x as int8 by the scale and offset of each part of the weight, one part behind the other. What is left to
    multiply sums with is 1, or NaN for a row that is not finite."""
    return _round(Rows.of(x_TI), weight, gated=False)


def _round(x: Rows, weight: Int8Static | None, *, gated: bool) -> Rows:
    floats_SI, parts = x.numbers, 1 if weight is None else len(weight.input_scale)
    num_rows, width = len(floats_SI), floats_SI.shape[1] // (2 if gated else 1)
    numbers = torch.empty(parts * num_rows, width, dtype=torch.int8, device=floats_SI.device)
    scales = torch.empty(parts * num_rows, device=floats_SI.device, dtype=torch.float32)
    experts = num_rows // x.room if x.room else 1
    padded = triton.next_power_of_2(width)
    launch(
        _round_rows,
        (min(x.room, INT8_SPLITS) * experts if x.form == "room" else num_rows, parts),
        floats_SI,
        numbers,
        scales,
        x.counts_E if x.form == "room" else None,
        None if weight is None else weight.input_scale,
        None if weight is None else weight.input_offset,
        num_rows,
        x.room,
        experts,
        floats_SI.stride(0),
        width,
        GATED=gated,
        WIDTH=padded,
        **of_width(padded).constants,
    )
    return attrs.evolve(x, numbers=numbers, scales=scales, per_part=weight is not None)


@triton.jit
def _round_rows(
    x_ptr, out_ptr, scale_ptr, counts_ptr, input_scale_ptr, input_offset_ptr,
    num_rows, room, num_experts, pitch, width, GATED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Round the rows that one block has: one, or with counts some of an expert's."""
    part = tl.program_id(1)
    at = tl.arange(0, WIDTH)
    there = at < width
    if counts_ptr is not None:
        expert = tl.program_id(0) % num_experts
        before = expert * room
        first = tl.program_id(0) // num_experts
        step = tl.num_programs(0) // num_experts
        stop = tl.load(counts_ptr + expert).to(tl.int32)
    else:
        before, first, step = 0, tl.program_id(0), 1
        stop = first + 1
    for index in range(first, stop, step):
        row = tl.cast(before + index, tl.int64)
        x = tl.load(x_ptr + row * pitch + at, there, 0).to(tl.float32)
        if GATED:
            x = silu(x) * tl.load(x_ptr + row * pitch + width + at, there, 0).to(tl.float32)
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        lost = tl.sum(0 * x)  # NaN for a row that is not finite, which integers cannot show
        x = tl.where(0 * x == 0, x, 0)
        if input_scale_ptr is not None:
            x = to_even(tl.div_rn(x, tl.load(input_scale_ptr + part))) + tl.load(input_offset_ptr + part)
            x = tl.clamp(x, -128.0, 127.0)
            scale = 1 + lost
        else:
            scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x)), INT8_MIN_AMAX), 127.0)
            x = to_even(tl.div_rn(x, scale))
            scale += lost
        row += part * num_rows
        tl.store(out_ptr + row * width + at, x.to(tl.int8), there)
        tl.store(scale_ptr + row, scale)
