"""Sequences of ops in one call (`rows.c`). With few rows most of the time of an op is the call."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdinfer.errors import PDInferError
from pdinfer.kernels import compositions, reference
from pdinfer.kernels.formats.format import Rounding
from pdinfer.kernels.native import build
from pdinfer.kernels.native.rows import combine_rows, rms_norm, rotate
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.torch import products as torch_products
from pdinfer.kernels.torch import rows as torch_rows

_APART: Any = SimpleNamespace(
    rms_norm=rms_norm,
    rotate=rotate,
    combine_rows=combine_rows,
    store_latent=torch_rows.store_latent,
    round_int8=reference.round_int8,
    round_fp8=torch_products.round_fp8,
)
"""The ops one by one, for what C does not take in one call."""
_APART.rounded = partial(Ops.rounded, _APART)


def _dense(*tensors: Tensor | None) -> bool:
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != torch.bfloat16 or not tensor.is_contiguous()):
            return False
    return True


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if residual_TD is None:
        return rms_norm(x_TD, weight_D, eps), x_TD
    if not _dense(x_TD, residual_TD, weight_D):
        return compositions.add_rms_norm(_APART, x_TD, residual_TD, weight_D, eps)
    rows, width = x_TD.shape
    normed_TD, sum_TD = x_TD.new_empty(rows, width), x_TD.new_empty(rows, width)
    build.library().add_rms_norm(
        x_TD.data_ptr(),
        residual_TD.data_ptr(),
        rows,
        width,
        weight_D.data_ptr(),
        eps,
        sum_TD.data_ptr(),
        normed_TD.data_ptr(),
        torch.get_num_threads(),
    )
    return normed_TD, sum_TD


def norm_rotate_store(
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
    rows = c_TC.dtype == k_TR.dtype == torch.bfloat16 and c_TC.stride(-1) == k_TR.stride(-1) == 1
    numbers = cos_TF.dtype == sin_TF.dtype == torch.float32 and slots_T.dtype == torch.int64
    if rounding is not None or not rows or not numbers or not _dense(weight_C, pages_PGW):
        compositions.norm_rotate_store(
            _APART, c_TC, k_TR, weight_C, eps, cos_TF, sin_TF, pages_PGW, slots_T, rounding=rounding
        )
        return
    cos_TF, sin_TF, slots_T = cos_TF.contiguous(), sin_TF.contiguous(), slots_T.contiguous()
    num_slots = pages_PGW.shape[0] * pages_PGW.shape[1]
    outside = build.library().norm_rotate_store(
        c_TC.data_ptr(),
        c_TC.stride(0),
        k_TR.data_ptr(),
        k_TR.stride(0),
        *c_TC.shape,
        k_TR.shape[1] // 2,
        weight_C.data_ptr(),
        eps,
        cos_TF.data_ptr(),
        sin_TF.data_ptr(),
        slots_T.data_ptr(),
        num_slots,
        pages_PGW.data_ptr(),
        torch.get_num_threads(),
    )
    if outside:
        raise PDInferError(f"{outside} of the slots {slots_T.tolist()[:8]} are not among the {num_slots} of the cache")


def combine_experts(
    y_SD: Tensor,
    row_TK: Tensor | None,
    weights_TK: Tensor | None,
    shared_TD: Tensor | None,
    residual_TD: Tensor | None,
) -> Tensor:
    dense = _dense(y_SD, shared_TD, residual_TD)
    if row_TK is None or weights_TK is None or weights_TK.dtype != torch.float32 or not dense:
        return compositions.combine_experts(_APART, y_SD, row_TK, weights_TK, shared_TD, residual_TD)
    row_TK, weights_TK = row_TK.contiguous(), weights_TK.contiguous()
    out_TD = y_SD.new_empty(row_TK.shape[0], y_SD.shape[1])
    build.library().combine_experts(
        y_SD.data_ptr(),
        row_TK.data_ptr(),
        weights_TK.data_ptr(),
        None if shared_TD is None else shared_TD.data_ptr(),
        None if residual_TD is None else residual_TD.data_ptr(),
        *row_TK.shape,
        y_SD.shape[1],
        out_TD.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TD
