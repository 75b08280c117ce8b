"""Weights of four bits as bfloat16, exactly: what tensor cores multiply.

A byte has two codes. They are put where a pair of bfloat16 has its last bits, so that both are numbers at once, too
small by a power of two: a product with it is exact. So is one with a scale of MXFP4, and not one with a scale of INT4,
which multiplies sums of a group instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdinfer.kernels.formats import four_bits

SCALED = tl.constexpr(four_bits.GROUP)
"""The inputs of a row that share a scale."""
_EIGHTH = tl.constexpr(2.0**127)
"""Makes an eighth of a code of INT4 whose lowest bit is the fourth of a bfloat16, 2^-130."""
_WHOLE = tl.constexpr(2.0**126)
"""Makes a value of E2M1 whose exponent is in the last bits of that of a bfloat16."""
_LEAST_E8M0 = tl.constexpr(0x40)
"""2^-127 as a bfloat16, which has no exponent for it."""


@triton.jit
def int4_eighths(codes):
    """Return a tile [C, I] of bfloat16: an eighth of what codes uint8 [C, I / 2] stand for, without their scales."""
    eighths = _pairs((codes.to(tl.uint32) * 0x8008) & 0x00780078) * _EIGHTH
    return (eighths - 1.0).to(tl.bfloat16).reshape(codes.shape[0], codes.shape[1] * 2)


@triton.jit
def groups_of(tile, COUNT: tl.constexpr):
    """Return COUNT tiles [C, I / COUNT] that a tile [C, I] consists of. COUNT is a power of two."""
    if COUNT == 1:
        groups = (tile,)
    else:
        first, second = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
        groups = groups_of(first, COUNT // 2) + groups_of(second, COUNT // 2)
    return groups


@triton.jit
def mxfp4_tile(codes, scales):
    """Return a tile [C, I] of bfloat16 of codes uint8 [C, I / 2] with exponents uint8 [C, I / 32]."""
    codes = codes.to(tl.uint32)
    values = _pairs((codes * 0x40040) & 0x01C001C0 | (codes * 0x1001000) & 0x80008000)
    values = (values.reshape(codes.shape[0], codes.shape[1] * 2 // SCALED, SCALED) * _WHOLE).to(tl.bfloat16)
    scale = tl.maximum(scales.to(tl.int32) << 7, _LEAST_E8M0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return _unscaled(values * scale[:, :, None])


@triton.jit
def _pairs(pairs):
    """Return [C, I / 2, 2] of words [C, I / 2] that hold two bfloat16."""
    low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _unscaled(groups):
    return groups.to(tl.bfloat16).reshape(groups.shape[0], groups.shape[1] * SCALED)
