"""The ops over quantized weights, for every provider, as in test_ops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pdinfer.kernels import reference
from pdinfer.kernels.formats.activations import INT8Rows
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, int8_activation
from pdinfer.kernels.formats.weights import expert, map_tensors
from pdinfer.kernels.torch import products as torch_products
from tests.conformance.op_suite import (
    ROWS,
    Rows,
    draw,
    every_dtype,
    every_place,
    for_every_op,
    for_every_provider,
    for_tma,
    fp8_weight,
    int8_weight,
    op_of,
    static_weight,
)
from tests.joined import for_each, pairs_each_time
from tests.rounding import assert_within, error_of_products, gamma, rounded, unit


def outliers(rows: int, columns: int) -> Tensor:
    """Return activations of several sizes, with a token of zeros and a token that no format holds without a scale."""
    x = draw(rows, columns)
    x[:1] *= 1000
    x[1:2] = 0
    x[2:3] *= 1e-6
    return x


MATRICES = [(1, 1), (7, 13), (48, 97), (128, 256), (129, 300), (328, 136)]


@for_every_provider("linear[fp8]")
@pairs_each_time
@for_each("ue8m0", [False, True])
@for_each("rows", [0, 1, 5])
@for_each(("size", "parts"), [*((size, 1) for size in MATRICES), ((168, 328), 2), ((3, 140), 2)])
def test_linear_fp8(
    provider: str, device: str, dtype: torch.dtype, ue8m0: bool, rows: int, size: tuple[int, int], parts: int
) -> None:
    check_linear_fp8(provider, device, outliers(rows, size[1]).to(dtype), fp8_weight(*size, parts=parts, ue8m0=ue8m0))


MANY_ROWS = (30, 64, 150)
"""Of these a kernel may make tiles of other sizes than of a few, of which the last one is not full."""


@every_place("linear[fp8]", dtype=torch.bfloat16)
@for_each("rows", MANY_ROWS)
@for_each("ue8m0", [False, True])
def test_linear_fp8_of_many_rows(provider: str, device: str, rows: int, ue8m0: bool) -> None:
    x = outliers(rows, 272).to(torch.bfloat16)
    check_linear_fp8(provider, device, x, fp8_weight(200, 272, parts=2, ue8m0=ue8m0))


def check_linear_fp8(provider: str, device: str, x: Tensor, weight: FP8Blocks) -> None:
    dtype = x.dtype
    linear, there = op_of(provider, "linear[fp8]", device, dtype), map_tensors(weight, lambda part: part.to(device))
    got = linear(x.to(device), there)
    rounded_once = op_of("reference", "quantize_fp8", device, dtype)(x.to(device), ue8m0=weight.ue8m0)
    for once in (rounded_once, for_tma(rounded_once)):
        assert torch.equal(linear(once, there), got)
    numbers, worth = by_hand_fp8(x, weight)
    # both factors may be rounded to floats of `dtype` before they are multiplied
    rounded_factors = 2 * unit(dtype) + gamma(4)
    error = error_of_products(numbers, worth) + rounded_factors * (numbers.abs() @ worth.abs().T)
    assert_within(got, numbers @ worth.T, error, dtype)


@every_dtype
@for_each("block_bytes", [1, 7 * 300 * 4])
def test_rows_of_an_fp8_matrix_become_floats_block_by_block(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = outliers(5, 300).to(dtype), fp8_weight(129, 300, parts=2)
    expected = torch_products.linear_fp8(x, weight)
    monkeypatch.setattr(torch_products, "WEIGHT_BLOCK_BYTES", block_bytes)
    numbers, worth = by_hand_fp8(x, weight)
    error = 2 * error_of_products(numbers, worth) + 2 * unit(dtype) * expected.double().abs()
    assert_within(torch_products.linear_fp8(x, weight), expected.double(), error, dtype)


@for_every_provider("quantize_fp8")
@for_each("ue8m0", [False, True])
@for_each("shape", [(0, 128), (5, 1), (5, 128), (4, 300), (2, 3, 136)])
def test_quantize_fp8(provider: str, device: str, dtype: torch.dtype, ue8m0: bool, shape: tuple[int, ...]) -> None:
    x = outliers(math.prod(shape[:-1]), shape[-1]).to(dtype)
    got = op_of(provider, "quantize_fp8", device, dtype)(x.view(shape).to(device), ue8m0=ue8m0)
    assert (got.dtype, got.shape, got.ue8m0) == (dtype, shape, ue8m0)
    assert (got.numbers_TI.dtype, got.scales_TN.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert got.scales_TN.shape == (*shape[:-1], math.ceil(shape[-1] / 128))
    exact = rounded_by_hand(x, ue8m0)
    scales = got.scales_TN.cpu().double().repeat_interleave(128, -1)[..., : shape[-1]]
    value = (got.numbers_TI.cpu().double() * scales).view(x.shape)
    assert ((value - exact).abs() <= gamma(2) * exact.abs()).all()
    assert_within(got.floats().view(x.shape), exact, gamma(2) * exact.abs(), dtype)
    if ue8m0:
        assert (got.scales_TN.log2().frac() == 0).all()


@for_every_op("name", {name: (name,) for name in ("quantize_fp8", "round_fp8", "round_int8")})
def test_what_is_rounded_is_equal_on_every_device(provider: str, device: str, dtype: torch.dtype, name: str) -> None:
    x = outliers(6, 300).to(dtype)
    x[4], x[5, :128] = 0, torch.linspace(-448, 448, 128)  # at any scale, ties among them
    x[5, 128:256] = torch.logspace(-14, 8, 128, base=2)  # down to what is no normal number of e4m3
    op = op_of(provider, name, device, dtype)
    for options in ({},) if name == "round_int8" else ({"ue8m0": False}, {"ue8m0": True}):
        got = op(x.to(device), **options)
        if name == "round_int8":
            assert torch.equal(got.cpu(), reference.round_int8(x))
            continue
        expected = reference.quantize_fp8(x, **options)
        if name == "quantize_fp8":
            assert torch.equal(got.numbers_TI.cpu().view(torch.uint8), expected.numbers_TI.view(torch.uint8))
            assert torch.equal(got.scales_TN.cpu(), expected.scales_TN)
        else:
            assert torch.equal(got.cpu(), expected.floats())


def by_hand_fp8(x: Tensor, weight: FP8Blocks) -> tuple[Tensor, Tensor]:
    """Return the values of activations and weights in float64."""
    rows, columns = weight.numbers.shape
    of_part = math.ceil(rows // weight.parts / 128)
    parts = (divmod(row, rows // weight.parts) for row in range(rows))
    scale = weight.scale[[part * of_part + within // 128 for part, within in parts]].double()
    worth = weight.numbers.double() * scale.repeat_interleave(128, 1)[:, :columns]
    return rounded_by_hand(x, weight.ue8m0), worth


def rounded_by_hand(x: Tensor, ue8m0: bool) -> Tensor:
    """Return the value of x rounded to FP8, block by block, in float64."""
    rounded = []
    for block in x.double().split(128, -1):
        scale = block.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        if ue8m0:
            fraction, exponent = scale.frexp()  # from 1/2 on; a power of two stays one
            scale = torch.ones_like(scale).ldexp(exponent - (fraction == 0.5).int())
        rounded.append((block / scale).to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(rounded, -1)


@for_every_provider("linear[w8a8_dynamic]")
@for_each("rows", [0, 1, 5])
@for_each("size", MATRICES)
def test_linear_int8(provider: str, device: str, dtype: torch.dtype, rows: int, size: tuple[int, int]) -> None:
    check_linear_int8(provider, device, outliers(rows, size[1]).to(dtype), size)


@every_place("linear[w8a8_dynamic]", dtype=torch.bfloat16)
@for_each("rows", MANY_ROWS)
def test_linear_int8_of_many_rows(provider: str, device: str, rows: int) -> None:
    check_linear_int8(provider, device, outliers(rows, 272).to(torch.bfloat16), (200, 272))


def check_linear_int8(provider: str, device: str, x: Tensor, size: tuple[int, int]) -> None:
    dtype, rows, weight = x.dtype, len(x), int8_weight(*size)
    got = op_of(provider, "linear[w8a8_dynamic]", device, dtype)(x.to(device), int8_weight(*size, device=device))
    # a float32 quotient decides what is rounded up; then sums are exact, and two scales multiply them
    scale = (x.float().abs().amax(-1, keepdim=True) if rows else x.float()[:, :1]).clamp(min=1e-10) / 127
    numbers = (x.float() / scale).round().double()
    exact = numbers @ weight.numbers.double().T * scale.double() * weight.scale.double().T
    assert_within(got, exact, gamma(3) * exact.abs(), dtype)


@for_every_provider("linear[w8a8]")
@for_each("rows", [0, 1, 5])
@for_each(("size", "parts"), [*((size, 1) for size in MATRICES), ((24, 48), 2)])
def test_linear_int8_static(
    provider: str, device: str, dtype: torch.dtype, rows: int, size: tuple[int, int], parts: int
) -> None:
    x, weight = draw(rows, size[1]).to(dtype), static_weight(*size, parts)
    got = op_of(provider, "linear[w8a8]", device, dtype)(x.to(device), static_weight(*size, parts, device=device))
    exact = []
    for part, numbers in enumerate(weight.numbers.double().chunk(parts)):
        scaled = (x.float() / weight.input_scale[part]).round().double() + weight.input_offset[part]
        exact.append(scaled.clamp(-128, 127) @ numbers.T)
    sums = torch.cat(exact, -1) + weight.output_offset[:, 0]
    scaled = sums * weight.output_scale[:, 0].double()
    assert_within(got, scaled, gamma(2) * scaled.abs(), dtype)


EXPERTS = {kind: (f"grouped_mlp[{kind}]", f"linear[{kind}]", "gated_silu") for kind in ("fp8", "w8a8_dynamic")}


def check_alike(got: Tensor, expected: Tensor, device: str) -> None:
    """Compare what experts give together with what each gives alone. On a CPU these are the same products. Elsewhere
    they may have other numbers of rows, so float32 sums differ in their last bits; where such a sum is rounded to the
    next step of FP8 or INT8, one term of each result moves by up to a sixteenth of itself."""
    if device == "cpu":
        assert torch.equal(got, expected)
    elif expected.numel():
        assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


@for_every_op("kind", EXPERTS)
@pairs_each_time
@for_each("form", ROWS)
@for_each("counts", [(0,), (3,), (3, 0, 1, 5), (0, 2, 0)])
@for_each("sizes", [(1, 1), (24, 16), (130, 168)])
def test_grouped_mlp_of_quantized_experts(
    provider: str,
    device: str,
    dtype: torch.dtype,
    form: Rows,
    counts: tuple[int, ...],
    sizes: tuple[int, int],
    kind: str,
) -> None:
    check_experts(provider, device, dtype, form, counts, sizes, kind)


@for_every_op("kind", EXPERTS, dtypes=(torch.bfloat16,))
@for_each(
    ("form", "counts"),
    [
        (Rows(), (0, 20, 3, 40)),
        (Rows(behind=5), (2, 131)),
        (Rows(room=1), (40, 0, 7)),
        (Rows(room=1), (130, 3)),
    ],
)
def test_grouped_mlp_of_many_rows(
    provider: str, device: str, dtype: torch.dtype, form: Rows, counts: tuple[int, ...], kind: str
) -> None:
    check_experts(provider, device, dtype, form, counts, (144, 272), kind)


def check_experts(
    provider: str,
    device: str,
    dtype: torch.dtype,
    form: Rows,
    counts: tuple[int, ...],
    sizes: tuple[int, int],
    kind: str,
) -> None:
    (hidden, width), experts = sizes, len(counts)
    gate_up: Any
    down: Any
    if kind == "fp8":
        gate_up = fp8_weight(experts, width, hidden, parts=2, device=device)
        down = fp8_weight(experts, hidden, width, device=device)
    else:
        gate_up = int8_weight(experts, 2 * width, hidden, device=device)
        down = int8_weight(experts, hidden, width, device=device)
    x = draw(sum(counts), hidden).to(dtype)
    run = op_of(provider, f"grouped_mlp[{kind}]", device, dtype)
    got = form.run(lambda rows, counts_E: run(rows, counts_E, gate_up, down), x.to(device), counts)
    one_by_one, linear = [], op_of(provider, f"linear[{kind}]", device, dtype)
    for index, rows in enumerate(torch.split(x.to(device), list(counts))):
        hidden_rows = op_of(provider, "gated_silu", device, dtype)(linear(rows, expert(gate_up, index)))
        one_by_one.append(linear(hidden_rows, expert(down, index)))
    check_alike(got, torch.cat(one_by_one), device)
    if kind == "fp8":
        once = op_of("reference", "quantize_fp8", device, dtype)(x.to(device), ue8m0=False)
        grouped = op_of(provider, "grouped_mlp[fp8]", device, dtype)
        check_alike(grouped(once, torch.tensor(counts, device=device), gate_up, down), got, device)


@for_every_provider("grouped_mlp_int8_rows", "grouped_mlp[w8a8_dynamic]")
@for_each("counts", [(0,), (3,), (3, 0, 1, 5), (0, 2, 0)])
@for_each("sizes", [(1, 1), (24, 16), (130, 168)])
def test_rows_that_were_rounded_before_give_the_same(
    provider: str, device: str, dtype: torch.dtype, counts: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    """And rows that are not finite are not lost."""
    hidden, width = sizes
    gate_up = int8_weight(len(counts), 2 * width, hidden, device=device)
    down = int8_weight(len(counts), hidden, width, device=device)
    x, counts_E = draw(sum(counts), hidden).to(dtype).to(device), torch.tensor(counts, device=device)
    x[1:2, 0] = math.inf
    rows = INT8Rows(*int8_activation(x), dtype=dtype)
    got = op_of(provider, "grouped_mlp_int8_rows", device, dtype)(rows, counts_E, gate_up, down)
    expected = op_of(provider, "grouped_mlp[w8a8_dynamic]", device, dtype)(x, counts_E, gate_up, down)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert not got[1:2].isfinite().any()


@for_every_provider("round_fp8", "linear[fp8]", "round_int8", "linear[w8a8_dynamic]")
@for_each("rows", [0, 4])
@for_each("columns", [1, 128, 200])
def test_rounding_is_what_multiplying_by_one_does(
    provider: str, device: str, dtype: torch.dtype, rows: int, columns: int
) -> None:
    x = outliers(rows, columns).to(dtype).to(device)
    one = torch.eye(columns, device=device)
    fp8 = FP8Blocks(
        numbers=one.to(torch.float8_e4m3fn), scale=torch.ones(*(math.ceil(columns / 128),) * 2, device=device)
    )
    int8 = Int8Dynamic(numbers=one.to(torch.int8), scale=torch.ones(columns, 1, device=device))
    for name, weight, more in (("round_fp8", fp8, {"ue8m0": False}), ("round_int8", int8, {})):
        got = op_of(provider, name, device, dtype)(x, **more)
        exact = op_of(provider, f"linear[{weight.name}]", device, dtype)(x, weight).cpu().double()
        assert_within(got, exact, rounded(exact, gamma(2) * exact.abs(), dtype), dtype)
