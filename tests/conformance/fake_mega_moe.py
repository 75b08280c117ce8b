"""A stand-in for DeepGEMM's kernel of a whole layer of experts on Hopper cards, on host tensors: its checks, and the
reference's products. Read in sgl-project/DeepGEMM, pull request 36 (csrc/apis/sm90_mega.hpp at 3f9268b), and in the
wheel of sgl-deep-gemm 0.1.4.post1, for a group of one rank, which has all experts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels.formats.fp8 import BLOCK
from pdinfer.kernels.reference import quantize_fp8
from tests.conformance.fake_deep_gemm import Pair, check_block_scales, check_matrix, product
from tests.wheels import called_as

ROOM_STEP = 384
"""What the room for tokens is rounded up to: stands for the least common multiple of the library's tiles, whose number
its build has."""
INTERLEAVED = 8
"""Rows of gate and of up lie in turns of so many."""


@attrs.frozen(kw_only=True)
class Buffer:
    """Memory that all ranks write, as far as callers see it."""

    group: Any
    num_experts: int
    x: Tensor
    x_sf: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def get_symm_buffer_for_sm90_mega_moe(
    group: Any, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, hidden: int, intermediate_hidden: int
) -> Buffer:
    assert group.size() == 1
    assert hidden % BLOCK == intermediate_hidden % BLOCK == 0
    room = -(-num_max_tokens_per_rank // ROOM_STEP) * ROOM_STEP
    return Buffer(
        group=group,
        num_experts=num_experts,
        x=torch.zeros(room, hidden, dtype=torch.float8_e4m3fn),
        x_sf=torch.zeros(room, hidden // BLOCK),
        topk_idx=torch.zeros(room, num_topk, dtype=torch.int64),
        topk_weights=torch.zeros(room, num_topk),
    )


def transform_weights_for_mega_moe_sm90(l1_weights: Pair, l2_weights: Pair) -> tuple[Pair, Pair]:
    numbers, scales = l1_weights
    halves = numbers.unflatten(1, (2, -1, INTERLEAVED)).transpose(1, 2)
    return (halves.flatten(1, 3).contiguous(), scales), l2_weights


def mega_moe_pre_dispatch_sm90(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
) -> None:
    assert x.dtype == torch.bfloat16
    assert x.shape == (num_tokens, buf_x.shape[1])
    assert num_tokens <= len(buf_x)
    assert topk_idx.shape == topk_weights.shape == (num_tokens, buf_topk_idx.shape[1])
    assert (topk_idx.dtype, topk_weights.dtype) == (torch.int64, torch.float32)
    assert all(each.is_contiguous() for each in (x, topk_idx, topk_weights))
    rows = quantize_fp8(x, ue8m0=False)
    for to, values in (
        (buf_x, rows.numbers_TI),
        (buf_x_sf, rows.scales_TN),
        (buf_topk_idx, topk_idx),
        (buf_topk_weights, topk_weights),
    ):
        to[:num_tokens] = values


def fp8_mega_moe(y: Tensor, l1_weights: Pair, l2_weights: Pair, sym_buffer: Buffer) -> None:
    (experts, inner_2, hidden), (experts_, hidden_, inner) = check_matrix(l1_weights[0]), check_matrix(l2_weights[0])
    assert (experts, hidden, inner_2) == (experts_, hidden_, 2 * inner)
    assert experts == sym_buffer.num_experts
    assert l1_weights[0].is_contiguous()
    assert l2_weights[0].is_contiguous()
    assert inner // 64 <= 64
    check_block_scales(l1_weights[1], inner_2, hidden, experts)
    check_block_scales(l2_weights[1], hidden, inner, experts)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    assert y.shape[1] == hidden
    assert len(y) <= len(sym_buffer.x)
    apart = l1_weights[0].unflatten(1, (-1, 2, INTERLEAVED)).transpose(1, 2).flatten(1, 3)
    for token in range(len(y)):
        row = sym_buffer.x[token, None], sym_buffer.x_sf[token, None]
        total_D = torch.zeros(hidden)
        for expert, weight in zip(sym_buffer.topk_idx[token], sym_buffer.topk_weights[token], strict=True):
            gate, up = product(row, (apart[expert], l1_weights[1][expert])).float().chunk(2, -1)
            inside = quantize_fp8((F.silu(gate) * up).to(torch.bfloat16), ue8m0=False)
            result = product((inside.numbers_TI, inside.scales_TN), (l2_weights[0][expert], l2_weights[1][expert]))
            total_D += weight * result[0].float()
        y[token] = total_D.to(torch.bfloat16)


def added_to(library: ModuleType) -> ModuleType:
    """Return the library with these functions, which are called as those of the wheels are."""
    for function in (
        get_symm_buffer_for_sm90_mega_moe,
        transform_weights_for_mega_moe_sm90,
        mega_moe_pre_dispatch_sm90,
        fp8_mega_moe,
    ):
        setattr(library, function.__name__, called_as("deep_gemm", function))
    return library
