"""What sparse attention reads: scores of all index keys that a token sees, and the positions of the best of them.

Scores of a launch lie in memory, one row per query. Queries of packed keys are transformed as the keys are. In bfloat16
such a query is the sum of two numbers, so that it is as near to float32 as a sum of its length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, PagedCache, PrefillCache
from pdinfer.kernels.formats.cache_rows import PACKED
from pdinfer.kernels.triton.configs import SELECT, TURN_QUERIES, Config, of_index_scores
from pdinfer.kernels.triton.launch import launch
from pdinfer.kernels.triton.tiles import (
    cached_row,
    copy_index_keys,
    dot,
    load_keys,
    need_queries,
    padded,
    table_of,
    tiles_of,
    upcasts,
)

SCORES_BYTES = 256 << 20
"""The memory for scores of a prefill: its tiles of queries are scored in groups that fit."""
DECODE_BLOCKS = 1024
"""How many blocks of threads share the contexts of a decode step, so that most have work where the table is wide."""


def index_topk(q_TXY: Tensor, weights_TX: Tensor, cache: PrefillCache, *, top_k: int) -> Tensor:
    num_tokens, _, width = q_TXY.shape
    need_queries(cache, num_tokens)
    longest = max(cache.context_lens, default=0)
    selected_TS = torch.empty(num_tokens, min(top_k, longest), dtype=torch.int64, device=q_TXY.device)
    if not num_tokens:
        return selected_TS
    queries = _queries(q_TXY, cache)
    config = of_index_scores(queries.dtype, decode=False)
    keys_SY = copy_index_keys(cache, width, queries.dtype)
    size = config.tiles["BLOCK_Q"]
    table = table_of(tiles_of(cache, size), 4, q_TXY.device)
    pitch = triton.cdiv(longest, 128) * 128
    for tiles in table.split(max(1, SCORES_BYTES // (4 * pitch * size))):
        scores = torch.empty(len(tiles) * size, pitch, dtype=torch.float32, device=q_TXY.device)
        _score(queries, weights_TX, keys_SY, scores, config, tiles, (pitch, len(tiles)), None)
        _select_best(scores, tiles, selected_TS, rows=size, num_queries=0)
    return selected_TS


def index_topk_decode(q_BQXY: Tensor, weights_BQX: Tensor, cache: DecodeCache, *, top_k: int) -> Tensor:
    batch, num_queries = q_BQXY.shape[:2]
    size = cache.table_BM.shape[1] * cache.page_size
    selected = torch.empty(batch, num_queries, min(top_k, size), dtype=torch.int64, device=q_BQXY.device)
    if not batch:
        return selected
    queries = _queries(q_BQXY.flatten(0, 1), cache)
    config = of_index_scores(queries.dtype, decode=True)
    pitch = triton.cdiv(size, 128) * 128
    scores = torch.empty(batch * num_queries, pitch, dtype=torch.float32, device=q_BQXY.device)
    most = max(1, DECODE_BLOCKS // batch) * config.tiles["BLOCK_S"]
    weights_TX, grid = weights_BQX.flatten(0, 1), (min(size, most), batch)
    _score(queries, weights_TX, cache.pages_PGW, scores, config, cache.lens_B, grid, cache.table_BM)
    _select_best(scores, cache.lens_B, selected.flatten(0, 1), rows=num_queries, num_queries=num_queries)
    return selected


def _queries(q_TXY: Tensor, cache: PagedCache) -> Tensor:
    """Return queries that fit the keys of these pages [parts, T, X, Y]: their sum over the parts. One that is not
    finite is all NaN. Y is padded."""
    turned = cache.packed
    num_tokens, num_heads, width = q_TXY.shape
    dtype = torch.bfloat16 if turned and q_TXY.dtype != torch.float32 else q_TXY.dtype
    parts = 2 if turned and dtype == torch.bfloat16 else 1
    out = torch.empty(parts, num_tokens, num_heads, padded(width), dtype=dtype, device=q_TXY.device)
    launch(
        _turn, (triton.cdiv(num_tokens * num_heads, TURN_QUERIES.tiles["ROWS"]),),
        q_TXY.contiguous(), out, num_tokens * num_heads, width, width**-0.5,
        WIDTH=out.shape[-1], TURNS=turned, PARTS=parts, UPCAST=upcasts(q_TXY), **TURN_QUERIES.constants,
    )  # fmt: skip
    return out


def _score(
    queries: Tensor,
    weights_TX: Tensor,
    keys: Tensor,
    scores: Tensor,
    config: Config,
    tiles: Tensor,
    over: tuple[int, int],
    page_table_BM: Tensor | None,
) -> None:
    """Score positions and sequences or tiles (`over`). Keys are copied ones [rows, Y], or pages with their table."""
    packed, key_width = keys.dtype == PACKED, keys.shape[-1]
    if packed:
        keys, key_width = keys.view(torch.int32), key_width - 4
    parts, num_tokens, num_heads, width = queries.shape
    paged = page_table_BM is not None
    pages = (0, 0, 0, 1)
    if page_table_BM is not None:
        pages = (keys.stride(0), keys.stride(1), page_table_BM.stride(0), keys.shape[1])
    launch(
        _score_keys, (triton.cdiv(over[0], config.tiles["BLOCK_S"]), over[1]),
        queries, weights_TX.contiguous(), keys, scores, tiles, page_table_BM, *pages, len(keys), num_tokens * num_heads,
        key_width, scores.stride(0),
        PARTS=parts, HEADS=num_heads, PADDED_HEADS=padded(num_heads), WIDTH=width,
        NUM_QUERIES=len(scores) // over[1] if paged else 0, IS_PACKED=packed, UPCAST=upcasts(queries),
        **config.constants,
    )  # fmt: skip


@triton.jit
def _turn(
    q_ptr, out_ptr, num_rows, width, scale, WIDTH: tl.constexpr, TURNS: tl.constexpr, PARTS: tl.constexpr,
    UPCAST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Make NaN of rows that are not finite, transform the others (`cache_rows.hadamard`), and split them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < num_rows)[:, None] & (column < width)[None, :]
    q = tl.load(q_ptr + row[:, None] * width + column[None, :], there, 0.0)
    lost = tl.sum(q.to(tl.float32) * 0, 1)
    if TURNS:
        # the sign of element (i, j) is the parity of the bits that i and j share
        shared = column[:, None] & column[None, :]
        shared ^= shared >> 8
        shared ^= shared >> 4
        shared ^= shared >> 2
        shared ^= shared >> 1
        signs = (1 - 2 * (shared & 1)).to(tl.float32).to(q.dtype)
        turned = dot(q, signs, None, UPCAST) * scale
    else:
        turned = q.to(tl.float32)
    turned += lost[:, None]
    out_at = out_ptr + row[:, None] * WIDTH + column[None, :]
    high = turned.to(out_ptr.dtype.element_ty)
    tl.store(out_at, high, (row < num_rows)[:, None])
    if PARTS == 2:
        low = (turned - high.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(out_at + tl.cast(num_rows, tl.int64) * WIDTH, low, (row < num_rows)[:, None])


@triton.jit
def _score_keys(
    q_ptr, weights_ptr, keys_ptr, scores_ptr, tiles_ptr, table_ptr, page_pitch, slot_pitch, table_pitch, page_size,
    num_keys, num_rows, width, scores_pitch, PARTS: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, NUM_QUERIES: tl.constexpr, IS_PACKED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Score blocks of keys for all queries of a tile. Keys are the rows of a product and heads its columns, so that the
    sum over heads stays within a warp."""
    tile = tl.program_id(1)
    if NUM_QUERIES > 0:
        first_token, count, first_key, first_row = tile * NUM_QUERIES, NUM_QUERIES, 0, tile * NUM_QUERIES
        end = tl.load(tiles_ptr + tile).to(tl.int32)
    else:
        first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
        end = tl.load(tiles_ptr + tile * 4 + 2) + count
        first_key, first_row = tl.load(tiles_ptr + tile * 4 + 3), tile * BLOCK_Q
    q_at = tl.make_tensor_descriptor(q_ptr, [PARTS * num_rows, WIDTH], [WIDTH, 1], [PADDED_HEADS, WIDTH])
    head = tl.arange(0, PADDED_HEADS)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    for start in range(tl.program_id(0) * BLOCK_S, end, tl.num_programs(0) * BLOCK_S):
        position = start + tl.arange(0, BLOCK_S)
        if NUM_QUERIES > 0:
            there = position < end
            source = cached_row(table_ptr + tile * table_pitch, position, there, page_size, page_pitch, slot_pitch)
            keys, scales = load_keys(keys_ptr, source, there, width, dtype, WIDTH, IS_PACKED)
        else:
            keys_at = tl.make_tensor_descriptor(keys_ptr, [num_keys, WIDTH], [WIDTH, 1], [BLOCK_S, WIDTH])
            keys = keys_at.load([first_key + start, 0])
        for query in range(count):
            row = (first_token + query) * HEADS
            dots = dot(keys, q_at.load([row, 0]).T, None, UPCAST)
            if PARTS == 2:
                dots = dot(keys, q_at.load([num_rows + row, 0]).T, dots, UPCAST)
            weights = tl.load(weights_ptr + row + head, head < HEADS, 0.0)
            weighed = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
            if HEADS < PADDED_HEADS:
                weighed = tl.where((head < HEADS)[None, :], weighed, 0.0)
            scores = tl.sum(weighed, 1)
            if IS_PACKED:
                scores *= scales
            tl.store(scores_ptr + (first_row + query).to(tl.int64) * scores_pitch + position, scores, position < end)


def _select_best(scores: Tensor, tiles: Tensor, selected_TS: Tensor, *, rows: int, num_queries: int) -> None:
    """Write the positions of the S best scores of each query. The scores have `rows` rows for
    each tile. `tiles` are those of a prefill, or with `num_queries` the lengths of contexts [B]."""
    launch(
        _select, (len(tiles) * rows,),
        scores, tiles, selected_TS, scores.stride(0), selected_TS.shape[1],
        ROWS=rows, NUM_QUERIES=num_queries, **SELECT.constants,
    )  # fmt: skip


@triton.jit
def _load_ordered(scores_ptr, position, visible):
    """Return which positions are seen, their scores as unsigned integers in the same order, and whether any score is
    not finite."""
    there = position < visible
    # whole groups of four are read at once; what is written behind the last score is anything
    score = tl.where(there, tl.load(scores_ptr + position, position < (visible + 3) // 4 * 4, 0.0), 0.0)
    # zeros of one row have one sign: that of all the weights of its heads, or none
    bits = score.to(tl.int32, bitcast=True)
    lost = tl.max(((bits & 0x7F800000) == 0x7F800000).to(tl.int32), 0)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return there, ordered, lost


@triton.jit
def _select(
    scores_ptr, tiles_ptr, out_ptr, pitch, size, ROWS: tl.constexpr, NUM_QUERIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Select for one query by a radix select: four passes count 8 bits each of scores as integers, one more writes what
    is above the last of the best, and the first of those that equal it. Most variables are of the whole row."""
    tile, query = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS
    if NUM_QUERIES > 0:
        visible = tl.load(tiles_ptr + tile).to(tl.int32) - NUM_QUERIES + 1 + query
        token = tl.program_id(0)
    else:
        if query >= tl.load(tiles_ptr + tile * 4 + 1):
            return
        token = tl.load(tiles_ptr + tile * 4) + query
        visible = tl.load(tiles_ptr + tile * 4 + 2) + query + 1
    scores_ptr += tl.program_id(0).to(tl.int64) * pitch
    out_ptr += token.to(tl.int64) * size
    at, digit = tl.arange(0, BLOCK), tl.arange(0, 256)
    takes_all = visible <= size

    lost = 0
    left = size
    threshold = tl.zeros([1], tl.uint32)
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for start in tl.range(0, visible, BLOCK, num_stages=2):
            there, ordered, lost_here = _load_ordered(scores_ptr, start + at, visible)
            lost |= lost_here
            if shift < 24:
                there &= (ordered >> (shift + 8)) == threshold
            counts += tl.histogram(((ordered >> shift) & 255).to(tl.int32), 256, mask=there)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        is_last = (above < left) & (above + counts >= left)
        left -= tl.sum(tl.where(is_last, above, 0), 0)
        threshold = threshold * 256 + tl.sum(tl.where(is_last, digit, 0), 0).to(tl.uint32)

    taken_before, equal_before = 0, 0
    for start in tl.range(0, visible, BLOCK, num_stages=2):
        position = start + at
        there, ordered, _ = _load_ordered(scores_ptr, position, visible)
        equal = (there & (ordered == threshold)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0)
        taken = there & ((ordered > threshold) | ((equal > 0) & (rank <= left)) | takes_all)
        order = taken_before + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out_ptr + order, position.to(tl.int64), taken & (lost == 0))
        taken_before += tl.sum(taken.to(tl.int32), 0)
        equal_before += tl.sum(equal, 0)
    written = tl.where(lost == 0, taken_before, 0)
    for start in range(0, size, BLOCK):
        column = start + at
        tl.store(out_ptr + column, tl.full([BLOCK], -1, tl.int64), (column >= written) & (column < size))
