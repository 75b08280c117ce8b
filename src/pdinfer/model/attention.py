"""The seam between a layer and its attention. To add an attention, write a class and give it a row in `ATTENTIONS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, Self

from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.config.families import AttentionKind
from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.formats.format import Weight
from pdinfer.kernels.ops import Ops
from pdinfer.kv.layout import KVComponent
from pdinfer.layers import WeightSource
from pdinfer.model.batch import Step
from pdinfer.model.mla import MLA
from pdinfer.parallel.groups import Group


class Attention(Protocol):
    """The attention of one layer: its weights, and what its tokens leave in the cache."""

    @classmethod
    def build(cls, source: WeightSource, layer: int, config: ModelConfig, ops: Ops, tp: Group) -> Self:
        """Ask `source` for the tensors of `layer`. The heads are divided over `tp`."""

    @property
    def readers(self) -> Sequence[Weight]:
        """The weights that multiply the layer's input."""

    def __call__(self, x_TD: Tensor | Rounded, step: Step, layer: int) -> Tensor:
        """Write the cache of the step's tokens to the pages of `layer` in `step.view`, and attend. Returns [T, D],
        the output of all heads, whole on each rank of `tp`. `x_TD` is the layer's input after its norm."""

    @classmethod
    def cache_components(
        cls,
        config: ModelConfig,
        kv_format: str,
        layers: Sequence[int],
        *,
        prefix: str = "",
        rope_apart: bool = False,
        index_format: str = "auto",
    ) -> tuple[KVComponent, ...]:
        """Return what a token leaves in the cache of `layers`.

        `kv_format` is a dtype's name or "fp8"; `prefix` goes before the components' names; `rope_apart` and
        `index_format` are those of `CacheConfig`. Raises ConfigError for sizes that "fp8" cannot pack."""


ATTENTIONS: Mapping[AttentionKind, type[Attention]] = MappingProxyType({AttentionKind.MLA: MLA})


def attention_of(config: ModelConfig) -> type[Attention]:
    """Return the class that computes the attention of a model."""
    return ATTENTIONS[config.family.attention]
