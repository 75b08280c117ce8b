"""A dispatcher brings every token to its experts and sums what they return, however tokens are spread over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdinfer.kernels.resolve import resolve_ops
from pdinfer.moe.dispatch import LocalDispatcher

WIDTH = 3
OPS = resolve_ops(torch.device("cpu"), torch.float32).ops


@st.composite
def routed(draw: st.DrawFn) -> tuple[int, Tensor, Tensor, Tensor]:
    """(experts, x_TD, ids_TK, weights_TK): any number of tokens, each with K different experts."""
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    ids = draw(st.lists(st.permutations(range(num_experts)), max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids_TK = torch.tensor([row[:top_k] for row in ids], dtype=torch.int64).view(-1, top_k)
    x_TD = torch.randn(len(ids), WIDTH, generator=generator)
    return num_experts, x_TD, ids_TK, torch.rand(ids_TK.shape, generator=generator)


@given(routed())
def test_each_expert_gets_its_tokens(case: tuple[int, Tensor, Tensor, Tensor]) -> None:
    num_experts, x_TD, ids_TK, weights_TK = case
    dispatched = LocalDispatcher(num_experts, OPS).dispatch(x_TD, ids_TK, weights_TK)
    assert (dispatched.counts_E.dtype, dispatched.counts_E.device.type) == (torch.int64, "cpu")
    assert len(dispatched.counts_E) == num_experts
    parts = dispatched.x_SD.split(dispatched.counts_E.tolist())
    for expert, rows in enumerate(parts):
        expected = x_TD[(ids_TK == expert).any(-1)]
        assert sorted(rows.tolist()) == sorted(expected.tolist())


@given(routed())
def test_combining_is_the_weighted_sum_over_experts(case: tuple[int, Tensor, Tensor, Tensor]) -> None:
    """Expert e multiplies by e + 2, so that a row given to another expert or token shows."""
    num_experts, x_TD, ids_TK, weights_TK = case
    dispatcher = LocalDispatcher(num_experts, OPS)
    dispatched = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    expert_S = torch.arange(num_experts).repeat_interleave(dispatched.counts_E)
    got = dispatcher.combine(dispatched.x_SD * (expert_S + 2)[:, None], dispatched)
    expected = x_TD * (weights_TK * (ids_TK + 2)).sum(-1, keepdim=True)
    assert (got.dtype, got.shape) == (torch.float32, x_TD.shape)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_keep_their_dtype_and_the_sum_is_float32(dtype: torch.dtype) -> None:
    """1 + 2^-12 is no bfloat16: a sum that was rounded on its way would lose the small part."""
    dispatcher = LocalDispatcher(2, OPS)
    dispatched = dispatcher.dispatch(
        torch.ones(1, 1, dtype=dtype), torch.tensor([[1, 0]]), torch.tensor([[1.0, 2**-12]])
    )
    assert dispatched.x_SD.dtype == dtype
    combined = dispatcher.combine(dispatched.x_SD, dispatched)
    assert combined.tolist() == [[1 + 2**-12]]
