"""Write the newest results of simulated runs into the pages that report them, between `MARKS`:

python -m tests.sim.record
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("docs/features.md", "docs/protocol.md")
MARKS = ("<!-- simulation -->", "<!-- /simulation -->")


def results() -> dict[str, Any]:
    """Return the newest file of results."""
    newest = max((ROOT / "benchmarks" / "results").glob("*-simulation.json"))
    return dict(json.loads(newest.read_text()))


def sentence(results: dict[str, Any]) -> str:
    """Return a sentence: how many runs there were, of which commit, and how many of them were bad."""
    protocol, engines = results["protocol"], results["engines"]
    num_bad = len(protocol["bad"]) + len(engines["bad"])
    return (
        f"{protocol['runs']:,} simulated runs of the protocol and {engines['runs']:,} of real engines, with faults, "
        f"drafts and ranks, at commit `{results['commit'][:7]}`: {num_bad or 'none'} bad; "
        "each commit since ran 300 that none before had"
    )


def told(page: str) -> tuple[str, str, str]:
    """Split a page into the text before its sentence, the sentence, and the text behind; raise ValueError when it has
    no marks."""
    before, rest = (ROOT / page).read_text().split(MARKS[0])
    inside, behind = rest.split(MARKS[1])
    return before, inside, behind


if __name__ == "__main__":
    for page in PAGES:
        before, _, behind = told(page)
        (ROOT / page).write_text(before + MARKS[0] + sentence(results()) + MARKS[1] + behind)
