"""The dispatchers that the conformance suite runs on, and the job that runs it on a rank."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from unittest.mock import patch

import attrs
import torch
from torch import Tensor

from pdinfer.kernels import compositions, deep_gemm
from pdinfer.kernels.formats.activations import FP8Rows, INT8Rows
from pdinfer.kernels.formats.int8 import int8_activation
from pdinfer.kernels.ops import Composed, Ops
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher, Int8AllToAllDispatcher
from pdinfer.moe.dispatchers.base import LocalDispatcher
from pdinfer.moe.dispatchers.deep_ep import DeepEPLowLatency, DeepEPNormal
from pdinfer.moe.dispatchers.deep_ep_elastic import DeepEPElastic
from pdinfer.moe.dispatchers.deep_ep_limits import DeepEPConfig, ExpertSizes
from pdinfer.parallel.groups import Group
from pdinfer.parallel.topology import Topology
from tests.conformance import fake_deep_ep
from tests.conformance.dispatch_suite import MAX_TOKENS, OPS, SUITE, Kind, sums_are_those_of_one_rank
from tests.rounding import gamma

CPU = torch.device("cpu")
NORMAL_WIDTH, NORMAL_FP8_WIDTH, LOW_LATENCY_WIDTH = 16, 256, 2048


def sort_into_tiles(
    ops: Ops, x_TD: FP8Rows, ids_TK: Tensor, num_experts: int, num_rows: int
) -> tuple[FP8Rows, Tensor, Tensor]:
    """Do as DeepGEMM's adapter, with tiles of 4 rows, where there are any."""
    library = ModuleType("deep_gemm")
    setattr(library, deep_gemm.ALIGNMENT[0], lambda: 4)
    sort = deep_gemm.sort_rows_fp8.func if num_rows else compositions.sort_rows_fp8
    with patch.dict(sys.modules, deep_gemm=library), patch.object(deep_gemm, "FULL_TILES", 0):
        sorted_rows: tuple[FP8Rows, Tensor, Tensor] = sort(ops, x_TD, ids_TK, num_experts, num_rows)
    return sorted_rows


IN_TILES = OPS.replace(sort_rows_fp8=Composed(sort_into_tiles))


def local_in_tiles(group: Group, experts_per_rank: int, top_k: int) -> LocalDispatcher:
    return LocalDispatcher(experts_per_rank, IN_TILES)


def normal_in_tiles(group: Group, experts_per_rank: int, top_k: int) -> DeepEPNormal:
    return DeepEPNormal.connect(group, sizes(group, experts_per_rank, top_k, NORMAL_FP8_WIDTH), IN_TILES, device=CPU)


def local(group: Group, experts_per_rank: int, top_k: int) -> LocalDispatcher:
    return LocalDispatcher(experts_per_rank, OPS)


def all_to_all(group: Group, experts_per_rank: int, top_k: int) -> AllToAllDispatcher:
    return AllToAllDispatcher(group, experts_per_rank, OPS)


def all_to_all_int8(group: Group, experts_per_rank: int, top_k: int) -> Int8AllToAllDispatcher:
    return Int8AllToAllDispatcher(all_to_all(group, experts_per_rank, top_k))


def in_int8(x_TD: Tensor) -> Tensor:
    return INT8Rows(*int8_activation(x_TD), dtype=x_TD.dtype).floats()


def sizes(group: Group, experts_per_rank: int, top_k: int, hidden_size: int) -> ExpertSizes:
    return ExpertSizes(
        num_ranks=group.size,
        num_experts=experts_per_rank * group.size,
        hidden_size=hidden_size,
        top_k=top_k,
        dtype=torch.bfloat16,
    )


def normal(group: Group, experts_per_rank: int, top_k: int) -> DeepEPNormal:
    return DeepEPNormal.connect(group, sizes(group, experts_per_rank, top_k, NORMAL_WIDTH), OPS, device=CPU)


def normal_fp8(group: Group, experts_per_rank: int, top_k: int) -> DeepEPNormal:
    return DeepEPNormal.connect(group, sizes(group, experts_per_rank, top_k, NORMAL_FP8_WIDTH), OPS, device=CPU)


def normal_tuned(group: Group, experts_per_rank: int, top_k: int) -> DeepEPNormal:
    config = DeepEPConfig.from_dict({"normal_dispatch": {"num_sms": 32}, "normal_combine": {"num_sms": 32}})
    dispatcher = DeepEPNormal.connect(
        group, sizes(group, experts_per_rank, top_k, NORMAL_WIDTH), OPS, config, device=CPU
    )
    assert dispatcher.buffer.num_sms == dispatcher.dispatch_chunks.arguments["num_sms"] == 32
    return dispatcher


def low_latency(group: Group, experts_per_rank: int, top_k: int) -> DeepEPLowLatency:
    of = sizes(group, experts_per_rank, top_k, LOW_LATENCY_WIDTH)
    return DeepEPLowLatency.connect(group, of, MAX_TOKENS, device=CPU)


def elastic(group: Group, experts_per_rank: int, top_k: int) -> DeepEPElastic:
    of = sizes(group, experts_per_rank, top_k, NORMAL_WIDTH)
    return DeepEPElastic.connect(group, of, MAX_TOKENS, device=CPU)


def elastic_fp8(group: Group, experts_per_rank: int, top_k: int) -> DeepEPElastic:
    of = sizes(group, experts_per_rank, top_k, NORMAL_FP8_WIDTH)
    return DeepEPElastic.connect(group, of, MAX_TOKENS, device=CPU)


ROUGH = gamma(4, torch.bfloat16)
KINDS = {
    "local": Kind(local),
    "local-fp8": Kind(local, width=130, fp8=True, carries_fp8=True),
    "local-fp8-tiles": Kind(local_in_tiles, width=130, fp8=True, carries_fp8=True),
    "all_to_all": Kind(all_to_all),
    "all_to_all-bfloat16": Kind(all_to_all, dtype=torch.bfloat16, tolerance=gamma(3, torch.bfloat16)),
    "all_to_all-fp8": Kind(all_to_all, width=130, fp8=True),
    "all_to_all_int8": Kind(all_to_all_int8, arrives=in_int8),
    "all_to_all_int8-bfloat16": Kind(all_to_all_int8, 130, torch.bfloat16, gamma(3, torch.bfloat16), arrives=in_int8),
    "deep_ep-normal": Kind(normal, NORMAL_WIDTH, torch.bfloat16, ROUGH),
    "deep_ep-normal-tuned": Kind(normal_tuned, NORMAL_WIDTH, torch.bfloat16, ROUGH),
    "deep_ep-normal-fp8": Kind(normal_fp8, NORMAL_FP8_WIDTH, torch.bfloat16, ROUGH, fp8=True, carries_fp8=True),
    "deep_ep-normal-fp8-tiles": Kind(
        normal_in_tiles, NORMAL_FP8_WIDTH, torch.bfloat16, ROUGH, fp8=True, carries_fp8=True
    ),
    "deep_ep-normal-cut-blocks": Kind(normal, NORMAL_WIDTH, torch.bfloat16, ROUGH, fp8=True),
    "deep_ep-elastic": Kind(elastic, NORMAL_WIDTH, torch.bfloat16, ROUGH),
    "deep_ep-elastic-fp8": Kind(elastic_fp8, NORMAL_FP8_WIDTH, torch.bfloat16, ROUGH, fp8=True, carries_fp8=True),
    "deep_ep-elastic-cut-blocks": Kind(elastic, NORMAL_WIDTH, torch.bfloat16, ROUGH, fp8=True),
    "deep_ep-low_latency": Kind(low_latency, LOW_LATENCY_WIDTH, torch.bfloat16, ROUGH),
    "deep_ep-low_latency-fp8": Kind(low_latency, LOW_LATENCY_WIDTH, torch.bfloat16, ROUGH, fp8=True, carries_fp8=True),
}
EXACT = ("local", "all_to_all", "all_to_all-bfloat16")


def lose(rank: int) -> None:
    """Let that rank die between dispatch and combine."""
    group = Topology.from_env().connect().ep
    dispatcher = AllToAllDispatcher(group, 1, OPS)
    ids_TK = torch.arange(group.size)[None]
    dispatched = dispatcher.dispatch_end(dispatcher.dispatch_begin(torch.ones(1, 3), ids_TK, torch.ones(ids_TK.shape)))
    if group.rank == rank:
        os._exit(3)
    dispatcher.combine_end(dispatcher.combine_begin(dispatched.x_SD, dispatched))


def run_suite(name: str, seeds: int) -> list[str]:
    """Run the whole suite on this rank, and return the names of the collectives it took."""
    sys.modules["deep_ep"] = fake_deep_ep
    topology = Topology.from_env()
    groups = topology.connect() if topology.world_size > 1 else None
    calls: list[str] = []
    group = Group("ep") if groups is None else attrs.evolve(groups.ep, calls=calls)
    checks = (*SUITE, sums_are_those_of_one_rank) if name in EXACT else SUITE
    try:
        for check in checks:
            for seed in range(seeds):
                check(KINDS[name], group, seed)
        assert bool(group.ends) == name.startswith("deep_ep")
        if groups is not None:
            groups.close()
        assert not group.ends
    finally:
        del sys.modules["deep_ep"]
    return calls
