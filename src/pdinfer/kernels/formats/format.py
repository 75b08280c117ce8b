"""What a format of weights is.

Values of formats are frozen, and their tensors may change in place but never move. A weight of `parts` matrices, one
below the other, is quantized part by part. All tensors of a format but strips are cut alike along their second axis
from the end, so that `part` need not know them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, Self, cast

import attrs
import torch
from torch import Tensor

from pdinfer.values import Value

BY_FORMAT = ("linear", "grouped_mlp")
"""The ops that have a function for each format of weights."""


class Rounding(Enum):
    """What a product with quantized weights does to its input first."""

    FP8 = "fp8"
    FP8_UE8M0 = "fp8 with scales that are powers of two"
    INT8 = "int8"


@attrs.frozen
class Shard:
    """The part of a matrix [O, I] that a rank holds: number `index` of `size` equal parts, cut along O (axis 0) or I
    (axis 1)."""

    index: int = 0
    size: int = 1
    axis: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part."""
        return tuple(n // self.size if axis == self.axis else n for axis, n in enumerate(whole))

    def of(self, length: int) -> range:
        """Return the range of the part in an axis of `length` elements, or of `length` blocks where parts consist of
        whole blocks."""
        return range(length * self.index // self.size, length * (self.index + 1) // self.size)

    def columns(self, tensor: Tensor) -> Tensor:
        """Return a view of the part's columns, whatever the axis."""
        kept = self.of(tensor.shape[-1])
        return tensor[..., kept.start : kept.stop]


WHOLE = Shard()


@attrs.frozen
class Shape:
    """The shape of a stack of weights: experts, the parts of each, and the rows and columns of a part."""

    experts: int
    parts: int
    rows: int
    columns: int

    def tensor(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor with that many rows for each part."""
        return torch.empty(self.experts, self.parts * rows, columns, dtype=dtype, device=device)


class Format(Value):
    """A matrix of weights, or a stack of them with the experts first, that is not a plain tensor. The tensors of a
    value are its fields that are tensors, `numbers` first."""

    __slots__ = ()

    name: ClassVar[str]
    """What it is called in an `OpSpec` and in the names of ops."""
    units: ClassVar[tuple[int, int]] = (1, 1)
    """The rows and the columns that share a scale; ranks have whole ones."""
    scales_tokens: ClassVar[bool] = False
    """Whether activations are scaled over all columns, so that columns cannot be divided over ranks."""
    has_experts: ClassVar[bool] = True
    """Whether experts can be held so."""
    holds_floats: ClassVar[bool] = False
    """Whether it holds the floats that a quantized weight stands for."""
    strips_of: ClassVar[type[Format] | None] = None
    """The format whose numbers it holds in the order in which CPU kernels multiply them, or None."""

    numbers: Tensor

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Weight:
        """Return an uninitialised weight. Floats are of `dtype`, and `ue8m0` says how FP8 activations are scaled."""
        raise NotImplementedError

    @classmethod
    def ops(cls) -> tuple[str, ...]:
        """Return the names of the ops on weights of this format: "linear[fp8]"."""
        return tuple(f"{op}[{cls.name}]" for op in BY_FORMAT if cls.has_experts or op != "grouped_mlp")

    @classmethod
    def rounding(cls, *, ue8m0: bool) -> Rounding | None:
        """Return what a product does to its input, or None where it needs the values of the weight for that."""
        return None

    @property
    def ue8m0(self) -> bool | None:
        """Whether its products read FP8 activations with scales that are powers of two; None where they read none in
        FP8."""
        return None

    @property
    def bias(self) -> Tensor | None:
        """What a product adds to every row, [..., O, 1], or None in a format without."""
        return None

    def ordered(self) -> Weight:
        """Return strips as a new weight of the format `strips_of`."""
        raise NotImplementedError

    @property
    def operand(self) -> Weight:
        """What models hold and ops take: the value itself, or the tensor of plain floats."""
        return self

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names of their fields."""
        values = {field.name: getattr(self, field.name) for field in attrs.fields(cast(Any, type(self)))}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with every tensor replaced by what `change` returns for it."""
        changed = {name: change(tensor) for name, tensor in self.tensors.items()}
        return attrs.evolve(self, **changed)  # type: ignore[misc]

    def part(self, index: int, parts: int) -> Self:
        """Return a view of one of the `parts` matrices that lie one below the other."""
        return self.map(lambda tensor: tensor.chunk(parts, -2)[index])

    def columns(self, shard: Shard) -> Self:
        """Return the part of a whole matrix that `shard`, which cuts columns, keeps. What is added to every output goes
        to the first part alone, so that the products of all parts add up to that of the whole."""
        return attrs.evolve(self, numbers=shard.columns(self.numbers))  # type: ignore[misc]

    def fill(self, value: Format) -> None:
        """Write a value of the same format, or of one that this one can hold."""
        for into, tensor in zip(self.tensors.values(), value.tensors.values(), strict=True):
            into.copy_(tensor)

    def floats_into(self, out: Tensor) -> None:
        """Write the value to `out` [..., O, I], without a bias: float32 arithmetic, rounded once to the dtype of
        `out`."""
        out.copy_(self.numbers)


Weight = Tensor | Format
