"""The mixture-of-experts layer: route, dispatch, run, combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.ops import Ops
from pdinfer.layers import GatedMLP, WeightSource
from pdinfer.moe.dispatchers import TokenDispatcher
from pdinfer.moe.experts import Experts
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.moe.placement import LayerReplicas
from pdinfer.moe.router import Router
from pdinfer.trace import Trace, mark


@attrs.frozen
class MoE:
    """The layer sum_k w_k * Expert_k(x) + Shared(x), its shared experts in one MLP, n_shared_experts times as wide.

    `record` receives the logical experts that the router chose. `replicas` maps them to physical experts; it is None
    where the two are the same.
    """

    router: Router
    experts: Experts
    shared: GatedMLP | None
    dispatcher: TokenDispatcher
    record: Callable[[Tensor], None] | None = None
    replicas: LayerReplicas | None = None
    two_batch_overlap: bool = False

    @classmethod
    def build(cls, source: WeightSource, layer: int, config: ModelConfig, ops: Ops, parallel: ExpertParallel) -> MoE:
        name = f"model.layers.{layer}.mlp"
        shared = None
        if config.n_shared_experts:
            size = config.moe_intermediate_size * config.n_shared_experts
            shared = GatedMLP.build(source, f"{name}.shared_experts", config.hidden_size, size, ops)
        return cls(
            Router.build(source, f"{name}.gate", config, ops),
            Experts.build(source, f"{name}.experts", config, ops, parallel.experts_of(layer)),
            shared,
            parallel.dispatcher,
            parallel.record_of(layer),
            parallel.replicas_of(layer),
            parallel.two_batch_overlap,
        )

    def __call__(self, x_TD: Tensor, trace: Trace | None = None) -> Tensor:
        if self.two_batch_overlap:
            return self._in_two_batches(x_TD, trace)
        return self._combine(x_TD, *self._run(x_TD, self._dispatch(x_TD, trace)))

    def _in_two_batches(self, x_TD: Tensor, trace: Trace | None) -> Tensor:
        """Compute one half of the rows while the other half travels."""
        halves = x_TD.tensor_split(2)
        dispatched = [self._dispatch(half_TD, trace) for half_TD in halves]
        returning = [self._run(half_TD, pending) for half_TD, pending in zip(halves, dispatched, strict=True)]
        return torch.cat([self._combine(half_TD, *both) for half_TD, both in zip(halves, returning, strict=True)])

    def _dispatch(self, x_TD: Tensor, trace: Trace | None) -> Any:
        mark(trace, "router")
        ids_TK, weights_TK = self.router(x_TD)
        if self.record is not None:
            self.record(ids_TK)
        if self.replicas is not None:
            ids_TK = self.replicas(ids_TK)
        mark(trace, "experts")
        return self.dispatcher.dispatch_begin(x_TD, ids_TK, weights_TK)

    def _run(self, x_TD: Tensor, pending: Any) -> tuple[Any, Tensor | None]:
        dispatched = self.dispatcher.dispatch_end(pending)
        returning = self.dispatcher.combine_begin(self.experts(dispatched), dispatched)
        return returning, None if self.shared is None else self.shared(x_TD)  # while results travel

    def _combine(self, x_TD: Tensor, returning: Any, shared_TD: Tensor | None) -> Tensor:
        y_TD = self.dispatcher.combine_end(returning)
        return (y_TD if shared_TD is None else y_TD + shared_TD).to(x_TD.dtype)
