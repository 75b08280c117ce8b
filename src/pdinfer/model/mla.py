"""Multi-head latent attention in its two forms over one cache of latents.

The cache of a token holds `kv_lora_rank` values (the normed latent c) and `qk_rope_head_dim` values (one rotated key
that all heads share, its pairs interleaved as in the checkpoint). *Expanded* attention turns cached latents into keys
and values with kv_b_proj, and suits many queries. *Absorbed* attention folds kv_b_proj into the query and the output
instead, and suits one query per sequence. In exact arithmetic they are equal (DeepSeek-V2 report, arXiv 2405.04434,
section 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels.arguments import DecodeCache, PrefillCache, TokenCache
from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.formats.format import Rounding, Shard, Weight
from pdinfer.kernels.ops import Ops
from pdinfer.kv.layout import KVComponent
from pdinfer.layers import InputNorm, Linear, RMSNorm, WeightSource, row_parallel
from pdinfer.model.batch import Batch, Step
from pdinfer.model.cache import FP8, packed_component, plain_component
from pdinfer.model.dsa import Indexer
from pdinfer.parallel.groups import ALONE, Group
from pdinfer.values import Value

LATENT_NORM_EPS = 1e-6
"""DeepSeek's modelling code builds the two latent norms with the default of its class, not with `rms_norm_eps`."""
FP8_GROUP = 128
"""The elements of a latent that share a scale in a cache of "fp8"."""


@attrs.frozen(kw_only=True)
class MLA(Value):
    """The weights of one layer, for the `num_heads` heads of this rank.

    `q_a` and `q_a_norm` are None in models without a query latent. `kv_b_OC` holds floats whatever its stored format,
    because absorbed attention takes it apart by heads. Nothing else reads a latent, so the cache holds it rounded as a
    quantized kv_b_proj does (`rounding`), and both forms of attention remain one function. `indexer` is None where
    every token is read, and in layers that share the choice of an earlier one."""

    config: ModelConfig
    num_heads: int
    ops: Ops
    q_a: Linear | None
    q_a_norm: InputNorm | None
    q_b: Linear
    kv_a: Linear
    kv_a_norm: RMSNorm
    kv_b_OC: Tensor
    rounding: Rounding | None
    o: Callable[[Tensor], Tensor]
    indexer: Indexer | None
    # what follows once, not in every layer of every step
    q_head_dim: int = attrs.field(init=False)
    """The width of one head of a query: its part without positions, and its rotary part."""
    scale: float = attrs.field(init=False)
    """The factor of scores."""

    by_head: tuple[Tensor, Tensor] = attrs.field(init=False)
    """The rows of `kv_b_OC` that make keys and those that make values: [H, N, C] and [H, V, C]."""

    @by_head.default
    def _by_head(self) -> tuple[Tensor, ...]:
        kv_b_HOC = self.kv_b_OC.view(self.num_heads, -1, self.config.kv_lora_rank)
        return kv_b_HOC.tensor_split((self.config.qk_nope_head_dim,), 1)

    @q_head_dim.default
    def _q_head_dim(self) -> int:
        return self.config.qk_head_dim

    @scale.default
    def _scale(self) -> float:
        return self.config.softmax_scale

    @classmethod
    def build(cls, source: WeightSource, layer: int, config: ModelConfig, ops: Ops, tp: Group = ALONE) -> MLA:
        """Ask `source` for the tensors of `layer`. The heads are divided over `tp`. What has no head axis is whole on
        each of its ranks."""
        name = f"model.layers.{layer}.self_attn"
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        shard = Shard(tp.rank, tp.size)
        q_size = heads * config.qk_head_dim
        q_a = q_a_norm = None
        if config.q_lora_rank is None:
            q_b = Linear.build(source, f"{name}.q_proj", q_size, hidden, ops, shard)
        else:
            q_a = Linear.build(source, f"{name}.q_a_proj", config.q_lora_rank, hidden, ops)
            norm = RMSNorm.build(source, f"{name}.q_a_layernorm", config.q_lora_rank, LATENT_NORM_EPS, ops)
            q_b = Linear.build(source, f"{name}.q_b_proj", q_size, config.q_lora_rank, ops, shard)
            q_a_norm = InputNorm.of(norm, [q_b.weight])
        kv_a_size = rank + config.qk_rope_head_dim
        kv_b_size = heads * (config.qk_nope_head_dim + config.v_head_dim)
        return cls(
            config=config,
            num_heads=heads // tp.size,
            ops=ops,
            q_a=q_a,
            q_a_norm=q_a_norm,
            q_b=q_b,
            kv_a=Linear.build(source, f"{name}.kv_a_proj_with_mqa", kv_a_size, hidden, ops),
            kv_a_norm=RMSNorm.build(source, f"{name}.kv_a_layernorm", rank, LATENT_NORM_EPS, ops),
            kv_b_OC=source.take(f"{name}.kv_b_proj.weight", kv_b_size, rank, shard=shard),
            rounding=source.format(f"{name}.kv_b_proj.weight").rounding(ue8m0=config.scale_fmt == "ue8m0"),
            o=row_parallel(source, f"{name}.o_proj", hidden, heads * config.v_head_dim, ops, tp),
            indexer=Indexer.build(source, f"{name}.indexer", config, ops) if config.has_indexer(layer) else None,
        )

    @property
    def readers(self) -> tuple[Weight, ...]:
        """The weights that multiply the layer's input."""
        maps = (self.q_b if self.q_a is None else self.q_a, self.kv_a)
        return tuple(linear.weight for linear in maps)

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
        """Return the latents of `layers`, and the index keys of the layers among them that have an indexer: one
        component each, or two where `CacheConfig` has them in parts.

        `kv_format` is the name of a dtype or "fp8". `prefix` goes before the names of the components. Raises
        ConfigError for sizes that "fp8" cannot pack."""
        latents = _latent_components(config, kv_format, f"{prefix}latent", tuple(layers), apart=rope_apart)
        indexed = tuple(layer for layer in layers if config.has_indexer(layer))
        if not indexed:
            return latents
        format_of_keys = kv_format if index_format == "auto" else index_format
        return *latents, *Indexer.cache_components(config, format_of_keys, f"{prefix}index_k", indexed)

    def __call__(self, x_TD: Tensor | Rounded, step: Step, layer: int) -> Tensor:
        """Store this step's latents of `layer` and attend. Returns [T, D], the output of all heads, whole on each rank.

        An indexer first writes its choice to `step.selected_TS`. With a choice there, a token reads only those
        positions of its sequence."""
        batch, angles, pages_PGW = step.batch, step.angles, step.view.latents[layer]
        query_TL = self.query_latent(x_TD)
        if self.indexer is not None:
            step.selected_TS = self.indexer(x_TD, query_TL, batch, angles, step.view.index_keys[layer])
        self.store(x_TD, batch, angles, pages_PGW)
        q_THQ = self.q_b(query_TL).view(-1, self.num_heads, self.q_head_dim)
        if step.selected_TS is not None:
            out_THV = self._attend_to_selected(q_THQ, step.selected_TS, step, pages_PGW)
        elif batch.decode:
            out_THV = self.ops.mla_absorbed(
                q_THQ,
                *angles,
                DecodeCache(
                    pages_PGW,
                    batch.page_table_BM,
                    batch.context_lens_B,
                    live_T=batch.live_T,
                    of_step=step.of_lengths,
                ),
                *self.by_head,
                scale=self.scale,
            )
        else:
            out_THV = self._attend_expanded(q_THQ, batch, angles, pages_PGW)
        return self.o(out_THV.flatten(1))

    def store(self, x_TD: Tensor | Rounded, batch: Batch, angles: tuple[Tensor, Tensor], pages_PGW: Tensor) -> None:
        """Write what the cache holds of each token, also of those that other context-parallel ranks computed."""
        norm = self.kv_a_norm
        if batch.cp_counts or norm.bias_D is not None:
            self.ops.store_latent(pages_PGW, batch.slots_A, *batch.gather(*self.latent(x_TD, angles)))
        else:
            c_TC, k_TR = self._latent_and_key(x_TD)
            self.ops.norm_rotate_store(
                c_TC, k_TR, norm.weight_D, norm.eps, *angles, pages_PGW, batch.slots_A, rounding=self.rounding
            )

    def latent(self, x_TD: Tensor | Rounded, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the cache holds of each token: the latent after its norm [T, C], and the key after its rotation
        [T, R]."""
        c_TC, k_TR = self._latent_and_key(x_TD)
        c_TC = self.kv_a_norm(c_TC)
        if self.rounding is not None:
            c_TC = self.ops.rounded(c_TC, self.rounding)
        return c_TC, self.ops.rotate(k_TR[:, None], *angles)[:, 0]

    def _latent_and_key(self, x_TD: Tensor | Rounded) -> tuple[Tensor, ...]:
        return self.kv_a(x_TD).tensor_split((self.config.kv_lora_rank,), -1)

    def query_latent(self, x_TD: Tensor | Rounded) -> Tensor | Rounded:
        """Return what queries are made from, those of an indexer too: the normed latent [T, q_lora_rank], or `x_TD` in
        models without one."""
        return x_TD if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x_TD))[0]

    def _attend_to_selected(self, q_THQ: Tensor, selected_TS: Tensor, step: Step, pages_PGW: Tensor) -> Tensor:
        """Attend over the latents at selected positions -> [T, H, V]."""
        ops, (q_nope_THN, q_rope_THR), (k_b_HNC, v_b_HVC) = self.ops, self._rotated(q_THQ, step.angles), self.by_head
        cache = TokenCache(pages_PGW, step.batch.page_table_BM, step.batch.sequence_T, of_step=step.of_lengths)
        o_THC = ops.mla_sparse(ops.heads_in(q_nope_THN, k_b_HNC), q_rope_THR, cache, selected_TS, scale=self.scale)
        return ops.heads_out(o_THC, v_b_HVC)

    def _attend_expanded(self, q_THQ: Tensor, batch: Batch, angles: tuple[Tensor, Tensor], pages_PGW: Tensor) -> Tensor:
        """Attend over keys and values expanded from the latents -> [T, H, V]."""
        q_THQ = torch.cat(self._rotated(q_THQ, angles), -1)
        cache = PrefillCache(pages_PGW, batch.page_table_BM, batch.query_lens, batch.context_lens)
        return self.ops.mla_prefill(q_THQ, self.kv_b_OC, cache, v_head_dim=self.config.v_head_dim, scale=self.scale)

    def _rotated(self, q_THQ: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the part of each query without positions, and the other one rotated."""
        q_nope_THN, q_THR = q_THQ.tensor_split((self.config.qk_nope_head_dim,), -1)
        return q_nope_THN, self.ops.rotate(q_THR, *angles)


def _latent_components(
    config: ModelConfig, kv_format: str, name: str, layers: tuple[int, ...], *, apart: bool
) -> tuple[KVComponent, ...]:
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if apart:
        return (
            plain_component(name, f"mla.{kv_format}.{rank}", kv_format, rank, layers),
            plain_component(f"{name}_rope", f"mla.{kv_format}.{rope}.rope-interleaved", kv_format, rope, layers),
        )
    if kv_format != FP8:
        form = f"mla.{kv_format}.{rank}+{rope}.rope-interleaved"
        return (plain_component(name, form, kv_format, rank + rope, layers),)
    if rank % FP8_GROUP:
        raise ConfigError(
            f'kv_format "fp8" has a scale for every {FP8_GROUP} elements of a latent and cannot hold kv_lora_rank = '
            f'{rank}; leave kv_format "auto"'
        )
    form = f"mla.e4m3.{rank}+{rope}.float32-scale-pow2-per-{FP8_GROUP}.rope-bfloat16-interleaved"
    return (packed_component(name, form, rank + rank // FP8_GROUP * 4 + rope * 2, layers),)
