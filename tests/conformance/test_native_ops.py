"""Native kernels leave to torch what they cannot read: other dtypes, and elements that lie apart."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from pdinfer.errors import PDInferError
from pdinfer.kernels import reference
from pdinfer.kernels.ops import function_of
from pdinfer.kernels.torch import provider as torch_provider
from tests.conformance.op_suite import (
    draw,
    op_of,
)

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
    if name in ("linear", "grouped_mlp") and dtype == torch.float32:
        pytest.skip("native has such products: test_a_router_stays_float32")
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
