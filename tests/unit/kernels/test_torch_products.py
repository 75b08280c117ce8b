"""What torch multiplies on a card is chosen by data, and its functions are called as their sources demand.

No card is here. A stand-in checks what torch's ScaledBlas.cpp and cuBLAS check, and computes what they would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels import OpSpec, reference
from pdinfer.kernels.spec import DeviceSpec
from pdinfer.kernels.torch import products as torch_products
from pdinfer.kernels.torch import provider as torch_provider
from pdinfer.model import load
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.conformance.op_suite import draw, fp8_weight

H200, A100, B200, CPU = (DeviceSpec.of(name) for name in ("H200", "A100", "B200", "cpu"))


class BlockwiseProducts:
    """A stand-in for `F.scaled_mm` on a Hopper card."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, *, output_dtype: Any
    ) -> Tensor:
        self.calls += 1
        (rows, inside), outs = a.shape, b.shape[1]
        blocks, padded = math.ceil(inside / 128), math.ceil(inside / 512) * 4
        assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
        assert {a.dtype, b.dtype} == {torch.float8_e4m3fn}
        assert {scale_a.dtype, scale_b.dtype} == {torch.float32}
        assert inside % 16 == outs % 16 == rows % 4 == 0
        assert a.is_contiguous()
        assert b.T.is_contiguous()
        assert (scale_a.shape, scale_b.shape) == ((rows, blocks), (padded, math.ceil(outs / 128)))
        assert rows == 0 or scale_a.stride() == (1, rows)
        assert scale_b.stride() == (1, padded)
        assert output_dtype == torch.bfloat16  # sums have 14 bits
        y = torch.zeros(rows, outs, device=a.device)
        for block in range(blocks):
            columns = slice(block * 128, (block + 1) * 128)
            scale_of_out = scale_b[block].repeat_interleave(128)[:outs]
            y += a[:, columns].float() @ b[columns].float() * scale_a[:, block, None] * scale_of_out
        return y.to(output_dtype)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> BlockwiseProducts:
    made = BlockwiseProducts()
    monkeypatch.setattr(F, "scaled_mm", made, raising=False)
    monkeypatch.setattr(torch_products, "card", lambda _device: H200)
    return made


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
@pytest.mark.parametrize(
    ("sizes", "parts"), [((576, 512), 1), ((128, 384), 2), ((48, 128), 1), ((16, 640), 1), ((144, 128), 1)]
)
@pytest.mark.parametrize("rounded", [False, True])
def test_fp8_blocks_are_multiplied_as_cublas_wants_them(
    products: BlockwiseProducts, rows: int, sizes: tuple[int, int], parts: int, rounded: bool
) -> None:
    """Where a number of blocks is no multiple of 4 or of rows either, there is padding."""
    x, weight = draw(rows, sizes[1]).bfloat16(), fp8_weight(*sizes, parts=parts)
    x[1:2] = torch.nan
    given = reference.quantize_fp8(x, ue8m0=False) if rounded else x
    got = torch_products.linear_fp8(given, weight)
    assert products.calls == 1
    assert got.dtype == torch.bfloat16
    # sums of another number of rows may be added up in another order
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got, reference.linear_fp8(x, weight), rtol=2 * eps, atol=64 * eps, equal_nan=True)
    assert got[1:2].isnan().all()


@pytest.mark.parametrize(
    ("sizes", "parts", "dtype"),
    [
        ((48, 128), 2, torch.bfloat16),
        ((129, 128), 1, torch.bfloat16),
        ((128, 200), 1, torch.bfloat16),
        ((128, 128), 1, torch.float16),
        ((128, 128), 1, torch.float32),
    ],
    ids=str,
)
def test_what_cublas_does_not_take_goes_through_floats(
    products: BlockwiseProducts, sizes: tuple[int, int], parts: int, dtype: torch.dtype
) -> None:
    x, weight = draw(5, sizes[1]).to(dtype), fp8_weight(*sizes, parts=parts)
    expected = reference.linear_fp8(x, weight)
    torch.testing.assert_close(torch_products.linear_fp8(x, weight), expected, rtol=0.02, atol=0.02)
    assert products.calls == 0


@pytest.mark.parametrize("rows", [1, 5])
def test_a_matrix_that_is_a_view_with_gaps_goes_through_floats(products: BlockwiseProducts, rows: int) -> None:
    wide = fp8_weight(128, 256)
    weight = type(wide)(numbers=wide.numbers[:, :128], scale=wide.scale[:, :1])
    torch.testing.assert_close(
        torch_products.linear_fp8(draw(rows, 128), weight), reference.linear_fp8(draw(rows, 128), weight)
    )
    assert products.calls == 0


@pytest.mark.parametrize(
    ("card", "op", "told"),
    [
        (H200, "linear[fp8]", None),
        (H200, "grouped_mlp[fp8]", None),
        (H200, "linear[w8a8_dynamic]", None),
        (H200, "linear[w8a8]", None),
        (A100, "grouped_mlp[w8a8_dynamic]", None),
        (A100, "linear[fp8]", "makes floats of FP8 weights in every call: torch multiplies FP8 blocks on Hopper cards"),
        (B200, "grouped_mlp[fp8]", "on Hopper cards, not on B200"),
        (DeviceSpec("cuda"), "linear[fp8]", "on Hopper cards, not on cuda"),
        (DeviceSpec("cuda", "V100", (7, 0)), "linear[w8a8_dynamic]", "has no fused INT8 kernel"),
        (CPU, "linear[fp8]", "makes floats of FP8 weights in every call"),
        (CPU, "linear[w8a8_dynamic]", "has no fused INT8 kernel"),
        (CPU, "round_fp8", None),
    ],
    ids=str,
)
def test_a_card_is_slow_or_not_by_what_it_is(card: DeviceSpec, op: str, told: str | None) -> None:
    slow = torch_provider.slow(op, OpSpec(device=card))
    assert slow is None if told is None else slow is not None and told in slow


def test_an_old_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_products.why_no_fp8(H200) is None
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert torch_products.why_no_fp8(H200) == (
        "torch was built for CUDA 12.8, which cannot multiply FP8 blocks; 12.9 can"
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert torch_products.why_no_fp8(H200) is None
    monkeypatch.delattr(F, "scaled_mm")
    assert "cannot multiply FP8 blocks, 2.10 can" in str(torch_products.why_no_fp8(H200))


@pytest.fixture
def reductions() -> Iterator[Any]:
    """Torch's default: a card may round parts of a sum."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    yield matmul
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


@pytest.mark.parametrize(("device", "reduced"), [("cpu", True), ("cuda", False)])
def test_sums_on_a_card_are_float32_from_the_time_a_model_is_loaded(
    reductions: Any, device: str, reduced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, once."""
    with caplog.at_level("INFO"):
        for _ in range(2):
            torch_products.sum_in_float32(torch.device(device))
    assert reductions.allow_bf16_reduced_precision_reduction is reduced
    assert reductions.allow_fp16_reduced_precision_reduction is reduced
    assert [record.message.split(":")[0] for record in caplog.records] == (
        [] if reduced else ["products on CUDA are summed in float32"]
    )


def test_loading_a_model_says_on_which_device_it_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(load, "sum_in_float32", lambda device: told.append(device.type))
    write_checkpoint(tmp_path, tiny_config_dict("v3"))
    load.load_model(tmp_path)
    assert told == ["cpu"]
