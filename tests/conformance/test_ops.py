"""Every provider of an op does what the reference does in float64, on every device, for every legal kind of shape.

Here: ops over rows and heads. Beside it stand quantized weights, attention, sparse attention and routing.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from pdinfer.kernels import reference
from tests.conformance.op_suite import (
    ROWS,
    Rows,
    assert_experts,
    assert_product,
    assert_turned,
    draw,
    every_place,
    for_every_provider,
    op_of,
)
from tests.joined import for_each
from tests.rounding import assert_within, error_of_norm, error_of_products, error_of_silu, gamma


@for_every_provider("rms_norm")
@for_each(("rows", "width"), [*product((0, 1, 5), (1, 7, 48))])
def test_rms_norm(provider: str, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = draw(rows, width).to(dtype), draw(width, seed=1).to(dtype)
    x[1:2] *= 1000
    x[2:3] = 0
    got = op_of(provider, "rms_norm", device, dtype)(x.to(device), weight.to(device), 1e-6)
    x, weight = x.double(), weight.double()
    assert_within(got, reference.rms_norm(x, weight, 1e-6), error_of_norm(x, weight, None, 1e-6), dtype)


@for_every_provider("rms_norm")
def test_norms_take_a_part_of_wider_rows(provider: str, device: str, dtype: torch.dtype) -> None:
    norm, weight = op_of(provider, "rms_norm", device, dtype), draw(48, seed=1).to(dtype).to(device)
    wide = draw(5, 80).to(dtype).to(device)
    for part in (wide[:, 7:55], wide[::2, :48]):
        assert torch.equal(norm(part, weight, 1e-6), norm(part.contiguous(), weight, 1e-6))


@for_every_provider("linear")
@for_each(
    ("rows", "sizes"),
    [
        *product((0, 1, 5), ((1, 1), (7, 13), (48, 97), (80, 136))),
        *product((2, 3, 4, 6, 7, 16, 17), ((48, 72), (264, 16))),
    ],
)
def test_linear(provider: str, device: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int]) -> None:
    x, weight = draw(rows, sizes[0]).to(dtype), draw(sizes[1], sizes[0], seed=1).to(dtype)
    got = op_of(provider, "linear", device, dtype)(x.to(device), weight.to(device))
    assert_product(got, x, weight, dtype)


@for_every_provider("gated_silu")
@for_each(("rows", "width"), [*product((0, 1, 5), (1, 7, 24))])
def test_gated_silu(provider: str, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = draw(rows, 2 * width).to(dtype)
    x[1:2] *= 100
    got = op_of(provider, "gated_silu", device, dtype)(x.to(device))
    x = x.double()
    assert_within(got, reference.gated_silu(x), error_of_silu(*x.chunk(2, -1)), dtype)


@for_every_provider("rotate")
@for_each(("rows", "heads", "width"), [*product((0, 1, 5), (1, 3, 4), (2, 6, 8))])
def test_rotate(provider: str, device: str, dtype: torch.dtype, rows: int, heads: int, width: int) -> None:
    x = draw(rows, heads, width + 3).to(dtype).to(device)[..., 3:]  # in models it is a slice too
    before = x.clone()
    angles = draw(rows, width // 2, seed=1) * 100
    got = op_of(provider, "rotate", device, dtype)(x, angles.cos().to(device), angles.sin().to(device))
    assert torch.equal(x, before)
    assert_turned(got, reference.rotate(x.cpu().double(), angles.cos(), angles.sin()), dtype)


@for_every_provider("grouped_mlp")
@for_each("form", ROWS)
@for_each("counts", [(0,), (3,), (0, 0, 0), (3, 0, 1, 5), (0, 2, 0), (4, 17)])
@for_each("sizes", [(1, 1), (7, 5), (24, 16)])
def test_grouped_mlp(
    provider: str, device: str, dtype: torch.dtype, form: Rows, counts: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    check_grouped_mlp(provider, device, dtype, form, counts, sizes)


@for_every_provider("grouped_mlp")
@for_each("form", ROWS)
def test_grouped_mlp_of_many_rows(provider: str, device: str, dtype: torch.dtype, form: Rows) -> None:
    check_grouped_mlp(provider, device, dtype, form, (70, 0, 150), (80, 152))


def check_grouped_mlp(
    provider: str, device: str, dtype: torch.dtype, form: Rows, counts: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    hidden, width = sizes
    x = draw(sum(counts), hidden).to(dtype)
    gate_up = (draw(len(counts), 2 * width, hidden, seed=1) * hidden**-0.5).to(dtype)
    down = (draw(len(counts), hidden, width, seed=2) * width**-0.5).to(dtype)
    run = op_of(provider, "grouped_mlp", device, dtype)
    there = gate_up.to(device), down.to(device)
    got = form.run(lambda rows, counts_E: run(rows, counts_E, *there), x.to(device), counts)
    assert_experts(got, counts, x, gate_up, down, dtype)


@for_every_provider("heads_in", "heads_out")
@for_each("rows", [0, 1, 2, 4, 65])
@for_each(("heads", "width", "outs"), [(1, 1, 1), (3, 7, 5), (2, 12, 128), (3, 40, 256)])
def test_products_of_heads(
    provider: str, device: str, dtype: torch.dtype, rows: int, heads: int, width: int, outs: int
) -> None:
    """The inputs are views of larger tensors, as in models."""
    x, weight = draw(rows, heads, width + 3).to(dtype), (draw(heads, width + 8, outs, seed=1) * width**-0.5).to(dtype)
    got = op_of(provider, "heads_in", device, dtype)(x.to(device)[..., :width], weight.to(device)[:, :width])
    assert_heads(got, reference.heads_in, x[..., :width], weight[:, :width], dtype)
    back, weight = (
        draw(rows, heads, outs, seed=2).to(dtype),
        (draw(heads, width + 8, outs, seed=3) * outs**-0.5).to(dtype),
    )
    got = op_of(provider, "heads_out", device, dtype)(back.to(device), weight.to(device)[:, 8:])
    assert_heads(got, reference.heads_out, back, weight[:, 8:], dtype)


def assert_heads(got: Tensor, op: Any, x_THN: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    x_THN, weight = x_THN.double(), weight.double()
    rows_HON = weight.mT if op is reference.heads_in else weight
    error = error_of_products(x_THN.transpose(0, 1), rows_HON).transpose(0, 1)
    assert_within(got, op(x_THN, weight), error, dtype)


@for_every_provider("group_rows", "combine_rows")
@for_each(
    ("tokens", "experts", "top_k"), [(0, 3, 2), (1, 1, 1), (5, 4, 4), (33, 9, 3), (7, 20, 8), (4, 16, 13), (70, 20, 4)]
)
@for_each("none", [0.0, 0.3, 1.0])
def test_rows_of_experts(
    provider: str, device: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int, none: float
) -> None:
    """Of the choices, the part `none` is no expert: it has no row, and no weight of it counts."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < none, -1)
    grouped = op_of(provider, "group_rows", device, dtype)(ids.to(device), experts)
    pairs = sorted((int(ids[at]), *at) for at in product(range(tokens), range(top_k)) if ids[at] >= 0)
    row = torch.full_like(ids, -1)
    for number, (_, token, choice) in enumerate(pairs):
        row[token, choice] = number
    counts = [sum(expert == each for expert, _, _ in pairs) for each in range(experts)]
    token_of_row = [token for _, token, _ in pairs] + [0] * (tokens * top_k - len(pairs))
    assert {(got.dtype, got.device.type) for got in grouped} == {(torch.int64, device)}
    assert [got.tolist() for got in grouped] == [counts, token_of_row, row.tolist()]
    y, weights = draw(tokens * top_k, 37).to(dtype), draw(tokens, top_k, seed=1)
    y[len(pairs) :] = torch.nan
    weights[ids < 0] = torch.nan
    got = op_of(provider, "combine_rows", device, dtype)(y.to(device), grouped[2], weights.to(device))
    terms = torch.where(row[..., None] < 0, 0, y.double()[row] * weights.double()[..., None])
    assert_within(got, terms.sum(1), gamma(top_k + 1) * terms.abs().sum(1), torch.float32)


@for_every_provider("gather_rows")
@for_each("width", [1, 37, 512])
@for_each("count", [0, 1, 7, 130])
def test_rows_are_gathered_by_their_numbers(
    provider: str, device: str, dtype: torch.dtype, count: int, width: int
) -> None:
    """One may come often, and the bits stay as they are."""
    x_TD, token_S = draw(9, width).to(dtype), torch.arange(count) * 5 % 9
    x_TD[3] = torch.nan
    x_TD[4] = -0.0
    op = op_of(provider, "gather_rows", device, dtype)
    for given_TD in (x_TD, x_TD.repeat(1, 2)[:, :width], x_TD.mT.contiguous().mT):
        got = op(given_TD.to(device), token_S.to(device))
        assert (got.dtype, got.device.type) == (dtype, device)
        assert got.is_contiguous()
        assert torch.equal(got.cpu().nan_to_num(7), x_TD[token_S].nan_to_num(7))
        assert torch.equal(got.cpu().signbit(), x_TD[token_S].signbit())


@for_every_provider("combine_rows")
@for_each("rows", [0, 3])
def test_no_expert_adds_nothing(provider: str, device: str, dtype: torch.dtype, rows: int) -> None:
    """Neither what stands in rows of others, nor that there are no rows at all."""
    y, row = torch.full((rows, 37), torch.nan, dtype=dtype, device=device), torch.full((4, 2), -1, device=device)
    got = op_of(provider, "combine_rows", device, dtype)(y, row, torch.ones(4, 2, device=device))
    assert torch.equal(got, torch.zeros(4, 37, device=device))


@every_place("linear", dtype=torch.bfloat16)
@for_each("width", [32, 45, 167])
def test_a_router_stays_float32(provider: str, device: str, width: int) -> None:
    """This holds also in a model whose other products are bfloat16."""
    x, weight = draw(3, width), draw(8, width, seed=1)
    got = op_of(provider, "linear", device, torch.bfloat16)(x.to(device), weight.to(device))
    assert_product(got, x, weight, torch.float32)
