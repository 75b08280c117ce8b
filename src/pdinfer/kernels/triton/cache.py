"""Rotary positions, and what is written into the pages of the cache, where a block has a token. Copies of parts of a
pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.formats.cache_rows import PACKED, SCALE_GROUP
from pdinfer.kernels.formats.format import Rounding
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.triton.configs import HEADS_OF_TOKENS, WORDS_OF_PAGES, of_width
from pdinfer.kernels.triton.launch import as_rows, launch, need
from pdinfer.kernels.triton.rounding import GROUP, largest, rounded_to_fp8, rounded_to_int8, to_fp8

AS_IS, TO_FP8, TO_FP8_UE8M0, TO_INT8 = (tl.constexpr(kind) for kind in range(4))
"""How a latent is rounded before it is stored."""
KINDS = {None: AS_IS, Rounding.FP8: TO_FP8, Rounding.FP8_UE8M0: TO_FP8_UE8M0, Rounding.INT8: TO_INT8}


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return why packed pages cannot hold latents of this rank: they have a scale per 128 elements."""
    rank = spec.kv_lora_rank
    if spec.kv_format == "fp8" and op in ("store_latent", "norm_rotate_store") and rank is not None and rank % 128:
        return f"packs latents in groups of 128 elements, they have {rank}"
    return None


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
    tokens, heads, width = x_THR.shape
    need(width % 2 == 0, f"pairs are rotated, {width} elements are none")
    need(cos_TF.shape == sin_TF.shape == (tokens, width // 2), f"a token has {width // 2} angles, got {cos_TF.shape}")
    x_THR = x_THR if x_THR.stride(2) == 1 else x_THR.contiguous()
    out_THR = torch.empty(x_THR.shape, dtype=x_THR.dtype, device=x_THR.device)
    launch(
        _rotate_heads, (tokens, triton.cdiv(heads, HEADS_OF_TOKENS.tiles["HEADS"])),
        x_THR, cos_TF.contiguous(), sin_TF.contiguous(), out_THR, x_THR.stride(0), x_THR.stride(1), heads, width // 2,
        INTERLEAVED=interleaved, HALF=triton.next_power_of_2(width // 2), **HEADS_OF_TOKENS.constants,
    )  # fmt: skip
    return out_THR


@triton.jit
def _rotate_heads(
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_token, x_head, heads, half,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    from_ptr, to_ptr = x_ptr + token * x_token + head * x_head, out_ptr + (token * heads + head) * 2 * half
    _rotate(from_ptr, to_ptr, cos_ptr + token * half, sin_ptr + token * half, head < heads, half, INTERLEAVED, HALF)


@triton.jit
def _rotate(from_ptr, to_ptr, cos_ptr, sin_ptr, there, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Rotate the rows that pointers [N, 1] show by the angles of one token, where `there`."""
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + pair, pair < half, 0)
    sin = tl.load(sin_ptr + pair, pair < half, 0)
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF)[None, :]
        inside = there & (at < 2 * half)
        x = tl.load(from_ptr + at, inside, 0).to(tl.float32)
        left, right = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
        both = tl.join(left * cos - right * sin, left * sin + right * cos)
        turned = tl.reshape(both, x.shape).to(from_ptr.dtype.element_ty)
        tl.store(to_ptr + at, turned.to(to_ptr.dtype.element_ty), inside)
    else:
        inside = there & (pair < half)
        left = tl.load(from_ptr + pair, inside, 0).to(tl.float32)
        right = tl.load(from_ptr + half + pair, inside, 0).to(tl.float32)
        tl.store(to_ptr + pair, (left * cos - right * sin).to(to_ptr.dtype.element_ty), inside)
        tl.store(to_ptr + half + pair, (left * sin + right * cos).to(to_ptr.dtype.element_ty), inside)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
    _store(pages_PGW, slots_T, c_TC, k_rope_TR, None, 0.0, None, None, None)


def norm_rotate_store(
    c_TC: Tensor,
    k_TR: Tensor,
    weight_C: Tensor,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    pages_PGW: Tensor,
    slots_T: Tensor,
    *,
    rounding: Rounding | None,
) -> None:
    _store(pages_PGW, slots_T, c_TC, k_TR, weight_C.contiguous(), eps, cos_TF, sin_TF, rounding)


def _store(
    pages_PGW: Tensor,
    slots_T: Tensor,
    c_TC: Tensor,
    k_TR: Tensor,
    weight_C: Tensor | None,
    eps: float,
    cos_TF: Tensor | None,
    sin_TF: Tensor | None,
    rounding: Rounding | None,
) -> None:
    (tokens, rank), rope = c_TC.shape, k_TR.shape[1]
    packed = pages_PGW.dtype == PACKED
    rows_SW = pages_PGW.view(-1, pages_PGW.shape[2])
    length = rank + rank // SCALE_GROUP * 4 + rope * 2 if packed else rank + rope
    need(
        rows_SW.shape[1] == length, f"a row of {rank} and {rope} elements takes {length}, pages have {rows_SW.shape[1]}"
    )
    need(not packed or rank % SCALE_GROUP == 0, f"latents are packed by {SCALE_GROUP} elements, got {rank}")
    need(slots_T.shape == (tokens,) == (len(k_TR),), f"{tokens} latents, {len(k_TR)} keys, {len(slots_T)} slots")
    groups = triton.next_power_of_2(triton.cdiv(rank, GROUP.value))
    c_TC, k_TR = as_rows(c_TC), as_rows(k_TR)
    launch(
        _store_token, (tokens,),
        rows_SW.view(torch.float8_e4m3fn) if packed else rows_SW, rows_SW.view(torch.float32) if packed else None,
        rows_SW.view(torch.bfloat16) if packed else rows_SW, slots_T.contiguous(), c_TC, k_TR, weight_C,
        None if cos_TF is None else cos_TF.contiguous(), None if sin_TF is None else sin_TF.contiguous(),
        rows_SW.shape[1], c_TC.stride(0), k_TR.stride(0), rank, rope // 2, eps,
        ROUNDING=KINDS[rounding], PACKED=packed, HALF=triton.next_power_of_2(max(1, rope // 2)), GROUPS=groups,
        **of_width(groups * GROUP.value).constants,
    )  # fmt: skip


@triton.jit
def _store_token(
    rows_ptr, scales_ptr, keys_ptr, slots_ptr, c_ptr, k_ptr, weight_ptr, cos_ptr, sin_ptr, length, c_pitch, k_pitch,
    rank, half, eps,
    ROUNDING: tl.constexpr, PACKED: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write a token's row: after a norm and a rotation where there are weights and angles."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(slots_ptr + token).to(tl.int64) * length
    group = tl.arange(0, GROUPS)[:, None]
    at = group * GROUP + tl.arange(0, GROUP)[None, :]
    there = at < rank
    c = tl.load(c_ptr + token * c_pitch + at, there, 0).to(tl.float32)
    if weight_ptr is not None:
        mean = tl.sum(c * c) / rank
        c = c * (tl.rsqrt(mean + eps) + 0 * mean) * tl.load(weight_ptr + at, there, 0).to(tl.float32)
        c = c.to(c_ptr.dtype.element_ty).to(tl.float32)
        if ROUNDING == TO_INT8:
            c = rounded_to_int8(c, largest(largest(c, 1), 0))
        elif ROUNDING != AS_IS:
            c = rounded_to_fp8(c, 1, ROUNDING == TO_FP8_UE8M0)
    c = c.to(c_ptr.dtype.element_ty)
    if PACKED:
        numbers, scale = to_fp8(c.to(tl.float32), 1, True)
        tl.store(rows_ptr + first + at, numbers, there)
        tl.store(scales_ptr + (first + rank) // 4 + group, scale, group * GROUP < rank)
        k_at = (first + rank + rank // GROUP * 4) // 2
    else:
        tl.store(rows_ptr + first + at, c.to(rows_ptr.dtype.element_ty), there)
        k_at = first + rank
    one = tl.zeros((1, 1), tl.int32)
    from_ptr, to_ptr = k_ptr + token * k_pitch + one, keys_ptr + k_at + one
    if cos_ptr is not None:
        _rotate(from_ptr, to_ptr, cos_ptr + token * half, sin_ptr + token * half, one == 0, half, True, HALF)
    else:
        at = tl.arange(0, 2 * HALF)[None, :]
        k = tl.load(from_ptr + at, at < 2 * half, 0)
        tl.store(to_ptr + at, k.to(to_ptr.dtype.element_ty), at < 2 * half)


def store_index_keys(pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
    packed, width = pages_PGY.dtype == PACKED, keys_TY.shape[1]
    rows_SY, keys_TY = pages_PGY.view(-1, pages_PGY.shape[2]), as_rows(keys_TY)
    length, padded = width + 4 * packed, triton.next_power_of_2(width)
    need(rows_SY.shape[1] == length, f"a row of {width} elements takes {length}, pages have {rows_SY.shape[1]}")
    need(not packed or (width == padded and width % 4 == 0), f"keys are packed by powers of two from 4 on, got {width}")
    need(slots_T.shape == (len(keys_TY),), f"{len(keys_TY)} keys have {len(slots_T)} slots")
    launch(
        _store_index_key, (len(keys_TY),),
        rows_SY.view(torch.float8_e4m3fn) if packed else rows_SY, rows_SY.view(torch.float32) if packed else None,
        slots_T.contiguous(), keys_TY, length, keys_TY.stride(0), width, float(width**-0.5),
        PACKED=packed, WIDTH=padded, **of_width(padded).constants,
    )  # fmt: skip


@triton.jit
def _store_index_key(
    rows_ptr, scales_ptr, slots_ptr, keys_ptr, length, pitch, width, norm, PACKED: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(slots_ptr + token).to(tl.int64) * length
    at = tl.arange(0, WIDTH)
    key = tl.load(keys_ptr + token * pitch + at, at < width, 0)
    if PACKED:
        numbers, scale = to_fp8(_hadamard(key.to(tl.float32), WIDTH) * norm, 0, True)
        tl.store(rows_ptr + first + at, numbers)
        tl.store(scales_ptr + (first + WIDTH) // 4 + tl.arange(0, 1), scale)
    else:
        tl.store(rows_ptr + first + at, key.to(rows_ptr.dtype.element_ty), at < width)


@triton.jit
def _hadamard(x, WIDTH: tl.constexpr):
    """Return the Walsh-Hadamard transform of x [WIDTH], which `cache_rows.hadamard` norms. The sums are in its
    order, so that they are equal to the bit."""
    HALF: tl.constexpr = WIDTH // 2
    for _ in tl.static_range(WIDTH.bit_length() - 1):
        left, right = tl.split(tl.reshape(x, (HALF, 2)))
        # the sums of neighbours, then their differences: the next step finds as neighbours what is two apart in x
        x = tl.reshape(tl.trans(tl.join(left + right, left - right)), (WIDTH,))
    return x


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
        _copy_words, (len(rows_S), triton.cdiv(width, WORDS_OF_PAGES.tiles["WORDS"])),
        pool_NW, rows_S.contiguous(), parts_SW, pool_NW.stride(0), parts_SW.stride(0), width,
        GATHERS=gathers, **WORDS_OF_PAGES.constants,
    )  # fmt: skip


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
