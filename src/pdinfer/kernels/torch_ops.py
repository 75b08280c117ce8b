"""Fast eager torch: batched where the reference loops, in the tensors' own dtype where rounding allows it.

Softmax, norms and routing stay float32. Nothing of the size [tokens, tokens] is ever held: prefill attention goes
through blocks of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels import reference
from pdinfer.kernels.weight_formats import FP8Blocks, Int8Dynamic, Int8Static, Weight, dequantize_fp8, expert

SCORE_BLOCK_BYTES = 32 << 20
"""Memory for one block of attention scores: small enough for a CPU's outer cache to help, large enough for a GEMM."""

WEIGHT_BLOCK_BYTES = 8 << 20
"""Memory for the rows of an FP8 matrix that are floats at one time."""

route = reference.route
round_fp8 = reference.round_fp8
round_int8 = reference.round_int8


def unavailable(device: torch.device) -> str | None:
    """None: eager torch runs on every device."""
    return None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if x_TD.dtype == torch.float32:
        return F.rms_norm(x_TD, weight_D.shape, weight_D.float(), eps)
    return reference.rms_norm(x_TD, weight_D, eps)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI)


def linear_fp8(x_TI: Tensor, weight: FP8Blocks) -> Tensor:
    rounded_TI = round_fp8(x_TI, ue8m0=weight.ue8m0)
    scale_of_row = weight.scale_of_row
    out = x_TI.new_empty(len(x_TI), len(weight.numbers))
    step = max(1, WEIGHT_BLOCK_BYTES // (x_TI.shape[1] * x_TI.itemsize))
    for first in range(0, len(weight.numbers), step):
        rows = slice(first, first + step)
        floats_OI = torch.empty(weight.numbers[rows].shape, dtype=x_TI.dtype, device=x_TI.device)
        dequantize_fp8(weight.numbers[rows], scale_of_row[rows], floats_OI)
        out[:, rows] = F.linear(rounded_TI, floats_OI)
    return out


def linear_int8(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    numbers, scale = reference.int8_activation(x_TI)
    return (int8_sums(numbers, weight.numbers) * scale * weight.scale.squeeze(-1)).to(x_TI.dtype)


def linear_int8_static(x_TI: Tensor, weight: Int8Static) -> Tensor:
    inputs = zip(weight.input_scale, weight.input_offset, strict=True)
    sums = [
        int8_sums(reference.int8_static_activation(x_TI, scale, offset), numbers)
        for (scale, offset), numbers in zip(inputs, weight.numbers.chunk(len(weight.input_scale)), strict=True)
    ]
    y = (torch.cat(sums, -1) + weight.output_offset.squeeze(-1)) * weight.output_scale.squeeze(-1)
    return (y + reference.not_finite(x_TI)).to(x_TI.dtype)


def int8_sums(x_TI: Tensor, numbers_OI: Tensor) -> Tensor:
    """Exact sums of int8 products."""
    # CUDA's integer product wants aligned shapes; that of torch 2.13 for CPUs leaves sums of one product unwritten.
    if x_TI.device.type != "cpu" or x_TI.shape[1] == 1:
        return reference.int8_sums(x_TI, numbers_OI)
    return torch._int_mm(x_TI, numbers_OI.T)  # noqa: SLF001 the only one that torch has


def slow(op: str, device: torch.device) -> str | None:
    """Why an op on quantized weights is slower here than its float form; None where it is not."""
    if op.startswith("round_"):
        return None
    if op.endswith("_fp8"):
        return "makes floats of FP8 weights in every call"
    return "has no fused INT8 kernel" if op.endswith(("_int8", "_int8_static")) else None


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    x = x_THR.float()
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x_THR.dtype)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, latent_TW: Tensor) -> None:
    pages_PGW.view(-1, pages_PGW.shape[-1]).index_copy_(0, slots_T, latent_TW)


def mla_prefill(
    q_THQ: Tensor,
    pages_PGW: Tensor,
    kv_b_OC: Tensor,
    page_table_BM: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    v_head_dim: int,
    scale: float,
) -> Tensor:
    num_heads, latent_rank = q_THQ.shape[1], kv_b_OC.shape[1]
    nope = kv_b_OC.shape[0] // num_heads - v_head_dim
    page_size = pages_PGW.shape[1]
    out = q_THQ.new_empty(q_THQ.shape[0], num_heads, v_head_dim)
    first = 0
    for row, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        table = page_table_BM[row, : -(-context // page_size)]
        cached = pages_PGW.index_select(0, table).flatten(0, 1)[:context]
        kv = F.linear(cached[:, :latent_rank], kv_b_OC).view(context, num_heads, nope + v_head_dim)
        k_rope = cached[:, None, latent_rank:].expand(-1, num_heads, -1)
        k_HKQ = torch.cat((kv[..., :nope], k_rope), -1).permute(1, 2, 0)
        last = first + num_queries
        _attend_causal(q_THQ[first:last].transpose(0, 1), k_HKQ, kv[..., nope:].transpose(0, 1), scale, out[first:last])
        first = last
    return out


def _attend_causal(q_HTQ: Tensor, k_HQS: Tensor, v_HSV: Tensor, scale: float, out_THV: Tensor) -> None:
    """The last T of S positions attend to themselves and all before, block of queries by block of queries."""
    num_heads, num_queries, _ = q_HTQ.shape
    context = k_HQS.shape[-1]
    offset = context - num_queries
    block = max(1, min(num_queries, SCORE_BLOCK_BYTES // (4 * num_heads * context)))
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        visible = offset + stop
        scores = torch.bmm(q_HTQ[:, start:stop], k_HQS[..., :visible]).float().mul_(scale)
        # only the block's own columns can lie in the future of one of its rows
        own = scores[..., offset + start : visible]
        own.masked_fill_(torch.ones_like(own[0], dtype=torch.bool).triu_(1), -torch.inf)
        weights = scores.softmax(-1).to(v_HSV.dtype)
        out_THV[start:stop] = torch.bmm(weights, v_HSV[:, :visible]).transpose(0, 1)


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PGW: Tensor,
    page_table_BM: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    latent_rank = q_latent_BHC.shape[-1]
    cached_BSW = pages_PGW[page_table_BM].flatten(1, 2)
    beyond_BS = torch.arange(cached_BSW.shape[1], device=cached_BSW.device) >= context_lens_B[:, None]
    # unused slots may hold NaN of an earlier owner, and 0 * NaN is NaN
    cached_BSW = cached_BSW.masked_fill_(beyond_BS[..., None], 0)
    q_BHW = torch.cat((q_latent_BHC, q_rope_BHR), -1)
    scores_BHS = torch.bmm(q_BHW, cached_BSW.transpose(1, 2)).float().mul_(scale)
    weights_BHS = scores_BHS.masked_fill_(beyond_BS[:, None, :], -torch.inf).softmax(-1).to(q_BHW.dtype)
    return torch.bmm(weights_BHS, cached_BSW[..., :latent_rank])


def gated_silu(x_TJ: Tensor) -> Tensor:
    gate, up = x_TJ.chunk(2, -1)
    return F.silu(gate) * up if x_TJ.dtype == torch.float32 else reference.gated_silu(x_TJ)


def grouped_mlp(x_SD: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    return _by_expert(linear, x_SD, counts_E, gate_up_EJD, down_EDI)


def grouped_mlp_fp8(x_SD: Tensor, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    return _by_expert(linear_fp8, x_SD, counts_E, gate_up, down)


def grouped_mlp_int8(x_SD: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    return _by_expert(linear_int8, x_SD, counts_E, gate_up, down)


def _by_expert(
    multiply: Callable[[Tensor, Any], Tensor], x_SD: Tensor, counts_E: Tensor, gate_up: Weight, down: Weight
) -> Tensor:
    """Only experts that have rows are run."""
    out = torch.empty_like(x_SD)
    first = 0
    for index, count in enumerate(counts_E.tolist()):
        if count:
            rows = x_SD[first : first + count]
            hidden = gated_silu(multiply(rows, expert(gate_up, index)))
            out[first : first + count] = multiply(hidden, expert(down, index))
            first += count
    return out
