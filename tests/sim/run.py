"""Simulated runs by ranges of seeds, over several processes, taken up again where they were left:

    python -m tests.sim.run --first 0 --count 100000 --processes 2 --progress progress.jsonl --out summary.json

Prints the summary as JSON; the exit status is 1 when a run was bad or something was never reached.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.sim.plan import DELAYS, FRAME_FAULTS, Focus
from tests.sim.reach import missing
from tests.sim.world import World

CHUNK = 250
COLLECT_EVERY = 50
HAPPENS = (
    *DELAYS,
    *FRAME_FAULTS,
    *("flip_payload", "late_landing", "cut", "partition", "freeze", "crash", "restart", "stall", "cancel"),
    *("end stop", "end length", "end cancelled", "end deadline", "end failed"),
)
"""What must have happened in every set of runs."""


@attrs.define
class Summary:
    """What a set of runs came to. `bad` holds (seed, what went wrong); `happened` counts faults and ends of requests,
    `reached` pairs of states."""

    runs: int = 0
    bad: list[tuple[int, str]] = attrs.field(factory=list)
    happened: Counter[str] = attrs.field(factory=Counter)
    reached: Counter[str] = attrs.field(factory=Counter)
    requests: int = 0
    events: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, other: Summary) -> None:
        """Adds the runs of another set."""
        self.runs += other.runs
        self.bad += other.bad
        self.happened += other.happened
        self.reached += other.reached
        self.requests += other.requests
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s

    @property
    def never(self) -> list[str]:
        """What did not happen and was not reached."""
        return [name for name in HAPPENS if not self.happened[name]] + missing(self.reached)

    def table(self) -> str:
        """Everything counted, one line each."""
        lines = [
            (
                f"{self.runs} simulated runs, {len(self.bad)} bad: {self.requests} requests, {self.events} events, "
                f"{self.virtual_s / 3600:.1f} virtual hours, {1e3 * self.cpu_s / max(1, self.runs):.0f} ms each"
            )
        ]
        counted = [*sorted(self.happened.items()), *sorted(self.reached.items())]
        return "\n".join(lines + [f"{count:10}  {name}" for name, count in counted])

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            **attrs.asdict(self),
            "happened": dict(sorted(self.happened.items())),
            "reached": dict(sorted(self.reached.items())),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Summary:
        """The inverse."""
        counters = {name: Counter(data[name]) for name in ("happened", "reached")}
        return cls(**{**data, **counters, "bad": [(seed, text) for seed, text in data["bad"]]})


def run_seeds(seeds: Iterable[int], focus: Focus | None = None) -> Summary:
    """Runs each seed; what a run raises makes it bad and stops no other."""
    summary = Summary()
    started = time.process_time()
    enabled = gc.isenabled()
    gc.disable()  # engines are cyclic; collecting them at fixed points is quicker, and the same in every replay
    try:
        for number, seed in enumerate(seeds):
            world = World(seed, focus)
            try:
                world.run()
            except Exception as error:  # noqa: BLE001 - whatever it is, the seed is bad
                summary.bad.append((seed, f"{type(error).__name__}: {error}"[:1000]))
            summary.runs += 1
            summary.happened += world.counts + world.network.fired
            summary.reached += world.reached
            summary.requests += len(world.streams)
            summary.events += world.simulation.num_events
            summary.virtual_s += world.simulation.clock.now_s
            if number % COLLECT_EVERY == 0:
                gc.collect()
    finally:
        if enabled:
            gc.enable()
    summary.cpu_s = time.process_time() - started
    return summary


def _run_chunk(first: int) -> tuple[int, Summary]:
    return first, run_seeds(range(first, first + CHUNK))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--progress", type=Path, help="a file that remembers what is done; a second call goes on")
    parser.add_argument("--out", type=Path, help="where the summary goes as JSON, beside standard output")
    options = parser.parse_args(arguments)
    if options.count % CHUNK:
        parser.error(f"--count must be a multiple of {CHUNK}")
    total, done = Summary(), set()
    if options.progress is not None and options.progress.exists():
        for line in options.progress.read_text().splitlines():
            record = json.loads(line)
            done.add(record["first"])
            total.add(Summary.from_json(record["summary"]))
    firsts = [first for first in range(options.first, options.first + options.count, CHUNK) if first not in done]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for first, summary in pool.imap_unordered(_run_chunk, firsts):
            total.add(summary)
            if options.progress is not None:
                with options.progress.open("a") as file:
                    file.write(json.dumps({"first": first, "summary": summary.as_json()}) + "\n")
            print(f"{total.runs} runs, {len(total.bad)} bad", file=sys.stderr, flush=True)
    text = json.dumps(
        {
            "bench": "simulation",
            "first_seed": options.first,
            "python": platform.python_version(),
            "machine": platform.machine(),
            **total.as_json(),
            "never": total.never,
        },
        indent=1,
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 1 if total.bad or total.never else 0


if __name__ == "__main__":
    sys.exit(main())
