"""Draws of tokens without a sort.

A vocabulary is cut into chunks, a block to each. The first kernel finds the largest logit of every chunk, the last but
one adds noise to what may come, and the last one compares the chunks. Greedy rows need the first and the last alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kernels.triton.configs import DRAW, SETTLE
from pdinfer.kernels.triton.filters import distances_of, largest_of, limits, room
from pdinfer.kernels.triton.launch import as_rows, launch, need


def draw(logits_BV: Tensor, changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    logits, changed = as_rows(logits_BV), as_rows(changed_BV)
    need(logits.dtype == changed.dtype == torch.float32, f"a draw takes float32, got {logits.dtype}, {changed.dtype}")
    need(logits.shape == changed.shape, f"logits are {tuple(logits.shape)}, changed ones {tuple(changed.shape)}")
    batch, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, DRAW.tiles["CHUNK"])
    chunks = (batch, num_chunks)
    largest_BN, sums_BN, tops_BN = (room(logits, *chunks) for _ in range(3))
    top_ids_BN = room(logits, *chunks, dtype=torch.int32)
    peaks_BN = room(logits, batch, num_chunks * (DRAW.tiles["CHUNK"] // DRAW.tiles["SEGMENT"]))
    launch(
        _survey,
        chunks,
        *(logits, None if changed_BV is logits_BV else changed),
        *(largest_BN, sums_BN, tops_BN, top_ids_BN, peaks_BN),
        *(logits.stride(0), changed.stride(0), vocab),
        **DRAW.constants,
    )
    rivals: tuple[Tensor | None, ...] = (None, None, None)
    if kind is not DrawKind.GREEDY:
        limit_B = limits(changed, tops_BN, peaks_BN, controls) if kind is DrawKind.FILTERED else None
        rivals = (*_contest(changed, tops_BN, limit_B, controls), controls.temperature_B)
    packed_3B = room(logits, 3, batch, dtype=torch.int32)
    launch(
        _settle,
        (batch,),
        *(logits, largest_BN, sums_BN, tops_BN, top_ids_BN, *rivals, packed_3B),
        *(logits.stride(0), batch, vocab, num_chunks),
        CHUNKS=triton.next_power_of_2(num_chunks),
        **SETTLE.constants,
    )
    return packed_3B


def _contest(changed: Tensor, tops_BN: Tensor, limit_B: Tensor | None, controls: Controls) -> tuple[Tensor, Tensor]:
    """Return the largest sum of logit and noise in each chunk, and its token."""
    best_BN, ids_BN = torch.empty_like(tops_BN), room(changed, *tops_BN.shape, dtype=torch.int32)
    launch(
        _compete, tuple(tops_BN.shape),
        *(changed, tops_BN, limit_B, best_BN, ids_BN),
        *(controls.temperature_B, controls.min_logit_B, controls.seed_B, controls.position_B),
        *(changed.stride(0), changed.shape[1]),
        HAS_LIBDEVICE=not changed.is_cpu, CHUNKS=triton.next_power_of_2(tops_BN.shape[1]), **DRAW.constants,
    )  # fmt: skip
    return best_BN, ids_BN


@triton.jit
def _survey(
    logits_ptr, changed_ptr, largest_ptr, sums_ptr, tops_ptr, ids_ptr, peaks_ptr, pitch, changed_pitch, vocab,
    CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of a chunk and the sum of exponentials of their differences to it; and of the changed
    logits the largest of the chunk, its first token, and the largest of each segment."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * pitch + token, token < vocab, float("-inf"))
    largest = tl.max(logits)
    height = tl.where(largest == float("-inf"), 0, largest)
    out = row * tl.num_programs(1) + chunk
    tl.store(largest_ptr + out, largest)
    tl.store(sums_ptr + out, tl.sum(tl.exp(logits - height)))
    if changed_ptr is not None:
        logits = tl.load(changed_ptr + row * changed_pitch + token, token < vocab, float("-inf"))
    peaks = tl.max(tl.reshape(logits, [CHUNK // SEGMENT, SEGMENT]), 1)
    top = tl.max(peaks)
    tl.store(tops_ptr + out, top)
    tl.store(ids_ptr + out, tl.min(tl.where(logits == top, token, vocab - 1)))
    tl.store(peaks_ptr + out * (CHUNK // SEGMENT) + tl.arange(0, CHUNK // SEGMENT), peaks)


@triton.jit
def _mixed(x):
    """Return 64 well mixed bits, as `draws` does."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(token, seed, position, HAS_LIBDEVICE: tl.constexpr):
    key = _mixed(_mixed(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    x = token.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = tl.minimum(((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    if HAS_LIBDEVICE:  # the functions that torch calls on CUDA; those of Triton's language are not as exact
        return -libdevice.log(-libdevice.log1p(-uniform))
    exponential = -tl.log(1 - uniform.to(tl.float64)).to(tl.float32)
    return -tl.log(exponential.to(tl.float64)).to(tl.float32)


@triton.jit
def _compete(
    changed_ptr, tops_ptr, limit_ptr, best_ptr, ids_ptr, temperature_ptr, min_logit_ptr, seed_ptr, position_ptr, pitch,
    vocab,
    HAS_LIBDEVICE: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Find the largest sum of logit and noise in a chunk, and its token, among those that may come."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(changed_ptr + row * pitch + token, token < vocab, float("-inf"))
    distances = distances_of(logits, largest_of(tops_ptr, row, tl.num_programs(1), CHUNKS), temperature)
    may_come = -distances >= tl.load(min_logit_ptr + row).to(tl.float32)
    if limit_ptr is not None:
        may_come = may_come & (distances.to(tl.int32, bitcast=True) <= tl.load(limit_ptr + row))
    noise = _noise(token, tl.load(seed_ptr + row), tl.load(position_ptr + row), HAS_LIBDEVICE)
    sums = tl.where(may_come, noise - distances, float("-inf"))
    best = tl.max(sums)
    out = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + out, best)
    tl.store(ids_ptr + out, tl.min(tl.where(sums == best, token, vocab - 1)))


@triton.jit
def _first_of(values, ids, vocab):
    return tl.min(tl.where(values == tl.max(values), ids, vocab - 1))


@triton.jit
def _settle(
    logits_ptr, largest_ptr, sums_ptr, tops_ptr, top_ids_ptr, best_ptr, ids_ptr, temperature_ptr, packed_ptr, pitch,
    batch, vocab, num_chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Choose among the tokens of the chunks, and write what `draw` returns of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    there = at < num_chunks
    chunk = row * num_chunks + at
    tops = tl.load(tops_ptr + chunk, there, float("-inf"))
    token = _first_of(tops, tl.load(top_ids_ptr + chunk, there, vocab - 1), vocab)
    if temperature_ptr is not None:
        best = tl.load(best_ptr + chunk, there, float("-inf"))
        drawn = _first_of(best, tl.load(ids_ptr + chunk, there, vocab - 1), vocab)
        token = tl.where(tl.load(temperature_ptr + row) > 0, drawn, token)
    largest = tl.load(largest_ptr + chunk, there, float("-inf"))
    height = tl.max(largest)
    height = tl.where(height == float("-inf"), 0, height)
    normalizer = height + tl.log(tl.sum(tl.load(sums_ptr + chunk, there, 0) * tl.exp(largest - height)))
    logprob = tl.load(logits_ptr + row * pitch + token) - normalizer
    tl.store(packed_ptr + row, token)
    tl.store(packed_ptr + batch + row, logprob.to(tl.int32, bitcast=True))
    tl.store(packed_ptr + 2 * batch + row, normalizer.to(tl.int32, bitcast=True))
