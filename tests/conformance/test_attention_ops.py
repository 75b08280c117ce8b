"""The ops of dense attention and its cache, for every provider, as in test_ops."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pdinfer.kernels import torch_ops
from pdinfer.kernels.native import ops as native
from tests.conformance.op_suite import (
    ATTENTION,
    Attention,
    contexts_of,
    draw,
    every_device,
    every_dtype,
    every_provider,
    for_every_provider,
    op_of,
    query_lens_of,
)
from tests.rounding import (
    assert_within,
)

DIMS = ((16, 8, 12, 10), (13, 6, 7, 9), (1, 2, 1, 1), (32, 32, 34, 64))


@for_every_provider
@pytest.mark.parametrize(("page_size", "rows"), [*product((1, 3, 16, 64), (0, 1, 5))])
def test_store_latent(provider: str, device: str, dtype: torch.dtype, page_size: int, rows: int) -> None:
    latent = draw(rows, 13).to(dtype)
    slots = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(rows))[:rows]
    expected = torch.full((6, page_size, 13), 7.0).to(dtype)
    pages = expected.to(device, copy=True)
    for slot, row in zip(slots.tolist(), latent, strict=True):
        expected[slot // page_size, slot % page_size] = row
    assert (
        op_of(provider, "store_latent", device, dtype)(pages, slots.to(device), *latent.to(device).split((9, 4), -1))
        is None
    )
    assert torch.equal(pages.cpu(), expected)


@for_every_provider
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("page_size", "count", "heads"), [*product((1, 3, 16, 64), (0, 1, 5), (1, 3, 4))])
def test_attention(
    provider: str, device: str, dtype: torch.dtype, name: str, page_size: int, count: int, heads: int
) -> None:
    contexts = contexts_of(page_size, count)
    for dims in DIMS:
        Attention(dtype, heads, page_size, contexts, query_lens_of(contexts), dims).check(name, provider, device)


@every_provider
@every_device
@every_dtype
@pytest.mark.parametrize("part_tokens", [32, 1024])
def test_long_contexts_are_decoded_in_parts(
    provider: str, device: str, dtype: torch.dtype, part_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native decode joins parts that have maxima of their own. Lengths lie on both sides of the borders of parts."""
    monkeypatch.setattr(native, "PART_TOKENS", part_tokens)
    contexts = (1500, 1, 1024, 1025, 2100) if part_tokens == 1024 else (150, 31, 32, 33, 320)
    Attention(dtype, 2, 16, contexts, (1,) * 5, (32, 32, 34, 64)).check("mla_decode", provider, device)


@pytest.mark.parametrize("keys", [16, 40, 64, 4096])
@pytest.mark.parametrize("page_size", [3, 16])
def test_native_prefill_expands_a_context_piece_by_piece(
    keys: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end with a page: before, within and after the queries' own positions."""
    monkeypatch.setattr(native, "KEYS", keys)
    case = Attention(torch.bfloat16, 2, page_size, (150, 33, 64, 97), (150, 20, 1, 60), (32, 32, 34, 64))
    case.check("mla_prefill", "native")


@for_every_provider
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_does_not_see_other_sequences(provider: str, device: str, dtype: torch.dtype, name: str) -> None:
    case = Attention(dtype, 3, 4, (9, 6, 12), (1, 1, 1))
    poisoned = case.pages
    poisoned[case.owned[1]] = torch.nan
    got = case.run(name, provider, device, poisoned)
    assert_within(got[[0, 2]], case.exact(name)[[0, 2]], case.error(name)[[0, 2]], dtype)
    assert got[1].isnan().all()


@every_dtype
@pytest.mark.parametrize("block_bytes", [1, 4 * 3 * 40 * 7, 4 * 3 * 40 * 40])
def test_the_size_of_a_block_of_scores_changes_nothing(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks hold one query, a number that does not divide the queries, or all of them."""
    monkeypatch.setattr(torch_ops, "SCORE_BLOCK_BYTES", block_bytes)
    Attention(dtype, 3, 16, (40, 33), (40, 20)).check("mla_prefill", "torch")
