"""Worlds of 2 + 2 ranks, one after the other: each serves for a while, loses a rank or is held up, and is made anew."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.rank_worlds import World, serving
from tests.ranks import Ranks
from tests.soak.book import Book, not_whole
from tests.soak.run import NUM_UNFINISHED, QUIET_S, Run, step, submit
from tests.soak.timetable import case

PART = "ranks"
WORLD_S = 8.0
"""The seconds that a world serves, unless it loses a rank first; then it is inspected, and the next one takes its
place."""
SIZES = ({"tp_size": 2}, {"dp_size": 2}, {"cp_size": 2})
FAULTS = ("kill", "stop", "raise", "stall", "none")
"""`kill` and `stall` (SIGSTOP for a second or two) strike at any time, the others in a step of the model."""


@attrs.frozen(kw_only=True)
class Episode:
    """A world, and which of its ranks a fault strikes: 0 and 1 are prefill's, 2 and 3 decode's."""

    prefill: dict[str, int]
    decode: dict[str, int]
    fault: str
    rank: int
    at_s: float
    seconds: float

    @property
    def in_step(self) -> tuple[str, int, str]:
        """Return the fault in the form that `rank_worlds.serving` takes."""
        if self.fault not in ("stop", "raise"):
            return ("", 0, "")
        return ("prefill" if self.rank < 2 else "decode", self.rank % 2, self.fault)


def episode(seed: int, number: int) -> Episode:
    """Return an episode that depends on the seed alone. Every fault comes once before any comes again."""
    cycle, index = divmod(number, len(FAULTS))
    deck = list(FAULTS)
    random.Random(f"{seed}/ranks/{cycle}").shuffle(deck)
    rng = random.Random(f"{seed}/rank/{number}")
    return Episode(
        prefill=rng.choice([sizes for sizes in SIZES if "dp_size" not in sizes]),
        decode=rng.choice([sizes for sizes in SIZES if "cp_size" not in sizes]),
        fault=deck[index],
        rank=rng.randrange(4),
        at_s=rng.uniform(0.5, WORLD_S),
        seconds=rng.uniform(0.5, 2.0),
    )


def soak_ranks(run: Run, end: float) -> None:
    """Run worlds until `end`."""
    folder = Path(tempfile.mkdtemp())
    write_checkpoint(folder, tiny_config_dict("v3"), seed=run.seed)
    book = Book(pd.load_model(folder, dtype=torch.float32))
    run.models[PART] = "v3"
    faults: Counter[str] = Counter()
    cases = (case(run.seed, PART, number) for number in itertools.count())
    ranks = Ranks()
    try:
        for number in itertools.count():
            if time.monotonic() > end:
                break
            play(run, ranks, episode(run.seed, number), str(folder), book, cases, faults)
            run.measure("host of ranks")
    finally:
        ranks.close()
    run.add(PART, book, faults)


def play(run: Run, ranks: Ranks, one: Episode, checkpoint: str, book: Book, cases: Any, faults: Counter[str]) -> None:
    with (
        contextlib.redirect_stdout(sys.stderr),
        serving(  # which prints how lost ranks ended
            ranks,
            one.prefill,
            one.decode,
            checkpoint=checkpoint,
            fault=one.in_step,
            chunked_prefill_size=16,
            max_running_requests=4,
            num_pages=64,
        ) as world,
    ):
        began = time.monotonic()
        faults[f"rank/{one.fault}"] += 1
        processes = [worker.process for worker in ranks.workers]
        due: list[tuple[float, int]] = []
        if one.fault == "kill":
            due = [(began + one.at_s, signal.SIGKILL)]
        elif one.fault == "stall":
            due = [(began + one.at_s, signal.SIGSTOP), (began + one.at_s + one.seconds, signal.SIGCONT)]
        cancels: list[tuple[float, str]] = []
        while (time.monotonic() < began + WORLD_S or due) and not world.pairing.stats.num_ports_lost:
            now = time.monotonic()
            for at, what in [first for first in due if first[0] <= now]:
                os.kill(processes[one.rank].pid or 0, what)
                due.remove((at, what))
            if world.pairing.num_unfinished < NUM_UNFINISHED:
                submit(world.pairing, book, next(cases), cancels)
            for at, request_id in [each for each in cancels if each[0] <= now]:
                book.counts["cancels"] += 1
                world.pairing.cancel(request_id)
                cancels.remove((at, request_id))
            step(world.pairing, book)
            run.progress(PART, book, faults)
        come_to_rest(world, book, one)
    check_outcomes(world, book, one)


def come_to_rest(world: World, book: Book, one: Episode) -> None:
    """Check that every request has ended, and that the engines of a world that lost no rank are whole."""
    end = time.monotonic() + QUIET_S
    told = ""
    while time.monotonic() < end:
        step(world.pairing, book)
        told = f"{world.pairing.num_unfinished} requests" if world.pairing.num_unfinished else ""
        if one.fault in ("stall", "none"):
            told += "; ".join(filter(None, (not_whole(port.load()) for port in [*world.prefills, *world.decodes])))
        if not told:
            book.counts["quiet_moments"] += 1
            break
    else:
        book.say("not_quiet", f"{one} did not come to rest within {QUIET_S:g} s: {told}")
    for request_id in list(book.open):
        book.say("no_end", f"{one}: {request_id} has no end")
        del book.open[request_id]


def check_outcomes(world: World, book: Book, one: Episode) -> None:
    """Check that a world that lost no rank ends well and whole; of another world every rank of the role that lost one
    says so."""
    errors = [outcome.error for outcome in world.outcomes]
    if one.fault in ("stall", "none"):
        for rank, outcome in enumerate(world.outcomes):
            if outcome.error or outcome.value["left"]:
                left = outcome.error or f"{outcome.value['left']} pages"
                book.say("not_whole", f"{one}: rank {rank} ended with {left} {outcome.message}")
        return
    mine = slice(0, 2) if one.rank < 2 else slice(2, 4)
    if sorted(errors[mine]) != ["Died", "RankLost"]:
        book.say("unsaid_losses", f"{one}: its ranks ended with {errors}")
