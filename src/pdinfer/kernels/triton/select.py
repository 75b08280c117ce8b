"""The positions of the largest scores of each row, in their order, by a radix select: four passes count 8 bits each of
scores as integers, one more writes what is above the last of the best, and the first of those that equal it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.triton.configs import SELECT
from pdinfer.kernels.triton.launch import launch


def select_best(scores: Tensor, tiles: Tensor, selected_TS: Tensor, *, rows: int, num_queries: int) -> None:
    """Write the positions of the S best scores of each query, as `Ops.index_topk` says. The scores have `rows` rows for
    each tile. `tiles` are those of a prefill, or with `num_queries` the lengths of contexts [B]."""
    launch(
        _select,
        (len(tiles) * rows,),
        scores,
        tiles,
        selected_TS,
        scores.stride(0),
        selected_TS.shape[1],
        ROWS=rows,
        NUM_QUERIES=num_queries,
        **SELECT.constants,
    )


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
    """Select for one query. Most variables are of the whole row."""
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
