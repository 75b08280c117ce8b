"""Measure what balanced experts gain for a layer on four CPU ranks: JSON lines, then a table.

    python benchmarks/eplb_ranks.py [--rounds 7] [--tokens 4096] [--sigma 0.9]

Each of four processes (gloo, one thread) has a quarter of the slots of one layer of 64 experts, 8 of them copies, and a
quarter of the tokens, each for 4 experts drawn from a lognormal load. A step consists of mapping logical experts to
slots, dispatch, experts and combine, on all ranks. The baseline places experts in the order of their numbers; the other
placement comes from `solve_placement` for that load. The runs alternate (A B A B); results are medians and the ratio of
each pair. `busiest_share`: rows on the fullest rank over the mean, for 50,000 tokens. `step_ms`: wall time, in which
balance shows fully only where every rank has a core of its own. `busiest_cpu_ms`: processor time of the experts on the
rank that needs most of it, for which the others wait on such a machine.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

import pdinfer as pd
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.moe import solve_placement
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher
from pdinfer.moe.layer import Experts
from pdinfer.moe.placement.replicas import DispatchRule, ReplicaTables

NUM_RANKS, NUM_EXPERTS, NUM_REDUNDANT, TOP_K = 4, 64, 8, 4
HIDDEN, INNER = 512, 256
SHARE_TOKENS = 50_000
CPU = torch.device("cpu")


@attrs.frozen
class Step:
    """One rank's part of a step, in seconds."""

    wall_s: float
    experts_cpu_s: float


def drawn(load: np.ndarray, num_tokens: int, seed: int) -> torch.Tensor:
    """Draw TOP_K different experts for each token, each with a probability proportional to its load: systematic
    sampling, in a new order every few tokens."""
    random = np.random.default_rng(seed)
    likely = load / load.sum() * TOP_K
    parts = []
    for count in np.diff(np.linspace(0, num_tokens, 101).astype(int)):
        order = random.permutation(NUM_EXPERTS)
        until = np.cumsum(likely[order])
        points = random.random(count)[:, None] + np.arange(TOP_K)
        parts.append(order[np.searchsorted(until, points, side="right").clip(max=NUM_EXPERTS - 1)])
    return torch.from_numpy(np.concatenate(parts))


def load_of(sigma: float) -> np.ndarray:
    """Return a share for each expert, none above what a token's choices allow."""
    load = np.random.default_rng(5).lognormal(sigma=sigma, size=NUM_EXPERTS)
    return np.minimum(load / load.sum(), 0.9 / TOP_K)


class Layer:
    """The experts of one rank under one placement."""

    def __init__(self, placement: pd.ExpertPlacement, groups: Any) -> None:
        ops = resolve_ops(OpSpec(device=CPU, dtype=torch.float32)).ops
        group = groups.ep
        table = ReplicaTables.build(placement, DispatchRule.DYNAMIC, rank=group.rank, ranks_per_node=None, device=CPU)
        self.replicas = table.of_layer(0)
        self.dispatcher = AllToAllDispatcher(group, placement.slots_per_rank, ops)
        slots = placement.slots_per_rank
        gate_up, down = torch.randn(slots, 2 * INNER, HIDDEN) / 16, torch.randn(slots, HIDDEN, INNER) / 16
        self.experts = Experts(gate_up, down, ops.grouped_mlp.of(gate_up))

    def share(self, ids_TK: torch.Tensor) -> int:
        """Return the number of rows that come to this rank."""
        x_TD = torch.zeros(len(ids_TK), 1)
        pending = self.dispatcher.dispatch_begin(x_TD, self.replicas(ids_TK), torch.ones(ids_TK.shape))
        return int(self.dispatcher.dispatch_end(pending).counts_E.sum())

    def step(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Step:
        """Run the layer once, all ranks together."""
        dist.barrier()
        started = time.perf_counter()
        pending = self.dispatcher.dispatch_begin(x_TD, self.replicas(ids_TK), weights_TK)
        dispatched = self.dispatcher.dispatch_end(pending)
        cpu = time.thread_time()
        y = self.experts(dispatched)
        cpu = time.thread_time() - cpu
        self.dispatcher.combine_end(self.dispatcher.combine_begin(y, dispatched))
        return Step(time.perf_counter() - started, cpu)


def rank_main(rank: int, store: str, arguments: dict[str, Any], results: Connection) -> None:
    """Measure on one rank; put (rows, [before, after] steps of each round) into `results`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    groups = pd.Topology.from_env().connect()
    torch.manual_seed(rank)
    load = load_of(arguments["sigma"])
    placements = (
        pd.ExpertPlacement.trivial(1, NUM_EXPERTS, NUM_RANKS, NUM_REDUNDANT),
        solve_placement(load[None], num_ranks=NUM_RANKS, num_redundant=NUM_REDUNDANT),
    )
    layers = [Layer(placement, groups) for placement in placements]
    shares = [layer.share(drawn(load, SHARE_TOKENS // NUM_RANKS, seed=rank)) for layer in layers]
    count = arguments["tokens"] // NUM_RANKS
    x_TD, ids_TK = torch.randn(count, HIDDEN), drawn(load, count, seed=100 + rank)
    weights_TK = torch.full(ids_TK.shape, 1 / TOP_K)
    for layer in layers:
        layer.step(x_TD, ids_TK, weights_TK)
    rounds = [
        [attrs.astuple(layer.step(x_TD, ids_TK, weights_TK)) for layer in layers] for _ in range(arguments["rounds"])
    ]
    results.send_bytes(json.dumps([shares, rounds]).encode())
    groups.close()
    dist.destroy_process_group()


def line(case: str, unit: str, before: list[float], after: list[float]) -> dict[str, Any]:
    ratios = [old / new for old, new in zip(before, after, strict=True)]
    return {
        "bench": "eplb_ranks",
        "case": case,
        "value": statistics.median(after),
        "unit": unit,
        "baseline": "experts in the order of their numbers",
        "baseline_value": statistics.median(before),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "runs": len(ratios),
    }


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the ranks and make lines of their results."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(NUM_RANKS)]
        processes = [
            context.Process(target=rank_main, args=(rank, str(Path(folder) / "store"), arguments, sender))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        told = [json.loads(receiver.recv_bytes()) for receiver, _ in pipes]
        for process in processes:
            process.join()
    shares = np.array([rows for rows, _ in told])  # rank, before or after
    steps = np.array([rounds for _, rounds in told])  # rank, round, before or after, wall or experts
    uneven = (shares.max(0) / shares.mean(0)).tolist()
    walls, busiest = steps[..., 0].max(0) * 1e3, steps[..., 1].max(0) * 1e3
    return [
        line("busiest_share", "of the mean", [uneven[0]], [uneven[1]]),
        line("step_ms", "ms", walls[:, 0].tolist(), walls[:, 1].tolist()),
        line("busiest_cpu_ms", "ms", busiest[:, 0].tolist(), busiest[:, 1].tolist()),
    ]


def main() -> None:
    """Print the lines, and a table to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096, help="of all ranks together, per step")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the lognormal load")
    lines = measure(vars(parser.parse_args()))
    for each in lines:
        print(json.dumps(each))
    for each in lines:
        print(
            f"{each['case']:16} {each['baseline_value']:8.3f} -> {each['value']:8.3f} {each['unit']:12} "
            f"x{each['ratio']:.2f} ({each['ratio_low']:.2f} to {each['ratio_high']:.2f})",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
