"""Every provider of an op does what the reference does in float64, on every device, for every legal kind of shape."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import product
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.batch import Batch, Row
from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import explain_backends, reference, resolve, resolve_ops, torch_ops
from pdinfer.kernels.ops import OP_NAMES
from pdinfer.kernels.weight_formats import FP8Blocks, Int8Dynamic, Int8Static, expert, map_tensors

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


def assert_close(got: Tensor, exact: Tensor, dtype: torch.dtype, *, roundings: int = 4) -> None:
    """Within a few roundings of `dtype`, of the size of the largest value: sums cancel, and so do not keep more."""
    assert (got.dtype, got.shape) == (dtype, exact.shape)
    assert got.isfinite().all()
    if got.numel():
        error = (got.cpu().double() - exact).abs().max()
        assert error <= roundings * torch.finfo(dtype).eps * exact.abs().max().clamp(min=1)


def assert_rounded_once(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """As `assert_close`; in less than float32 also each value next to the exact one, as after float32 arithmetic."""
    assert_close(got, exact, dtype)
    if dtype != torch.float32:
        torch.testing.assert_close(got.cpu().double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)


# Rows


@for_every_provider
@pytest.mark.parametrize(("rows", "width"), [*product((0, 1, 5), (1, 7, 48))])
def test_rms_norm(provider: str, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = draw(rows, width).to(dtype), draw(width, seed=1).to(dtype)
    x[1:2] *= 1000
    x[2:3] = 0
    got = op_of(provider, "rms_norm", device, dtype)(x.to(device), weight.to(device), 1e-6)
    assert_rounded_once(got, reference.rms_norm(x.double(), weight.double(), 1e-6), dtype)


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
    assert_close(got, reference.linear(x.double(), weight.double()), dtype)


@for_every_provider
@pytest.mark.parametrize(("rows", "width"), [*product((0, 1, 5), (1, 7, 24))])
def test_gated_silu(provider: str, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = draw(rows, 2 * width).to(dtype)
    x[1:2] *= 100
    got = op_of(provider, "gated_silu", device, dtype)(x.to(device))
    assert_rounded_once(got, reference.gated_silu(x.double()), dtype)


@for_every_provider
@pytest.mark.parametrize(("rows", "heads", "width"), [*product((0, 1, 5), (1, 3, 4), (2, 6, 8))])
def test_rotate(provider: str, device: str, dtype: torch.dtype, rows: int, heads: int, width: int) -> None:
    x = draw(rows, heads, width + 3).to(dtype).to(device)[..., 3:]  # in models it is a slice too
    before = x.clone()
    angles = draw(rows, width // 2, seed=1) * 100
    got = op_of(provider, "rotate", device, dtype)(x, angles.cos().to(device), angles.sin().to(device))
    assert torch.equal(x, before)
    assert_rounded_once(got, reference.rotate(x.cpu().double(), angles.cos(), angles.sin()), dtype)


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
    assert_close(got, reference.grouped_mlp(x.double(), counts_E, gate_up.double(), down.double()), dtype)


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
    assert_close_by_row(got, by_hand_fp8(x, weight), dtype)


def by_hand_fp8(x: Tensor, weight: FP8Blocks) -> Tensor:
    """Element by element of the scales, in float64."""
    rows, columns = weight.numbers.shape
    worth, rounded = weight.numbers.double(), x.double().clone()
    of_part = math.ceil(rows // weight.parts / 128)
    for row, column in product(range(rows), range(0, columns, 128)):
        part, within = divmod(row, rows // weight.parts)
        worth[row, column : column + 128] *= weight.scale[part * of_part + within // 128, column // 128].double()
    for token, column in product(range(len(x)), range(0, columns, 128)):
        block = rounded[token, column : column + 128]
        scale = max(float(block.abs().max()), 1e-4) / 448
        if weight.ue8m0:
            scale = 2.0 ** math.ceil(math.log2(scale))
        rounded[token, column : column + 128] = (block / scale).to(torch.float8_e4m3fn).double() * scale
    return rounded @ worth.T


def assert_close_by_row(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """As `assert_close`, for tokens of different sizes."""
    assert (got.dtype, got.shape) == (dtype, exact.shape)
    largest = exact.abs().amax(-1, keepdim=True) if exact.numel() else exact
    error = (got.cpu().double() - exact).abs()
    assert bool((error <= 8 * torch.finfo(dtype).eps * largest).all())


@for_every_provider
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("size", MATRICES)
def test_linear_int8(provider: str, device: str, dtype: torch.dtype, rows: int, size: tuple[int, int]) -> None:
    x, weight = outliers(rows, size[1]).to(dtype), int8_weight(*size)
    got = op_of(provider, "linear_int8", device, dtype)(x.to(device), int8_weight(*size, device=device))
    amax = x.double().abs().amax(-1, keepdim=True) if rows else x.double()[:, :1]
    rounded = (x.double() * 127 / amax.clamp(min=1e-10)).round() * amax / 127
    assert_close_by_row(got, rounded @ (weight.numbers.double() * weight.scale.double()).T, dtype)


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
        scaled = (x.double() / weight.input_scale[part].double()).round() + weight.input_offset[part]
        exact.append(scaled.clamp(-128, 127) @ numbers.T)
    sums = torch.cat(exact, -1) + weight.output_offset[:, 0]
    assert_close_by_row(got, sums * weight.output_scale[:, 0].double(), dtype)


@for_every_provider
@pytest.mark.parametrize("op", ["linear_fp8", "linear_fp8-ue8m0", "linear_int8", "linear_int8_static"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_stays_so(
    provider: str, device: str, dtype: torch.dtype, op: str, bad: float
) -> None:
    """Integers cannot say NaN, and an engine must see it."""
    x = draw(3, 130).to(dtype).to(device)
    x[1, 129] = bad
    weight = {
        "linear_fp8": fp8_weight(9, 130, device=device),
        "linear_fp8-ue8m0": fp8_weight(9, 130, ue8m0=True, device=device),
        "linear_int8": int8_weight(9, 130, device=device),
        "linear_int8_static": static_weight(9, 130, 1, device),
    }[op]
    finite = op_of(provider, op.removesuffix("-ue8m0"), device)(x, weight).isfinite().all(-1)
    assert finite.tolist() == [True, False, True]


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
    rounded = op_of(provider, "round_fp8", device, dtype)(x, ue8m0=False)
    torch.testing.assert_close(rounded, op_of(provider, "linear_fp8", device, dtype)(x, fp8))
    torch.testing.assert_close(
        op_of(provider, "round_int8", device, dtype)(x), op_of(provider, "linear_int8", device, dtype)(x, int8)
    )


@for_every_provider
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 65])
@pytest.mark.parametrize(("heads", "width", "outs"), [(1, 1, 1), (3, 7, 5), (2, 12, 128), (3, 40, 256)])
def test_products_of_heads(
    provider: str, device: str, dtype: torch.dtype, rows: int, heads: int, width: int, outs: int
) -> None:
    """Views of larger tensors, as in models."""
    x, weight = draw(rows, heads, width + 3).to(dtype), (draw(heads, width + 8, outs, seed=1) * width**-0.5).to(dtype)
    got = op_of(provider, "heads_in", device, dtype)(x.to(device)[..., :width], weight.to(device)[:, :width])
    assert_close(got, reference.heads_in(x[..., :width].double(), weight[:, :width].double()), dtype)
    back, weight = (
        draw(rows, heads, outs, seed=2).to(dtype),
        (draw(heads, width + 8, outs, seed=3) * outs**-0.5).to(dtype),
    )
    got = op_of(provider, "heads_out", device, dtype)(back.to(device), weight.to(device)[:, 8:])
    assert_close(got, reference.heads_out(back.double(), weight[:, 8:].double()), dtype)


@for_every_provider
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 3, 2), (1, 1, 1), (5, 4, 4), (33, 9, 3)])
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
    exact = reference.combine_rows(y.double(), expected[2], weights.double())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), exact, rtol=1e-5, atol=1e-5)


@every_provider
@every_device
def test_a_router_stays_float32(provider: str, device: str) -> None:
    """Also in a model whose other products are bfloat16."""
    x, weight = draw(3, 32), draw(8, 32, seed=1)
    got = op_of(provider, "linear", device, torch.bfloat16)(x.to(device), weight.to(device))
    assert_close(got, reference.linear(x.double(), weight.double()), torch.float32)


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
        return Batch.build(rows, page_size=self.page_size, device=CPU, absorbed=True).page_table_BM

    def prefill(self, op: Any, pages: Tensor, to: Any) -> Tensor:
        latent, rope, nope, v = self.dims
        q = draw(sum(self.query_lens), self.heads, nope + rope).to(self.dtype)
        kv_b = (draw(self.heads * (nope + v), latent, seed=1) * latent**-0.5).to(self.dtype)
        table = self.table.to(pages.device)
        return op(to(q), pages, to(kv_b), table, self.query_lens, self.contexts, v_head_dim=v, scale=SCALE)

    def decode(self, op: Any, pages: Tensor, to: Any) -> Tensor:
        latent, rope, _, _ = self.dims
        q_latent = draw(len(self.contexts), self.heads, latent).to(self.dtype)
        q_rope = draw(len(self.contexts), self.heads, rope, seed=1).to(self.dtype)
        lens = torch.tensor(self.contexts, dtype=torch.int64, device=pages.device)
        return op(to(q_latent), to(q_rope), pages, self.table.to(pages.device), lens, scale=SCALE)

    def run(self, name: str, provider: str, device: str, pages: Tensor | None = None) -> Tensor:
        op = op_of(provider, name, device, self.dtype)
        pages = (self.pages if pages is None else pages).to(device)
        before = pages.clone()
        result = (self.prefill if name == "mla_prefill" else self.decode)(op, pages, lambda x: x.to(device))
        assert pages.equal(before) or torch.equal(pages.nan_to_num(), before.nan_to_num())
        return result

    def exact(self, name: str) -> Tensor:
        op = getattr(reference, name)
        return (self.prefill if name == "mla_prefill" else self.decode)(op, self.pages.double(), Tensor.double)


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
        case = Attention(dtype, heads, page_size, contexts, query_lens_of(contexts), dims)
        # scores of wide heads are large, and what is lost of them their exponentials lose
        roundings = 4 if dims[0] < 32 else 16
        assert_close(case.run(name, provider, device), case.exact(name), dtype, roundings=roundings)


@for_every_provider
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_does_not_see_other_sequences(provider: str, device: str, dtype: torch.dtype, name: str) -> None:
    case = Attention(dtype, 3, 4, (9, 6, 12), (1, 1, 1))
    poisoned = case.pages
    poisoned[case.owned[1]] = torch.nan
    got = case.run(name, provider, device, poisoned)[[0, 2]]
    assert_close(got, case.exact(name)[[0, 2]], dtype)


@every_dtype
@pytest.mark.parametrize("block_bytes", [1, 4 * 3 * 40 * 7, 4 * 3 * 40 * 40])
def test_the_size_of_a_block_of_scores_changes_nothing(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one query, of a number that does not divide the queries, and of all of them."""
    monkeypatch.setattr(torch_ops, "SCORE_BLOCK_BYTES", block_bytes)
    case = Attention(dtype, 3, 16, (40, 33), (40, 20))
    assert_close(case.run("mla_prefill", "torch", "cpu"), case.exact("mla_prefill"), dtype)


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

    @property
    def biases(self) -> Tensor | None:
        return None if self.bias is None else draw(self.experts, seed=5) * 0.15 + self.bias

    def expected(self, logits: Sequence[float]) -> dict[int, float]:
        """The weight of each chosen expert of one token, by the rule's definition in plain floats."""
        if self.sigmoid:
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        else:
            total = sum(math.exp(logit) for logit in logits)
            scores = [math.exp(logit) / total for logit in logits]
        biases = [0.0] * self.experts if self.biases is None else self.biases.tolist()
        choice = [score + bias for score, bias in zip(scores, biases, strict=True)]
        size = self.experts // self.groups
        groups = [range(start, start + size) for start in range(0, self.experts, size)]
        if self.groups > 1:
            counted = 1 if self.bias is None else 2
            groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:counted]))
            groups = groups[: self.top_k_groups]
        allowed = sorted((expert for group in groups for expert in group), key=lambda e: -choice[e])
        chosen = allowed[: self.top_k]
        total = sum(scores[expert] for expert in chosen) if self.normalize else 1.0
        return {expert: scores[expert] / total * self.scaling for expert in chosen}


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
    logits = draw(tokens, rule.experts) * 2
    ids, weights = op_of(provider, "route", device, torch.bfloat16)(
        logits.to(device),
        None if rule.biases is None else rule.biases.to(device),
        sigmoid=rule.sigmoid,
        top_k=rule.top_k,
        num_groups=rule.groups,
        top_k_groups=rule.top_k_groups,
        normalize=rule.normalize,
        scaling_factor=rule.scaling,
    )
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert ids.shape == weights.shape == (tokens, rule.top_k)
    for row, chosen, weight in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        assert dict(zip(chosen, weight, strict=True)) == pytest.approx(rule.expected(row), rel=1e-5)


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
