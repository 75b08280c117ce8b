"""What can be done with a weight of any format, plain tensors included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import Format, Shard, Weight


def as_format(weight: Weight) -> Format:
    """Return the weight as a value of its format."""
    return Plain(weight) if isinstance(weight, Tensor) else weight


def map_tensors(weight: Weight, change: Callable[[Tensor], Tensor]) -> Weight:
    """Return the weight with every tensor replaced by what `change` returns for it."""
    return change(weight) if isinstance(weight, Tensor) else weight.map(change)


def expert(weight: Weight, index: int) -> Weight:
    """Return a view of one expert's weight in a stack of them."""
    return map_tensors(weight, lambda tensor: tensor[index])


def part(weight: Weight, index: int, parts: int) -> Weight:
    """Return a view of one of the `parts` matrices that lie one below the other in `weight`."""
    return as_format(weight).part(index, parts).operand


def places(stack: Weight, names: Sequence[Sequence[str]]) -> Iterator[tuple[str, Weight]]:
    """Yield each name with a view of its matrix in `stack`, which holds one expert for each list of names."""
    for index, parts in enumerate(names):
        for at, name in enumerate(parts):
            yield name, part(expert(stack, index), at, len(parts))


def columns_of(weight: Weight, shard: Shard) -> Weight:
    """Return the part of a whole matrix that `shard` keeps, as `Format.columns` does."""
    return as_format(weight).columns(shard).operand


def tensors_of(weight: Weight) -> list[Tensor]:
    """Return the tensors of the weight, the numbers first."""
    return list(as_format(weight).tensors.values())


def num_bytes(weight: Weight) -> int:
    """Return the bytes of all tensors of the weight."""
    return sum(tensor.nbytes for tensor in tensors_of(weight))


def to_bytes(weight: Weight) -> Tensor:
    """Return all tensors of the weight, one after another, as a new uint8 tensor [num_bytes] on their device."""
    return torch.cat([_raw(tensor) for tensor in tensors_of(weight)])


def from_bytes(weight: Weight, data: Tensor) -> None:
    """Undo `to_bytes` in place: write `data`, uint8 [num_bytes], into the (contiguous) tensors of a weight of the same
    format and shape."""
    tensors = tensors_of(weight)
    for into, value in zip(tensors, torch.split(data, [tensor.nbytes for tensor in tensors]), strict=True):
        _raw(into).copy_(value)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def assign(destination: Weight, value: Weight) -> None:
    """Write `value` into the tensors of `destination`, which is of the same format or of floats."""
    as_format(destination).fill(as_format(value))


def dequantize(weight: Weight, out: Tensor) -> None:
    """Write the value of `weight` to `out` [..., O, I], as `Format.floats_into` does."""
    as_format(weight).floats_into(out)
