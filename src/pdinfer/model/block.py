"""One decoder layer: attention and a feed-forward part, each behind a norm and added to the residual stream. And two
halves of a step that take turns in layers, so that one computes while rows of the other travel to experts and back:

    first    attention, dispatch │                     │ experts, send back │                    │ end, next attention
    second                       │ attention, dispatch │                    │ experts, send back │

DeepSeek-V3's prefill overlaps two batches so (report, arXiv 2412.19437, section 3.4). Layers without experts belong to
the phase that they are in."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.ops import Ops
from pdinfer.layers import GatedMLP, InputNorm, RMSNorm, WeightSource
from pdinfer.model.attention import Attention, attention_of
from pdinfer.model.batch import Step
from pdinfer.moe.layer import MoE
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.parallel.groups import Group, Groups
from pdinfer.trace import mark
from pdinfer.values import Value


@attrs.frozen
class Block(Value):
    """h + attention(norm(h)), then h + mlp(norm(h)). The MLP is dense in the first layers and MoE after them.

    In some families `moe_norm` norms the output of the MoE before it is added. Here `tp` is one rank; `DividedBlock` is
    for several."""

    layer: int
    attention_norm: InputNorm
    attention: Attention
    mlp_norm: InputNorm
    mlp: GatedMLP | MoE
    tp: Group
    mlp_together: int
    moe_norm: RMSNorm | None = None

    @classmethod
    def build(
        cls, source: WeightSource, layer: int, config: ModelConfig, ops: Ops, parallel: ExpertParallel, groups: Groups
    ) -> Block:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        attention_norm = RMSNorm.build(source, f"{name}.input_layernorm", hidden, eps, ops)
        attention = attention_of(config).build(source, layer, config, ops, groups.tp)
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
        return (cls if groups.tp.size == 1 else DividedBlock)(
            layer,
            InputNorm.of(attention_norm, attention.readers),
            attention,
            InputNorm.of(mlp_norm, mlp.readers),
            mlp,
            groups.tp,
            together,
            moe_norm,
        )

    def __call__(self, hidden_TD: Tensor, step: Step) -> Tensor:
        """Return the hidden state [T, D] after this layer, and write the layer's cache in `step.view`."""
        x_TD, part_TD, live_T = self._attend(hidden_TD, step)
        if isinstance(self.mlp, MoE):
            out_TD = self.mlp(x_TD, step.trace, live_T, part_TD if self.moe_norm is None else None)
        else:
            out_TD = self.mlp(x_TD, step.trace)
        return self._join(out_TD, part_TD, hidden_TD.shape[0])

    def phases(self, hidden_TD: Tensor, step: Step) -> Generator[None, None, Tensor]:
        """Do as a call, and yield where rows of the MoE have begun to travel. A dense layer does not yield."""
        x_TD, part_TD, live_T = self._attend(hidden_TD, step)
        if isinstance(self.mlp, MoE):
            residual_TD = part_TD if self.moe_norm is None else None
            out_TD = yield from self.mlp.phases(x_TD, step.trace, live_T, residual_TD)
        else:
            out_TD = self.mlp(x_TD, step.trace)
        return self._join(out_TD, part_TD, hidden_TD.shape[0])

    def _attend(self, hidden_TD: Tensor, step: Step) -> tuple[Tensor | Rounded, Tensor, Tensor | None]:
        """Run attention. Return the input of the MLP, the residual stream and which tokens are alive, for this rank's
        part of the tokens."""
        mark(step.trace, "attention", layer=self.layer)
        x_TD, _ = self.attention_norm(hidden_TD)
        return self._divide(self.attention(x_TD, step, self.layer), hidden_TD, step.live_T)

    def _divide(
        self, attended_TD: Tensor, hidden_TD: Tensor, live_T: Tensor | None
    ) -> tuple[Tensor | Rounded, Tensor, Tensor | None]:
        """Add attention to the residual stream, and return what `_attend` does of all tokens: there is one rank."""
        x_TD, sum_TD = self.mlp_norm(attended_TD, hidden_TD)
        return x_TD, sum_TD, live_T

    def _join(self, out_TD: Tensor, part_TD: Tensor, num_tokens: int) -> Tensor:
        """Add what the MLP returned to the residual stream, unless the MoE did. Return the rows of all `num_tokens`."""
        if self.moe_norm is not None:
            return part_TD + self.moe_norm(out_TD)
        return out_TD if isinstance(self.mlp, MoE) else part_TD + out_TD


@attrs.frozen
class DividedBlock(Block):
    """The layer on one of several ranks. All ranks of `tp` have all tokens, and divide the heads. For the MLP they
    divide the tokens: `mlp_together` ranks share a part of the tokens and divide its channels."""

    def _divide(
        self, attended_TD: Tensor, hidden_TD: Tensor, live_T: Tensor | None
    ) -> tuple[Tensor | Rounded, Tensor, Tensor | None]:
        tp, together = self.tp, self.mlp_together
        live_T = None if live_T is None else tp.part(live_T, together)
        return super()._divide(tp.part(attended_TD, together), tp.part(hidden_TD, together), live_T)

    def _join(self, out_TD: Tensor, part_TD: Tensor, num_tokens: int) -> Tensor:
        return self.tp.join(super()._join(out_TD, part_TD, num_tokens), num_tokens, self.mlp_together)


def stream_halves(blocks: Sequence[Block], halves: Sequence[tuple[Tensor, Step]]) -> Iterator[tuple[int, Tensor]]:
    """Run the blocks on halves (hidden state, step) of a batch, and yield (layer, hidden [T, D]) once both have written
    that layer's cache. The second half may read what the first one wrote, never the other way round."""
    runs = [_states(blocks, hidden_TD, step) for hidden_TD, step in halves]
    ended: list[deque[Tensor]] = [deque() for _ in halves]
    layer = 0
    while layer < len(blocks):
        for run, mine in zip(runs, ended, strict=True):
            for state_TD in run:
                if state_TD is None:
                    break
                mine.append(state_TD)
                if all(ended):
                    yield layer, torch.cat([each.popleft() for each in ended])
                    layer += 1


def _states(blocks: Sequence[Block], hidden_TD: Tensor, step: Step) -> Iterator[Tensor | None]:
    """Yield the hidden state after every block, and None where rows have begun to travel."""
    for block in blocks:
        phases = block.phases(hidden_TD, step)
        while True:
            try:
                next(phases)
            except StopIteration as end:
                hidden_TD = end.value
                break
            yield None
        yield hidden_TD
