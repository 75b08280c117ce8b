"""What lies between products: routing, sorting rows by expert, norms, rotations, activations (`rows.c`); and draws of
tokens (`draws.c`): the largest logit and the normalizer, which every draw needs. Torch draws the others."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.errors import PDInferError
from pdinfer.kernels import compositions, draws, reference
from pdinfer.kernels.arguments import RouterRule
from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kernels.formats.format import Rounding
from pdinfer.kernels.native import build
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kernels.torch import experts as torch_experts
from pdinfer.kernels.torch import products as torch_products

FEW_TOKENS = 16
"""Up to this many tokens a router waits for its weights. For more of them torch's GEMM is faster."""


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if x_TD.stride(-1) != 1 or not x_TD.dtype == weight_D.dtype == torch.bfloat16:
        return reference.rms_norm(x_TD, weight_D, eps)
    rows, width = x_TD.shape
    out = x_TD.new_empty(rows, width)
    build.library().rms_norm(
        x_TD.data_ptr(), x_TD.stride(0), rows, width, weight_D.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
    readable = x_THR.dtype == torch.bfloat16 and cos_TF.dtype == sin_TF.dtype == torch.float32
    if not interleaved or not readable or x_THR.stride(-1) != 1:
        return reference.rotate(x_THR, cos_TF, sin_TF, interleaved=interleaved)
    rows, num_heads, width = x_THR.shape
    cos_TF, sin_TF = cos_TF.contiguous(), sin_TF.contiguous()
    out = x_THR.new_empty(rows, num_heads, width)
    build.library().rotate(
        x_THR.data_ptr(), x_THR.stride(0), x_THR.stride(1), rows, num_heads, width // 2, cos_TF.data_ptr(),
        sin_TF.data_ptr(), out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    if logits_TE.dtype != torch.float32 or (bias_E is not None and bias_E.dtype != torch.float32):
        return reference.route(logits_TE, bias_E, rule)
    tokens, num_experts = logits_TE.shape
    logits_TE, bias_E = logits_TE.contiguous(), None if bias_E is None else bias_E.contiguous()
    ids, weights = (
        torch.empty(tokens, rule.top_k, dtype=torch.int64, device="cpu"),
        torch.empty(tokens, rule.top_k, dtype=torch.float32, device="cpu"),
    )
    build.library().route(
        logits_TE.data_ptr(), None if bias_E is None else bias_E.data_ptr(), tokens, num_experts, *_in_order(rule),
        ids.data_ptr(), weights.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return ids, weights


def _in_order(rule: RouterRule) -> tuple[float, ...]:
    return rule.sigmoid, rule.top_k, rule.num_groups, rule.top_k_groups, rule.normalize, rule.scaling_factor


def choose_experts(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    (tokens, width), num_experts = x_TD.shape, weight_ED.shape[0]
    dense = x_TD.stride(-1) == 1 and weight_ED.is_contiguous() and (bias_E is None or bias_E.is_contiguous())
    floats = weight_ED.dtype == torch.float32 and (bias_E is None or bias_E.dtype == torch.float32)
    if not dense or not floats or x_TD.dtype != torch.bfloat16 or tokens > FEW_TOKENS:
        return route(F.linear(x_TD.float(), weight_ED), bias_E, rule)
    logits_TE, weights_TK = weight_ED.new_empty(tokens, num_experts), weight_ED.new_empty(tokens, rule.top_k)
    ids_TK = torch.empty(tokens, rule.top_k, dtype=torch.int64, device="cpu")
    build.library().choose_experts(
        x_TD.data_ptr(), x_TD.stride(0), width, weight_ED.data_ptr(), None if bias_E is None else bias_E.data_ptr(),
        tokens, num_experts, *_in_order(rule), logits_TE.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return ids_TK, weights_TK


def sort_rows(x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, top_k), ids_TK, x_TD = ids_TK.shape, ids_TK.contiguous(), x_TD.contiguous()
    rows, width = tokens * top_k, x_TD.shape[1]
    x_SD, counts_E, row_TK = x_TD.new_empty(rows, width), ids_TK.new_empty(num_experts), ids_TK.new_empty(tokens, top_k)
    build.library().sort_rows(
        ids_TK.data_ptr(), tokens, top_k, num_experts, x_TD.data_ptr(), width * x_TD.itemsize, counts_E.data_ptr(),
        row_TK.data_ptr(), x_SD.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return x_SD, counts_E, row_TK


def group_rows(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids_TK = ids_TK.contiguous()
    counts_E, row_TK = torch.empty(num_experts, dtype=torch.int64, device="cpu"), torch.empty_like(ids_TK)
    token_of_row_S = row_TK.new_empty(ids_TK.numel())
    build.library().group_rows(
        ids_TK.data_ptr(), *ids_TK.shape, num_experts, counts_E.data_ptr(), token_of_row_S.data_ptr(), row_TK.data_ptr()
    )
    return counts_E, token_of_row_S, row_TK


def gather_rows(x_TD: Tensor, token_S: Tensor) -> Tensor:
    if not x_TD.is_contiguous() or token_S.dtype != torch.int64:
        return torch_experts.gather_rows(x_TD, token_S)
    token_S, out = token_S.contiguous(), x_TD.new_empty(len(token_S), x_TD.shape[1])
    outside = build.library().gather_rows(
        x_TD.data_ptr(), len(x_TD), x_TD.shape[1] * x_TD.itemsize, token_S.data_ptr(), len(token_S), out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if outside:
        raise PDInferError(f"{outside} of the rows {token_S.tolist()[:8]} are not among {len(x_TD)}")
    return out


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    if y_SD.dtype != torch.bfloat16 or weights_TK.dtype != torch.float32:
        return torch_experts.combine_rows(y_SD, row_TK, weights_TK)
    out_TD = torch.empty(row_TK.shape[0], y_SD.shape[1], dtype=torch.float32, device="cpu")
    y_SD, row_TK, weights_TK = y_SD.contiguous(), row_TK.contiguous(), weights_TK.contiguous()
    build.library().combine_rows(
        y_SD.data_ptr(), row_TK.data_ptr(), weights_TK.data_ptr(), *row_TK.shape, y_SD.shape[1], out_TD.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out_TD


def gated_silu(x_TJ: Tensor) -> Tensor:
    if x_TJ.dtype != torch.bfloat16 or not build.serves("gated_silu"):  # experts ask, another family
        return reference.gated_silu(x_TJ)
    rows, width = x_TJ.shape
    x_TJ = x_TJ.contiguous()
    out = x_TJ.new_empty(rows, width // 2)
    build.library().gated_silu(x_TJ.data_ptr(), rows, width // 2, out.data_ptr(), torch.get_num_threads())
    return out


def draw(logits_BV: Tensor, changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    dense = logits_BV.is_contiguous() and changed_BV.is_contiguous()
    if not logits_BV.shape[1] or not dense or not logits_BV.dtype == changed_BV.dtype == torch.float32:
        return draws.draw(logits_BV, changed_BV, controls, kind)
    words_3B = torch.empty(3, len(logits_BV), dtype=torch.int32, device="cpu")
    build.library().draw_greedy(
        logits_BV.data_ptr(), changed_BV.data_ptr(), *logits_BV.shape, words_3B.data_ptr(), torch.get_num_threads()
    )
    if kind is not DrawKind.GREEDY:
        tokens_B = draws.drawn_tokens(changed_BV, words_3B[0].long(), controls, kind)
        words_3B[0] = tokens_B
        words_3B[1] = draws.logprobs(logits_BV, tokens_B, words_3B[2].view(torch.float32)).view(torch.int32)
    return words_3B


_APART: Any = SimpleNamespace(
    rms_norm=rms_norm,
    rotate=rotate,
    combine_rows=combine_rows,
    store_latent=torch_attention.store_latent,
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
        x_TD.data_ptr(), residual_TD.data_ptr(), rows, width, weight_D.data_ptr(), eps, sum_TD.data_ptr(),
        normed_TD.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
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
        c_TC.data_ptr(), c_TC.stride(0), k_TR.data_ptr(), k_TR.stride(0), *c_TC.shape, k_TR.shape[1] // 2,
        weight_C.data_ptr(), eps, cos_TF.data_ptr(), sin_TF.data_ptr(), slots_T.data_ptr(), num_slots,
        pages_PGW.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if outside:
        raise PDInferError(f"{outside} of the slots {slots_T.tolist()[:8]} are not among the {num_slots} of the cache")


def combine_experts(
    y_SD: Tensor, row_TK: Tensor | None, weights_TK: Tensor | None, shared_TD: Tensor | None, residual_TD: Tensor | None
) -> Tensor:
    dense = _dense(y_SD, shared_TD, residual_TD)
    if row_TK is None or weights_TK is None or weights_TK.dtype != torch.float32 or not dense:
        return compositions.combine_experts(_APART, y_SD, row_TK, weights_TK, shared_TD, residual_TD)
    row_TK, weights_TK = row_TK.contiguous(), weights_TK.contiguous()
    out_TD = y_SD.new_empty(row_TK.shape[0], y_SD.shape[1])
    build.library().combine_experts(
        y_SD.data_ptr(), row_TK.data_ptr(), weights_TK.data_ptr(), None if shared_TD is None else shared_TD.data_ptr(),
        None if residual_TD is None else residual_TD.data_ptr(), *row_TK.shape, y_SD.shape[1], out_TD.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out_TD
