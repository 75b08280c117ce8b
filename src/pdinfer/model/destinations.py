"""Where the tensors of a checkpoint go. A model is built from what this allocates, and every name keeps its places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from pdinfer.checkpoint.schemes import QUANTIZED
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.kernels.formats import IN_STRIPS
from pdinfer.kernels.formats.floats import FloatWithBias, Plain
from pdinfer.kernels.formats.format import WHOLE, Format, Shape, Shard, Weight
from pdinfer.kernels.formats.int8 import Int8Static
from pdinfer.kernels.formats.strips import fit
from pdinfer.kernels.formats.weights import expert, places, tensors_of
from pdinfer.kernels.resolve import ResolvedOps, slow_op
from pdinfer.process.memory import ask_huge_pages


def kept_formats(weights: str, resolved: ResolvedOps) -> frozenset[type[Format]]:
    """Return the formats whose weights `load_model(weights=...)` holds as they are stored. Raises ConfigError for
    another word."""
    if weights not in ("auto", "stored", "float"):
        raise ConfigError(f'weights must be "auto", "stored" or "float", got {weights!r}')
    if weights == "auto":
        return frozenset(kind for kind in QUANTIZED if not slow_op(kind.name, resolved))
    return frozenset(QUANTIZED) if weights == "stored" else frozenset()


def lie_in_strips(resolved: ResolvedOps) -> frozenset[type[Format]]:
    """Return the formats whose matrices lie in strips: where one provider has been chosen for products with these and
    with plain ones."""
    chosen = {choice.op: choice.provider for choice in resolved.choices}
    reads = {kind: {chosen[op] for op in (*kind.ops(), *strips.ops())} for kind, strips in IN_STRIPS.items()}
    return frozenset(kind for kind, providers in reads.items() if providers == {"native"})


class Stored(Protocol):
    """How a checkpoint stores its tensors, as far as that decides where they go."""

    @property
    def ue8m0(self) -> bool:
        """What the config says about the scales of FP8 activations."""

    def stored_as(self, name: str) -> type[Format]: ...

    def holds(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""


@attrs.frozen
class Place:
    """The place of a tensor of the checkpoint, whose shape there is `shape`: `weight` gets the part that `shard`
    keeps."""

    weight: Weight
    shape: tuple[int, ...]
    shard: Shard


@attrs.define
class Destinations:
    """A WeightSource that allocates on `device`, on huge pages where it can, and remembers which name belongs where. A
    name has two places when a rank has an expert twice. Without `stored` every weight holds floats. With it, weights of
    a format in `kept` are held as they are stored. Matrices of a format in `strips` that are whole strips are held so.
    Raises ConfigError for a tensor that cannot be divided between the
    ranks."""

    device: torch.device
    dtype: torch.dtype
    stored: Stored | None = None
    kept: frozenset[type[Format]] = frozenset()
    strips: frozenset[type[Format]] = frozenset()
    places: dict[str, list[Place]] = attrs.field(factory=dict)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard = WHOLE) -> Tensor:
        self._check_shard(name, shape, shard)
        tensor = torch.empty(shard.shape(shape), dtype=dtype or self.dtype, device=self.device)
        self._remember(tensor, iter([(name, tensor)]), shape, shard)
        return tensor

    def find(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        there = self.stored is not None and self.stored.holds(name)
        return self.take(name, *shape, dtype=dtype) if there else None

    def weight(self, names: Sequence[str], rows: int, columns: int, shard: Shard = WHOLE) -> Weight:
        for name in names:
            self._check_shard(name, (rows, columns), shard)
        kind = self.common_format(names)
        biased = kind is Plain and any(self.stored_as(name) is Int8Static for name in names)
        return expert(self._allocate([names], FloatWithBias if biased else kind, rows, columns, shard), 0)

    def format(self, name: str) -> type[Format]:
        return self._held(self.stored_as(name))

    def _held(self, kind: type[Format]) -> type[Format]:
        return kind if kind in self.kept else Plain

    def stack(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> Weight:
        kind = self.common_format([name for parts in names for name in parts])
        if not kind.has_experts:
            raise CheckpointError(
                f'{names[0][0]} is stored as {kind.name}, which experts cannot be: load with weights="float"'
            )
        return self._allocate(names, kind, rows, columns)

    def _allocate(
        self, names: Sequence[Sequence[str]], kind: type[Format], rows: int, columns: int, shard: Shard = WHOLE
    ) -> Weight:
        kept_rows, kept_columns = shard.shape((rows, columns))
        shape = Shape(len(names), len(names[0]), kept_rows, kept_columns)
        ue8m0 = self.stored is not None and self.stored.ue8m0
        if kind in self.strips and fit(shape):
            kind = IN_STRIPS[kind]
        stack = kind.empty(shape, dtype=self.dtype, device=self.device, ue8m0=ue8m0)
        self._remember(stack, places(stack, names), (rows, columns), shard)
        return stack

    def _remember(
        self, weight: Weight, named: Iterator[tuple[str, Weight]], shape: tuple[int, ...], shard: Shard
    ) -> None:
        """Remember by name the parts of a `weight` that was just allocated. `shape` is the shape of each part in the
        files."""
        for tensor in tensors_of(weight):
            ask_huge_pages(tensor)
        for name, part in named:
            self.places.setdefault(name, []).append(Place(part, shape, shard))

    def _check_shard(self, name: str, shape: tuple[int, ...], shard: Shard) -> None:
        """Check that the parts are equal, and consist of whole blocks where the tensor is kept with a scale per
        block."""
        unit = self.format(name).units[shard.axis]
        if shard.size > 1 and shape[shard.axis] % (shard.size * unit):
            blocks = f" in whole blocks of {unit} that share a scale" if unit > 1 else ""
            raise ConfigError(
                f"{name} {list(shape)} cannot be divided between {shard.size} ranks{blocks}: {shape[shard.axis]} "
                f"{'columns' if shard.axis else 'rows'} are not a multiple of {shard.size * unit}; use a smaller "
                "tp_size or moe_dense_tp_size" + (', or weights="float"' if unit > 1 else "")
            )

    def common_format(self, names: Iterable[str]) -> type[Format]:
        """Return the one format that all these matrices are held in, as those must be that lie in one tensor. Raises
        CheckpointError where there is none."""
        stored = {self.stored_as(name): name for name in names}
        formats = {self._held(kind) for kind in stored}
        if len(formats) > 1:
            held = ", ".join(f"{name} as {kind.name.upper()}" for kind, name in stored.items())
            raise CheckpointError(f'{held} are stored differently and cannot be one matrix: load with weights="float"')
        return formats.pop()

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for held in self.places.values() for at in held for tensor in tensors_of(at.weight))

    def stored_as(self, name: str) -> type[Format]:
        return Plain if self.stored is None else self.stored.stored_as(name)
