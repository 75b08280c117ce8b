"""Rows of experts: how tokens are sorted into them, and how what experts return is summed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.triton.configs import CHANNELS_OF_TOKENS, COUNTS_OF_EXPERTS, PAIRS
from pdinfer.kernels.triton.launch import as_rows, launch, need


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = torch.empty((len(row_TK), y_SD.shape[1]), dtype=torch.float32, device=y_SD.device)
    _combine(y_SD, row_TK, weights_TK, None, None, out_TD)
    return out_TD


def combine_experts(
    y_SD: Tensor, row_TK: Tensor | None, weights_TK: Tensor | None, shared_TD: Tensor | None, residual_TD: Tensor | None
) -> Tensor:
    tokens = len(y_SD) if row_TK is None or weights_TK is None else len(row_TK)
    out_TD = torch.empty((tokens, y_SD.shape[1]), dtype=y_SD.dtype, device=y_SD.device)
    _combine(y_SD, row_TK, weights_TK, shared_TD, residual_TD, out_TD)
    return out_TD


def _combine(
    y_SD: Tensor,
    row_TK: Tensor | None,
    weights_TK: Tensor | None,
    shared_TD: Tensor | None,
    residual_TD: Tensor | None,
    out_TD: Tensor,
) -> None:
    y_SD, (tokens, width) = as_rows(y_SD), out_TD.shape
    if row_TK is None or weights_TK is None:
        row_TK = weights_TK = None
    else:
        need(row_TK.shape == weights_TK.shape, f"rows {tuple(row_TK.shape)} have weights {tuple(weights_TK.shape)}")
        row_TK, weights_TK = row_TK.contiguous(), weights_TK.contiguous()
    added = [None if x is None else as_rows(x) for x in (shared_TD, residual_TD)]
    need(all(x is None or x.shape == out_TD.shape for x in added), f"what is added to {tuple(out_TD.shape)} is not so")
    launch(
        _sum_rows, (tokens, triton.cdiv(width, CHANNELS_OF_TOKENS.tiles["CHANNELS"])),
        y_SD, row_TK, weights_TK, *added, out_TD, y_SD.stride(0), *(0 if x is None else x.stride(0) for x in added),
        width,
        CHOICES=0 if row_TK is None else row_TK.shape[1], **CHANNELS_OF_TOKENS.constants,
    )  # fmt: skip


@triton.jit
def _sum_rows(
    y_ptr, row_ptr, weights_ptr, shared_ptr, residual_ptr, out_ptr, y_pitch, shared_pitch, residual_pitch, width,
    CHOICES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = at < width
    if row_ptr is None:
        total = tl.load(y_ptr + token * y_pitch + at, there, 0).to(tl.float32)
    else:
        total = tl.zeros((CHANNELS,), tl.float32)
        for choice in tl.static_range(CHOICES):
            row = tl.load(row_ptr + token * CHOICES + choice).to(tl.int64)
            weight = tl.where(row >= 0, tl.load(weights_ptr + token * CHOICES + choice), 0)
            total += weight * tl.load(y_ptr + row * y_pitch + at, there & (row >= 0), 0).to(tl.float32)
    if shared_ptr is not None:
        total += tl.load(shared_ptr + token * shared_pitch + at, there, 0).to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + token * residual_pitch + at, there, 0).to(tl.float32)
        out = (residual + out.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + at, out, there)


def group_rows(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort in three steps: each block counts its pairs by expert, the counts become first rows, and each pair takes the
    row behind the pairs of its block that precede it."""
    pairs, choices, device = ids_TK.numel(), ids_TK.shape[1], ids_TK.device
    blocks = triton.cdiv(pairs, PAIRS.tiles["PAIRS"])
    bins = triton.next_power_of_2(num_experts + 1)  # those who chose no expert stand behind all experts
    first_BE = torch.empty((blocks, bins), dtype=torch.int32, device=device)
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    token_of_row_S = torch.empty(pairs, dtype=torch.int64, device=device)
    row_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=device)
    ids_TK = ids_TK.contiguous()
    launch(_count_pairs, (blocks,), ids_TK, first_BE, counts_E, pairs, num_experts, BINS=bins, **PAIRS.constants)
    tiles = triton.cdiv(bins, COUNTS_OF_EXPERTS.tiles["EXPERTS"]) if blocks else 0
    launch(_first_rows, (tiles,), first_BE, counts_E, blocks, num_experts, BINS=bins, **COUNTS_OF_EXPERTS.constants)
    launch(
        _place_pairs, (blocks,),
        ids_TK, first_BE, token_of_row_S, row_TK, pairs, choices, num_experts,
        BINS=bins, **PAIRS.constants,
    )  # fmt: skip
    return counts_E[:num_experts], token_of_row_S, row_TK


@triton.jit
def _experts_of(ids_ptr, pair, pairs, num_experts):
    """Return the expert of each pair, `num_experts` for none."""
    expert = tl.load(ids_ptr + pair, pair < pairs, -1).to(tl.int32)
    return tl.where(expert < 0, num_experts, expert)


@triton.jit
def _count_pairs(ids_ptr, counts_ptr, total_ptr, pairs, num_experts, BINS: tl.constexpr, PAIRS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = _experts_of(ids_ptr, pair, pairs, num_experts)
    counts = tl.histogram(expert, BINS, pair < pairs)
    at = tl.arange(0, BINS)
    tl.store(counts_ptr + block * BINS + at, counts)
    tl.atomic_add(total_ptr + at, counts.to(tl.int64), (at <= num_experts) & (counts > 0))


@triton.jit
def _first_rows(
    counts_ptr, total_ptr, blocks, num_experts, BINS: tl.constexpr, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Turn the counts of some experts into the rows where each block of pairs begins."""
    every = tl.arange(0, BINS)
    total = tl.load(total_ptr + every, every <= num_experts, 0).to(tl.int32)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    first = tl.sum(tl.where(every[:, None] < expert[None, :], total[:, None], 0), 0)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        at = block.to(tl.int64) * BINS + expert[None, :]
        there = (block < blocks) & (expert[None, :] < BINS)
        counts = tl.load(counts_ptr + at, there, 0)
        tl.store(counts_ptr + at, first[None, :] + tl.cumsum(counts, 0) - counts, there)
        first += tl.sum(counts, 0)


@triton.jit
def _place_pairs(
    ids_ptr, first_ptr, token_ptr, row_ptr, pairs, choices, num_experts, BINS: tl.constexpr, PAIRS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAIRS)
    pair = block * PAIRS + at
    expert = _experts_of(ids_ptr, pair, pairs, num_experts)
    earlier = (expert[None, :] == expert[:, None]) & (at[None, :] < at[:, None])
    row = tl.load(first_ptr + block * BINS + expert, pair < pairs, 0) + tl.sum(earlier.to(tl.int32), 1)
    chosen = expert < num_experts
    tl.store(token_ptr + row, tl.where(chosen, pair // choices, 0), pair < pairs)
    tl.store(row_ptr + pair, tl.where(chosen, row, -1).to(tl.int64), pair < pairs)
