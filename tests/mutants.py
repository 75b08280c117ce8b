"""Plant bugs and report whether the tests find them. Each bug is one small edit on which the tests it names must fail.

    python -m tests.mutants [--unjudged] [--only WORDS] [--touched COMMIT] [--random N --seed S] [--processes 2]
                            [--verdicts FILE] [--out FILE]                                    or: make mutants

The program edits copies of the sources and runs the tests on them. A verdict is written as soon as it is there, so a
run that was cut off goes on where it ended: what was judged at this commit is not judged again, and with `--unjudged`
neither is what was judged at any other. It prints the bugs that no test found; the exit status is 1 when there are
some. The bugs are in `tests/planted/`, grouped by what they break; `tests/planted/mutant.py` says how they are written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from tests.places import file_of, place
from tests.planted.mutant import Mutant, parsed
from tests.versions import commit, git

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLANTED = ROOT / "tests" / "planted"
COPIED = (
    "src",
    "tests",
    "examples",
    "docs",
    "benchmarks",
    "README.md",
    "CHANGELOG.md",
    "changes",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "pyproject.toml",
    "Makefile",
    ".ci",
)
LIMIT_S = 600
"""More than the tests of a mutant take beside much other work: a busy machine does not make them hang."""
FAR_S = 60
"""The same for a single thing that a test waits for, as many wait for what a bug keeps from happening."""
SEEN, HANGS, NOT_SEEN, NO_TEST_RAN = "seen", "hangs", "not seen", "no test ran"
FOUND = (SEEN, HANGS)


@attrs.frozen
class Verdict:
    """The outcome of a mutant at a commit: one of the words above, or NO_TEST_RAN with pytest's message. `seconds` is
    None where an older record does not say it."""

    name: str
    digest: str
    commit: str
    outcome: str
    seconds: float | None


def all_mutants() -> list[Mutant]:
    return [mutant for path in sorted(PLANTED.glob("*.txt")) for mutant in parsed(path.read_text("utf-8"))]


def read(path: Path) -> list[Verdict]:
    """Return the verdicts in the file, none where there is no file."""
    return [Verdict(**json.loads(line)) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def recorded() -> Path:
    """Return the newest file of verdicts that was committed."""
    return max(RESULTS.glob("*-mutants.jsonl"))


class Trial:
    """The tests of a mutant, running on the copy in `tree`, in which its bug is planted until `end`."""

    def __init__(self, tree: Path, mutant: Mutant) -> None:
        self.tree, self.mutant = tree, mutant
        self._path = tree / place(ROOT, mutant)
        self._text = self._path.read_text("utf-8")
        self._path.write_text(self._text.replace(mutant.old, mutant.new), "utf-8")
        self._said = tree.with_suffix(".txt")
        self._began = time.monotonic()
        paths = os.pathsep.join((str(tree / "src"), str(tree)))
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                pytest_command(mutant),
                cwd=tree,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self) -> tuple[str, float] | None:
        """Return the outcome and the seconds it took, once it is there."""
        code, seconds = self._process.poll(), time.monotonic() - self._began
        if code is None and seconds < LIMIT_S:
            return None
        return HANGS if code is None else outcome_of(code, self._said.read_text(errors="replace")), round(seconds, 1)

    def end(self) -> None:
        """Take the bug out, and end what still runs."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # tests that were killed leave processes of their own
        except ProcessLookupError:
            pass
        self._process.wait()
        self._path.write_text(self._text, "utf-8")


def pytest_command(mutant: Mutant) -> list[str]:
    paths = [f"{file_of(ROOT, named)}{named[named.index('.py') + 3 :]}" for named in mutant.tests.split()]
    limits = [f"--longest={LIMIT_S}", f"--far={FAR_S}"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *limits, *paths]
    # a case that is named may be left out of `make test`, beside others that are not
    return [*command, "-m", "full or not full"] if "[" in mutant.tests else command


def outcome_of(code: int, said: str) -> str:
    """Return what pytest's exit status says: 1 when a test failed, 0 when none did, which is also so where all were
    skipped; below 0 the bug killed it."""
    last = (said.strip().splitlines() or [f"exit status {code}"])[-1][:200]
    if code == 1 or code < 0:
        return SEEN
    return NOT_SEEN if code == 0 and " passed" in last else f"{NO_TEST_RAN}: {last}"


def copied(folder: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def judge(mutants: Iterable[Mutant], num_processes: int) -> Iterator[Verdict]:
    """Yield the verdicts as they come."""
    waiting, running, now = deque(mutants), list[Trial](), commit()
    with tempfile.TemporaryDirectory(prefix="pd-mutants-") as folder:
        trees = [copied(Path(folder, str(n))) for n in range(min(num_processes, len(waiting)))]
        try:
            while waiting or running:
                while waiting and trees:
                    running.append(Trial(trees.pop(), waiting.popleft()))
                time.sleep(0.05)
                for trial in list(running):
                    if (found := trial.look()) is not None:
                        trial.end()
                        running.remove(trial)
                        trees.append(trial.tree)
                        yield Verdict(trial.mutant.name, trial.mutant.digest, now, *found)
        finally:
            for trial in running:
                trial.end()


def touches(mutant: Mutant, changed: set[str]) -> bool:
    """Return whether the mutant's text or a test that it names is in one of the files that changed."""
    return not changed.isdisjoint({place(ROOT, mutant), *(file_of(ROOT, named) for named in mutant.tests.split())})


def chosen(options: argparse.Namespace, verdicts: Sequence[Verdict]) -> list[Mutant]:
    """Return the mutants that the command line asks for, without those that have their verdict."""
    found = [mutant for mutant in all_mutants() if options.only in f"{mutant.name} {place(ROOT, mutant)}"]
    if options.touched is not None:
        changed = set(git("diff", "--name-only", "--no-renames", options.touched).splitlines())
        found = [mutant for mutant in found if touches(mutant, changed)]
    if options.random is not None:
        found = random.Random(options.seed).sample(found, min(options.random, len(found)))
    now = commit()  # with changes it is no commit, and another time the changes are others
    judged = {verdict.digest for verdict in verdicts if options.unjudged or (verdict.commit == now and "+" not in now)}
    return [mutant for mutant in found if mutant.digest not in judged]


def write(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the last verdict on each of the mutants that are there, in the order of their names."""
    last = {verdict.digest: verdict for verdict in verdicts}
    there = sorted((mutant.name, mutant.digest) for mutant in all_mutants() if mutant.digest in last)
    lines = [attrs.evolve(last[digest], name=name) for name, digest in there]
    path.write_text("".join(json.dumps(attrs.asdict(line)) + "\n" for line in lines), "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unjudged", action="store_true", help="only mutants that were judged at no commit")
    parser.add_argument("--only", default="", help="mutants whose name or file has these words")
    parser.add_argument("--touched", metavar="COMMIT", help="mutants whose file or tests changed since this commit")
    parser.add_argument("--random", type=int, metavar="N", help="so many of them; with 0, --out writes what is known")
    parser.add_argument("--seed", type=int, default=1, help="which of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--verdicts", type=Path, default=ROOT / "build" / "mutants.jsonl", help="where verdicts go as they come"
    )
    parser.add_argument("--out", type=Path, help="where the last verdict on each mutant goes in the end")
    options = parser.parse_args(arguments)
    before = [*read(recorded()), *read(options.verdicts)]
    mutants = chosen(options, before)
    by_digest = {mutant.digest: mutant for mutant in mutants}
    options.verdicts.parent.mkdir(exist_ok=True)
    verdicts = []
    with options.verdicts.open("a", encoding="utf-8") as file:
        for verdict in judge(mutants, options.processes):
            verdicts.append(verdict)
            print(json.dumps(attrs.asdict(verdict)), file=file, flush=True)
            print(f"{verdict.seconds:6.1f} s  {verdict.outcome:9}  {verdict.name}", flush=True)
    missed = [verdict for verdict in verdicts if verdict.outcome not in FOUND]
    print(f"{len(verdicts)} planted bugs, {len(verdicts) - len(missed)} seen by the tests they name")
    for verdict in sorted((verdict for verdict in verdicts if verdict.outcome != SEEN), key=lambda each: each.name):
        mutant = by_digest[verdict.digest]
        print(f"{verdict.outcome}: {verdict.name} ({place(ROOT, mutant)}; {mutant.tests})")
    if options.out is not None:
        write(options.out, [*before, *verdicts])
    return 1 if missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended: the same command goes on from here"))
    sys.exit(main())
