"""Run simulations of the protocol and of real engines, over several processes; an interrupted set is resumed:

    python -m tests.sim.run --count 100000 --engines 2000 --processes 2 --progress progress.jsonl --out results.json

Prints the results as JSON, or with --quiet what was bad. The exit status is 1 when a run was bad, or when an expected
event never happened in ENOUGH runs of the protocol. A file of results names its commit, so there must be no uncommitted
changes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from tests.sim.plan import DELAYS, FRAME_FAULTS, Focus
from tests.sim.reach import missing
from tests.sim.real import FOCUS, ModelBrain
from tests.sim.world import Brain, World
from tests.versions import git

CHUNKS = {"protocol": 250, "engines": 50}
"""The kinds of runs, and how many of each a process does before it reports."""
COLLECT_EVERY = 50
ENOUGH = 10_000
"""Of so many runs every event of HAPPENS happens in some."""
HAPPENS = (
    *DELAYS,
    *FRAME_FAULTS,
    *("flip_payload", "late_landing", "cut", "partition", "freeze", "crash", "restart", "stall", "cancel"),
    *("ranks", "rank lost", "moved", "continued", "displaced", "port is back"),
    *("end stop", "end length", "end cancelled", "end deadline", "end failed"),
)
"""The events that must happen in every large set of runs."""


@attrs.define
class Summary:
    """The result of a set of runs. `bad` holds (seed, what went wrong); `happened` counts faults and ends of requests,
    `reached` counts pairs of states. For real engines, `tokens` were compared, and `excused` are requests with a near
    tie."""

    runs: int = 0
    bad: list[tuple[int, str]] = attrs.field(factory=list)
    happened: Counter[str] = attrs.field(factory=Counter)
    reached: Counter[str] = attrs.field(factory=Counter)
    requests: int = 0
    events: int = 0
    tokens: int = 0
    excused: list[str] = attrs.field(factory=list)
    virtual_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, other: Summary) -> None:
        self.runs += other.runs
        self.bad += other.bad
        self.happened += other.happened
        self.reached += other.reached
        self.requests += other.requests
        self.events += other.events
        self.tokens += other.tokens
        self.excused += other.excused
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s

    @property
    def never(self) -> list[str]:
        """Return the events that did not happen and the pairs that were not reached."""
        return [name for name in HAPPENS if not self.happened[name]] + missing(self.reached)

    def table(self) -> str:
        """Return everything counted, one line each."""
        lines = [
            (
                f"{self.runs} simulated runs, {len(self.bad)} bad: {self.requests} requests, {self.events} events, "
                f"{self.virtual_s / 3600:.1f} virtual hours, {1e3 * self.cpu_s / max(1, self.runs):.0f} ms each"
            )
        ]
        counted = [*sorted(self.happened.items()), *sorted(self.reached.items())]
        return "\n".join(lines + [f"{count:10}  {name}" for name, count in counted])

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return {
            **attrs.asdict(self),
            "happened": dict(sorted(self.happened.items())),
            "reached": dict(sorted(self.reached.items())),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Summary:
        """Make a summary of what `as_json` returned."""
        counters = {name: Counter(data[name]) for name in ("happened", "reached")}
        return cls(**{**data, **counters, "bad": [(seed, text) for seed, text in data["bad"]]})


def run_engine_seeds(seeds: Iterable[int]) -> Summary:
    brain = ModelBrain()
    summary = run_seeds(seeds, FOCUS, brain)
    summary.tokens, summary.excused = brain.num_tokens, brain.excused
    return summary


def run_seeds(seeds: Iterable[int], focus: Focus | None = None, brain: Brain | None = None) -> Summary:
    """Run each seed; a run that raises is bad and does not stop the others."""
    summary = Summary()
    started = time.process_time()
    enabled = gc.isenabled()
    gc.disable()  # engines are cyclic; collecting them at fixed points is quicker, and the same in every replay
    try:
        for number, seed in enumerate(seeds):
            world = World(seed, focus, brain)
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


def _run_chunk(chunk: tuple[str, int, float]) -> tuple[str, int, Summary]:
    kind, first, deadline = chunk
    run = run_engine_seeds if kind == "engines" else run_seeds
    seeds = range(first, first + CHUNKS[kind])
    return kind, first, run(itertools.takewhile(lambda _: time.time() < deadline, seeds))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed of both kinds")
    parser.add_argument("--count", type=int, default=10_000, help="runs of the protocol")
    parser.add_argument("--engines", type=int, default=0, help="runs of real engines")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="begin no run after so many; the number of runs tells")
    parser.add_argument("--progress", type=Path, help="a file that remembers what is done; a second call goes on")
    parser.add_argument("--quiet", action="store_true", help="print what was bad instead of all results")
    parser.add_argument("--out", type=Path, help="where the results go as JSON, beside standard output")
    options = parser.parse_args(arguments)
    wanted = {"protocol": options.count, "engines": options.engines}
    if any(wanted[kind] % CHUNKS[kind] for kind in CHUNKS):
        parser.error(f"runs come in multiples of {CHUNKS}")
    if options.progress is not None and options.minutes is not None:
        parser.error("--progress remembers whole sets of runs, and --minutes would cut them: give one of the two")
    deadline = math.inf if options.minutes is None else time.time() + 60 * options.minutes
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    if options.out is not None and changes:
        parser.error(f"results name the commit they are of, and this is not committed:\n{changes}")
    totals = {kind: Summary() for kind in CHUNKS}
    done = set()
    if options.progress is not None and options.progress.exists():
        for record in map(json.loads, options.progress.read_text().splitlines()):
            if record["commit"] != commit:
                parser.error(f"{options.progress} holds runs of commit {record['commit']}")
            done.add((record["kind"], record["first"]))
            totals[record["kind"]].add(Summary.from_json(record["summary"]))
    chunks = [
        (kind, first, deadline)
        for kind in CHUNKS
        for first in range(options.first, options.first + wanted[kind], CHUNKS[kind])
        if (kind, first) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for kind, first, summary in pool.imap_unordered(_run_chunk, chunks):
            totals[kind].add(summary)
            if options.progress is not None:
                record = {"commit": commit, "kind": kind, "first": first, "summary": summary.as_json()}
                with options.progress.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            told = ", ".join(f"{total.runs} of {kind} ({len(total.bad)} bad)" for kind, total in totals.items())
            print(told, file=sys.stderr, flush=True)
    results = {
        "bench": "simulation",
        "commit": commit,
        "clean": not changes,
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "tests.sim.run", *(sys.argv[1:] if arguments is None else arguments)]),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "first_seed": options.first,
        "never": totals["protocol"].never,
        **{kind: total.as_json() for kind, total in totals.items()},
    }
    text = json.dumps(results, indent=1)
    print("\n".join(told_of(totals)) if options.quiet else text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    never = results["never"] if options.count >= ENOUGH else []
    return 1 if any(total.bad for total in totals.values()) or never else 0


def told_of(totals: Mapping[str, Summary]) -> Iterator[str]:
    """Yield a line for each kind of runs, and one for each that was bad."""
    for kind, total in totals.items():
        yield f"{total.runs} runs of {kind}: {len(total.bad) or 'none'} bad"
        yield from (f"  seed {seed}: {error}" for seed, error in total.bad)


if __name__ == "__main__":
    sys.exit(main())
