"""What kernels share that round to FP8 and INT8. The results are those of `reference`, to the bit.

A division is the IEEE one, as torch's on a CPU is; Triton's `/` of float32 is not."""

from __future__ import annotations

import triton
import triton.language as tl

from pdinfer.kernels.formats import cache_rows, fp8

FP8_MAX = tl.constexpr(fp8.FP8_MAX)
FP8_MIN_AMAX = tl.constexpr(cache_rows.SMALLEST_AMAX)
INT8_MIN_AMAX = tl.constexpr(1e-10)
GROUP = tl.constexpr(fp8.BLOCK)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_MANTISSA = tl.constexpr(0x007FFFFF)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""A float32 of this size has no digits behind the point."""


@triton.jit
def largest(x, axis: tl.constexpr):
    """Return the largest magnitude along an axis, which stays with one element. It is NaN where one is: bits of floats
    are ordered as their magnitudes, and NaN is above all."""
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    return tl.max(bits, axis, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def at_least(x, least):
    """Return max(x, least), and NaN for NaN."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_power_of_two(x):
    """Return the smallest power of two that is not below each (positive, normal) x. NaN and infinity stay."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits + _MANTISSA) & _INFINITY
    return tl.where(bits < _INFINITY, power, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(x, axis: tl.constexpr, UE8M0: tl.constexpr):
    """Return (e4m3, scales) of float32 x, with one scale along an axis, which stays with one element."""
    scale = tl.div_rn(at_least(largest(x, axis), FP8_MIN_AMAX), FP8_MAX)
    if UE8M0:
        scale = to_power_of_two(scale)
        scaled = x * tl.div_rn(1.0, scale)
    else:
        scaled = tl.div_rn(x, scale)
    return scaled.to(tl.float8e4nv), scale


@triton.jit
def rounded_to_fp8(x, axis: tl.constexpr, UE8M0: tl.constexpr):
    """Return the value of x after `to_fp8`."""
    numbers, scale = to_fp8(x, axis, UE8M0)
    return numbers.to(tl.float32) * scale


@triton.jit
def rounded_to_int8(x, amax):
    """Return the value of x after it was rounded to int8 at scale amax / 127, ties to even."""
    scale = tl.div_rn(at_least(amax, INT8_MIN_AMAX), 127.0)
    return to_even(tl.div_rn(x, scale)) * scale


@triton.jit
def to_even(x):
    """Return float32 x rounded to integers, ties to even; from 2^22 on, to a multiple of a larger power of two."""
    return x + _TO_INTEGER - _TO_INTEGER
