"""Decode steps of a CPU with weights in bfloat16 and as quantized formats store them, by turns: a JSON line per case.

    python benchmarks/stored_weights.py MODEL [--batches 1,8] [--threads 2] [--rounds 5] [--steps 12]

MODEL is a folder of bfloat16 from `benchmarks/cpu_race/make_model.py`; `pd.quantize_checkpoint` makes the others, in a
temporary folder. `value` is how many times as long a step takes in bfloat16: the median over the rounds of the ratio
of medians. All models are in one process and decode as many sequences of 512 tokens. `ceiling` is the ratio of the
bytes of weights that one token reads: what a step of one sequence would come to if it did nothing else.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from by_turns import CONTEXT, arguments, compare
from run_pdinfer import PDInfer
from safetensors import safe_open

import pdinfer as pd

SCHEMES = {"int8": "w8a8_dynamic", "fp8": "fp8", "int4": "int4", "mxfp4": "mxfp4"}


def bytes_of_a_token(folder: str) -> float:
    """Return the bytes of weights in the files of a model that a token reads, experts in the mean."""
    config, read = json.loads(Path(folder, "config.json").read_text("utf-8")), 0.0
    chosen = config["num_experts_per_tok"] / config["n_routed_experts"]
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                share = chosen if ".experts." in name else "embed_tokens" not in name
                read += share * tensors.get_tensor(name).nbytes
    return read


def main() -> None:
    args = arguments(__doc__)
    engines = {"bfloat16": PDInfer(args.model, "bfloat16", args.threads)}
    ceilings = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, scheme in SCHEMES.items():
            pd.quantize_checkpoint(args.model, f"{folder}/{name}", scheme=scheme)
            ceilings[name] = round(bytes_of_a_token(args.model) / bytes_of_a_token(f"{folder}/{name}"), 2)
            engines[name] = PDInfer(f"{folder}/{name}", "bfloat16", args.threads, weights="stored")
    ways = {name: partial(engine.decode, context=CONTEXT) for name, engine in engines.items()}
    fields = {("bfloat16", name): {"weights": name, "ceiling": ceiling} for name, ceiling in ceilings.items()}
    compare("stored_weights", ways, fields, args)


if __name__ == "__main__":
    main()
