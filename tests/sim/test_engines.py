"""The same worlds with real engines: drafts, ranks, and tokens that equal those of the model in one piece."""

from __future__ import annotations

import pytest

from tests.sim.run import run_engine_seeds

RUNS = 8
FULL_RUNS = 200
PARTS = 4


def hold(runs: range) -> str:
    summary = run_engine_seeds(runs)
    assert not summary.bad, "\n".join(f"seed {seed}: {text}" for seed, text in summary.bad)
    assert summary.tokens > 8 * len(runs)
    assert len(summary.excused) * 10_000 <= summary.tokens, summary.excused
    return f"{summary.runs} simulated runs of real engines: {summary.tokens} tokens"


@pytest.mark.parametrize("part", range(PARTS))
def test_real_engines_say_what_the_model_says(part, record_property):
    record_property("information", hold(range(part * RUNS // PARTS, (part + 1) * RUNS // PARTS)))


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_real_engines_say_what_the_model_says_at_length(part, record_property):
    record_property("information", hold(range(part * FULL_RUNS // PARTS, (part + 1) * FULL_RUNS // PARTS)))
