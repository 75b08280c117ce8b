"""The router: a block has the experts of one token or a few in registers, group by group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdinfer.kernels.arguments import RouterRule
from pdinfer.kernels.triton.configs import of_routing
from pdinfer.kernels.triton.launch import as_rows, launch, need


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    rows = as_rows(logits_TE)
    num_tokens, num_experts = rows.shape
    need(rows.dtype == torch.float32, f"a router takes logits in float32, got {rows.dtype}")
    top_k, num_groups = rule.top_k, rule.num_groups
    need(num_experts % num_groups == 0, f"{num_experts} experts are no {num_groups} groups of one size")
    need(top_k <= num_experts, f"{top_k} experts cannot be chosen among {num_experts}")
    need(bias_E is None or bias_E.shape == (num_experts,), f"a router needs a bias for each of {num_experts} experts")
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=rows.device)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=rows.device)
    size, config = num_experts // num_groups, of_routing(num_tokens)
    launch(
        _route_tokens, (triton.cdiv(num_tokens, config.tiles["TOKENS"]),),
        rows, None if bias_E is None else bias_E.contiguous(), ids_TK, weights_TK, rows.stride(0), num_tokens,
        num_groups, size, rule.scaling_factor,
        SIGMOID=rule.sigmoid, NORMALIZE=rule.normalize, TOP_K=top_k,
        TOP_K_GROUPS=rule.top_k_groups if num_groups > 1 else 0, GROUPS=triton.next_power_of_2(num_groups),
        SIZE=triton.next_power_of_2(size), CHOICES=triton.next_power_of_2(top_k), **config.constants,
    )  # fmt: skip
    return ids_TK, weights_TK


NEVER = tl.constexpr(-(2**63))
"""The rank of what cannot be chosen, or was chosen before. No value is ranked so low."""


@triton.jit
def _ranked(values, index):
    """Return an integer for each value, larger where the value is, and of equal values where the index is smaller. No
    two are equal."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits ^ (bits >> 31 & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - index)


@triton.jit
def _of_kept_groups(
    choice, rank, num_groups,
    BIASED: tl.constexpr, TOP_K_GROUPS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    grouped = tl.reshape(choice, [TOKENS, GROUPS, SIZE])
    rank_in_group = tl.reshape(rank, [TOKENS, GROUPS, SIZE])
    best = tl.max(rank_in_group, 2)[:, :, None]
    worth = tl.sum(tl.where(rank_in_group == best, grouped, 0), 2)
    if BIASED:
        rank_in_group = tl.where(rank_in_group == best, NEVER, rank_in_group)
        best = tl.max(rank_in_group, 2)[:, :, None]
        worth += tl.sum(tl.where((rank_in_group == best) & (best != NEVER), grouped, 0), 2)
    group = tl.arange(0, GROUPS)[None, :]
    rank_of_group = tl.where(group < num_groups, _ranked(worth, group), NEVER)
    for _ in tl.static_range(TOP_K_GROUPS):
        rank_of_group = tl.where(rank_of_group == tl.max(rank_of_group, 1)[:, None], NEVER, rank_of_group)
    is_kept = tl.broadcast_to((rank_of_group == NEVER)[:, :, None], [TOKENS, GROUPS, SIZE])
    return tl.reshape(is_kept, [TOKENS, GROUPS * SIZE])


@triton.jit
def _route_tokens(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, pitch, num_tokens, num_groups, size, scaling_factor,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, TOP_K: tl.constexpr, TOP_K_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Choose the experts of some tokens. A row of the tile has GROUPS * SIZE places, `size` experts in each of
    `num_groups`. With TOP_K_GROUPS of 0 all groups compete."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    place = tl.arange(0, GROUPS * SIZE)[None, :]
    expert = place // SIZE * size + place % SIZE
    there = (place // SIZE < num_groups) & (place % SIZE < size)
    logits = tl.load(logits_ptr + token * pitch + expert, there & (token < num_tokens), 0)
    exact = logits.to(tl.float64)
    if SIGMOID:
        scores = (1 / (1 + tl.exp(-exact))).to(tl.float32)
    else:
        exact = tl.where(there, exact, float("-inf"))
        exps = tl.exp(exact - tl.max(exact, 1)[:, None])
        scores = (exps / tl.sum(exps, 1)[:, None]).to(tl.float32)
    lost, choice = 0 * logits, scores
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, there, 0)
        lost, choice = lost + 0 * bias, scores + bias
    rank = tl.where(there, _ranked(choice, expert), NEVER)
    if TOP_K_GROUPS > 0:
        is_kept = _of_kept_groups(choice, rank, num_groups, bias_ptr is not None, TOP_K_GROUPS, TOKENS, GROUPS, SIZE)
        rank = tl.where(there & ~is_kept, (0x7FFFFFFF - expert).to(tl.int64) | NEVER, rank)
    chosen = tl.arange(0, CHOICES)[None, :]
    ids = tl.zeros([TOKENS, CHOICES], tl.int32)
    weights = tl.zeros([TOKENS, CHOICES], tl.float32)
    for number in tl.static_range(TOP_K):
        best = tl.max(rank, 1)[:, None]
        ids = tl.where(chosen == number, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), ids)
        weight = tl.sum(tl.where(rank == best, scores, 0), 1)[:, None]
        weights = tl.where(chosen == number, weight, weights)
        rank = tl.where(rank == best, NEVER, rank)
    if NORMALIZE:
        weights = tl.div_rn(weights, tl.sum(weights, 1)[:, None] + 1e-20)
    weights = weights * scaling_factor + tl.sum(lost, 1)[:, None]
    out, fits = token * TOP_K + chosen, (token < num_tokens) & (chosen < TOP_K)
    tl.store(ids_ptr + out, ids.to(tl.int64), fits)
    tl.store(weights_ptr + out, weights, fits)
