"""The ops of `FusedOps`, each as the sequence of ops that it stands for. `ops` are those of the model.

Every step rounds to the dtype that its op returns, so a fused kernel has to round where these do.
"""

from __future__ import annotations

from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.formats.format import Format, Rounding
from pdinfer.kernels.ops import Ops


def linear_strips(ops: Ops, x_TI: Tensor | FP8Rows, weight: Format) -> Tensor:
    return ops.linear(x_TI, weight.ordered())


def grouped_mlp_strips(ops: Ops, x: Tensor | FP8Rows, counts_E: Tensor, gate_up: Format, down: Format) -> Tensor:
    return ops.grouped_mlp(x, counts_E, gate_up.ordered(), down.ordered())


linear_fp8_strips, grouped_mlp_fp8_strips = linear_strips, grouped_mlp_strips


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


def gated_silu_fp8(ops: Ops, x_TJ: Tensor, *, ue8m0: bool) -> FP8Rows:
    return ops.quantize_fp8(ops.gated_silu(x_TJ), ue8m0=ue8m0)


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
