"""One decoder layer: attention and a feed-forward part, each behind a norm and added to the residual stream."""

from __future__ import annotations

import attrs
from torch import Tensor

from pdinfer.batch import Batch
from pdinfer.config import ModelConfig
from pdinfer.kernels.ops import Ops
from pdinfer.layers import GatedMLP, RMSNorm, WeightSource
from pdinfer.mla import MLA
from pdinfer.moe.dispatch import TokenDispatcher
from pdinfer.moe.layer import MoE


@attrs.frozen
class Block:
    """h + attention(norm(h)), then h + mlp(norm(h)); the MLP is dense in the first layers and MoE after."""

    attention_norm: RMSNorm
    attention: MLA
    mlp_norm: RMSNorm
    mlp: GatedMLP | MoE

    @classmethod
    def build(
        cls, source: WeightSource, layer: int, config: ModelConfig, ops: Ops, dispatcher: TokenDispatcher
    ) -> Block:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        attention_norm = RMSNorm.build(source, f"{name}.input_layernorm", hidden, eps, ops)
        attention = MLA.build(source, f"{name}.self_attn", config, ops)
        mlp_norm = RMSNorm.build(source, f"{name}.post_attention_layernorm", hidden, eps, ops)
        mlp: GatedMLP | MoE
        if config.is_moe_layer(layer):
            mlp = MoE.build(source, f"{name}.mlp", config, ops, dispatcher)
        else:
            mlp = GatedMLP.build(source, f"{name}.mlp", hidden, config.intermediate_size, ops)
        return cls(attention_norm, attention, mlp_norm, mlp)

    def __call__(self, hidden_TD: Tensor, batch: Batch, angles: tuple[Tensor, Tensor], pages_PGW: Tensor) -> Tensor:
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), batch, angles, pages_PGW)
        return hidden_TD + self.mlp(self.mlp_norm(hidden_TD))
