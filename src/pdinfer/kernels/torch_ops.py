"""Fast eager torch: batched where the reference loops, in the tensors' own dtype where rounding allows it.

Softmax, norms, routing and index scores stay float32. No tensor of size [tokens, tokens] is ever held, nor the keys and
values of a long context: attention goes through blocks of queries, and through blocks of context where that is long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels import reference, row_formats
from pdinfer.kernels.activations import FP8Rows
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.weight_formats import FP8Blocks, Int8Dynamic, Int8Static, Weight, dequantize_fp8, expert

SCORE_BLOCK_BYTES = 32 << 20
"""The memory for one block of attention scores: small enough for a CPU's outer cache to help, large enough for a
GEMM."""

CONTEXT_BLOCK_BYTES = 64 << 20
"""The memory for what is computed from one block of context, such as its keys and values, or its rows gathered token by
token."""

WEIGHT_BLOCK_BYTES = 8 << 20
"""The memory for the rows of an FP8 matrix that are floats at one time."""

route = reference.route
group_rows = reference.group_rows
rms_norm = reference.rms_norm
layer_norm = reference.layer_norm
quantize_fp8 = reference.quantize_fp8
round_fp8 = reference.round_fp8
round_int8 = reference.round_int8


def unavailable(spec: OpSpec) -> str | None:
    """Return None: eager torch runs on every device."""
    return None


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI)


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    rounded_TI = x_TI.floats() if isinstance(x_TI, FP8Rows) else round_fp8(x_TI, ue8m0=weight.ue8m0)
    scale_of_row = weight.scale_of_row
    out = rounded_TI.new_empty(len(rounded_TI), len(weight.numbers))
    step = max(1, WEIGHT_BLOCK_BYTES // (rounded_TI.shape[1] * rounded_TI.itemsize))
    for first in range(0, len(weight.numbers), step):
        rows = slice(first, first + step)
        floats_OI = torch.empty(weight.numbers[rows].shape, dtype=rounded_TI.dtype, device=rounded_TI.device)
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
    """Return exact sums of int8 products."""
    # CUDA's integer product needs aligned shapes, and that of torch 2.13 for CPUs does not write sums of one product.
    if x_TI.device.type != "cpu" or x_TI.shape[1] == 1:
        return reference.int8_sums(x_TI, numbers_OI)
    return torch._int_mm(x_TI, numbers_OI.T)  # noqa: SLF001 the only one that torch has


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    if not op.startswith(("linear_", "grouped_mlp_")):
        return None
    if op.endswith("_fp8"):
        return "makes floats of FP8 weights in every call"
    return "has no fused INT8 kernel" if op.endswith(("_int8", "_int8_static")) else None


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
    if not interleaved:
        return reference.rotate(x_THR, cos_TF, sin_TF, interleaved=False)
    x = x_THR.float()
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x_THR.dtype)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
    rows_TW = row_formats.latent_rows(c_TC, k_rope_TR, pages_PGW.dtype)
    pages_PGW.view(-1, pages_PGW.shape[-1]).index_copy_(0, slots_T, rows_TW)


def store_index_keys(pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
    rows_TY = row_formats.index_rows(keys_TY, pages_PGY.dtype)
    pages_PGY.view(-1, pages_PGY.shape[-1]).index_copy_(0, slots_T, rows_TY)


def heads_in(x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
    return torch.bmm(x_THN.transpose(0, 1), weight_HNC).transpose(0, 1)


def heads_out(x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    return torch.bmm(x_THC.transpose(0, 1), weight_HVC.transpose(1, 2)).transpose(0, 1)


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
    block_pages = max(1, CONTEXT_BLOCK_BYTES // (page_size * num_heads * (2 * q_THQ.shape[-1] + v_head_dim) * 4))

    def keys_values(table_M: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Return (k_HQS, v_HSV) of the first `context` slots of these pages."""
        cached = pages_PGW.index_select(0, table_M).flatten(0, 1)[:context]
        cached = row_formats.latents(cached, latent_rank, q_THQ.dtype)
        kv = F.linear(cached[:, :latent_rank], kv_b_OC).view(context, num_heads, nope + v_head_dim)
        k_rope = cached[:, None, latent_rank:].expand(-1, num_heads, -1)
        return torch.cat((kv[..., :nope], k_rope), -1).permute(1, 2, 0), kv[..., nope:].transpose(0, 1)

    out = q_THQ.new_empty(q_THQ.shape[0], num_heads, v_head_dim)
    first = 0
    for row, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        table = page_table_BM[row, : -(-context // page_size)]
        last = first + num_queries
        q_HTQ, out_THV = q_THQ[first:last].transpose(0, 1), out[first:last]
        if len(table) <= block_pages:
            _attend_causal(q_HTQ, *keys_values(table, context), scale, out_THV)
        else:
            blocks = (
                (start * page_size, *keys_values(pages, min(len(pages) * page_size, context - start * page_size)))
                for start, pages in zip(range(0, len(table), block_pages), torch.split(table, block_pages), strict=True)
            )
            _attend_in_blocks(q_HTQ, context - num_queries, blocks, scale, out_THV)
        first = last
    return out


def _attend_causal(q_HTQ: Tensor, k_HQS: Tensor, v_HSV: Tensor, scale: float, out_THV: Tensor) -> None:
    """Let the last T of S positions attend to themselves and all before, block of queries by block of queries."""
    num_heads, num_queries, _ = q_HTQ.shape
    context = k_HQS.shape[-1]
    offset = context - num_queries
    block = max(1, min(num_queries, SCORE_BLOCK_BYTES // (4 * num_heads * context)))
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        visible = offset + stop
        scores = torch.bmm(q_HTQ[:, start:stop], k_HQS[..., :visible]).float().mul_(scale)
        lost_HT1 = _lost(scores)
        # only the block's own columns can lie in the future of one of its rows
        own = scores[..., offset + start : visible]
        own.masked_fill_(torch.ones_like(own[0], dtype=torch.bool).triu_(1), -torch.inf)
        scores[..., :1] += lost_HT1
        weights = scores.softmax(-1).to(v_HSV.dtype)
        out_THV[start:stop] = torch.bmm(weights, v_HSV[:, :visible]).transpose(0, 1)


def _lost(scores: Tensor) -> Tensor:
    """Return what to add to one score of each row before others are masked: NaN for rows that hold -inf, to which a
    softmax would give no weight, or NaN; 0 for others. A softmax turns +inf into NaN by itself."""
    return scores.amin(-1, keepdim=True) * 0


def _attend_in_blocks(
    q_HTQ: Tensor, offset: int, blocks: Iterable[tuple[int, Tensor, Tensor]], scale: float, out_THV: Tensor
) -> None:
    """Do as `_attend_causal`, with the first query at position `offset`, over blocks (first position, k_HQS, v_HSV) of
    context one at a time: softmax with a running maximum (arXiv 1805.02867, algorithm 3)."""
    num_heads, num_queries, _ = q_HTQ.shape
    value_HTV = torch.zeros(num_heads, num_queries, out_THV.shape[-1], device=q_HTQ.device)
    total_HT1 = torch.zeros(num_heads, num_queries, 1, device=q_HTQ.device)
    maximum_HT1 = torch.full_like(total_HT1, -torch.inf)
    for position, k_HQS, v_HSV in blocks:
        size = k_HQS.shape[-1]
        query_block = max(1, SCORE_BLOCK_BYTES // (4 * num_heads * size))
        # queries before the block see nothing of it
        for start in range(max(0, position - offset), num_queries, query_block):
            part = slice(start, min(start + query_block, num_queries))
            scores = torch.bmm(q_HTQ[:, part], k_HQS).float().mul_(scale)
            lost_HT1 = _lost(scores)
            if position + size > offset + start + 1:
                at = torch.arange(offset + start, offset + part.stop, device=q_HTQ.device)
                future = torch.arange(position, position + size, device=q_HTQ.device) > at[:, None]
                scores.masked_fill_(future, -torch.inf)
            before = maximum_HT1[:, part]
            highest = torch.maximum(before, scores.amax(-1, keepdim=True))
            weights = scores.sub_(highest).exp_()
            kept = (before - highest).exp_()
            total_HT1[:, part] = total_HT1[:, part] * kept + weights.sum(-1, keepdim=True) + lost_HT1
            value_HTV[:, part] = value_HTV[:, part] * kept + torch.bmm(weights.to(v_HSV.dtype), v_HSV).float()
            maximum_HT1[:, part] = highest
    out_THV.copy_((value_HTV / total_HT1).transpose(0, 1))


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    pages_PGW: Tensor,
    page_table_BM: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    cached_BSW = row_formats.latents(pages_PGW[page_table_BM].flatten(1, 2), q_latent_BHC.shape[-1], q_latent_BHC.dtype)
    beyond_BS = torch.arange(cached_BSW.shape[1], device=cached_BSW.device) >= context_lens_B[:, None]
    return _absorbed(q_latent_BHC, q_rope_BHR, cached_BSW, beyond_BS, scale)


def mla_sparse(
    q_latent_THC: Tensor,
    q_rope_THR: Tensor,
    pages_PGW: Tensor,
    page_table_BM: Tensor,
    sequence_T: Tensor,
    selected_TS: Tensor,
    *,
    scale: float,
) -> Tensor:
    num_heads, latent_rank = q_latent_THC.shape[1:]
    page_size, width = pages_PGW.shape[1], latent_rank + q_rope_THR.shape[-1]
    rows_NW = pages_PGW.view(-1, pages_PGW.shape[-1])
    block = max(1, CONTEXT_BLOCK_BYTES // (8 * max(1, selected_TS.shape[1]) * (width + num_heads)))
    out = torch.empty_like(q_latent_THC)
    for start in range(0, len(out), block):
        part = slice(start, start + block)
        none_TS = selected_TS[part] < 0
        positions_TS = selected_TS[part].clamp_min(0)
        pages_TS = page_table_BM[sequence_T[part, None], positions_TS // page_size]
        slots_TS = pages_TS * page_size + positions_TS % page_size
        cached_TSW = rows_NW.index_select(0, slots_TS.flatten()).view(*slots_TS.shape, -1)
        cached_TSW = row_formats.latents(cached_TSW, latent_rank, out.dtype)
        out[part] = _absorbed(q_latent_THC[part], q_rope_THR[part], cached_TSW, none_TS, scale)
    return out


def _absorbed(q_latent_THC: Tensor, q_rope_THR: Tensor, cached_TSW: Tensor, none_TS: Tensor, scale: float) -> Tensor:
    """Compute the attention of each token over cached rows of its own, except where `none_TS`. Changes these rows."""
    if not none_TS.numel():
        return torch.full_like(q_latent_THC, torch.nan)
    # unused slots may hold an earlier owner's NaN, and 0 * NaN is NaN
    cached_TSW = cached_TSW.masked_fill_(none_TS[..., None], 0)
    q_THW = torch.cat((q_latent_THC, q_rope_THR), -1)
    scores_THS = torch.bmm(q_THW, cached_TSW.transpose(1, 2)).float().mul_(scale)
    lost_TH1 = _lost(scores_THS)
    scores_THS.masked_fill_(none_TS[:, None, :], -torch.inf)[..., :1] += lost_TH1
    weights_THS = scores_THS.softmax(-1).to(q_THW.dtype)
    return torch.bmm(weights_THS, cached_TSW[..., : q_latent_THC.shape[-1]])


def index_topk(
    q_TXY: Tensor,
    weights_TX: Tensor,
    pages_PGY: Tensor,
    page_table_BM: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    top_k: int,
) -> Tensor:
    q_TXY = row_formats.index_queries(q_TXY.float(), pages_PGY.dtype)
    q_TXY = q_TXY + reference.not_finite(q_TXY)
    page_size, num_heads = pages_PGY.shape[1], q_TXY.shape[1]
    selected_TS = torch.full((len(q_TXY), min(top_k, max(context_lens, default=0))), -1, device=q_TXY.device)
    first = 0
    for row, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        table = page_table_BM[row, : -(-context // page_size)]
        block = max(1, SCORE_BLOCK_BYTES // (16 * context))  # choosing takes three times the scores' memory on top
        for start in range(0, num_queries, block):
            part = slice(first + start, first + min(start + block, num_queries))
            own = context - num_queries + start  # the position of the first of these queries
            visible = own + part.stop - part.start
            pages = table[: -(-visible // page_size)]
            block_pages = max(1, SCORE_BLOCK_BYTES // (4 * page_size * (part.stop - part.start) * num_heads))
            scores_TS = torch.cat(
                [
                    _index_scores(q_TXY[part], weights_TX[part], pages_PGY.index_select(0, few).flatten(0, 1))
                    for few in torch.split(pages, block_pages)
                ],
                -1,
            )[:, :visible]
            best_TS = _lowest_of_best(scores_TS, own, min(top_k, visible))
            selected_TS[part, : best_TS.shape[1]] = best_TS
        first += num_queries
    return selected_TS


def _index_scores(q_TXY: Tensor, weights_TX: Tensor, rows_SY: Tensor) -> Tensor:
    """Return the scores of every token for every row, float32 [T, S]."""
    keys_SY = row_formats.index_keys(rows_SY).float()
    keys_SY = keys_SY + reference.not_finite(keys_SY)
    dots_TXS = (q_TXY.flatten(0, 1) @ keys_SY.T).view(*q_TXY.shape[:2], -1)
    return torch.bmm(weights_TX[:, None], dots_TXS.relu_())[:, 0]


def _lowest_of_best(scores_TS: Tensor, own: int, count: int) -> Tensor:
    """Return the positions of the `count` largest scores of each row, ascending; among equals the lowest. Row t sees
    the positions up to `own + t`. -1 fills up where it sees fewer than `count`, and everything where one of its scores
    is not finite. Changes the scores."""
    position_S = torch.arange(scores_TS.shape[1], dtype=torch.int32, device=scores_TS.device)
    last_T1 = torch.arange(own, own + len(scores_TS), device=scores_TS.device)[:, None]
    future_TS = position_S > last_T1
    lost_T1 = ~scores_TS.masked_fill_(future_TS, 0).isfinite().all(-1, keepdim=True)
    scores_TS.masked_fill_(future_TS, -torch.inf)
    least_T1 = scores_TS.topk(count, -1).values[:, -1:]
    above_TS = scores_TS > least_T1
    equal_TS = scores_TS == least_T1
    room_T1 = count - above_TS.sum(-1, keepdim=True)
    taken_TS = above_TS | (equal_TS & (equal_TS.cumsum(-1, dtype=torch.int32) <= room_T1))
    best_TS = torch.where(taken_TS, position_S, len(position_S)).topk(count, largest=False).values.long()
    return best_TS.masked_fill_((best_TS > last_T1) | lost_T1, -1)


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = torch.zeros(len(row_TK), y_SD.shape[1], device=y_SD.device)
    if not len(y_SD):
        return out_TD
    none_TK = row_TK < 0
    lacking = not y_SD.is_cpu or bool(none_TK.any())  # to look would make a device wait
    if lacking:
        row_TK, weights_TK = row_TK.clamp_min(0), weights_TK.masked_fill(none_TK, 0)
    for row_T, weight_T, none_T in zip(row_TK.unbind(1), weights_TK.unbind(1), none_TK.unbind(1), strict=True):
        y_TD = y_SD.index_select(0, row_T).float()
        if lacking:
            y_TD.masked_fill_(none_T[:, None], 0)
        out_TD.addcmul_(y_TD, weight_T[:, None])
    return out_TD


def gated_silu(x_TJ: Tensor) -> Tensor:
    gate, up = x_TJ.chunk(2, -1)
    return F.silu(gate) * up if x_TJ.dtype == torch.float32 else reference.gated_silu(x_TJ)


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    return by_expert(linear, gated_silu, x, counts_E, gate_up_EJD, down_EDI)


def grouped_mlp_fp8(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    return by_expert(linear_fp8, gated_silu, x, counts_E, gate_up, down)


def grouped_mlp_int8(x: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    return by_expert(linear_int8, gated_silu, x, counts_E, gate_up, down)


def by_expert(
    multiply: Callable[[Any, Any], Tensor],
    activate: Callable[[Tensor], Tensor],
    x: Tensor | FP8Rows,
    counts_E: Tensor,
    gate_up: Weight,
    down: Weight,
) -> Tensor:
    """Run the grouped MLP one expert at a time, for those experts that have rows. Reads the counts."""
    out = x.new_empty(x.shape)
    first = 0
    for index, count in enumerate(counts_E.tolist()):
        if count:
            rows = (index, slice(count)) if x.ndim == 3 else slice(first, first + count)
            hidden = activate(multiply(x[rows], expert(gate_up, index)))
            out[rows] = multiply(hidden, expert(down, index))
            first += count
    return out


def gather_pages(pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
    torch.index_select(pool_NW, 0, rows_S, out=into_SW)


def scatter_pages(pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
    pool_NW.index_copy_(0, rows_S, from_SW)
