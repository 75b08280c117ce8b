"""The dispatchers that the conformance suite runs on, and the job that runs it on a rank."""

from __future__ import annotations

import torch

from pdinfer.groups import Group
from pdinfer.moe.all_to_all import AllToAllDispatcher
from pdinfer.moe.dispatch import LocalDispatcher
from pdinfer.topology import Topology
from tests.conformance.dispatch_suite import OPS, SUITE, Kind, sums_are_those_of_one_rank


def local(group: Group, experts_per_rank: int, top_k: int) -> LocalDispatcher:
    return LocalDispatcher(experts_per_rank, OPS)


def all_to_all(group: Group, experts_per_rank: int, top_k: int) -> AllToAllDispatcher:
    return AllToAllDispatcher(group, experts_per_rank, OPS)


KINDS = {
    "local": Kind(local),
    "all_to_all": Kind(all_to_all),
    "all_to_all-bfloat16": Kind(all_to_all, dtype=torch.bfloat16, tolerance=1e-2),
}
EXACT = ("local", "all_to_all", "all_to_all-bfloat16")


def run_suite(name: str, seeds: int) -> list[str]:
    """The whole suite on this rank; the names of the collectives it took."""
    topology = Topology.from_env()
    groups = topology.connect() if topology.world_size > 1 else None
    calls: list[str] = []
    group = (
        Group("ep") if groups is None else Group("ep", groups.ep.ranks, groups.ep.rank, groups.ep.process_group, calls)
    )
    checks = (*SUITE, sums_are_those_of_one_rank) if name in EXACT else SUITE
    for check in checks:
        for seed in range(seeds):
            check(KINDS[name], group, seed)
    return calls
