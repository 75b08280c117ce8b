"""The multi-token-prediction layer (MTP, NEXTN). From the state of a position and the token after it, it predicts the
token after that.

It is layer number `num_hidden_layers` of a checkpoint (DeepSeek-V3 report, arXiv 2412.19437, section 2.2):

    x_i = eh_proj(concat(enorm(embed(token i + 1)), hnorm(state i)))      state i: after model.norm
    y_i = shared_head.norm(block(x_i))                                    one ordinary block, with a cache of its own
    logits of token i + 2 = head(y_i)

It drafts further tokens when y_i takes the place of a true state, as transformers and SGLang do. Where a checkpoint has
several such layers, the first is used for every draft."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.ops import Ops
from pdinfer.kv.view import KVView
from pdinfer.layers import Linear, RMSNorm, Rotary, WeightSource
from pdinfer.model.batch import Batch, Step
from pdinfer.model.block import Block
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.parallel.groups import Groups
from pdinfer.trace import Trace, mark
from pdinfer.values import Value


@attrs.frozen
class Tied(Value):
    """What an MTP layer shares with the main model: embedding and head, both [V, D], and the rotary angles."""

    embed_VD: Tensor
    head_VD: Tensor
    rotary: Rotary


@attrs.frozen(kw_only=True)
class MTP(Value):
    """The weights of the layer. Its cache entry at slot i depends on tokens 0 to i + 1."""

    layer: int
    tied: Tied
    token_norm: RMSNorm
    state_norm: RMSNorm
    join: Linear
    block: Block
    norm: RMSNorm
    ops: Ops

    @classmethod
    def build(
        cls,
        source: WeightSource,
        config: ModelConfig,
        ops: Ops,
        parallel: ExpertParallel,
        groups: Groups,
        tied: Tied,
        copies: Collection[str] = (),
    ) -> MTP:
        """Ask `source` for the layer, and for those of `copy_names(config)` that are in `copies`: an embedding and a
        head of its own, which it uses instead of the main model's."""
        hidden, eps, layer = config.hidden_size, config.rms_norm_eps, config.num_hidden_layers
        name = f"model.layers.{layer}"
        own = {copy: source.take(copy, config.vocab_size, hidden) for copy in copy_names(config) if copy in copies}
        embed, head = copy_names(config)
        return cls(
            layer=layer,
            tied=attrs.evolve(tied, embed_VD=own.get(embed, tied.embed_VD), head_VD=own.get(head, tied.head_VD)),
            token_norm=RMSNorm.build(source, f"{name}.enorm", hidden, eps, ops),
            state_norm=RMSNorm.build(source, f"{name}.hnorm", hidden, eps, ops),
            join=Linear.build(source, f"{name}.eh_proj", hidden, 2 * hidden, ops),
            block=Block.build(source, layer, config, ops, parallel, groups),
            norm=RMSNorm.build(source, f"{name}.shared_head.norm", hidden, eps, ops),
            ops=ops,
        )

    def __call__(self, state_TD: Tensor, batch: Batch, view: KVView, trace: Trace | None = None) -> Tensor:
        """Return y [T, D] of the batch's positions from their states, and write the layer's cache. `batch.tokens_T`
        holds the token *after* each position. `trace` is told which part runs."""
        mark(trace, "embed", num_tokens=len(batch.tokens_T))
        token_TD = self.ops.gather_rows(self.tied.embed_VD, batch.tokens_T)
        hidden_TD = self.join(torch.cat((self.token_norm(token_TD), self.state_norm(state_TD)), -1))
        step = Step(batch, view, self.tied.rotary(batch.positions_T), trace, batch.live_T)
        return self.norm(self.block(hidden_TD, step))

    def logits(self, y_TD: Tensor) -> Tensor:
        """Return logits, float32 [T, vocab]. Row i is for the token two positions after position i."""
        return self.ops.linear(y_TD, self.tied.head_VD).float()


def copy_names(config: ModelConfig) -> tuple[str, str]:
    """Return the names under which checkpoints may repeat the main model's embedding and head for the layer."""
    name = f"model.layers.{config.num_hidden_layers}"
    return f"{name}.embed_tokens.weight", f"{name}.shared_head.head.weight"
