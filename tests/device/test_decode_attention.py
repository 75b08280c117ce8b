"""Attention of a decode step can be recorded: nothing in it depends on a length or a page that the host knew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdinfer.config import CacheConfig
from pdinfer.kernels import reference, row_formats, torch_attention, torch_ops
from pdinfer.kv.view import KVView
from pdinfer.model.batch import Batch, Row
from pdinfer.model.model import Model
from pdinfer.testing import random_model, tiny_config
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
        row_formats.latent_rows(latents[:, :128], latents[:, 128:], kind).view(9, 4, -1),
        normal(3, 2, 2, 16, seed=seed),
        normal(3, 2, 2, seed=seed),
        row_formats.index_rows(keys, kind).view(9, 4, -1),
        torch.randint(9, (3, 5), generator=chance, dtype=torch.int32),
        torch.randint(2, 5 * 4 + 1, (3,), generator=chance),
    ]


def attend(ops: object, given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dense result, the choice, and the result over it."""
    q_latent, q_rope, latents, q_index, weights, keys, table, lens = given
    dense = ops.mla_decode(q_latent, q_rope, latents, table, lens, scale=SCALE)  # type: ignore[attr-defined]
    chosen = ops.index_topk_decode(q_index, weights, keys, table, lens, top_k=6)  # type: ignore[attr-defined]
    sequence = torch.arange(3, device=lens.device).repeat_interleave(2, output_size=6)
    tokens = q_latent.flatten(0, 1), q_rope.flatten(0, 1), latents, table, sequence, chosen.flatten(0, 1)
    return dense, chosen, ops.mla_sparse(*tokens, scale=SCALE)  # type: ignore[attr-defined]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_attention_is_recorded_and_run_again_on_other_lengths_and_pages(
    device: torch.device, packed: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", block_bytes)
    there = [tensor.to(device) for tensor in inputs(packed, 1)]
    with Capture() as capture:
        results = attend(torch_ops, there)
    assert capture.illegal == []
    for seed in (1, 2, 3):
        now = inputs(packed, seed)
        for tensor, new in zip(there, now, strict=True):
            tensor.copy_(new)
        capture.replay()
        for got, expected in zip(results, attend(reference, now), strict=True):
            torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("family", "more"), [("v3", {}), ("v32", {"index_topk": 17})])
def test_the_layers_of_a_step_with_drafts_are_recorded_and_run_again(
    device: torch.device, family: str, more: dict[str, int]
) -> None:
    """Rows have other tokens, positions, pages and numbers of drafts in each step. Where a part of a context is chosen,
    that of the recorded step was short enough to be read whole. Experts stay out of it."""
    config = tiny_config(family, first_k_dense_replace=tiny_config(family).num_hidden_layers, **more)
    model, on_host = random_model(config, device=device), random_model(config)

    def view(model: Model) -> tuple[KVView, int]:
        memory = model.allocate_pages(model.kv_layout(CacheConfig(page_size=4)), 16)
        memory.buffer.view(torch.float32).copy_(normal(memory.num_bytes // 4, seed=5))
        return KVView.of(memory), memory.scratch_page

    def batch(seed: int, where: torch.device) -> Batch:
        pages = torch.randperm(15, generator=torch.Generator().manual_seed(seed)).tolist()
        rows = [
            Row([seed, 7, 9], 14 + seed % 3, pages[:5]),
            Row([8, seed][: 1 + seed % 2], 13 - seed, pages[5:10]),
            Row([5], 2, pages[10:11]),
        ]
        return Batch.build(rows, page_size=4, device=where, decode=True, scratch_page=15)

    (pages, scratch_page), recorded = view(model), batch(3, device)
    assert scratch_page == 15
    with Capture() as capture:
        hidden = model.forward(recorded, pages)
    assert capture.illegal == []
    for seed in (1, 2, 3):
        now = batch(seed, torch.device("cpu"))
        for name in ("tokens_T", "positions_T", "slots_A", "page_table_BM", "context_lens_B"):
            getattr(recorded, name).copy_(getattr(now, name))
        (fresh, _), (again, _) = view(on_host), view(model)
        for layer, latents in pages.latents.items():
            latents.copy_(again.latents[layer])
        for layer, keys in pages.index_keys.items():
            keys.copy_(again.index_keys[layer])
        capture.replay()
        expected = now.live(on_host.forward(now, fresh))
        assert now.live_rows_N is not None
        torch.testing.assert_close(hidden.cpu()[now.live_rows_N], expected, atol=1e-4, rtol=1e-4)
