"""What the rows of cache pages hold: elements as they are, or (in pages of uint8) packed FP8 bytes.

    latent     C x e4m3 | C/128 x float32 scale, one per 128 elements | R x bfloat16, the rotated key
    index key  Y x e4m3, after an orthonormal Hadamard transform | 1 x float32 scale

Bytes are little-endian, and the parts of a token are adjacent. 512 + 64 elements take 656 bytes, the format of
DeepSeek-V3.2's published kernels; index keys of 128 take 132. A scale is the smallest power of two with amax / scale <=
448, where amax is at least 1e-4. Division by it is exact, so the bytes follow from the values alone, on every machine.

Index keys in INT8 lie in two parts: Y x int8, and a float16 scale per token, amax / 127 as float16 rounds it. That is
what Ascend's indexer reads (npu_quant_lightning_indexer of torch_npu 2.11)."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels.formats.fp8 import quotient, to_power_of_two

PACKED = torch.uint8
SCALE_GROUP = 128
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4
SMALLEST_HALF = 2.0**-14
"""The smallest float16 that has all its bits, and the smallest scale of an index key in INT8."""


def latent_rows(c_TC: Tensor, k_rope_TR: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows to write into latent pages of `dtype`. C is a multiple of 128 where they are packed."""
    if dtype != PACKED:
        return torch.cat((c_TC, k_rope_TR), -1)
    e4m3_TNG, scale_TN = _quantized(c_TC.reshape(len(c_TC), c_TC.shape[1] // SCALE_GROUP, SCALE_GROUP))
    return torch.cat((_bytes(e4m3_TNG.flatten(-2)), _bytes(scale_TN), _bytes(k_rope_TR.to(torch.bfloat16))), -1)


def latents(rows: Tensor, latent_rank: int, dtype: torch.dtype) -> Tensor:
    """Return [..., C + R] of rows read from latent pages: packed ones unpacked to `dtype`, others as they are."""
    if rows.dtype != PACKED:
        return rows
    e4m3, scale, k_rope = rows.tensor_split((latent_rank, latent_rank + latent_rank // SCALE_GROUP * 4), -1)
    scale = _values(scale, torch.float32).repeat_interleave(SCALE_GROUP, -1)
    c = _values(e4m3, torch.float8_e4m3fn) * scale
    return torch.cat((c.to(dtype), _values(k_rope, torch.bfloat16).to(dtype)), -1)


def index_rows(keys_TY: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows to write into index-key pages of `dtype`. Y is a power of two where they are packed."""
    if dtype != PACKED:
        return keys_TY
    e4m3_TY, scale_T = _quantized(hadamard(keys_TY.float()))
    return torch.cat((_bytes(e4m3_TY), _bytes(scale_T[:, None])), -1)


def index_keys(rows: Tensor) -> Tensor:
    """Return [..., Y] of rows read from index-key pages: packed ones as float32, still transformed, others as they
    are."""
    if rows.dtype != PACKED:
        return rows
    e4m3, scale = rows.tensor_split((rows.shape[-1] - 4,), -1)
    return _values(e4m3, torch.float8_e4m3fn) * _values(scale, torch.float32)


def index_queries(q_TXY: Tensor, dtype: torch.dtype) -> Tensor:
    """Return queries that fit the `index_keys` of pages of `dtype`: transformed if those are. Dot products stay the
    same."""
    return hadamard(q_TXY) if dtype == PACKED else q_TXY


def int8_index_rows(keys_TY: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows to write into both parts of pages of index keys in INT8: int8 [T, Y] and float16 [T, 1]."""
    keys = keys_TY.float()
    scale_T1 = quotient(keys.abs().amax(-1, keepdim=True), 127).clamp_min(SMALLEST_HALF).half()
    return (keys / scale_T1.float()).round().clamp(-127, 127).to(torch.int8), scale_T1


def int8_index_keys(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return the keys in both parts of rows, as float32 [..., Y]."""
    return numbers.float() * scale.float()


def hadamard(x: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of the last axis, a power of two, in natural (Sylvester)
    order."""
    width = x.shape[-1]
    half = 1
    while half < width:
        left, right = x.reshape(*x.shape[:-1], width // (2 * half), 2, half).unbind(-2)
        x = torch.stack((left + right, left - right), -2).flatten(-3)
        half *= 2
    scale: float = width**-0.5
    return x * scale


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 of the shape of x, float32 scales without its last axis)."""
    x = x.float()
    scale = to_power_of_two(quotient(x.abs().amax(-1).clamp_min(SMALLEST_AMAX), E4M3_MAX))
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _values(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.contiguous().view(dtype).float()
