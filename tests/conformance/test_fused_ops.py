"""Fused ops, for every provider, and for the compositions of each provider's own ops, which are their specification."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import Ops, OpSpec, reference, resolve_ops
from tests.conformance.op_suite import draw, for_every_provider, op_of
from tests.rounding import assert_within, error_of_norm


def fused_of(provider: str, name: str, device: str, dtype: torch.dtype) -> Any:
    """Return the op of a provider, or the composition of its ops where it has no such op and all others."""
    try:
        return getattr(resolve_ops(OpSpec(device=device, dtype=dtype), forced=provider).ops, name)
    except BackendUnavailable:
        return op_of(provider, name, device, dtype)


def ops_of(dtype: torch.dtype) -> Ops:
    return resolve_ops(OpSpec(device="cpu", dtype=dtype), forced="torch").ops


every_residual = pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])


@for_every_provider
@every_residual
@pytest.mark.parametrize(("rows", "width"), [(0, 7), (1, 1), (1, 48), (5, 7), (5, 48), (3, 264)])
def test_add_rms_norm(provider: str, device: str, dtype: torch.dtype, residual: bool, rows: int, width: int) -> None:
    op = fused_of(provider, "add_rms_norm", device, dtype)
    x, stream, weight = norm_inputs(rows, width, dtype, device, residual)
    before = x.clone(), None if stream is None else stream.clone()
    normed, total = op(x, stream, weight, 1e-6)
    check_sum(total, *before)
    assert torch.equal(x, before[0])
    assert stream is None or torch.equal(stream, before[1])
    total, weight = total.cpu().double(), weight.cpu().double()
    assert_within(normed, reference.rms_norm(total, weight, 1e-6), error_of_norm(total, weight, None, 1e-6), dtype)


@for_every_provider
@every_residual
@pytest.mark.parametrize("ue8m0", [False, True], ids=["any-scale", "ue8m0"])
@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 1), (5, 128), (4, 300)])
def test_add_rms_norm_fp8(
    provider: str, device: str, dtype: torch.dtype, residual: bool, ue8m0: bool, rows: int, width: int
) -> None:
    x, stream, weight = norm_inputs(rows, width, dtype, device, residual)
    both, total = fused_of(provider, "add_rms_norm_fp8", device, dtype)(x, stream, weight, 1e-6, ue8m0=ue8m0)
    check_sum(total, x, stream)
    exact, wide = total.cpu().double(), weight.cpu().double()
    error = error_of_norm(exact, wide, None, 1e-6)
    assert_within(both.floats_TI, reference.rms_norm(exact, wide, 1e-6), error, dtype)
    expected = reference.quantize_fp8(both.floats_TI, ue8m0=ue8m0)
    assert torch.equal(both.rows.floats(), expected.floats())
    assert torch.equal(both.rows.scales_TN, expected.scales_TN)
    assert (both.rows.dtype, both.rows.ue8m0) == (dtype, ue8m0)


def norm_inputs(
    rows: int, width: int, dtype: torch.dtype, device: str, residual: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    x, stream = (draw(rows, width, seed=seed).to(dtype).to(device) for seed in (0, 2))
    x[1:2] *= 1000
    x[2:3], stream[2:3] = 0, 0
    return x, stream if residual else None, draw(width, seed=1).to(dtype).to(device)


def check_sum(total: Tensor, x: Tensor, stream: Tensor | None) -> None:
    """Both addends are exact, so the sum is rounded once, which has one result."""
    assert total.dtype == x.dtype
    assert torch.equal(total, x if stream is None else stream + x)


@for_every_provider
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("spoilt", [0, 1], ids=["x", "residual"])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_rms_norm_fp8"])
def test_a_row_that_is_not_finite_stays_so(
    provider: str, device: str, dtype: torch.dtype, bad: float, spoilt: int, name: str
) -> None:
    op = fused_of(provider, name, device, dtype)
    more = {"ue8m0": True} if name.endswith("fp8") else {}
    x, stream, weight = norm_inputs(4, 130, dtype, device, residual=True)
    good, good_sum = op(x, stream, weight, 1e-6, **more)
    (x, stream)[spoilt][3, 129] = bad  # type: ignore[index]
    got, got_sum = op(x, stream, weight, 1e-6, **more)
    forms = [(good, got)] if not more else [(good.floats_TI, got.floats_TI), (good.rows.floats(), got.rows.floats())]
    for before, after in (*forms, (good_sum, got_sum)):
        assert not after[3].isfinite().all()
        assert torch.equal(after[:3], before[:3])


def test_a_composition_calls_the_op_that_was_swapped() -> None:
    def doubled(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return 2 * x_TD

    ops = attrs.evolve(ops_of(torch.float32), rms_norm=doubled)
    x, weight = draw(2, 128), torch.ones(128)
    assert torch.equal(ops.add_rms_norm(x, x, weight, 0)[0], 4 * x)
    assert torch.equal(ops.add_rms_norm_fp8(x, x, weight, 0, ue8m0=False)[0].floats_TI, 4 * x)


def test_a_composition_is_of_the_ops_that_were_chosen() -> None:
    ops = resolve_ops(OpSpec(device="cpu", dtype=torch.float32), forced={"rms_norm": "reference"}).ops
    assert ops.add_rms_norm.args[0].rms_norm is reference.rms_norm  # type: ignore[attr-defined]
    assert ops.add_rms_norm.args[0].linear is ops.linear  # type: ignore[attr-defined]
