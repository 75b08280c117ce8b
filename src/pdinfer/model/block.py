"""One decoder layer: attention and a feed-forward part, each behind a norm and added to the residual stream."""

from __future__ import annotations

import attrs
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.ops import Ops
from pdinfer.kv.view import KVView
from pdinfer.layers import GatedMLP, RMSNorm, WeightSource
from pdinfer.model.batch import Batch
from pdinfer.model.dsa import Indexer
from pdinfer.model.mla import MLA
from pdinfer.moe.layer import MoE
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.parallel.groups import Group, Groups
from pdinfer.trace import mark


@attrs.frozen
class Block:
    """h + attention(norm(h)), then h + mlp(norm(h)); the MLP is dense in the first layers and MoE after.

    In some families `moe_norm` norms what the MoE returns before it is added. `indexer` is None where every token is
    read, and in layers that share the choice of one before them. Ranks of `tp` have all tokens and divide the heads;
    each runs the MLP for a part of the tokens, `mlp_together` of them together where they divide its channels.
    """

    layer: int
    attention_norm: RMSNorm
    attention: MLA
    indexer: Indexer | None
    mlp_norm: RMSNorm
    mlp: GatedMLP | MoE
    tp: Group
    mlp_together: int
    moe_norm: RMSNorm | None = None

    @classmethod
    def build(
        cls,
        source: WeightSource,
        layer: int,
        config: ModelConfig,
        ops: Ops,
        parallel: ExpertParallel,
        groups: Groups,
    ) -> Block:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        attention_norm = RMSNorm.build(source, f"{name}.input_layernorm", hidden, eps, ops)
        attention = MLA.build(source, f"{name}.self_attn", config, ops, groups.tp)
        indexer = None
        if config.has_indexer(layer):
            indexer = Indexer.build(source, f"{name}.self_attn.indexer", config, ops)
        mlp_norm = RMSNorm.build(source, f"{name}.post_attention_layernorm", hidden, eps, ops)
        moe_norm = None
        mlp: GatedMLP | MoE
        if config.is_moe_layer(layer):
            mlp, together = MoE.build(source, layer, config, ops, parallel), 1
            if config.family.moe_output_norm:
                moe_norm = RMSNorm.build(source, f"{name}.post_mlp_layernorm", hidden, eps, ops)
        else:
            dense = groups.dense_tp
            mlp = GatedMLP.build(source, f"{name}.mlp", hidden, config.intermediate_size, ops, dense)
            together = dense.size
        return cls(layer, attention_norm, attention, indexer, mlp_norm, mlp, groups.tp, together, moe_norm)

    def __call__(
        self,
        hidden_TD: Tensor,
        batch: Batch,
        angles: tuple[Tensor, Tensor],
        view: KVView,
        selected_TS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden [T, D], selected positions) after this layer, whose cache in `view` is written.

        `selected_TS` is what the last indexer of this step chose, None before the first and where all is read."""
        mark(batch.trace, "attention", layer=self.layer)
        x_TD = self.attention_norm(hidden_TD)
        query_TL = self.attention.query_latent(x_TD)
        if self.indexer is not None:
            selected_TS = self.indexer(x_TD, query_TL, batch, angles, view.index_keys[self.layer])
        hidden_TD = hidden_TD + self.attention(x_TD, query_TL, batch, angles, view.latents[self.layer], selected_TS)
        part_TD = self.mlp(self.mlp_norm(self.tp.part(hidden_TD, self.mlp_together)), batch.trace)
        if self.moe_norm is not None:
            part_TD = self.moe_norm(part_TD)
        return hidden_TD + self.tp.join(part_TD, len(hidden_TD), self.mlp_together), selected_TS
