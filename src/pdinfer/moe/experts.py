"""The routed experts of this rank, stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.weight_formats import Weight, expert, from_bytes, num_bytes, tensors_of, to_bytes
from pdinfer.layers import WeightSource
from pdinfer.moe.dispatchers import Contiguous, Dispatched, Masked


@attrs.frozen
class Experts:
    """Gated MLPs in two stacks: gate_up [E, 2I, D] (gate rows first) and down [E, D, I], in one format."""

    gate_up: Weight
    down: Weight
    op: Callable[[Tensor, Tensor, Any, Any], Tensor]

    @classmethod
    def build(cls, source: WeightSource, name: str, config: ModelConfig, ops: Ops, experts: Sequence[int]) -> Experts:
        """Build the experts of one layer. `experts` is the logical expert of each slot here, repeats included."""
        hidden, size = config.hidden_size, config.moe_intermediate_size
        of_expert = [f"{name}.{number}" for number in experts]
        into = [(f"{each}.gate_proj.weight", f"{each}.up_proj.weight") for each in of_expert]
        gate_up = source.stack(into, size, hidden)
        down = source.stack([(f"{each}.down_proj.weight",) for each in of_expert], hidden, size)
        if type(gate_up) is not type(down):
            raise CheckpointError(
                f"{name}: gate_proj and up_proj are stored in one format and down_proj in another; experts need "
                'one for all three: load with weights="float"'
            )
        return cls(gate_up, down, ops.grouped_mlp_by(gate_up))

    @property
    def device(self) -> torch.device:
        return tensors_of(self.down)[0].device

    @property
    def slot_bytes(self) -> int:
        """How many bytes one expert takes."""
        return num_bytes(expert(self.gate_up, 0)) + num_bytes(expert(self.down, 0))

    def read_slot(self, slot: int) -> Tensor:
        """Return the weights of the expert in a slot of this rank: a new uint8 tensor [slot_bytes] on their device."""
        return torch.cat([to_bytes(expert(stack, slot)) for stack in (self.gate_up, self.down)])

    def write_slot(self, slot: int, data: Tensor) -> None:
        """Write into a slot, in place, what `read_slot` returned on this rank or on another.

        Raises ConfigError for data of another size.
        """
        if data.dtype != torch.uint8 or data.shape != (self.slot_bytes,):
            raise ConfigError(
                f"an expert takes {self.slot_bytes} bytes here, got {data.dtype} of shape {list(data.shape)}: ranks "
                "hold experts in different formats"
            )
        views = [expert(stack, slot) for stack in (self.gate_up, self.down)]
        for view, part in zip(views, torch.split(data, [num_bytes(view) for view in views]), strict=True):
            from_bytes(view, part)

    def __call__(self, dispatched: Dispatched) -> Tensor:
        """Return the result of each dispatched row, in the shape and dtype of the rows."""
        if isinstance(dispatched, Masked):
            return self._masked(dispatched)
        if dispatched.loose:
            return self._loose(dispatched)
        y_SD = self.op(dispatched.x_SD, dispatched.counts_E, self.gate_up, self.down)
        return y_SD if dispatched.weights_S is None else y_SD.mul_(dispatched.weights_S[:, None])

    def _loose(self, rows: Contiguous) -> Tensor:
        """Run rows whose counts are on the device. Syncs the device, because no op reads the counts there."""
        counts_E = rows.counts_E.to("cpu", torch.int64)
        there = slice(0, int(counts_E.sum()))
        weights_S = None if rows.weights_S is None else rows.weights_S[there]
        y_SD = torch.empty_like(rows.x_SD)
        y_SD[there] = self(Contiguous(x_SD=rows.x_SD[there], counts_E=counts_E, weights_S=weights_S))
        return y_SD

    def _masked(self, rows: Masked) -> Tensor:
        """Run the rows that are present, gathered first. Syncs the device, because no op reads them where they lie."""
        there_EN = torch.arange(rows.x_END.shape[1], device=rows.x_END.device) < rows.counts_E[:, None]
        weights_S = None if rows.weights_EN is None else rows.weights_EN[there_EN]
        counts_E = rows.counts_E.to("cpu", torch.int64)
        y_END = torch.empty_like(rows.x_END)
        y_END[there_EN] = self(Contiguous(x_SD=rows.x_END[there_EN], counts_E=counts_E, weights_S=weights_S))
        return y_END
