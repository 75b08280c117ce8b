"""Ops over pages in two parts do what they do over whole rows, for every provider, as in test_ops."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, PrefillCache, TokenCache
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.resolve import explain_backends, resolve_ops
from pdinfer.kernels.spec import OpSpec
from tests.conformance.op_suite import (
    SCALE,
    Attention,
    contexts_of,
    draw,
    for_every_op,
    op_of,
    query_lens_of,
    within_host,
)
from tests.joined import for_each
from tests.rounding import gamma

LATENT = 16
ATTENTIONS = {name: (name,) for name in ("mla_prefill", "mla_decode", "mla_sparse")}
INDEXERS = {name: (name,) for name in ("index_topk", "index_topk_decode")}
HEADS, WIDTH, TOP_K = 3, 8, 5
every_size = for_each(("page_size", "count"), [*product((3, 16), (0, 5))])


def over_parts(provider: str, name: str, device: str, dtype: torch.dtype) -> Any:
    spec = OpSpec(device=device, dtype=dtype, rope_apart=True, index_format="int8")
    return within_host(resolve_ops(spec, forced={name: provider}).ops[name])


def attend(op: Any, name: str, case: Attention, pages: Any, device: str) -> Tensor:
    """Run one of the ops on the inputs of a case, with its pages in any form."""
    table, wide = case.table.to(device), case.wide_table.to(device)
    if name == "mla_prefill":
        q, kv_b = (x.to(device) for x in case.of_prefill)
        cache = PrefillCache(pages, table, case.query_lens, case.contexts)
        return op(q, kv_b, cache, v_head_dim=case.dims[3], scale=SCALE)
    q_latent, q_rope = (x.to(device) for x in case.of_decode)
    if name == "mla_decode":
        lens_B = torch.tensor(case.contexts, dtype=torch.int64, device=device)
        return op(q_latent, q_rope, DecodeCache(pages, wide, lens_B), scale=SCALE)
    sequence_T = torch.arange(len(case.contexts), device=device)
    selected = [sorted({0, context // 2, context - 1}) for context in case.contexts]
    selected_TS = torch.tensor([[*row, *[-1] * (3 - len(row))] for row in selected], dtype=torch.int64, device=device)
    cache_T = TokenCache(pages, table, sequence_T)
    return op(q_latent[:, 0], q_rope[:, 0], cache_T, selected_TS.view(-1, 3), scale=SCALE)


@for_every_op("name", ATTENTIONS)
@every_size
def test_attention_over_parts_is_that_over_whole_rows(
    provider: str, device: str, dtype: torch.dtype, name: str, page_size: int, count: int
) -> None:
    """Bit by bit: a provider sees the same rows, in pages with other numbers."""
    contexts = contexts_of(page_size, count)
    case = Attention(dtype, 3, page_size, contexts, query_lens_of(contexts), spare_columns=2)
    pages = case.pages.to(device)
    parts = tuple(part.contiguous() for part in pages.tensor_split((LATENT,), -1))
    got = attend(over_parts(provider, name, device, dtype), name, case, parts, device)
    expected = attend(op_of(provider, name, device, dtype), name, case, pages, device)
    assert torch.equal(got.cpu(), expected.cpu())


@for_every_op("name", INDEXERS)
@every_size
def test_an_indexer_chooses_by_the_values_of_int8_keys(
    provider: str, device: str, dtype: torch.dtype, name: str, page_size: int, count: int
) -> None:
    contexts = contexts_of(page_size, count)
    case = Attention(dtype, HEADS, page_size, contexts, query_lens_of(contexts))
    num_pages = sum(map(len, case.owned)) + 1
    keys = draw(num_pages * page_size, WIDTH).to(dtype)
    parts = [part.view(num_pages, page_size, -1).to(device) for part in cache_rows.int8_index_rows(keys)]
    values = parts[0].float() * parts[1].float()

    def choose(op: Any, pages: Any, dtype: torch.dtype) -> Tensor:
        table = case.table.to(device)
        if name == "index_topk":
            q, weights = draw(sum(case.query_lens), HEADS, WIDTH, seed=1), draw(sum(case.query_lens), HEADS, seed=2)
            cache: Any = PrefillCache(pages, table, case.query_lens, contexts)
        else:
            q, weights = draw(len(contexts), 1, HEADS, WIDTH, seed=1), draw(len(contexts), 1, HEADS, seed=2)
            cache = DecodeCache(pages, table, torch.tensor(contexts, dtype=torch.int64, device=device))
        chosen: Tensor = op(q.to(case.dtype).to(dtype).to(device), weights.to(device), cache, top_k=TOP_K)
        return chosen.cpu()

    got = choose(over_parts(provider, name, device, dtype), tuple(parts), dtype)
    assert torch.equal(got, choose(op_of("reference", name, device), values, torch.float32))


def test_stores_write_both_parts() -> None:
    ops = resolve_ops(OpSpec(device="cpu", dtype=torch.bfloat16, rope_apart=True, index_format="int8")).ops
    slots_T = torch.tensor([7, 0, 4])
    rows_TW, keys_TY = draw(3, 6).bfloat16(), draw(3, WIDTH, seed=1).bfloat16()
    latents, ropes = torch.zeros(4, 2, 4, dtype=torch.bfloat16), torch.zeros(4, 2, 2, dtype=torch.bfloat16)
    ops.store_latent((latents, ropes), slots_T, *rows_TW.split((4, 2), -1))
    assert torch.equal(torch.cat((latents, ropes), -1).view(8, 6)[slots_T], rows_TW)
    assert latents.view(8, 4)[[1, 2, 3, 5, 6]].eq(0).all()
    numbers, scale = torch.zeros(4, 2, WIDTH, dtype=torch.int8), torch.zeros(4, 2, 1, dtype=torch.float16)
    ops.store_index_keys((numbers, scale), slots_T, keys_TY)
    written = cache_rows.int8_index_rows(keys_TY)
    assert torch.equal(numbers.view(8, -1)[slots_T], written[0])
    assert torch.equal(scale.view(8, -1)[slots_T], written[1])


def test_an_int8_key_is_within_half_a_step_of_its_scale() -> None:
    """The step is the scale as float16 holds it. A key of zeros stays one; one that is not finite is lost whole."""
    keys = draw(200, WIDTH) * torch.logspace(-5, 5, 200)[:, None]
    keys[0] = 0
    numbers, scale = cache_rows.int8_index_rows(keys)
    assert (numbers.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float16, (200, 1))
    assert (numbers[100:].abs().amax(-1) == 127).all()
    error = (cache_rows.int8_index_keys(numbers, scale) - keys).abs()
    assert (error <= 0.5 * (1 + gamma(3)) * scale.float()).all()
    assert numbers[0].eq(0).all()
    keys[1, 3], keys[2, 3] = torch.nan, torch.inf
    values = cache_rows.int8_index_keys(*cache_rows.int8_index_rows(keys))
    assert not values[1:3].isfinite().any()


def test_what_is_joined_is_told() -> None:
    table = explain_backends(OpSpec(device="cpu", rope_apart=True, index_format="int8"))
    joined = "joins the two parts of each page that a call reads"
    assert table.count(joined) == 5
    assert joined not in explain_backends(OpSpec(device="cpu"))
    assert explain_backends(OpSpec(device="cpu", rope_apart=True)).count(joined) == 3


@pytest.mark.parametrize("wrong", [{"rope_apart": 1}, {"index_format": "fp8"}], ids=str)
def test_a_spec_takes_no_other_parts(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(wrong))):
        OpSpec(device="cpu", **wrong)
