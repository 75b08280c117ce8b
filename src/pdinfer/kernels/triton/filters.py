"""What filters of draws keep, found without a sort.

Whatever they keep is no further from the largest logit than some *limit*. Distances are not negative, so their bits
order them, and a limit is found bit by bit, the highest first, by 31 sums over the row. To have these over few
distances, those that are certainly too far are left behind before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.draws import Controls
from pdinfer.kernels.triton.configs import DRAW, LIMIT
from pdinfer.kernels.triton.launch import launch


def room(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def limits(changed: Tensor, tops_BN: Tensor, peaks_BN: Tensor, controls: Controls) -> Tensor:
    """Return the bits of the largest distance that top_k and top_p keep, int32 [B]. Greedy rows have none."""
    (batch, vocab), num_chunks = changed.shape, tops_BN.shape[1]
    limit_B, masses_BN = room(changed, batch, dtype=torch.int32), room(changed, *tops_BN.shape, dtype=torch.float64)
    near_BV = room(changed, batch, -(-vocab // LIMIT.tiles["BLOCK"]) * LIMIT.tiles["BLOCK"], dtype=torch.int32)
    filters = (controls.temperature_B, controls.top_p_B, controls.top_k_B)
    cut = {"CHUNKS": triton.next_power_of_2(num_chunks)}
    launch(
        _weigh,
        (batch, num_chunks),
        *(changed, tops_BN, masses_BN, *filters, changed.stride(0), vocab),
        **cut,
        **DRAW.constants,
    )
    launch(
        _find_limit, (batch,),
        *(changed, tops_BN, peaks_BN, masses_BN, near_BV, limit_B, *filters),
        *(changed.stride(0), near_BV.shape[1], vocab, num_chunks, peaks_BN.shape[1]),
        SEGMENTS=triton.next_power_of_2(peaks_BN.shape[1]), **cut, **LIMIT.constants,
    )  # fmt: skip
    return limit_B


INFINITE = tl.constexpr(0x7F800000)
"""The bits of an infinite distance. Those of NaN are larger."""


@triton.jit
def largest_of(tops_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a row."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(tops_ptr + row * num_chunks + chunk, chunk < num_chunks, float("-inf")))


@triton.jit
def distances_of(logits, top, temperature):
    """Return how far below the largest each logit is, scaled. The temperature may be 0 in float32."""
    return tl.where(logits == top, 0, tl.div_rn(top - logits, tl.zeros_like(logits) + temperature.to(tl.float32)))


@triton.jit
def _mass(distances):
    """Return what distances weigh in a softmax whose largest weight is 1."""
    return tl.exp(-distances.to(tl.float64))


@triton.jit
def _weigh(
    changed_ptr, tops_ptr, masses_ptr, temperature_ptr, top_p_ptr, top_k_ptr, pitch, vocab,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Weigh a chunk, where the whole row counts for top_p."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    if (temperature <= 0) | (tl.load(top_p_ptr + row) >= 1) | ((top_k > 0) & (top_k < vocab)):
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(changed_ptr + row * pitch + token, token < vocab, float("-inf"))
    top = largest_of(tops_ptr, row, tl.num_programs(1), CHUNKS)
    masses = _mass(distances_of(logits, top, temperature))
    tl.store(masses_ptr + row * tl.num_programs(1) + chunk, tl.sum(masses))


@triton.jit
def _bound_of(top_k, peaks_ptr, top, temperature, num_segments, SEGMENTS: tl.constexpr):
    """Return the bits of a distance that top_k keeps nothing beyond: so many segments have one that is no larger."""
    segment = tl.arange(0, SEGMENTS)
    peaks = tl.load(peaks_ptr + segment, segment < num_segments, float("-inf"))
    nearest = distances_of(peaks, top, temperature).to(tl.int32, bitcast=True)
    bound = tl.full([], 0, tl.int32)
    for bit in range(31):
        bits = bound | (1 << (30 - bit))
        bound = tl.where(tl.sum((nearest < bits).to(tl.int32)) < top_k, bits, bound)
    return bound


@triton.jit
def _gather(changed_ptr, near_ptr, bound, top, temperature, vocab, BLOCK: tl.constexpr):
    """Write the bits of all distances of a row up to a bound, one after another. Return how many there are."""
    num_near = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(changed_ptr + token, token < vocab, float("-inf"))
        distances = distances_of(logits, top, temperature).to(tl.int32, bitcast=True)
        is_near = (distances <= bound) & (token < vocab)
        tl.store(near_ptr + num_near + tl.cumsum(is_near.to(tl.int32)) - 1, distances, is_near)
        num_near += tl.sum(is_near.to(tl.int32))
    return num_near


@triton.jit
def _count_nearer(near_ptr, num_near, bits, BLOCK: tl.constexpr):
    """Return how many distances are below the one with these bits."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_near, BLOCK):
        at = start + tl.arange(0, BLOCK)
        counts += ((tl.load(near_ptr + at) < bits) & (at < num_near)).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def _weigh_nearer(near_ptr, num_near, bits, BLOCK: tl.constexpr):
    """Return what the distances below the one with these bits weigh."""
    masses = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_near, BLOCK):
        at = start + tl.arange(0, BLOCK)
        near = tl.load(near_ptr + at)
        masses += tl.where((near < bits) & (at < num_near), _mass(near.to(tl.float32, bitcast=True)), 0)
    return tl.sum(masses)


@triton.jit
def _find_limit(
    changed_ptr, tops_ptr, peaks_ptr, masses_ptr, near_ptr, limit_ptr, temperature_ptr, top_p_ptr, top_k_ptr, pitch,
    near_pitch, vocab, num_chunks, num_segments,
    SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the limit of a row: the largest bits below which there are fewer than `top_k` distances, and less than a
    share of `top_p` of what these weigh."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab)
    limit = tl.full([], INFINITE, tl.int32)
    if (temperature <= 0) | ((top_p >= 1) & (not has_top_k)):
        tl.store(limit_ptr + row, limit)
        return
    top = largest_of(tops_ptr, row, num_chunks, CHUNKS)
    mass = tl.full([], 0, tl.float64)
    if has_top_k:
        bound = _bound_of(top_k, peaks_ptr + row * num_segments, top, temperature, num_segments, SEGMENTS)
    else:
        # if all tokens beyond this weighed as much as one there, they would weigh less than top_p leaves out
        chunk = tl.arange(0, CHUNKS)
        mass = tl.sum(tl.load(masses_ptr + row * num_chunks + chunk, chunk < num_chunks, 0))
        bound = (0.01 - tl.log((1 - top_p) * mass / vocab)).to(tl.float32).to(tl.int32, bitcast=True)
    near_ptr += row * near_pitch
    num_near = _gather(changed_ptr + row * pitch, near_ptr, bound, top, temperature, vocab, BLOCK)
    tl.debug_barrier()  # what one thread has written, others read
    if has_top_k:
        limit = tl.full([], 0, tl.int32)
        for bit in range(31):
            bits = limit | (1 << (30 - bit))
            limit = tl.where(_count_nearer(near_ptr, num_near, bits, BLOCK) < top_k, bits, limit)
        # of those tied at the limit, as many as top_k still has room for
        tied = top_k - _count_nearer(near_ptr, num_near, limit, BLOCK)
        mass = _weigh_nearer(near_ptr, num_near, limit, BLOCK) + tied * _mass(limit.to(tl.float32, bitcast=True))
    if top_p < 1:
        share = tl.full([], 0, tl.int32)
        for bit in range(31):
            bits = share | (1 << (30 - bit))
            share = tl.where(_weigh_nearer(near_ptr, num_near, bits, BLOCK) < top_p * mass, bits, share)
        limit = tl.minimum(limit, share)
    tl.store(limit_ptr + row, limit)
