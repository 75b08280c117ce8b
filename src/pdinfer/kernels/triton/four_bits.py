"""Weights of four bits as bfloat16, exactly: what tensor cores multiply.

A byte has two codes. They are put where a pair of bfloat16 has its last bits, so that both are numbers at once, too
small by a power of two: a product with it, which is exact, and one with the scale make weights of them.
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
def int4_tiles(codes, scales):
    """Return two tiles [C, I] of bfloat16 whose sum is that of codes uint8 [C, I / 2] with bfloat16 scales [C, I / 32].

    A product of 4 bits and the 8 of a scale would be rounded. Those with the upper 4 bits of the scale, and with the
    lower 4, are not.
    """
    upper = (scales.to(tl.int16, bitcast=True) & -16).to(tl.bfloat16, bitcast=True)
    eighths = _pairs((codes.to(tl.uint32) * 0x8008) & 0x00780078, _EIGHTH)
    return _from_eighths(eighths, upper), _from_eighths(eighths, (scales - upper).to(tl.bfloat16))


@triton.jit
def _from_eighths(eighths, scales):
    """Return (8 * eighths - 8) * scales: codes are the sum with 8."""
    scale = (scales * 8.0).to(tl.bfloat16)[:, :, None]
    return _unscaled(eighths * scale - scale)


@triton.jit
def mxfp4_tile(codes, scales):
    """Return a tile [C, I] of bfloat16 of codes uint8 [C, I / 2] with exponents uint8 [C, I / 32]."""
    codes = codes.to(tl.uint32)
    values = _pairs((codes * 0x40040) & 0x01C001C0 | (codes * 0x1001000) & 0x80008000, _WHOLE)
    scale = tl.maximum(scales.to(tl.int32) << 7, _LEAST_E8M0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return _unscaled(values * scale[:, :, None])


@triton.jit
def _pairs(pairs, factor):
    """Return [C, I / 32, 32] of words [C, I / 2] that hold two bfloat16, times a factor."""
    low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    joined = tl.join(low, high)
    return (joined.reshape(joined.shape[0], joined.shape[1] * 2 // SCALED, SCALED) * factor).to(tl.bfloat16)


@triton.jit
def _unscaled(groups):
    return groups.to(tl.bfloat16).reshape(groups.shape[0], groups.shape[1] * SCALED)
