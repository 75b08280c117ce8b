"""Simulated runs: no wrong token, no leaked page, no hang, exactly one end per request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.run import Summary, run_seeds
from tests.sim.world import World

RUNS = 16
FULL_RUNS = 10_000
"""Within this many runs, everything that can happen must happen."""
PARTS = 8
ROOT = Path(__file__).parents[2]


def together(folder: Path, part: int, summary: Summary) -> Summary | None:
    """Put this part's summary beside the others; return all of them, once they are there."""
    folder.mkdir(exist_ok=True)
    draft = folder / f"{part}.draft"
    draft.write_text(json.dumps(summary.as_json()))
    draft.rename(folder / f"{part}.json")
    files = sorted(folder.glob("*.json"))
    if len(files) < PARTS:
        return None
    total = Summary()
    for file in files:
        total.add(Summary.from_json(json.loads(file.read_text())))
    return total


def hold(runs: range) -> Summary:
    summary = run_seeds(runs)
    assert not summary.bad, "\n".join(f"seed {seed}: {text}" for seed, text in summary.bad)
    return summary


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_holds(part):
    hold(range(part * RUNS // PARTS, (part + 1) * RUNS // PARTS))


@pytest.mark.full(minutes=4)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_holds_and_everything_happens(part, tmp_path_factory, record_property, request):
    summary = hold(range(part * FULL_RUNS // PARTS, (part + 1) * FULL_RUNS // PARTS))
    base = tmp_path_factory.getbasetemp()
    total = together((base.parent if hasattr(request.config, "workerinput") else base) / "runs", part, summary)
    if total is not None:
        record_property("information", total.table())
        assert not total.never, f"never happened: {total.never}"


REPLAYED = (0, 4, 7, 16, 29)


def traces() -> list[str]:
    return [World(seed).run().simulation.trace for seed in REPLAYED]


def test_a_run_replays_bit_for_bit():
    first, second = traces(), traces()
    assert first == second
    assert len(set(first)) == len(REPLAYED)


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_a_run_does_not_depend_on_how_this_process_hashes(hash_seed):
    code = "from tests.sim.test_runs import traces; print(traces())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "src:."},
    )
    assert done.stdout.strip() == str(traces())
