"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig, ScoringFunc, TopkMethod
from pdinfer.kernels.ops import Ops
from pdinfer.layers import WeightSource


@attrs.frozen
class Router:
    """The router of a layer: it scores every expert in float32 and keeps the best, as `kernels.ops.Route` says."""

    weight_ED: Tensor
    bias_E: Tensor | None
    config: ModelConfig
    ops: Ops

    @classmethod
    def build(cls, source: WeightSource, name: str, config: ModelConfig, ops: Ops) -> Router:
        num_experts, bias = config.n_routed_experts, f"{name}.e_score_correction_bias"
        weight_ED = source.take(f"{name}.weight", num_experts, config.hidden_size, dtype=torch.float32)
        bias_E = None
        if config.topk_method is TopkMethod.NOAUX_TC and config.family.optional_correction_bias:
            bias_E = source.find(bias, num_experts, dtype=torch.float32)
            if bias_E is None:
                bias_E = weight_ED.new_zeros(num_experts)
        elif config.topk_method is TopkMethod.NOAUX_TC:
            bias_E = source.take(bias, num_experts, dtype=torch.float32)
        return cls(weight_ED, bias_E, config, ops)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen logical experts and their weights: ids_TK int64, weights_TK float32."""
        config = self.config
        return self.ops.route(
            self.ops.linear(x_TD.float(), self.weight_ED),
            self.bias_E,
            sigmoid=config.scoring_func is ScoringFunc.SIGMOID,
            top_k=config.num_experts_per_tok,
            num_groups=1 if config.topk_method is TopkMethod.GREEDY else config.n_group,
            top_k_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )
