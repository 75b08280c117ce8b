"""Native products have a body for each kind of CPU. Those that this CPU can run keep to the reference, and so do tiles
in plain C, which stand for AMX on every CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import OpSpec, reference, resolve_ops
from pdinfer.kernels.native import build
from pdinfer.kernels.native import ops as native
from pdinfer.process import compiled
from tests.conformance.op_suite import draw
from tests.conformance.test_ops import error_of_mlp
from tests.rounding import assert_within, error_of_products

BODIES = {"as it is": (), "floats": ("-mno-avx512bf16",), "tiles in C": ("-mno-avx512bf16", "-DTILES_IN_C")}
HERE = [name for name in BODIES if name != "floats" or "avx512_bf16" in compiled.cpu_flags()]
"""Elsewhere the library has floats as it is."""


@pytest.fixture(params=HERE)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the native ops be those of a library that was compiled so."""
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, *BODIES[request.param]))
    try:
        library = compiled.find_or_build(build.sources(), compiled.cpu_flags())
    except BackendUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(native, "library", lambda: library)
    if request.param != "as it is":
        assert library.find_tiles() == (request.param == "tiles in C")
    return str(request.param)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_x86_cpu_with_a_compiler_has_native_ops() -> None:
    if not compiled.cpu_flags() or not any(map(shutil.which, compiled.COMPILERS)):
        pytest.skip("needs an x86 CPU and a C compiler")
    found = resolve_ops(OpSpec(device="cpu", dtype=torch.bfloat16)).choices
    chosen = {choice.op for choice in found if choice.provider == "native"}
    assert {"linear", "grouped_mlp", "heads_in", "heads_out", "mla_prefill", "mla_decode", "rms_norm"} <= chosen


def experts_of(counts: tuple[int, ...], width: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(sum(counts), width).bfloat16()
    gate_up = (draw(len(counts), 2 * inner, width, seed=1) * width**-0.5).bfloat16()
    return x, gate_up, (draw(len(counts), width, inner, seed=2) * inner**-0.5).bfloat16()


@pytest.mark.parametrize("counts", [(17,), (16, 0, 1, 19), (3, 1, 2), (20,) * 9], ids=str)
@pytest.mark.parametrize("sizes", [(33, 7), (1, 1), (300, 48)], ids=str)
def test_experts(body: str, counts: tuple[int, ...], sizes: tuple[int, int]) -> None:
    x, gate_up, down = experts_of(counts, *sizes)
    got = native.grouped_mlp(x, torch.tensor(counts), gate_up, down)
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    rows = torch.split(x, list(counts))
    error = torch.cat([error_of_mlp(*row, torch.bfloat16) for row in zip(rows, gate_up, down, strict=True)])
    assert_within(got, reference.grouped_mlp(x, torch.tensor(counts), gate_up, down), error, torch.bfloat16)


@pytest.mark.parametrize(("rows", "sizes"), [*product((1, 4, 15, 17, 600), ((33, 40), (264, 21)))])
def test_linear(body: str, rows: int, sizes: tuple[int, int]) -> None:
    x, weight = draw(rows, sizes[0]).bfloat16(), draw(sizes[1], sizes[0], seed=1).bfloat16()
    got = native.linear(x, weight)
    x, weight = x.double(), weight.double()
    assert_within(got, reference.linear(x, weight), error_of_products(x, weight), torch.bfloat16)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("rows", [4, 40])
def test_a_row_that_is_not_finite_stays_alone(body: str, rows: int, bad: float) -> None:
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
    check(lambda x: native.linear(x, weight), draw(rows, 72).bfloat16())
    x, gate_up, down = experts_of((rows, rows + 3), 72, 40)
    check(lambda x: native.grouped_mlp(x, torch.tensor((rows, rows + 3)), gate_up, down), x)


def test_torchs_products_are_as_before(body: str) -> None:
    """Its library configures tiles too, once per thread."""
    x, weight = draw(64, 96).bfloat16(), draw(48, 96, seed=1).bfloat16()
    before = torch.nn.functional.linear(x, weight)
    x_of, gate_up, down = experts_of((40, 40), 64, 32)
    native.grouped_mlp(x_of, torch.tensor((40, 40)), gate_up, down)
    assert torch.equal(torch.nn.functional.linear(x, weight), before)
