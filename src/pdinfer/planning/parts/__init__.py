"""Hardware as data: what each part can do by its makers, and what of it kernels and networks were seen to reach.

    parts.json            parts, empirical factors and DeepEP's published times, each with source and date

May import: the ground."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import attrs
import msgspec
import numpy as np

from pdinfer.checks import as_float, clip, float_in, instance_of, int_in
from pdinfer.errors import ConfigError
from pdinfer.values import Value


def _number(low: float, high: float, *, low_included: bool = False) -> Any:
    """Return an attrs field for a number that is kept as a float."""
    return attrs.field(validator=float_in(low, high, low_included=low_included), converter=as_float)


def _rate() -> Any:
    return _number(0.0, 1e18)


def _share() -> Any:
    return _number(0.0, 1.0)


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value, where it is from, and when that was read or published."""

    value: float
    source: str
    date: str


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values by the number of ranks, between which the logarithm of the ranks decides."""

    source: str
    date: str
    ranks: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, num_ranks: int) -> float:
        """Return the value for so many ranks; beyond the ends it is that of the nearest."""
        return float(np.interp(np.log2(num_ranks), np.log2(self.ranks), self.values))


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part. A usual host has `host_ranks`, and `scale_up_ranks` reach each other over the scale-up network."""

    name: str
    device: str
    host_ranks: int
    scale_up_ranks: int
    numbers: dict[str, Number]


class Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. `factors` are empirical, and apart from what makers say."""

    parts: tuple[Part, ...]
    factors: dict[str, Number]
    normal: Series
    low_latency: Series


@attrs.frozen(kw_only=True)
class Factors(Value):
    """What is reached of a part, seen or chosen and not what its maker says: `parts/parts.json` has the sources.

    Shares of peak rates: `product` (matrix products), `prefill_attention`, `decode_attention`, `memory`, `scale_up`.
    `overlap` is the share of the shorter of compute and all-to-all that two batches hide, and meanwhile normal kernels
    take `communication_share` of the multiprocessors. A launch takes `launch_s`, a message at least `message_s`.
    `imbalance` is the load of the fullest rank of experts over the mean."""

    product: float = _share()
    prefill_attention: float = _share()
    decode_attention: float = _share()
    memory: float = _share()
    launch_s: float = _share()
    prefill_launches: float = _rate()
    decode_launches: float = _rate()
    overlap: float = _share()
    imbalance: float = _number(1.0, 1e4, low_included=True)
    communication_share: float = _share()
    scale_up: float = _share()
    message_s: float = _share()


@attrs.frozen(kw_only=True)
class Hardware(Value):
    """One part in its usual machine: dense peak rates in FLOP/s, bytes, and bytes per second, one way for networks.

    `device` is its name for `EnginePlan`, which knows what it multiplies. `fp8_flops` are those of INT8 where a part
    has no FP8. `scale_up_ranks` reach each other over the scale-up network: of one host, or of several where they are
    more than `host_ranks`. The NIC is the machine's: give yours with `attrs.evolve(hw, nic_bytes_per_s=…)`, and factors
    of your own with `factors`."""

    name: str = attrs.field(validator=instance_of(str))
    device: str = attrs.field(validator=instance_of(str))
    bf16_flops: float = _rate()
    fp8_flops: float = _rate()
    memory_bytes: float = _rate()
    memory_bytes_per_s: float = _rate()
    scale_up_bytes_per_s: float = _rate()
    nic_bytes_per_s: float = _rate()
    host_ranks: int = attrs.field(validator=int_in(1, 1 << 16))
    scale_up_ranks: int = attrs.field(validator=int_in(1, 1 << 16))
    factors: Factors = attrs.field(validator=instance_of(Factors))


@cache
def parts() -> Parts:
    """Return the file of parts that comes with pdinfer."""
    return msgspec.json.decode((files("pdinfer.planning.parts") / "parts.json").read_bytes(), type=Parts)


def hardware(name: str) -> Hardware:
    """Return a part by its name, such as "H800", with the empirical factors that come with pdinfer. Raises ConfigError,
    with the names that there are, for another one."""
    found = next((part for part in parts().parts if part.name == name), None)
    if found is None:
        known = ", ".join(part.name for part in parts().parts)
        raise ConfigError(f"there is no part {clip(name)}; there are {known}; attrs.evolve changes the numbers of one")
    return Hardware(
        name=found.name,
        device=found.device,
        host_ranks=found.host_ranks,
        scale_up_ranks=found.scale_up_ranks,
        factors=Factors(**{name: number.value for name, number in parts().factors.items()}),
        **{name: number.value for name, number in found.numbers.items()},
    )
