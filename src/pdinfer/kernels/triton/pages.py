"""Copies of parts of a pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.triton.configs import WORDS_OF_PAGES
from pdinfer.kernels.triton.launch import launch
from pdinfer.kernels.triton.rows import need


def gather_pages(pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
    _copy(pool_NW, rows_S, into_SW, gathers=True)


def scatter_pages(pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
    _copy(pool_NW, rows_S, from_SW, gathers=False)


def _copy(pool_NW: Tensor, rows_S: Tensor, parts_SW: Tensor, *, gathers: bool) -> None:
    need(parts_SW.shape == (len(rows_S), pool_NW.shape[1]), f"{len(rows_S)} rows are no {tuple(parts_SW.shape)}")
    need(pool_NW.dtype == parts_SW.dtype, f"{pool_NW.dtype} is copied from or to {parts_SW.dtype}")
    pool_NW, parts_SW = _in_longs(pool_NW, parts_SW)
    width = pool_NW.shape[1]
    launch(
        _copy_words,
        (len(rows_S), triton.cdiv(width, WORDS_OF_PAGES.tiles["WORDS"])),
        pool_NW,
        rows_S.contiguous(),
        parts_SW,
        pool_NW.stride(0),
        parts_SW.stride(0),
        width,
        GATHERS=gathers,
        **WORDS_OF_PAGES.constants,
    )


def _in_longs(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors as int64 where all of them can be read so."""
    size = tensors[0].itemsize
    parts = [part for x in tensors for part in (x.storage_offset(), x.stride(0), x.shape[1])]
    if any(part * size % 8 for part in parts):
        return list(tensors)
    return [x.view(torch.int64) for x in tensors]


@triton.jit
def _copy_words(
    pool_ptr, rows_ptr, parts_ptr, pool_pitch, parts_pitch, width, GATHERS: tl.constexpr, WORDS: tl.constexpr
):
    part = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + part)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    in_pool, in_parts = pool_ptr + row * pool_pitch + at, parts_ptr + part * parts_pitch + at
    if GATHERS:
        tl.store(in_parts, tl.load(in_pool, at < width), at < width)
    else:
        tl.store(in_pool, tl.load(in_parts, at < width), at < width)
