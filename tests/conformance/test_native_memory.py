"""Native kernels that cannot have their memory say so, instead of writing where there is none or ending the process.
What a thread keeps from call to call it gives back when it ends."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable, PDInferError
from pdinfer.kernels.arguments import DecodeCache
from pdinfer.kernels.formats.four_bits import MXFP4, Int4
from pdinfer.kernels.native import build
from pdinfer.kernels.native import ops as native
from pdinfer.kernels.native.build import Kernels
from tests.conformance.native_builds import BODIES, HEADERS, Shared, as_native, built_with
from tests.conformance.op_suite import (
    draw,
    four_bit_weight,
    four_bits_in_strips,
    fp8_in_strips,
    fp8_weight,
    in_strips,
    int8_weight,
)
from tests.waiting import check_ends, started


@pytest.mark.parametrize("tokens", [2**61, 2**62], ids=["more-than-there-is", "more-than-can-be-counted"])
def test_attention_over_more_than_fits_into_memory_is_a_typed_error(tokens: int) -> None:
    """No byte of such a context is read: the sums of its parts come first."""
    try:
        build.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    latent, rope = torch.zeros(1, 1, 16, 32, dtype=torch.bfloat16), torch.zeros(1, 1, 16, 32, dtype=torch.bfloat16)
    pages, table = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(PDInferError, match=rf"attention over \[{tokens}\] tokens lacks \d+ bytes"):
        native.attention.mla_decode(latent, rope, DecodeCache(pages, table, torch.tensor([tokens])), scale=1.0)


class Allocations:
    """What the libraries may still allocate, and hold."""

    def __init__(self, kernels: Kernels) -> None:
        self.left = Shared(kernels, ctypes.c_long, "allocations_left")
        self.held = Shared(kernels, ctypes.c_long, "allocations_held")


@pytest.fixture(params=["as it is", "tiles in C"])
def allocations(request: pytest.FixtureRequest) -> Iterator[Allocations]:
    """Let the native ops be those of a libraries whose allocations are counted."""
    counted = "-O1", "-include", str(HEADERS / "memory.h")
    with as_native(built_with(*BODIES[request.param], *counted)) as library:
        yield Allocations(library)


def in_a_new_thread(run: Callable[[], Tensor], threads: int) -> Tensor | PDInferError:
    """Return what `run` returns or raises in a thread that has called no kernel before."""
    got: list[Tensor | PDInferError] = []

    def call() -> None:
        torch.set_num_threads(threads)
        try:
            got.append(run())
        except PDInferError as error:
            got.append(error)

    check_ends(started(call))
    return got[0]


def experts(*counts: int) -> Callable[[], Tensor]:
    x, gate_up = draw(sum(counts), 40).bfloat16(), draw(len(counts), 48, 40).bfloat16()
    down = draw(len(counts), 40, 24).bfloat16()
    return lambda: native.products.grouped_mlp(x, torch.tensor(counts), gate_up, down)


def experts_in_strips(*counts: int) -> Callable[[], Tensor]:
    x, gate_up = draw(sum(counts), 64).bfloat16(), in_strips(draw(len(counts), 64, 64).bfloat16(), 2)
    down = in_strips(draw(len(counts), 64, 32).bfloat16())
    return lambda: native.products.grouped_mlp_strips(x, torch.tensor(counts), gate_up, down)


def experts_in_fp8_strips(*counts: int) -> Callable[[], Tensor]:
    x, gate_up = draw(sum(counts), 64).bfloat16(), fp8_in_strips(fp8_weight(len(counts), 32, 64, parts=2))
    down = fp8_in_strips(fp8_weight(len(counts), 64, 32))
    return lambda: native.products.grouped_mlp_fp8_strips(x, torch.tensor(counts), gate_up, down)


def experts_of_four_bits(*counts: int) -> Callable[[], Tensor]:
    x, gate_up = draw(sum(counts), 64).bfloat16(), four_bits_in_strips(four_bit_weight(Int4, len(counts), 64, 64), 2)
    down = four_bits_in_strips(four_bit_weight(Int4, len(counts), 64, 32))
    return lambda: native.products.grouped_mlp_int4_strips(x, torch.tensor(counts), gate_up, down)


def experts_of_int8() -> Tensor:
    x = draw(5, 40).bfloat16()
    gate_up, down = int8_weight(2, 48, 40), int8_weight(2, 40, 24)
    return native.products.grouped_mlp_w8a8_dynamic(x, torch.tensor([2, 3]), gate_up, down)


def decode() -> Tensor:
    pages, table = draw(13, 16, 96).bfloat16(), torch.arange(13)[None]
    latent, rope = draw(1, 1, 3, 64).bfloat16(), draw(1, 1, 3, 32).bfloat16()
    return native.attention.mla_decode(latent, rope, DecodeCache(pages, table, torch.tensor([200])), scale=0.25)


WORK: dict[str, Callable[[], Tensor]] = {
    "few rows": lambda: native.products.linear(draw(4, 64).bfloat16(), draw(136, 64).bfloat16()),
    "many rows": lambda: native.products.linear(draw(20, 64).bfloat16(), draw(136, 64).bfloat16()),
    "strips": lambda: native.products.linear_strips(draw(4, 64).bfloat16(), in_strips(draw(128, 64).bfloat16())),
    "experts in strips": experts_in_strips(1, 3),
    "many experts in strips": experts_in_strips(*[17] * 9),
    "heads in": lambda: native.products.heads_in(draw(3, 2, 48).bfloat16(), draw(2, 48, 128).bfloat16()),
    "few rows of heads": lambda: native.products.heads_out(draw(3, 2, 48).bfloat16(), draw(2, 16, 48).bfloat16()),
    "many rows of heads": lambda: native.products.heads_out(draw(20, 2, 48).bfloat16(), draw(2, 16, 48).bfloat16()),
    "experts of few rows": experts(1, 3),
    "experts of many rows": experts(20, 3),
    "many experts of many rows": experts(*[17] * 9),
    "INT8": lambda: native.products.linear_w8a8_dynamic(draw(3, 40).bfloat16(), int8_weight(24, 40)),
    "experts of INT8": experts_of_int8,
    "FP8": lambda: native.products.linear_fp8(draw(3, 130).bfloat16(), fp8_weight(24, 130)),
    "FP8 in strips": lambda: native.products.linear_fp8_strips(
        draw(3, 160).bfloat16(), fp8_in_strips(fp8_weight(32, 160))
    ),
    "experts of FP8 in strips": experts_in_fp8_strips(1, 3),
    "many experts of FP8 in strips": experts_in_fp8_strips(*[17] * 9),
    "four bits in strips": lambda: native.products.linear_mxfp4_strips(
        draw(3, 160).bfloat16(), four_bits_in_strips(four_bit_weight(MXFP4, 32, 160))
    ),
    "experts of four bits in strips": experts_of_four_bits(1, 3),
    "many experts of four bits in strips": experts_of_four_bits(*[17] * 9),
    "decode": decode,
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("work", WORK)
def test_every_allocation_may_fail(allocations: Allocations, work: str, threads: int) -> None:
    allocations.left.set(1000)
    expected = in_a_new_thread(WORK[work], threads)
    assert isinstance(expected, Tensor)
    for allowed in range(1000 - min(allocations.left.values)):
        allocations.left.set(allowed)
        got = in_a_new_thread(WORK[work], threads)
        if isinstance(got, Tensor):  # a copy that saves time could not be made
            assert torch.equal(got, expected)
        else:
            assert isinstance(got, PDInferError)
            assert "bytes of memory" in str(got)


def at_rest(allocations: Allocations) -> int:
    """Return what is held once no thread of an earlier test is about to give something back."""
    held, since = sum(allocations.held.values), time.monotonic()
    while time.monotonic() - since < 0.05:
        time.sleep(0.001)
        if sum(allocations.held.values) != held:
            held, since = sum(allocations.held.values), time.monotonic()
    return held


@pytest.mark.parametrize("work", WORK)
def test_a_thread_that_ends_leaves_nothing_behind(allocations: Allocations, work: str) -> None:
    allocations.left.set(1000)
    before = at_rest(allocations)
    assert isinstance(in_a_new_thread(WORK[work], 1), Tensor)
    deadline = time.monotonic() + 10  # Python's join returns a little before the thread has ended
    while sum(allocations.held.values) != before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sum(allocations.held.values) == before
