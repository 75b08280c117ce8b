"""A stand-in for the library deep_gemm on host tensors: its checks of dtypes, shapes, strides and alignment on a Hopper
card, and the reference's products. Rows that the real kernels do not write become NaN, and so do those of another
expert that they write over. Read at DeepGEMM 54e2261 and in the wheel of sgl-deep-gemm 0.1.4.post1."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.reference import linear_fp8
from tests.wheels import called_as

TILE = 128
Pair = tuple[Tensor, Tensor]


def get_mk_alignment_for_contiguous_layout() -> int:
    return TILE


def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor, c: Tensor | None = None) -> None:
    assert c is None
    (rows, inputs), outputs = check_matrix(a[0]), check_matrix(b[0])[0]
    assert b[0].shape == (outputs, inputs)
    check_output(d, rows, outputs)
    if not rows:
        return
    check_scales(a[1], b[1], rows, outputs, inputs)
    d.copy_(product(a, b))


def m_grouped_fp8_gemm_nt_contiguous(a: Pair, b: Pair, d: Tensor, grouped_layout: Tensor) -> None:
    (rows, inputs), (groups, outputs) = check_matrix(a[0]), check_matrix(b[0])[:2]
    assert b[0].shape == (groups, outputs, inputs)
    check_output(d, rows, outputs)
    assert grouped_layout.shape == (rows,)
    assert grouped_layout.dtype == torch.int32
    assert grouped_layout.is_contiguous()
    assert rows % TILE == 0
    check_scales(a[1], b[1], rows, outputs, inputs, groups)
    assert int(grouped_layout.max()) < groups
    d.fill_(torch.nan)
    for first in range(0, rows, TILE):
        tile = slice(first, first + TILE)
        group = int(grouped_layout[first])  # the kernel asks for the first row of a tile alone
        assert set(grouped_layout[tile].tolist()) <= {group, -1}
        if group >= 0:
            d[tile] = product((a[0][tile], a[1][tile]), (b[0][group], b[1][group]))


def m_grouped_fp8_gemm_nt_masked(a: Pair, b: Pair, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    (groups, room, inputs), outputs = check_matrix(a[0]), check_matrix(b[0])[1]
    assert b[0].shape == (groups, outputs, inputs)
    check_output(d, groups, room, outputs)
    assert masked_m.shape == (groups,)
    assert masked_m.dtype == torch.int32
    assert masked_m.is_contiguous()
    assert isinstance(expected_m, int)
    assert min(expected_m, groups, room, outputs, inputs) > 0
    assert a[1].shape == (groups, room, inputs // 128)
    assert a[1].dtype == torch.float32
    check_block_scales(b[1], outputs, inputs, groups)
    d.fill_(torch.nan)
    for group, count in reversed([*enumerate(masked_m.tolist())]):  # in any order
        first = group * room
        d.flatten(0, 1)[first + count : first + -(-count // TILE) * TILE] = torch.nan
        d[group, :count] = product((a[0][group, :count], a[1][group, :count]), (b[0][group], b[1][group]))


def check_matrix(numbers: Tensor) -> torch.Size:
    """Check what is loaded by TMA: dense, and aligned to 16 bytes in its base and its rows."""
    assert numbers.dtype == torch.float8_e4m3fn
    assert numbers.stride(-1) == 1
    if numbers.ndim == 3:
        assert numbers.stride(0) == numbers.shape[1] * numbers.shape[2]
    assert numbers.data_ptr() % 16 == 0
    assert numbers.stride(-2) % 16 == 0
    assert numbers.shape[-1] % 128 == 0
    return numbers.shape


def check_output(d: Tensor, *shape: int) -> None:
    assert d.dtype == torch.bfloat16
    assert d.shape == shape
    assert d.is_contiguous()
    assert d.data_ptr() % 16 == 0
    assert shape[-1] % 64 == 0


def check_scales(of_rows: Tensor, of_blocks: Tensor, rows: int, outputs: int, inputs: int, groups: int = 0) -> None:
    assert of_rows.dtype == torch.float32
    assert of_rows.shape == (rows, inputs // 128)
    check_block_scales(of_blocks, outputs, inputs, groups)


def check_block_scales(scales: Tensor, outputs: int, inputs: int, groups: int) -> None:
    assert scales.dtype == torch.float32
    assert scales.shape == (*((groups,) if groups else ()), -(-outputs // 128), inputs // 128)
    assert scales.is_contiguous()


def product(a: Pair, b: Pair) -> Tensor:
    rows = FP8Rows(*a, dtype=torch.bfloat16)
    return linear_fp8(rows, FP8Blocks(numbers=b[0], scale=b[1]))


MASKED_NAME = {"mainline": "m_grouped_fp8_gemm_nt_masked", "sgl": "fp8_m_grouped_gemm_nt_masked"}


def build(name: str) -> ModuleType:
    """Return the library as it is built from its own repository ("mainline") or by SGLang ("sgl"). Calls have to fit
    SGLang's wheels, whose parameters are those of the repository (csrc/apis/gemm.hpp), and more behind them."""
    module = ModuleType("deep_gemm")
    module.get_mk_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout  # type: ignore[attr-defined]
    for function in (fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous):
        setattr(module, function.__name__, called_as("deep_gemm", function))
    setattr(module, MASKED_NAME[name], called_as("deep_gemm", m_grouped_fp8_gemm_nt_masked, MASKED_NAME[name]))
    return module
