"""Products with weights in every format, and experts, which are several products (`products.c`, `experts.c`, `int8.c`,
`fp8.c`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.errors import PDInferError
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import BLOCK, FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.strips import FourBitStrips, FP8Strips, MXFP4Strips, Strips
from pdinfer.kernels.native import build
from pdinfer.kernels.native.rows import gated_silu
from pdinfer.kernels.torch import experts as torch_experts
from pdinfer.kernels.torch import products as torch_products

FEW_IN_ALL = 512
"""Up to this many rows of all experts are served on every CPU, since no expert is likely to have many of them."""
FEW_OF_ONE = 64
"""Up to this many rows an MLP runs as one expert, if that is served."""
FEW_HEAD_ROWS = 64
"""Up to this many rows products head by head are served on every CPU, since torch computes them one by one."""
FEW_FP8_ROWS = 16
"""Up to this many rows an FP8 product reads its weights as they are stored. For more they become bfloat16, block by
block."""
FP8_BLOCK_BYTES = 4 << 20
"""The memory for such a block."""


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    outs, width = weight_OI.shape
    library = build.library()
    rows = x_TI.shape[0]
    dense = x_TI.stride(-1) == 1 and weight_OI.is_contiguous() and x_TI.dtype == weight_OI.dtype == torch.bfloat16
    if not dense or not rows or not library.is_served(rows, outs):
        return F.linear(x_TI, weight_OI)
    kernel, out = library.linear, x_TI.new_empty(rows, outs)
    return _run(kernel, out, x_TI.data_ptr(), x_TI.stride(0), rows, weight_OI.data_ptr(), outs, width)


@functools.cache  # for good: recorded calls have the address
def _count(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int64, device="cpu")


def linear_or_torch(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Multiply for an op of another family, which may be there while `linear` is not."""
    return linear(x_TI, weight_OI) if build.serves("linear") else F.linear(x_TI, weight_OI)


def _run(kernel: Callable[..., int], out: Tensor, *arguments: int, form: str = "") -> Tensor:
    """Run a kernel that writes products of rows to `out`, and return that."""
    lacking = kernel(*arguments, out.data_ptr(), torch.get_num_threads())
    if lacking:
        raise lacks(lacking, f"a product of {len(out)} rows{form}")
    return out


def lacks(lacking: int, work: str) -> PDInferError:
    """Return the error of a kernel that says how many bytes of memory it could not have."""
    return PDInferError(f"{work} lacks {lacking} bytes of memory")


def linear_strips(x_TI: Tensor, weight: Strips) -> Tensor:
    rows, (outs, width) = x_TI.shape[0], weight.shape
    reads = _reads(x_TI, weight.numbers) and weight.numbers.dtype == x_TI.dtype
    if not rows or x_TI.stride(-1) != 1 or not reads:
        return F.linear(x_TI, weight.ordered())
    kernel, matrix = build.library().linear_strips, (weight.numbers.data_ptr(), outs, width, weight.parts)
    return _run(kernel, x_TI.new_empty(rows, outs), x_TI.data_ptr(), x_TI.stride(0), rows, *matrix)


def _reads(x: Tensor | FP8Rows, *weights: Tensor) -> bool:
    """Return whether the kernels take rows of that dtype, and tensors of weights that are so in memory."""
    for tensor in weights:
        if not tensor.is_contiguous():
            return False
    return x.dtype == torch.bfloat16


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    width, inner = down_EDI.shape[1:]
    fits = x.ndim == 2 and x.shape[0] and x.dtype == gate_up_EJD.dtype == down_EDI.dtype == torch.bfloat16
    few, library = 1 if x.shape[0] <= FEW_IN_ALL else x.shape[0], build.library()
    if not fits or not _serves(few, counts_E, library.experts_are_served, width, inner):
        return torch_experts.by_expert(linear, gated_silu, x, counts_E, gate_up_EJD, down_EDI)
    return _experts(library.experts, x, counts_E, gate_up_EJD, down_EDI)


def _experts(kernel: Callable[..., int], x: Tensor, counts_E: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    inner = down.shape[-1]
    (rows, width), x_ptr = x.shape, (x.data_ptr(),)
    out, hidden = x.new_empty(rows, width), x.new_empty(rows, 3 * inner)
    stacks = gate_up.data_ptr(), down.data_ptr(), width, inner, hidden.data_ptr()
    return _run_experts(kernel, out, x_ptr, counts_E, *stacks)


def _run_experts(
    kernel: Callable[..., int], out: Tensor, rows: tuple[int, ...], counts_E: Tensor, *stacks: int, form: str = ""
) -> Tensor:
    """Do as `_run` with rows that are sorted by expert. `rows` and `stacks` are what the kernel takes of these."""
    counts_E = counts_E.to(torch.int64)
    num_experts = counts_E.shape[0]
    form = f" with {num_experts} experts{form}"
    return _run(kernel, out, *rows, counts_E.data_ptr(), num_experts, *stacks, form=form)


def gated_mlp(x_TD: Tensor, gate_up: Any, down: Any) -> Tensor:
    """Run it as one expert, which has all rows."""
    rows = x_TD.shape[0]
    few = 0 < rows <= FEW_OF_ONE
    if isinstance(gate_up, Strips):
        if few:
            return grouped_mlp_strips(x_TD, _count(rows), gate_up, down)
        return linear_strips(gated_silu(linear_strips(x_TD, gate_up)), down)
    library, floats = build.library(), x_TD.dtype == gate_up.dtype == down.dtype == torch.bfloat16
    dense = x_TD.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    if not few or not dense or not floats or not library.experts_are_served(rows, *down.shape):
        return linear(gated_silu(linear(x_TD, gate_up)), down)
    return _experts(library.experts, x_TD, _count(rows), gate_up, down)


def grouped_mlp_strips(x: Tensor, counts_E: Tensor, gate_up: Strips, down: Strips) -> Tensor:
    stacks = gate_up.numbers, down.numbers
    same = gate_up.numbers.dtype == down.numbers.dtype == x.dtype
    if x.ndim != 2 or not x.shape[0] or not _reads(x, x, *stacks) or not same:
        return torch_experts.by_expert(linear_strips, gated_silu, x, counts_E, gate_up, down)
    taken = *(stack.data_ptr() for stack in stacks), *down.shape
    return _run_experts(build.library().experts_strips, torch.empty_like(x), (x.data_ptr(),), counts_E, *taken)


def linear_w8a8_dynamic(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    rows, (outs, width) = x_TI.shape[0], weight.numbers.shape
    reads = rows and x_TI.stride(-1) == 1 and _reads(x_TI, weight.numbers, weight.scale)
    if not reads or not build.library().is_served_int8(rows):
        return torch_products.linear_w8a8_dynamic(x_TI, weight)
    kernel, out = build.library().linear_int8, x_TI.new_empty(rows, outs)
    matrix = weight.numbers.data_ptr(), weight.scale.data_ptr(), outs, width
    return _run(kernel, out, x_TI.data_ptr(), x_TI.stride(0), rows, *matrix, form=" in INT8")


def grouped_mlp_w8a8_dynamic(x: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    width, inner = down.numbers.shape[1:]
    stacks = gate_up.numbers, gate_up.scale, down.numbers, down.scale
    fits = x.ndim == 2 and x.shape[0] and _reads(x, x, *stacks)
    if not fits or not _serves(len(x), counts_E, build.library().is_served_int8):
        return torch_experts.by_expert(linear_w8a8_dynamic, gated_silu, x, counts_E, gate_up, down)
    hidden = x.new_empty(x.shape[0], 3 * inner)
    taken = *(stack.data_ptr() for stack in stacks), width, inner, hidden.data_ptr()
    kernel = build.library().experts_int8
    return _run_experts(kernel, torch.empty_like(x), (x.data_ptr(),), counts_E, *taken, form=" in INT8")


def _serves(most: int, counts_E: Tensor, serves: Callable[..., int], *sizes: int) -> bool:
    """Return whether kernels serve the expert with most rows. Where they serve one with `most` of them, no count is
    looked at."""
    return bool(serves(most, *sizes) or serves(int(counts_E.max()), *sizes))


def quantize_fp8(x_TI: Tensor, *, ue8m0: bool) -> FP8Rows:
    if x_TI.ndim != 2 or x_TI.stride(-1) != 1 or x_TI.dtype != torch.bfloat16:
        return torch_products.quantize_fp8(x_TI, ue8m0=ue8m0)
    rows, width = x_TI.shape
    numbers_TI = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device="cpu")
    scales_TN = torch.empty(rows, -(-width // BLOCK), dtype=torch.float32, device="cpu")
    build.library().quantize_fp8(
        x_TI.data_ptr(), x_TI.stride(0), rows, width, ue8m0, numbers_TI.data_ptr(), scales_TN.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return FP8Rows(numbers_TI, scales_TN, dtype=x_TI.dtype, ue8m0=ue8m0)


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    if x_TI.ndim != 2 or not _reads(x_TI, weight.numbers, weight.scale):
        return torch_products.linear_fp8(x_TI, weight)
    x, (outs, width) = _rounded(x_TI, weight), weight.numbers.shape
    rows = len(x)
    out = x.new_empty((rows, outs))
    matrix = (weight.numbers.data_ptr(), weight.scale.data_ptr(), outs, weight.parts, width)
    if rows > FEW_FP8_ROWS:
        floats_TI, step = x.floats(), max(1, FP8_BLOCK_BYTES // (2 * width))
        block_OI = floats_TI.new_empty(min(step, outs), width)
        for first in range(0, outs, step):
            count = min(step, outs - first)
            build.library().dequantize_fp8(*matrix, first, count, block_OI.data_ptr(), torch.get_num_threads())
            out[:, first : first + count] = linear_or_torch(floats_TI, block_OI[:count])
    elif rows:
        _run(build.library().linear_fp8, out, *_rows(x), rows, *matrix, form=" in FP8")
    return out


def linear_fp8_strips(x_TI: Tensor | FP8Rows, weight: FP8Strips) -> Tensor:
    if x_TI.ndim != 2 or not len(x_TI) or not _reads(x_TI, weight.numbers, weight.scale):
        return linear_fp8(x_TI, weight.ordered())
    x, (outs, width) = _rounded(x_TI, weight), weight.shape
    kernel, out = build.library().linear_fp8_strips, x.new_empty((len(x), outs))
    matrix = (weight.numbers.data_ptr(), weight.scale.data_ptr(), outs, weight.parts, width)
    return _run(kernel, out, *_rows(x), len(x), *matrix, form=" in FP8")


def grouped_mlp_fp8_strips(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Strips, down: FP8Strips) -> Tensor:
    stacks = gate_up.numbers, gate_up.scale, down.numbers, down.scale
    if x.ndim != 2 or not len(x) or not _reads(x, *stacks):
        return grouped_mlp_fp8(x, counts_E, gate_up.ordered(), down.ordered())
    rows, kernel = _rounded(x, gate_up), build.library().experts_fp8_strips
    taken = *(stack.data_ptr() for stack in stacks), *down.shape, down.ue8m0
    return _run_experts(kernel, rows.new_empty(rows.shape), _rows(rows), counts_E, *taken, form=" in FP8")


def linear_int4_strips(x_TI: Tensor, weight: FourBitStrips) -> Tensor:
    rows, (outs, width) = len(x_TI), weight.shape
    if x_TI.ndim != 2 or not rows or x_TI.stride(-1) != 1 or not _reads(x_TI, *weight.tensors.values()):
        return linear_int4(x_TI, weight.ordered())
    matrix = (*_four_bits(weight), outs, width, weight.parts)
    kernel, out = build.library().linear_four_bits, x_TI.new_empty(rows, outs)
    return _run(kernel, out, x_TI.data_ptr(), x_TI.stride(0), rows, _code_of(weight), *matrix, form=" in four bits")


def grouped_mlp_int4_strips(x: Tensor, counts_E: Tensor, gate_up: FourBitStrips, down: FourBitStrips) -> Tensor:
    stacks = *gate_up.tensors.values(), *down.tensors.values()
    if x.ndim != 2 or not len(x) or not _reads(x, x, *stacks):
        return torch_experts.by_expert(linear_int4_strips, gated_silu, x, counts_E, gate_up, down)
    taken = _code_of(down), *_four_bits(gate_up), *_four_bits(down), *down.shape
    kernel = build.library().experts_four_bits
    return _run_experts(kernel, torch.empty_like(x), (x.data_ptr(),), counts_E, *taken, form=" in four bits")


linear_mxfp4_strips, grouped_mlp_mxfp4_strips = linear_int4_strips, grouped_mlp_int4_strips


def _four_bits(weight: FourBitStrips) -> tuple[int, int]:
    return weight.numbers.data_ptr(), weight.scale.data_ptr()


def _code_of(weight: FourBitStrips) -> int:
    """Return the number that `four_bits.c` has for a format."""
    return int(isinstance(weight, MXFP4Strips))


# Of matrices that are no whole strips.
linear_int4 = linear_mxfp4 = torch_products.linear_int4
grouped_mlp_int4 = grouped_mlp_mxfp4 = torch_experts.grouped_mlp_int4


def _rounded(x_TI: Tensor | FP8Rows, weight: FP8Blocks | FP8Strips) -> FP8Rows:
    """Return the rows as numbers that lie one after another."""
    rows = x_TI if isinstance(x_TI, FP8Rows) else quantize_fp8(x_TI, ue8m0=weight.ue8m0)
    numbers_TI = rows.numbers_TI
    return rows if numbers_TI.is_contiguous() else attrs.evolve(rows, numbers_TI=numbers_TI.contiguous())


def _rows(rows: FP8Rows) -> tuple[int, ...]:
    """Return what kernels take of rounded rows: their numbers, and their scales with both strides."""
    return (rows.numbers_TI.data_ptr(), rows.scales_TN.data_ptr(), *rows.scales_TN.stride())


def grouped_mlp_fp8(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    rows = quantize_fp8(x, ue8m0=gate_up.ue8m0) if isinstance(x, Tensor) else x  # once for all experts
    return torch_experts.by_expert(linear_fp8, gated_silu, rows, counts_E, gate_up, down)


def heads_in(x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
    rows, _, width = x_THN.shape
    outs = weight_HNC.shape[2]
    packed = x_THN.stride(2) == weight_HNC.stride(2) == 1 and weight_HNC.stride(1) == outs
    readable = packed and x_THN.dtype == weight_HNC.dtype == torch.bfloat16
    served = rows <= FEW_HEAD_ROWS or build.library().is_served(rows, outs)
    if not rows or not served or width % 2 or outs % 128 or not readable:
        return torch_products.heads_in(x_THN, weight_HNC)
    return _by_heads(build.library().heads_in, x_THN, weight_HNC, outs)


def heads_out(x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    rows, _, width = x_THC.shape
    outs = weight_HVC.shape[1]
    packed = x_THC.stride(2) == weight_HVC.stride(2) == 1 and weight_HVC.stride(1) == width
    readable = packed and x_THC.dtype == weight_HVC.dtype == torch.bfloat16
    served = rows <= FEW_HEAD_ROWS or build.library().is_served(rows, outs)
    if not rows or not served or outs % 8 or not readable:
        return torch_products.heads_out(x_THC, weight_HVC)
    return _by_heads(build.library().heads_out, x_THC, weight_HVC, outs)


def _by_heads(kernel: Callable[..., int], x_THI: Tensor, weight_H: Tensor, outs: int) -> Tensor:
    """Run a product head by head -> [T, H, outs]. `weight_H` is [H, ...]."""
    rows, num_heads, width = x_THI.shape
    out, form = x_THI.new_empty(rows, num_heads, outs), f" with {num_heads} heads"
    x = x_THI.data_ptr(), x_THI.stride(0), x_THI.stride(1), rows, num_heads, width
    return _run(kernel, out, *x, weight_H.data_ptr(), weight_H.stride(0), outs, form=form)
