"""Decode steps of a CPU as they are and recorded (docs/decisions/0051), by turns in one process: a JSON line per case.

    python benchmarks/recorded_steps.py MODEL [--batches 1,8] [--threads 2] [--rounds 5] [--steps 12]

MODEL is a folder from `benchmarks/cpu_race/make_model.py`. `value` is how many times as long a step takes when it is
not recorded: the median over the rounds of the ratio of medians. Both engines decode as many sequences of 512 tokens.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from by_turns import CONTEXT, arguments, compare
from run_pdinfer import PDInfer

import pdinfer as pd


def main() -> None:
    args = arguments(__doc__)
    engine = PDInfer(args.model, "bfloat16", args.threads)
    ways = {
        way: partial(engine.decode, context=CONTEXT, config=pd.EngineConfig(graph_batch_sizes=sizes))
        for way, sizes in (("recorded", None), ("as they are", ()))
    }
    compare("recorded_steps", ways, {("as they are", "recorded"): {}}, args)


if __name__ == "__main__":
    main()
