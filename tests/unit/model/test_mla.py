"""One attention layer, in both its forms, compared with the formulas of the papers in float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kv.view import KVView
from pdinfer.layers import Rotary
from pdinfer.model.batch import Batch, Row, Step
from pdinfer.model.mla import MLA
from pdinfer.testing import tiny_config
from pdinfer.testing.models import RandomWeights
from tests.rounding import difference_of_models

CPU = torch.device("cpu")
REFERENCE = resolve_ops(OpSpec(device=CPU, dtype=torch.float32), forced="reference").ops
LAYER = 3
NAME = f"model.layers.{LAYER}.self_attn"
PAGE_SIZE = 4
LATENT_EPS = 1e-6
"""The eps of the two latent norms, whatever `rms_norm_eps` is, as in DeepSeek's modelling code."""
CONFIGS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3-yarn": {},
    "v2-lite": {},
    "one-head": {"family": "v3", "num_attention_heads": 1, "num_key_value_heads": 1},
    "three-heads": {"family": "v3", "num_attention_heads": 3, "num_key_value_heads": 3},
    "odd-sizes": {"family": "v3", "kv_lora_rank": 13, "q_lora_rank": 11, "qk_nope_head_dim": 7, "v_head_dim": 9},
    "other-eps": {"family": "v3", "rms_norm_eps": 0.5},
}


def config_of(name: str) -> ModelConfig:
    return tiny_config(**{"family": name, **CONFIGS[name]})


@attrs.frozen
class Layer:
    """A layer whose weights and cache are float64, so that only formulas can make a difference."""

    mla: MLA
    weights: dict[str, Tensor]
    rotary: Rotary

    @classmethod
    def of(cls, config: ModelConfig) -> Layer:
        source = RandomWeights(dtype=torch.float64)
        mla = MLA.build(source, LAYER, config, REFERENCE)
        return cls(mla, source.tensors, Rotary.build(config, CPU))

    def new_pages(self, count: int) -> Tensor:
        width = self.mla.config.kv_lora_rank + self.mla.config.qk_rope_head_dim
        return torch.full((count, PAGE_SIZE, width), torch.nan, dtype=torch.float64)

    def run(self, x_TD: Tensor, rows: list[Row], pages: Tensor, *, decode: bool) -> Tensor:
        batch = Batch.build(rows, page_size=PAGE_SIZE, device=CPU, decode=decode)
        return self.mla(x_TD, Step(batch, KVView({LAYER: pages}, {}), self.rotary(batch.positions_T)), LAYER)

    def weight(self, part: str) -> Tensor:
        return self.weights[f"{NAME}.{part}.weight"]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + LATENT_EPS).sqrt()


def turned(x: Tensor, position: int, config: ModelConfig) -> Tensor:
    """Turn pairs (2i, 2i + 1) as complex numbers, each by its angle, which is computed in float32 as in the models."""
    angles = torch.tensor(config.inv_frequencies()).float() * float(position)
    factor = config.rope_attention_factor
    turn = torch.complex((angles.cos() * factor).double(), (angles.sin() * factor).double())
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).clone()) * turn).flatten(-2)


def attended(layer: Layer, x_TD: Tensor) -> Tensor:
    """Compute the causal attention of one sequence, head by head and query by query, with full keys and values and no
    cache."""
    config = layer.mla.config
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    kv = x_TD @ layer.weight("kv_a_proj_with_mqa").T
    c = norm(kv[:, :rank], layer.weight("kv_a_layernorm"))
    k_rope = torch.stack([turned(row, position, config) for position, row in enumerate(kv[:, rank:])])
    per_head = layer.weight("kv_b_proj").view(heads, -1, rank)
    if config.q_lora_rank is None:
        q = x_TD @ layer.weight("q_proj").T
    else:
        q = norm(x_TD @ layer.weight("q_a_proj").T, layer.weight("q_a_layernorm")) @ layer.weight("q_b_proj").T
    rows = []
    for position, q_HQ in enumerate(q.view(len(x_TD), heads, -1)):
        outputs = []
        for head, q_Q in enumerate(q_HQ):
            k = torch.cat((c @ per_head[head, :nope].T, k_rope), -1)[: position + 1]
            v = (c @ per_head[head, nope:].T)[: position + 1]
            query = torch.cat((q_Q[:nope], turned(q_Q[nope:], position, config)))
            outputs.append((config.softmax_scale * (k @ query)).softmax(0) @ v)
        rows.append(torch.cat(outputs))
    return torch.stack(rows) @ layer.weight("o_proj").T


def inputs(config: ModelConfig, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, config.hidden_size, generator=generator, dtype=torch.float64)


def assert_equal(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == torch.float64
    size = max(1.0, float(expected.abs().max()))
    atol = difference_of_models(tiny_config(), len(expected), size, torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CONFIGS)
def test_expanded_attention_is_the_formula(name: str) -> None:
    layer = Layer.of(config_of(name))
    x_TD = inputs(layer.mla.config, 11)
    got = layer.run(x_TD, [Row([0] * 11, 0, [2, 0, 3])], layer.new_pages(4), decode=False)
    assert_equal(got, attended(layer, x_TD))


@pytest.mark.parametrize("name", CONFIGS)
def test_absorbed_attention_is_the_formula(name: str) -> None:
    layer = Layer.of(config_of(name))
    x_TD = inputs(layer.mla.config, 11)
    pages = layer.new_pages(4)
    got = [layer.run(x_TD[at : at + 1], [Row([0], at, [2, 0, 3])], pages, decode=True) for at in range(11)]
    assert_equal(torch.cat(got), attended(layer, x_TD))


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    """Run a whole prompt, a later chunk and a single token; then one more token of each, absorbed."""
    layer = Layer.of(config_of("v3"))
    lengths, owned = (6, 9, 5), ([4, 1], [0, 7, 5], [2, 6])
    sequences = [inputs(layer.mla.config, length + 1, seed) for seed, length in enumerate(lengths)]
    expected = [attended(layer, x_TD) for x_TD in sequences]
    pages = layer.new_pages(8)
    starts = (0, 4, 4)
    layer.run(
        torch.cat([x_TD[:start] for x_TD, start in zip(sequences, starts, strict=True)]),
        [Row([0] * start, 0, mine) for start, mine in zip(starts, owned, strict=True) if start],
        pages,
        decode=False,
    )
    parts = [x_TD[start:length] for x_TD, start, length in zip(sequences, starts, lengths, strict=True)]
    rows = [Row([0] * len(part), start, mine) for part, start, mine in zip(parts, starts, owned, strict=True)]
    got = layer.run(torch.cat(parts), rows, pages, decode=False).split([len(part) for part in parts])
    for mine, whole, start, length in zip(got, expected, starts, lengths, strict=True):
        assert_equal(mine, whole[start:length])
    rows = [Row([0], length, mine) for length, mine in zip(lengths, owned, strict=True)]
    got = layer.run(torch.stack([x_TD[-1] for x_TD in sequences]), rows, pages, decode=True).split(1)
    for mine, whole in zip(got, expected, strict=True):
        assert_equal(mine, whole[-1:])


def test_the_cache_holds_the_normed_latent_and_then_the_turned_key() -> None:
    layer = Layer.of(config_of("v3-yarn"))
    config = layer.mla.config
    x_TD = inputs(config, 6)
    pages = layer.new_pages(3)
    layer.run(x_TD, [Row([0] * 6, 0, [2, 1])], pages, decode=False)
    kv = x_TD @ layer.weight("kv_a_proj_with_mqa").T
    c = norm(kv[:, : config.kv_lora_rank], layer.weight("kv_a_layernorm"))
    keys = torch.stack([turned(row, at, config) for at, row in enumerate(kv[:, config.kv_lora_rank :])])
    held = pages[[2, 1]].flatten(0, 1)
    assert_equal(held[:6], torch.cat((c, keys), -1))
    assert held[6:].isnan().all()
    assert pages[0].isnan().all()


def test_the_norm_of_latents_may_have_a_bias() -> None:
    layer = Layer.of(config_of("v3"))
    config, bias_C = layer.mla.config, inputs(layer.mla.config, 1)[0, : layer.mla.config.kv_lora_rank]
    biased = attrs.evolve(layer.mla, kv_a_norm=attrs.evolve(layer.mla.kv_a_norm, bias_D=bias_C))
    held = []
    for mla in (layer.mla, biased):
        pages = layer.new_pages(2)
        attrs.evolve(layer, mla=mla).run(inputs(config, 6), [Row([0] * 6, 0, [0, 1])], pages, decode=False)
        held.append(pages.flatten(0, 1)[:6])
    held[0][:, : config.kv_lora_rank] += bias_C
    assert torch.equal(*held)
