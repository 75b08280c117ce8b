"""Absorbed attention of a decode step: contexts are read in parts, which a second kernel joins.

A part of a sequence is read once for all of its rows (queries times heads) that are in one tile. The grid follows from
shapes alone, and lengths are divided into parts on the device. What every query sees needs no mask, so its latents go
from shared memory to the tensor cores. The newest tokens are a part of their own: there some latents count for some
queries only, or were never written, and 0 times NaN is NaN."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache
from pdinfer.kernels.formats.cache_rows import PACKED, SCALE_GROUP
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kernels.triton import configs
from pdinfer.kernels.triton.latent_parts import PartsShape, attend_in_shared_memory, attend_through_registers, weigh
from pdinfer.kernels.triton.launch import launch
from pdinfer.kernels.triton.tiles import padded

WIDEST_LATENT = 512
WIDEST_ROPE = 128
SMALLEST_BLOCK = 16
"""Tokens: the fewest that tensor cores multiply at once."""


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return a sentence when the kernel was not made for these sizes, and None when it was or they are not known."""
    if spec.page_size is None or spec.kv_lora_rank is None or spec.qk_rope_head_dim is None:
        return None
    packed = spec.kv_format == "fp8"
    dtype = torch.uint8 if packed else spec.dtype
    return misfit(spec.kv_lora_rank, spec.qk_rope_head_dim, spec.page_size, dtype)


def misfit(latent: int, rope: int, page_size: int, pages: torch.dtype) -> str | None:
    """Return a sentence about pages of that dtype that the kernel cannot read, and None for others."""
    if page_size % SMALLEST_BLOCK:
        return f"reads pages of a multiple of {SMALLEST_BLOCK} tokens, these have {page_size}"
    if latent > WIDEST_LATENT or rope > WIDEST_ROPE:
        return f"reads up to {WIDEST_LATENT} + {WIDEST_ROPE} elements of a row, these have {latent} + {rope}"
    if pages != PACKED:
        parts = (latent * pages.itemsize, rope * pages.itemsize)
    elif latent % SCALE_GROUP:
        return f"reads packed latents of a multiple of {SCALE_GROUP} elements, these have {latent}"
    else:
        parts = (latent + latent // SCALE_GROUP * 4, rope * 2)
    if any(size % 16 for size in parts):
        return f"reads latents and rotary keys of a multiple of 16 bytes, these have {parts[0]} and {parts[1]}"
    return None


def mla_decode(q_latent_BQHC: Tensor, q_rope_BQHR: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
    batch, num_queries, heads, latent = q_latent_BQHC.shape
    pages_PGW, page_size = cache.pages_PGW, cache.page_size
    rope, rows = q_rope_BQHR.shape[-1], num_queries * heads
    aligned = pages_PGW.is_contiguous() and pages_PGW.data_ptr() % 16 == 0
    if not aligned or misfit(latent, rope, page_size, pages_PGW.dtype) is not None:
        return torch_attention.mla_decode(q_latent_BQHC, q_rope_BQHR, cache, scale=scale)
    floats = q_latent_BQHC.dtype == torch.float32
    upcast = floats or q_latent_BQHC.device.type == "cpu"
    config = configs.of_decode(rows, "float32" if floats else "packed" if cache.packed else "plain")
    tiles = config.tiles
    part_of_page = page_size & -page_size  # the largest power of two that divides it
    tokens = {name: min(tiles[name], part_of_page) for name in ("N", "NEWEST_N")}
    num_tiles, blocks = triton.cdiv(rows, tiles["M"]), cache.table_BM.shape[1] * page_size // tokens["N"]
    at_once = (config.blocks or 1) * configs.MULTIPROCESSORS
    parts = configs.parts_of(num_tiles * batch, blocks, at_once) + 1  # the newest tokens
    out_BQHC = torch.empty_like(q_latent_BQHC, memory_format=torch.contiguous_format)
    sums = out_BQHC.new_empty(batch, parts, rows, latent, dtype=torch.float32)
    lse = out_BQHC.new_empty(batch, parts, rows, dtype=torch.float32)
    launch(
        _attend_to_parts, (num_tiles, batch, parts),
        q_latent_BQHC.contiguous(), q_rope_BQHR.contiguous(), pages_PGW, cache.table_BM, cache.lens_B, sums, lse,
        scale * math.log2(math.e), pages_PGW.shape[0] * page_size, cache.table_BM.stride(0),
        S=PartsShape(rows, heads, latent, rope, padded(latent), padded(rope), page_size, cache.packed, upcast),
        **config.constants | tokens,
    )  # fmt: skip
    constants = configs.JOIN_PARTS.constants
    launch(_join_parts, (batch * rows,), sums, lse, out_BQHC, parts, ROWS=rows, LATENT=latent, **constants)
    return out_BQHC


@triton.jit
def _attend_to_parts(
    q_latent_ptr, q_rope_ptr, pages_ptr, table_ptr, lens_ptr, sums_ptr, lse_ptr, scale, num_slots, table_pitch,
    S: tl.constexpr, M: tl.constexpr, N: tl.constexpr, NEWEST_N: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of rows to a part of their sequence. Of an empty part leave nothing but a logarithm of
    -inf."""
    tile, sequence, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    parts = tl.num_programs(2)
    context = tl.load(lens_ptr + sequence).to(tl.int32)
    seen_by_all = (context - S.rows // S.heads + 1) // N * N
    share = tl.cdiv(seen_by_all // N, parts - 1) * N
    first = part * share
    stop = tl.minimum(first + share, seen_by_all)
    newest = part == parts - 1
    if newest:
        first = seen_by_all
        stop = context

    first_row = tile * M
    part_row = (sequence * parts + part) * S.rows
    q = q_latent_ptr + sequence * S.rows * S.latent, q_rope_ptr + sequence * S.rows * S.rope
    cache = pages_ptr, table_ptr + sequence * table_pitch, num_slots
    out = sums_ptr + part_row * S.latent, lse_ptr + part_row
    if first >= stop:
        row = first_row + tl.arange(0, M)
        tl.store(out[1] + row, tl.full([M], float("-inf"), tl.float32), mask=row < S.rows)
    elif S.packed:
        attend_through_registers(q, cache, out, scale, first_row, first, stop, context, S, M, N)
    elif newest:
        attend_through_registers(q, cache, out, scale, first_row, first, stop, context, S, M, NEWEST_N)
    else:
        attend_in_shared_memory(q, cache, out, scale, first_row, first, stop, S, M, N)


@triton.jit
def _join_parts(sums_ptr, lse_ptr, out_ptr, parts, ROWS: tl.constexpr, LATENT: tl.constexpr, AT_ONCE: tl.constexpr):
    """Join the parts of a row. Of an empty one nothing but the logarithm was written."""
    C: tl.constexpr = triton.next_power_of_2(LATENT)
    sequence, row = (tl.program_id(0) // ROWS).to(tl.int64), tl.program_id(0) % ROWS
    column = tl.arange(0, C)[None, :]
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, C], tl.float32)
    for first in tl.range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)[:, None]
        part_row = (sequence * parts + part) * ROWS + row
        lse = tl.load(lse_ptr + part_row, mask=part < parts, other=float("-inf"))
        there = lse != float("-inf")
        sums = tl.load(sums_ptr + part_row * LATENT + column, mask=there & (column < LATENT), other=0)
        weights, kept, top, total = weigh(lse, tl.where(there, lse, 0), top, total, 0)
        out = out * kept + tl.sum(sums * weights, 0, keep_dims=True)
    out_ptrs = out_ptr + tl.program_id(0).to(tl.int64) * LATENT + column
    tl.store(out_ptrs, (out / total).to(out_ptr.dtype.element_ty), mask=column < LATENT)
