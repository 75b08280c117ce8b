"""The ops of `FusedOps`, each as the sequence of ops that it stands for. `ops` are those of the model.

Every step rounds to the dtype that its op returns, so a fused kernel has to round where these do."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, RouterRule
from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.formats.format import Format, Rounding, Weight
from pdinfer.kernels.ops import Ops


def linear_strips(ops: Ops, x_TI: Tensor | FP8Rows, weight: Format) -> Tensor:
    return ops.linear(x_TI, weight.ordered())


def grouped_mlp_strips(ops: Ops, x: Tensor | FP8Rows, counts_E: Tensor, gate_up: Format, down: Format) -> Tensor:
    return ops.grouped_mlp(x, counts_E, gate_up.ordered(), down.ordered())


linear_fp8_strips = linear_int4_strips = linear_mxfp4_strips = linear_strips
grouped_mlp_fp8_strips = grouped_mlp_int4_strips = grouped_mlp_mxfp4_strips = grouped_mlp_strips


def add_rms_norm(
    ops: Ops, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    sum_TD = x_TD if residual_TD is None else residual_TD + x_TD
    return ops.rms_norm(sum_TD, weight_D, eps), sum_TD


def add_rms_norm_fp8(
    ops: Ops, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, *, ue8m0: bool
) -> tuple[Rounded, Tensor]:
    normed_TD, sum_TD = ops.add_rms_norm(x_TD, residual_TD, weight_D, eps)
    return Rounded(normed_TD, ops.quantize_fp8(normed_TD, ue8m0=ue8m0)), sum_TD


def gated_silu_fp8(ops: Ops, x_TJ: Tensor, *, ue8m0: bool, counts_E: Tensor | None = None) -> FP8Rows:
    rows = ops.quantize_fp8(ops.gated_silu(x_TJ.flatten(0, -2)), ue8m0=ue8m0)
    if counts_E is None:
        return rows
    room = tuple(x_TJ.shape[:2])
    numbers, scales = (torch.unflatten(each, 0, room) for each in (rows.numbers_TI, rows.scales_TN))
    return attrs.evolve(rows, numbers_TI=numbers, scales_TN=scales)


def norm_rotate_store(
    ops: Ops,
    c_TC: Tensor,
    k_TR: Tensor,
    weight_C: Tensor,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    pages_PGW: Tensor,
    slots_T: Tensor,
    *,
    rounding: Rounding | None,
) -> None:
    c_TC = ops.rms_norm(c_TC, weight_C, eps)
    if rounding is not None:
        c_TC = ops.rounded(c_TC, rounding)
    ops.store_latent(pages_PGW, slots_T, c_TC, ops.rotate(k_TR[:, None], cos_TF, sin_TF)[:, 0])


def mla_absorbed(
    ops: Ops,
    q_THQ: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    cache: DecodeCache,
    k_b_HNC: Tensor,
    v_b_HVC: Tensor,
    *,
    scale: float,
) -> Tensor:
    (tokens, num_heads, _), batch, (_, nope, rank) = q_THQ.shape, len(cache.table_BM), k_b_HNC.shape
    q_nope_THN, q_rope_THR = q_THQ.tensor_split((nope,), -1)
    q_latent_THC, q_rope_THR = ops.heads_in(q_nope_THN, k_b_HNC), ops.rotate(q_rope_THR, cos_TF, sin_TF)
    by_sequence = batch, tokens // max(1, batch), num_heads
    q_latent_BQHC = q_latent_THC.view(*by_sequence, rank)
    q_rope_BQHR = q_rope_THR.view(*by_sequence, q_rope_THR.shape[2])
    o_BQHC = ops.mla_decode(q_latent_BQHC, q_rope_BQHR, cache, scale=scale)
    return ops.heads_out(o_BQHC.flatten(0, 1), v_b_HVC)


def gated_mlp(ops: Ops, x_TD: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    return ops.linear(ops.gated_silu(ops.linear(x_TD, gate_up)), down)


def choose_experts(
    ops: Ops, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, rule: RouterRule
) -> tuple[Tensor, Tensor]:
    return ops.route(ops.linear(x_TD.float(), weight_ED), bias_E, rule)


def sort_rows(ops: Ops, x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    counts_E, token_of_row_S, row_TK = ops.group_rows(ids_TK, num_experts)
    return ops.gather_rows(x_TD, token_of_row_S), counts_E, row_TK


def sort_rows_fp8(
    ops: Ops, x_TD: FP8Rows, ids_TK: Tensor, num_experts: int, num_rows: int
) -> tuple[FP8Rows, Tensor, Tensor]:
    counts_E, token_of_row_S, row_TK = ops.group_rows(ids_TK, num_experts)
    return x_TD.index_select(0, token_of_row_S[:num_rows]), counts_E, row_TK


def combine_experts(
    ops: Ops,
    y_SD: Tensor,
    row_TK: Tensor | None,
    weights_TK: Tensor | None,
    shared_TD: Tensor | None,
    residual_TD: Tensor | None,
) -> Tensor:
    if row_TK is None or weights_TK is None:
        sum_TD = y_SD.float()
    else:
        sum_TD = ops.combine_rows(y_SD, row_TK, weights_TK)
    if shared_TD is not None:
        sum_TD = sum_TD + shared_TD
    out_TD = sum_TD.to(y_SD.dtype)
    return out_TD if residual_TD is None else residual_TD + out_TD
