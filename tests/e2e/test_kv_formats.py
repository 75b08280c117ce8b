"""A packed FP8 cache: what is read from it, through the split, and what the two sides say of different formats."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.config import CacheConfig
from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kernels.formats import cache_rows
from pdinfer.kv.view import KVView
from pdinfer.model.batch import Batch, Row
from pdinfer.model.model import Model
from pdinfer.parallel.topology import Topology
from pdinfer.testing import tiny_config, tiny_config_dict, write_checkpoint
from pdinfer.testing.models import RandomWeights
from tests.e2e.setups import greedy, join, prompt_of, tokens_of
from tests.slices import one_in

CPU = torch.device("cpu")
FAMILIES = ("v3", "v32", "glm")
RANK = 128
SPLITS = (("loopback", 8, 8), ("tcp", 16, 4), ("unix", 3, 8))
"""How pages travel, and their size at prefill and at decode."""


@functools.cache
def model_of(family: str, dtype: torch.dtype = torch.float32, *, rounds: bool = False) -> Model:
    """With `rounds`, what goes into the cache is rounded as FP8 does and kept as floats: a second way to the same."""
    resolved = resolve_ops(OpSpec(device=CPU, dtype=torch.float32))
    plain = resolved.ops

    def store_latent(pages: Tensor, slots: Tensor, c: Tensor, k_rope: Tensor) -> None:
        rounded = cache_rows.latents(cache_rows.latent_rows(c, k_rope, torch.uint8), RANK, c.dtype)
        plain.store_latent(pages, slots, *rounded.split((RANK, k_rope.shape[1]), -1))

    def store_index_keys(pages: Tensor, slots: Tensor, keys: Tensor) -> None:
        # the transform is its own inverse
        rounded = cache_rows.hadamard(cache_rows.index_keys(cache_rows.index_rows(keys, torch.uint8)))
        plain.store_index_keys(pages, slots, rounded.to(keys.dtype))

    if rounds:
        ops = plain.replace(store_latent=store_latent, store_index_keys=store_index_keys)
        resolved = attrs.evolve(resolved, ops=ops)
    config = tiny_config(family, kv_lora_rank=RANK)
    return Model.build(
        config,
        RandomWeights(0, dtype),
        resolved,
        device=CPU,
        dtype=dtype,
        topology=Topology(),
        groups=Topology().apart(),
        weights_id=b"w",
    )


def logits_of(model: Model, kv_format: str, chunks: tuple[int, ...]) -> Tensor:
    """Of one sequence run in chunks, one of a single token by absorbed attention, as decode does."""
    tokens = list(prompt_of(sum(chunks)))
    layout = model.kv_layout(CacheConfig(page_size=8, kv_format=kv_format))
    pages = range(layout.num_pages(len(tokens)))
    memory = model.allocate_pages(layout, len(pages))
    memory.buffer.fill_(0xFF)
    start, rows = 0, []
    for chunk in chunks:
        row = Row(tokens[start : start + chunk], start, pages)
        batch = Batch.build([row], page_size=8, device=CPU, decode=chunk == 1)
        rows.append(model.head(model.norm(model.forward(batch, KVView.of(memory)))))
        start += chunk
    return torch.cat(rows)


@pytest.mark.parametrize("chunks", [(40,), (9, 15, 13, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_reads_what_fp8_keeps(family: str, chunks: tuple[int, ...]) -> None:
    packed = logits_of(model_of(family), "fp8", chunks)
    rounded = logits_of(model_of(family, rounds=True), "auto", chunks)
    exact = logits_of(model_of(family), "auto", chunks)
    assert (packed - rounded).abs().max() < 2e-4
    assert (packed - exact).abs().mean() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_of_any_dtype_may_keep_fp8(dtype: torch.dtype) -> None:
    packed, plain = (logits_of(model_of("v32", dtype), kv_format, (30, 1)) for kv_format in ("fp8", "auto"))
    assert packed.isfinite().all()
    assert (packed - plain).abs().mean() < 0.4 * plain.std()


def pool_of(model: Model, page_size: int = 8, kv_format: str = "fp8") -> pd.PagePool:
    return pd.PagePool(model, pd.CacheConfig(page_size=page_size, num_pages=64, kv_format=kv_format))


@functools.cache
def generated(family: str, transport: str, *page_sizes: int) -> list[int]:
    """One request through the split, in chunks: so the steps are the same, whatever joins the two sides."""
    model = model_of(family)
    pools = [pool_of(model, size) for size in page_sizes]
    engine = pd.EngineConfig(chunked_prefill_size=16)
    with join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
        request = pd.Request(prompt=prompt_of(50), sampling=greedy(12, ignore_eos=True))
        tokens = tokens_of(setup.pairing.generate([request]))
        setup.check_idle()
    return tokens


@pytest.mark.parametrize(("family", "split"), one_in(4, itertools.product(FAMILIES, SPLITS)), ids=str)
def test_packed_pages_travel(family: str, split: tuple[str, int, int]) -> None:
    tokens = generated(family, *split)
    assert len(tokens) == 12
    assert tokens == generated(family, "shared", 8, 8)


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_sides_with_different_formats_refuse_each_other(transport: str) -> None:
    model: Any = model_of("v32")
    pools = [pool_of(model, kv_format="auto"), pool_of(model)]
    with pytest.raises(pd.LayoutMismatch) as caught:
        join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:])
    for part in ("components.latent.format", "mla.float32.128", "mla.e4m3.128", "components.index_k.format"):
        assert part in str(caught.value)


# In parts: latents beside rotated keys, INT8 index keys beside scales

PARTS: dict[str, Any] = {"rope_apart": True, "index_format": "int8"}


@functools.cache
def model_in_parts(family: str, folder: str) -> Model:
    return pd.load_model(folder, dtype="float32", cache=pd.CacheConfig(page_size=8, **PARTS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("parts")
    for family in FAMILIES:
        write_checkpoint(root / family, tiny_config_dict(family))
    return {family: str(root / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_over_parts_computes_what_it_does_over_whole_rows(family: str, folders: dict[str, str]) -> None:
    """But for the rounding of index keys, which may choose another token."""
    cache = pd.CacheConfig(page_size=8, rope_apart=True)
    tokens = prompt_of(41)
    parts, whole = (pd.load_model(folders[family], cache=each) for each in (cache, pd.CacheConfig(page_size=8)))
    assert torch.equal(parts.logits(tokens), whole.logits(tokens))
    keys = model_in_parts(family, folders[family]).logits(tokens)
    assert keys.isfinite().all()
    assert torch.equal(keys, whole.logits(tokens)) == (family == "v3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("transport", ["loopback", "tcp", "unix"])
def test_pages_in_parts_travel(family: str, transport: str, folders: dict[str, str]) -> None:
    model = model_in_parts(family, folders[family])
    pools = [pd.PagePool(model, pd.CacheConfig(page_size=8, num_pages=64, **PARTS)) for _ in range(2)]
    request = pd.Request(prompt=prompt_of(50), sampling=greedy(12, ignore_eos=True))
    engine = pd.EngineConfig(chunked_prefill_size=16)
    by_transport = []
    for how, prefill in ((transport, pools[:1]), ("shared", [])):
        with join(model, how, prefill_pools=prefill or pools[1:], decode_pools=pools[1:], engine=engine) as setup:
            by_transport.append(tokens_of(setup.pairing.generate([request])))
            setup.check_idle()
    assert by_transport[0] == by_transport[1]
    assert len(by_transport[0]) == 12


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_over_keys_beside_latents_are_those_over_whole_rows(family: str, folders: dict[str, str]) -> None:
    tokens = []
    for apart in (False, True):
        cache = pd.CacheConfig(page_size=8, num_pages=64, rope_apart=apart)
        with pd.Pairing.local(folders[family], dtype="float32", cache=cache) as pairing:
            requests = [pd.Request(prompt=prompt_of(n), sampling=greedy(12, ignore_eos=True)) for n in (50, 9)]
            tokens.append([(event.index, event.token) for event in pairing.generate(requests)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_whole_rows_and_parts_refuse_each_other(transport: str, folders: dict[str, str]) -> None:
    model = model_in_parts("v32", folders["v32"])
    whole = pd.load_model(folders["v32"], dtype="float32")
    pools = [pd.PagePool(whole, pd.CacheConfig(page_size=8, num_pages=64))]
    pools += [pd.PagePool(model, pd.CacheConfig(page_size=8, num_pages=64, **PARTS))]
    with pytest.raises(pd.LayoutMismatch, match=r"components.*latent_rope"):
        join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:])
