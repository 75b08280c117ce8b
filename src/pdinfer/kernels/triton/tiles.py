"""What a launch over many sequences does, as small tables of integers: tiles of queries, and blocks of their contexts.

Kernels that read a context more than once read a copy of it, which lies row after row and sequence after sequence. The
rows of each sequence are padded with zeros to whole blocks, so that no block holds rows of two sequences, and nothing
that is not finite stands behind a context.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.formats.cache_rows import PACKED, SCALE_GROUP
from pdinfer.kernels.triton.configs import of_copy
from pdinfer.kernels.triton.launch import launch

CONTEXT_BLOCK = 128
"""Rows to which a copied context is padded. Kernels read it in blocks of this many, or of a power of two below."""


@attrs.frozen
class Tile:
    """Queries of one sequence that one block of threads computes. Positions count from the start of the sequence, and
    `context_row` is the row where its copied context starts."""

    first_token: int
    num_tokens: int
    position: int
    context_row: int

    @property
    def end(self) -> int:
        """The position behind the last query."""
        return self.position + self.num_tokens


def tiles_of(query_lens: Sequence[int], context_lens: Sequence[int], size: int) -> list[Tile]:
    """Return the tiles of up to `size` queries, in the order of the tokens."""
    tiles, token, row = [], 0, 0
    for num_queries, context in zip(query_lens, context_lens, strict=True):
        for first in range(0, num_queries, size):
            count = min(size, num_queries - first)
            tiles.append(Tile(token + first, count, context - num_queries + first, row))
        token += num_queries
        row += triton.cdiv(context, CONTEXT_BLOCK) * CONTEXT_BLOCK
    return tiles


def tile_table(tiles: Sequence[Tile], device: torch.device) -> Tensor:
    """Return the tiles as int32 [tiles, 4] on the device."""
    return _table([attrs.astuple(tile) for tile in tiles], 4, device)


def copy_latents(
    pages_PGW: Tensor, page_table_BM: Tensor, context_lens: Sequence[int], rank: int, rope: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the latents [rows, C] and rotated keys [rows, R] of all contexts, unpacked to `dtype`. C is padded with
    zeros to a multiple of 16, and R to a power of two of at least 16."""
    blocks, config = _context_blocks(context_lens, pages_PGW.device), of_copy(dtype)
    num_rows, padded_rank = len(blocks) * CONTEXT_BLOCK, triton.cdiv(rank, 16) * 16
    c = torch.empty(num_rows, padded_rank, dtype=dtype, device=pages_PGW.device)
    k_rope = torch.empty(num_rows, padded(rope), dtype=dtype, device=pages_PGW.device)
    launch(
        _copy_rows,
        (len(blocks), CONTEXT_BLOCK // config.tiles["ROWS"]),
        pages_PGW,
        page_table_BM,
        blocks,
        c,
        k_rope,
        *_strides(pages_PGW, page_table_BM),
        pages_PGW.shape[1],
        rank,
        rank if pages_PGW.dtype != PACKED else rank + rank // SCALE_GROUP * 4,
        rope,
        padded_rank,
        CHUNK=min(SCALE_GROUP, triton.next_power_of_2(padded_rank)),
        ROPE=k_rope.shape[1],
        IS_PACKED=pages_PGW.dtype == PACKED,
        BLOCK=CONTEXT_BLOCK,
        **config.constants,
    )
    return c, k_rope


def copy_index_keys(
    pages_PGY: Tensor, page_table_BM: Tensor, context_lens: Sequence[int], width: int, dtype: torch.dtype
) -> Tensor:
    """Return the index keys [rows, Y] of all contexts: packed ones as their values, still transformed. A key that is
    not finite is all NaN. Y is padded with zeros to a power of two of at least 16."""
    blocks, config = _context_blocks(context_lens, pages_PGY.device), of_copy(dtype)
    keys = torch.empty(len(blocks) * CONTEXT_BLOCK, padded(width), dtype=dtype, device=pages_PGY.device)
    packed = pages_PGY.dtype == PACKED
    pages = pages_PGY.view(torch.int32) if packed else pages_PGY
    launch(
        _copy_keys,
        (len(blocks), CONTEXT_BLOCK // config.tiles["ROWS"]),
        pages,
        page_table_BM,
        blocks,
        keys,
        *_strides(pages, page_table_BM),
        pages.shape[1],
        width,
        WIDTH=keys.shape[1],
        IS_PACKED=packed,
        BLOCK=CONTEXT_BLOCK,
        **config.constants,
    )
    return keys


def padded(width: int) -> int:
    """Return the width that a product of tiles takes: a power of two, 16 or more."""
    return max(16, 1 << (width - 1).bit_length())


def padded_parts(x: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
    """Return x, whose axis `dim` has parts of these sizes, with each of them padded with zeros to a width that a
    product of tiles takes: x itself where they have one."""
    widths = tuple(map(padded, sizes))
    if widths == sizes:
        return x
    parts = []
    for part, width in zip(x.split(sizes, dim), widths, strict=True):
        more = list(part.shape)
        more[dim] = width - part.shape[dim]
        parts.append(torch.cat((part, part.new_zeros(more)), dim))
    return torch.cat(parts, dim)


def _strides(pages: Tensor, page_table_BM: Tensor) -> tuple[int, int, int]:
    return pages.stride(0), pages.stride(1), page_table_BM.stride(0)


def _context_blocks(context_lens: Sequence[int], device: torch.device) -> Tensor:
    """Return for each block of copied rows its row of the page table, its first position, and the length of the
    context: int32 [blocks, 3]."""
    starts = ((row, context, range(0, context, CONTEXT_BLOCK)) for row, context in enumerate(context_lens))
    return _table([(row, at, context) for row, context, positions in starts for at in positions], 3, device)


def _table(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu").view(-1, width)
    return table.to(device, non_blocking=True)


@triton.jit
def cached_row(page_table_ptr, positions, there, page_size, page_pitch, slot_pitch):
    """Return where the rows at these positions of a sequence start in its pages, in elements."""
    page = tl.load(page_table_ptr + positions // page_size, there, 0).to(tl.int64)
    return page * page_pitch + (positions % page_size) * slot_pitch


@triton.jit
def load_keys(pages_ptr, source, there, width, dtype: tl.constexpr, WIDTH: tl.constexpr, IS_PACKED: tl.constexpr):
    """Return the index keys that start at `source`, and a scale for each: packed ones, in pages of int32, as they are
    stored, others with 1. A key that is not finite is all NaN, or its scale is not finite either."""
    if IS_PACKED:
        # rows of 132 bytes lie at multiples of 4
        word = tl.arange(0, WIDTH // 4)
        words = tl.load(pages_ptr + source[:, None] + word[None, :], there[:, None] & (word < width // 4)[None, :], 0)
        keys = (words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]).to(tl.uint8)
        keys = tl.reshape(keys, (source.shape[0], WIDTH)).to(tl.float8e4nv, bitcast=True).to(dtype)
        scales = tl.load(pages_ptr + source + width // 4, there, 0).to(tl.float32, bitcast=True)
    else:
        column = tl.arange(0, WIDTH)
        keys = tl.load(pages_ptr + source[:, None] + column[None, :], there[:, None] & (column < width)[None, :], 0.0)
        keys = keys.to(tl.float32)
        keys = (keys + tl.sum(keys * 0, 1)[:, None]).to(dtype)
        scales = tl.full(source.shape, 1, tl.float32)
    return keys, scales


@triton.jit
def _copy_keys(
    pages_ptr, table_ptr, blocks_ptr, out_ptr, page_pitch, slot_pitch, table_pitch, page_size, width,
    WIDTH: tl.constexpr, IS_PACKED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy the index keys of one part of a block. Rows behind the context become zeros."""
    row, sequence, position, there = _part(blocks_ptr, BLOCK, ROWS)
    source = cached_row(table_ptr + sequence * table_pitch, position, there, page_size, page_pitch, slot_pitch)
    keys, scales = load_keys(pages_ptr, source, there, width, tl.float32, WIDTH, IS_PACKED)
    keys *= scales[:, None]
    column = tl.arange(0, WIDTH)
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], keys.to(out_ptr.dtype.element_ty))


@triton.jit
def _part(blocks_ptr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return which rows of a copy a block of threads writes, of which sequence and positions they are, and which of
    them there are."""
    block, first = tl.program_id(0), tl.program_id(1) * ROWS
    position = tl.load(blocks_ptr + block * 3 + 1) + first + tl.arange(0, ROWS)
    row = (block * BLOCK + first + tl.arange(0, ROWS)).to(tl.int64)
    return row, tl.load(blocks_ptr + block * 3), position, position < tl.load(blocks_ptr + block * 3 + 2)


@triton.jit
def _copy_rows(
    pages_ptr, table_ptr, blocks_ptr, out_ptr, rope_ptr, page_pitch, slot_pitch, table_pitch, page_size, width,
    rope_start, rope, out_pitch, CHUNK: tl.constexpr, ROPE: tl.constexpr, IS_PACKED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Copy the rows of one part of a block: `width` numbers, which packed rows hold with a scale for each chunk, and
    `rope` more from `rope_start` on. Rows behind the context become zeros."""
    row, sequence, position, there = _part(blocks_ptr, BLOCK, ROWS)
    source = cached_row(table_ptr + sequence * table_pitch, position, there, page_size, page_pitch, slot_pitch)
    dtype = out_ptr.dtype.element_ty
    for first in range(0, out_pitch, CHUNK):
        column = first + tl.arange(0, CHUNK)
        mask = there[:, None] & (column < width)[None, :]
        at = source[:, None] + column[None, :]
        if IS_PACKED:
            x = tl.load(pages_ptr.to(tl.pointer_type(tl.float8e4nv)) + at, mask, 0.0).to(tl.float32)
            scale_at = (pages_ptr + source + width).to(tl.pointer_type(tl.float32)) + first // CHUNK
            x = x * tl.load(scale_at, there, 0.0)[:, None]
        else:
            x = tl.load(pages_ptr + at, mask, 0.0)
        tl.store(out_ptr + row[:, None] * out_pitch + column[None, :], x.to(dtype), (column < out_pitch)[None, :])
    column = tl.arange(0, ROPE)
    mask = there[:, None] & (column < rope)[None, :]
    if IS_PACKED:
        k_rope_at = (pages_ptr + source + rope_start).to(tl.pointer_type(tl.bfloat16))
    else:
        k_rope_at = pages_ptr + source + rope_start
    k_rope = tl.load(k_rope_at[:, None] + column[None, :], mask, 0.0)
    tl.store(rope_ptr + row[:, None] * ROPE + column[None, :], k_rope.to(dtype))
