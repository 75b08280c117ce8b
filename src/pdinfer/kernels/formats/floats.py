"""Weights in floats: plain tensors, and floats with the bias that was quantized with them; and arithmetic that is not
rounded to the dtype of a model, for ops in plain torch."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.format import BY_FORMAT, Format, Shape


@attrs.frozen(eq=False)
class Plain(Format):
    """A plain tensor of any dtype as a value of a format. Models hold and ops take the tensor itself."""

    name = "float"
    holds_floats = True

    numbers: Tensor

    @classmethod
    def ops(cls) -> tuple[str, ...]:
        return BY_FORMAT

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> Tensor:
        return shape.tensor(shape.rows, shape.columns, dtype, device)

    @property
    def operand(self) -> Tensor:
        return self.numbers

    def fill(self, value: Format) -> None:
        """Write the value of a weight of any format."""
        value.floats_into(self.numbers)


@attrs.frozen(eq=False, kw_only=True)
class FloatWithBias(Format):
    """The float form of an `Int8Static`: floats [..., O, I], and the bias [..., O, 1] that its `output_offset` held."""

    name = "float_with_bias"
    holds_floats = True

    numbers: Tensor
    bias: Tensor

    @classmethod
    def empty(cls, shape: Shape, *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False) -> FloatWithBias:
        numbers = shape.tensor(shape.rows, shape.columns, dtype, device)
        return cls(numbers=numbers, bias=shape.tensor(shape.rows, 1, dtype, device))

    def fill(self, value: Format) -> None:
        """Write the value and the bias of a weight that has one."""
        assert value.bias is not None
        value.floats_into(self.numbers)
        self.bias.copy_(value.bias)


def all_finite(tensor: Tensor) -> bool:
    """Return whether floats hold neither NaN nor infinity. This reads them at the speed of memory, and `torch.isfinite`
    at a twentieth of it."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


def exact(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def not_finite(x: Tensor) -> Tensor:
    """Return NaN for rows (of the last axis, which stays with one element) that hold NaN or infinity, and 0 for the
    others. It is added to what cannot show them itself: integers, or a softmax, which gives a score of -inf no
    weight."""
    return (0 * exact(x)).sum(-1, keepdim=True)
