"""Every engine of a pairing replaced again and again under load, as platforms roll an image: one joins, one is drained.

    python -m tests.soak.rolling --replacements 1000 --seed 1 --out FILE

Two prefills and two decodes of a tiny model share this process and send over sockets. Every answer is compared with
the model in one piece. First nothing is replaced while a hundred requests are answered; then replacements follow each
other. Half of the engines may let their requests end, the others give them up at once, so that their streams move.

Prints a JSON line, with the longest gap between two tokens of a stream: in seconds, which depend on what else the
machine does, and in seconds of this thread. The exit status is 1 when a promise did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import pdinfer as pd
from pdinfer.testing import random_model, tiny_config
from tests.soak.book import Book, not_whole
from tests.soak.timetable import case
from tests.versions import commit

NUM_UNFINISHED = 8
"""The number of requests that are under way at once."""
NUM_QUIET = 100
"""How many are answered before the first replacement."""
DRAINS_S = (0.0, 60.0)
"""How long an engine that leaves may let its requests end."""
FAMILY = "v3"
ROLES = {"prefill": pd.PrefillEngine, "decode": pd.DecodeEngine}


@attrs.define
class Gaps:
    """The time between two tokens of each stream, on one clock."""

    longest_s: float = 0.0
    _heard_at: dict[str, float] = attrs.field(factory=dict)

    def heard(self, events: Sequence[pd.TokenEvent], now: float) -> None:
        for event in events:
            if event.token is not None and event.request_id in self._heard_at:
                self.longest_s = max(self.longest_s, now - self._heard_at[event.request_id])
            self._heard_at[event.request_id] = now
            if event.finish_reason is not None:
                del self._heard_at[event.request_id]


class Roll:
    """A pairing whose engines are replaced, its book, and what was counted."""

    def __init__(self, seed: int) -> None:
        self.model = random_model(tiny_config(FAMILY), seed=seed)
        self.book = Book(self.model)
        self.gaps, self.cpu_gaps = Gaps(), Gaps()
        self.drains: Counter[float] = Counter()
        self._chance = random.Random(seed)
        self._cases = (case(seed, "rolling", number) for number in itertools.count())
        prefills, decodes = ([self.engine(role) for _ in range(2)] for role in ROLES)
        config = pd.PairingConfig(connect_timeout_s=60.0)
        self.pairing = pd.Pairing(prefills, decodes, config=config, policy=pd.policy.round_robin)

    def engine(self, role: str) -> Any:
        pool = pd.PagePool(self.model, pd.CacheConfig(page_size=4, num_pages=256))
        return ROLES[role](self.model, pd.KVChannel(pool, pd.kv.SocketTransport()))

    def step(self) -> None:
        """Keep the load up, and take one step."""
        while self.pairing.num_unfinished < NUM_UNFINISHED:
            one = next(self._cases)
            self.book.submitted(attrs.evolve(one, cancel_after_s=None))
            self.pairing.submit(attrs.evolve(one.request, deadline_s=None))
        self._advance()

    def _advance(self) -> None:
        self.pairing.wait(0.02)
        events = self.pairing.step()
        self.gaps.heard(events, time.monotonic())
        self.cpu_gaps.heard(events, time.thread_time())
        self.book.heard(events)

    def replace(self) -> Iterator[float]:
        """Have a new engine join, and the oldest of its role leave. Step between two items."""
        role = self._chance.choice(list(ROLES))
        new = self.engine(role)
        yield from self.pairing.joining(new)
        old = next(port for port in self.pairing.ports if port.role == role)
        drain_s = self._chance.choice(DRAINS_S)
        self.drains[drain_s] += 1
        yield from self.pairing.removal(old, drain_s=drain_s)
        assert isinstance(old, pd.PrefillEngine | pd.DecodeEngine)
        while old.num_unfinished:  # what has moved away from it
            old.step()
            yield 0.0
        if what := not_whole(old.load()):
            self.book.say("not_whole", f"a {role} that has left holds {what}")
        old.close()

    def finish(self) -> None:
        """Let everything end."""
        while self.pairing.num_unfinished:
            self._advance()
        for port in self.pairing.ports:
            if what := not_whole(port.load()):
                self.book.say("not_whole", f"a {port.role} at rest holds {what}")
        self.pairing.close()


def roll(seed: int, num_replacements: int, *, num_quiet: int = NUM_QUIET) -> dict[str, Any]:
    """Replace so many engines, and return what was counted."""
    run = Roll(seed)
    while sum(run.book.ends.values()) < num_quiet:
        run.step()
    quiet_s, quiet_cpu_s = run.gaps.longest_s, run.cpu_gaps.longest_s
    run.gaps, run.cpu_gaps = Gaps(), Gaps()
    for _ in range(num_replacements):
        for _ in run.replace():
            run.step()
        run.step()
    run.finish()
    stats, counts = run.pairing.stats, run.book.counts
    return {
        "replacements": num_replacements,
        "drained_at_once": run.drains[0.0],
        "requests": counts["requests"],
        "tokens": counts["tokens"],
        "moved": stats.num_moved,
        "rerouted": stats.num_reroutes,
        "ends": dict(run.book.ends),
        "lost": run.book.ends["failed"] + len(run.book.open),
        "wrong_tokens": counts["wrong_tokens"],
        "near_ties": counts["near_ties"],
        "broken": run.book.broken,
        "longest_gap_s": round(run.gaps.longest_s, 3),
        "longest_gap_cpu_s": round(run.cpu_gaps.longest_s, 3),
        "longest_gap_quiet_s": round(quiet_s, 3),
        "longest_gap_quiet_cpu_s": round(quiet_cpu_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replacements", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the line that is printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"bench": "rolling", "case": "result", "seed": options.seed, "commit": commit()}
    began = time.process_time()
    found |= roll(options.seed, options.replacements)
    line = json.dumps({**found, "cpu_s": round(time.process_time() - began)})
    print(line, flush=True)
    if options.out is not None:
        options.out.write_text(line + "\n")
    return 1 if found["lost"] or found["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
