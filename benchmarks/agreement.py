"""Measure what ranks wait for each other's agreement before a step: JSON lines, then a table.

    python benchmarks/agreement.py [--ranks 4] [--rounds 15] [--steps 40] [--step-ms 10]

Each rank is a process (gloo over the loopback interface, one thread) whose steps do nothing but sleep for `step-ms`, as
a host does while its device computes. `agree_us`: from the end of that to the end of the agreement of the next step,
the mean of all steps of a round, on the rank that waits longest. `step_us`: the whole step. Before, ranks begin an
agreement once the step has ended; after, they begin it when the step begins. The rounds alternate (A B A B); results
are medians and the ratio of each pair.
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
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import pdinfer as pd
from pdinfer.engine.ranks.lockstep import Lockstep
from pdinfer.moe.migration.migration import ExpertStatus


def run_round(lockstep: Lockstep, num_steps: int, step_s: float, *, early: bool) -> tuple[float, float]:
    """Return the mean seconds of an agreement and of a step."""
    agree_s, started = 0.0, time.perf_counter()
    for _ in range(num_steps):
        if early:
            lockstep.begin(num_rows=1, num_passes=0)
        time.sleep(step_s)
        ended = time.perf_counter()
        lockstep.agree(num_rows=1)
        agree_s += time.perf_counter() - ended
    return agree_s / num_steps, (time.perf_counter() - started) / num_steps


def rank_main(rank: int, store: str, arguments: dict[str, Any], results: Connection) -> None:
    """Measure on one rank; put (agreement, step) in seconds, before and after, of each round into `results`."""
    size = arguments["ranks"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = pd.Topology.from_env().connect()
    experts: Any = SimpleNamespace(has_news=False, status=ExpertStatus, agreed=lambda *_, runs: False)
    lockstep = Lockstep(groups, experts, lambda: None)
    lockstep.agree(num_rows=1)
    steps, step_s = arguments["steps"], arguments["step_ms"] / 1e3
    run_round(lockstep, steps, step_s, early=True)
    rounds = [
        [run_round(lockstep, steps, step_s, early=early) for early in (False, True)] for _ in range(arguments["rounds"])
    ]
    lockstep.agree(is_closing=True)
    lockstep.close()
    results.send_bytes(json.dumps(rounds).encode())
    groups.close()
    torch.distributed.destroy_process_group()


def line(case: str, arguments: dict[str, Any], before: list[float], after: list[float]) -> dict[str, Any]:
    ratios = [old / new for old, new in zip(before, after, strict=True)]
    return {
        "bench": "agreement",
        "case": case,
        "value": statistics.median(after),
        "unit": "us",
        "baseline": "begun once the step has ended",
        "baseline_value": statistics.median(before),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "runs": len(ratios),
        **arguments,
        "load": os.getloadavg()[0],
    }


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the ranks and make lines of their results."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(arguments["ranks"])]
        processes = [
            context.Process(target=rank_main, args=(rank, str(Path(folder) / "store"), arguments, sender))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        told = np.array([json.loads(receiver.recv_bytes()) for receiver, _ in pipes])
        for process in processes:
            process.join()
    longest = told.max(0) * 1e6  # round, before or after, agreement or step
    return [
        line(case, arguments, longest[:, 0, at].tolist(), longest[:, 1, at].tolist())
        for at, case in enumerate(("agree_us", "step_us"))
    ]


def main() -> None:
    """Print the lines, and a table to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--step-ms", type=float, default=10.0)
    lines = measure(vars(parser.parse_args()))
    for each in lines:
        print(json.dumps(each))
    for each in lines:
        print(
            f"{each['case']:10} {each['baseline_value']:10.1f} -> {each['value']:10.1f} us "
            f"x{each['ratio']:.2f} ({each['ratio_low']:.2f} to {each['ratio_high']:.2f})",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
