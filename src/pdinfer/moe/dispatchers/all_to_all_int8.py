"""Experts on several ranks whose weights are INT8: rows travel as their products read them."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.activations import INT8Rows, Rounded
from pdinfer.kernels.formats.int8 import int8_activation
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher
from pdinfer.moe.dispatchers.base import Contiguous, Returned
from pdinfer.values import Value

SCALE_BYTES = torch.float32.itemsize


@attrs.frozen
class _Travelling(Value):
    """Rows in transit, and the dtype of their floats."""

    packed: Any
    dtype: torch.dtype


@attrs.frozen
class Int8AllToAllDispatcher(Value):
    """The dispatcher over collectives for experts in INT8 with a scale per token ("w8a8_dynamic").

    A token is rounded once, before it is sent to its experts, and takes D + 4 bytes on the way to each instead of 2 D
    in bfloat16. Rows arrive without room between those of one expert and of the next, as `INT8Rows`: the form in which
    Ascend's dispatch returns them (npu_moe_distribute_dispatch_v2 of torch_npu 2.11, quant_mode 2). Results return as
    floats.
    """

    carrier: AllToAllDispatcher
    """It carries bytes: an int8 for each channel, then the scale."""

    max_live: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = False

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> _Travelling:
        x_TD = x_TD.floats_TI if isinstance(x_TD, Rounded) else x_TD
        packed_TW = torch.cat([_dense(each).view(torch.uint8) for each in int8_activation(x_TD)], -1)
        return _Travelling(self.carrier.dispatch_begin(packed_TW, ids_TK, weights_TK), x_TD.dtype)

    def dispatch_end(self, pending: _Travelling) -> Contiguous:
        arrived = self.carrier.dispatch_end(pending.packed)
        assert isinstance(arrived.x_SD, Tensor)
        numbers_SD, scales_S1 = map(_dense, arrived.x_SD.tensor_split((-SCALE_BYTES,), -1))
        rows = INT8Rows(numbers_SD.view(torch.int8), scales_S1.view(torch.float32), dtype=pending.dtype)
        return attrs.evolve(arrived, x_SD=rows)

    def combine_begin(self, y: Tensor, dispatched: Any) -> Any:
        return self.carrier.combine_begin(y, dispatched)

    def combine_end(self, pending: Any) -> Returned:
        return self.carrier.combine_end(pending)


def _dense(x: Tensor) -> Tensor:
    """Return a copy whose bytes another dtype can be read from. To torch a tensor of one row or none is contiguous
    whatever its strides and offset are."""
    return x.clone(memory_format=torch.contiguous_format)
