"""Decode steps of several ways to run a model, by turns in one process: what comparisons of pdinfer with itself share.

`ms` are medians over the rounds of the medians of turns. The context of every sequence is 512 tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from machine import cpu_here

CONTEXT = 512

Decode = Callable[[int], AbstractContextManager[Callable[[], None]]]
"""Takes a number of sequences, and gives what runs a step of them."""


def arguments(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of each turn")
    return parser.parse_args()


def median_ms(step: Callable[[], None], count: int) -> float:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def compare(
    bench: str,
    ways: Mapping[str, Decode],
    fields: Mapping[tuple[str, str], Mapping[str, object]],
    args: argparse.Namespace,
) -> None:
    """Print a line with these fields for each pair of ways: how many times as long the first takes as the second."""
    for batch in map(int, args.batches.split(",")):
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, decode in ways.items():
                with decode(batch) as step:
                    median_ms(step, 3)  # the second is recorded
                    found[way].append(median_ms(step, args.steps))
        for pair, more in fields.items():
            ratios = [slow / fast for slow, fast in zip(*(found[way] for way in pair), strict=True)]
            line = {
                "bench": bench,
                "case": f"decode:{batch}@{CONTEXT}",
                **more,
                "value": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "unit": "ratio",
                "ms": {way: round(statistics.median(found[way]), 2) for way in pair},
                "rounds": args.rounds,
                "threads": args.threads,
                "model": Path(args.model).name,
                "cpu": cpu_here(),
            }
            print(json.dumps(line), flush=True)
