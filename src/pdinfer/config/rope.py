"""Rotary frequencies, with and without YaRN: plain floats in double precision."""

from __future__ import annotations

import math

import attrs

from pdinfer.checks import as_float, float_field, float_in, int_in
from pdinfer.errors import ConfigError

MAX_POSITIONS = 1 << 24


@attrs.frozen(kw_only=True)
class YarnScaling:
    """Rope stretched by YaRN (arXiv:2309.00071), switched on from position 0 whatever the served length."""

    factor: float = attrs.field(converter=as_float, validator=float_in(1, 65536, low_included=True))
    original_max_position_embeddings: int = attrs.field(validator=int_in(1, MAX_POSITIONS))
    beta_fast: float = float_field(0.001, 65536, default=32.0, low_included=True)
    beta_slow: float = float_field(0.001, 65536, default=1.0, low_included=True)
    mscale: float | None = float_field(0, 100, default=None, low_included=True)
    mscale_all_dim: float | None = float_field(0, 100, default=None, low_included=True)

    def __attrs_post_init__(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ConfigError(f"beta_fast must be at least beta_slow = {self.beta_slow:g}, got {self.beta_fast:g}")

    def magnitude(self, mscale: float) -> float:
        """Return YaRN's m(k) = 0.1 k ln(factor) + 1, or 1 where nothing is stretched."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin, 1 for all released models: m(mscale) / m(mscale_all_dim) where both are set and
        not 0, else m(1), as in transformers."""
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def turning(self, rotations: float, rope_dim: int, theta: float) -> float:
        """Return the (fractional) pair that turns `rotations` times within the original context."""
        turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))


def inv_frequencies(rope_dim: int, theta: float, yarn: YarnScaling | None) -> tuple[float, ...]:
    """Return the radians per position of the rope_dim / 2 pairs: theta^(-2i/rope_dim).

    YaRN (arXiv:2309.00071, equations 18 to 23) slows pairs that turn fewer than `beta_slow` times in the original
    context by `factor`, leaves those above `beta_fast` alone, and blends linearly between."""
    plain = tuple(theta ** (-2 * pair / rope_dim) for pair in range(rope_dim // 2))
    if yarn is None:
        return plain
    low = max(math.floor(yarn.turning(yarn.beta_fast, rope_dim, theta)), 0)
    high = float(min(math.ceil(yarn.turning(yarn.beta_slow, rope_dim, theta)), rope_dim - 1))
    if low == high:
        high += 0.001
    slowed = (min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(rope_dim // 2))
    return tuple(
        frequency * (1 - part) + frequency / yarn.factor * part for frequency, part in zip(plain, slowed, strict=True)
    )
