"""Fast eager torch: batched where the reference loops, in the tensors' own dtype where rounding allows it.

Norms and routing stay float32. Attention is in `torch_attention.py`, experts are in `torch_experts.py`, and products
with weights in `torch_products.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels import reference, torch_attention, torch_experts, torch_products
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.int8_static import Int8Static
from pdinfer.kernels.ops import Products
from pdinfer.kernels.spec import OpSpec

route = reference.route
group_rows = reference.group_rows
draw = reference.draw
rms_norm = reference.rms_norm
layer_norm = reference.layer_norm
quantize_fp8 = torch_products.quantize_fp8
round_fp8 = torch_products.round_fp8
round_int8 = torch_products.round_int8
slow = torch_products.slow
index_topk = torch_attention.index_topk
index_topk_decode = torch_attention.index_topk_decode
mla_prefill = torch_attention.mla_prefill
mla_decode = torch_attention.mla_decode
mla_sparse = torch_attention.mla_sparse
gated_silu = torch_experts.gated_silu
WEIGHTS = {
    Plain: Products(torch_products.linear, torch_experts.grouped_mlp),
    FP8Blocks: Products(torch_products.linear_fp8, torch_experts.grouped_mlp_fp8),
    Int8Dynamic: Products(torch_products.linear_int8, torch_experts.grouped_mlp_int8),
    Int8Static: Products(torch_products.linear_int8_static),
}


def unavailable(spec: OpSpec) -> str | None:
    """Return None: eager torch runs on every device."""
    return None


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
    if not interleaved:
        return reference.rotate(x_THR, cos_TF, sin_TF, interleaved=False)
    x = x_THR.float()
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos_TF[:, None, :], sin_TF[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x_THR.dtype)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
    rows_TW = cache_rows.latent_rows(c_TC, k_rope_TR, pages_PGW.dtype)
    pages_PGW.view(-1, pages_PGW.shape[-1]).index_copy_(0, slots_T, rows_TW)


def store_index_keys(pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
    rows_TY = cache_rows.index_rows(keys_TY, pages_PGY.dtype)
    pages_PGY.view(-1, pages_PGY.shape[-1]).index_copy_(0, slots_T, rows_TY)


def heads_in(x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
    return torch.bmm(x_THN.transpose(0, 1), weight_HNC).transpose(0, 1)


def heads_out(x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    return torch.bmm(x_THC.transpose(0, 1), weight_HVC.transpose(1, 2)).transpose(0, 1)


def gather_rows(x_TD: Tensor, token_S: Tensor) -> Tensor:
    return x_TD.index_select(0, token_S)


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = torch.zeros(len(row_TK), y_SD.shape[1], device=y_SD.device, dtype=torch.float32)
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


def gather_pages(pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
    torch.index_select(pool_NW, 0, rows_S, out=into_SW)


def scatter_pages(pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
    pool_NW.index_copy_(0, rows_S, from_SW)
