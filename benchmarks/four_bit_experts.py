"""Experts of a CPU in bfloat16 and in four bits, by turns: a JSON line per format and number of rows.

    python benchmarks/four_bit_experts.py [--rows 1,2,4,8,16,32] [--threads 2] [--rounds 11] [--experts 12]

Each expert, of 3584 x 1024, has so many rows, and all together are larger than any cache. `value` is how many times as
long the gated MLPs of all take in bfloat16, as the provider of this CPU has them: the median over the rounds.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kernels.formats import IN_STRIPS
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import Format, Shape, Weight
from pdinfer.kernels.formats.four_bits import MXFP4, Int4, quantize_int4, quantize_mxfp4
from pdinfer.kernels.formats.weights import assign, expert
from pdinfer.model.destinations import lie_in_strips

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from machine import cpu_here

WIDTH, INNER = 3584, 1024
QUANTIZE = {Int4: quantize_int4, MXFP4: quantize_mxfp4}
CPU = torch.device("cpu")


def stack(kind: type[Format], experts: int, parts: int, rows: int, columns: int, *, in_strips: bool) -> Weight:
    """Return experts of random weights in a format, or in its strips."""
    shape = Shape(experts, parts, rows, columns)
    held = (IN_STRIPS[kind] if in_strips else kind).empty(shape, dtype=torch.bfloat16, device=CPU)
    for index in range(experts):
        floats = torch.randn(parts * rows, columns) * columns**-0.5
        if kind is Plain:
            value: Weight = floats.bfloat16()
        else:
            numbers, scale = QUANTIZE[kind](floats)  # type: ignore[index]
            value = kind(numbers=numbers, scale=scale)  # type: ignore[call-arg]
        assign(expert(held, index), value)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,3,4,6,8,12,16,24,32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--experts", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    resolved = resolve_ops(OpSpec(device="cpu", dtype=torch.bfloat16))
    strips = lie_in_strips(resolved)
    runs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    for kind in (Plain, Int4, MXFP4):
        both = [
            stack(kind, args.experts, parts, rows, columns, in_strips=kind in strips)
            for parts, rows, columns in ((2, INNER, WIDTH), (1, WIDTH, INNER))
        ]
        run = resolved.ops.grouped_mlp.of(both[1])
        runs[kind.name] = functools.partial(lambda run, both, x, counts_E: run(x, counts_E, *both), run, both)
    base = runs.pop(Plain.name)
    for rows in map(int, args.rows.split(",")):
        x = torch.randn(args.experts * rows, WIDTH).bfloat16()
        counts_E = torch.full((args.experts,), rows)

        def seconds(run: Callable[[Tensor, Tensor], Tensor]) -> float:
            started = time.perf_counter()
            run(x, counts_E)  # noqa: B023
            return time.perf_counter() - started

        for name, run in runs.items():
            for each in (base, run):
                seconds(each)
            pairs = [(seconds(base), seconds(run)) for _ in range(args.rounds)]
            ratios = sorted(slow / fast for slow, fast in pairs)
            ms = [round(1e3 * statistics.median(each), 3) for each in zip(*pairs, strict=True)]
            line = {
                "bench": "four_bit_experts",
                "case": f"{rows} rows",
                "weights": name,
                "value": round(statistics.median(ratios), 3),
                "range": [round(ratios[0], 3), round(ratios[-1], 3)],
                "unit": "ratio",
                "ms": dict(zip(("bfloat16", name), ms, strict=True)),
                "experts": args.experts,
                "threads": args.threads,
                "cpu": cpu_here(),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
