"""What `make test` runs. What holds a promise runs each time; of whole fleets, simulated runs and simulated devices
nothing else does.

    tests/e2e, tests/sim, tests/device, tests/gpu, tests/unit/planning/simulation
                       the tests that docs/protocol.md, tests/claims.toml or a planted bug names
    everything else    all tests

A test has the marker `full` as well where its path cannot say it: cases that take long among others that do not. Of
some joined cases `make test` runs enough that any two values meet: see `joined.pairs_each_time`. `make test-all` and
`.ci/run` run the rest. Whoever names files or tests to pytest gets all of them but those.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BY_PROMISE = ("tests/e2e/", "tests/sim/", "tests/device/", "tests/gpu/", "tests/unit/planning/simulation/")
NAMED = re.compile(r"\w+\.py::\w+")
PAGES = ("docs/protocol.md", "tests/claims.toml")


@functools.cache
def promised() -> frozenset[str]:
    """Return the files and tests, or classes of tests, that a promise or a planted bug names, without folders."""
    from tests.mutants import all_mutants

    pages = " ".join((ROOT / page).read_text("utf-8") for page in PAGES)
    planted = " ".join(mutant.tests for mutant in all_mutants())
    return frozenset(NAMED.findall(f"{pages} {planted}"))


def is_run_each_time(nodeid: str) -> bool:
    """Return whether `make test` runs a test."""
    return not nodeid.startswith(BY_PROMISE) or not promised().isdisjoint(NAMED.findall(nodeid))
