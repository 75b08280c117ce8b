"""The routed experts of this rank, stacked."""

from __future__ import annotations

import attrs
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.ops import Ops
from pdinfer.layers import WeightSource
from pdinfer.moe.dispatch import Dispatched


@attrs.frozen
class Experts:
    """Gated MLPs in two stacks: gate_up [E, 2I, D] (gate rows first) and down [E, D, I]."""

    gate_up_EJD: Tensor
    down_EDI: Tensor
    ops: Ops

    @classmethod
    def build(cls, source: WeightSource, name: str, config: ModelConfig, ops: Ops) -> Experts:
        num_experts, hidden, size = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        gate_up_EJD = source.new(num_experts, 2 * size, hidden)
        down_EDI = source.new(num_experts, hidden, size)
        for expert in range(num_experts):
            source.into(f"{name}.{expert}.gate_proj.weight", gate_up_EJD[expert, :size])
            source.into(f"{name}.{expert}.up_proj.weight", gate_up_EJD[expert, size:])
            source.into(f"{name}.{expert}.down_proj.weight", down_EDI[expert])
        return cls(gate_up_EJD, down_EDI, ops)

    def __call__(self, dispatched: Dispatched) -> Tensor:
        """[S, D] -> [S, D], rows sorted by expert."""
        return self.ops.grouped_mlp(dispatched.x_SD, dispatched.counts_E, self.gate_up_EJD, self.down_EDI)
