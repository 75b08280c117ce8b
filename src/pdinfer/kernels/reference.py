"""Every op in plain torch, one sequence and one expert at a time: slow, complete, and the specification.

Formulas: DeepSeek-V2 report (arXiv 2405.04434) section 2 for MLA, DeepSeek-V3 report (arXiv 2412.19437) section 2.1.2
for the router with correction bias. All arithmetic is float32 (float64 stays float64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """None: plain torch runs everywhere."""
    return None


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = _exact(x_TD)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * _exact(weight_D)).to(x_TD.dtype)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return (_exact(x_TI) @ _exact(weight_OI).T).to(x_TI.dtype)


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    x = _exact(x_THR)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out.to(x_THR.dtype)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, latent_TW: Tensor) -> None:
    page_size = pages_PGW.shape[1]
    for slot, latent in zip(slots_T.tolist(), latent_TW, strict=True):
        pages_PGW[slot // page_size, slot % page_size] = latent


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
    outputs, first = [], 0
    for row, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        q = _exact(q_THQ[first : first + num_queries])
        first += num_queries
        cached = _exact(pages_PGW[page_table_BM[row]].flatten(0, 1)[:context])
        c, k_rope = cached[:, :latent_rank], cached[:, latent_rank:]
        kv = (c @ _exact(kv_b_OC).T).view(context, num_heads, nope + v_head_dim)
        scores = torch.einsum("qhn,khn->hqk", q[..., :nope], kv[..., :nope])
        scores = scale * (scores + torch.einsum("qhr,kr->hqk", q[..., nope:], k_rope))
        position_q = torch.arange(context - num_queries, context, device=q.device)
        future = torch.arange(context, device=q.device)[None, :] > position_q[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khv->qhv", weights, kv[..., nope:]))
    return torch.cat(outputs).to(q_THQ.dtype) if outputs else q_THQ[..., :v_head_dim]


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
    out = torch.empty_like(q_latent_BHC)
    for row, context in enumerate(context_lens_B.tolist()):
        cached = _exact(pages_PGW[page_table_BM[row]].flatten(0, 1)[:context])
        c, k_rope = cached[:, :latent_rank], cached[:, latent_rank:]
        scores = _exact(q_latent_BHC[row]) @ c.T + _exact(q_rope_BHR[row]) @ k_rope.T
        out[row] = ((scale * scores).softmax(-1) @ c).to(out.dtype)
    return out


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    sigmoid: bool,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    scores = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
    choice = scores if bias_E is None else scores + bias_E
    num_experts = choice.shape[1]
    if num_groups > 1:
        grouped = choice.view(-1, num_groups, num_experts // num_groups)
        best_of_group = 1 if bias_E is None else min(2, grouped.shape[-1])
        worth = grouped.topk(best_of_group, -1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(top_k_groups, -1).indices, True)
        # -inf, not 0: a correction bias can push every score of a kept group below zero
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).view(-1, num_experts)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling_factor


def gated_silu(x_TJ: Tensor) -> Tensor:
    gate, up = _exact(x_TJ).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x_TJ.dtype)


def grouped_mlp(x_SD: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    outputs = [
        linear(gated_silu(linear(rows, gate_up_EJD[expert])), down_EDI[expert])
        for expert, rows in enumerate(torch.split(x_SD, counts_E.tolist()))
    ]
    return torch.cat(outputs)
