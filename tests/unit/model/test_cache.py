"""What MLA leaves in the cache: what each format is called, and which sizes it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.model.mla import MLA
from pdinfer.testing import random_model, tiny_config

LARGE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def config_of(family: str = "v32", **changes: Any) -> ModelConfig:
    return tiny_config(family, **LARGE | changes)


@pytest.mark.parametrize(
    ("kv_format", "sizes"), [("fp8", (656, 132)), ("bfloat16", (1152, 256)), ("float32", (2304, 512))]
)
def test_bytes_of_a_token(kv_format: str, sizes: tuple[int, int]) -> None:
    latent, index_key = MLA.cache_components(config_of(), kv_format, range(3))
    assert (latent.token_bytes, index_key.token_bytes) == sizes
    assert (latent.name, index_key.name) == ("latent", "index_k")
    assert latent.dtype == index_key.dtype == ("uint8" if kv_format == "fp8" else kv_format)


def test_index_keys_are_of_layers_with_an_indexer() -> None:
    latent, index_key = MLA.cache_components(config_of("glm"), "fp8", range(3))
    assert (latent.layers, index_key.layers) == ((0, 1, 2), (0, 2))
    drafter = MLA.cache_components(config_of("glm"), "fp8", (3,), prefix="mtp.")
    assert [(part.name, part.layers) for part in drafter] == [("mtp.latent", (3,)), ("mtp.index_k", (3,))]
    assert [part.name for part in MLA.cache_components(tiny_config("v3"), "bfloat16", range(3))] == ["latent"]


def test_equal_formats_mean_equal_bytes() -> None:
    """A change to the meaning of a byte changes the format, and only in the component that it concerns."""
    configs = {
        "": config_of(),
        "latent rank": config_of(kv_lora_rank=256),
        "rope dim": config_of(qk_rope_head_dim=32),
        "index dim": config_of(index_head_dim=64),
        "pairs": config_of(indexer_rope_interleave=True),
    }
    formats = {
        (name, kv_format): tuple(part.format for part in MLA.cache_components(config, kv_format, range(3)))
        for name, config in configs.items()
        for kv_format in ("fp8", "bfloat16", "float32")
    }
    assert len(set(formats.values())) == len(formats)
    for kv_format in ("fp8", "bfloat16"):
        plain = formats["", kv_format]
        changed = {
            name: [a != b for a, b in zip(plain, formats[name, kv_format], strict=True)] for name in configs if name
        }
        assert changed == {
            "latent rank": [True, False],
            "rope dim": [True, True],
            "index dim": [False, True],
            "pairs": [False, True],
        }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 192}, ("for every 128 elements", "kv_lora_rank = 192", 'kv_format "auto"')),
        ({"index_head_dim": 96}, ("power of two", "index_head_dim is 96", 'kv_format "auto"')),
    ],
    ids=["rank", "index"],
)
def test_sizes_that_fp8_cannot_pack_are_refused(changes: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        MLA.cache_components(config_of(**changes), "fp8", range(3))
    assert all(word in str(caught.value) for word in words)
    assert MLA.cache_components(config_of(**changes), "bfloat16", range(3))


def test_ends_with_different_formats_are_told_so() -> None:
    model = random_model(tiny_config("v32", kv_lora_rank=128))
    plain, packed = (model.kv_layout(CacheConfig(kv_format=name)) for name in ("auto", "fp8"))
    with pytest.raises(LayoutMismatch) as caught:
        plain.compatible_with(packed)
    fields = {name: (ours, theirs) for name, ours, theirs in caught.value.fields}
    assert fields["components.latent.format"] == (
        "mla.float32.128+8.rope-interleaved",
        "mla.e4m3.128+8.float32-scale-pow2-per-128.rope-bfloat16-interleaved",
    )
    assert fields["components.index_k.format"] == (
        "dsa.float32.16.rope-half-first-8",
        "dsa.e4m3.16.rope-half-first-8.hadamard.float32-scale-pow2",
    )
    assert all(part in str(caught.value) for pair in fields.values() for part in pair)
