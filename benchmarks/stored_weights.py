"""Decode steps of a CPU with weights in bfloat16 and as INT8 or FP8 stores them, by turns: a JSON line per case.

    python benchmarks/stored_weights.py MODEL [--batches 1,8] [--threads 2] [--rounds 5] [--steps 12]

MODEL is a folder of bfloat16 from `benchmarks/cpu_race/make_model.py`; `pd.quantize_checkpoint` makes the others, in a
temporary folder. `value` is how many times as long a step takes in bfloat16: the median over the rounds of the ratio
of medians. All models are in one process and decode as many sequences of 512 tokens.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from machine import cpu_here
from recorded_steps import CONTEXT, median_ms
from run_pdinfer import PDInfer

import pdinfer as pd

SCHEMES = {"int8": "w8a8_dynamic", "fp8": "fp8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of each turn")
    args = parser.parse_args()
    engines = {"bfloat16": PDInfer(args.model, "bfloat16", args.threads)}
    with tempfile.TemporaryDirectory() as folder:
        for name, scheme in SCHEMES.items():
            pd.quantize_checkpoint(args.model, f"{folder}/{name}", scheme=scheme)
            engines[name] = PDInfer(f"{folder}/{name}", "bfloat16", args.threads, weights="stored")
    for batch in map(int, args.batches.split(",")):
        found: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds):
            for name, engine in engines.items():
                with engine.decode(batch, CONTEXT) as step:
                    median_ms(step, 3)  # the second is recorded
                    found[name].append(median_ms(step, args.steps))
        for name in SCHEMES:
            ratios = [floats / stored for floats, stored in zip(found["bfloat16"], found[name], strict=True)]
            line = {
                "bench": "stored_weights",
                "case": f"decode:{batch}@{CONTEXT}",
                "weights": name,
                "value": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "unit": "ratio",
                "ms": {each: round(statistics.median(found[each]), 2) for each in ("bfloat16", name)},
                "rounds": args.rounds,
                "threads": args.threads,
                "model": Path(args.model).name,
                "cpu": cpu_here(),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
