"""Decode steps of a CPU with weights in bfloat16 and as INT8 or FP8 stores them, by turns: a JSON line per case.

    python benchmarks/stored_weights.py MODEL [--batches 1,8] [--threads 2] [--rounds 5] [--steps 12]

MODEL is a folder of bfloat16 from `benchmarks/cpu_race/make_model.py`; `pd.quantize_checkpoint` makes the others, in a
temporary folder. `value` is how many times as long a step takes in bfloat16: the median over the rounds of the ratio
of medians. All models are in one process and decode as many sequences of 512 tokens.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from by_turns import CONTEXT, arguments, compare
from run_pdinfer import PDInfer

import pdinfer as pd

SCHEMES = {"int8": "w8a8_dynamic", "fp8": "fp8"}


def main() -> None:
    args = arguments(__doc__)
    engines = {"bfloat16": PDInfer(args.model, "bfloat16", args.threads)}
    with tempfile.TemporaryDirectory() as folder:
        for name, scheme in SCHEMES.items():
            pd.quantize_checkpoint(args.model, f"{folder}/{name}", scheme=scheme)
            engines[name] = PDInfer(f"{folder}/{name}", "bfloat16", args.threads, weights="stored")
    ways = {name: partial(engine.decode, context=CONTEXT) for name, engine in engines.items()}
    compare("stored_weights", ways, {("bfloat16", name): {"weights": name} for name in SCHEMES}, args)


if __name__ == "__main__":
    main()
