"""The ops of dense attention and its cache, for every provider, as in test_ops."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pdinfer.kernels.native import ops as native
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kernels.torch import flash as torch_flash
from tests.conformance.op_suite import (
    ATTENTION,
    Attention,
    contexts_of,
    draw,
    every_dtype,
    for_every_op,
    for_every_provider,
    on_a_cpu,
    op_of,
    query_lens_of,
)
from tests.joined import for_each, pairs_each_time
from tests.rounding import assert_within

DIMS = ((16, 8, 12, 10), (13, 6, 7, 9), (1, 2, 1, 1), (32, 32, 34, 64))


@for_every_provider("store_latent")
@for_each(("page_size", "rows"), [*product((1, 3, 16, 64), (0, 1, 5))])
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


@for_every_op("name", ATTENTION)
@pairs_each_time
@for_each(("page_size", "count", "heads"), [*product((1, 3, 16, 64), (0, 1, 5), (1, 3, 4))])
def test_attention(
    provider: str, device: str, dtype: torch.dtype, name: str, page_size: int, count: int, heads: int
) -> None:
    contexts = contexts_of(page_size, count)
    for dims in DIMS:
        Attention(dtype, heads, page_size, contexts, query_lens_of(contexts), dims).check(name, provider, device)


@for_every_provider("mla_decode")
@for_each("part_tokens", [32, 1024])
def test_long_contexts_are_decoded_in_parts(
    provider: str, device: str, dtype: torch.dtype, part_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native decode joins parts that have maxima of their own. Lengths lie on both sides of the borders of parts."""
    monkeypatch.setattr(native.attention, "PART_TOKENS", part_tokens)
    contexts = (1500, 1, 1024, 1025, 2100) if part_tokens == 1024 else (150, 31, 32, 33, 320)
    Attention(dtype, 2, 16, contexts, (1,) * 5, (32, 32, 34, 64)).check("mla_decode", provider, device)


@for_every_provider("mla_decode")
@pairs_each_time
@for_each("num_queries", [1, 2, 3, 4])
@for_each(("page_size", "heads"), [*product((1, 3, 16), (1, 3, 8))])
def test_several_queries_of_a_sequence_see_each_other_in_order(
    provider: str, device: str, dtype: torch.dtype, num_queries: int, page_size: int, heads: int
) -> None:
    """The last queries lie on both sides of the borders of pages. The table is wider than any context."""
    contexts = tuple(max(num_queries, context) for context in (*contexts_of(page_size, 5), 65, 66))
    for dims in DIMS:
        case = Attention(dtype, heads, page_size, contexts, (1,) * 7, dims, num_queries, spare_columns=3)
        case.check("mla_decode", provider, device)


@for_every_provider("mla_decode")
@for_each("num_queries", [2, 4])
def test_queries_on_both_sides_of_parts_and_blocks_of_a_context(
    provider: str, device: str, dtype: torch.dtype, num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some see nothing of the last part, or of the last block. Page ids are int64."""
    monkeypatch.setattr(native.attention, "PART_TOKENS", 64)
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", 1)
    contexts = (128, 129, 130, 131, 132, 64, 65, 66, 67, 4)
    case = Attention(dtype, 3, 16, contexts, (1,) * 10, (32, 32, 34, 64), num_queries, torch.int64)
    case.check("mla_decode", provider, device)


@for_every_provider("mla_decode")
def test_a_query_whose_latent_was_not_written_changes_no_other(
    provider: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of unused drafts hold NaN, in pages that are the sequence's own or in any."""
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", 1)
    for written in (1, 2, 3):
        contexts = (20, 4, 33, 64, 66)
        case = Attention(dtype, 3, 16, contexts, (1,) * 5, (32, 32, 34, 64), num_queries=4)
        unused = case.pages
        for mine, context in zip(case.owned, contexts, strict=True):
            for position in range(context - 4 + written, context):
                unused[mine[position // 16], position % 16] = torch.nan
        got = case.run("mla_decode", provider, device, unused)
        exact, error = case.expected("mla_decode")
        assert_within(got[:, :written], exact[:, :written], error[:, :written], dtype)
        assert got[:, written:].isnan().any(-1).all()


@on_a_cpu("mla_prefill", dtypes=(torch.bfloat16,))
@for_each("keys", [16, 40, 64, 4096])
@for_each("page_size", [3, 16])
def test_native_prefill_expands_a_context_piece_by_piece(
    provider: str, dtype: torch.dtype, keys: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end with a page: before, within and after the queries' own positions."""
    monkeypatch.setattr(native.attention, "KEYS", keys)
    case = Attention(dtype, 2, page_size, (150, 33, 64, 97), (150, 20, 1, 60), (32, 32, 34, 64))
    case.check("mla_prefill", provider)


@for_every_op("name", ATTENTION)
def test_attention_does_not_see_other_sequences(provider: str, device: str, dtype: torch.dtype, name: str) -> None:
    case = Attention(dtype, 3, 4, (9, 6, 12), (1, 1, 1))
    poisoned = case.pages
    poisoned[case.owned[1]] = torch.nan
    got = case.run(name, provider, device, poisoned)
    exact, error = case.expected(name)
    assert_within(got[[0, 2]], exact[[0, 2]], error[[0, 2]], dtype)
    assert got[1].isnan().all()


@every_dtype
@for_each("block_bytes", [1, 4 * 3 * 40 * 7, 4 * 3 * 40 * 40])
def test_the_size_of_a_block_of_scores_changes_nothing(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks hold one query, a number that does not divide the queries, or all of them."""
    monkeypatch.setattr(torch_flash, "DTYPES", ())
    monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", block_bytes)
    Attention(dtype, 3, 16, (40, 33), (40, 20)).check("mla_prefill", "torch")


@every_dtype
@for_each("fused", [True, False])
@for_each("page_size", [3, 16])
def test_a_context_of_many_blocks_is_joined(
    dtype: torch.dtype, fused: bool, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a page each lie before, around and behind the first query, which comes after cached tokens or none."""
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", 1)
    if not fused:
        monkeypatch.setattr(torch_flash, "DTYPES", ())
    for dims in DIMS:
        Attention(dtype, 3, page_size, (40, 33, 48, 1), (40, 20, 1, 1), dims).check("mla_prefill", "torch")


@every_dtype
def test_torch_attends_without_its_fused_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none where products of finite numbers may overflow."""
    monkeypatch.setattr(torch_flash, "DTYPES", ())
    for count, dims in ((0, DIMS[0]), (1, DIMS[1]), (5, DIMS[3])):
        contexts = contexts_of(16, count)
        Attention(dtype, 4, 16, contexts, query_lens_of(contexts), dims).check("mla_prefill", "torch")


@every_dtype
def test_torch_queries_before_a_row_that_is_not_finite_keep_what_they_see(dtype: torch.dtype) -> None:
    case = Attention(dtype, 3, 16, (40,), (30,))
    spoilt = case.pages
    spoilt[case.owned[0][1], 9] = torch.nan  # position 25, query 15
    good, got = (case.run("mla_prefill", "torch", "cpu", pages) for pages in (case.pages, spoilt))
    assert torch.equal(got[:15], good[:15])
    assert got[15:].isnan().all()
