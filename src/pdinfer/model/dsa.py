"""DeepSeek sparse attention: a small indexer scores the whole context, and attention reads only the best tokens.

The index keys, one per token for all heads of the indexer, lie in the same pages as the latents. Where no context of a
step is longer than `index_topk`, every token is chosen, and attention may take its dense way (DeepSeek-V3.2 report,
arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels.arguments import DecodeCache, PrefillCache
from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.ops import Ops
from pdinfer.kv.layout import KVComponent
from pdinfer.layers import Linear, WeightSource
from pdinfer.model.batch import Batch
from pdinfer.model.cache import FP8, packed_component, plain_component
from pdinfer.values import Value

INDEX_NORM_EPS = 1e-6
"""The eps of the norm of index keys, whatever `rms_norm_eps` is."""


@attrs.frozen(kw_only=True)
class Indexer(Value):
    """The part of a layer that chooses which tokens are read, there and in the layers that share its choice.

    The weights of the heads are float32, and so is the norm of the keys, which has a mean and a bias. There are X heads
    of Y elements, and rope turns the *first* qk_rope_head_dim of them. In DeepSeek-V3.2 the pairs are (i, i + R/2),
    unlike in its attention."""

    num_heads: int
    top_k: int
    rope_dim: int
    rope_interleaved: bool
    ops: Ops
    q_b: Linear
    k: Linear
    k_norm_weight_Y: Tensor
    k_norm_bias_Y: Tensor
    head_weights_XD: Tensor

    @classmethod
    def build(cls, source: WeightSource, name: str, config: ModelConfig, ops: Ops) -> Indexer:
        heads, width, top_k, rank = config.index_n_heads, config.index_head_dim, config.index_topk, config.q_lora_rank
        if heads is None or width is None or top_k is None or rank is None:
            raise ConfigError(f"a {config.model_type} has no indexer")
        hidden, exact = config.hidden_size, torch.float32
        return cls(
            num_heads=heads,
            top_k=top_k,
            rope_dim=config.qk_rope_head_dim,
            rope_interleaved=config.indexer_rope_interleave,
            ops=ops,
            q_b=Linear.build(source, f"{name}.wq_b", heads * width, rank, ops),
            k=Linear.build(source, f"{name}.wk", width, hidden, ops),
            k_norm_weight_Y=source.take(f"{name}.k_norm.weight", width, dtype=exact),
            k_norm_bias_Y=source.take(f"{name}.k_norm.bias", width, dtype=exact),
            head_weights_XD=source.take(f"{name}.weights_proj.weight", heads, hidden, dtype=exact),
        )

    @staticmethod
    def cache_components(
        config: ModelConfig, kv_format: str, name: str, layers: tuple[int, ...]
    ) -> tuple[KVComponent, ...]:
        """Return what a token leaves in the cache of `layers`, each of which has an indexer. `kv_format` is the name of
        a dtype, "fp8" or "int8"."""
        width = config.index_head_dim or 0
        pairs = "interleaved" if config.indexer_rope_interleave else "half"
        turned = f"rope-{pairs}-first-{config.qk_rope_head_dim}"
        if kv_format == "int8":
            return (
                plain_component(name, f"dsa.int8.{width}.{turned}.float16-scale", kv_format, width, layers),
                plain_component(f"{name}_scale", "dsa.float16-scale", "float16", 1, layers),
            )
        if kv_format != FP8:
            return (plain_component(name, f"dsa.{kv_format}.{width}.{turned}", kv_format, width, layers),)
        if width & (width - 1):
            raise ConfigError(
                f'kv_format "fp8" turns index keys with a Hadamard transform, whose width is a power of two, and '
                f'index_head_dim is {width}; leave kv_format "auto"'
            )
        form = f"dsa.e4m3.{width}.{turned}.hadamard.float32-scale-pow2"
        return (packed_component(name, form, width + 4, layers),)

    def __call__(
        self,
        x_TD: Tensor | Rounded,
        query_TL: Tensor | Rounded,
        batch: Batch,
        angles: tuple[Tensor, Tensor],
        pages_PGY: Any,
    ) -> Tensor | None:
        """Store this step's keys in `pages_PGY` and choose: positions as `Ops.index_topk` returns them, or None
        when every position of every context is read. `query_TL` is the query latent of attention."""
        self.ops.store_index_keys(pages_PGY, batch.slots_A, *batch.gather(self.keys(x_TD, angles)))
        # decode on a device always chooses, because what it launches may not depend on a length that the host reads;
        # on a CPU nothing is launched, and the dense way is faster while all contexts are short
        if not batch.decode or batch.slots_A.device.type == "cpu":
            lens = batch.context_lens or batch.context_lens_B.tolist()
            if max(lens, default=0) <= self.top_k:
                return None
        q_TXY, weights_TX, table_BM = self.queries(query_TL, angles), self.head_weights(x_TD), batch.page_table_BM
        if batch.decode:
            q_BQXY, weights_BQX = batch.by_sequence(q_TXY), batch.by_sequence(weights_TX)
            cache = DecodeCache(pages_PGY, table_BM, batch.context_lens_B)
            return self.ops.index_topk_decode(q_BQXY, weights_BQX, cache, top_k=self.top_k).flatten(0, 1)
        prompts = PrefillCache(pages_PGY, table_BM, batch.query_lens, batch.context_lens)
        return self.ops.index_topk(q_TXY, weights_TX, prompts, top_k=self.top_k)

    def keys(self, x_TD: Tensor | Rounded, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return the keys [T, Y]: normed, then the first elements rotated."""
        keys_TY = self.ops.layer_norm(self.k(x_TD), self.k_norm_weight_Y, self.k_norm_bias_Y, INDEX_NORM_EPS)
        return self._turned(keys_TY[:, None], angles)[:, 0]

    def queries(self, query_TL: Tensor | Rounded, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return the queries [T, X, Y], the first elements of each head rotated."""
        q_TXY = self.q_b(query_TL).view(-1, self.num_heads, len(self.k_norm_weight_Y))
        return self._turned(q_TXY, angles)

    def head_weights(self, x_TD: Tensor | Rounded) -> Tensor:
        """Return the weights of the heads, float32 [T, X], of either sign. They include the scale of the scores, (X *
        Y)^-0.5."""
        scale: float = (self.num_heads * len(self.k_norm_weight_Y)) ** -0.5
        x_TD = x_TD.floats_TI if isinstance(x_TD, Rounded) else x_TD
        return self.ops.linear(x_TD.float(), self.head_weights_XD) * scale

    def _turned(self, x_TXY: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x_TXR, rest = x_TXY.tensor_split((self.rope_dim,), -1)
        return torch.cat((self.ops.rotate(x_TXR, *angles, interleaved=self.rope_interleaved), rest), -1)
