"""Measure how evenly experts are placed, what it costs to stay even, and how long solving takes: JSON lines, then a
table.

    python benchmarks/eplb.py --baseline eplb.py [--rounds 5] [--steps 8] [--cases EP72,solve_time]

The sizes are 58 layers and 256 experts in 8 groups, with 32 redundant copies. EP32 is 32 ranks on 4 nodes with every
group on one node, EP32-global is the same without that limit, EP72 and EP144 are 72 and 144 ranks. The baseline is
DeepSeek's published eplb.py (https://github.com/deepseek-ai/EPLB), called with the same sizes; without `--baseline` its
columns stay empty.

`balance/<ranks>/<load>`: balancedness, which is the mean load of a rank over the highest, averaged over layers, on the
load that was solved for. Each round has another load. `lognormal` (sigma 0.8), `zipf` (exponent 0.7, in another order
per layer). `drift`: a lognormal load whose logarithm keeps 98 % of itself and is solved for at every step, ours from
the placement of the step before; it also reports the experts that ranks must be sent, in GiB of FP8 weights of
DeepSeek-V3. `solve_time/<ranks>/<load>`: milliseconds, in the same rounds (A B A B).

Ratios above 1 mean that ours is better.
"""

import argparse
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

import pdinfer as pd
from pdinfer.moe import solve_placement
from pdinfer.moe.placement.difference import count_arrivals

LAYERS, EXPERTS, GROUPS, REDUNDANT = 58, 256, 8, 32
SLOTS = EXPERTS + REDUNDANT
EXPERT_BYTES = 3 * 7168 * 2048 + 3 * 56 * 16 * 4  # FP8 and a float32 scale per 128 x 128
KEPT = 0.98
TOLERANCE = 0.0005  # share of a mean rank's load, above a placement made anew

Loads = Callable[[int], np.ndarray]
Baseline = Callable[..., Any]


@attrs.frozen
class Case:
    """The sizes of a deployment. The baseline is told `num_nodes` and `num_groups`."""

    num_ranks: int
    num_groups: int = 1
    num_nodes: int = 1

    def solve(self, load: np.ndarray, previous: pd.ExpertPlacement | None = None) -> pd.ExpertPlacement:
        return solve_placement(
            load,
            num_ranks=self.num_ranks,
            num_redundant=REDUNDANT,
            num_groups=self.num_groups,
            num_nodes=self.num_nodes,
            cross_node_weight=math.inf if self.num_nodes > 1 else 0.0,
            previous=previous,
            tolerance=TOLERANCE,
        )

    def solve_baseline(self, baseline: Baseline, load: np.ndarray) -> np.ndarray:
        """[L, ranks, slots per rank]"""
        phy2log, _, _ = baseline(torch.from_numpy(load), SLOTS, self.num_groups, self.num_nodes, self.num_ranks)
        return phy2log.numpy().reshape(LAYERS, self.num_ranks, -1)


CASES = {"EP32": Case(32, GROUPS, 4), "EP32-global": Case(32), "EP72": Case(72), "EP144": Case(144)}


def lognormal(seed: int) -> np.ndarray:
    return np.round(1e4 * np.random.default_rng(seed).lognormal(0, 0.8, (LAYERS, EXPERTS)))


def zipf(seed: int) -> np.ndarray:
    load = 1 / np.arange(1, EXPERTS + 1) ** 0.7
    return np.round(1e5 * np.random.default_rng(seed).permuted(np.tile(load, (LAYERS, 1)), axis=1))


def drift(steps: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    state = rng.normal(size=(LAYERS, EXPERTS))
    for _ in range(steps):
        yield np.round(1e4 * np.exp(0.8 * state))
        state = KEPT * state + math.sqrt(1 - KEPT**2) * rng.normal(size=state.shape)


def by_rank(placement: pd.ExpertPlacement) -> np.ndarray:
    return placement.physical_to_logical_map.reshape(LAYERS, placement.num_ranks, -1)


def balancedness(load: np.ndarray, table: np.ndarray, shares: np.ndarray | None = None) -> float:
    """Return the balancedness of `table` [L, ranks, slots per rank]; without shares, copies of an expert have equal
    ones."""
    flat = table.reshape(LAYERS, -1)
    if shares is None:
        counts = np.stack([np.bincount(row, minlength=EXPERTS) for row in flat])
        shares = 1 / np.take_along_axis(counts, flat, 1)
    ranks = (np.take_along_axis(load, flat, 1) * shares).reshape(table.shape).sum(2)
    return float((ranks.mean(1) / ranks.max(1)).mean())


def line(case: str, unit: str, ours: list[float], theirs: list[float], better: Callable[..., float]) -> dict[str, Any]:
    """Print one result; `better` is the ratio of a pair."""
    result: dict[str, Any] = {"bench": "eplb", "case": case, "value": statistics.median(ours), "unit": unit}
    result |= dict.fromkeys(("baseline", "baseline_value", "ratio", "ratio_low", "ratio_high"))
    if theirs:
        ratios = sorted(better(*pair) for pair in zip(ours, theirs, strict=True))
        result |= {"baseline": "deepseek-ai/EPLB", "baseline_value": statistics.median(theirs)}
        result |= {"ratio": statistics.median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1]}
    rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in result.items()}
    return rounded | {"runs": len(ours)}


def measure_static(name: str, loads: str, rounds: int, baseline: Baseline | None) -> Iterator[dict[str, Any]]:
    case, generate = CASES[name], {"lognormal": lognormal, "zipf": zipf}[loads]
    ours, theirs, even, ours_ms, theirs_ms = [], [], [], [], []
    case.solve(generate(rounds))
    for seed in range(rounds):
        load = generate(seed)
        start = time.perf_counter()
        placement = case.solve(load)
        ours_ms.append(1e3 * (time.perf_counter() - start))
        ours.append(balancedness(load, by_rank(placement), placement.slot_shares))
        even.append(balancedness(load, by_rank(placement)))
        if baseline:
            start = time.perf_counter()
            table = case.solve_baseline(baseline, load)
            theirs_ms.append(1e3 * (time.perf_counter() - start))
            theirs.append(balancedness(load, table))
    balance = line(f"balance/{name}/{loads}", "mean/max", ours, theirs, lambda a, b: a / b)
    yield balance | {"value_low": round(min(ours), 6), "value_even_shares": round(statistics.median(even), 6)}
    yield line(f"solve_time/{name}/{loads}", "ms", ours_ms, theirs_ms, lambda a, b: b / a)


def measure_drift(name: str, steps: int, baseline: Baseline | None) -> dict[str, Any]:
    case = CASES[name]
    ours: list[float] = []
    theirs: list[float] = []
    moved = baseline_moved = 0
    placement, table = None, None
    for load in drift(steps + 1):
        last, last_table = placement, table
        placement = case.solve(load, last)
        table = case.solve_baseline(baseline, load) if baseline else None
        if last is None:
            continue
        ours.append(balancedness(load, by_rank(placement), placement.slot_shares))
        moved += int(count_arrivals(by_rank(last), by_rank(placement)).sum())
        if table is not None:
            theirs.append(balancedness(load, table))
            baseline_moved += int(count_arrivals(last_table, table).sum())
    gib = EXPERT_BYTES / 2**30 / steps
    result = line(f"balance/{name}/drift", "mean/max", ours, theirs, lambda a, b: a / b)
    result |= {"moved_gib_per_step": round(moved * gib, 1)}
    if theirs:
        gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
        result |= {
            "baseline_moved_gib_per_step": round(baseline_moved * gib, 1),
            "moved_ratio": round(baseline_moved / moved, 3),
            "lowest_difference": round(min(gaps), 6),
        }
    return result


def load_baseline(path: Path) -> Baseline:
    spec = importlib.util.spec_from_file_location("eplb_baseline", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Baseline = module.rebalance_experts
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="DeepSeek's published eplb.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", default="", help="only cases that contain one of these words")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    baseline = load_baseline(arguments.baseline) if arguments.baseline else None
    if baseline is None:
        print("no --baseline: DeepSeek's eplb.py is not measured")
    words = arguments.cases.split(",")
    lines = []
    for name in CASES:
        for loads in ("lognormal", "zipf", "drift"):
            wanted = [
                case
                for case in (f"balance/{name}/{loads}", f"solve_time/{name}/{loads}")
                if any(word in case for word in words)
            ]
            if not wanted:
                continue
            if loads == "drift":
                found = [measure_drift(name, arguments.steps, baseline)]
            else:
                found = list(measure_static(name, loads, arguments.rounds, baseline))
            for result in found:
                if result["case"] in wanted:
                    print(json.dumps(result), flush=True)
                    lines.append(result)
    print(f"\n{'case':32} {'value':>10} {'baseline':>10} {'ratio':>8}  moved GiB per step")
    for result in lines:
        numbers = [result[key] for key in ("value", "baseline_value", "ratio")]
        columns = " ".join(f"{'-' if number is None else format(number, '.4f'):>10}" for number in numbers)
        moved = [result.get(key, "") for key in ("moved_gib_per_step", "baseline_moved_gib_per_step")]
        print(f"{result['case']:32} {columns}  {moved[0]} {moved[1]}".rstrip())


if __name__ == "__main__":
    main()
