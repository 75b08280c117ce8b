"""Rounds of requests and faults over one transport, and their results."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pdinfer as pd
from tests.e2e.setups import model_of
from tests.soak.book import Book
from tests.soak.fleet import Broken, Fleet
from tests.soak.measure import Usage, growth, leaks, usage
from tests.soak.timetable import ROUND_S, Case, case, family_of, is_slow, timetable
from tests.soak.timetable import restarts as timetable_of_restarts
from tests.versions import commit

TELL_S = 30.0
NUM_UNFINISHED = 10
"""The number of requests that are under way at once."""
QUIET_S = 90.0
"""The seconds after the last fault within which everything has come to rest: more than any silence, redial or deadline
in play, on a machine that has other work to do."""
SETTLE_S = 1.0
"""The seconds of rest before a measurement."""


class Run:
    """One soak: its seed, its counts over all of its parts, and where it reports."""

    def __init__(self, seed: int, folder: Path, out: Path | None, *, restarts: bool = False) -> None:
        self.seed, self.folder, self.out = seed, folder, out
        self.timetable = timetable_of_restarts if restarts else timetable
        self.longest_wait_s = 0.0
        self.stdout = sys.stdout  # others borrow it to print lines that are not ours
        self.began_at = self.told_at = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.broken: list[str] = []
        self.host: dict[str, list[Usage]] = {}
        self.growth: dict[str, dict[str, float]] = {}
        self.longest_quiet_s = 0.0
        self.models: dict[str, str] = {}

    def tell(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, file=self.stdout, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(text + "\n")

    def progress(self, part: str, book: Book, faults: Counter[str]) -> None:
        if time.monotonic() < self.told_at + TELL_S:
            return
        self.told_at = time.monotonic()
        self.tell(
            {
                "bench": "soak",
                "case": "progress",
                "part": part,
                "at_s": round(self.told_at - self.began_at),
                "ends": dict(book.ends),
                "faults": dict(faults),
                "broken": len(self.broken) + len(book.broken),
            }
        )

    def measure(self, name: str, apart: Path | None = None) -> None:
        """Measure the host, and temporary files outside the folders of engines."""
        gc.collect()
        self.host.setdefault(name, []).append(usage(os.getpid(), self.folder, apart))

    def compare(self, name: str, series: list[Usage]) -> None:
        """Check whether the use of a process stayed flat."""
        self.growth[name] = {"samples": len(series), **growth(series)}
        self.broken += [f"leaks: {name}: {leak}" for leak in leaks(series)]

    def add(self, part: str, book: Book, faults: Counter[str]) -> None:
        self.counts += book.counts
        self.ends += book.ends
        self.failures += book.failures
        self.longest_wait_s = max(self.longest_wait_s, book.longest_s)
        self.faults += faults
        self.broken += [f"{part}: {sentence}" for sentence in book.broken]
        self.tell(
            {"bench": "soak", "case": part, "counts": book.counts, "failures": book.failures, "broken": self.broken}
        )

    def finish(self) -> int:
        """Print the result and return the exit status."""
        for name, series in self.host.items():
            self.compare(name, series)
        if self.counts["near_ties"] * 10_000 > max(self.counts["tokens"], 10_000):
            self.broken.append(f"near_ties: {self.counts['near_ties']} of {self.counts['tokens']} tokens")
        self.tell(
            {
                "bench": "soak",
                "case": "result",
                "seed": self.seed,
                "commit": commit(),
                "models": self.models,
                "minutes": round((time.monotonic() - self.began_at) / 60, 2),
                "faults": dict(sorted(self.faults.items())),
                "counts": dict(self.counts),
                "ends": dict(self.ends),
                "failures": dict(self.failures),
                "wrong_tokens": self.counts["wrong_tokens"],
                "longest_quiet_s": round(self.longest_quiet_s, 1),
                "longest_wait_s": round(self.longest_wait_s, 1),
                "growth": self.growth,
                "broken": self.broken,
                "value": len(self.broken),
                "unit": "broken promises",
            }
        )
        return 1 if self.broken else 0


def soak_transport(run: Run, part: str, end: float) -> None:
    """Run rounds until `end`; replace a fleet that breaks a promise with a new one."""
    family = run.models[part] = family_of(run.seed, part)
    book = Book(model_of(family, run.seed))
    rounds, cases = itertools.count(), (case(run.seed, part, number) for number in itertools.count())
    faults: Counter[str] = Counter()
    while time.monotonic() < end:
        fleet = Fleet(part, family=family, seed=run.seed)
        series: dict[str, list[Usage]] = {}
        try:
            while time.monotonic() < end:
                number = next(rounds)
                play(run, fleet, book, part, number, cases)
                quiet(run, fleet, book, part, number)
                run.measure("host", fleet.folder)
                for index, seat in enumerate(fleet.seats):
                    name = f"{part}/{seat.role}{index}/{seat.worker.process.pid}"
                    series.setdefault(name, []).append(usage(seat.worker.process.pid, seat.folder))
        except Broken as error:
            book.say("not_quiet", str(error))
        finally:
            for told in fleet.close():
                book.say("not_whole", told)
            book.heard(fleet.pairing.step())
            for request_id in list(book.open):
                book.say("no_end", f"{request_id} was never ended")
                del book.open[request_id]
            faults += fleet.struck
        for name, one in series.items():
            if len(one) > 1:
                run.compare(name, one)
    run.add(part, book, faults)


def play(run: Run, fleet: Fleet, book: Book, part: str, number: int, cases: Any) -> None:
    """Play one round: its faults, and as many requests as are wanted meanwhile."""
    faults = list(run.timetable(run.seed, part, number))
    if is_slow(run.seed, part, number):
        fleet.slow.touch()
    else:
        fleet.slow.unlink(missing_ok=True)
    began = time.monotonic()
    cancels: list[tuple[float, str]] = []
    while time.monotonic() < began + ROUND_S:
        while faults and faults[0].at_s <= time.monotonic() - began:
            fleet.strike(faults.pop(0))
        fleet.advance()
        if fleet.pairing.num_unfinished < NUM_UNFINISHED:
            submit(fleet.pairing, book, next(cases), cancels)
        for at, request_id in [due for due in cancels if due[0] <= time.monotonic()]:
            book.counts["cancels"] += 1
            fleet.pairing.cancel(request_id)
            cancels.remove((at, request_id))
        before = time.monotonic()
        step(fleet.pairing, book)
        book.passed(time.monotonic() - before, fleet.settled_s())
        run.progress(part, book, fleet.struck)
    for fault in faults:  # the host was stopped when they were due
        fleet.strike(fault)


def submit(pairing: pd.Pairing, book: Book, one: Case, cancels: list[tuple[float, str]]) -> None:
    try:
        request_id = pairing.submit(one.request)
    except pd.Overloaded:
        book.counts["overloaded"] += 1
        return
    book.submitted(one)
    if one.cancel_after_s is not None:
        cancels.append((time.monotonic() + one.cancel_after_s, request_id))


def step(pairing: pd.Pairing, book: Book) -> None:
    book.heard(pairing.step())
    pairing.wait(0.02)


def quiet(run: Run, fleet: Fleet, book: Book, part: str, number: int) -> None:
    """Undo all faults and wait until nothing is left of any request; raise Broken when that takes too long."""
    fleet.undo()
    fleet.slow.unlink(missing_ok=True)
    began = time.monotonic()
    restful_at = began
    while time.monotonic() < restful_at + SETTLE_S:
        step(fleet.pairing, book)
        run.progress(part, book, fleet.struck)
        fleet.advance()
        told = "a process is being replaced" if fleet.is_restless else fleet.disquiet()
        if fleet.errors:
            raise Broken(f"round {number}: {fleet.errors.pop()}")
        if told:
            restful_at = time.monotonic()
        if time.monotonic() > began + QUIET_S:
            raise Broken(f"round {number} did not come to rest within {QUIET_S:g} s: {told}")
    for request_id in list(book.open):
        book.say("no_end", f"{request_id}: the pairing has no such request any more, and never said so")
        del book.open[request_id]
    book.counts["quiet_moments"] += 1
    run.longest_quiet_s = max(run.longest_quiet_s, time.monotonic() - began)
