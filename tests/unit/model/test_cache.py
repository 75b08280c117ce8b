"""What MLA leaves in the cache: what each format is called, and which sizes it refuses."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kv.layout import KVComponent
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model.mla import MLA
from pdinfer.model.model import Model, kv_layout_of
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


# In parts, as ops of Ascend take them


def in_parts(**more: Any) -> CacheConfig:
    return CacheConfig(rope_apart=True, index_format="int8", **more)


def layout_of(
    config: ModelConfig, dtype: torch.dtype, cache: CacheConfig, *, mtp: bool = False
) -> dict[str, KVComponent]:
    return {part.name: part for part in kv_layout_of(config, dtype, cache, mtp=mtp).components}


def test_bytes_of_a_token_in_parts() -> None:
    keys = layout_of(config_of(), torch.bfloat16, CacheConfig(rope_apart=True))
    assert {name: (part.dtype, part.token_bytes) for name, part in keys.items()} == {
        "latent": ("bfloat16", 1024),
        "latent_rope": ("bfloat16", 128),
        "index_k": ("bfloat16", 256),
    }
    parts = layout_of(config_of(), torch.bfloat16, in_parts())
    assert {name: (part.dtype, part.token_bytes) for name, part in parts.items()} == {
        "latent": ("bfloat16", 1024),
        "latent_rope": ("bfloat16", 128),
        "index_k": ("int8", 128),
        "index_k_scale": ("float16", 2),
    }
    assert [*layout_of(tiny_config("v3"), torch.float32, in_parts())] == ["latent", "latent_rope"]


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 1), (1, 3), (3, 5), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_part_is_contiguous_and_aligned(dtype: torch.dtype, page_size: int, num_pages: int) -> None:
    """Ops of Ascend refuse views with a pitch. An MTP layer's floats follow numbers of one byte."""
    layout = kv_layout_of(
        tiny_config("v32", num_nextn_predict_layers=1), dtype, in_parts(page_size=page_size), mtp=True
    )
    memory = PageMemory(layout, num_pages, device=torch.device("cpu"))
    view = KVView.of(memory)
    assert [*view.latents] == [*view.index_keys] == [0, 1, 2, 3]
    for pages in (*view.latents.values(), *view.index_keys.values()):
        assert [part.shape[:2] for part in pages] == [(num_pages, page_size)] * 2
        assert all(part.is_contiguous() for part in pages)
    assert [part.dtype for part in view.index_keys[3]] == [torch.int8, torch.float16]
    assert (
        sum(part.nbytes for of_kind in (view.latents, view.index_keys) for pages in of_kind.values() for part in pages)
        == memory.num_bytes
    )


@pytest.mark.parametrize("cache", [CacheConfig(rope_apart=True), CacheConfig(index_format="int8")], ids=str)
def test_pages_in_parts_are_those_of_a_model_that_was_loaded_for_them(cache: CacheConfig) -> None:
    model = random_model(tiny_config("v32"))
    with pytest.raises(
        ConfigError, match=r"was asked for, and the model's ops were chosen for False and \"auto\": load"
    ):
        model.kv_layout(cache)
    with pytest.raises(ConfigError, match=r"rope_apart = False and index_format \"auto\" was asked for"):
        model_for(cache).kv_layout(CacheConfig())


def model_for(cache: CacheConfig) -> Model:
    model = random_model(tiny_config("v32"))
    spec = attrs.evolve(model.resolved.spec, rope_apart=cache.rope_apart, index_format=cache.index_format)
    return attrs.evolve(model, resolved=resolve_ops(spec))


def test_packed_rows_have_no_parts() -> None:
    with pytest.raises(ConfigError, match='kv_format "fp8" packs latents and rotated keys into one row'):
        CacheConfig(rope_apart=True, kv_format="fp8")


def test_whole_rows_and_parts_do_not_meet() -> None:
    whole, parts = (
        kv_layout_of(tiny_config("v32"), torch.bfloat16, cache, mtp=False) for cache in (CacheConfig(), in_parts())
    )
    assert whole.layout_id != parts.layout_id
    with pytest.raises(LayoutMismatch, match=r"components.*latent,index_k.*latent,latent_rope,index_k_scale,index_k"):
        whole.compatible_with(parts)
