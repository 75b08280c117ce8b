"""Attention of a decode step can be recorded: nothing in it depends on a length or a page that the host knew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.kernels import reference
from pdinfer.kernels.arguments import DecodeCache, TokenCache
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model.batch import Row
from pdinfer.model.decode_rows import DecodeRows
from pdinfer.process import streams
from tests.device.models import ModelKind, model_of
from tests.simulated.capture import Capture

SCALE = 0.25


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(packed: bool, seed: int) -> list[Tensor]:
    """Return what the ops of attention take for 3 sequences of 2 queries, of any lengths, in a table of 5 columns."""
    chance = torch.Generator().manual_seed(seed)
    kind = torch.uint8 if packed else torch.float32
    latents, keys = normal(9 * 4, 128 + 8, seed=seed), normal(9 * 4, 16, seed=seed)
    return [
        normal(3, 2, 4, 128, seed=seed),
        normal(3, 2, 4, 8, seed=seed),
        cache_rows.latent_rows(latents[:, :128], latents[:, 128:], kind).view(9, 4, -1),
        normal(3, 2, 2, 16, seed=seed),
        normal(3, 2, 2, seed=seed),
        cache_rows.index_rows(keys, kind).view(9, 4, -1),
        torch.randint(9, (3, 5), generator=chance, dtype=torch.int32),
        torch.randint(2, 5 * 4 + 1, (3,), generator=chance),
    ]


def attend(ops: object, given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dense result, the choice, and the result over it."""
    q_latent, q_rope, latents, q_index, weights, keys, table, lens = given
    cache = DecodeCache(latents, table, lens)
    dense = ops.mla_decode(q_latent, q_rope, cache, scale=SCALE)  # type: ignore[attr-defined]
    chosen = ops.index_topk_decode(q_index, weights, DecodeCache(keys, table, lens), top_k=6)  # type: ignore[attr-defined]
    sequence = torch.arange(3, device=lens.device).repeat_interleave(2, output_size=6)
    tokens = q_latent.flatten(0, 1), q_rope.flatten(0, 1), TokenCache(latents, table, sequence), chosen.flatten(0, 1)
    return dense, chosen, ops.mla_sparse(*tokens, scale=SCALE)  # type: ignore[attr-defined]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_attention_is_recorded_and_run_again_on_other_lengths_and_pages(
    device: torch.device, packed: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", block_bytes)
    there = [tensor.to(device) for tensor in inputs(packed, 1)]
    with streams.no_collection(), Capture() as capture:
        results = attend(torch_attention, there)
    assert capture.illegal == []
    for seed in (1, 2, 3):
        now = inputs(packed, seed)
        for tensor, new in zip(there, now, strict=True):
            tensor.copy_(new)
        capture.replay()
        for got, expected in zip(results, attend(reference, now), strict=True):
            torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_step_chooses_without_a_look_at_lengths(device: torch.device) -> None:
    """On a CPU it reads densely while contexts are short, which it learns by a look."""
    model = model_of(ModelKind("v32"), device)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=10))
    assert isinstance(pool.memory, PageMemory)
    rows = DecodeRows({}, lambda _: (), page_size=4, device=device, scratch_page=9)
    rows.place([Row((7,), 0, [3])], [None])
    batch, view = rows.batch(1), KVView.of(pool.memory)
    with streams.no_collection(), Capture() as capture:
        model.forward(batch, view)
    assert capture.illegal == []
