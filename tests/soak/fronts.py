"""Two front ends over three prefills and three decodes in processes of their own, one of which dies all the time.

    python -m tests.soak.fronts --minutes 10 --seed 1 --out FILE

Engines and front ends find each other in one folder, and both front ends submit the same requests by the same names.
Every EVERY_S seconds the seed chooses what happens. An engine is killed, drained or frozen for a while, or one front
end or both are killed; others take their places at once. Or the folder is emptied, and what was in it is put back a
while later or never. No engine is struck while fewer than two of its role are announced, so a request that
fails is a broken promise, as is one without its final event, a wrong token, or a page that an engine still holds in the
end. Prints a JSON line; the exit status is 1 when a promise did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import pdinfer as pd
from pdinfer.remote.directory import Directory, Folder
from tests.backends import ROOT, child_environment
from tests.forks import FAR_S
from tests.soak.book import Book, not_whole
from tests.soak.timetable import case
from tests.versions import commit

ROLES = ("prefill",) * 3 + ("decode",) * 3
NUM_FRONTS = 2
EVERY_S = 15.0
KINDS = ("kill", "drain", "freeze", "front", "fronts", "empty", "stale")
FREEZE_S = 4.0
"""Longer than the silence that counts as death."""
STALE_S = 5.0
"""Longer than announcements are believed without a refresh."""
NUM_UNFINISHED = 6
"""The number of requests that each front end has under way at once."""
TELL_S = 0.5
TTL_S = 2.0
"""That of `tests.e2e.announced`."""


# -- a front end ----------------------------------------------------------------------------------------------------


@attrs.define
class Counts:
    """What a front end has seen so far: the last line of one that is killed."""

    counts: Counter[str] = attrs.field(factory=Counter)
    ends: Counter[str] = attrs.field(factory=Counter)
    broken: list[str] = attrs.field(factory=list)
    longest_gap_s: float = 0.0
    ports_lost: int = 0
    moved: int = 0

    def add(self, line: dict[str, Any]) -> None:
        self.counts.update(line["counts"])
        self.ends.update(line["ends"])
        self.broken += line["broken"]
        self.longest_gap_s = max(self.longest_gap_s, line["longest_gap_s"])
        self.ports_lost += line["ports_lost"]
        self.moved += line["moved"]


def be_front(folder: str, seed: int) -> None:
    """Submit requests until a SIGTERM, and print all that was seen so far again and again."""
    key = bytes.fromhex(sys.stdin.readline())
    torch.set_num_threads(1)
    ends: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
    book = Book(pd.load_model(ROOT / "examples" / "tiny", dtype=torch.float32))
    seen, told_at, heard_at = Counts(counts=book.counts, ends=book.ends), 0.0, dict[str, float]()
    directory = Directory(Folder(folder), key=key, ttl_s=TTL_S)
    config = pd.PairingConfig(port_wait_s=FAR_S, connect_timeout_s=FAR_S)
    numbers, cancels = itertools.count(), list[tuple[float, str]]()
    with pd.Pairing(directory=directory, config=config, policy=pd.policy.round_robin) as pairing:
        while pairing.num_unfinished or not ends:
            now = time.monotonic()
            while not ends and pairing.num_unfinished < NUM_UNFINISHED:
                one = case(seed, "front", next(numbers))
                book.submitted(one)
                name = pairing.submit(one.request)
                if one.cancel_after_s is not None:
                    cancels.append((now + one.cancel_after_s, name))
            for due in [due for due in cancels if due[0] <= now]:
                pairing.cancel(due[1])
                cancels.remove(due)
            pairing.wait(0.02)
            events = pairing.step()
            hear(events, heard_at, seen)
            book.heard(events)
            if now >= told_at + TELL_S:
                told_at = now
                tell(seen, book, pairing)
        tell(seen, book, pairing)
    if book.open:
        book.say("no_end", f"never ended: {sorted(book.open)}")
    tell(seen, book, pairing)


def hear(events: Sequence[pd.TokenEvent], heard_at: dict[str, float], seen: Counts) -> None:
    """Note failures, and the longest time between two tokens of a stream."""
    now = time.monotonic()
    for event in events:
        if event.token is not None and event.request_id in heard_at:
            seen.longest_gap_s = max(seen.longest_gap_s, now - heard_at[event.request_id])
        heard_at[event.request_id] = now
        if event.finish_reason is not None:
            del heard_at[event.request_id]
        if event.finish_reason is pd.FinishReason.FAILED:
            seen.broken.append(f"failed: {event.request_id}: {event.error}")


def tell(seen: Counts, book: Book, pairing: pd.Pairing) -> None:
    stats = pairing.stats
    seen.ports_lost, seen.moved = stats.num_ports_lost, stats.num_moved
    print(json.dumps({**attrs.asdict(seen), "broken": [*seen.broken, *book.broken]}), flush=True)


# -- the world around them --------------------------------------------------------------------------------------------


class World:
    """The processes, and what became of those that are gone."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.key = os.urandom(32)
        self.directory = Directory(Folder(folder), key=self.key, ttl_s=TTL_S)
        self.chance = random.Random(seed)
        self.kinds: list[str] = []
        self._deal()
        self.faults: Counter[str] = Counter()
        self.seen = Counts()
        self.started: list[subprocess.Popen[str]] = []
        self.leaving: list[subprocess.Popen[str]] = []
        self.broken: list[str] = []
        self.engines = [(role, self.engine(role)) for role in ROLES]
        self.fronts = [self.front() for _ in range(NUM_FRONTS)]

    def engine(self, role: str) -> subprocess.Popen[str]:
        return self._start("-m", "tests.e2e.announced", role, str(self.folder), "now", stdout=subprocess.DEVNULL)

    def front(self) -> tuple[subprocess.Popen[str], Path]:
        out = self.folder / f"front{next(_numbers)}.txt"
        with out.open("w") as file:
            words = "-m", "tests.soak.fronts", "--front", str(self.folder), "--seed", str(self.seed)
            return self._start(*words, stdout=file), out

    def _start(self, *words: str, stdout: Any) -> subprocess.Popen[str]:
        command = [sys.executable, *words]
        log = (self.folder / "log").open("a")
        process = subprocess.Popen(
            command, cwd=ROOT, env=child_environment(), stdin=subprocess.PIPE, stdout=stdout, stderr=log, text=True
        )
        log.close()
        self.started.append(process)
        assert process.stdin is not None
        process.stdin.write(f"{self.key.hex()}\n")
        process.stdin.flush()
        return process

    def announced(self, role: str) -> int:
        """How many engines of a role are there to be found."""
        return sum(entry.announced is not None and entry.announced.role == role for entry in self.directory.watch())

    def strike(self) -> bool:
        """Let something die, and put another process in its place. Return False when nothing can be spared now."""
        kind = self.kinds[-1]
        if kind in ("front", "fronts"):
            some = self.chance.sample(range(NUM_FRONTS), 1 if kind == "front" else NUM_FRONTS)
            for at in some:
                self.fronts[at][0].kill()
            for at in some:
                process, out = self.fronts[at]
                process.wait()
                self._read(out)
                self.fronts[at] = self.front()
        elif kind in ("empty", "stale"):
            held = {path: path.read_bytes() for path in self.folder.glob("[!.]*.json")}
            for path in held:
                path.unlink(missing_ok=True)
            if kind == "stale":
                threading.Timer(STALE_S, lambda: [path.write_bytes(data) for path, data in held.items()]).start()
        else:
            at = self.chance.randrange(len(ROLES))
            role, process = self.engines[at]
            if self.announced(role) < 2:
                return False
            if kind == "freeze":
                process.send_signal(signal.SIGSTOP)
                threading.Timer(FREEZE_S, process.send_signal, (signal.SIGCONT,)).start()
            else:
                process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
                self.leaving.append(process)
                self.engines[at] = role, self.engine(role)
        self.faults[self.kinds.pop()] += 1
        self._deal()
        return True

    def _deal(self) -> None:
        """Deal the kinds like cards: each comes once before any comes again."""
        if not self.kinds:
            self.kinds = self.chance.sample(KINDS, len(KINDS))

    def finish(self) -> None:
        """End the front ends, look at what the engines hold then, and drain them."""
        wait_for(lambda: all(out.read_text() for _, out in self.fronts), "front ends have begun")
        for process, _ in self.fronts:
            process.terminate()
        for process, out in self.fronts:
            if process.wait(FAR_S):
                self.broken.append(f"a front end ended with {process.returncode}")
            self._read(out)
        wait_for(lambda: all(self.announced(role) == ROLES.count(role) for role in set(ROLES)), "engines are there")
        time.sleep(2 * TTL_S)  # announcements are of an engine at rest by then
        for entry in self.directory.watch():
            load = None if entry.announced is None else entry.announced.load
            if load is not None and (what := not_whole(load.prefill or load.decode)):
                self.broken.append(f"not_whole: {entry.name} holds {what}")
        for _, process in self.engines:
            process.terminate()
        for process in (*self.leaving, *(process for _, process in self.engines)):
            if (status := process.wait(FAR_S)) not in (0, -signal.SIGKILL):
                self.broken.append(f"an engine ended with {status}")

    def _read(self, out: Path) -> None:
        """Take what a front end has told last."""
        lines = out.read_text().splitlines()
        whole = [line for line in lines if line.endswith("}")]
        if whole:
            self.seen.add(json.loads(whole[-1]))

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


_numbers = itertools.count()


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + FAR_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {FAR_S:g} s: {what}")
        time.sleep(0.2)


def soak(seed: int, minutes: float, every_s: float = EVERY_S) -> dict[str, Any]:
    """Let processes die for so long, and return what was counted."""
    with tempfile.TemporaryDirectory(prefix="pdfronts") as folder:
        world = World(seed, Path(folder))
        try:
            wait_for(lambda: all(world.announced(role) == ROLES.count(role) for role in set(ROLES)), "engines start")
            end = time.monotonic() + 60.0 * minutes
            while time.monotonic() < end:
                time.sleep(every_s if world.strike() else 1.0)
            world.finish()
        finally:
            world.close()
    seen = world.seen
    return {
        "minutes": minutes,
        "faults": dict(sorted(world.faults.items())),
        "counts": dict(seen.counts),
        "ends": dict(seen.ends),
        "lost": seen.ends["failed"],
        "wrong_tokens": seen.counts["wrong_tokens"],
        "ports_lost": seen.ports_lost,
        "moved": seen.moved,
        "longest_gap_s": round(seen.longest_gap_s, 1),
        "broken": [*world.broken, *seen.broken],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the line that is printed")
    parser.add_argument("--front", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.front is not None:
        be_front(options.front, options.seed)
        return 0
    found = {"bench": "fronts", "case": "result", "seed": options.seed, "commit": commit()}
    found |= soak(options.seed, options.minutes)
    line = json.dumps(found)
    print(line, flush=True)
    if options.out is not None:
        options.out.write_text(line + "\n")
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
