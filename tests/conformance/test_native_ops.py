"""Native kernels leave to torch what they cannot read: other dtypes, and elements that lie apart."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from pdinfer.errors import PDInferError
from pdinfer.kernels import reference
from pdinfer.kernels.arguments import DecodeCache, RouterRule
from pdinfer.kernels.native import build
from pdinfer.kernels.ops import function_of
from pdinfer.kernels.torch import provider as torch_provider
from tests.conformance.op_suite import draw, in_strips, op_of
from tests.joined import for_each

OTHER_DTYPES: dict[str, Any] = {
    "rms_norm": lambda dtype: (draw(4, 48).to(dtype), draw(48).to(dtype), 1e-6),
    "linear": lambda dtype: (draw(4, 48).to(dtype), draw(16, 48).to(dtype)),
    "rotate": lambda dtype: (draw(4, 2, 8).to(dtype), draw(4, 4), draw(4, 4, seed=1)),
    "gated_silu": lambda dtype: (draw(4, 48).to(dtype),),
    "grouped_mlp": lambda dtype: (
        draw(4, 48).to(dtype),
        torch.tensor([1, 3]),
        draw(2, 32, 48).to(dtype),
        draw(2, 48, 16).to(dtype),
    ),
    "heads_in": lambda dtype: (draw(4, 2, 48).to(dtype), draw(2, 48, 128).to(dtype)),
    "heads_out": lambda dtype: (draw(4, 2, 48).to(dtype), draw(2, 16, 48).to(dtype)),
    "combine_rows": lambda dtype: (draw(4, 48).to(dtype), torch.tensor([[0, 3], [2, 1]]), draw(2, 2).to(dtype)),
    "gather_rows": lambda dtype: (draw(4, 48).to(dtype), torch.tensor([0, 3, 3])),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_native_ops_leave_other_dtypes_to_torch(name: str, dtype: torch.dtype) -> None:
    """Otherwise they would read their bits as bfloat16."""
    inputs = OTHER_DTYPES[name](dtype)
    op = op_of("native", name, "cpu", torch.bfloat16)
    assert torch.equal(op(*inputs), function_of(torch_provider, name)(*inputs))


@pytest.mark.parametrize("dtypes", [*permutations((torch.float16, torch.float32, torch.bfloat16), 2)], ids=str)
@pytest.mark.parametrize("name", ["linear", "heads_in", "heads_out", "grouped_mlp"])
def test_native_products_of_two_dtypes_are_refused_as_torch_does(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    (first, *rest), (_, *others) = OTHER_DTYPES[name](dtypes[0]), OTHER_DTYPES[name](dtypes[1])
    op = op_of("native", name, "cpu", torch.bfloat16)
    with pytest.raises(RuntimeError, match="type"):
        op(first, *others)
    assert len(rest) == len(others)


def test_native_norm_takes_a_weight_of_another_dtype_from_torch() -> None:
    x, weight = draw(4, 48).bfloat16(), draw(48)
    op = op_of("native", "rms_norm", "cpu", torch.bfloat16)
    assert torch.equal(op(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("name", ["linear", "rms_norm", "gated_silu", "rotate", "heads_in", "heads_out"])
def test_native_ops_read_strided_rows(name: str) -> None:
    """Rows may lie apart, and so may elements."""
    op = op_of("native", name, "cpu", torch.bfloat16)
    x, *rest = OTHER_DTYPES[name](torch.bfloat16)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), -1)
    assert torch.equal(op(wide[..., : x.shape[-1]], *rest), op(x, *rest))
    apart = torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    got = op(apart, *rest)
    assert torch.equal(got, op(x, *rest)) or torch.equal(got, function_of(torch_provider, name)(apart, *rest))


@pytest.mark.parametrize("row", [-1, 3, 2**40])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    op = op_of("native", "gather_rows", "cpu", torch.bfloat16)
    with pytest.raises(PDInferError, match=r"1 of the rows \[2, -?\d+\] are not among 3"):
        op(draw(3, 8).bfloat16(), torch.tensor([2, row]))


@pytest.mark.parametrize("slot", [-1, 12, 2**40])
def test_a_slot_outside_the_cache_is_refused(slot: int) -> None:
    op = op_of("native", "norm_rotate_store", "cpu", torch.bfloat16)
    pages, angles = torch.zeros(3, 4, 40, dtype=torch.bfloat16), draw(2, 4)
    inputs = draw(2, 32).bfloat16(), draw(2, 8).bfloat16(), draw(32).bfloat16(), 1e-6, angles.cos(), angles.sin(), pages
    with pytest.raises(PDInferError, match=r"1 of the slots \[7, -?\d+\] are not among the 12 of the cache"):
        op(*inputs, torch.tensor([7, slot]), rounding=None)
    assert torch.equal(pages.flatten(0, 1).any(-1).nonzero().flatten(), torch.tensor([7]))


# ---- what takes several ops in one call gives the bits of its composition -----------------------------------------

RULE = RouterRule(sigmoid=True, normalize=True, top_k=3, num_groups=4, top_k_groups=2, scaling_factor=2.5)


def both_ways(name: str, *inputs: Any, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a native op gives, and what its composition of native ops does."""
    results = []
    for provider in ("native", "composition"):
        result = op_of(provider, name, "cpu", torch.bfloat16)(*inputs, **options)
        results.append([*result] if isinstance(result, tuple) else [result])
    return results[0], results[1]


@for_each("tokens", [0, 1, 5, 40])
@for_each("width", [32, 45, 167])
def test_choose_experts(tokens: int, width: int) -> None:
    """The router stays float32 in a model whose products are bfloat16."""
    x, weight, bias = draw(tokens, width).bfloat16(), draw(16, width, seed=1) / 8, draw(16, seed=2)
    for given in (bias, None):
        (ids, weights), (other_ids, other_weights) = both_ways("choose_experts", x, weight, given, RULE)
        assert torch.equal(ids, other_ids)
        assert torch.allclose(weights, other_weights, rtol=1e-6)
        logits = reference.linear(x.double(), weight.double()).float()
        expected_ids, expected = reference.route(logits, given, RULE)
        assert torch.equal(ids, expected_ids)
        assert torch.allclose(weights, expected, rtol=1e-5)


@for_each("tokens", [0, 1, 5, 40])
def test_sort_rows(tokens: int) -> None:
    ids = draw(tokens, 9).argsort(-1)[:, :3].contiguous()
    ids[1::2, 0] = -1
    x = draw(tokens, 40).bfloat16()
    (rows, counts, row), (_, other_counts, other_row) = both_ways("sort_rows", x, ids, 9)
    assert torch.equal(counts, other_counts)
    assert torch.equal(row, other_row)
    assert int(counts.sum()) == int((ids >= 0).sum())
    for token, choice in (ids >= 0).nonzero().tolist():
        assert torch.equal(rows[row[token, choice]], x[token])


@for_each("rows", [0, 1, 3, 16, 40, 70])
@for_each("strips", [False, True])
def test_gated_mlp(rows: int, strips: bool) -> None:
    if strips and not build.library().strips_are_served():
        return  # no model has strips here, and products of the composition are torch's
    x, gate_up, down = draw(rows, 64).bfloat16(), draw(64, 64, seed=1).bfloat16(), draw(64, 32, seed=2).bfloat16()
    weights = (in_strips(gate_up, 2), in_strips(down)) if strips else (gate_up, down)
    (got,), (apart,) = both_ways("gated_mlp", x, *weights)
    assert torch.equal(got, apart)


@for_each(("batch", "queries"), [(0, 1), (1, 1), (3, 1), (3, 4), (40, 2)])
@for_each("rank", [128, 96])
@for_each("apart", [False, True])
def test_mla_absorbed(batch: int, queries: int, rank: int, apart: bool) -> None:
    heads, nope, rope, outs = 3, 34, 32, 24
    lens = torch.tensor([queries + 7 * at % 29 for at in range(batch)], dtype=torch.int64)
    pages = draw(batch * 3 + 1, 16, rank + rope).bfloat16()
    table = torch.arange(1, batch * 3 + 1).view(batch, 3)
    q = draw(batch * queries, heads, nope + rope, seed=1).bfloat16()
    q = q.repeat(1, 1, 2)[..., : nope + rope] if apart else q  # a query may be a part of wider rows
    angles = draw(batch * queries, rope // 2, seed=2), draw(batch * queries, rope // 2, seed=3)
    kv_b = (draw(heads, nope + outs, rank, seed=4) / 8).bfloat16()
    weights = kv_b[:, :nope], kv_b[:, nope:]
    (got,), (one_by_one,) = both_ways("mla_absorbed", q, *angles, DecodeCache(pages, table, lens), *weights, scale=0.2)
    assert got.shape == (batch * queries, heads, outs)
    assert torch.equal(got, one_by_one)
