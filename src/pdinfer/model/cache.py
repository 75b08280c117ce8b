"""What a token leaves in the cache, by the format asked for: the components of a layout.

A component's `format` is text that is equal where bytes mean the same. "fp8" packs rows as `kernels.row_formats` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdinfer.config import ModelConfig
from pdinfer.config.model import ITEM_BYTES
from pdinfer.errors import ConfigError
from pdinfer.kv.layout import KVComponent

FP8 = "fp8"
FP8_GROUP = 128


def cache_components(
    config: ModelConfig, kv_format: str, layers: Sequence[int], *, prefix: str = ""
) -> tuple[KVComponent, ...]:
    """The latents of `layers`, and the index keys of those among them that have an indexer.

    `kv_format` is a dtype's name or "fp8"; `prefix` goes before the components' names. Raises ConfigError for sizes
    that "fp8" cannot pack.
    """
    indexed = tuple(layer for layer in layers if config.has_indexer(layer))
    latent = _latent(config, kv_format, f"{prefix}latent", tuple(layers))
    return (latent, _index_key(config, kv_format, f"{prefix}index_k", indexed)) if indexed else (latent,)


def _latent(config: ModelConfig, kv_format: str, name: str, layers: tuple[int, ...]) -> KVComponent:
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if kv_format != FP8:
        form = f"mla.{kv_format}.{rank}+{rope}.rope-interleaved"
        return _plain(name, form, kv_format, rank + rope, layers)
    if rank % FP8_GROUP:
        raise ConfigError(
            f'kv_format "fp8" has a scale for every {FP8_GROUP} elements of a latent and cannot hold kv_lora_rank = '
            f'{rank}; leave kv_format "auto"'
        )
    form = f"mla.e4m3.{rank}+{rope}.float32-scale-pow2-per-{FP8_GROUP}.rope-bfloat16-interleaved"
    return _packed(name, form, rank + rank // FP8_GROUP * 4 + rope * 2, layers)


def _index_key(config: ModelConfig, kv_format: str, name: str, layers: tuple[int, ...]) -> KVComponent:
    width = config.index_head_dim or 0
    pairs = "interleaved" if config.indexer_rope_interleave else "half"
    turned = f"rope-{pairs}-first-{config.qk_rope_head_dim}"
    if kv_format != FP8:
        return _plain(name, f"dsa.{kv_format}.{width}.{turned}", kv_format, width, layers)
    if width & (width - 1):
        raise ConfigError(
            f'kv_format "fp8" turns index keys with a Hadamard transform, whose width is a power of two, and '
            f'index_head_dim is {width}; leave kv_format "auto"'
        )
    return _packed(name, f"dsa.e4m3.{width}.{turned}.hadamard.float32-scale-pow2", width + 4, layers)


def _plain(name: str, form: str, dtype: str, width: int, layers: tuple[int, ...]) -> KVComponent:
    size = width * ITEM_BYTES[dtype]
    return KVComponent(name=name, format=form, dtype=dtype, width=width, token_bytes=size, layers=layers)


def _packed(name: str, form: str, size: int, layers: tuple[int, ...]) -> KVComponent:
    return KVComponent(name=name, format=form, dtype="uint8", width=size, token_bytes=size, layers=layers)
