"""A slice of DeepSeek-V3 at full width, whose weights are drawn where they lie: nothing is read or carried."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch
from case import draw, draw_blocks, generator
from torch import Tensor

import pdinfer as pd
from pdinfer.config import ModelConfig
from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import OpSpec, resolve, resolve_ops
from pdinfer.kernels.formats.cache_rows import latent_rows
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import WHOLE, Format, Shard, Weight
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.weights import expert
from pdinfer.kernels.torch.products import sum_in_float32
from pdinfer.model.model import Model, op_spec_of
from pdinfer.parallel.topology import Topology
from pdinfer.testing import tiny_config_dict

NUM_LAYERS, NUM_DENSE = 61, 3
"""Of the whole model."""
V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
SLICE = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 32}
"""One dense layer and three with experts, of which a rank of eight has 32: with the tokens of eight ranks each expert
gets as many rows as one of 32 does from the tokens of one."""
TINY = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 1024,
}
"""What replaces it on a CPU."""
ROWS_AT_ONCE = 1 << 18


def v3_config(*, tiny: bool = False, **changed: Any) -> ModelConfig:
    """Return the config of the slice, with `changed` fields of config.json."""
    return ModelConfig.from_dict(tiny_config_dict("v3", **{**V3, **SLICE, **(TINY if tiny else {}), **changed}))


@attrs.define
class DrawnWeights:
    """A WeightSource that draws every tensor on the device, the matrices that DeepSeek-V3 stores in FP8 in that format,
    or all as floats. Activations stay near one. The order of the questions decides what is drawn. All are bfloat16
    numbers, in every `dtype`."""

    device: torch.device
    dtype: torch.dtype
    fp8: bool
    seed: int = 0

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard = WHOLE) -> Tensor:
        self.seed += 1
        kept = shard.shape(shape)
        chance = generator(self.device, self.seed)
        if name.endswith("norm.weight"):
            drawn = torch.rand(kept, generator=chance, device=self.device) * 0.8 + 0.6
        else:
            scale = 0.15 if name.endswith("bias") else 1.0 if "embed" in name else 1.3 * shape[-1] ** -0.5
            drawn = torch.randn(kept, generator=chance, device=self.device) * scale
        return drawn.bfloat16().to(dtype or self.dtype)

    def find(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        return None

    def weight(self, names: Sequence[str], rows: int, columns: int, shard: Shard = WHOLE) -> Weight:
        return expert(self._stack(1, len(names), *shard.shape((rows, columns))), 0)

    def format(self, name: str) -> type[Format]:
        return FP8Blocks if self.fp8 else Plain

    def stack(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> Weight:
        return self._stack(len(names), len(names[0]), rows, columns)

    def _stack(self, experts: int, parts: int, rows: int, columns: int) -> Weight:
        self.seed += 2
        if self.fp8:
            return draw_blocks(self.device, self.seed, experts, parts * rows, columns, parts=parts)
        return (draw(self.device, self.seed, experts, parts * rows, columns) * 1.3 * columns**-0.5).to(self.dtype)


def drawn_model(
    config: ModelConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = True,
    providers: str | None = None,
    without: Collection[str] = (),
    mtp: bool = False,
) -> Model:
    """Return a model of random weights. Equal arguments give equal models on one kind of device. `providers` names one
    for all ops, and `without` names some that are passed over. With `mtp` it has the layer that drafts."""
    topology = Topology()
    sum_in_float32(device)
    spec = op_spec_of(config, topology, device, dtype, {"fp8"} if fp8 else ())
    return Model.build(
        config,
        DrawnWeights(device, dtype, fp8),
        resolve_ops(spec, forced=providers or instead_of(without, spec)),
        device=device,
        dtype=dtype,
        topology=topology,
        groups=Topology().apart(),
        weights_id=bytes(32),
        mtp=mtp,
    )


def instead_of(without: Collection[str], spec: OpSpec) -> dict[str, str]:
    """Return the provider of each op that would get one of those: the next in order that serves it."""
    forced = {}
    for choice in resolve_ops(spec).choices:
        if choice.provider in without:
            names = [each.name for each in resolve.PROVIDERS if each.name not in without]
            forced[choice.op] = next(name for name in names if serves(name, choice.op, spec))
    return forced


def serves(provider: str, op: str, spec: OpSpec) -> bool:
    try:
        resolve_ops(spec, forced={op: provider})
    except BackendUnavailable:
        return False
    return True


def fill(pool: pd.PagePool, config: ModelConfig, dtype: torch.dtype) -> None:
    """Write random latents into all pages of a pool."""
    memory = pool.memory
    for layer in range(config.num_hidden_layers):
        rows_SW = memory.pages("latent", layer).flatten(0, 1)
        for seed, part_SW in enumerate(rows_SW.split(ROWS_AT_ONCE)):
            chance = generator(part_SW.device, seed)
            c, k_rope = (
                torch.randn(len(part_SW), width, generator=chance, device=part_SW.device, dtype=dtype)
                for width in (config.kv_lora_rank, config.qk_rope_head_dim)
            )
            part_SW.copy_(latent_rows(c, k_rope, part_SW.dtype))
