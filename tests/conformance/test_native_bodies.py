"""Native kernels have a body for each kind of CPU. Those that this CPU can run keep to the reference, and so do those
for AVX-512 and AMX with instructions in plain C (native/avx512.h). All suites run on a body by
`pytest tests/conformance -k native --native-body NAME`."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.kernels import OpSpec, reference, resolve_ops
from pdinfer.kernels.arguments import DecodeCache
from pdinfer.kernels.formats.four_bits import MXFP4, FourBits, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.native import ops as native
from pdinfer.kernels.native.build import Kernels
from pdinfer.process import compiled
from tests.backends import ROOT, child_environment
from tests.compilers import why_no_code_for_this_cpu
from tests.conformance.native_builds import BODIES, BODIES_HERE, Shared, as_native, built_with
from tests.conformance.op_suite import (
    ATTENTION,
    Attention,
    assert_experts,
    assert_product,
    draw,
    floats_of,
    four_bit_weight,
    four_bits_in_strips,
    fp8_in_strips,
    fp8_weight,
    in_strips,
    int8_weight,
)
from tests.joined import for_each
from tests.rounding import assert_within

QUICK = ("as it is", "tiles in C", "AMX in C")
"""The bodies that are tried each time; test_native_shapes.py tries every op of the others that run here."""
SUITES = ("ops", "attention_ops", "quantized_ops", "not_finite", "fused_ops", "native_ops", "routing_ops", "page_ops")
"""What runs on every body, at times."""
HERE = [pytest.param(name, marks=() if name in QUICK else (pytest.mark.full,)) for name in BODIES_HERE]


@pytest.fixture(params=HERE)
def body(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Let the native ops be those of a library that was compiled so."""
    with as_native(built_with(*BODIES[request.param])) as library:
        if request.param != "as it is":
            assert library.find_tiles() == (request.param in ("tiles in C", "AMX in C"))
        yield library
        if request.param == "AMX in C":
            assert not any(Shared(library, ctypes.c_long, "tile_faults").values)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_x86_cpu_with_a_compiler_has_native_ops() -> None:
    if not compiled.cpu_flags() or why_no_code_for_this_cpu():
        pytest.skip("needs an x86 CPU and a C compiler")
    found = resolve_ops(OpSpec(device="cpu", dtype=torch.bfloat16)).choices
    chosen = {choice.op for choice in found if choice.provider == "native"}
    assert {"linear", "grouped_mlp", "heads_in", "heads_out", "mla_decode", "rms_norm"} <= chosen
    # with AMX, torch's attention of many queries multiplies tiles
    assert ("mla_prefill" in chosen) == ("amx_bf16" not in compiled.cpu_flags())


def experts_of(counts: tuple[int, ...], width: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(sum(counts), width).bfloat16()
    gate_up = (draw(len(counts), 2 * inner, width, seed=1) * width**-0.5).bfloat16()
    return x, gate_up, (draw(len(counts), width, inner, seed=2) * inner**-0.5).bfloat16()


@for_each("counts", [(17,), (16, 0, 1, 19), (3, 1, 2), (20,) * 9])
@for_each("sizes", [(33, 7), (1, 1), (300, 48)])
def test_experts(body: Kernels, counts: tuple[int, ...], sizes: tuple[int, int]) -> None:
    x, gate_up, down = experts_of(counts, *sizes)
    got = native.products.grouped_mlp(x, torch.tensor(counts), gate_up, down)
    assert_experts(got, counts, x, gate_up, down, torch.bfloat16)


@for_each(("rows", "sizes"), [*product((1, 4, 15, 17, 600), ((33, 40), (264, 21)))])
def test_linear(body: Kernels, rows: int, sizes: tuple[int, int]) -> None:
    x, weight = draw(rows, sizes[0]).bfloat16(), draw(sizes[1], sizes[0], seed=1).bfloat16()
    got = native.products.linear(x, weight)
    assert_product(got, x, weight, torch.bfloat16)


@for_each("rows", [1, 3, 4, 15, 17, 600])
@for_each(("outs", "parts"), [(32, 1), (96, 1), (64, 2)])
def test_linear_with_strips(body: Kernels, rows: int, outs: int, parts: int) -> None:
    x, weight = draw(rows, 288).bfloat16(), draw(outs, 288, seed=1).bfloat16()
    got = native.products.linear_strips(x, in_strips(weight, parts))
    assert_product(got, x, weight, torch.bfloat16)


@for_each("counts", [(17,), (1, 0, 3, 19), (3, 1, 2), (300, 2), (20,) * 9])
@for_each("sizes", [(32, 64), (288, 32)])
def test_experts_with_strips(body: Kernels, counts: tuple[int, ...], sizes: tuple[int, int]) -> None:
    x, gate_up, down = experts_of(counts, *sizes)
    got = native.products.grouped_mlp_strips(x, torch.tensor(counts), in_strips(gate_up, 2), in_strips(down))
    assert_experts(got, counts, x, gate_up, down, torch.bfloat16)


@for_each("heads", [1, 5, 16])
@for_each("name", ATTENTION)
def test_attention(body: Kernels, name: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.attention, "PART_TOKENS", 64)
    case = Attention(torch.bfloat16, heads, 16, (150, 33, 64, 97), (150, 20, 1, 60), (64, 32, 34, 64), num_queries=2)
    run = case.prefill if name == "mla_prefill" else case.decode
    assert_within(run(getattr(native.attention, name), case.pages, lambda x: x), *case.expected(name), torch.bfloat16)


@for_each(("heads", "page_size"), [(5, 3), (16, 16)])
def test_a_draft_that_was_not_written_changes_no_query_before_it(
    body: Kernels, heads: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles hold rows of several queries. The last tokens lie around the borders of blocks and of parts."""
    monkeypatch.setattr(native.attention, "PART_TOKENS", 128)
    contexts = (20, 4, 65, 66, 67, 130)
    case = Attention(torch.bfloat16, heads, page_size, contexts, (1,) * 6, (64, 32, 34, 64), num_queries=4)
    exact, error = case.expected("mla_decode")
    for written in (1, 2, 3):
        unused = case.pages
        for mine, context in zip(case.owned, contexts, strict=True):
            for position in range(context - 4 + written, context):
                unused[mine[position // page_size], position % page_size] = torch.nan
        got = case.decode(native.attention.mla_decode, unused, lambda x: x)
        assert_within(got[:, :written], exact[:, :written], error[:, :written], torch.bfloat16)
        assert got[:, written:].isnan().any(-1).all()


@for_each("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_stays_alone(body: Kernels, bad: float) -> None:
    pages, table, lens = draw(10, 16, 96).bfloat16(), torch.arange(10).view(2, 5), torch.tensor([70, 66])
    latent, rope = draw(2, 3, 7, 64).bfloat16(), draw(2, 3, 7, 32).bfloat16()
    good = native.attention.mla_decode(latent, rope, DecodeCache(pages, table, lens), scale=0.25)
    for spoilt in (latent, rope):
        before = spoilt[1, 2, 4, 31].item()
        spoilt[1, 2, 4, 31] = bad
        got = native.attention.mla_decode(latent, rope, DecodeCache(pages, table, lens), scale=0.25)
        spoilt[1, 2, 4, 31] = before
        lost = (~got.isfinite()).any(-1)
        assert lost.nonzero().tolist() == [[1, 2, 4]]
        assert torch.equal(got[~lost], good[~lost])


def test_tokens_of_a_tile_lie_in_the_order_of_the_table(body: Kernels) -> None:
    """The sixteenth token lies fifteen rows behind the first, but those between have changed places."""
    pages = draw(4, 5, 96).bfloat16()
    latent, rope, lens = draw(1, 1, 5, 64).bfloat16(), draw(1, 1, 5, 32).bfloat16(), torch.tensor([20])
    in_order = DecodeCache(pages, torch.tensor([[0, 1, 2, 3]]), lens)
    turned = DecodeCache(pages[[0, 2, 1, 3]], torch.tensor([[0, 2, 1, 3]]), lens)
    expected, got = (native.attention.mla_decode(latent, rope, cache, scale=0.25) for cache in (in_order, turned))
    assert torch.equal(got, expected)


@for_each("rows", [1, 2, 5, 16])
@for_each("sizes", [(24, 43), (9, 200), (7, 130)])
def test_stored_weights(body: Kernels, rows: int, sizes: tuple[int, int]) -> None:
    x, int8, fp8 = draw(rows, sizes[1]).bfloat16(), int8_weight(*sizes), fp8_weight(*sizes)
    got = native.products.linear_w8a8_dynamic(x, int8), native.products.linear_fp8(x, fp8)
    with as_native(built_with()):  # which test_quantized_ops.py compares with the reference
        expected = native.products.linear_w8a8_dynamic(x, int8), native.products.linear_fp8(x, fp8)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[0], reference.linear_w8a8_dynamic(x, int8), rtol=0.01, atol=0.01)
    torch.testing.assert_close(got[1], expected[1], rtol=0.01, atol=0.01)


def whole_fp8(rows: int, columns: int, parts: int) -> FP8Blocks:
    """Return every number there is but NaN, in blocks whose scales are powers of two: products with ones are exact."""
    blocks = fp8_weight(rows, columns, parts=parts)
    codes = (torch.arange(parts * rows * columns) * 37 % 254).to(torch.uint8).view(parts * rows, columns)
    codes += (codes >= 127).to(torch.uint8)
    scale = 2.0 ** (torch.arange(blocks.scale.numel()) % 5 - 2).view(blocks.scale.shape)
    return attrs.evolve(blocks, numbers=codes.view(torch.float8_e4m3fn), scale=scale)


@for_each("flushing", [False, True])
@for_each("rows", [1, 2, 3, 4, 17, 150])
@for_each(("outs", "parts"), [(64, 1), (288, 1), (160, 2)])
def test_fp8_in_strips(body: Kernels, rows: int, outs: int, parts: int, flushing: bool) -> None:
    """Each row of x is one number in one place, so that y is a column of weights, whose subnormal numbers count too."""
    weight, x = whole_fp8(outs, 288, parts), torch.zeros(rows, 288)
    for row in range(rows):
        x[row, row * 67 % 288] = 2.0 ** (row % 9 - 4)
    expected = reference.linear_fp8(x.bfloat16(), weight)
    torch.set_flush_denormal(flushing)
    try:
        got = native.products.linear_fp8_strips(x.bfloat16(), fp8_in_strips(weight))
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


@for_each("rows", [1, 3, 4, 150])
def test_fp8_in_strips_of_many_blocks(body: Kernels, rows: int) -> None:
    """Nine blocks of 128 inputs and a quarter of one; every block has a one somewhere."""
    weight, x = whole_fp8(64, 1184, 1), torch.zeros(150, 1184)
    for row in range(len(x)):
        x[row, row * 67 % 1184] = 1.0
    expected = reference.linear_fp8(x.bfloat16(), weight)
    strips = fp8_in_strips(weight)
    got = torch.cat([native.products.linear_fp8_strips(some, strips) for some in x.bfloat16().split(rows)])
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


@for_each("rows", [1, 2, 3, 4, 7, 40])
@for_each("code", [0x7F, 0xFF])
def test_fp8_weights_that_are_nan_spoil_their_own_columns(body: Kernels, rows: int, code: int) -> None:
    x, weight = draw(rows, 288).bfloat16(), fp8_weight(160, 288, parts=2)
    good = native.products.linear_fp8_strips(x, fp8_in_strips(weight))
    for row, column in ((0, 0), (129, 200), (319, 287)):
        weight.numbers.view(torch.uint8)[row, column] = code
    got = native.products.linear_fp8_strips(x, fp8_in_strips(weight))
    kept = torch.ones(320, dtype=torch.bool)
    kept[[0, 129, 319]] = False
    assert got[:, ~kept].isnan().all()
    torch.testing.assert_close(got[:, kept], good[:, kept], rtol=2**-7, atol=1e-3)


@for_each(
    ("counts", "inner", "width"),
    [*((counts, 160, 288) for counts in ((17,), (1, 0, 3, 19), (3, 1, 2), (300, 2), (20,) * 9)), ((1, 19), 800, 1184)],
)
@for_each("ue8m0", [False, True])
def test_experts_with_fp8_in_strips(
    body: Kernels, counts: tuple[int, ...], inner: int, width: int, ue8m0: bool
) -> None:
    gate_up = fp8_weight(len(counts), inner, width, parts=2, ue8m0=ue8m0)
    down, x = fp8_weight(len(counts), width, inner, ue8m0=ue8m0), draw(sum(counts), width).bfloat16()
    got = native.products.grouped_mlp_fp8_strips(x, torch.tensor(counts), fp8_in_strips(gate_up), fp8_in_strips(down))
    exact = reference.grouped_mlp(x, torch.tensor(counts), gate_up, down).double()
    assert ((got.double() - exact).norm(dim=-1) <= 0.02 * exact.norm(dim=-1)).all()


FOUR_BITS = for_each("kind", [Int4, MXFP4])


@FOUR_BITS
@for_each("rows", [1, 2, 3, 6, 7, 12, 13, 40, 150])
@for_each(("outs", "parts"), [(32, 1), (96, 1), (64, 2)])
def test_four_bits_in_strips(body: Kernels, kind: type[FourBits], rows: int, outs: int, parts: int) -> None:
    x, weight = draw(rows, 320).bfloat16(), four_bit_weight(kind, outs, 320)
    got = native.products.linear_int4_strips(x, four_bits_in_strips(weight, parts))
    assert_product(got, x, floats_of(weight), torch.bfloat16)


@for_each("rows", [1, 5, 40])
def test_exponents_of_any_size(body: Kernels, rows: int) -> None:
    """The smallest power of two is no normal float32, and the largest exponent stands for NaN."""
    x, weight = torch.full((rows, 64), 2.0**100).bfloat16(), four_bit_weight(MXFP4, 32, 64)
    weight.numbers.fill_(0x7F)  # 6 and -6
    weight.numbers[:, ::16] = 0x71  # 6 and 0.5
    weight.scale.copy_(torch.arange(64).view(32, 2))
    got = native.products.linear_mxfp4_strips(x, four_bits_in_strips(weight))
    assert_product(got, x, floats_of(weight), torch.bfloat16)
    assert got.ne(0).all()
    weight.scale[3, 1] = 255
    spoilt = native.products.linear_mxfp4_strips(x, four_bits_in_strips(weight))
    assert spoilt[:, 3].isnan().all()
    kept = torch.arange(32) != 3
    assert torch.equal(spoilt[:, kept], got[:, kept])


@FOUR_BITS
@for_each("counts", [(17,), (1, 0, 3, 19), (3, 1, 2), (300, 2), (20,) * 9])
@for_each("sizes", [(32, 64), (288, 32)])
def test_experts_with_four_bits_in_strips(
    body: Kernels, kind: type[FourBits], counts: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    (width, inner), x = sizes, draw(sum(counts), sizes[0]).bfloat16()
    gate_up = four_bit_weight(kind, len(counts), 2 * inner, width)
    down = four_bit_weight(kind, len(counts), width, inner)
    strips = four_bits_in_strips(gate_up, 2), four_bits_in_strips(down)
    got = native.products.grouped_mlp_int4_strips(x, torch.tensor(counts), *strips)
    assert_experts(got, counts, x, floats_of(gate_up), floats_of(down), torch.bfloat16)


@for_each("bad", [torch.nan, torch.inf, -torch.inf])
@for_each("rows", [4, 40])
def test_a_row_that_is_not_finite_stays_alone(body: Kernels, rows: int, bad: float) -> None:
    """Rows share tiles, and vectors share registers."""

    def check(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
        expected = run(x)
        spoilt = x.clone()
        spoilt[rows // 2, 5] = bad
        got = run(spoilt)
        assert not got[rows // 2].isfinite().any()
        others = torch.arange(len(x)) != rows // 2
        assert torch.equal(got[others], expected[others])

    weight = draw(40, 72, seed=1).bfloat16()
    check(lambda x: native.products.linear(x, weight), draw(rows, 72).bfloat16())
    x, gate_up, down = experts_of((rows, rows + 3), 72, 40)
    check(lambda x: native.products.grouped_mlp(x, torch.tensor((rows, rows + 3)), gate_up, down), x)
    weight = in_strips(draw(64, 96, seed=1).bfloat16(), 2)
    check(lambda x: native.products.linear_strips(x, weight), draw(rows, 96).bfloat16())
    for kind in (Int4, MXFP4):
        strips = four_bits_in_strips(four_bit_weight(kind, 64, 96), 2)
        check(lambda x, strips=strips: native.products.linear_int4_strips(x, strips), draw(rows, 96).bfloat16())
    x, *both = experts_of((rows, rows + 3), 96, 64)
    of_strips = in_strips(both[0], 2), in_strips(both[1])
    check(lambda x: native.products.grouped_mlp_strips(x, torch.tensor((rows, rows + 3)), *of_strips), x)


def experts() -> Tensor:
    x, gate_up, down = experts_of((20, 3), 72, 40)
    return native.products.grouped_mlp(x, torch.tensor((20, 3)), gate_up, down)


def decode() -> Tensor:
    pages, table = draw(13, 16, 96).bfloat16(), torch.arange(13)[None]
    latent, rope = draw(1, 2, 5, 64).bfloat16(), draw(1, 2, 5, 32).bfloat16()
    return native.attention.mla_decode(latent, rope, DecodeCache(pages, table, torch.tensor([200])), scale=0.25)


every_user_of_tiles = pytest.mark.parametrize("work", [experts, decode])


@every_user_of_tiles
def test_torchs_products_are_as_before(body: Kernels, work: Callable[[], Tensor]) -> None:
    """Its library configures tiles too, once per thread."""
    x, weight = draw(64, 96).bfloat16(), draw(48, 96, seed=1).bfloat16()
    before = torch.nn.functional.linear(x, weight)
    work()
    assert torch.equal(torch.nn.functional.linear(x, weight), before)


@pytest.fixture
def amx() -> Iterator[Kernels]:
    """Let the native ops be those for AMX, in C, and undo what the test makes of tiles."""
    with as_native(built_with(*BODIES["AMX in C"])) as library:
        yield library
        Shared(library, ctypes.c_int, "tiles_allowed").set(1)
        assert library.find_tiles()
        assert library.find_decode_tiles()
        assert not any(Shared(library, ctypes.c_long, "tile_faults").values)


@every_user_of_tiles
def test_tiles_that_are_not_allowed_are_not_used(amx: Kernels, work: Callable[[], Tensor]) -> None:
    expected = work()
    for name in ("tiles_allowed", "tiles_granted"):
        Shared(amx, ctypes.c_int, name).set(0)
    assert not amx.find_tiles()
    assert not amx.find_decode_tiles()
    assert not amx.experts_are_served(20, 72, 40)
    torch.testing.assert_close(work(), expected, rtol=0.02, atol=0.02)


@every_user_of_tiles
@pytest.mark.parametrize("palette", [1, 0])
def test_tiles_are_left_as_they_were_configured(amx: Kernels, palette: int, work: Callable[[], Tensor]) -> None:
    """The library of torch's products remembers what it configured, and does not look again."""
    before = bytes([palette] + [0] * 15 + [32, 0] * 8 + [0] * 16 + [3] * 8 + [0] * 8) if palette else bytes(64)
    for library in amx.libraries.values():
        library.configure_tiles(before)
    torch.set_num_threads(1)
    work()
    for library in amx.libraries.values():
        after = ctypes.create_string_buffer(64)
        library.configuration_of_tiles(after)
        assert after.raw == before


@pytest.mark.full(minutes=2)
@pytest.mark.parametrize("name", [name for name in BODIES_HERE if name != "as it is"])
def test_every_suite_passes_on(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--native-body", name]
    suites = [f"tests/conformance/test_{suite}.py" for suite in SUITES]
    done = subprocess.run(
        [*command, "-m", "not full and not gpu", "-k", "native and not gpusim", *suites],
        cwd=ROOT,
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert not done.returncode, done.stdout
    assert passed is not None
    assert int(passed[1]) > 120
