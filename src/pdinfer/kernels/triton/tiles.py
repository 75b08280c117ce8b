"""What a launch over many sequences does, as small tables of integers: tiles of queries, and blocks of their contexts.

Kernels that read a context more than once read a copy of it, which lies row after row and sequence after sequence. The
rows of each sequence are padded with zeros to whole blocks, so that no block holds rows of two sequences, and nothing
that is not finite stands behind a context.

And what attention kernels share: products of tiles, and a softmax with a running maximum, block by block of what is
read (arXiv 1805.02867, algorithm 3). A kernel keeps for each row the sum of values, the sum of weights, and the largest
and the smallest score. The smallest is there because a score of -inf has no weight: times 0 it is 0, or NaN where a
score was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.arguments import PrefillCache
from pdinfer.kernels.formats.cache_rows import SCALE_GROUP
from pdinfer.kernels.triton.configs import of_copy
from pdinfer.kernels.triton.launch import launch, need

CONTEXT_BLOCK = 128
"""Rows to which a copied context is padded. Kernels read it in blocks of this many, or of a power of two below."""


class Tile(NamedTuple):
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


def need_queries(cache: PrefillCache, num_tokens: int) -> None:
    """Raise ValueError where lengths are not those of so many queries."""
    need(sum(cache.query_lens) == num_tokens, f"{sum(cache.query_lens)} queries are said to be there, got {num_tokens}")


def tiles_of(cache: PrefillCache, size: int) -> list[Tile]:
    """Return the tiles of up to `size` queries, in the order of the tokens."""
    tiles: list[Tile] = []
    row = 0
    for queries, _, context in cache.sequences():
        tiles += [
            Tile(first, min(size, queries.stop - first), context - queries.stop + first, row)
            for first in range(queries.start, queries.stop, size)
        ]
        row += triton.cdiv(context, CONTEXT_BLOCK) * CONTEXT_BLOCK
    return tiles


def copy_latents(cache: PrefillCache, rank: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the latents [rows, C] and rotated keys [rows, R] of all contexts, unpacked to `dtype`. C is padded with
    zeros to a multiple of 16, and R to a power of two of at least 16."""
    pages_PGW, device, config = cache.pages_PGW, cache.pages_PGW.device, of_copy(dtype)
    blocks, padded_rank = _context_blocks(cache), triton.cdiv(rank, 16) * 16
    c = torch.empty(len(blocks) * CONTEXT_BLOCK, padded_rank, dtype=dtype, device=device)
    k_rope = torch.empty(len(blocks) * CONTEXT_BLOCK, padded(rope), dtype=dtype, device=device)
    launch(
        _copy_rows, (len(blocks), CONTEXT_BLOCK // config.tiles["ROWS"]),
        pages_PGW, cache.table_BM, blocks, c, k_rope, *_strides(pages_PGW, cache.table_BM), cache.page_size, rank,
        rank + rank // SCALE_GROUP * 4 if cache.packed else rank, rope, padded_rank,
        CHUNK=min(SCALE_GROUP, triton.next_power_of_2(padded_rank)), ROPE=k_rope.shape[1], IS_PACKED=cache.packed,
        BLOCK=CONTEXT_BLOCK, **config.constants,
    )  # fmt: skip
    return c, k_rope


def copy_index_keys(cache: PrefillCache, width: int, dtype: torch.dtype) -> Tensor:
    """Return the index keys [rows, Y] of all contexts: packed ones as their values, still transformed. A key that is
    not finite is all NaN. Y is padded with zeros to a power of two of at least 16."""
    blocks, config = _context_blocks(cache), of_copy(dtype)
    pages = cache.pages_PGW.view(torch.int32) if cache.packed else cache.pages_PGW
    keys = torch.empty(len(blocks) * CONTEXT_BLOCK, padded(width), dtype=dtype, device=pages.device)
    launch(
        _copy_keys, (len(blocks), CONTEXT_BLOCK // config.tiles["ROWS"]),
        pages, cache.table_BM, blocks, keys, *_strides(pages, cache.table_BM), cache.page_size, width,
        WIDTH=keys.shape[1], IS_PACKED=cache.packed, BLOCK=CONTEXT_BLOCK, **config.constants,
    )  # fmt: skip
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


def _context_blocks(cache: PrefillCache) -> Tensor:
    """Return for each block of copied rows its row of the page table, its first position, and the length of the
    context: int32 [blocks, 3]."""
    blocks = [
        (row, position, context)
        for row, context in enumerate(cache.context_lens)
        for position in range(0, context, CONTEXT_BLOCK)
    ]
    return table_of(blocks, 3, cache.pages_PGW.device)


def table_of(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    """Return tiles, or other rows of that many integers, as int32 on the device."""
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
    copy_row(
        pages_ptr, source, there, out_ptr + row * out_pitch, rope_ptr + row * ROPE, width, rope_start, rope, out_pitch,
        ROPE, CHUNK, ROPE, IS_PACKED,
    )  # fmt: skip


@triton.jit
def copy_row(
    pages_ptr, source, there, out_at, rope_at, width, rope_start, rope, out_width, rope_width, CHUNK: tl.constexpr,
    ROPE: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """Copy the latents and the rotated keys that start at `source`, and zeros where they are not there, to the
    addresses `out_at` and `rope_at`. The copies are as wide or wider, filled up with zeros."""
    dtype = out_at.dtype.element_ty
    for first in range(0, out_width, CHUNK):
        column = first + tl.arange(0, CHUNK)
        mask = there[:, None] & (column < width)[None, :]
        at = source[:, None] + column[None, :]
        if IS_PACKED:
            x = tl.load(pages_ptr.to(tl.pointer_type(tl.float8e4nv)) + at, mask, 0.0).to(tl.float32)
            scale_at = (pages_ptr + source + width).to(tl.pointer_type(tl.float32)) + first // CHUNK
            x = x * tl.load(scale_at, there, 0.0)[:, None]
        else:
            x = tl.load(pages_ptr + at, mask, 0.0)
        tl.store(out_at[:, None] + column[None, :], x.to(dtype), (column < out_width)[None, :])
    column = tl.arange(0, ROPE)
    mask = there[:, None] & (column < rope)[None, :]
    if IS_PACKED:
        k_rope_at = (pages_ptr + source + rope_start).to(tl.pointer_type(tl.bfloat16))
    else:
        k_rope_at = pages_ptr + source + rope_start
    k_rope = tl.load(k_rope_at[:, None] + column[None, :], mask, 0.0)
    tl.store(rope_at[:, None] + column[None, :], k_rope.to(dtype), (column < rope_width)[None, :])


def upcasts(x: Tensor) -> bool:
    """Return whether products of x must be those of float32 numbers: x is float32, or lies on a CPU, where Triton's
    interpreter multiplies nothing else."""
    return x.dtype == torch.float32 or x.device.type == "cpu"


@triton.jit
def dot(a, b, sums, UPCAST: tl.constexpr):
    """Return a . b, added to `sums` unless these are None, in float32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def weigh(scores, values, out, total, highest, UPCAST: tl.constexpr):
    """Add the values of a block, weighed by 2^scores, to what a kernel keeps: (out, total, highest). Scores are -inf
    where a row sees nothing, and each row has seen something by then, or has a finite `highest`."""
    above = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - above[:, None])
    kept = tl.exp2(highest - above)
    total = total * kept + tl.sum(weights, 1)
    out = dot(weights.to(values.dtype) if not UPCAST else weights, values, out * kept[:, None], UPCAST)
    return out, total, above
