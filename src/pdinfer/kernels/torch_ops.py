"""Fast eager torch: batched where the reference loops, in the tensors' own dtype where rounding allows it.

Softmax, norms and routing stay float32. Nothing of the size [tokens, tokens] is ever held: prefill attention goes
through blocks of queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels import reference

SCORE_BLOCK_BYTES = 32 << 20
"""Memory for one block of attention scores: small enough for a CPU's outer cache to help, large enough for a GEMM."""

route = reference.route


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """None: eager torch runs on every device."""
    return None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if x_TD.dtype == torch.float32:
        return F.rms_norm(x_TD, weight_D.shape, weight_D.float(), eps)
    return reference.rms_norm(x_TD, weight_D, eps)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI)


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
    out = torch.empty_like(x_SD)
    first = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            rows = x_SD[first : first + count]
            hidden = gated_silu(F.linear(rows, gate_up_EJD[expert]))
            out[first : first + count] = F.linear(hidden, down_EDI[expert])
            first += count
    return out
