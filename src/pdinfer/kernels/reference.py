"""Every op in plain torch, one sequence and one expert at a time: slow, complete, and the specification. Ops that are a
sequence of others are in `compositions.py`.

Formulas: DeepSeek-V2 report (arXiv 2405.04434) section 2 for MLA, DeepSeek-V3 report (arXiv 2412.19437) section 2.1.2
for the router with correction bias, DeepSeek-V3.2 report (arXiv 2512.02556) section 2.1 for index scores. All
arithmetic is float32 (float64 stays float64)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pdinfer.kernels import draws
from pdinfer.kernels.arguments import DecodeCache, PrefillCache, RouterRule, TokenCache
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.formats.activations import FP8Rows, INT8Rows, ScaledRows
from pdinfer.kernels.formats.floats import Plain, exact, not_finite
from pdinfer.kernels.formats.format import Format, Weight
from pdinfer.kernels.formats.four_bits import MXFP4, FourBits, Int4
from pdinfer.kernels.formats.fp8 import BLOCK, FP8_MAX, FP8Blocks, quotient, to_power_of_two
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static, int8_activation, int8_static_activation, int8_sums
from pdinfer.kernels.formats.weights import as_format, expert
from pdinfer.kernels.spec import OpSpec

FP8_MIN_AMAX = 1e-4
"""Where all activations of a block are smaller than this, its scale is that of this size."""

draw = draws.draw


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    return "is made to be read" if op.endswith("]") else None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = exact(x_TD)
    return (x * _inverse_root(x, eps) * exact(weight_D)).to(x_TD.dtype)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    x = exact(x_TD)
    x = x - x.mean(-1, keepdim=True)
    return (x * _inverse_root(x, eps) * exact(weight_D) + exact(bias_D)).to(x_TD.dtype)


def _inverse_root(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last axis, which stays. It is NaN where the squares overflow, because 0
    would pass for the factor of a row."""
    mean = x.square().mean(-1, keepdim=True)
    return torch.rsqrt(mean + eps) + 0 * mean


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return (exact(x_TI) @ exact(weight_OI).T).to(x_TI.dtype)


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    rows = x_TI if isinstance(x_TI, FP8Rows) else quantize_fp8(x_TI, ue8m0=weight.ue8m0)
    numbers, scale, scale_of_row = rows.numbers_TI, rows.scales_TN, weight.scale_of_row
    y = scale.new_zeros(len(rows), weight.numbers.shape[0])
    for block in range(scale.shape[1]):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        sums = numbers[:, columns].to(y.dtype) @ weight.numbers[:, columns].to(y.dtype).T
        y += sums * scale[:, block, None] * scale_of_row[:, block]
    return y.to(rows.dtype)


def quantize_fp8(x_TI: Tensor, *, ue8m0: bool) -> FP8Rows:
    x = exact(x_TI)
    blocks = torch.split(x, BLOCK, -1)
    scale = torch.stack([block.abs().amax(-1) for block in blocks], -1).clamp(min=FP8_MIN_AMAX)
    scale = quotient(scale, FP8_MAX)
    if ue8m0:
        scale = to_power_of_two(scale)
    scaled = [block / scale[..., at, None] for at, block in enumerate(blocks)]
    numbers = torch.cat(scaled, -1).clamp(-FP8_MAX, FP8_MAX).float().to(torch.float8_e4m3fn)
    return FP8Rows(numbers, scale, dtype=x_TI.dtype, ue8m0=ue8m0)


def round_fp8(x_TI: Tensor, *, ue8m0: bool) -> Tensor:
    return quantize_fp8(x_TI, ue8m0=ue8m0).floats()


def round_int8(x_TI: Tensor) -> Tensor:
    numbers, scale = int8_activation(x_TI)
    return (numbers * scale).to(x_TI.dtype)


def linear_w8a8_dynamic(x_TI: Tensor | INT8Rows, weight: Int8Dynamic) -> Tensor:
    rows = x_TI if isinstance(x_TI, INT8Rows) else INT8Rows(*int8_activation(x_TI), dtype=x_TI.dtype)
    y = int8_sums(rows.numbers_TI, weight.numbers).to(rows.scales_TN.dtype) * rows.scales_TN * weight.scale.squeeze(-1)
    return y.to(rows.dtype)


def linear_w8a8(x_TI: Tensor, weight: Int8Static) -> Tensor:
    inputs = zip(weight.input_scale.unbind(), weight.input_offset.unbind(), strict=True)
    sums = [
        int8_sums(int8_static_activation(x_TI, scale, offset), numbers)
        for (scale, offset), numbers in zip(inputs, weight.numbers.chunk(len(weight.input_scale)), strict=True)
    ]
    y = (torch.cat(sums, -1) + weight.output_offset.squeeze(-1)).to(exact(x_TI).dtype)
    return (y * weight.output_scale.squeeze(-1) + not_finite(x_TI)).to(x_TI.dtype)


def linear_int4(x_TI: Tensor, weight: FourBits) -> Tensor:
    x = exact(x_TI)
    floats_OI = x.new_empty(len(weight.numbers), x.shape[1])
    weight.floats_into(floats_OI)
    return (x @ floats_OI.T).to(x_TI.dtype)


linear_mxfp4 = linear_int4


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
    x = exact(x_THR)
    left, right = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    turned = left * cos - right * sin, left * sin + right * cos
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x_THR.dtype)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
    _store(pages_PGW, slots_T, cache_rows.latent_rows(c_TC, k_rope_TR, pages_PGW.dtype))


def store_index_keys(pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
    _store(pages_PGY, slots_T, cache_rows.index_rows(keys_TY, pages_PGY.dtype))


def _store(pages_PGW: Tensor, slots_T: Tensor, rows_TW: Tensor) -> None:
    page_size = pages_PGW.shape[1]
    for slot, row in zip(slots_T.tolist(), rows_TW, strict=True):
        pages_PGW[slot // page_size, slot % page_size] = row


def index_topk(q_TXY: Tensor, weights_TX: Tensor, cache: PrefillCache, *, top_k: int) -> Tensor:
    q_TXY = cache_rows.index_queries(exact(q_TXY), cache.pages_PGW.dtype)
    q_TXY = q_TXY + not_finite(q_TXY)
    selected = q_TXY.new_full((len(q_TXY), min(top_k, max(cache.context_lens, default=0))), -1, dtype=torch.int64)
    for queries, pages_M, context in cache.sequences():
        keys = exact(cache_rows.index_keys(cache.pages_PGW[pages_M].flatten(0, 1)[:context]))
        keys = keys + not_finite(keys)
        for token in range(queries.start, queries.stop):
            visible = context - queries.stop + token + 1
            scores = weights_TX[token].to(q_TXY.dtype) @ (q_TXY[token] @ keys[:visible].T).relu()
            if scores.isfinite().all():
                best = scores.sort(descending=True, stable=True).indices[:top_k].sort().values
                selected[token, : len(best)] = best
    return selected


def index_topk_decode(q_BQXY: Tensor, weights_BQX: Tensor, cache: DecodeCache, *, top_k: int) -> Tensor:
    batch, num_queries = q_BQXY.shape[:2]
    count = min(top_k, cache.table_BM.shape[1] * cache.page_size)
    selected = q_BQXY.new_full((batch, num_queries, count), -1, dtype=torch.int64)
    for row, context in enumerate(cache.lens_B.tolist()):
        alone = PrefillCache(cache.pages_PGW, cache.table_BM[row : row + 1], (num_queries,), (context,))
        chosen = index_topk(q_BQXY[row], weights_BQX[row], alone, top_k=top_k)
        selected[row, :, : chosen.shape[1]] = chosen
    return selected


def heads_in(x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
    return torch.einsum("thn,hnc->thc", exact(x_THN), exact(weight_HNC)).to(x_THN.dtype)


def heads_out(x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    return torch.einsum("thc,hvc->thv", exact(x_THC), exact(weight_HVC)).to(x_THC.dtype)


def mla_prefill(q_THQ: Tensor, kv_b_OC: Tensor, cache: PrefillCache, *, v_head_dim: int, scale: float) -> Tensor:
    num_heads, latent_rank = q_THQ.shape[1], kv_b_OC.shape[1]
    nope = kv_b_OC.shape[0] // num_heads - v_head_dim
    outputs = []
    for queries, pages_M, context in cache.sequences():
        q = exact(q_THQ[queries])
        c, k_rope = _unpacked(cache.pages_PGW[pages_M].flatten(0, 1)[:context], latent_rank)
        kv = (c @ exact(kv_b_OC).T).view(context, num_heads, nope + v_head_dim)
        scores = torch.einsum("qhn,khn->hqk", q[..., :nope], kv[..., :nope])
        scores = scale * (scores + torch.einsum("qhr,kr->hqk", q[..., nope:], k_rope))
        future = torch.ones(len(q), context, dtype=torch.bool, device=q.device).triu(1 + context - len(q))
        scores = scores + not_finite(scores.masked_fill(future, 0))
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khv->qhv", weights, kv[..., nope:]))
    return torch.cat(outputs).to(q_THQ.dtype) if outputs else q_THQ[..., :v_head_dim]


def mla_decode(q_latent_BQHC: Tensor, q_rope_BQHR: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
    out, num_queries = torch.empty_like(q_latent_BQHC), q_latent_BQHC.shape[1]
    for row, context in enumerate(cache.lens_B.tolist()):
        cached = cache.pages_PGW[cache.table_BM[row]].flatten(0, 1)
        for query in range(num_queries):
            seen = cached[: context - num_queries + 1 + query]
            out[row, query] = _absorbed(q_latent_BQHC[row, query], q_rope_BQHR[row, query], seen, scale)
    return out


def mla_sparse(
    q_latent_THC: Tensor, q_rope_THR: Tensor, cache: TokenCache, selected_TS: Tensor, *, scale: float
) -> Tensor:
    out = torch.full_like(q_latent_THC, torch.nan)
    for token, (row, positions_S) in enumerate(zip(cache.sequence_T.tolist(), selected_TS, strict=True)):
        positions_S = positions_S[positions_S >= 0]
        if len(positions_S):
            pages_S = cache.table_BM[row, positions_S // cache.page_size]
            cached = cache.pages_PGW[pages_S, positions_S % cache.page_size]
            out[token] = _absorbed(q_latent_THC[token], q_rope_THR[token], cached, scale)
    return out


def _unpacked(cached_SW: Tensor, latent_rank: int) -> tuple[Tensor, ...]:
    return exact(cache_rows.latents(cached_SW, latent_rank, torch.float32)).tensor_split((latent_rank,), -1)


def _absorbed(q_latent_HC: Tensor, q_rope_HR: Tensor, cached_SW: Tensor, scale: float) -> Tensor:
    """Compute one token's attention over cached rows [S, W] -> [H, C]."""
    c, k_rope = _unpacked(cached_SW, q_latent_HC.shape[-1])
    scores = scale * (exact(q_latent_HC) @ c.T + exact(q_rope_HR) @ k_rope.T)
    return ((scores + not_finite(scores)).softmax(-1) @ c).to(q_latent_HC.dtype)


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    # torch's float32 functions round one logit differently in different places of a tensor
    exact = logits_TE.double()
    scores = (exact.sigmoid() if rule.sigmoid else exact.softmax(-1)).float()
    choice, lost = scores, not_finite(logits_TE)
    if bias_E is not None:
        choice, lost = scores + bias_E, lost + not_finite(bias_E)
    num_experts = choice.shape[1]
    if rule.num_groups > 1:
        grouped = choice.view(-1, rule.num_groups, num_experts // rule.num_groups)
        best_of_group = 1 if bias_E is None else min(2, grouped.shape[-1])
        worth = grouped.topk(best_of_group, -1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _best(worth, rule.top_k_groups), True)
        # -inf, not 0: a correction bias can push every score of a kept group below zero
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).view(-1, num_experts)
    ids = _best(choice, rule.top_k)
    weights = scores.gather(1, ids)
    if rule.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * rule.scaling_factor + lost


def _best(values: Tensor, count: int) -> Tensor:
    """Return the ids of the largest in each row, best first. Equals come in order of ids, which `topk` leaves open."""
    return values.sort(descending=True, stable=True).indices[:, :count]


def group_rows(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    none = num_experts  # stands for -1, behind all experts
    expert_of_pair_S = ids_TK.flatten() % (none + 1)
    expert_S, pair_S = expert_of_pair_S.sort(stable=True)
    numbers_S = torch.arange(len(pair_S), device=pair_S.device, dtype=torch.int64)
    row_S = torch.empty_like(pair_S).scatter_(0, pair_S, numbers_S)
    # bincount would wait for the device
    counts = expert_S.new_zeros(none + 1).scatter_add_(0, expert_S, torch.ones_like(expert_S))
    token_of_row_S = (pair_S // ids_TK.shape[1]) * (expert_S < none)
    return counts[:none], token_of_row_S, row_S.where(expert_of_pair_S < none, -1).view(ids_TK.shape)


def gather_rows(x_TD: Tensor, token_S: Tensor) -> Tensor:
    return x_TD[token_S]


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = exact(y_SD).new_zeros(len(row_TK), y_SD.shape[1])
    for out_D, row_K, weights_K in zip(out_TD, row_TK, weights_TK, strict=True):
        there_K = row_K >= 0
        out_D += (exact(y_SD[row_K[there_K]]) * weights_K[there_K, None]).sum(0)
    return out_TD.float()


def gated_silu(x_TJ: Tensor) -> Tensor:
    gate, up = exact(x_TJ).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x_TJ.dtype)


def grouped_mlp(x: Tensor | ScaledRows, counts_E: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    multiply = _LINEARS[type(as_format(down))]
    out = x.new_empty(x.shape).fill_(torch.nan)
    first = 0
    for index, count in enumerate(counts_E.tolist()):
        rows = (index, slice(count)) if x.ndim == 3 else slice(first, first + count)
        out[rows] = multiply(gated_silu(multiply(x[rows], expert(gate_up, index))), expert(down, index))
        first += count
    return out


grouped_mlp_fp8 = grouped_mlp_w8a8_dynamic = grouped_mlp_int4 = grouped_mlp_mxfp4 = grouped_mlp
grouped_mlp_int8_rows = grouped_mlp
_LINEARS: MappingProxyType[type[Format], Any] = MappingProxyType(
    {Plain: linear, FP8Blocks: linear_fp8, Int8Dynamic: linear_w8a8_dynamic, Int4: linear_int4, MXFP4: linear_mxfp4}
)


def gather_pages(pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
    into_SW.copy_(pool_NW[rows_S])


def scatter_pages(pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
    pool_NW[rows_S] = from_SW
