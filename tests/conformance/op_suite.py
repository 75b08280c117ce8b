"""What conformance tests of ops share: every provider on every device, inputs, and how far off a result may be.

A provider from elsewhere passes these tests once it is in `kernels.resolve.PROVIDERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import OpSpec, reference, resolve, resolve_ops
from pdinfer.kernels.arguments import DecodeCache, PrefillCache
from pdinfer.kernels.formats import IN_STRIPS
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.format import Shape
from pdinfer.kernels.formats.four_bits import GROUP, MXFP4, FourBits, packed
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.formats.strips import FourBitStrips, FP8Strips, Strips
from pdinfer.kernels.formats.weights import assign, expert, map_tensors
from pdinfer.kernels.native import build
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.torch.products import sum_in_float32
from pdinfer.model.batch import Batch, Row
from tests.hosts import within
from tests.rounding import assert_within, error_of_attention, error_of_mlp, error_of_products, gamma, rounded
from tests.simulated.device import why_not

CPU = torch.device("cpu")
LIBRARIES = ("deep_gemm", "flash_mla")
"""Providers that take only shapes of their own. They have suites of their own, which draw on this one."""
PROVIDERS = resolve.PROVIDERS
NAMES = [each.name for each in PROVIDERS if each.name not in LIBRARIES]
SCALE = 0.25

DEVICES = {"cpu": (), "cuda": (pytest.mark.gpu,), "gpusim": (pytest.mark.full,)}
"""Kinds of device, with the marks of their cases."""
DTYPES = (torch.float32, torch.bfloat16)


@cache
def serves(provider: str, op: str, device: str, dtype: torch.dtype) -> bool:
    """Return whether the provider has the op there, by itself or as a composition of its ops. Without CUDA the
    reference stands for all providers there, so that cases for a card are counted and none is run."""
    if device == "cuda" and not torch.cuda.is_available():
        return provider == "reference"
    if device == "gpusim":  # which is for what torch does
        there = not why_not() and provider in ("torch", "reference", resolve.COMPOSITION)
        return there and serves(provider, op, "cpu", dtype)
    try:
        fused_of(provider, op, device, dtype)
    except BackendUnavailable:
        return False
    return True


def places(*ops: str, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Return every provider that serves all of these ops, with each device where it does."""
    return [
        (name, device) for device in DEVICES for name in NAMES if all(serves(name, op, device, dtype) for op in ops)
    ]


def every_place(*ops: str, dtype: torch.dtype = torch.float32) -> pytest.MarkDecorator:
    """Run a test as `provider` and `device` for each that serves these ops in a model of `dtype`."""
    cases = [
        pytest.param(name, device, marks=DEVICES[device], id=f"{name}-{device}")
        for name, device in places(*ops, dtype=dtype)
    ]
    return pytest.mark.parametrize(("provider", "device"), cases)


def for_every_provider(*ops: str) -> pytest.MarkDecorator:
    """Run a test as `dtype`, `provider` and `device` for each that serves these ops."""
    cases = [
        pytest.param(dtype, name, device, marks=DEVICES[device], id=f"{str(dtype)[6:]}-{name}-{device}")
        for dtype in DTYPES
        for name, device in places(*ops, dtype=dtype)
    ]
    return pytest.mark.parametrize(("dtype", "provider", "device"), cases)


def for_every_op(
    called: str,
    needs: Mapping[str, Sequence[str]],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    devices: Sequence[str] = tuple(DEVICES),
) -> pytest.MarkDecorator:
    """Run a test for each name in `needs`, as an argument `called` so, beside `for_every_provider` of the ops that it
    needs."""
    cases = [
        pytest.param(of, dtype, name, device, marks=DEVICES[device], id=f"{of}-{str(dtype)[6:]}-{name}-{device}")
        for of, ops in needs.items()
        for dtype in dtypes
        for name, device in places(*ops, dtype=dtype)
        if device in devices
    ]
    return pytest.mark.parametrize((called, "dtype", "provider", "device"), cases)


def on_a_cpu(*ops: str, dtypes: Sequence[torch.dtype] = DTYPES) -> pytest.MarkDecorator:
    """Run a test as `dtype` and `provider` for each that serves these ops on a CPU."""
    cases = [
        pytest.param(dtype, name, id=f"{str(dtype)[6:]}-{name}")
        for dtype in dtypes
        for name in NAMES
        if all(serves(name, op, "cpu", dtype) for op in ops)
    ]
    return pytest.mark.parametrize(("dtype", "provider"), cases)


HOST: str | None = None
"""The setting under which ops run, of tests.hosts.SETTINGS."""

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def op_of(provider: str, name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the op of `provider`. Raises BackendUnavailable where it cannot run or does not offer it: no test is made
    for such a place."""
    sum_in_float32(torch.device(device))
    return within_host(_ops(provider, name, device, dtype)[name])


def within_host(op: Any) -> Any:
    """Have an op run under the setting of HOST, if there is one."""
    return op if HOST is None else within(HOST, op)


def fused_of(provider: str, name: str, device: str, dtype: torch.dtype) -> Any:
    """Return the op of a provider, or else the composition of its ops. Of one that lacks other ops too, it is the op
    alone."""
    try:
        return _ops(provider, None, device, dtype)[name]
    except BackendUnavailable:
        return op_of(provider, name, device, dtype)


def _ops(provider: str, name: str | None, device: str, dtype: torch.dtype) -> Ops:
    """Return the ops of a provider, or those that are chosen beside its op of this name. Choosing takes longer than
    most ops of tests, so it is done once, but each time where a test has put a library in the place of others."""
    choose = _chosen if resolve.PROVIDERS is PROVIDERS else _chosen.__wrapped__
    return choose(provider, name, device, dtype, build._library)


@cache
def _chosen(provider: str, name: str | None, device: str, dtype: torch.dtype, native: object) -> Ops:
    """`native` makes the library of native ops: other bodies may serve other ops."""
    return resolve_ops(OpSpec(device=device, dtype=dtype), forced=provider if name is None else {name: provider}).ops


def draw(*shape: int, seed: int = 0) -> Tensor:
    return _drawn(shape, seed).clone()


@lru_cache(maxsize=64)
def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    # the cases of a test draw the same, which takes as long as many an op
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def fp8_weight(*shape: int, parts: int = 1, ue8m0: bool = False, device: str = "cpu") -> FP8Blocks:
    """Return numbers [..., parts * rows, columns] for a shape (..., rows, columns), with scales far from one
    another."""
    *lead, rows, columns = shape
    numbers = draw(*lead, parts * rows, columns, seed=1) * 100
    scale = draw(*lead, parts * math.ceil(rows / 128), math.ceil(columns / 128), seed=2).exp() * 0.01 * columns**-0.5
    return FP8Blocks(
        numbers=numbers.clamp(-448, 448).to(torch.float8_e4m3fn).to(device),
        scale=scale.to(device),
        ue8m0=ue8m0,
        parts=parts,
    )


def for_tma(rows: FP8Rows) -> FP8Rows:
    """Return the same rows with their scales as a GPU's TMA loads them."""
    pitch = -(-len(rows) // 4) * 4
    scales_NT = rows.scales_TN.new_full((rows.scales_TN.shape[1], pitch), math.nan)
    scales_TN = scales_NT.T[: len(rows)].copy_(rows.scales_TN)
    return attrs.evolve(rows, scales_TN=scales_TN)


def int8_weight(*shape: int, device: str = "cpu") -> Int8Dynamic:
    numbers = (draw(*shape, seed=1) * 40).round().clamp(-128, 127).to(torch.int8)
    scale = draw(*shape[:-1], 1, seed=2).exp() * 0.02 * shape[-1] ** -0.5
    return Int8Dynamic(numbers=numbers.to(device), scale=scale.to(device))


def in_strips(matrix: Tensor, parts: int = 1) -> Strips:
    """Return one matrix [O, I], or a stack [E, O, I] of them, with `parts` of the rows one below the other."""
    stack_EOI = matrix if matrix.ndim == 3 else matrix[None]
    size = Shape(len(stack_EOI), parts, stack_EOI.shape[1] // parts, stack_EOI.shape[2])
    strips = Strips.empty(size, dtype=torch.bfloat16, device=matrix.device)
    assign(strips, stack_EOI)
    return strips if matrix.ndim == 3 else Strips(strips.numbers[0])


def fp8_in_strips(blocks: FP8Blocks) -> FP8Strips:
    """Return one matrix, or a stack of them, with the same numbers and scales in strips."""
    stack = map_tensors(blocks, lambda tensor: tensor if tensor.ndim == 3 else tensor[None])
    assert isinstance(stack, FP8Blocks)
    experts, rows, columns = stack.numbers.shape
    size = Shape(experts, blocks.parts, rows // blocks.parts, columns)
    strips = FP8Strips.empty(size, dtype=torch.bfloat16, device=blocks.numbers.device, ue8m0=blocks.ue8m0)
    strips.fill(stack)
    alone = strips if blocks.numbers.ndim == 3 else expert(strips, 0)
    assert isinstance(alone, FP8Strips)
    return alone


def four_bit_weight(kind: type[FourBits], *shape: int) -> FourBits:
    """Return codes of every value, and scales that are alike in the mean."""
    codes = (draw(*shape, seed=1) * 5 + 7.5).round().clamp(0, 15).to(torch.uint8)
    scales = (draw(*shape[:-1], shape[-1] // GROUP, seed=2).exp() * 0.02 * shape[-1] ** -0.5).bfloat16()
    if kind is MXFP4:
        scales = torch.frexp(scales.float())[1].add(127).to(torch.uint8)
    return kind(numbers=packed(codes), scale=scales)  # type: ignore[call-arg]


def floats_of(weight: FourBits) -> Tensor:
    """Return what it stands for, in float64."""
    floats = torch.empty(*weight.numbers.shape[:-1], 2 * weight.numbers.shape[-1], dtype=torch.float64)
    weight.floats_into(floats)
    return floats


def four_bits_in_strips(weight: FourBits, parts: int = 1) -> FourBitStrips:
    """Return one matrix, or a stack of them, with `parts` of the rows one below the other, in strips."""
    stack = weight if weight.numbers.ndim == 3 else weight.map(lambda tensor: tensor[None])
    experts, rows, columns = stack.numbers.shape
    kind = IN_STRIPS[type(weight)]
    strips = kind.empty(Shape(experts, parts, rows // parts, 2 * columns), dtype=torch.bfloat16, device=CPU)
    assert isinstance(strips, FourBitStrips)
    strips.fill(stack)
    return strips if weight.numbers.ndim == 3 else strips.map(lambda tensor: tensor[0])


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


@attrs.frozen
class Rows:
    """A form in which rows reach experts: sorted by expert with `behind` rows of NaN behind the last one, or in room
    for N rows per expert, a multiple of `room`, of which the rest are NaN. Counts are int64 or int32."""

    behind: int = 0
    room: int = 0
    dtype: torch.dtype = torch.int64

    def run(self, op: Callable[[Tensor, Tensor], Tensor], x_SD: Tensor, counts: Sequence[int]) -> Tensor:
        """Return what `op(x, counts_E)` makes of these rows."""
        counts_E = torch.tensor(counts, dtype=self.dtype, device=x_SD.device)
        if not self.room:
            behind_SD = x_SD.new_full((self.behind, x_SD.shape[1]), torch.nan)
            return op(torch.cat((x_SD, behind_SD)), counts_E)[: len(x_SD)]
        room = -(-(max(counts) + 2) // self.room) * self.room
        x_END = x_SD.new_full((len(counts), room, x_SD.shape[1]), torch.nan)
        for room_ND, rows in zip(x_END, x_SD.split(list(counts)), strict=True):
            room_ND[: len(rows)] = rows
        y_END = op(x_END, counts_E)
        assert y_END.shape == x_END.shape
        return torch.cat([y_ND[:count] for y_ND, count in zip(y_END, counts, strict=True)])


ROWS = [
    Rows(),
    Rows(behind=3, dtype=torch.int32),
    Rows(room=1, dtype=torch.int32),
]


def assert_product(got: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Assert that it is x @ weight.T."""
    x, weight = x.double(), weight.double()
    assert_within(got, reference.linear(x, weight), error_of_products(x, weight), dtype)


def assert_experts(
    got: Tensor, counts: Sequence[int], x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype
) -> None:
    """Assert that it is what these experts make of rows of which each has so many."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    rows = zip(x.split(list(counts)), gate_up, down, strict=True)
    error = torch.cat([error_of_mlp(*row, dtype) for row in rows])
    assert_within(got, reference.grouped_mlp(x, torch.tensor(counts), gate_up, down), error, dtype)


def assert_turned(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Assert equality but for two products and their sum, of numbers no larger than the head is long."""
    assert_within(got, exact, 2 * gamma(3) * exact.norm(dim=-1, keepdim=True), dtype)


@attrs.frozen
class Attention:
    """Inputs of both attention ops: sequences whose pages lie anywhere, and NaN in every slot that is not theirs."""

    dtype: torch.dtype
    heads: int
    page_size: int
    contexts: tuple[int, ...]
    query_lens: tuple[int, ...]
    dims: tuple[int, int, int, int] = (16, 8, 12, 10)  # latent, rope, nope, v
    num_queries: int = 1
    """Of each sequence in decode."""
    table_dtype: torch.dtype = torch.int32
    spare_columns: int = 0
    """How much wider than the longest context the table is in decode, of pages of other sequences."""
    num_live: tuple[int, ...] | None = None
    """How many queries of each sequence are live in decode."""

    @cached_property
    def owned(self) -> list[list[int]]:
        """The pages of each sequence. Those of all sequences are shuffled, and one page is left out."""
        sizes = [-(-context // self.page_size) for context in self.contexts]
        shuffled = torch.randperm(sum(sizes) + 1, generator=torch.Generator().manual_seed(3)).tolist()
        return [[shuffled.pop() for _ in range(size)] for size in sizes]

    @property
    def pages(self) -> Tensor:
        """A copy of the pool."""
        return _filled(self).clone()

    def fill(self) -> Tensor:
        """Return the pool."""
        latent, rope, _, _ = self.dims
        used = self.owned
        num_pages = sum(map(len, used)) + 1
        pages = torch.full((num_pages, self.page_size, latent + rope), torch.nan)
        for row, (context, mine) in enumerate(zip(self.contexts, used, strict=True)):
            cached = draw(context, latent + rope, seed=row)
            for page, part in zip(mine, cached.split(self.page_size), strict=True):
                pages[page, : len(part)] = part
        return pages.to(self.dtype)

    @cached_property
    def table(self) -> Tensor:
        rows = [Row([0], context - 1, pages) for context, pages in zip(self.contexts, self.owned, strict=True)]
        return Batch.build(rows, page_size=self.page_size, device=CPU, decode=True).page_table_BM

    @property
    def wide_table(self) -> Tensor:
        """The table of decode."""
        spare = torch.arange(len(self.contexts) * self.spare_columns) % (sum(map(len, self.owned)) + 1)
        return torch.cat((self.table, spare.view(len(self.contexts), self.spare_columns)), 1).to(self.table_dtype)

    @property
    def of_prefill(self) -> tuple[Tensor, Tensor]:
        """The queries and kv_b."""
        latent, rope, nope, v = self.dims
        q = draw(sum(self.query_lens), self.heads, nope + rope).to(self.dtype)
        return q, (draw(self.heads * (nope + v), latent, seed=1) * latent**-0.5).to(self.dtype)

    @property
    def of_decode(self) -> tuple[Tensor, Tensor]:
        """Both parts of the queries."""
        latent, rope, _, _ = self.dims
        rows = (len(self.contexts), self.num_queries, self.heads)
        return draw(*rows, latent).to(self.dtype), draw(*rows, rope, seed=1).to(self.dtype)

    def prefill(self, op: Any, pages: Tensor, to: Any) -> Tensor:
        q, kv_b = self.of_prefill
        table, v = self.table.to(pages.device), self.dims[3]
        cache = PrefillCache(pages, table, self.query_lens, self.contexts)
        return op(to(q), to(kv_b), cache, v_head_dim=v, scale=SCALE)

    def decode(self, op: Any, pages: Tensor, to: Any) -> Tensor:
        q_latent, q_rope = self.of_decode
        lens = torch.tensor(self.contexts, dtype=torch.int64, device=pages.device)
        live = None
        if self.num_live is not None:
            live = torch.arange(self.num_queries) < torch.tensor(self.num_live)[:, None]
            live = live.flatten().to(pages.device)
        cache = DecodeCache(pages, self.wide_table.to(pages.device), lens, live_T=live)
        return op(to(q_latent), to(q_rope), cache, scale=SCALE)

    def run(self, name: str, provider: str, device: str, pages: Tensor | None = None) -> Tensor:
        op = op_of(provider, name, device, self.dtype)
        pages = (self.pages if pages is None else pages).to(device)
        before = pages.clone()
        result = (self.prefill if name == "mla_prefill" else self.decode)(op, pages, lambda x: x.to(device))
        assert pages.equal(before) or torch.equal(pages.nan_to_num(), before.nan_to_num())
        return result

    def unpacked(self) -> Tensor:
        """The values of the pages in float64."""
        return self.pages.double()

    def expected(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the exact result, and how far off it one may be."""
        return _expected(self, name)

    def exact(self, name: str) -> Tensor:
        op = getattr(reference, name)
        return (self.prefill if name == "mla_prefill" else self.decode)(op, self.unpacked(), Tensor.double)

    def error(self, name: str, exact: Tensor) -> Tensor:
        latent, _, nope, v = self.dims
        prefill, pages, first, errors = name == "mla_prefill", self.unpacked(), 0, []
        q_THQ = self.of_prefill[0].double() if prefill else torch.cat(self.of_decode, -1).flatten(0, 1).double()
        kv_b_HOC = self.of_prefill[1].double().view(self.heads, -1, latent)
        for context, count, mine in zip(self.contexts, self.query_lens, self.owned, strict=True):
            count = count if prefill else self.num_queries
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
        return torch.cat(errors).view_as(exact) if errors else torch.zeros_like(exact)

    def check(self, name: str, provider: str, device: str = "cpu") -> None:
        assert_within(self.run(name, provider, device), *self.expected(name), self.dtype)


@cache
def _filled(case: Attention) -> Tensor:
    return case.fill()


@cache
def _expected(case: Attention, name: str) -> tuple[Tensor, Tensor]:
    # once for all providers
    exact = case.exact(name)
    return exact, case.error(name, exact)


def contexts_of(page_size: int, count: int) -> tuple[int, ...]:
    """Return lengths on both sides of the borders of pages."""
    return (page_size + 1, 1, page_size, max(1, 3 * page_size - 1), 2 * page_size)[:count]


def query_lens_of(contexts: Sequence[int]) -> tuple[int, ...]:
    """Return the query lengths of a whole prompt, a single token, and chunks after what is cached already."""
    wanted = (contexts[0], 1, 1, 4, contexts[-1] // 2 + 1) if contexts else ()
    return tuple(min(context, want) for context, want in zip(contexts, wanted, strict=False))


ATTENTION = {"mla_prefill": ("mla_prefill",), "mla_decode": ("mla_decode",)}
"""The ops of attention, and what each needs."""
