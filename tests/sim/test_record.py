"""The pages report simulated runs as their results do."""

from __future__ import annotations

import subprocess

import pytest

from tests.sim.record import PAGES, ROOT, results, sentence, told


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_the_results_say(page: str) -> None:
    _, said, _ = told(page)
    assert said == sentence(results()), "python -m tests.sim.record writes it"


def test_results_are_of_a_commit_of_this_history_and_say_all() -> None:
    found = results()
    assert found["clean"]
    assert found["protocol"]["runs"] >= 100_000
    assert found["engines"]["runs"] >= 2_000
    assert found["never"] == []
    history = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if history.stdout.strip() == "false":  # else there is no history to look into
        subprocess.run(["git", "merge-base", "--is-ancestor", found["commit"], "HEAD"], cwd=ROOT, check=True)
