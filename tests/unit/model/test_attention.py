"""The seam between a layer and its attention."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.config.families import AttentionKind
from pdinfer.kv.view import KVView
from pdinfer.model.attention import ATTENTIONS, attention_of
from pdinfer.model.batch import Batch, Row, Step
from pdinfer.model.mla import MLA
from pdinfer.testing import FAMILIES, random_model, tiny_config


@attrs.define
class Echo:
    """An attention without weights and cache, which returns what it is given."""

    seen: list[int] = attrs.field(factory=list)

    def __call__(self, x_TD: Tensor, step: Step, layer: int) -> Tensor:
        self.seen.append(layer)
        assert step.trace is None
        return x_TD


def test_every_kind_of_attention_has_its_class() -> None:
    assert set(ATTENTIONS) == set(AttentionKind)
    assert all(attention_of(tiny_config(family)) is MLA for family in FAMILIES)


def test_a_model_runs_with_any_attention() -> None:
    """Run it over an empty view: nothing else in a model touches the cache."""
    model, attention = random_model(tiny_config(first_k_dense_replace=3)), Echo()
    blocks = tuple(attrs.evolve(block, attention=attention) for block in model.blocks)
    batch = Batch.build([Row([3, 1, 4], 0, [0])], page_size=4, device=model.device, decode=False)
    expected_TD = model.embed_VD[batch.tokens_T]
    for block in blocks:
        expected_TD = expected_TD + block.attention_norm(expected_TD)[0]
        expected_TD = expected_TD + block.mlp(block.mlp_norm(expected_TD)[0])
    assert torch.equal(attrs.evolve(model, blocks=blocks).forward(batch, KVView({}, {})), expected_TD)
    assert attention.seen == [0, 1, 2]
