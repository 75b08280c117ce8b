"""Which rank this is and how the ranks are divided: plain ints, frozen."""

from __future__ import annotations

import os
from typing import Any

import attrs

from pdinfer.checks import clip
from pdinfer.errors import ConfigError


def _check_size(instance: Topology, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
        raise ConfigError(f"topology {attribute.name} must be an int from 1 to 65536, got {clip(value)}")


@attrs.frozen(kw_only=True)
class Topology:
    """Sizes of one engine's parallel groups and the place of this rank in them.

    Attention ranks form a grid `world_size = dp_size * cp_size * tp_size`, tensor-parallel ranks adjacent; experts are
    spread over `ep_size` ranks, which divides `world_size`. Raises ConfigError with the values where they do not fit.
    """

    rank: int = 0
    world_size: int = attrs.field(default=1, validator=_check_size)
    tp_size: int = attrs.field(default=1, validator=_check_size)
    dp_size: int = attrs.field(default=1, validator=_check_size)
    cp_size: int = attrs.field(default=1, validator=_check_size)
    ep_size: int = attrs.field(default=1, validator=_check_size)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank < self.world_size:
            size = self.world_size
            raise ConfigError(f"rank {clip(self.rank)} is outside 0..{size - 1} (world_size={size})")
        if self.dp_size * self.cp_size * self.tp_size != self.world_size:
            raise ConfigError(
                f"dp_size * cp_size * tp_size = {self.dp_size} * {self.cp_size} * {self.tp_size} = "
                f"{self.dp_size * self.cp_size * self.tp_size}, but world_size is {self.world_size}"
            )
        if self.world_size % self.ep_size:
            raise ConfigError(f"ep_size {self.ep_size} does not divide world_size {self.world_size}")

    @classmethod
    def single(cls) -> Topology:
        """One rank that holds everything."""
        return cls()

    @classmethod
    def from_env(cls) -> Topology:
        """The rank that torchrun describes in RANK and WORLD_SIZE; one rank when they are unset."""
        values = {}
        for field, name, default in (("rank", "RANK", "0"), ("world_size", "WORLD_SIZE", "1")):
            text = os.environ.get(name, default)
            if not text.isascii() or not text.isdecimal() or len(text) > 9:
                raise ConfigError(f"environment variable {name} must be a plain number, got {clip(text)}")
            values[field] = int(text)
        size = values["world_size"]
        return cls(rank=values["rank"], world_size=size, dp_size=size, ep_size=size)
