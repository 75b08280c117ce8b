"""Decode steps of a CPU as they are and recorded (docs/decisions/0051), by turns in one process: a JSON line per case.

    python benchmarks/recorded_steps.py MODEL [--batches 1,8] [--threads 2] [--rounds 5] [--steps 12]

MODEL is a folder from `benchmarks/cpu_race/make_model.py`. `value` is how many times as long a step takes when it is
not recorded: the median over the rounds of the ratio of medians. Both engines decode as many sequences of 512 tokens.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from machine import cpu_here
from run_pdinfer import PDInfer

import pdinfer as pd

CONTEXT = 512
WAYS = {"recorded": None, "as they are": ()}


def median_ms(step: Callable[[], None], count: int) -> float:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of each turn")
    args = parser.parse_args()
    engine = PDInfer(args.model, "bfloat16", args.threads)
    for batch in map(int, args.batches.split(",")):
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, sizes in WAYS.items():
                with engine.decode(batch, CONTEXT, pd.EngineConfig(graph_batch_sizes=sizes)) as step:
                    median_ms(step, 3)  # the second is recorded
                    found[way].append(median_ms(step, args.steps))
        ratios = [other / recorded for recorded, other in zip(found["recorded"], found["as they are"], strict=True)]
        line = {
            "bench": "recorded_steps",
            "case": f"decode:{batch}@{CONTEXT}",
            "value": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "unit": "ratio",
            "ms": {way: round(statistics.median(each), 2) for way, each in found.items()},
            "rounds": args.rounds,
            "threads": args.threads,
            "model": Path(args.model).name,
            "cpu": cpu_here(),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
