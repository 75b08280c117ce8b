"""Products with weights of four bits, for every provider: they are those of the floats that the weights stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels import reference
from pdinfer.kernels.formats.four_bits import MXFP4, FourBits, Int4, packed, quantize_int4, quantize_mxfp4
from tests.conformance.op_suite import (
    ROWS,
    Rows,
    assert_experts,
    draw,
    every_place,
    floats_of,
    for_every_provider,
    four_bits_in_strips,
    fused_of,
    op_of,
)
from tests.joined import for_each
from tests.rounding import assert_within, error_of_products

FORMATS = {"int4": (Int4, quantize_int4), "mxfp4": (MXFP4, quantize_mxfp4)}


def weight_of(name: str, floats: Tensor) -> FourBits:
    kind, quantize = FORMATS[name]
    numbers, scale = quantize(floats)
    return kind(numbers=numbers, scale=scale)


@for_every_provider("linear[int4]", "linear[mxfp4]")
@for_each("name", FORMATS)
@for_each("rows", [0, 1, 3, 17])
@for_each(("outs", "width"), [(1, 32), (24, 96), (130, 288)])
def test_linear(dtype: torch.dtype, provider: str, device: str, name: str, rows: int, outs: int, width: int) -> None:
    x, weight = draw(rows, width).to(dtype), weight_of(name, draw(outs, width, seed=1) * 3)
    moved = weight.map(lambda tensor: tensor.to(device))
    got = op_of(provider, f"linear[{name}]", device, dtype)(x.to(device), moved)
    floats = floats_of(weight)
    assert got.dtype == dtype
    assert_within(got, reference.linear(x.double(), floats), error_of_products(x.double(), floats), dtype)


@every_place("linear[int4]", "linear[mxfp4]", dtype=torch.bfloat16)
@for_each("name", FORMATS)
def test_every_code_and_the_ends_of_scales(provider: str, device: str, name: str) -> None:
    """Each row has each code twice. A bfloat16 has no exponent for the least scale of MXFP4, and only subnormal numbers
    hold the lower bits of INT4's smallest."""
    numbers = packed(torch.arange(32, dtype=torch.uint8).remainder(16).repeat(4, 1))
    if name == "int4":
        scale = torch.tensor([[2.0**-126 * (1 + 127 / 128)], [1 + 1 / 128], [255 / 128], [2.0**110]]).bfloat16()
    else:
        scale = torch.tensor([[0], [1], [127], [240]], dtype=torch.uint8)
    weight = FORMATS[name][0](numbers=numbers, scale=scale)
    floats, moved = floats_of(weight), weight.map(lambda tensor: tensor.to(device))
    run = op_of(provider, f"linear[{name}]", device, torch.bfloat16)
    for size, rows in ((2.0**110, slice(0, 2)), (2.0**-20, slice(2, 4))):
        x = (draw(32, 32) * size).bfloat16()
        got, exact = run(x.to(device), moved.rows(rows)), x.double()
        expected, error = reference.linear(exact, floats[rows]), error_of_products(exact, floats[rows])
        assert_within(got, expected, error, torch.bfloat16)


@every_place("grouped_mlp[int4]", "grouped_mlp[mxfp4]", dtype=torch.bfloat16)
@for_each("name", FORMATS)
@for_each("counts", [(0,), (3, 0, 1), (40, 2)])
@for_each("form", ROWS)
def test_grouped_mlp(provider: str, device: str, name: str, form: Rows, counts: tuple[int, ...]) -> None:
    x = draw(sum(counts), 288).bfloat16()
    gate_up = weight_of(name, draw(len(counts), 64, 288, seed=1) * 288**-0.5)
    down = weight_of(name, draw(len(counts), 288, 32, seed=2) * 32**-0.5)
    run = op_of(provider, f"grouped_mlp[{name}]", device, torch.bfloat16)
    moved = [each.map(lambda tensor: tensor.to(device)) for each in (gate_up, down)]
    got = form.run(lambda rows, counts_E: run(rows, counts_E, *moved), x.to(device), counts)
    assert_experts(got, counts, x, floats_of(gate_up), floats_of(down), torch.bfloat16)


@every_place("linear[int4_strips]", "linear[mxfp4_strips]", dtype=torch.bfloat16)
@for_each("name", FORMATS)
@for_each("rows", [0, 1, 5, 40])
@for_each("parts", [1, 2])
def test_linear_in_strips(provider: str, device: str, name: str, rows: int, parts: int) -> None:
    x, weight = draw(rows, 288).bfloat16(), weight_of(name, draw(parts * 96, 288, seed=1) * 3)
    run = fused_of(provider, f"linear[{name}_strips]", device, torch.bfloat16)
    got = run(x.to(device), four_bits_in_strips(weight, parts).map(lambda tensor: tensor.to(device)))
    floats = floats_of(weight)
    assert_within(got, reference.linear(x.double(), floats), error_of_products(x.double(), floats), torch.bfloat16)


@every_place("grouped_mlp[int4_strips]", "grouped_mlp[mxfp4_strips]", dtype=torch.bfloat16)
@for_each("name", FORMATS)
@for_each("counts", [(0,), (3, 0, 1), (40, 2)])
@for_each("form", ROWS)
def test_grouped_mlp_in_strips(provider: str, device: str, name: str, form: Rows, counts: tuple[int, ...]) -> None:
    x = draw(sum(counts), 64).bfloat16()
    gate_up = weight_of(name, draw(len(counts), 64, 64, seed=1) / 8)
    down = weight_of(name, draw(len(counts), 64, 32, seed=2) * 32**-0.5)
    run = fused_of(provider, f"grouped_mlp[{name}_strips]", device, torch.bfloat16)
    strips = four_bits_in_strips(gate_up, 2), four_bits_in_strips(down)
    moved = [each.map(lambda tensor: tensor.to(device)) for each in strips]
    got = form.run(lambda rows, counts_E: run(rows, counts_E, *moved), x.to(device), counts)
    assert_experts(got, counts, x, floats_of(gate_up), floats_of(down), torch.bfloat16)
