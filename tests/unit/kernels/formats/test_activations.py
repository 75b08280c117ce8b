"""Rows in FP8 are indexed, gathered and read as the floats they stand for, wherever their scales lie."""

from __future__ import annotations

import pytest
import torch

from pdinfer.kernels import reference
from pdinfer.kernels.formats.activations import FP8Rows
from tests.conformance.op_suite import draw, for_tma


@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize(
    "index",
    [slice(1, 4), slice(0, 0), torch.tensor([4, 0, 4]), torch.tensor([True, False, False, True, True])],
    ids=str,
)
def test_rows_are_taken_with_their_scales(by_groups: bool, index: slice | torch.Tensor) -> None:
    rows = quantized(5, 300)
    rows = for_tma(rows) if by_groups else rows
    taken = rows[index]
    assert torch.equal(taken.floats(), rows.floats()[index])
    assert (taken.dtype, taken.scales_TN.is_contiguous()) == (torch.bfloat16, True)


def test_rows_are_gathered_with_their_scales() -> None:
    rows, index = for_tma(quantized(5, 300)), torch.tensor([4, 0, 4])
    gathered = rows.index_select(0, index)
    assert torch.equal(gathered.floats(), rows.floats()[index])
    assert gathered.scales_TN.is_contiguous()


def test_rows_of_a_room_are_taken_by_two_indices() -> None:
    room = quantized(2, 3, 300)
    assert torch.equal(room[1, :2].floats(), room.floats()[1, :2])


def test_floats_beside_rows_have_their_dtype() -> None:
    rows = quantized(5, 300)
    assert (rows.new_empty(rows.shape).dtype, rows.floats().dtype) == (torch.bfloat16, torch.bfloat16)
    assert (len(rows), rows.ndim, rows.shape) == (5, 2, (5, 300))


def quantized(*shape: int) -> FP8Rows:
    scaled = draw(*shape) * torch.arange(1, shape[-2] + 1)[:, None]
    return reference.quantize_fp8(scaled.to(torch.bfloat16), ue8m0=False)
