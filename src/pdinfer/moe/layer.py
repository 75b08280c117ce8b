"""The mixture-of-experts layer: route, dispatch, run, combine."""

from __future__ import annotations

import attrs
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.ops import Ops
from pdinfer.layers import GatedMLP, WeightSource
from pdinfer.moe.dispatch import TokenDispatcher
from pdinfer.moe.experts import Experts
from pdinfer.moe.router import Router
from pdinfer.trace import Trace, part


@attrs.frozen
class MoE:
    """sum_k w_k * Expert_k(x) + Shared(x). The shared experts are one MLP, n_shared_experts times as wide."""

    router: Router
    experts: Experts
    shared: GatedMLP | None
    dispatcher: TokenDispatcher

    @classmethod
    def build(cls, source: WeightSource, name: str, config: ModelConfig, ops: Ops, dispatcher: TokenDispatcher) -> MoE:
        shared = None
        if config.n_shared_experts:
            size = config.moe_intermediate_size * config.n_shared_experts
            shared = GatedMLP.build(source, f"{name}.shared_experts", config.hidden_size, size, ops)
        return cls(
            Router.build(source, f"{name}.gate", config, ops),
            Experts.build(source, f"{name}.experts", config, ops),
            shared,
            dispatcher,
        )

    def __call__(self, x_TD: Tensor, trace: Trace | None = None) -> Tensor:
        part(trace, "router")
        ids_TK, weights_TK = self.router(x_TD)
        part(trace, "experts")
        dispatched = self.dispatcher.dispatch(x_TD, ids_TK, weights_TK)
        y_TD = self.dispatcher.combine(self.experts(dispatched), dispatched)
        return (y_TD if self.shared is None else y_TD + self.shared(x_TD)).to(x_TD.dtype)
