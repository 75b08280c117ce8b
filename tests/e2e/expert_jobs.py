"""What ranks with divided experts do in tests (see tests/ranks.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import pdinfer as pd
from pdinfer.kernels.weight_formats import Weight, tensors_of


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
        experts=pd.ExpertConfig(**(experts or {})),
        placement=placed(placement, of_rank.ep_size),
        mtp=next_token is not None,
    )
    assert model.experts.placement is not None
    for layer in model.moe_layers():
        assert num_experts(layer.experts.gate_up) == model.experts.placement.slots_per_rank
    logits = [model.logits(prompt) for prompt in prompts[of_rank.dp_rank]]
    if next_token is not None:
        logits += [model.mtp_logits(prompt, next_token) for prompt in prompts[of_rank.dp_rank]]
    return [each.numpy().tobytes() for each in logits]


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
    options = pd.ExpertConfig(num_redundant_experts=num_redundant[of_rank.rank])
    pd.load_model(folder, topology=of_rank, experts=options, placement=placed(tables[of_rank.rank], of_rank.ep_size))
