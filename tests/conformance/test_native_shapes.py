"""Native kernels at every edge of their blocks, and on memory that lies as it may: not aligned, with rows apart, and
with nothing that may be read behind it. Numbers are small and whole, so that every order of a sum gives the same."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.kernels import reference
from pdinfer.kernels.arguments import DecodeCache, PrefillCache, RouterRule
from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kernels.formats.format import Shape
from pdinfer.kernels.formats.four_bits import MXFP4, FourBits, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.strips import FP8Strips, Int4Strips, MXFP4Strips, Strips, fit
from pdinfer.kernels.native import ops as native
from pdinfer.kernels.native.build import Kernels
from tests.conformance.native_builds import BODIES, BODIES_HERE, as_native, built_with
from tests.conformance.op_suite import (
    SCALE,
    Attention,
    draw,
    four_bit_weight,
    four_bits_in_strips,
    fp8_in_strips,
    in_strips,
)
from tests.conformance.test_native_bodies import body
from tests.each_time import others_in_full
from tests.joined import for_each
from tests.rounding import assert_within

__all__ = ["body"]

FEW = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16)
MANY = (17, 18, 23, 31, 33, 145, 513)
WIDTHS = (1, 2, 15, 17, 31, 32, 34, 63, 65, 127, 129, 257)
OUTS = (1, 7, 8, 16, 31, 32, 33, 40, 72)


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers from -3 to 3."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def exact(op: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return what the reference makes of these, rounded once."""
    return op(*(x.double() if x.is_floating_point() else x for x in inputs)).bfloat16()


class Guarded:
    """Memory that ends where nothing may be read: what reads on is ended by the system."""

    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same numbers at the very end of such memory."""
        bytes_ = x.numel() * x.element_size()
        room = -(-bytes_ // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        self.kept.append(memory)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + room), mmap.PAGESIZE, 0)
        held = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=room - bytes_).view(x.shape)
        return held.copy_(x)


def askew(x: Tensor) -> Tensor:
    """Return the same numbers at an odd multiple of their size."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


def apart(x: Tensor) -> Tensor:
    """Return the same numbers with NaN between the rows."""
    return torch.cat((x, torch.full_like(x[..., :3], torch.nan)), -1)[..., : x.shape[-1]]


LAID = {"plain": lambda x: x, "askew": askew, "apart": apart, "guarded": Guarded()}


@pytest.fixture(params=others_in_full((1, 2, 3), [2]))
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def some(*choices: Sequence[int]) -> list[tuple[int, ...]]:
    """Return some of all choices, the same each time."""
    all_ = [*product(*choices)]
    return random.Random(0).sample(all_, min(40, len(all_)))


def test_linear(body: Kernels, threads: None) -> None:
    for rows, width, outs in some((*FEW, *MANY), WIDTHS, OUTS):
        x, weight = whole(rows, width), whole(outs, width, seed=1)
        expected = exact(reference.linear, x, weight)
        for laid in LAID.values():
            assert torch.equal(native.products.linear(laid(x), weight), expected), (rows, width, outs)
        assert torch.equal(native.products.linear(x, askew(weight)), expected)
        assert torch.equal(native.products.linear(x, LAID["guarded"](weight)), expected)


def test_linear_with_strips(body: Kernels, threads: None) -> None:
    for rows, width, outs, parts in some((*FEW, *MANY), (32, 64, 256, 288), (32, 64, 192), (1, 2)):
        if outs // parts % 32:
            continue
        x, weight = whole(rows, width), whole(outs, width, seed=1)
        expected, strips = exact(reference.linear, x, weight), in_strips(weight, parts)
        for laid in LAID.values():
            assert torch.equal(native.products.linear_strips(laid(x), strips), expected), (rows, width, outs, parts)
        for how in ("askew", "guarded"):
            assert torch.equal(native.products.linear_strips(x, Strips(LAID[how](strips.numbers))), expected)


def test_products_of_heads(body: Kernels, threads: None) -> None:
    for rows, heads, width, outs in some((*FEW, 17, 65), (1, 2, 3), WIDTHS, (8, 16, 40, 72)):
        x, weight = whole(rows, heads, width), whole(heads, outs, width, seed=1)
        assert torch.equal(native.products.heads_out(x, weight), exact(reference.heads_out, x, weight)), (
            rows,
            heads,
            width,
            outs,
        )
    for rows, heads, width, outs in some((*FEW, 17, 65), (1, 2, 3), (2, 32, 34), (128, 256)):
        x, weight = whole(rows, heads, width), whole(heads, width, outs, seed=1)
        expected = exact(reference.heads_in, x, weight)
        assert torch.equal(native.products.heads_in(x, weight), expected), (rows, heads, width, outs)


def int8(numbers: Tensor, scale: Tensor) -> Int8Dynamic:
    return Int8Dynamic(numbers=numbers, scale=scale)


def fp8(numbers: Tensor, scale: Tensor) -> FP8Blocks:
    return FP8Blocks(numbers=numbers, scale=scale, ue8m0=False, parts=1)


def fp8_strips(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    return native.products.linear_fp8_strips(x, FP8Strips(numbers=numbers.view(torch.float8_e4m3fn), scale=scale))


def int4_strips(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    return native.products.linear_int4_strips(x, Int4Strips(numbers=numbers, scale=scale))


def mxfp4_strips(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    return native.products.linear_mxfp4_strips(x, MXFP4Strips(numbers=numbers, scale=scale))


def four_bits(kind: type[FourBits]) -> tuple[Tensor, ...]:
    """Return the tensors of a matrix [96, 160] in strips."""
    return tuple(four_bits_in_strips(four_bit_weight(kind, 96, 160)).tensors.values())


def of_strips() -> tuple[Tensor]:
    """Return the numbers of a matrix [160, 160] in strips, as bytes."""
    numbers = whole(160, 160).to(torch.float8_e4m3fn)
    return (fp8_in_strips(fp8(numbers, draw(2, 2).abs())).numbers.view(torch.uint8),)


def test_decode(body: Kernels, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of any size, heads that fill no tile, several queries, and contexts around the borders of blocks and parts.
    Nothing is read behind queries, pages and table."""
    monkeypatch.setattr(native.attention, "PART_TOKENS", 128)
    laid, sizes = LAID["guarded"], ((32, 32, 34, 64), (96, 32, 34, 64), (64, 64, 34, 64))
    for page_size, heads, queries, dims in some((1, 3, 16, 64, 100), (1, 2, 7, 16, 17, 33), (1, 2, 3, 5), sizes)[:20]:
        contexts = (5, 16, 64, 65, 68, 130)
        case = Attention(torch.bfloat16, heads, page_size, contexts, (1,) * 6, dims, queries)
        latent, rope = map(laid, case.of_decode)
        cache = DecodeCache(*map(laid, (case.pages, case.wide_table, torch.tensor(contexts))))
        got = native.attention.mla_decode(latent, rope, cache, scale=SCALE)
        assert_within(got, *case.expected("mla_decode"), torch.bfloat16)


COUNTS = {"few": (3, 0, 1), "many": (19, 0, 1), "whole": (17,) * 13}
COS = draw(5, 8)
PAGES, TABLE = draw(7, 16, 96).bfloat16(), torch.tensor([[5, 2, 0], [1, 6, 3]])


def decode(latent: Tensor, rope: Tensor, pages: Tensor, table: Tensor) -> Tensor:
    return native.attention.mla_decode(latent, rope, DecodeCache(pages, table, torch.tensor([33, 48])), scale=0.25)


def prefill(q: Tensor, pages: Tensor, kv_b: Tensor, table: Tensor) -> Tensor:
    return native.attention.mla_prefill(
        q, kv_b, PrefillCache(pages, table, (7, 48), (33, 48)), v_head_dim=64, scale=0.25
    )


def stored(c: Tensor, k: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
    pages = torch.zeros(2, 2, 59, dtype=torch.bfloat16)
    native.rows.norm_rotate_store(c, k, weight, 1e-6, cos, sin, pages, slots, rounding=None)
    return pages


def drawn(logits: Tensor, changed: Tensor) -> Tensor:
    """The controls of greedy draws are not read."""
    nothing = {field.name: torch.empty(0) for field in attrs.fields(Controls)}
    return native.rows.draw(logits, changed, Controls(**nothing), DrawKind.GREEDY)


def chosen(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rule = RouterRule(sigmoid=True, normalize=True, top_k=3, num_groups=4, top_k_groups=2, scaling_factor=2.5)
    return torch.cat([part.float() for part in native.rows.choose_experts(x, weight, bias, rule)])


Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
CASES: dict[str, Case] = (
    {
        "rms_norm": (lambda x, weight: native.rows.rms_norm(x, weight, 1e-6), (whole(5, 43), whole(43))),
        "add_rms_norm": (
            lambda x, residual, weight: torch.cat(native.rows.add_rms_norm(x, residual, weight, 1e-6)),
            (whole(5, 43), whole(5, 43, seed=1), whole(43)),
        ),
        "norm_rotate_store": (stored, (whole(2, 43), whole(2, 16), whole(43), COS[:2], COS[2:4], torch.tensor([3, 1]))),
        "combine_experts": (
            native.rows.combine_experts,
            (whole(7, 43), torch.tensor([[6, 0], [3, -1]]), draw(2, 2), whole(2, 43), whole(2, 43, seed=1)),
        ),
        "rotate": (native.rows.rotate, (whole(5, 3, 16), COS, COS.flip(0))),
        "gated_silu": (native.rows.gated_silu, (whole(5, 46),)),
        "gather_rows": (native.rows.gather_rows, (whole(7, 43), torch.tensor([6, 0, 3, 6]))),
        "draw": (drawn, (draw(5, 1043), draw(5, 1043, seed=1))),
        "combine_rows": (native.rows.combine_rows, (whole(7, 43), torch.tensor([[6, 0], [3, -1]]), draw(2, 2))),
        "choose_experts": (chosen, (whole(5, 43), draw(16, 43), draw(16))),
        "sort_rows": (
            lambda x, ids: torch.cat([part.flatten().float() for part in native.rows.sort_rows(x, ids, 9)]),
            (whole(3, 43), torch.tensor([[8, 0], [3, 1], [0, 2]])),
        ),
        "gated_mlp": (native.products.gated_mlp, (whole(5, 40), whole(32, 40), whole(40, 16))),
        "heads_in": (native.products.heads_in, (whole(5, 3, 34), whole(3, 34, 128))),
        "heads_out": (native.products.heads_out, (whole(5, 3, 33), whole(3, 24, 33))),
        "heads_out of many rows": (native.products.heads_out, (whole(23, 3, 33), whole(3, 24, 33))),
        "linear_int8": (
            lambda x, numbers, scale: native.products.linear_w8a8_dynamic(x, int8(numbers, scale)),
            (whole(5, 43), whole(9, 43).to(torch.int8), draw(9, 1).abs()),
        ),
        "linear_fp8": (
            lambda x, numbers, scale: native.products.linear_fp8(x, fp8(numbers.view(torch.float8_e4m3fn), scale)),
            (whole(5, 143), whole(9, 143).to(torch.float8_e4m3fn).view(torch.uint8), draw(1, 2).abs()),
        ),
        "linear_fp8 of many rows": (
            lambda x, numbers, scale: native.products.linear_fp8(x, fp8(numbers.view(torch.float8_e4m3fn), scale)),
            (whole(25, 143), whole(9, 143).to(torch.float8_e4m3fn).view(torch.uint8), draw(1, 2).abs()),
        ),
        "linear_fp8_strips": (fp8_strips, (whole(5, 160), *of_strips(), draw(2, 2).abs())),
        "linear_fp8_strips of many rows": (fp8_strips, (whole(25, 160), *of_strips(), draw(2, 2).abs())),
        "linear_int4_strips": (int4_strips, (whole(5, 160), *four_bits(Int4))),
        "linear_int4_strips of one row": (int4_strips, (whole(1, 160), *four_bits(Int4))),
        "linear_int4_strips of many rows": (int4_strips, (whole(25, 160), *four_bits(Int4))),
        "linear_mxfp4_strips": (mxfp4_strips, (whole(5, 160), *four_bits(MXFP4))),
        "linear_mxfp4_strips of many rows": (mxfp4_strips, (whole(25, 160), *four_bits(MXFP4))),
        "mla_decode": (decode, (draw(2, 3, 5, 64).bfloat16(), draw(2, 3, 5, 32).bfloat16(), PAGES, TABLE)),
        "mla_decode of two groups": (
            decode,
            (draw(2, 1, 7, 64).bfloat16(), draw(2, 1, 7, 32).bfloat16(), PAGES, TABLE),
        ),
        "mla_prefill": (prefill, (draw(55, 5, 66).bfloat16(), PAGES, draw(5 * 98, 64).bfloat16() / 8, TABLE)),
    }
    | {
        f"experts, {name}": (
            lambda x, gate_up, down, counts=counts: native.products.grouped_mlp(x, torch.tensor(counts), gate_up, down),
            (whole(sum(counts), 40), whole(len(counts), 48, 40), whole(len(counts), 40, 24)),
        )
        for name, counts in COUNTS.items()
    }
    | {
        f"experts in strips, {name}": (
            lambda x, gate_up, down, counts=counts: native.products.grouped_mlp_strips(
                x, torch.tensor(counts), Strips(gate_up), Strips(down)
            ),
            (
                whole(sum(counts), 64),
                in_strips(whole(len(counts), 64, 64), 2).numbers,
                in_strips(whole(len(counts), 64, 32)).numbers,
            ),
        )
        for name, counts in COUNTS.items()
    }
)


@for_each("name", CASES)
def test_memory_may_lie_anywhere(body: Kernels, name: str) -> None:
    """Nothing behind it is read, but asked for at most."""
    op, inputs = CASES[name]
    expected = op(*inputs)
    assert expected.isfinite().all()
    for at, x in enumerate(inputs):
        for how in ("askew", "guarded"):
            got = op(*inputs[:at], LAID[how](x), *inputs[at + 1 :])
            assert torch.equal(got, expected), (at, how)


def assert_cases_give(expected: dict[str, Tensor]) -> None:
    """Assert that every op of these kernels gives what others gave, but for the order of sums."""
    for case, (op, inputs) in CASES.items():
        got = op(*inputs)
        torch.testing.assert_close(got, expected[case], rtol=2**-6, atol=2**-6, msg=partial("{}: {}".format, case))


@pytest.mark.parametrize("name", sorted({"x86-64", "AVX2", "AVX-512", "AVX-512 BF16"} & {*BODIES_HERE}))
def test_every_body_that_this_cpu_can_run_gives_what_its_own_gives(name: str) -> None:
    """Its own keeps to the reference elsewhere, and so do the others in tests that are `full`."""
    expected = {case: op(*inputs) for case, (op, inputs) in CASES.items()}
    with as_native(built_with(*BODIES[name], "-O0")):
        assert_cases_give(expected)


@for_each("counts", COUNTS.values())
@for_each("sizes", [(40, 24), (33, 7), (1, 1), (32, 16), (257, 65), (288, 96)])
def test_experts(body: Kernels, counts: tuple[int, ...], sizes: tuple[int, int], threads: None) -> None:
    """With gates far above 0 silu is the identity, and every sum stays exact."""
    width, inner = sizes
    x, gate_up = whole(sum(counts), width).abs() + 1, whole(len(counts), 2 * inner, width, seed=1)
    gate_up[:, :inner] = 0
    gate_up[:, :inner, 0] = 64
    down, expected = whole(len(counts), width, inner, seed=2), torch.empty_like(x)
    for rows, one, back, result in zip(
        x.split(counts), gate_up.double(), down.double(), expected.split(counts), strict=True
    ):
        gate, up = (rows.double() @ one.mT).bfloat16().chunk(2, -1)
        result.copy_((gate * up).double() @ back.mT)
    assert torch.equal(native.products.grouped_mlp(x, torch.tensor(counts), gate_up, down), expected)
    if fit(Shape(1, 2, inner, width)):
        strips = in_strips(gate_up, 2), in_strips(down)
        assert torch.equal(native.products.grouped_mlp_strips(x, torch.tensor(counts), *strips), expected)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_weight_that_is_not_finite_spoils_its_own_column(body: Kernels, rows: int, bad: float) -> None:
    x, weight = whole(rows, 45).abs() + 1, whole(41, 45, seed=1)
    good = native.products.linear(x, weight)
    weight[33, 44] = bad
    got = native.products.linear(x, weight)
    assert not got[:, 33].isfinite().any()
    kept = torch.arange(41) != 33
    assert torch.equal(got[:, kept], good[:, kept])


def test_nothing_is_an_input_too(body: Kernels, threads: None) -> None:
    """No rows, no experts with rows, and prompts without queries or tokens."""
    assert native.products.linear(whole(0, 40), whole(8, 40)).shape == (0, 8)
    assert native.products.heads_in(whole(0, 2, 32), whole(2, 32, 128)).shape == (0, 2, 128)
    assert native.products.heads_out(whole(0, 2, 32), whole(2, 8, 32)).shape == (0, 2, 8)
    assert native.rows.rms_norm(whole(0, 40), whole(40), 1e-6).shape == (0, 40)
    assert native.rows.gated_silu(whole(0, 40)).shape == (0, 20)
    assert native.rows.gather_rows(whole(0, 40), torch.empty(0, dtype=torch.int64)).shape == (0, 40)
    assert drawn(draw(0, 9), draw(0, 9)).shape == (3, 0)
    assert native.rows.combine_rows(whole(0, 40), torch.full((2, 3), -1), draw(2, 3)).eq(0).all()
    none = torch.zeros(3, dtype=torch.int64)
    gate_up, down = in_strips(whole(3, 64, 32), 2), in_strips(whole(3, 32, 32))
    assert native.products.linear_strips(whole(0, 32), in_strips(whole(64, 32))).shape == (0, 64)
    assert native.products.grouped_mlp_strips(whole(0, 32), none, gate_up, down).shape == (0, 32)
    of_int4 = [four_bits_in_strips(four_bit_weight(Int4, 3, rows, 32), rows // 32) for rows in (64, 32)]
    assert native.products.grouped_mlp_int4_strips(whole(0, 32), none, *of_int4).shape == (0, 32)
    assert native.products.grouped_mlp(whole(0, 40), none, whole(3, 48, 40), whole(3, 40, 24)).shape == (0, 40)
    q, kv_b = draw(9, 3, 66).bfloat16(), draw(3 * 98, 64).bfloat16()
    table = torch.tensor([[0, 0, 0], [5, 2, 0], [0, 0, 0]])
    every, one = PrefillCache(PAGES, table, (0, 9, 0), (0, 33, 20)), PrefillCache(PAGES, table[1:2], (9,), (33,))
    got, alone = (native.attention.mla_prefill(q, kv_b, cache, v_head_dim=64, scale=0.25) for cache in (every, one))
    assert torch.equal(got, alone)
