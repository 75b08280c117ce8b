"""The kernel of all products with weights.

A block of threads has tiles of the result: rows of one expert by channels of one of its parts. It finds them on the
device, so no host knows the counts of rows. It goes along the width that is summed, and ends with what follows a
product: scales, the gated activation of an MLP, and the rounding to FP8 that the next product reads. A dense matrix is
a single expert.

Scales of FP8 change every 128 summed channels. There a sum leaves the tensor cores, is scaled, and added in float32
(DeepSeek-V3's report, arXiv 2412.19437, section 3.3.2). Where rows are few the weights are the first factor, y^T = w
x^T: a tensor core of Hopper takes 64 rows or more of the first and as few as 8 of the second. Weights of four bits
always are: a tensor core takes its first factor out of registers, where they are unpacked to bfloat16, exactly. A byte
has two codes. They are put where a pair of bfloat16 has its last bits, so that both are numbers at once, too small by a
power of two: a product with it is exact. So is one with a scale of MXFP4, and not one with a scale of INT4, which
multiplies sums of a group instead."""

from __future__ import annotations

import triton
import triton.language as tl

from pdinfer.kernels.formats import four_bits
from pdinfer.kernels.triton.rounding import GROUP, to_fp8

SCALED = tl.constexpr(four_bits.GROUP)
"""The inputs of a row that share a scale."""
_EIGHTH = tl.constexpr(2.0**127)
"""Makes an eighth of a code of INT4 whose lowest bit is the fourth of a bfloat16, 2^-130."""
_WHOLE = tl.constexpr(2.0**126)
"""Makes a value of E2M1 whose exponent is in the last bits of that of a bfloat16."""
_LEAST_E8M0 = tl.constexpr(0x40)
"""2^-127 as a bfloat16, which has no exponent for it."""


@triton.jit
def int4_eighths(codes):
    """Return a tile [C, I] of bfloat16: an eighth of what codes uint8 [C, I / 2] stand for, without their scales."""
    eighths = _pairs((codes.to(tl.uint32) * 0x8008) & 0x00780078) * _EIGHTH
    return (eighths - 1.0).to(tl.bfloat16).reshape(codes.shape[0], codes.shape[1] * 2)


@triton.jit
def groups_of(tile, COUNT: tl.constexpr):
    """Return COUNT tiles [C, I / COUNT] that a tile [C, I] consists of. COUNT is a power of two."""
    if COUNT == 1:
        groups = (tile,)
    else:
        first, second = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
        groups = groups_of(first, COUNT // 2) + groups_of(second, COUNT // 2)
    return groups


@triton.jit
def mxfp4_tile(codes, scales):
    """Return a tile [C, I] of bfloat16 of codes uint8 [C, I / 2] with exponents uint8 [C, I / 32]."""
    codes = codes.to(tl.uint32)
    values = _pairs((codes * 0x40040) & 0x01C001C0 | (codes * 0x1001000) & 0x80008000)
    values = (values.reshape(codes.shape[0], codes.shape[1] * 2 // SCALED, SCALED) * _WHOLE).to(tl.bfloat16)
    scale = tl.maximum(scales.to(tl.int32) << 7, _LEAST_E8M0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return _unscaled(values * scale[:, :, None])


@triton.jit
def _pairs(pairs):
    """Return [C, I / 2, 2] of words [C, I / 2] that hold two bfloat16."""
    low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _unscaled(groups):
    return groups.to(tl.bfloat16).reshape(groups.shape[0], groups.shape[1] * SCALED)


@triton.jit
def product(
    x, x_scale_ptr, w, w_scale_ptr, w_offset_ptr, out_ptr, out_scale_ptr, counts_ptr,
    num_rows, room, num_experts, width, part_channels, x_pitch, w_pitch, out_pitch,
    x_scale_expert, x_scale_row, x_scale_group, w_scale_pitch,
    FORM: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr, PER_PART: tl.constexpr, DTYPE: tl.constexpr,
    HAS_TMA: tl.constexpr, UPCAST: tl.constexpr, EXPERTS: tl.constexpr, GATED: tl.constexpr, UE8M0: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    NEAR: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute tiles of ROWS x CHANNELS. `x` and `w` are descriptors where HAS_TMA, and else pointers."""
    tiles_of_part = tl.cdiv(part_channels, CHANNELS)
    channel_tiles = tiles_of_part if GATED else tiles_of_part * PARTS
    if FORM == "room":
        channel_tile, expert, first, end, step = _place_in_room(counts_ptr, num_experts, channel_tiles, ROWS)
        before = expert * room
        stop = end
    else:
        channel_tile, row_tile = _near_place(channel_tiles, NEAR)
        before = 0
        step = ROWS
        if FORM == "sorted":
            expert, first, end = _expert_of_tile(counts_ptr, row_tile, num_experts, ROWS, EXPERTS)
        else:
            expert, first, end = 0, row_tile * ROWS, num_rows
        stop = tl.minimum(first + 1, end)
    part = 0 if GATED else channel_tile // tiles_of_part
    channel = channel_tile % tiles_of_part * CHANNELS
    channels = channel + tl.arange(0, CHANNELS)
    is_channel = channels < part_channels
    matrix = expert * PARTS + part
    w_row = matrix * part_channels + channel
    x_before = before + part * num_rows if PER_PART else before
    x_factor = (x, num_rows * PARTS if PER_PART else num_rows, x_pitch)
    w_factor = (w, num_experts * PARTS * part_channels, w_pitch)
    groups = tl.cdiv(width, GROUP)
    scales_of_part = tl.cdiv(part_channels, GROUP) * groups
    for at in range(first, stop, step):
        rows = at + tl.arange(0, ROWS)
        is_row = rows < end
        xs_ptr, ws_ptr = x_scale_ptr, w_scale_ptr
        if FORMAT == "fp8":
            xs_ptr += expert * x_scale_expert + rows * x_scale_row
            ws_ptr += matrix * scales_of_part + channel // GROUP * groups
        y, up = _sums(
            x_factor, xs_ptr, x_scale_group, is_row, x_before + at, w_factor, ws_ptr, w_scale_pitch, w_row, width,
            part_channels, scales_of_part, FORMAT, GATED, HAS_TMA, UPCAST, ROWS, CHANNELS, DEPTH, WEIGHTS_FIRST,
        )  # fmt: skip
        if FORMAT == "int8":
            xs = tl.load(x_scale_ptr + x_before + rows, is_row, 0)
            y = _scaled(y, xs, w_scale_ptr, w_offset_ptr, w_row, is_channel, CHANNELS)
        y = y.to(DTYPE)
        if GATED:
            y = (silu(y.to(tl.float32)) * up.to(DTYPE).to(tl.float32)).to(DTYPE)
        out_rows = tl.cast(before + rows, tl.int64)
        here = is_row[:, None] & is_channel[None, :]
        if out_scale_ptr is not None:
            y, scales = to_fp8(tl.where(here, y.to(tl.float32), 0), 1, UE8M0)
            scale_ptr = out_scale_ptr + out_rows * tl.cdiv(part_channels, GROUP) + channel // GROUP
            tl.store(scale_ptr[:, None], scales, is_row[:, None])
        tl.store(out_ptr + out_rows[:, None] * out_pitch + (part * part_channels + channels)[None, :], y, here)


@triton.jit
def _place_in_room(counts_ptr, num_experts, channel_tiles, ROWS: tl.constexpr):
    """Return a block's tile of channels and its expert, the first of its tiles of rows, and the step to the next. An
    expert has few blocks for each tile of channels, which go through all its rows."""
    block = tl.program_id(0)
    expert = block // channel_tiles % num_experts
    first = block // channel_tiles // num_experts * ROWS
    step = tl.num_programs(0) // channel_tiles // num_experts * ROWS
    return block % channel_tiles, expert, first, tl.load(counts_ptr + expert).to(tl.int32), step


@triton.jit
def _near_place(channel_tiles, NEAR: tl.constexpr):
    """Return a block's tiles of channels and of rows. NEAR blocks that run at one time read the same weights."""
    block = tl.program_id(0)
    row_tiles = tl.num_programs(0) // channel_tiles
    first = block // (NEAR * channel_tiles) * NEAR
    within = block % (NEAR * channel_tiles)
    tall = tl.minimum(row_tiles - first, NEAR)
    return within // tall, first + within % tall


@triton.jit
def _expert_of_tile(counts_ptr, tile, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a tile of sorted rows, the first row of the tile, and the row behind the expert's last. A
    tile behind all others has no row before that."""
    at = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + at, at < num_experts, 0).to(tl.int32)
    tiles = tl.cdiv(counts, ROWS)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    before = at < expert
    start = tl.sum(tl.where(before, counts, 0))
    first = start + (tile - tl.sum(tl.where(before, tiles, 0))) * ROWS
    return expert, first, start + tl.sum(tl.where(at == expert, counts, 0))


@triton.jit
def _sums(
    x, xs_ptr, xs_step, is_row, x_row, w, ws_ptr, ws_pitch, w_row, width, part_channels, scales_of_part,
    FORMAT: tl.constexpr, GATED: tl.constexpr, HAS_TMA: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return a tile of products [ROWS, CHANNELS], and where GATED that of the second part."""
    shape: tl.constexpr = (CHANNELS, ROWS) if WEIGHTS_FIRST else (ROWS, CHANNELS)
    y = tl.zeros(shape, tl.int32 if FORMAT == "int8" else tl.float32)
    up = y
    if FORMAT == "int4" or FORMAT == "mxfp4":
        y, up = _four_bit_sums(
            y, x, x_row, w, w_row, ws_ptr, ws_pitch, width, part_channels,
            FORMAT, GATED, HAS_TMA, UPCAST, ROWS, CHANNELS, DEPTH,
        )  # fmt: skip
    else:
        for k in range(0, width, DEPTH):
            x_tile = _tile(x, x_row, k, width, ROWS, DEPTH, HAS_TMA, UPCAST)
            w_tile = _tile(w, w_row, k, width, CHANNELS, DEPTH, HAS_TMA, UPCAST)
            if FORMAT == "fp8":
                xs = tl.load(xs_ptr + k // GROUP * xs_step, is_row, 0)
                y = _add_scaled(y, x_tile, w_tile, xs * tl.load(ws_ptr + k // GROUP), WEIGHTS_FIRST)
            else:
                y = _add(y, x_tile, w_tile, WEIGHTS_FIRST)
            if GATED:
                w_tile = _tile(w, w_row + part_channels, k, width, CHANNELS, DEPTH, HAS_TMA, UPCAST)
                if FORMAT == "fp8":
                    ws = tl.load(ws_ptr + scales_of_part + k // GROUP)
                    up = _add_scaled(up, x_tile, w_tile, xs * ws, WEIGHTS_FIRST)
                else:
                    up = _add(up, x_tile, w_tile, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        y = tl.trans(y)
        up = tl.trans(up)
    return y, up


@triton.jit
def _tile(
    factor, row, k, width,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, HAS_TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load ROWS x DEPTH numbers of a factor, zeros where it ends."""
    source, num_rows, pitch = factor
    if HAS_TMA:
        tile = source.load([row, k])
    else:
        rows = row + tl.arange(0, ROWS)
        at = k + tl.arange(0, DEPTH)
        mask = (rows < num_rows)[:, None] & (at < width)[None, :]
        tile = tl.load(source + rows.to(tl.int64)[:, None] * pitch + at[None, :], mask, 0.0)
    return tile if UPCAST is None else tile.to(UPCAST)


@triton.jit
def _add(sums, x_tile, w_tile, WEIGHTS_FIRST: tl.constexpr):
    if WEIGHTS_FIRST:
        sums = tl.dot(w_tile, x_tile.T, sums, input_precision="ieee", out_dtype=sums.dtype)
    else:
        sums = tl.dot(x_tile, w_tile.T, sums, input_precision="ieee", out_dtype=sums.dtype)
    return sums


@triton.jit
def _add_scaled(sums, x_tile, w_tile, scale_of_row, WEIGHTS_FIRST: tl.constexpr):
    if WEIGHTS_FIRST:
        sums += tl.dot(w_tile, x_tile.T).to(tl.float32) * scale_of_row[None, :]
    else:
        sums += tl.dot(x_tile, w_tile.T).to(tl.float32) * scale_of_row[:, None]
    return sums


@triton.jit
def _four_bit_sums(
    y, x, x_row, w, w_row, scale_ptr, scale_pitch, width, part_channels,
    FORMAT: tl.constexpr, GATED: tl.constexpr, HAS_TMA: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return y, which is zeros, with all products added, and the same for the second part. Scales are loaded one step
    before they are needed: Triton itself moves ahead only loads of what is multiplied."""
    up_row = w_row + part_channels
    scales = _scales(scale_ptr, scale_pitch, w, w_row, 0, CHANNELS, DEPTH)
    up, up_scales = y, scales
    if GATED:
        up_scales = _scales(scale_ptr, scale_pitch, w, up_row, 0, CHANNELS, DEPTH)
    for k in range(0, width, DEPTH):
        x_tiles = _x_tiles(x, x_row, k, width, FORMAT, HAS_TMA, UPCAST, ROWS, DEPTH)
        following = _scales(scale_ptr, scale_pitch, w, w_row, k + DEPTH, CHANNELS, DEPTH)
        y = _add_four_bits(y, x_tiles, w, w_row, scales, k, width, FORMAT, HAS_TMA, CHANNELS, DEPTH)
        scales = following
        if GATED:
            following = _scales(scale_ptr, scale_pitch, w, up_row, k + DEPTH, CHANNELS, DEPTH)
            up = _add_four_bits(up, x_tiles, w, up_row, up_scales, k, width, FORMAT, HAS_TMA, CHANNELS, DEPTH)
            up_scales = following
    if FORMAT == "int4":
        y *= 8
        up *= 8
    return y, up


@triton.jit
def _x_tiles(
    x, x_row, k, width,
    FORMAT: tl.constexpr, HAS_TMA: tl.constexpr, UPCAST: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load the rows that a step multiplies: for INT4 a tile for each group, by pointers, since each tile of the TMA has
    a barrier, which costs more instructions."""
    if FORMAT == "int4":
        tiles = ()
        for group in tl.static_range(DEPTH // SCALED):
            tile = _tile(x, x_row, k + group * SCALED, width, ROWS, SCALED, False, UPCAST)
            tiles += (tile,)  # type: ignore[assignment] # Triton unrolls the loop
    else:
        tiles = (_tile(x, x_row, k, width, ROWS, DEPTH, HAS_TMA, UPCAST),)  # type: ignore[assignment] # as above
    return tiles


@triton.jit
def _add_four_bits(
    sums, x_tiles, w, w_row, scales, k, width,
    FORMAT: tl.constexpr, HAS_TMA: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add a product, or for INT4 an eighth. There a code times its scale has more bits than a bfloat16: the sum of each
    group is scaled instead, in float32."""
    codes = _tile(w, w_row, k // 2, width // 2, CHANNELS, DEPTH // 2, HAS_TMA, None)
    if FORMAT == "int4":
        groups = groups_of(codes, DEPTH // SCALED)
        scale_of_groups = groups_of(scales.to(tl.float32), DEPTH // SCALED)
        for group in tl.static_range(DEPTH // SCALED):
            w_tile = int4_eighths(groups[group]).to(x_tiles[group].dtype)
            sums += tl.dot(w_tile, x_tiles[group].T, input_precision="ieee") * scale_of_groups[group]
    else:
        sums = _add(sums, x_tiles[0], mxfp4_tile(codes, scales).to(x_tiles[0].dtype), True)
    return sums


@triton.jit
def _scales(scale_ptr, scale_pitch, w, w_row, k, CHANNELS: tl.constexpr, DEPTH: tl.constexpr):
    """Load the scales of DEPTH columns of four bits."""
    _, num_rows, _ = w
    scale = (scale_ptr, num_rows, scale_pitch)
    return _tile(scale, w_row, k // SCALED, scale_pitch, CHANNELS, DEPTH // SCALED, False, None)


@triton.jit
def _scaled(sums, x_scales, scale_ptr, offset_ptr, w_row, there, CHANNELS: tl.constexpr):
    """Return the floats that sums of int8 products stand for."""
    at = w_row + tl.arange(0, CHANNELS)
    if offset_ptr is not None:
        sums += tl.load(offset_ptr + at, there, 0)[None, :]
    return sums.to(tl.float32) * x_scales[:, None] * tl.load(scale_ptr + at, there, 0)[None, :]


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))
