"""What ops are chosen for, as data: a device, a dtype, sizes and formats. Nothing it names need be here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from pdinfer.checks import a_bool, clip, int_in, one_of
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kernels.formats import WEIGHT_FORMATS
from pdinfer.values import Value

CARDS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"A100": (8, 0), "H20": (9, 0), "H100": (9, 0), "H200": (9, 0), "H800": (9, 0), "B200": (10, 0)}
)
"""CUDA compute capabilities by card (https://developer.nvidia.com/cuda-gpus; H800 and H20 are Hopper chips too)."""
KV_FORMATS = ("bfloat16", "float16", "float32", "fp8")
OPS_OF_FORMAT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {kind.name: kind.ops() for kind in WEIGHT_FORMATS if kind.strips_of is None and not kind.holds_floats}
)
"""The ops that must run at speed before `weights="auto"` keeps quantized weights, by format: the names of
`quantize_checkpoint`, and "w8a8" for modelslim's static INT8."""


@attrs.frozen
class DeviceSpec:
    """A kind of device: torch's name of its type, the name of the card, and for CUDA its compute capability. Both are
    empty where they are not known; a provider then assumes the least."""

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: str | torch.device | DeviceSpec) -> DeviceSpec:
        """Return the spec of a card in `CARDS`, which need not be here, or of a torch device. Of a CUDA device that is
        here torch tells the name and the capability. Raises BackendUnavailable for another name."""
        if isinstance(device, DeviceSpec):
            return device
        if isinstance(device, str) and device in CARDS:
            return cls("cuda", device, CARDS[device])
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise BackendUnavailable(
                f"device {clip(device)} is neither a torch device name such as 'cpu' or 'cuda:0' nor a card among "
                f"{', '.join(CARDS)}"
            ) from error
        if found.type == "cuda" and torch.cuda.is_available():
            return cls("cuda", torch.cuda.get_device_name(found), torch.cuda.get_device_capability(found))
        return cls(found.type)

    @property
    def is_hopper(self) -> bool:
        """Whether it is a card of compute capability 9."""
        return self.type == "cuda" and self.capability is not None and self.capability[0] == 9

    def __str__(self) -> str:
        return self.name or self.type


_optional_size = attrs.validators.optional(int_in(1, 1 << 20))


def _device_of(device: str | torch.device | DeviceSpec) -> DeviceSpec:
    return DeviceSpec.of(device)


def _as_set(formats: Iterable[str]) -> frozenset[str]:
    given: object = formats
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"weight_formats must be a collection of names of formats, got {clip(given)}")
    return frozenset(formats)


def _known_formats(_instance: OpSpec, _attribute: attrs.Attribute[Any], formats: frozenset[str]) -> None:
    if unknown := sorted(formats - OPS_OF_FORMAT.keys()):
        raise ConfigError(f"weight_formats must be among {', '.join(OPS_OF_FORMAT)}, got {clip(unknown[0])}")


@attrs.frozen(kw_only=True)
class OpSpec(Value):
    """What the ops of a model must run: by it `resolve_ops` chooses, and a provider refuses what it was not made for.

    `device` may be given as `DeviceSpec.of` takes it. `num_heads` are those of one rank; the sizes of a head have the
    checkpoint's names. `weight_formats` are the quantized formats that the checkpoint holds, of `OPS_OF_FORMAT`.
    `page_size` (in tokens) and `kv_format` ("fp8", or the name of a dtype) are of the cache. None means that a value is
    not known when ops are chosen: a provider then takes only ops that can have any, or declines calls
    (`resolve.PROVIDERS`). `rope_apart` and `index_format` are those of `CacheConfig`: what its pages have in two parts.
    """

    device: DeviceSpec = attrs.field(converter=_device_of)
    dtype: torch.dtype = torch.bfloat16
    num_heads: int | None = attrs.field(default=None, validator=_optional_size)
    kv_lora_rank: int | None = attrs.field(default=None, validator=_optional_size)
    qk_rope_head_dim: int | None = attrs.field(default=None, validator=_optional_size)
    weight_formats: frozenset[str] = attrs.field(default=frozenset(), converter=_as_set, validator=_known_formats)
    page_size: int | None = attrs.field(default=None, validator=_optional_size)
    kv_format: str | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(*KV_FORMATS)))
    rope_apart: bool = attrs.field(default=False, validator=a_bool)
    index_format: str = attrs.field(default="auto", validator=one_of("auto", "int8"))
