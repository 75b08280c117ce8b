"""What ranks with divided experts do in tests (see tests/ranks.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.kernels.formats.format import Weight
from pdinfer.kernels.formats.weights import tensors_of
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher
from pdinfer.moe.placement.replicas import DispatchRule, ReplicaTables
from pdinfer.parallel.groups import Group


def expert_logits(
    folder: str,
    topology: dict[str, int],
    prompts: Sequence[Sequence[Sequence[int]]],
    *,
    weights: str = "float",
    experts: dict[str, Any] | None = None,
    placement: Sequence[Sequence[int]] | None = None,
    next_token: int | None = None,
) -> list[bytes]:
    """Float32 logits of this data-parallel rank's prompts, with `next_token` those of the MTP layer too."""
    of_rank = pd.Topology.from_env(**topology)
    model = pd.load_model(
        folder,
        dtype=torch.float32,
        weights=weights,
        topology=of_rank,
        experts=pd.moe.ExpertConfig(**(experts or {})),
        placement=placed(placement, of_rank.ep_size),
        mtp=next_token is not None,
    )
    assert model.experts.placement is not None
    for layer in model.moe_layers():
        assert num_experts(layer.experts.gate_up) == model.experts.placement.slots_per_rank
    mine = prompts[of_rank.rank // (of_rank.cp_size * of_rank.tp_size)]
    logits = [model.logits(prompt) for prompt in mine]
    if next_token is not None:
        logits += [model.mtp_logits(prompt, next_token) for prompt in mine]
    return [each.numpy().tobytes() for each in logits]


def recorded(folder: str, prompts: Sequence[Sequence[int]], mode: str) -> list[list[int]]:
    """What this rank's prompt made routers choose, by layer and logical expert."""
    of_rank = pd.Topology.from_env()
    options = pd.moe.ExpertConfig(
        num_redundant_experts=of_rank.world_size if of_rank.world_size > 1 else 0,
        ep_dispatch_algorithm="dynamic",
        expert_distribution_recorder_mode=mode,
    )
    model = pd.load_model(folder, topology=of_rank, experts=options)
    model.logits(prompts[of_rank.rank])
    assert model.experts.recorder is not None
    model.experts.recorder.end_step()
    counts: list[list[int]] = model.experts.recorder.counts().tolist()
    return counts


def placed(table: Sequence[Sequence[int]] | None, num_ranks: int) -> pd.ExpertPlacement | None:
    if table is None:
        return None
    experts = max(map(max, table)) + 1
    return pd.ExpertPlacement(physical_to_logical_map=table, num_logical_experts=experts, num_ranks=num_ranks)


def num_experts(stack: Weight) -> int:
    return len(tensors_of(stack)[0])


def load_with(folder: str, tables: Sequence[Sequence[Sequence[int]] | None], num_redundant: Sequence[int]) -> None:
    """Rank r asks for the r-th of these."""
    of_rank = pd.Topology.from_env()
    options = pd.moe.ExpertConfig(num_redundant_experts=num_redundant[of_rank.rank])
    pd.load_model(folder, topology=of_rank, experts=options, placement=placed(tables[of_rank.rank], of_rank.ep_size))


def received_rows(
    load: Sequence[Sequence[float]],
    top_k: int,
    num_tokens: int,
    tables: Sequence[tuple[Sequence[Sequence[int]], Sequence[Sequence[float]] | None]],
) -> list[list[int]]:
    """For each placement (slots, shares) how many rows come to this rank, by layer, when all ranks together send
    `num_tokens` tokens that choose experts as often as `load` says."""
    groups = pd.Topology.from_env().connect()
    count = num_tokens // groups.ep.size
    chosen = [drawn(row, top_k, count, seed=100 * layer + groups.ep.rank) for layer, row in enumerate(load)]
    placements = [
        pd.ExpertPlacement(
            physical_to_logical_map=table,
            num_logical_experts=len(load[0]),
            num_ranks=groups.ep.size,
            slot_shares=shares,
        )
        for table, shares in tables
    ]
    return [_received(groups.ep, placement, chosen) for placement in placements]


def _received(group: Group, placement: pd.ExpertPlacement, chosen: Sequence[Tensor]) -> list[int]:
    cpu = torch.device("cpu")
    tables = ReplicaTables.build(placement, DispatchRule.DYNAMIC, rank=group.rank, ranks_per_node=None, device=cpu)
    ops = resolve_ops(OpSpec(device=cpu, dtype=torch.float32)).ops
    dispatcher = AllToAllDispatcher(group, placement.slots_per_rank, ops)
    received = []
    for layer, ids_TK in enumerate(chosen):
        slots_TK = tables.of_layer(layer)(ids_TK)
        pending = dispatcher.dispatch_begin(torch.zeros(len(ids_TK), 1), slots_TK, torch.ones(ids_TK.shape))
        received.append(int(dispatcher.dispatch_end(pending).counts_E.sum()))
    return received


def drawn(load: Sequence[float], top_k: int, num_tokens: int, *, seed: int) -> Tensor:
    """`top_k` different experts for each token, each as likely as its load: systematic sampling (Madow 1949), experts
    in another order every few tokens. No load is above 1 / top_k of all."""
    random = np.random.default_rng(seed)
    likely = np.asarray(load) / np.sum(load) * top_k
    assert likely.max() <= 1
    parts = []
    for count in np.diff(np.linspace(0, num_tokens, 101).astype(int)):
        order = random.permutation(len(likely))
        until = np.cumsum(likely[order])
        until[-1] = top_k
        points = random.random(count)[:, None] + np.arange(top_k)
        parts.append(order[np.searchsorted(until, points, side="right").clip(max=len(likely) - 1)])
    return torch.from_numpy(np.concatenate(parts))
