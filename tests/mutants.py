"""Plant bugs and report whether the tests find them. Each bug is one small edit on which the tests it names must fail.

    python -m tests.mutants [--only WORDS] [--processes 2] [--out FILE]      or: make mutants

The program edits a copy of the sources and runs the tests on it, one mutant after the other. It prints the bugs that no
test found; the exit status is 1 when there are some. The bugs themselves are data in `tests/planted/`, grouped by what
they break.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from tests.planted.mutant import Mutant
from tests.versions import commit

ROOT = Path(__file__).parents[1]
SUBJECTS = tuple(sorted(path.stem for path in (ROOT / "tests" / "planted").glob("*.py") if path.stem != "mutant"))
COPIED = (
    "src",
    "tests",
    "examples",
    "docs",
    "benchmarks",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "Makefile",
    ".ci",
)
LIMIT_S = 300
SEEN, NOT_SEEN, NO_TEST_RAN = "seen", "not seen", "no test ran"
HANGS = "seen: the tests do not end"


@attrs.frozen
class Verdict:
    """The outcome of a mutant: one of the words above, or NO_TEST_RAN with pytest's message."""

    mutant: Mutant
    outcome: str
    seconds: float

    @property
    def is_seen(self) -> bool:
        """Return whether some test failed, or the tests did not end."""
        return self.outcome in (SEEN, HANGS)


def all_mutants() -> list[Mutant]:
    """Return the mutants of every subject."""
    return [mutant for name in SUBJECTS for mutant in importlib.import_module(f"tests.planted.{name}").MUTANTS]


@contextmanager
def planted(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Plant the bug in the sources below `tree` for the duration of the block."""
    path = tree / mutant.path
    text = path.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.path} has its text {text.count(mutant.old)} times, not once")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")


def judge(tree: Path, mutant: Mutant) -> Verdict:
    """Run the mutant's tests on the copy in `tree`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
    if "[" in mutant.tests:  # a case that is named may be left out of `make test`, beside others that are not
        command += ["-m", "full or not full"]
    paths = os.pathsep.join((str(tree / "src"), str(tree)))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    with planted(tree, mutant):
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
            # pytest returns 1 when a test failed and 0 when none did; below 0 the bug killed the process
            outcome = {0: NOT_SEEN, 1: SEEN}.get(process.returncode, SEEN if process.returncode < 0 else NO_TEST_RAN)
            if outcome is NO_TEST_RAN:
                outcome = f"{NO_TEST_RAN}: {said.strip().splitlines()[-1][:200]}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            outcome = HANGS
    return Verdict(mutant, outcome, time.monotonic() - began)


def _judge_all(mutants: Sequence[Mutant]) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="pd-mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        verdicts = []
        for mutant in mutants:
            verdicts.append(judge(tree, mutant))
            print(f"{verdicts[-1].seconds:6.1f} s  {verdicts[-1].outcome:9}  {mutant.name}", flush=True)
        return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name or file has these words")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the result goes as JSON")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in all_mutants() if options.only in f"{mutant.name} {mutant.path}"]
    parts = [part for part in (chosen[at :: options.processes] for at in range(options.processes)) if part]
    with multiprocessing.get_context("spawn").Pool(max(1, len(parts))) as pool:
        verdicts = [verdict for part in pool.imap_unordered(_judge_all, parts) for verdict in part]
    missed = sorted((verdict for verdict in verdicts if not verdict.is_seen), key=lambda verdict: verdict.mutant.name)
    print(f"{len(verdicts)} planted bugs, {len(verdicts) - len(missed)} seen by the tests they name")
    for verdict in missed:
        print(f"{verdict.outcome}: {verdict.mutant.name} ({verdict.mutant.path}; {verdict.mutant.tests})")
    if options.out is not None:
        result = {
            "bench": "mutants",
            "command": "python -m tests.mutants",
            "commit": commit(),
            "planted": len(verdicts),
            "seen": len(verdicts) - len(missed),
            "hang": sum(verdict.outcome == HANGS for verdict in verdicts),
            "missed": [{"name": verdict.mutant.name, "outcome": verdict.outcome} for verdict in missed],
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if missed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
