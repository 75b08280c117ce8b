"""What a config.json says of weights that compressed-tensors has packed to four bits.

Format: https://github.com/vllm-project/compressed-tensors, `QuantizationConfig`. What would mean other numbers than
those that are read is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import permutations
from types import MappingProxyType

import attrs

from pdinfer.checks import clip
from pdinfer.config.fields import check_known
from pdinfer.errors import ConfigError
from pdinfer.values import Value

FORMATS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"pack-quantized": ("int4", "int"), "mxfp4-pack-quantized": ("mxfp4", "float")}
)
"""The formats of files, the names of theirs in memory, and the type of their numbers."""
KNOWN = frozenset({"quant_method", "format", "config_groups", "ignore", "quantization_status"})
HARMLESS = frozenset({"global_compression_ratio", "version"})
OFF: Mapping[str, object] = MappingProxyType(
    {"kv_cache_scheme": None, "moe_sparsity_config": None, "sparsity_config": {}, "transform_config": {}}
)
GROUP_OFF: Mapping[str, object] = MappingProxyType({"input_activations": None, "output_activations": None})
WEIGHTS_HARMLESS = frozenset({"observer", "observer_kwargs", "zp_dtype"})
WEIGHTS_OFF: Mapping[str, object] = MappingProxyType({"actorder": None, "block_structure": None})
WEIGHTS: Mapping[str, object] = MappingProxyType(
    {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
)
"""What `weights` of the one group must be, besides its type."""

EXPRESSION = "re:"
MAX_IGNORED = 4096
MAX_PATTERN = 256
MAX_FORKS = 3
_WILD = re.compile(r"[*+]")
_CHOICE = re.compile(r"\((?:\?:)?([^)]*)\)")
_PATTERN = re.compile(r"\^?(?:[\w-]|\\[.d]\+?|\.[*+]?|\[0-9\]\+?|\((?:\?:)?(?:[\w|-]|\\\.)*\))*\$?")
"""The regular expressions that are taken: names, dots, digits, wildcards and choices between names. A match can go on
in several ways at a wildcard, and at a choice in which one name begins another. With at most three of both it takes no
longer than the cube of a name's length, whoever wrote the file."""


@attrs.frozen
class PackedWeights(Value):
    """The format of packed weights, "int4" or "mxfp4", and the layers that are not packed: by their names, or by
    regular expressions that the beginning of a name must match."""

    format: str
    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> PackedWeights:
        """Return what the `quantization_config` of compressed-tensors says. Raises ConfigError for what is not one of
        `FORMATS` with a scale for every 32 inputs."""
        where = "quantization_config of compressed-tensors"
        check_known(fields, KNOWN | HARMLESS, OFF, where)
        if fields.get("quantization_status") not in (None, "compressed"):
            status = clip(fields["quantization_status"])
            raise ConfigError(f"quantization_status {status} is not supported; it must be 'compressed'")
        stored = fields.get("format")
        if not isinstance(stored, str) or stored not in FORMATS:
            raise ConfigError(f"format {clip(stored)} of {where} is not supported; supported: {', '.join(FORMATS)}")
        group = _only_group(fields.get("config_groups"), where)
        check_known(group, {"targets", "weights", "format"}, GROUP_OFF, f"config_groups of {where}")
        if group.get("targets") != ["Linear"] or group.get("format") not in (None, stored):
            raise ConfigError(
                f"a group of {where} must have the targets ['Linear'] and the format {stored}, got "
                f"{clip(group.get('targets'))} and {clip(group.get('format'))}"
            )
        name, kind = FORMATS[stored]
        _check_weights(group.get("weights"), kind, where)
        ignored = _ignored(fields.get("ignore"), where)
        names = frozenset(each for each in ignored if not each.startswith(EXPRESSION))
        patterns = (_pattern(each.removeprefix(EXPRESSION), where) for each in ignored if each not in names)
        return cls(name, names, tuple(patterns))

    def ignores(self, layer: str) -> bool:
        """Return whether the layer of that name is said not to be packed."""
        return layer in self.names or any(pattern.match(layer) for pattern in self.patterns)


def _only_group(groups: object, where: str) -> Mapping[str, object]:
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConfigError(f"config_groups of {where} must be one group, got {clip(groups)}")
    (group,) = groups.values()
    if not isinstance(group, Mapping):
        raise ConfigError(f"config_groups of {where} must hold an object, got {clip(group)}")
    return group


def _check_weights(weights: object, kind: str, where: str) -> None:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights of {where} must be an object, got {clip(weights)}")
    check_known(weights, {"type", "scale_dtype", *WEIGHTS} | WEIGHTS_HARMLESS, WEIGHTS_OFF, f"weights of {where}")
    expected = {**WEIGHTS, "type": kind}
    for name, value in expected.items():
        found = weights.get(name, False if name == "dynamic" else None)
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            raise ConfigError(f"{name} {clip(found)} of packed weights is not supported; it must be {clip(value)}")
    dtype = weights.get("scale_dtype")
    if dtype not in (None, "torch.uint8" if kind == "float" else "torch.bfloat16"):
        raise ConfigError(f"scale_dtype {clip(dtype)} of packed weights is not supported")


def _ignored(names: object, where: str) -> Sequence[str]:
    if names is None:
        return ()
    if not isinstance(names, list) or len(names) > MAX_IGNORED or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"ignore of {where} must be a list of at most {MAX_IGNORED} names, got {clip(names)}")
    return names


def _pattern(text: str, where: str) -> re.Pattern[str]:
    if len(text) > MAX_PATTERN or _PATTERN.fullmatch(text) is None or _forks(text) > MAX_FORKS:
        raise ConfigError(
            f"the regular expression {clip(text)} in ignore of {where} is not supported; names, dots, digits and "
            f"choices between different names are, with at most {MAX_FORKS} wildcards and choices in which one name "
            "begins another"
        )
    return re.compile(text)


def _forks(text: str) -> float:
    """Return at how many places of an expression a match can go on in several ways; infinity where a choice has a name
    twice."""
    choices = [choice.split("|") for choice in _CHOICE.findall(text)]
    if any(len(set(names)) < len(names) for names in choices):
        return math.inf
    begun = (any(longer.startswith(name) for name, longer in permutations(names, 2)) for names in choices)
    return len(_WILD.findall(text)) + sum(begun)
