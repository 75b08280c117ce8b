"""Experts of the torch provider on a device: what a decode step runs waits for nothing, whatever the format."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels.formats.format import Weight
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.weights import map_tensors
from pdinfer.kernels.spec import DeviceSpec
from pdinfer.kernels.torch import experts as torch_experts
from pdinfer.kernels.torch import products as torch_products
from pdinfer.testing import random_model
from tests.conformance.op_suite import ROWS, Rows, draw, fp8_weight, int8_weight, static_weight
from tests.simulated.watch import Watch
from tests.unit.kernels.test_torch_products import BlockwiseProducts

COUNTS = (3, 0, 1, 5)
SIZES = 256, 128  # hidden, of an expert
CARDS = {"unknown": DeviceSpec("privateuseone"), "H200": DeviceSpec.of("H200")}


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceSpec:
    """What the simulated device says that it is."""
    found = CARDS[request.param]
    for module in (torch_products, torch_experts):
        monkeypatch.setattr(module, "card", lambda device: found if device.type != "cpu" else DeviceSpec("cpu"))
    monkeypatch.setattr(F, "scaled_mm", BlockwiseProducts(), raising=False)
    monkeypatch.setattr(F, "grouped_mm", Mock(side_effect=grouped_mm), raising=False)
    return found


def grouped_mm(x_SD: Tensor, weight_EDO: Tensor, *, offs: Tensor) -> Tensor:
    """A stand-in for the function of that name on a Hopper card, where it leaves the rows behind the last as they were.
    It checks what torch's GroupedBlas.cpp and GroupMM.cu do."""
    assert (offs.dtype, offs.device) == (torch.int32, x_SD.device)
    assert {x_SD.dtype, weight_EDO.dtype} == {torch.bfloat16}
    assert x_SD.is_contiguous()
    assert weight_EDO.mT.is_contiguous()
    assert not any(size % 8 for size in weight_EDO.shape[1:])
    assert len(weight_EDO) == len(offs) < 1024
    row_S = torch.arange(len(x_SD), device=x_SD.device)
    expert_S = torch.searchsorted(offs.long(), row_S, right=True)
    y_SO = torch.full((len(x_SD), weight_EDO.shape[2]), torch.nan, dtype=x_SD.dtype, device=x_SD.device)
    for index, weight_DO in enumerate(weight_EDO):
        y_SO = torch.where((expert_S == index)[:, None], x_SD @ weight_DO, y_SO)
    return y_SO


def stacks(kind: str, dtype: torch.dtype) -> tuple[Weight, Weight]:
    """Return gate_up and down of as many experts as there are counts."""
    (hidden, width), experts = SIZES, len(COUNTS)
    if kind == "fp8":
        return fp8_weight(experts, width, hidden, parts=2), fp8_weight(experts, hidden, width)
    if kind == "int8":
        return int8_weight(experts, 2 * width, hidden), int8_weight(experts, hidden, width)
    gate_up, down = draw(experts, 2 * width, hidden, seed=1), draw(experts, hidden, width, seed=2)
    return (gate_up * hidden**-0.5).to(dtype), (down * width**-0.5).to(dtype)


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["grouped_mlp", "fp8", "int8"])
def test_experts_wait_for_nothing_and_give_what_a_cpu_gives(
    device: torch.device, card: DeviceSpec, kind: str, dtype: torch.dtype, form: Rows
) -> None:
    of_format = {"fp8": torch_experts.grouped_mlp_fp8, "int8": torch_experts.grouped_mlp_w8a8_dynamic}
    run: Any = of_format.get(kind, torch_experts.grouped_mlp)
    gate_up, down = stacks(kind, dtype)
    x_SD = draw(sum(COUNTS), SIZES[0]).to(dtype)
    expected = form.run(lambda x, counts_E: run(x, counts_E, gate_up, down), x_SD, COUNTS)
    there = [map_tensors(stack, lambda tensor: tensor.to(device)) for stack in (gate_up, down)]

    def watched(x: Tensor, counts_E: Tensor) -> Tensor:
        x, counts_E = x.to(device), counts_E.to(device)
        with Watch() as watch:
            y = run(x, counts_E, *there)
        assert not watch.counts["syncs"] + watch.counts["pageable"]
        return y.cpu()

    got = form.run(watched, x_SD, COUNTS)
    on_hopper = card.capability is not None
    grouped = on_hopper and kind == "grouped_mlp" and dtype == torch.bfloat16 and not form.room
    assert cast(Any, F.grouped_mm).call_count == (2 if grouped else 0)
    by_blocks = on_hopper and kind == "fp8" and dtype == torch.bfloat16
    assert cast(Any, F.scaled_mm).calls == (2 * len(COUNTS) if by_blocks else 0)
    # roundings in between may fall to the other side, by one step; an expert's rows differ from another's by their size
    step = {"grouped_mlp": torch.finfo(dtype).eps, "fp8": 2**-4, "int8": 2**-5}[kind]
    torch.testing.assert_close(got, expected, rtol=0, atol=4 * step * float(expected.abs().max()))


def test_many_rows_wait_once(device: torch.device, card: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_experts, "FEW_ROWS", sum(COUNTS) - 1)
    gate_up, down = (map_tensors(stack, lambda tensor: tensor.to(device)) for stack in stacks("int8", torch.float32))
    assert isinstance(gate_up, Int8Dynamic)
    assert isinstance(down, Int8Dynamic)
    x_SD, counts_E = draw(sum(COUNTS), SIZES[0]).to(device), torch.tensor(COUNTS).to(device)
    with Watch() as watch:
        torch_experts.grouped_mlp_w8a8_dynamic(x_SD, counts_E, gate_up, down)
    assert watch.totals()["syncs"] == 1


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("static", [False, True])
def test_int8_products_are_padded_to_what_cuda_takes(
    device: torch.device, card: DeviceSpec, rows: int, static: bool
) -> None:
    """The simulated device refuses what torch refuses on CUDA, and counts what is new: products of floats copy the
    matrix to float64."""
    x_TI = draw(rows, 48)
    weight: Any = static_weight(24, 48, 2) if static else int8_weight(24, 48)
    op: Any = torch_products.linear_w8a8 if static else torch_products.linear_w8a8_dynamic
    there = map_tensors(weight, lambda tensor: tensor.to(device))
    with Watch() as watch:
        got = op(x_TI.to(device), there)
    torch.testing.assert_close(got.cpu(), op(x_TI, weight))
    fused = any(line.startswith("_int_mm ") for line in watch.counts["launches"])
    assert fused is (card.capability is not None)


def test_int8_products_of_odd_sizes_go_through_floats(device: torch.device, card: DeviceSpec) -> None:
    x_TI, weight = draw(3, 47), int8_weight(13, 47)
    there = map_tensors(weight, lambda tensor: tensor.to(device))
    assert isinstance(there, Int8Dynamic)
    torch.testing.assert_close(
        torch_products.linear_w8a8_dynamic(x_TI.to(device), there).cpu(),
        torch_products.linear_w8a8_dynamic(x_TI, weight),
    )


@pytest.mark.parametrize("rows", [1, 6])
def test_fp8_products_wait_for_nothing(device: torch.device, card: DeviceSpec, rows: int) -> None:
    x_TI, weight = draw(rows, 256), fp8_weight(144, 256)
    there = map_tensors(weight, lambda tensor: tensor.to(device))
    assert isinstance(there, FP8Blocks)
    x = x_TI.to(device)
    with Watch() as watch:
        got = torch_products.linear_fp8(x, there)
    assert not watch.counts["syncs"] + watch.counts["pageable"]
    torch.testing.assert_close(got.cpu(), torch_products.linear_fp8(x_TI, weight))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_with_padding_waits_for_nothing(device: torch.device, overlap: bool) -> None:
    on_cpu, there = (random_model(device=where).moe_layers()[0] for where in ("cpu", device))
    object.__setattr__(there, "two_batch_overlap", overlap)
    x_TD = draw(5, on_cpu.router.weight_ED.shape[1])
    live_T = torch.tensor([True, True, False, True, False])
    expected = on_cpu(x_TD, None, live_T)
    x_TD, live_T = x_TD.to(device), live_T.to(device)
    with Watch() as watch:
        got = there(x_TD, None, live_T)
    assert not watch.counts["syncs"] + watch.counts["pageable"]
    torch.testing.assert_close(got.cpu(), expected)
