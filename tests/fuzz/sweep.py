"""Run random cases (cases.py) under what hosts set (tests/hosts.py):

    python -m tests.fuzz.sweep --count 1000                    so many cases under each setting
    python -m tests.fuzz.sweep --kind engines --setting autocast --first 7 --count 1       one again

Prints one JSON line for each setting. The exit status is 1 where a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tests.fuzz.cases import KINDS, run_case
from tests.hosts import SETTINGS
from tests.versions import git

PLAIN = "nothing"
HOSTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {PLAIN: contextlib.nullcontext, **SETTINGS}
SHARES = {"models": 0.2, "engines": 0.25, "ops": 0.35, "steps": 0.2}
"""How many of the cases are of each kind."""


def run_cases(job: tuple[str, str, int, int]) -> tuple[str, str, int, list[str], float]:
    """Run cases of a kind under a setting, from a first one so many -> setting, kind, how many, what failed, seconds of
    CPU."""
    setting, kind, first, count = job
    failed, began = [], time.process_time()
    for number in range(first, first + count):
        try:
            run_case(kind, number, HOSTS[setting])
        except Exception as error:  # noqa: BLE001 - whatever it is, the case is bad
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(f"{kind} {number}: {type(error).__name__}: {error} ({where.name})"[:600])
    return setting, kind, count, failed, time.process_time() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=HOSTS, help="by default all")
    parser.add_argument("--kind", action="append", choices=KINDS, help="by default all")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case of each kind")
    parser.add_argument("--count", type=int, default=1000, help="cases under each setting, of all kinds together")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    kinds = options.kind or list(KINDS)
    whole = sum(SHARES[kind] for kind in kinds)
    commit, failures = git("rev-parse", "HEAD"), 0
    jobs = [
        (setting, kind, options.first, max(1, round(options.count * SHARES[kind] / whole)))
        for setting in options.setting or HOSTS
        for kind in kinds
    ]
    told: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for setting, kind, count, failed, cpu_s in pool.imap(run_cases, jobs):
            line = told.setdefault(
                setting,
                {"bench": "fuzz-cases", "commit": commit, "case": setting, "value": 0, "unit": "cases"}
                | {"cpu_s": 0.0, "kinds": {}, "failed": []},
            )
            line["value"] += count
            line["cpu_s"] = round(line["cpu_s"] + cpu_s, 1)
            line["kinds"][kind] = count
            line["failed"] += failed
            failures += len(failed)
            if len(line["kinds"]) == len(kinds):
                print(json.dumps(line), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
