"""Absorbed attention of tokens to positions that an indexer chose for each of them, in prefill and decode.

With as many heads as one tile has, a block of threads has the heads of one token, and one part of its positions where
there are few tokens; parts are joined by a second kernel. Rows come by asynchronous copies of 16 bytes, because each
has an address of its own. With more heads each tile would look up and unpack the same rows: there a kernel of their own
copies them one after the other, and `mla_decode` reads each token's copies as the only page of a sequence."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, TokenCache
from pdinfer.kernels.formats.cache_rows import SCALE_GROUP
from pdinfer.kernels.triton.configs import JOIN_CHOSEN, of_chosen, of_copy
from pdinfer.kernels.triton.launch import launch
from pdinfer.kernels.triton.mla_decode import misfit, mla_decode
from pdinfer.kernels.triton.tiles import cached_row, copy_row, dot, padded, padded_parts, upcasts, weigh

MOST_CHOSEN_HEADS = 64
"""Of a tile, and so of a token whose rows are not copied."""
SMALLEST_ROOM = 64
"""Copied rows of a token: a tile of `mla_decode`."""
COPIED_BYTES = 256 << 20
"""Copies that lie in memory at once: those of 113 tokens of DeepSeek-V3.2, which are a step of decode. Prompts take
turns."""
FILLING_BLOCKS = 264
"""Blocks of threads that give each of a card's 132 multiprocessors two: with fewer, positions are cut into parts."""


def mla_sparse(
    q_latent_THC: Tensor, q_rope_THR: Tensor, cache: TokenCache, selected_TS: Tensor, *, scale: float
) -> Tensor:
    (num_tokens, num_heads, rank), rope, size = q_latent_THC.shape, q_rope_THR.shape[-1], selected_TS.shape[1]
    if num_heads > MOST_CHOSEN_HEADS and misfit(rank, rope, SMALLEST_ROOM, q_latent_THC.dtype) is None:
        return _attend_to_copies(q_latent_THC, q_rope_THR, cache, selected_TS, scale)
    pages_PGW, table_BM = cache.pages_PGW, cache.table_BM
    rope_start, rows = rank + rank // SCALE_GROUP * 4 if cache.packed else rank, num_tokens * num_heads
    out_THC = torch.empty_like(q_latent_THC, memory_format=torch.contiguous_format)
    config = of_chosen(num_heads, q_latent_THC.dtype)
    heads, block = config.tiles["BLOCK_H"], config.tiles["BLOCK_S"]
    tiles = triton.cdiv(num_heads, heads)
    parts = max(1, min(FILLING_BLOCKS // max(1, num_tokens * tiles), size // (4 * block)))
    part_size = triton.cdiv(triton.cdiv(size, block), parts) * block
    sums = totals = highest = None
    if parts > 1:
        sums = torch.empty(parts, *out_THC.shape, dtype=torch.float32, device=out_THC.device)
        totals, highest = torch.empty_like(sums[..., :2]).unbind(-1)
    launch(
        _attend_to_chosen, (tiles, num_tokens, parts),
        padded_parts(q_latent_THC, (rank,), -1).contiguous(), padded_parts(q_rope_THR, (rope,), -1).contiguous(),
        pages_PGW, table_BM, cache.sequence_T, selected_TS, out_THC if sums is None else sums, totals, highest,
        scale * math.log2(math.e), *(rows, num_heads, rank, rope, rope_start, size, part_size, cache.page_size),
        *(pages_PGW.stride(0), pages_PGW.stride(1), table_BM.stride(0), selected_TS.stride(0)),
        RANK=padded(rank), ROPE=padded(rope), IS_PACKED=cache.packed, UPCAST=upcasts(q_latent_THC), **config.constants,
    )  # fmt: skip
    if sums is not None:
        constants = JOIN_CHOSEN.constants
        launch(_join, (rows,), sums, totals, highest, out_THC, rows, rank, parts, RANK=padded(rank), **constants)
    return out_THC


def _attend_to_copies(
    q_latent_THC: Tensor, q_rope_THR: Tensor, cache: TokenCache, selected_TS: Tensor, scale: float
) -> Tensor:
    num_tokens, _, rank = q_latent_THC.shape
    rope, dtype = q_rope_THR.shape[-1], q_latent_THC.dtype
    # a kernel is compiled for a size of pages, and prompts choose any number of positions below the largest
    room = max(SMALLEST_ROOM, triton.next_power_of_2(selected_TS.shape[1]))
    at_once = max(1, COPIED_BYTES // (room * (rank + rope) * dtype.itemsize))
    parts = []
    for first in range(0, max(1, num_tokens), at_once):
        part = slice(first, first + at_once)
        copies_TSW = q_latent_THC.new_empty(len(selected_TS[part]), room, rank + rope)
        _copy(cache, cache.sequence_T[part], selected_TS[part], copies_TSW, rank, rope)
        page_T1 = torch.arange(len(copies_TSW), device=copies_TSW.device, dtype=torch.int32)[:, None]
        copied = DecodeCache(copies_TSW, page_T1, (selected_TS[part] >= 0).sum(1))
        parts.append(mla_decode(q_latent_THC[part, None], q_rope_THR[part, None], copied, scale=scale)[:, 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _copy(cache: TokenCache, sequence_T: Tensor, selected_TS: Tensor, copies_TSW: Tensor, rank: int, rope: int) -> None:
    """Copy what tokens chose, unpacked, to the first rows of their copies."""
    (num_tokens, size), pages_PGW, config = selected_TS.shape, cache.pages_PGW, of_copy(copies_TSW.dtype)
    launch(
        _copy_chosen, (num_tokens, triton.cdiv(size, config.tiles["ROWS"])),
        pages_PGW, cache.table_BM, sequence_T, selected_TS, copies_TSW,
        *(rank, rope, rank + rank // SCALE_GROUP * 4 if cache.packed else rank, size, copies_TSW.shape[1]),
        *(cache.page_size, pages_PGW.stride(0), pages_PGW.stride(1), cache.table_BM.stride(0), selected_TS.stride(0)),
        CHUNK=min(SCALE_GROUP, triton.next_power_of_2(rank)), ROPE=padded(rope), IS_PACKED=cache.packed,
        **config.constants,
    )  # fmt: skip


@triton.jit
def _copy_chosen(
    pages_ptr, table_ptr, sequence_ptr, selected_ptr, copies_ptr, rank, rope, rope_start, size, room, page_size,
    page_pitch, slot_pitch, table_pitch, selected_pitch, CHUNK: tl.constexpr, ROPE: tl.constexpr,
    IS_PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy some of the rows that one token chose."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    position = tl.load(selected_ptr + token * selected_pitch + at, at < size, -1).to(tl.int32)
    there = position >= 0
    table_ptr += tl.load(sequence_ptr + token).to(tl.int64) * table_pitch
    source = cached_row(table_ptr, position, there, page_size, page_pitch, slot_pitch)
    copy_at = copies_ptr + (token * room + at) * (rank + rope)
    copy_row(
        pages_ptr, source, there, copy_at, copy_at + rank, rank, rope_start, rope, rank, rope, CHUNK, ROPE, IS_PACKED
    )  # fmt: skip


@triton.jit
def _load_rows(
    pages_ptr, source, there, rank, rope, rope_start, dtype: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    IS_PACKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return the latents and the rotated keys that start at `source`, and zeros where they are not there."""
    column, rope_column = tl.arange(0, RANK), tl.arange(0, ROPE)
    mask = there[:, None] & (column < rank)[None, :]
    rope_mask = there[:, None] & (rope_column < rope)[None, :]
    if IS_PACKED:
        exact: tl.constexpr = tl.float32 if UPCAST else dtype
        numbers_at = pages_ptr.to(tl.pointer_type(tl.float8e4nv)) + source[:, None] + column[None, :]
        numbers = tl.load(numbers_at, mask, 0.0).to(exact)
        group = tl.arange(0, RANK // 128)
        scales_at = (pages_ptr + source + rank).to(tl.pointer_type(tl.float32))[:, None] + group[None, :]
        scales = tl.load(scales_at, there[:, None] & (group < rank // 128)[None, :], 0.0).to(exact)
        # scales are powers of two, so that this is exact
        c = tl.reshape(numbers, (source.shape[0], RANK // 128, 128)) * scales[:, :, None]
        c = tl.reshape(c, (source.shape[0], RANK))
        k_rope_at = (pages_ptr + source + rope_start).to(tl.pointer_type(tl.bfloat16))
        k_rope = tl.load(k_rope_at[:, None] + rope_column[None, :], rope_mask, 0.0).to(dtype)
    else:
        c = tl.load(pages_ptr + source[:, None] + column[None, :], mask, 0.0)
        k_rope = tl.load(pages_ptr + source[:, None] + rope_start + rope_column[None, :], rope_mask, 0.0)
    return c, k_rope


@triton.jit
def _attend_to_chosen(
    q_ptr, q_rope_ptr, pages_ptr, table_ptr, sequence_ptr, selected_ptr, out_ptr, totals_ptr, highest_ptr, scale,
    num_rows, num_heads, rank, rope, rope_start, size, part_size, page_size, page_pitch, slot_pitch, table_pitch,
    selected_pitch, RANK: tl.constexpr, ROPE: tl.constexpr, IS_PACKED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Attend with some heads of one token to one part of what it chose. Writes the result, or with `totals_ptr` the
    sums to join. `scale` is that of the softmax in base 2."""
    token, part = tl.program_id(1), tl.program_id(2)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    first = token * num_heads + tl.program_id(0) * BLOCK_H
    # heads of the next token may come along, and are not stored
    q = tl.make_tensor_descriptor(q_ptr, [num_rows, RANK], [RANK, 1], [BLOCK_H, RANK]).load([first, 0])
    q_rope = tl.make_tensor_descriptor(q_rope_ptr, [num_rows, ROPE], [ROPE, 1], [BLOCK_H, ROPE]).load([first, 0])
    table_ptr += tl.load(sequence_ptr + token).to(tl.int64) * table_pitch
    selected_ptr += token.to(tl.int64) * selected_pitch

    out = tl.zeros([BLOCK_H, RANK], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    # finite, because a whole block may be no position at all
    highest = tl.full([BLOCK_H], -3.4028234e38, tl.float32)
    lowest = tl.full([BLOCK_H], float("inf"), tl.float32)
    end = tl.minimum(size, (part + 1) * part_size)
    for start in range(part * part_size, end, BLOCK_S):
        at = start + tl.arange(0, BLOCK_S)
        position = tl.load(selected_ptr + at, at < end, -1).to(tl.int32)
        there = position >= 0
        source = cached_row(table_ptr, position, there, page_size, page_pitch, slot_pitch)
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        c, k_rope = _load_rows(
            pages_ptr, source, there, rank, rope, rope_start, dtype, RANK, ROPE, IS_PACKED, UPCAST
        )  # fmt: skip
        scores = dot(q_rope, k_rope.T, dot(q, c.T, None, UPCAST), UPCAST) * scale
        lowest = tl.minimum(lowest, tl.min(tl.where(there[None, :], scores, 0), 1))
        scores = tl.where(there[None, :], scores, float("-inf"))
        out, total, highest = weigh(scores, c, out, total, highest, UPCAST)

    total += lowest * 0
    row = token.to(tl.int64) * num_heads + head
    if totals_ptr is None:
        out /= total[:, None]
    else:
        row += part.to(tl.int64) * num_rows
        tl.store(totals_ptr + row * 2, total, head < num_heads)
        tl.store(highest_ptr + row * 2, highest, head < num_heads)
    column = tl.arange(0, RANK)
    there = (head < num_heads)[:, None] & (column < rank)[None, :]
    tl.store(out_ptr + row[:, None] * rank + column[None, :], out.to(out_ptr.dtype.element_ty), there)


@triton.jit
def _join(sums_ptr, totals_ptr, highest_ptr, out_ptr, num_rows, rank, parts, RANK: tl.constexpr):
    """Join the parts of one head of one token. A part without positions has the smallest maximum, so that it weighs
    nothing beside others."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, RANK)
    sums = tl.zeros([RANK], tl.float32)
    total, highest = 0.0, -3.4028234e38
    for part in range(parts):
        at = row + part * num_rows
        above = tl.maximum(highest, tl.load(highest_ptr + at * 2))
        kept, weight = tl.exp2(highest - above), tl.exp2(tl.load(highest_ptr + at * 2) - above)
        sums = sums * kept + tl.load(sums_ptr + at * rank + column, column < rank, 0.0) * weight
        total = total * kept + tl.load(totals_ptr + at * 2) * weight
        highest = above
    tl.store(out_ptr + row * rank + column, (sums / total).to(out_ptr.dtype.element_ty), column < rank)
