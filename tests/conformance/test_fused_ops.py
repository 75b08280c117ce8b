"""Fused ops, for every provider, and for the compositions of each provider's own ops, which are their specification."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.kernels import OpSpec, reference, resolve_ops
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.formats.format import Rounding
from pdinfer.kernels.ops import Ops
from tests.conformance.op_suite import (
    ROWS,
    Rows,
    assert_experts,
    assert_product,
    assert_turned,
    draw,
    every_place,
    for_every_op,
    for_every_provider,
    fp8_in_strips,
    fp8_weight,
    fused_of,
    in_strips,
    op_of,
)
from tests.joined import for_each
from tests.rounding import assert_within, error_of_norm, error_of_silu, gamma, rounded, unit


def ops_of(dtype: torch.dtype) -> Ops:
    return resolve_ops(OpSpec(device="cpu", dtype=dtype), forced="torch").ops


every_residual = for_each("residual", [False, True])


@every_place("linear[strips]", dtype=torch.bfloat16)
@for_each("rows", [0, 1, 5, 40])
@for_each("parts", [1, 2])
def test_linear_strips(provider: str, device: str, rows: int, parts: int) -> None:
    x, weight = draw(rows, 96).bfloat16(), draw(64, 96, seed=1).bfloat16()
    run = fused_of(provider, "linear[strips]", device, torch.bfloat16)
    got = run(x.to(device), in_strips(weight.to(device), parts))
    assert_product(got, x, weight, torch.bfloat16)


@every_place("grouped_mlp[strips]", dtype=torch.bfloat16)
@for_each("counts", [(0,), (3, 0, 1), (40, 2)])
@for_each("form", ROWS)
def test_grouped_mlp_strips(provider: str, device: str, form: Rows, counts: tuple[int, ...]) -> None:
    x, gate_up = draw(sum(counts), 64).bfloat16(), (draw(len(counts), 64, 64, seed=1) / 8).bfloat16()
    down = (draw(len(counts), 64, 32, seed=2) * 32**-0.5).bfloat16()
    run = fused_of(provider, "grouped_mlp[strips]", device, torch.bfloat16)
    strips = in_strips(gate_up.to(device), 2), in_strips(down.to(device))
    got = form.run(lambda rows, counts_E: run(rows, counts_E, *strips), x.to(device), counts)
    assert_experts(got, counts, x, gate_up, down, torch.bfloat16)


@every_place("linear[fp8_strips]", dtype=torch.bfloat16)
@for_each("rows", [0, 1, 3, 5, 40])
@for_each("parts", [1, 2])
@for_each("ue8m0", [False, True])
def test_linear_fp8_strips(provider: str, device: str, rows: int, parts: int, ue8m0: bool) -> None:
    x, blocks = draw(rows, 288).bfloat16().to(device), fp8_weight(160, 288, parts=parts, ue8m0=ue8m0, device=device)
    run = fused_of(provider, "linear[fp8_strips]", device, torch.bfloat16)
    got = run(x, fp8_in_strips(blocks))
    once = reference.quantize_fp8(x, ue8m0=ue8m0)
    assert torch.equal(run(once, fp8_in_strips(blocks)), got)
    torch.testing.assert_close(got, reference.linear_fp8(x, blocks), rtol=0.02, atol=0.02)


@every_place("grouped_mlp[fp8_strips]", dtype=torch.bfloat16)
@for_each("counts", [(0,), (3, 0, 1), (40, 2)])
@for_each("form", ROWS)
def test_grouped_mlp_fp8_strips(provider: str, device: str, form: Rows, counts: tuple[int, ...]) -> None:
    x = draw(sum(counts), 160).bfloat16()
    gate_up = fp8_weight(len(counts), 160, 160, parts=2, device=device)
    down = fp8_weight(len(counts), 160, 160, device=device)
    run = fused_of(provider, "grouped_mlp[fp8_strips]", device, torch.bfloat16)
    strips = fp8_in_strips(gate_up), fp8_in_strips(down)
    got = form.run(lambda rows, counts_E: run(rows, counts_E, *strips), x.to(device), counts)
    exact = reference.grouped_mlp(x.to(device), torch.tensor(counts, device=device), gate_up, down)
    off = (got.cpu().double() - exact.cpu().double()).norm(dim=-1)
    assert (off <= 0.06 * exact.cpu().double().norm(dim=-1)).all()  # what hardly differs may round apart in between


@for_every_provider("add_rms_norm")
@every_residual
@for_each(("rows", "width"), [(0, 7), (1, 1), (1, 48), (5, 7), (5, 48), (3, 264)])
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


@for_every_provider("add_rms_norm_fp8")
@every_residual
@for_each("ue8m0", [False, True])
@for_each(("rows", "width"), [(0, 128), (1, 1), (5, 128), (4, 300)])
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


@for_every_provider("gated_silu_fp8")
@for_each("ue8m0", [False, True])
@for_each(("rows", "width"), [(0, 128), (1, 1), (5, 128), (4, 300)])
def test_gated_silu_fp8(provider: str, device: str, dtype: torch.dtype, ue8m0: bool, rows: int, width: int) -> None:
    x = draw(rows, 2 * width).to(dtype)
    x[1:2] *= 100
    got = fused_of(provider, "gated_silu_fp8", device, dtype)(x.to(device), ue8m0=ue8m0)
    assert (got.dtype, got.shape, got.ue8m0) == (dtype, (rows, width), ue8m0)
    gate, up = x.double().chunk(2, -1)
    exact = reference.gated_silu(x.double())
    error = rounded(exact, error_of_silu(gate, up), dtype)
    amax = torch.stack([block.abs().amax(-1) for block in exact.split(128, -1)], -1).clamp_min(1e-4)
    scales = got.scales_TN.cpu().double()
    if ue8m0:
        assert ((amax / 448 <= scales * 1.01) & (scales < amax / 448 * 2.02)).all()
    else:
        torch.testing.assert_close(scales, amax / 448, rtol=2 * unit(dtype) + 1e-5, atol=0)
    # e4m3 has three places after the point, and steps of 2^-9 near zero
    step = scales.repeat_interleave(128, -1)[:, :width] * 2**-10
    assert_within(got.floats(), exact, error + (exact.abs() + error) * 2**-4 + step, dtype)


@for_every_provider("gated_silu_fp8", "gated_silu")
@for_each("ue8m0", [False, True])
def test_what_is_rounded_is_an_activation_in_the_dtype_of_the_model(
    provider: str, device: str, dtype: torch.dtype, ue8m0: bool
) -> None:
    op, activation = fused_of(provider, "gated_silu_fp8", device, dtype), op_of(provider, "gated_silu", device, dtype)
    x = draw(5, 600).to(dtype).to(device)
    got, expected = op(x, ue8m0=ue8m0), reference.quantize_fp8(activation(x), ue8m0=ue8m0)
    assert torch.equal(got.scales_TN, expected.scales_TN)
    assert torch.equal(got.numbers_TI.view(torch.uint8), expected.numbers_TI.view(torch.uint8))


@for_every_provider("gated_silu_fp8")
@for_each("ue8m0", [False, True])
@for_each("counts", [(0,), (2, 0, 5), (1, 40, 37)])
def test_an_activation_in_room_is_that_of_the_rows_which_are_there(
    provider: str, device: str, dtype: torch.dtype, ue8m0: bool, counts: tuple[int, ...]
) -> None:
    op, width = fused_of(provider, "gated_silu_fp8", device, dtype), 300
    x = torch.full((len(counts), 40, 2 * width), math.nan, dtype=dtype, device=device)
    rows = draw(sum(counts), 2 * width).to(dtype).to(device)
    for room, there in zip(x, rows.split(counts), strict=True):
        room[: len(there)] = there
    got = op(x, ue8m0=ue8m0, counts_E=torch.tensor(counts, dtype=torch.int32, device=device))
    assert (got.dtype, got.shape, got.ue8m0) == (dtype, (len(counts), 40, width), ue8m0)
    expected = op(rows, ue8m0=ue8m0)
    for value, of_rows in ((got.numbers_TI.float(), expected.numbers_TI), (got.scales_TN, expected.scales_TN)):
        there = torch.cat([each[:count] for each, count in zip(value, counts, strict=True)])
        assert torch.equal(there, of_rows.float())


LATENT, TURNED, PAGE_SIZE = 128, 8, 3
SLOTS = (7, 0, 11, 4, 2)


def store(
    op: Any, dtype: torch.dtype, pages_dtype: torch.dtype, device: str, tokens: int, rounding: Rounding | None
) -> Tensor:
    """Run the op on views of one product, into pages of garbage. Return the rows of the pages."""
    kv, angles = draw(tokens, LATENT + TURNED).to(dtype).to(device), draw(tokens, TURNED // 2, seed=1) * 100
    kv[1:2] *= 1000
    width = LATENT + TURNED if pages_dtype == dtype else LATENT + LATENT // 128 * 4 + TURNED * 2
    pages = torch.full((4, PAGE_SIZE, width), 93, dtype=pages_dtype, device=device)
    slots, weight = torch.tensor(SLOTS[:tokens], dtype=torch.int64), draw(LATENT, seed=1).to(dtype)
    cos, sin, slots, weight = (x.to(device) for x in (angles.cos(), angles.sin(), slots, weight))
    c, k = kv.tensor_split((LATENT,), -1)
    assert op(c, k, weight, 1e-6, cos, sin, pages, slots, rounding=rounding) is None
    rows = pages.flatten(0, 1).cpu()
    others = [slot for slot in range(12) if slot not in SLOTS[:tokens]]
    assert (rows[others] == 93).all()
    return rows[list(SLOTS[:tokens])]


@for_every_provider("norm_rotate_store")
@for_each("tokens", [0, 1, 5])
def test_norm_rotate_store(provider: str, device: str, dtype: torch.dtype, tokens: int) -> None:
    op = fused_of(provider, "norm_rotate_store", device, dtype)
    rows = store(op, dtype, dtype, device, tokens, None)
    kv, angles = draw(tokens, LATENT + TURNED).to(dtype), draw(tokens, TURNED // 2, seed=1) * 100
    kv[1:2] *= 1000
    (c, k), weight = kv.double().tensor_split((LATENT,), -1), draw(LATENT, seed=1).to(dtype).double()
    got_c, got_k = rows.tensor_split((LATENT,), -1)
    assert_within(got_c, reference.rms_norm(c, weight, 1e-6), error_of_norm(c, weight, None, 1e-6), dtype)
    turned = reference.rotate(k[:, None], angles.cos(), angles.sin())[:, 0]
    assert_turned(got_k, turned, dtype)


@for_every_provider("norm_rotate_store")
@for_each("rounding", [None, *Rounding])
@for_each("packed", [False, True])
def test_latents_are_stored_as_kv_b_proj_rounds_them(
    provider: str, device: str, dtype: torch.dtype, rounding: Rounding | None, packed: bool
) -> None:
    """What a latent is rounded to, and how it is packed, follows from its norm to the bit."""
    op = fused_of(provider, "norm_rotate_store", device, dtype)
    normed, turned = store(op, dtype, dtype, device, 5, None).tensor_split((LATENT,), -1)
    if rounding is not None:
        normed = resolve_ops(OpSpec(device="cpu", dtype=dtype), forced="reference").ops.rounded(normed, rounding)
    pages_dtype = torch.uint8 if packed else dtype
    expected = cache_rows.latent_rows(normed, turned, pages_dtype)
    assert torch.equal(store(op, dtype, pages_dtype, device, 5, rounding), expected)


@for_every_provider("norm_rotate_store")
@for_each("bad", [math.nan, math.inf, -math.inf])
@for_each("rounding", [None, *Rounding])
def test_a_latent_that_is_not_finite_is_stored_so(
    provider: str, device: str, dtype: torch.dtype, bad: float, rounding: Rounding | None
) -> None:
    op = fused_of(provider, "norm_rotate_store", device, dtype)

    def spoilt(column: int) -> Any:
        def run(c: Tensor, k: Tensor, *rest: Any, **more: Any) -> None:
            (c if column < LATENT else k)[3, column % LATENT] = bad
            op(c, k, *rest, **more)

        return run

    good = store(op, dtype, dtype, device, 5, rounding)
    for column in (0, LATENT - 1, LATENT):
        got = store(spoilt(column), dtype, dtype, device, 5, rounding)
        assert not got[3].isfinite().all()
        assert torch.equal(got[[0, 1, 2, 4]], good[[0, 1, 2, 4]])


every_addend = for_each("addend", ["", "shared", "residual", "shared residual"])


@for_every_provider("sort_rows_fp8")
@for_each("tokens", [0, 1, 7])
def test_sort_rows_fp8(provider: str, device: str, dtype: torch.dtype, tokens: int) -> None:
    """Some choices are none. Their rows are not asked for."""
    rows = reference.quantize_fp8(draw(tokens, 300).to(dtype), ue8m0=False)
    ids = draw(tokens, 5, seed=1).argsort(-1)[:, :3] - 1
    num_rows = int((ids >= 0).sum())
    there = attrs.evolve(rows, numbers_TI=rows.numbers_TI.to(device), scales_TN=rows.scales_TN.to(device))
    got, counts, row = fused_of(provider, "sort_rows_fp8", device, dtype)(there, ids.to(device), 4, num_rows)
    expected_counts, token, expected_row = reference.group_rows(ids, 4)
    assert torch.equal(counts.cpu(), expected_counts)
    assert torch.equal(row.cpu(), expected_row)
    assert torch.equal(got.floats().cpu(), rows.floats()[token[:num_rows]])


@for_every_provider("combine_experts")
@every_addend
@for_each(("tokens", "top_k", "width"), [(0, 2, 7), (1, 1, 1), (5, 3, 48), (3, 8, 39)])
def test_combine_experts(
    provider: str, device: str, dtype: torch.dtype, addend: str, tokens: int, top_k: int, width: int
) -> None:
    """Every third choice is none."""
    op = fused_of(provider, "combine_experts", device, dtype)
    y, row, weights, shared, residual = results(tokens, top_k, width, dtype, device, addend)
    got = op(y, row, weights, shared, residual)
    terms = y.cpu().double()[row.cpu()] * weights.cpu().double()[..., None]
    terms = terms.masked_fill(row.cpu()[..., None] < 0, 0)
    if shared is not None:
        terms = torch.cat((terms, shared.cpu().double()[:, None]), 1)
    error = gamma(top_k + 2) * terms.abs().sum(1)
    check_added(got, terms.sum(1), error, residual, dtype)


@for_every_provider("combine_experts")
@every_addend
def test_sums_that_are_there_are_only_added(provider: str, device: str, dtype: torch.dtype, addend: str) -> None:
    op = fused_of(provider, "combine_experts", device, dtype)
    _, _, _, shared, residual = results(5, 1, 48, dtype, device, addend)
    y = draw(5, 48, seed=7).to(dtype).to(device)
    exact = y.cpu().double() + (0 if shared is None else shared.cpu().double())
    check_added(op(y, None, None, shared, residual), exact, gamma(1) * exact.abs(), residual, dtype)


def check_added(got: Tensor, exact: Tensor, error: Tensor, residual: Tensor | None, dtype: torch.dtype) -> None:
    if residual is None:
        assert_within(got, exact, error, dtype)
    else:
        assert_within(got, residual.cpu().double() + exact, rounded(exact, error, dtype), dtype)


def results(tokens: int, top_k: int, width: int, dtype: torch.dtype, device: str, addend: str) -> tuple[Any, ...]:
    """Return what experts returned, in any order and with NaN in a row that nobody asks for; and what is added."""
    y, weights = draw(tokens * top_k + 1, width).to(dtype), draw(tokens, top_k, seed=1)
    y[-1] = math.nan
    row = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(3)).view(tokens, top_k)
    row = row.where(torch.arange(row.numel()).view(row.shape) % 3 != 2, -1)
    weights[row < 0] = math.nan
    shared, residual = (
        draw(tokens, width, seed=seed).to(dtype).to(device) if name in addend else None
        for seed, name in ((5, "shared"), (6, "residual"))
    )
    return y.to(device), row.to(device), weights.to(device), shared, residual


@for_every_provider("combine_experts", "combine_rows")
def test_the_residual_is_added_to_what_was_rounded(provider: str, device: str, dtype: torch.dtype) -> None:
    """The layer's output has a dtype of its own; a sum that stayed in float32 would be another number."""
    op, combine = fused_of(provider, "combine_experts", device, dtype), op_of(provider, "combine_rows", device, dtype)
    y, row, weights, shared, residual = results(64, 3, 48, dtype, device, "shared residual")
    total = combine(y, row, weights) + shared
    got = op(y, row, weights, shared, residual)
    assert torch.equal(got, residual + total.to(dtype))
    assert dtype == torch.float32 or not torch.equal(got, (residual + total).to(dtype))


@for_every_provider("combine_experts")
@for_each("bad", [math.nan, math.inf, -math.inf])
def test_a_result_that_is_not_finite_stays_so(provider: str, device: str, dtype: torch.dtype, bad: float) -> None:
    op = fused_of(provider, "combine_experts", device, dtype)
    inputs = list(results(5, 3, 48, dtype, device, "shared residual"))
    good = op(*inputs)
    row = inputs[1].cpu()
    for which, at in ((0, (int(row[2, row[2] >= 0][0]), 47)), (3, (2, 47)), (4, (2, 47))):
        spoilt = list(inputs)
        spoilt[which] = inputs[which].clone()
        spoilt[which][at] = bad
        got = op(*spoilt)
        assert not got[2].isfinite().all()
        assert torch.equal(got[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


def test_each_rounding_is_that_of_its_product() -> None:
    ops, x = ops_of(torch.float32), draw(3, 128)
    assert torch.equal(ops.rounded(x, Rounding.FP8), reference.round_fp8(x, ue8m0=False))
    assert torch.equal(ops.rounded(x, Rounding.FP8_UE8M0), reference.round_fp8(x, ue8m0=True))
    assert torch.equal(ops.rounded(x, Rounding.INT8), reference.round_int8(x))


@for_every_op("name", {name: (name,) for name in ("add_rms_norm", "add_rms_norm_fp8")})
@for_each("bad", [math.nan, math.inf, -math.inf])
@for_each("spoilt", [0, 1])
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


@for_every_provider("gated_silu_fp8")
@for_each("bad", [math.nan, math.inf, -math.inf])
def test_an_activation_that_is_not_finite_stays_so(provider: str, device: str, dtype: torch.dtype, bad: float) -> None:
    op, x = fused_of(provider, "gated_silu_fp8", device, dtype), draw(4, 520).to(dtype).to(device)
    good = op(x, ue8m0=False)
    for column in (0, 259, 260, 519):
        spoilt = x.clone()
        spoilt[2, column] = bad
        got = op(spoilt, ue8m0=False)
        assert not got.floats()[2].isfinite().all()
        assert torch.equal(got[[0, 1, 3]].floats(), good[[0, 1, 3]].floats())


def test_a_composition_calls_the_op_that_was_swapped() -> None:
    def doubled(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return 2 * x_TD

    ops = ops_of(torch.float32).replace(rms_norm=doubled)
    x, weight = draw(2, 128), torch.ones(128)
    assert torch.equal(ops.add_rms_norm(x, x, weight, 0)[0], 4 * x)
    assert torch.equal(ops.add_rms_norm_fp8(x, x, weight, 0, ue8m0=False)[0].floats_TI, 4 * x)


def test_a_composition_is_of_the_ops_that_were_chosen() -> None:
    ops = resolve_ops(OpSpec(device="cpu", dtype=torch.float32), forced={"rms_norm": "reference"}).ops
    assert ops.add_rms_norm.args[0].rms_norm is reference.rms_norm  # type: ignore[attr-defined]
    assert ops.add_rms_norm.args[0].linear is ops.linear  # type: ignore[attr-defined]
