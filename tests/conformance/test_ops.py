"""Every provider of an op does what the reference does in float64, on every device, for every legal kind of shape."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import permutations, product
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import explain_backends, reference, resolve, resolve_ops, torch_ops
from pdinfer.kernels.native import ops as native
from pdinfer.kernels.ops import OP_NAMES
from pdinfer.kernels.weight_formats import FP8Blocks, Int8Dynamic, Int8Static, expert, map_tensors
from pdinfer.model.batch import Batch, Row
from tests.rounding import (
    assert_within,
    error_of_attention,
    error_of_mlp,
    error_of_norm,
    error_of_products,
    error_of_silu,
    gamma,
    rounded,
    unit,
)

CPU = torch.device("cpu")
NAMES = [name for name, _ in resolve.PROVIDERS]
SCALE = 0.25

every_provider = pytest.mark.parametrize("provider", NAMES)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def for_every_provider(test: Any) -> Any:
    return every_provider(every_device(every_dtype(test)))


def op_of(provider: str, name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """The op as `provider` does it; skips the test where it cannot run or does not offer it."""
    try:
        return getattr(resolve_ops(torch.device(device), dtype, forced={name: provider}).ops, name)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


# Rows


@for_every_provider
@pytest.mark.parametrize(("rows", "width"), [*product((0, 1, 5), (1, 7, 48))])
def test_rms_norm(provider: str, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = draw(rows, width).to(dtype), draw(width, seed=1).to(dtype)
    x[1:2] *= 1000
    x[2:3] = 0
    got = op_of(provider, "rms_norm", device, dtype)(x.to(device), weight.to(device), 1e-6)
    x, weight = x.double(), weight.double()
    assert_within(got, reference.rms_norm(x, weight, 1e-6), error_of_norm(x, weight, None, 1e-6), dtype)


@for_every_provider
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        *product((0, 1, 5), ((1, 1), (7, 13), (48, 97), (80, 136))),
        *product((2, 3, 4, 6, 7, 16, 17), ((48, 72), (264, 16))),
    ],
)
def test_linear(provider: str, device: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int]) -> None:
    x, weight = draw(rows, sizes[0]).to(dtype), draw(sizes[1], sizes[0], seed=1).to(dtype)
    got = op_of(provider, "linear", device, dtype)(x.to(device), weight.to(device))
    x, weight = x.double(), weight.double()
    assert_within(got, reference.linear(x, weight), error_of_products(x, weight), dtype)


@for_every_provider
@pytest.mark.parametrize(("rows", "width"), [*product((0, 1, 5), (1, 7, 24))])
def test_gated_silu(provider: str, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = draw(rows, 2 * width).to(dtype)
    x[1:2] *= 100
    got = op_of(provider, "gated_silu", device, dtype)(x.to(device))
    x = x.double()
    assert_within(got, reference.gated_silu(x), error_of_silu(*x.chunk(2, -1)), dtype)


@for_every_provider
@pytest.mark.parametrize(("rows", "heads", "width"), [*product((0, 1, 5), (1, 3, 4), (2, 6, 8))])
def test_rotate(provider: str, device: str, dtype: torch.dtype, rows: int, heads: int, width: int) -> None:
    x = draw(rows, heads, width + 3).to(dtype).to(device)[..., 3:]  # in models it is a slice too
    before = x.clone()
    angles = draw(rows, width // 2, seed=1) * 100
    got = op_of(provider, "rotate", device, dtype)(x, angles.cos().to(device), angles.sin().to(device))
    assert torch.equal(x, before)
    assert_turned(got, reference.rotate(x.cpu().double(), angles.cos(), angles.sin()), dtype)


def assert_turned(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Two products and their sum, of numbers no larger than the head is long."""
    assert_within(got, exact, 2 * gamma(3) * exact.norm(dim=-1, keepdim=True), dtype)


@for_every_provider
@pytest.mark.parametrize("counts", [(0,), (3,), (0, 0, 0), (3, 0, 1, 5), (0, 2, 0), (4, 17)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (24, 16)], ids=str)
def test_grouped_mlp(
    provider: str, device: str, dtype: torch.dtype, counts: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    hidden, width = sizes
    x = draw(sum(counts), hidden).to(dtype)
    gate_up = (draw(len(counts), 2 * width, hidden, seed=1) * hidden**-0.5).to(dtype)
    down = (draw(len(counts), hidden, width, seed=2) * width**-0.5).to(dtype)
    counts_E = torch.tensor(counts)
    got = op_of(provider, "grouped_mlp", device, dtype)(x.to(device), counts_E, gate_up.to(device), down.to(device))
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    rows = torch.split(x, list(counts))
    error = torch.cat([error_of_mlp(*row, dtype) for row in zip(rows, gate_up, down, strict=True)])
    assert_within(got, reference.grouped_mlp(x, counts_E, gate_up, down), error, dtype)


# Quantized weights


def fp8_weight(*shape: int, parts: int = 1, ue8m0: bool = False, device: str = "cpu") -> FP8Blocks:
    """Numbers [..., parts * rows, columns] for a shape (..., rows, columns), and scales far from one another."""
    *lead, rows, columns = shape
    numbers = draw(*lead, parts * rows, columns, seed=1) * 100
    scale = draw(*lead, parts * math.ceil(rows / 128), math.ceil(columns / 128), seed=2).exp() * 0.01 * columns**-0.5
    return FP8Blocks(
        numbers=numbers.clamp(-448, 448).to(torch.float8_e4m3fn).to(device),
        scale=scale.to(device),
        ue8m0=ue8m0,
        parts=parts,
    )


def int8_weight(*shape: int, device: str = "cpu") -> Int8Dynamic:
    numbers = (draw(*shape, seed=1) * 40).round().clamp(-128, 127).to(torch.int8)
    scale = draw(*shape[:-1], 1, seed=2).exp() * 0.02 * shape[-1] ** -0.5
    return Int8Dynamic(numbers=numbers.to(device), scale=scale.to(device))


def static_weight(rows: int, columns: int, parts: int, device: str = "cpu") -> Int8Static:
    plain = int8_weight(parts * rows, columns)
    input_scale = torch.linspace(0.02, 0.05, parts).view(-1, 1)
    input_offset = torch.linspace(-9, 30, parts).round().view(-1, 1)
    undo = -input_offset.repeat_interleave(rows, 0) * plain.numbers.sum(-1, keepdim=True)
    made = Int8Static(
        numbers=plain.numbers,
        scale=plain.scale,
        input_scale=input_scale,
        input_offset=input_offset,
        output_scale=plain.scale * input_scale.repeat_interleave(rows, 0),
        output_offset=undo.to(torch.int32) + 5,
    )
    return map_tensors(made, lambda tensor: tensor.to(device))  # type: ignore[return-value]


def outliers(rows: int, columns: int) -> Tensor:
    """Activations of several sizes; a token of zeros; a token that no format holds without a scale."""
    x = draw(rows, columns)
    x[:1] *= 1000
    x[1:2] = 0
    x[2:3] *= 1e-6
    return x


MATRICES = [(1, 1), (7, 13), (48, 97), (128, 256), (129, 300), (328, 136)]


@for_every_provider
@pytest.mark.parametrize("ue8m0", [False, True], ids=["any-scale", "ue8m0"])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("size", "parts"), [*((size, 1) for size in MATRICES), ((168, 328), 2), ((3, 140), 2)])
def test_linear_fp8(
    provider: str, device: str, dtype: torch.dtype, ue8m0: bool, rows: int, size: tuple[int, int], parts: int
) -> None:
    x, weight = outliers(rows, size[1]).to(dtype), fp8_weight(*size, parts=parts, ue8m0=ue8m0)
    got = op_of(provider, "linear_fp8", device, dtype)(
        x.to(device), fp8_weight(*size, parts=parts, ue8m0=ue8m0, device=device)
    )
    numbers, worth = by_hand_fp8(x, weight)
    # both factors may be rounded to floats of `dtype` before they are multiplied
    rounded_factors = 2 * unit(dtype) + gamma(4)
    error = error_of_products(numbers, worth) + rounded_factors * (numbers.abs() @ worth.abs().T)
    assert_within(got, numbers @ worth.T, error, dtype)


@every_dtype
@pytest.mark.parametrize("block_bytes", [1, 7 * 300 * 4])
def test_rows_of_an_fp8_matrix_become_floats_block_by_block(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = outliers(5, 300).to(dtype), fp8_weight(129, 300, parts=2)
    expected = torch_ops.linear_fp8(x, weight)
    monkeypatch.setattr(torch_ops, "WEIGHT_BLOCK_BYTES", block_bytes)
    numbers, worth = by_hand_fp8(x, weight)
    error = 2 * error_of_products(numbers, worth) + 2 * unit(dtype) * expected.double().abs()
    assert_within(torch_ops.linear_fp8(x, weight), expected.double(), error, dtype)


def by_hand_fp8(x: Tensor, weight: FP8Blocks) -> tuple[Tensor, Tensor]:
    """What activations and weights are worth, element by element of the scales, in float64."""
    rows, columns = weight.numbers.shape
    worth, numbers = weight.numbers.double(), x.double().clone()
    of_part = math.ceil(rows // weight.parts / 128)
    for row, column in product(range(rows), range(0, columns, 128)):
        part, within = divmod(row, rows // weight.parts)
        worth[row, column : column + 128] *= weight.scale[part * of_part + within // 128, column // 128].double()
    for token, column in product(range(len(x)), range(0, columns, 128)):
        block = numbers[token, column : column + 128]
        scale = max(float(block.abs().max()), 1e-4) / 448
        if weight.ue8m0:
            scale = 2.0 ** math.ceil(math.log2(scale))
        numbers[token, column : column + 128] = (block / scale).to(torch.float8_e4m3fn).double() * scale
    return numbers, worth


@for_every_provider
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("size", MATRICES)
def test_linear_int8(provider: str, device: str, dtype: torch.dtype, rows: int, size: tuple[int, int]) -> None:
    x, weight = outliers(rows, size[1]).to(dtype), int8_weight(*size)
    got = op_of(provider, "linear_int8", device, dtype)(x.to(device), int8_weight(*size, device=device))
    # a float32 quotient decides what is rounded up; then sums are exact, and two scales multiply them
    scale = (x.float().abs().amax(-1, keepdim=True) if rows else x.float()[:, :1]).clamp(min=1e-10) / 127
    numbers = (x.float() / scale).round().double()
    exact = numbers @ weight.numbers.double().T * scale.double() * weight.scale.double().T
    assert_within(got, exact, gamma(3) * exact.abs(), dtype)


@for_every_provider
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("size", "parts"), [*((size, 1) for size in MATRICES), ((24, 48), 2)])
def test_linear_int8_static(
    provider: str, device: str, dtype: torch.dtype, rows: int, size: tuple[int, int], parts: int
) -> None:
    x, weight = draw(rows, size[1]).to(dtype), static_weight(*size, parts)
    got = op_of(provider, "linear_int8_static", device, dtype)(x.to(device), static_weight(*size, parts, device=device))
    exact = []
    for part, numbers in enumerate(weight.numbers.double().chunk(parts)):
        scaled = (x.float() / weight.input_scale[part]).round().double() + weight.input_offset[part]
        exact.append(scaled.clamp(-128, 127) @ numbers.T)
    sums = torch.cat(exact, -1) + weight.output_offset[:, 0]
    scaled = sums * weight.output_scale[:, 0].double()
    assert_within(got, scaled, gamma(2) * scaled.abs(), dtype)


@for_every_provider
@pytest.mark.parametrize("counts", [(0,), (3,), (3, 0, 1, 5), (0, 2, 0)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (24, 16), (130, 168)], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_grouped_mlp_of_quantized_experts(
    provider: str, device: str, dtype: torch.dtype, counts: tuple[int, ...], sizes: tuple[int, int], kind: str
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
    got = op_of(provider, f"grouped_mlp_{kind}", device)(x.to(device), torch.tensor(counts), gate_up, down)
    one_by_one, linear = [], op_of(provider, f"linear_{kind}", device)
    for index, rows in enumerate(torch.split(x.to(device), list(counts))):
        hidden_rows = op_of(provider, "gated_silu", device, dtype)(linear(rows, expert(gate_up, index)))
        one_by_one.append(linear(hidden_rows, expert(down, index)))
    assert torch.equal(got, torch.cat(one_by_one))


@for_every_provider
@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("columns", [1, 128, 200])
def test_rounding_is_what_multiplying_by_one_does(
    provider: str, device: str, dtype: torch.dtype, rows: int, columns: int
) -> None:
    x = outliers(rows, columns).to(dtype).to(device)
    one = torch.eye(columns, device=device)
    fp8 = FP8Blocks(
        numbers=one.to(torch.float8_e4m3fn), scale=torch.ones(*(math.ceil(columns / 128),) * 2, device=device)
    )
    int8 = Int8Dynamic(numbers=one.to(torch.int8), scale=torch.ones(columns, 1, device=device))
    for name, weight, more in (("fp8", fp8, {"ue8m0": False}), ("int8", int8, {})):
        got = op_of(provider, f"round_{name}", device, dtype)(x, **more)
        exact = op_of(provider, f"linear_{name}", device, dtype)(x, weight).cpu().double()
        assert_within(got, exact, rounded(exact, gamma(2) * exact.abs(), dtype), dtype)


@for_every_provider
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 65])
@pytest.mark.parametrize(("heads", "width", "outs"), [(1, 1, 1), (3, 7, 5), (2, 12, 128), (3, 40, 256)])
def test_products_of_heads(
    provider: str, device: str, dtype: torch.dtype, rows: int, heads: int, width: int, outs: int
) -> None:
    """Views of larger tensors, as in models."""
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


@for_every_provider
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 3, 2), (1, 1, 1), (5, 4, 4), (33, 9, 3), (7, 20, 8), (4, 16, 13)]
)
def test_rows_of_experts(provider: str, device: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int) -> None:
    ids = (
        torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
        if tokens
        else torch.empty(0, top_k).long()
    )
    counts, token_of_row, row = op_of(provider, "group_rows", device, dtype)(ids.to(device), experts)
    expected = reference.group_rows(ids, experts)
    assert counts.device.type == "cpu"
    assert all(torch.equal(got.cpu(), want) for got, want in zip((counts, token_of_row, row), expected, strict=True))
    y, weights = draw(tokens * top_k, 37).to(dtype), draw(tokens, top_k, seed=1)
    got = op_of(provider, "combine_rows", device, dtype)(y.to(device), row, weights.to(device))
    terms = y.double()[expected[2]] * weights.double()[..., None]
    assert_within(got, terms.sum(1), gamma(top_k + 1) * terms.abs().sum(1), torch.float32)


@every_provider
@every_device
@pytest.mark.parametrize("width", [32, 45, 167])
def test_a_router_stays_float32(provider: str, device: str, width: int) -> None:
    """Also in a model whose other products are bfloat16."""
    x, weight = draw(3, width), draw(8, width, seed=1)
    got = op_of(provider, "linear", device, torch.bfloat16)(x.to(device), weight.to(device))
    x, weight = x.double(), weight.double()
    assert_within(got, reference.linear(x, weight), error_of_products(x, weight), torch.float32)


# What native kernels cannot read


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
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_native_ops_leave_other_dtypes_to_torch(name: str, dtype: torch.dtype) -> None:
    """They would read their bits as bfloat16."""
    if name in ("linear", "grouped_mlp") and dtype == torch.float32:
        pytest.skip("native has such products: test_a_router_stays_float32")
    inputs = OTHER_DTYPES[name](dtype)
    op = op_of("native", name, "cpu", torch.bfloat16)
    assert torch.equal(op(*inputs), getattr(torch_ops, name)(*inputs))


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
    assert torch.equal(op(x, weight, 1e-6), torch_ops.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("name", ["linear", "rms_norm", "gated_silu", "rotate", "heads_in", "heads_out"])
def test_native_ops_read_strided_rows(name: str) -> None:
    """Rows that lie apart, and elements that do."""
    op = op_of("native", name, "cpu", torch.bfloat16)
    x, *rest = OTHER_DTYPES[name](torch.bfloat16)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), -1)
    assert torch.equal(op(wide[..., : x.shape[-1]], *rest), op(x, *rest))
    apart = torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    got = op(apart, *rest)
    assert torch.equal(got, op(x, *rest)) or torch.equal(got, getattr(torch_ops, name)(apart, *rest))


# The cache


@for_every_provider
@pytest.mark.parametrize(("page_size", "rows"), [*product((1, 3, 16, 64), (0, 1, 5))])
def test_store_latent(provider: str, device: str, dtype: torch.dtype, page_size: int, rows: int) -> None:
    latent = draw(rows, 13).to(dtype)
    slots = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(rows))[:rows]
    expected = torch.full((6, page_size, 13), 7.0).to(dtype)
    pages = expected.to(device, copy=True)
    for slot, row in zip(slots.tolist(), latent, strict=True):
        expected[slot // page_size, slot % page_size] = row
    assert (
        op_of(provider, "store_latent", device, dtype)(pages, slots.to(device), *latent.to(device).split((9, 4), -1))
        is None
    )
    assert torch.equal(pages.cpu(), expected)


@attrs.frozen
class Attention:
    """Inputs of both attention ops: sequences whose pages lie anywhere, every slot that is not theirs a NaN."""

    dtype: torch.dtype
    heads: int
    page_size: int
    contexts: tuple[int, ...]
    query_lens: tuple[int, ...]
    dims: tuple[int, int, int, int] = (16, 8, 12, 10)  # latent, rope, nope, v

    @property
    def owned(self) -> list[list[int]]:
        """The pages of each sequence: those of all sequences shuffled, one page left out."""
        sizes = [-(-context // self.page_size) for context in self.contexts]
        shuffled = torch.randperm(sum(sizes) + 1, generator=torch.Generator().manual_seed(3)).tolist()
        return [[shuffled.pop() for _ in range(size)] for size in sizes]

    @property
    def pages(self) -> Tensor:
        latent, rope, _, _ = self.dims
        used = self.owned
        num_pages = sum(map(len, used)) + 1
        pages = torch.full((num_pages, self.page_size, latent + rope), torch.nan)
        for row, (context, mine) in enumerate(zip(self.contexts, used, strict=True)):
            cached = draw(context, latent + rope, seed=row)
            for page, part in zip(mine, cached.split(self.page_size), strict=True):
                pages[page, : len(part)] = part
        return pages.to(self.dtype)

    @property
    def table(self) -> Tensor:
        rows = [Row([0], context - 1, pages) for context, pages in zip(self.contexts, self.owned, strict=True)]
        return Batch.build(rows, page_size=self.page_size, device=CPU, decode=True).page_table_BM

    @property
    def of_prefill(self) -> tuple[Tensor, Tensor]:
        """Queries and kv_b."""
        latent, rope, nope, v = self.dims
        q = draw(sum(self.query_lens), self.heads, nope + rope).to(self.dtype)
        return q, (draw(self.heads * (nope + v), latent, seed=1) * latent**-0.5).to(self.dtype)

    @property
    def of_decode(self) -> tuple[Tensor, Tensor]:
        """Both parts of the queries."""
        latent, rope, _, _ = self.dims
        q_latent = draw(len(self.contexts), self.heads, latent).to(self.dtype)
        return q_latent, draw(len(self.contexts), self.heads, rope, seed=1).to(self.dtype)

    def prefill(self, op: Any, pages: Tensor, to: Any) -> Tensor:
        q, kv_b = self.of_prefill
        table, v = self.table.to(pages.device), self.dims[3]
        return op(to(q), pages, to(kv_b), table, self.query_lens, self.contexts, v_head_dim=v, scale=SCALE)

    def decode(self, op: Any, pages: Tensor, to: Any) -> Tensor:
        q_latent, q_rope = self.of_decode
        lens = torch.tensor(self.contexts, dtype=torch.int64, device=pages.device)
        return op(to(q_latent), to(q_rope), pages, self.table.to(pages.device), lens, scale=SCALE)

    def run(self, name: str, provider: str, device: str, pages: Tensor | None = None) -> Tensor:
        op = op_of(provider, name, device, self.dtype)
        pages = (self.pages if pages is None else pages).to(device)
        before = pages.clone()
        result = (self.prefill if name == "mla_prefill" else self.decode)(op, pages, lambda x: x.to(device))
        assert pages.equal(before) or torch.equal(pages.nan_to_num(), before.nan_to_num())
        return result

    def unpacked(self) -> Tensor:
        """What the pages are worth, in float64."""
        return self.pages.double()

    def exact(self, name: str) -> Tensor:
        op = getattr(reference, name)
        return (self.prefill if name == "mla_prefill" else self.decode)(op, self.unpacked(), Tensor.double)

    def error(self, name: str) -> Tensor:
        """How far from it a result may be."""
        latent, _, nope, v = self.dims
        prefill, pages, first, errors = name == "mla_prefill", self.unpacked(), 0, []
        q_THQ = self.of_prefill[0].double() if prefill else torch.cat(self.of_decode, -1).double()
        kv_b_HOC = self.of_prefill[1].double().view(self.heads, -1, latent)
        for context, count, mine in zip(self.contexts, self.query_lens, self.owned, strict=True):
            count = count if prefill else 1
            visible_TS = torch.ones(count, context, dtype=torch.bool).tril(context - count)
            c_HSC, k_rope_HSR = (
                part.expand(self.heads, -1, -1)
                for part in pages[mine].flatten(0, 1)[:context].tensor_split((latent,), -1)
            )
            k, value, off_k, off_value = c_HSC, c_HSC, torch.zeros_like(c_HSC), torch.zeros_like(c_HSC)
            if prefill:
                kv = c_HSC @ kv_b_HOC.mT
                off = rounded(kv, error_of_products(c_HSC, kv_b_HOC), self.dtype)
                (k, value), (off_k, off_value) = kv.split((nope, v), -1), off.split((nope, v), -1)
            k, off_k = torch.cat((k, k_rope_HSR), -1), torch.cat((off_k, k_rope_HSR * 0), -1)
            turned = [x.transpose(0, 1) for x in (k, value, off_k, off_value)]
            q = q_THQ[first : first + count]
            errors.append(error_of_attention(q, *turned[:2], visible_TS, SCALE, self.dtype, *turned[2:]))
            first += count
        return torch.cat(errors) if errors else torch.zeros_like(self.exact(name))

    def check(self, name: str, provider: str, device: str = "cpu") -> None:
        assert_within(self.run(name, provider, device), self.exact(name), self.error(name), self.dtype)


def contexts_of(page_size: int, count: int) -> tuple[int, ...]:
    """Lengths on both sides of the borders of pages."""
    return (page_size + 1, 1, page_size, max(1, 3 * page_size - 1), 2 * page_size)[:count]


def query_lens_of(contexts: Sequence[int]) -> tuple[int, ...]:
    """A whole prompt, a single token, and chunks behind what is cached already."""
    wanted = (contexts[0], 1, 1, 4, contexts[-1] // 2 + 1) if contexts else ()
    return tuple(min(context, want) for context, want in zip(contexts, wanted, strict=False))


ATTENTION = ("mla_prefill", "mla_decode")
DIMS = ((16, 8, 12, 10), (13, 6, 7, 9), (1, 2, 1, 1), (32, 32, 34, 64))


@for_every_provider
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("page_size", "count", "heads"), [*product((1, 3, 16, 64), (0, 1, 5), (1, 3, 4))])
def test_attention(
    provider: str, device: str, dtype: torch.dtype, name: str, page_size: int, count: int, heads: int
) -> None:
    contexts = contexts_of(page_size, count)
    for dims in DIMS:
        Attention(dtype, heads, page_size, contexts, query_lens_of(contexts), dims).check(name, provider, device)


@every_provider
@every_device
@every_dtype
@pytest.mark.parametrize("part_tokens", [32, 1024])
def test_long_contexts_are_decoded_in_parts(
    provider: str, device: str, dtype: torch.dtype, part_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native ones; their parts have maxima of their own. Lengths on both sides of the borders of parts."""
    monkeypatch.setattr(native, "PART_TOKENS", part_tokens)
    contexts = (1500, 1, 1024, 1025, 2100) if part_tokens == 1024 else (150, 31, 32, 33, 320)
    Attention(dtype, 2, 16, contexts, (1,) * 5, (32, 32, 34, 64)).check("mla_decode", provider, device)


@pytest.mark.parametrize("keys", [16, 40, 64, 4096])
@pytest.mark.parametrize("page_size", [3, 16])
def test_native_prefill_expands_a_context_piece_by_piece(
    keys: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end with a page; before, within and behind the queries' own positions."""
    monkeypatch.setattr(native, "KEYS", keys)
    case = Attention(torch.bfloat16, 2, page_size, (150, 33, 64, 97), (150, 20, 1, 60), (32, 32, 34, 64))
    case.check("mla_prefill", "native")


@for_every_provider
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_does_not_see_other_sequences(provider: str, device: str, dtype: torch.dtype, name: str) -> None:
    case = Attention(dtype, 3, 4, (9, 6, 12), (1, 1, 1))
    poisoned = case.pages
    poisoned[case.owned[1]] = torch.nan
    got = case.run(name, provider, device, poisoned)
    assert_within(got[[0, 2]], case.exact(name)[[0, 2]], case.error(name)[[0, 2]], dtype)
    assert got[1].isnan().all()


@every_dtype
@pytest.mark.parametrize("block_bytes", [1, 4 * 3 * 40 * 7, 4 * 3 * 40 * 40])
def test_the_size_of_a_block_of_scores_changes_nothing(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one query, of a number that does not divide the queries, and of all of them."""
    monkeypatch.setattr(torch_ops, "SCORE_BLOCK_BYTES", block_bytes)
    Attention(dtype, 3, 16, (40, 33), (40, 20)).check("mla_prefill", "torch")


# The router


@attrs.frozen
class Routing:
    """One routing rule; `bias` is added to random biases, None means the rule has none."""

    name: str
    sigmoid: bool
    bias: float | None
    experts: int = 8
    top_k: int = 3
    groups: int = 1
    top_k_groups: int = 1
    normalize: bool = False
    scaling: float = 1.0
    even: bool = False
    """All biases are `bias`."""

    @property
    def biases(self) -> Tensor | None:
        return None if self.bias is None else draw(self.experts, seed=5) * 0.15 * (not self.even) + self.bias

    def expected(self, logits: Sequence[float]) -> list[tuple[int, float]]:
        """(id, weight) of each chosen expert of one token, best first, by the rule's definition in plain floats."""
        if self.sigmoid:
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        else:
            total = sum(math.exp(logit) for logit in logits)
            scores = [math.exp(logit) / total for logit in logits]
        rounded = torch.tensor(scores, dtype=torch.float64).float()
        choice = (rounded if self.biases is None else rounded + self.biases).tolist()
        size = self.experts // self.groups
        groups = [range(start, start + size) for start in range(0, self.experts, size)]
        if self.groups > 1:
            counted = 1 if self.bias is None else 2
            best = [sorted((choice[e] for e in group), reverse=True)[:counted] for group in groups]
            worth = torch.tensor(best).sum(-1).tolist()  # in float32
            groups.sort(key=lambda group: -worth[group.start // size])
            groups = groups[: self.top_k_groups]
        allowed = sorted((expert for group in groups for expert in group), key=lambda e: (-choice[e], e))
        chosen = allowed[: self.top_k]
        total = sum(scores[expert] for expert in chosen) + 1e-20 if self.normalize else 1.0
        return [(expert, scores[expert] / total * self.scaling) for expert in chosen]

    def run(self, provider: str, device: str, logits: Tensor, biases: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = op_of(provider, "route", device, torch.bfloat16)(
            logits.to(device),
            None if biases is None else biases.to(device),
            sigmoid=self.sigmoid,
            top_k=self.top_k,
            num_groups=self.groups,
            top_k_groups=self.top_k_groups,
            normalize=self.normalize,
            scaling_factor=self.scaling,
        )
        assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
        assert ids.shape == weights.shape == (len(logits), self.top_k)
        return ids.cpu(), weights.cpu()


RULES = [
    Routing("v3", sigmoid=True, bias=0.0, groups=4, top_k_groups=2, normalize=True, scaling=2.5),
    Routing("v3-ungrouped", sigmoid=True, bias=0.0, experts=10, top_k=2, normalize=True, scaling=2.5),
    Routing("biases-below-zero", sigmoid=True, bias=-5.0, groups=4, top_k_groups=2, normalize=True),
    Routing("all-of-one-group", sigmoid=True, bias=-5.0, experts=9, groups=3, top_k_groups=1),
    Routing("v2", sigmoid=False, bias=None, groups=4, top_k_groups=2, scaling=16.0),
    Routing("v2-one-expert-per-group", sigmoid=False, bias=None, groups=8, top_k_groups=4),
    Routing("v2-lite", sigmoid=False, bias=None, experts=7, top_k=7),
    Routing("one-expert", sigmoid=False, bias=None, experts=1, top_k=1),
]


@every_provider
@every_device
@pytest.mark.parametrize("tokens", [0, 1, 5, 64])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_route(provider: str, device: str, rule: Routing, tokens: int) -> None:
    check_routing(provider, device, rule, draw(tokens, rule.experts) * 2)


def check_routing(provider: str, device: str, rule: Routing, logits: Tensor) -> None:
    ids, weights = rule.run(provider, device, logits, rule.biases)
    for row, chosen, weight in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        expected = rule.expected(row)
        assert chosen == [expert for expert, _ in expected]
        # rounded as a score, in the sum of `top_k` of them, and at three operations on it
        exact = torch.tensor([exact for _, exact in expected], dtype=torch.float64)
        assert_within(torch.tensor(weight), exact, gamma(rule.top_k + 5) * exact, torch.float32)


@every_provider
@every_device
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("values", ["few", "large", "nothing"])
def test_ties_of_a_router_are_broken_alike(provider: str, device: str, rule: Routing, values: str) -> None:
    """Logits of few values, or of sizes whose sigmoids are all 1 or all but 0, or all 0; biases that are equal too."""
    drawn = torch.randint(-1, 2, (200, rule.experts), generator=torch.Generator().manual_seed(4)).float()
    logits = {"few": drawn, "large": draw(200, rule.experts) * 40, "nothing": torch.full((1, rule.experts), -200.0)}[
        values
    ]
    check_routing(provider, device, rule, logits)
    rule = attrs.evolve(rule, even=True)
    check_routing(provider, device, rule, logits)


@every_provider
@every_device
@pytest.mark.parametrize("experts", [7, 17, 33, 250])
def test_equal_logits_are_equal_scores_wherever_they_stand(provider: str, device: str, experts: int) -> None:
    rule = Routing("equal", sigmoid=True, bias=None, experts=experts, top_k=5)
    logits = draw(40, 1).expand(40, experts).contiguous() * 4
    for sigmoid in (True, False):
        ids, weights = attrs.evolve(rule, sigmoid=sigmoid).run(provider, device, logits, None)
        assert (ids == torch.arange(5)).all()
        assert (weights == weights[:, :1]).all()


# Choosing


def test_without_a_wish_the_first_provider_serves_everything() -> None:
    assert [(choice.op, choice.provider) for choice in resolve_ops(CPU, torch.float32).choices] == [
        (op, "torch") for op in OP_NAMES
    ]


def test_one_name_forces_all_ops() -> None:
    resolved = resolve_ops(CPU, torch.float32, forced="reference")
    assert {choice.provider for choice in resolved.choices} == {"reference"}
    assert all(getattr(resolved.ops, op) is getattr(reference, op) for op in OP_NAMES)


@pytest.mark.parametrize("op", OP_NAMES)
def test_one_op_is_forced_alone(op: str) -> None:
    resolved = resolve_ops(CPU, torch.float32, forced={op: "reference"})
    assert {choice.op for choice in resolved.choices if choice.provider == "reference"} == {op}
    assert getattr(resolved.ops, op) is getattr(reference, op)


@pytest.mark.parametrize("forced", ["cuda-magic", {"linear": "cuda-magic"}], ids=["all", "one"])
def test_an_unknown_provider_is_refused_by_name(forced: Any) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"no provider is called 'cuda-magic'; there are native, torch, reference"
    ):
        resolve_ops(CPU, torch.float32, forced=forced)


@pytest.fixture
def newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two preferred providers: one cannot run here, one has nothing but `linear`."""
    absent, partial = ModuleType("tests_absent_ops"), ModuleType("tests_partial_ops")
    absent.unavailable = lambda device, dtype: f"needs a quantum device, got {device}"  # type: ignore[attr-defined]
    partial.unavailable = lambda device, dtype: None  # type: ignore[attr-defined]
    partial.linear = reference.linear  # type: ignore[attr-defined]
    for module in (absent, partial):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    added = (("absent", absent.__name__), ("partial", partial.__name__))
    everywhere = [provider for provider in resolve.PROVIDERS if provider[0] != "native"]
    monkeypatch.setattr(resolve, "PROVIDERS", (*added, *everywhere))


@pytest.mark.usefixtures("newcomers")
def test_each_provider_passed_over_has_a_reason() -> None:
    choices = {choice.op: choice for choice in resolve_ops(CPU, torch.float32).choices}
    assert choices["linear"].provider == "partial"
    assert choices["linear"].refusals == ("absent: needs a quantum device, got cpu",)
    assert choices["route"].provider == "torch"
    assert choices["route"].refusals == ("absent: needs a quantum device, got cpu", "partial: has no route")


@pytest.mark.usefixtures("newcomers")
@pytest.mark.parametrize(
    ("forced", "sentence"),
    [
        ("absent", "op rms_norm cannot run on cpu: absent: needs a quantum device, got cpu"),
        ({"route": "partial"}, "op route cannot run on cpu: partial: has no route"),
    ],
    ids=["cannot-run", "lacks-the-op"],
)
def test_a_forced_provider_that_cannot_run_says_why(forced: Any, sentence: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        resolve_ops(CPU, torch.float32, forced=forced)
    assert str(caught.value) == sentence


def test_explain_backends_is_a_table_of_all_ops() -> None:
    head, *lines = explain_backends("cpu", torch.float32).splitlines()
    assert head.split() == ["op", "provider"]
    slow = [line.strip() for line in lines if "slow: " in line]
    refusals = [line.strip() for line in lines if " not native: " in line]
    assert set(refusals) == {"not native: is for bfloat16, the model runs in torch.float32"}
    lines = [line for line in lines if "slow: " not in line and " not native: " not in line]
    assert [line.split() for line in lines] == [[op, "torch"] for op in OP_NAMES]
    assert slow.count("slow: makes floats of FP8 weights in every call") == 2
    assert len({line.index("torch") for line in lines} | {head.index("provider")}) == 1


@pytest.mark.usefixtures("newcomers")
def test_explain_backends_shows_reasons_below_their_op() -> None:
    lines = [line.strip() for line in explain_backends("cpu").splitlines()]
    at = lines.index(f"{'route':<{max(map(len, OP_NAMES))}}  torch")
    assert lines[at + 1 : at + 3] == ["not absent: needs a quantum device, got cpu", "not partial: has no route"]
