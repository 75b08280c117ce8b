"""Kernels compile for sm_90, and what they are compiled to is not slow by construction. No GPU is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdinfer.kernels.arguments import DecodeCache
from tests.unit.kernels import aot
from tests.unit.kernels.aot import empty

triton = pytest.importorskip("triton")
bad_kernels = pytest.importorskip("tests.unit.kernels.bad_kernels")


def check(found: list[aot.Measured]) -> list[aot.Measured]:
    """No kernel may miss a gate without a reason."""
    bad = [one for one in found if one.missed and one.exception is None]
    assert not bad, "\n" + aot.table(bad)
    return found


WRITE = "python -m tests.unit.kernels.aot --write"


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of a table."""
    return [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("one_in", [16, pytest.param(1, marks=pytest.mark.full(minutes=1))])
def test_kernels_meet_the_gates_with_numbers_as_committed(one_in: int) -> None:
    """The first specimen of each kernel. Those of other shapes follow in the long run."""
    firsts: dict[str, str] = {}
    for name, kernel, *_ in rows(aot.committed()):
        firsts.setdefault(kernel, name)
    firsts = dict(list(firsts.items())[::one_in])
    chosen = [specimen for specimen in aot.specimens() if specimen.name in firsts.values()]
    # to start processes takes longer than to compile a few
    found = check(aot.measure_all(chosen) if one_in == 1 else [one for each in chosen for one in aot.measure(each)])
    assert {*firsts} <= {f"`{one.kernel}`" for one in found}, WRITE
    if triton.__version__ == aot.TRITON:
        of_these = [row for row in rows(aot.committed()) if row[0] in firsts.values()]
        assert rows(aot.table(found)) == of_these, WRITE


def test_the_table_has_every_specimen() -> None:
    told = [name for name, *_ in rows(aot.committed())]
    assert [*dict.fromkeys(told)] == [specimen.name for specimen in aot.specimens() if not specimen.full], WRITE


def test_kernels_are_those_of_the_table() -> None:
    """Nothing is compiled: what each specimen starts is enough."""
    started = [
        {kernel.__name__.strip("_") for kernel, *_ in aot.launches(specimen.call)}
        for specimen in aot.specimens()
        if not specimen.full
    ]
    told: dict[str, set[str]] = {}
    for name, kernel, *_ in rows(aot.committed()):
        told.setdefault(name, set()).add(kernel.strip("`").split()[0])
    assert started == [*told.values()], WRITE


@pytest.mark.full(minutes=4)
def test_the_table_is_up_to_date() -> None:
    found = check(aot.measure_all([specimen for specimen in aot.specimens() if not specimen.full]))
    if triton.__version__ == aot.TRITON:
        assert aot.table(found) == aot.committed(), WRITE


@pytest.mark.full
def test_kernels_in_other_configs_meet_the_gates() -> None:
    check(aot.measure_all([specimen for specimen in aot.specimens() if specimen.full]))


def test_specimens_have_names_of_their_own() -> None:
    names = [specimen.name for specimen in aot.specimens()]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps what is compiled, for these tests alone."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be found that a run before this one has compiled."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))
    monkeypatch.setattr(triton.runtime.cache, "triton_key", str)  # a digest of all of Triton, which takes a second


def product(rows: int, dtype: torch.dtype = torch.bfloat16, **constants: int) -> Callable[[], None]:
    return started(
        bad_kernels.product,
        *(empty(64, 4096, dtype=dtype), empty(4096, 64, dtype=dtype), empty(rows, 64, dtype=torch.float32), 4096, 4096),
        ROWS=rows,
        BLOCK=64,
        **constants,
    )


@functools.cache
def measured(call: Callable[[], None]) -> aot.Measured:
    (one,) = aot.measure(aot.Specimen("made", call))
    return one


def started(kernel: Any, *arguments: Any, **constants: int) -> Callable[[], None]:
    """Return a call that starts the kernel, as an op would."""

    def call() -> None:
        from pdinfer.kernels.triton import norms

        norms.launch(kernel, (1,), *arguments, **constants)

    return call


PLAIN, OF_FEW_ROWS = product(64, num_stages=3), product(16, num_stages=3)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (PLAIN, ""),
        pytest.param(OF_FEW_ROWS, "", marks=pytest.mark.full),
        (product(64, num_stages=1), "waits for its loads, without TMA or cp.async"),
        pytest.param(
            product(64, torch.float32, num_stages=3), "a product of 64 rows without wgmma", marks=pytest.mark.full
        ),
        pytest.param(product(64, num_stages=16), "bytes of shared memory, more than 232448", marks=pytest.mark.full),
        pytest.param(
            product(32, num_stages=3, maxnreg=32), "instructions that spill", id="spills", marks=pytest.mark.full
        ),
        (started(bad_kernels.copied, empty(512), empty(512), 16, SIZE=512, num_warps=2), ""),
        (started(bad_kernels.copied, empty(512), empty(512), 17, SIZE=512, num_warps=2), "loads of fewer than 8 bytes"),
    ],
)
def test_each_gate_is_missed_by_a_kernel_that_is_made_to(call: Callable[[], None], told: str) -> None:
    one = measured(call)
    assert told in "; ".join(one.missed)
    assert bool(told) == bool(one.missed)


@pytest.mark.usefixtures("fresh")
def test_what_a_kernel_loads_and_multiplies_is_counted() -> None:
    assert measured(PLAIN).wgmma > 0 < measured(PLAIN).cp_async
    assert measured(OF_FEW_ROWS).mma > 0 == measured(OF_FEW_ROWS).wgmma


def narrow_decode(dtype: torch.dtype, latent: int, *, packed: bool = False) -> None:
    """Decode with rotary keys that are narrower than a product of tensor cores."""
    from pdinfer.kernels.triton.mla_decode import mla_decode

    row = latent + latent // 128 * 4 + 16 if packed else latent + 8
    pages = empty(9, 16, row, dtype=torch.uint8 if packed else dtype)
    cache = DecodeCache(pages, empty(2, 4, dtype=torch.int32), empty(2, dtype=torch.int64))
    mla_decode(empty(2, 1, 4, latent, dtype=dtype), empty(2, 1, 4, 8, dtype=dtype), cache, scale=0.1)


def one_row_chosen() -> None:
    """An argument of 1 is a constant of the kernel."""
    from pdinfer.kernels.triton.index_topk import index_topk_decode

    cache = DecodeCache(empty(1, 3, 20, dtype=torch.uint8), empty(1, 1, dtype=torch.int32), empty(1))
    index_topk_decode(empty(1, 1, 1, 16), empty(1, 1, 1, dtype=torch.float32), cache, top_k=1)


def of_fp8(rows: int, dtype: torch.dtype = torch.float32) -> None:
    from pdinfer.kernels.triton.products import linear_fp8
    from tests.unit.kernels.specimens.products import fp8

    linear_fp8(empty(rows, 512, dtype=dtype), fp8(384, 512))


def of_four_bits(kind: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
    from pdinfer.kernels.triton.products import linear_int4
    from tests.unit.kernels.specimens.products import FOUR_BITS, four_bits

    linear_int4(empty(rows, columns, dtype=dtype), four_bits(FOUR_BITS[kind], 24, columns))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: narrow_decode(torch.bfloat16, 16), id="decode"),
        pytest.param(lambda: narrow_decode(torch.bfloat16, 8), id="few-latents", marks=pytest.mark.full),
        pytest.param(lambda: narrow_decode(torch.float32, 16), id="decode in float32", marks=pytest.mark.full),
        pytest.param(
            lambda: narrow_decode(torch.bfloat16, 512, packed=True), id="decode, packed", marks=pytest.mark.full
        ),
        pytest.param(one_row_chosen, id="one-row-chosen", marks=pytest.mark.full),
        pytest.param(lambda: of_fp8(5), id="float32 of FP8", marks=pytest.mark.full),
        pytest.param(lambda: of_fp8(500), id="float32 of FP8, many rows"),
        pytest.param(lambda: of_four_bits("int4", 5, 32), id="INT4, one scale", marks=pytest.mark.full),
        pytest.param(lambda: of_four_bits("mxfp4", 5, 96), id="MXFP4, few columns", marks=pytest.mark.full),
        pytest.param(lambda: of_four_bits("int4", 5, 96, torch.float32), id="float32 of INT4", marks=pytest.mark.full),
    ],
)
def test_what_no_real_model_asks_for_compiles_too(call: Callable[[], None]) -> None:
    """The interpreter runs these, and a compiler refuses what tensor cores cannot do."""
    started = aot.launches(call)
    assert started
    for kernel, arguments, constants in started:
        aot.compiled(kernel, arguments, constants)


@pytest.mark.parametrize("rows", [5, 500])
@pytest.mark.parametrize(("dtype", "multiplied"), [(torch.float32, triton.language.bfloat16), (torch.bfloat16, None)])
def test_products_of_fp8_for_float32_keep_it(rows: int, dtype: torch.dtype, multiplied: object) -> None:
    """A card keeps 14 bits of a sum of FP8 products: on an H200, a third of some results were too far off."""
    told = [constants for _, _, constants in aot.launches(lambda: of_fp8(rows, dtype)) if "UPCAST" in constants]
    assert [constants["UPCAST"] for constants in told] == [multiplied]
