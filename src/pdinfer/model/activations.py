"""What a model computes on the way to its logits: hidden states layer by layer, and which experts its routers chose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from pdinfer.checks import clip, is_int
from pdinfer.errors import ConfigError
from pdinfer.model.batch import Batch, Row
from pdinfer.model.block import Block
from pdinfer.moe.layer import MoE, Router
from pdinfer.values import Value


@attrs.frozen(eq=False)
class Chosen(Value):
    """What the router of a layer chose for T tokens: `experts_TK`, int64, logical, and their `weights_TK`, float32."""

    experts_TK: Tensor
    weights_TK: Tensor


@attrs.frozen(eq=False)
class Activations(Value):
    """The hidden states `hidden_LTD` after each of `layers`, in their order and in the model's dtype: the residual
    stream, which after the last layer has not passed the final norm. `routing` has those of the layers that are MoE,
    if it was asked for. All tensors are on the host."""

    layers: tuple[int, ...]
    hidden_LTD: Tensor
    routing: Mapping[int, Chosen] = attrs.field(factory=dict)

    def __getitem__(self, layer: int) -> Tensor:
        """Return the hidden states [T, D] after a layer. Raises KeyError for one that is not there."""
        if layer not in self.layers:
            raise KeyError(f"layer {layer} is not among {self.layers}")
        return self.hidden_LTD[self.layers.index(layer)]


@attrs.frozen
class _NotingRouter(Router):
    """A router that keeps what it chose since the last `take`."""

    seen: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)

    @classmethod
    def of(cls, router: Router) -> _NotingRouter:
        return cls(router.weight_ED, router.bias_E, router.rule, router.ops)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(super().__call__(x_TD))
        return self.seen[-1]

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the choices for all rows of a layer, which may have come in two batches."""
        ids, weights = zip(*self.seen, strict=True)
        self.seen.clear()
        return torch.cat(ids), torch.cat(weights)


class Observer:
    """Keeps what is asked for while `blocks` run, which are those of a model up to the last of `layers`. `like_TD` has
    the shape and dtype of the hidden states of all tokens."""

    def __init__(
        self, blocks: Sequence[Block], layers: Iterable[int] | None, like_TD: Tensor, *, routing: bool
    ) -> None:
        """Raise ConfigError for layers that there are not."""
        self.layers = _checked(layers, len(blocks))
        self._routers: dict[int, _NotingRouter] = {}
        self._hidden_LTD = torch.empty(
            len(self.layers), *like_TD.shape, dtype=like_TD.dtype, device=torch.device("cpu")
        )
        self._chosen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.blocks = tuple(self._observed(block, routing) for block in blocks[: max(self.layers) + 1])

    def _observed(self, block: Block, routing: bool) -> Block:
        if not routing or block.layer not in self.layers or not isinstance(block.mlp, MoE):
            return block
        router = self._routers[block.layer] = _NotingRouter.of(block.mlp.router)
        self._chosen[block.layer] = []
        return attrs.evolve(block, mlp=attrs.evolve(block.mlp, router=router))

    def note(self, layer: int, layer_TD: Tensor, batch: Batch, row: Row) -> None:
        """Keep what a layer returned for the tokens of a row, of all ranks."""
        if layer in self.layers:
            self._hidden_LTD[self.layers.index(layer), row.start : row.stop] = batch.in_order(layer_TD)
        if layer in self._routers:
            tp = self.blocks[layer].tp
            ids_TK, weights_TK = (tp.join(part, len(layer_TD)) for part in self._routers[layer].take())
            self._chosen[layer].append((batch.in_order(ids_TK).cpu(), batch.in_order(weights_TK).cpu()))

    def result(self) -> Activations:
        """Return what was kept."""
        chosen = {
            layer: Chosen(*(torch.cat(part) for part in zip(*each, strict=True)))
            for layer, each in self._chosen.items()
        }
        return Activations(self.layers, self._hidden_LTD, chosen)


def _checked(layers: Iterable[int] | None, num_layers: int) -> tuple[int, ...]:
    wanted = tuple(range(num_layers)) if layers is None else tuple(layers)
    for layer in wanted:
        if not is_int(layer) or not 0 <= layer < num_layers:
            raise ConfigError(f"layers must be among 0 to {num_layers - 1}, got {clip(layer)}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError(f"layers must be different and at least one, got {clip(wanted)}")
    return wanted
