"""The indexer compared with the formulas of the papers in float64, and how its choice reaches attention."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kv.view import KVView
from pdinfer.layers import Rotary
from pdinfer.model.batch import Batch, Row, Step
from pdinfer.model.dsa import Indexer
from pdinfer.model.mla import MLA
from pdinfer.model.model import Model
from pdinfer.testing import random_model, tiny_config
from pdinfer.testing.models import RandomWeights
from tests.rounding import difference_of_models, gamma

CPU = torch.device("cpu")
REFERENCE = resolve_ops(OpSpec(device=CPU, dtype=torch.float32), forced="reference").ops
NAME = "model.layers.0.self_attn.indexer"
PAGE_SIZE = 4
COUNT = 23
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "v32": {},
    "glm": {},
    "yarn": {"family": "v32", "rope_scaling": YARN},
    "turned-whole": {"family": "v32", "index_head_dim": 8},
    "one-head": {"family": "glm", "index_n_heads": 1, "index_topk": 3},
    "one-token": {"family": "v32", "index_topk": 1},
}


def config_of(name: str) -> ModelConfig:
    return tiny_config(**{"family": name, **CONFIGS[name]})


@attrs.frozen
class Case:
    """An indexer whose projections and cache are float64, and the inputs of one sequence."""

    config: ModelConfig
    indexer: Indexer
    weights: dict[str, Tensor]
    x_TD: Tensor
    query_TL: Tensor

    @classmethod
    def of(cls, name: str) -> Case:
        config = config_of(name)
        source = RandomWeights(dtype=torch.float64)
        indexer = Indexer.build(source, NAME, config, REFERENCE)
        generator = torch.Generator().manual_seed(0)
        inputs = (
            torch.randn(COUNT, width, generator=generator, dtype=torch.float64)
            for width in (config.hidden_size, config.q_lora_rank or 0)
        )
        return cls(config, indexer, source.tensors, *inputs)

    def run(self, pages: Tensor, chunks: list[int]) -> list[Tensor | None]:
        """Return what the indexer chooses for each chunk of the sequence."""
        rotary, start, chosen = Rotary.build(self.config, CPU), 0, []
        for chunk in chunks:
            row = Row([0] * chunk, start, [5, 0, 3, 6, 1, 2])
            batch = Batch.build([row], page_size=PAGE_SIZE, device=CPU, decode=False)
            part = slice(start, start + chunk)
            chosen.append(self.indexer(self.x_TD[part], self.query_TL[part], batch, rotary(batch.positions_T), pages))
            start += chunk
        return chosen

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{NAME}.{name}"].double()

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Return x with its first elements turned as complex numbers and the rest unchanged."""
        rope = self.config.qk_rope_head_dim
        angles = torch.tensor(self.config.inv_frequencies()).float() * float(position)
        turn = torch.complex(angles.cos().double(), angles.sin().double())
        pairs = x[:rope].view(-1, 2) if self.config.indexer_rope_interleave else x[:rope].view(2, -1).T
        out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        ordered = out if self.config.indexer_rope_interleave else out.T
        return torch.cat((ordered.flatten(), x[rope:]))

    def keys(self) -> Tensor:
        rows = []
        for position, x in enumerate(self.x_TD @ self.weight("wk.weight").T):
            spread = x - x.mean()
            normed = spread / (spread.square().mean() + 1e-6).sqrt()
            rows.append(self.turned(normed * self.weight("k_norm.weight") + self.weight("k_norm.bias"), position))
        return torch.stack(rows)

    def scores(self) -> Tensor:
        """Return the scores [query, key], computed key by key and head by head. The future is -inf."""
        config, keys = self.config, self.keys()
        heads = config.index_n_heads or 0
        width = config.index_head_dim or 0
        gates = self.x_TD @ self.weight("weights_proj.weight").T * heads**-0.5
        scores = torch.full((COUNT, COUNT), -torch.inf, dtype=torch.float64)
        for i, q in enumerate(self.query_TL @ self.weight("wq_b.weight").T):
            turned = torch.stack([self.turned(head, i) for head in q.view(heads, width)])
            for j in range(i + 1):
                scores[i, j] = (gates[i] * (turned @ keys[j] * width**-0.5).clamp_min(0)).sum()
        return scores


def new_pages(case: Case) -> Tensor:
    return torch.full((7, PAGE_SIZE, case.config.index_head_dim or 0), torch.nan, dtype=torch.float64)


def assert_turned(keys_TY: Tensor, exact_TY: Tensor) -> None:
    """Assert that keys are float64 but for the cosines and sines of float32, each of which is off by two roundings and
    by that of its angle."""
    off = (exact_TY.norm(dim=-1, keepdim=True) * gamma(3)).expand_as(exact_TY)
    assert ((keys_TY - exact_TY).abs() <= off).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_holds_keys_by_the_formula(name: str) -> None:
    case = Case.of(name)
    pages = new_pages(case)
    case.run(pages, [COUNT])
    held = pages[[5, 0, 3, 6, 1, 2]].flatten(0, 1)
    assert_turned(held[:COUNT], case.keys())
    assert held[COUNT:].isnan().all()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunks", [[COUNT], [12, 10, 1]], ids=str)
def test_the_best_by_the_formula_are_chosen(name: str, chunks: list[int]) -> None:
    case = Case.of(name)
    top_k = case.config.index_topk or 0
    scores = case.scores().tolist()
    chosen = case.run(new_pages(case), chunks)
    rows = [row for part in chosen if part is not None for row in part.tolist()]
    assert len(rows) == COUNT
    for own, row in enumerate(rows):
        best = sorted(range(own + 1), key=lambda at, own=own: (-scores[own][at], at))[:top_k]
        assert row == sorted(best) + [-1] * (top_k - len(best))


@pytest.mark.parametrize("chunks", [[11], [4, 7], [11, 1]], ids=str)
def test_a_context_that_is_read_whole_needs_no_choice(chunks: list[int]) -> None:
    case = Case.of("v32")
    pages = new_pages(case)
    chosen = case.run(pages, chunks)
    held = pages[[5, 0, 3, 6, 1, 2]].flatten(0, 1)
    assert_turned(held[: sum(chunks)], case.keys()[: sum(chunks)])
    assert [part is None for part in chosen] == [sum(chunks[: at + 1]) <= 11 for at in range(len(chunks))]


def test_a_model_without_sparse_attention_has_no_indexer() -> None:
    with pytest.raises(ConfigError, match="a deepseek_v3 has no indexer"):
        Indexer.build(RandomWeights(), NAME, tiny_config(), resolve_ops(OpSpec(device=CPU, dtype=torch.float32)).ops)
    attentions = [block.attention for block in random_model().blocks]
    assert all(isinstance(attention, MLA) and attention.indexer is None for attention in attentions)


def run_model(model: Model, tokens: list[int]) -> tuple[list[Tensor | None], KVView]:
    """Return what each block hands on, and the view."""
    layout = model.kv_layout(CacheConfig(page_size=PAGE_SIZE))
    view = KVView.of(model.allocate_pages(layout, layout.num_pages(len(tokens))))
    row = Row(tokens, 0, range(layout.num_pages(len(tokens))))
    batch = Batch.build([row], page_size=PAGE_SIZE, device=CPU, decode=False)
    hidden_TD, step, seen = model.embed_VD[batch.tokens_T], Step(batch, view, model.rotary(batch.positions_T)), []
    for block in model.blocks:
        hidden_TD = block(hidden_TD, step)
        seen.append(step.selected_TS)
    return seen, view


def test_a_shared_layer_takes_the_choice_before_it() -> None:
    model = random_model(
        tiny_config("glm", num_hidden_layers=5, indexer_types=["full", "shared", "shared", "full", "shared"])
    )
    chosen, view = run_model(model, list(range(40)))
    assert chosen[0] is chosen[1] is chosen[2]
    assert chosen[3] is chosen[4]
    assert chosen[0] is not None
    assert chosen[3] is not None
    assert not torch.equal(chosen[0], chosen[3])
    assert sorted(view.index_keys) == [0, 3]
    assert sorted(view.latents) == [0, 1, 2, 3, 4]


def rounding_of(family: str, logits_TV: Tensor) -> float:
    """Return how much the order of sums may change."""
    return difference_of_models(tiny_config(family), len(logits_TV), float(logits_TV.abs().max()))


@pytest.mark.parametrize("family", ["v32", "glm"])
def test_a_choice_changes_what_comes_out(family: str) -> None:
    """A test that compares logits beyond index_topk tokens therefore sees a lost choice."""
    tokens = [(7 * at) % 97 for at in range(40)]
    sparse, dense = (random_model(tiny_config(family, index_topk=top_k)).logits(tokens) for top_k in (11, 512))
    difference, rounding = (sparse - dense).abs().amax(-1), rounding_of(family, sparse)
    assert difference[:11].max() <= rounding
    assert difference[20:].min() > 10 * rounding


@pytest.mark.parametrize("family", ["v32", "glm"])
def test_several_tokens_of_a_sequence_in_one_step_of_decode(family: str) -> None:
    """Drafts are checked in this way: each chooses among the tokens up to itself."""
    model = random_model(tiny_config(family))
    tokens = [(7 * at) % 97 for at in range(34)]
    layout = model.kv_layout(CacheConfig(page_size=PAGE_SIZE))
    view = KVView.of(model.allocate_pages(layout, layout.num_pages(len(tokens))))
    pages = range(layout.num_pages(len(tokens)))
    for part, decode in ((slice(0, 29), False), (slice(29, 34), True)):
        row = Row(tokens[part], part.start, pages)
        batch = Batch.build([row], page_size=PAGE_SIZE, device=CPU, decode=decode)
        hidden_TD = model.forward(batch, view)
    logits, whole = model.head(model.norm(hidden_TD)), model.logits(tokens)
    torch.testing.assert_close(logits, whole[29:], rtol=0, atol=rounding_of(family, whole))
