"""The routed experts of this rank, stacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.weight_formats import Weight
from pdinfer.layers import WeightSource
from pdinfer.moe.dispatch import Dispatched


@attrs.frozen
class Experts:
    """Gated MLPs in two stacks: gate_up [E, 2I, D] (gate rows first) and down [E, D, I], in one format."""

    gate_up: Weight
    down: Weight
    op: Callable[[Tensor, Tensor, Any, Any], Tensor]

    @classmethod
    def build(cls, source: WeightSource, name: str, config: ModelConfig, ops: Ops) -> Experts:
        hidden, size = config.hidden_size, config.moe_intermediate_size
        of_expert = [f"{name}.{expert}" for expert in range(config.n_routed_experts)]
        into = [(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight") for expert in of_expert]
        gate_up = source.stack(into, size, hidden)
        down = source.stack([(f"{expert}.down_proj.weight",) for expert in of_expert], hidden, size)
        if type(gate_up) is not type(down):
            raise CheckpointError(
                f"{name}: gate_proj and up_proj are stored in one format and down_proj in another; experts need "
                'one for all three: load with weights="float"'
            )
        return cls(gate_up, down, ops.grouped_mlp_by(gate_up))

    def __call__(self, dispatched: Dispatched) -> Tensor:
        """[S, D] -> [S, D], rows sorted by expert."""
        return self.op(dispatched.x_SD, dispatched.counts_E, self.gate_up, self.down)
