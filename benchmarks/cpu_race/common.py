"""The parts that all runners of the CPU race share: cases, prompt, clocks, sampling, probe, and one JSON line per case.

A runner brings an `Engine`, and this file measures it. The file runs in the environment of the runner's engine, so it
needs only torch and the standard library.

Cases, as `kind:count@at`:

    prefill:512     one sequence of 512 tokens, empty cache, warm: prompt in, first token id out
    decode:8@2048   8 sequences of different tokens that hold 2048 tokens each (512 by default): one token each
    split:512       a prompt of 512 tokens to its first token id, through two processes and through one
    memory:8        a prefill of 512 tokens and a few steps of 8 sequences, in a process of its own: its peak
    mixed:64        64 requests, all at once; mixed:64@0.5: at a Poisson rate of 0.5 per second

The environment sets the clock. BENCH_CLOCK=cpu counts CPU seconds of the calling thread, so waiting for a core does not
count. It is right only where that thread does all the work (OMP_NUM_THREADS=1), which `process_s` shows. `wall` counts
elapsed time, and keeps the samples in which the scheduler held the process up for less than 2 % of it (`clean`).
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from machine import cpu_here

CLOCK = os.environ.get("BENCH_CLOCK", "wall")
CLEAN = 0.02
"""The largest share of a sample that a clean process may have waited for a core."""
MOST_STEPS = 240
"""The most decode steps of a case, and so the free space behind the context that an engine must have."""
CONTEXT = 512
CHECK_TOKENS = 64
MIXED_SEED = 5
MIXED_PROMPTS = (16, 2048)
MIXED_OUTPUTS = (8, 256)


@dataclass(frozen=True)
class Case:
    """One case, as the top of this file describes it."""

    kind: str
    count: int
    at: float

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Parse `kind:count@at`; raise SystemExit for anything else."""
        head, _, at = text.partition("@")
        kind, _, count = head.partition(":")
        if kind not in ("prefill", "decode", "memory", "mixed", "split") or not count.isdigit():
            raise SystemExit(f"{text!r} is no case; say prefill:512, decode:8, decode:8@4096, memory:8 or mixed:64")
        return cls(kind, int(count), float(at) if at else CONTEXT if kind in ("decode", "memory") else 0.0)

    @property
    def context(self) -> int:
        """The number of tokens that each sequence of a decode case holds."""
        return int(self.at)

    def __str__(self) -> str:
        usual = CONTEXT if self.kind in ("decode", "memory") else 0.0
        return f"{self.kind}:{self.count}" + ("" if self.at == usual else f"@{self.at:g}")


class Order(NamedTuple):
    """One request of the mixed traffic, with its arrival time."""

    prompt: list[int]
    num_new_tokens: int
    arrival_s: float


class Best(NamedTuple):
    """The five best tokens behind a prompt, and their scores: "logits" or "logprobs"."""

    tokens: list[int]
    scores: list[float]
    kind: str = "logits"


class Engine(Protocol):
    """The engine of a runner. `tag` goes into each of its lines."""

    tag: dict[str, object]
    vocab_size: int

    def prefill(self, count: int) -> AbstractContextManager[Callable[[], None]]:
        """Return a function that runs a prompt of `count` tokens through an empty cache, to its first token id."""

    def decode(self, batch: int, context: int) -> AbstractContextManager[Callable[[], None]]:
        """Return a function that runs one step of `batch` sequences which hold `context` tokens."""

    def notes(self) -> dict[str, object]:
        """Return further figures of the decode case that was just run."""

    def best(self, count: int) -> Best:
        """Return the five best tokens behind a prompt of `count` tokens."""


class Server(Protocol):
    """A server with a scheduler of its own, for the mixed traffic."""

    def submit(self, index: int, order: Order) -> None:
        """Take a request."""

    def step(self) -> Iterable[int]:
        """Do one step; return the index of a request for each token that came."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all runners take."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", type=Path)
    found.add_argument("--cases", default="prefill:512,decode:1,decode:8")
    found.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    found.add_argument("--threads", type=int, default=1)
    found.add_argument("--reps", type=int, default=3, help="samples of a prefill")
    found.add_argument("--steps", type=int, default=8, help="samples of a decode case")
    found.add_argument("--max-s", type=float, default=25.0, help="a case takes no new sample behind this")
    found.add_argument("--check", action="store_true", help="print the five best tokens, and run no case")
    return found


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    return [Case.parse(text) for text in arguments.cases.split(",")]


def prompt_ids(count: int, vocab_size: int, sequence: int = 0) -> list[int]:
    """Return the same tokens for every engine, from a linear congruential generator seeded by the sequence alone."""
    state, found = (sequence * 2654435761 + 12345) & 0xFFFFFFFF, []
    for _ in range(count):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        found.append(2 + (state >> 8) % (vocab_size - 2))
    return found


# -- measuring ---


class Samples(NamedTuple):
    """The seconds of each sample that counts, how many samples were clean of how many, and the CPU seconds of the whole
    process."""

    seconds: list[float]
    clean: tuple[int, int]
    process_s: float

    def rate(self, work: int) -> dict[str, float]:
        return spread([work / second for second in self.seconds])

    def ms(self) -> dict[str, float]:
        return spread([1e3 * second for second in self.seconds])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the lowest, the median and the highest value, to four digits."""

    def digits(value: float) -> float:
        return float(f"{value:.4g}")

    return {"min": digits(min(values)), "med": digits(statistics.median(values)), "max": digits(max(values))}


def now() -> float:
    """Return the seconds of the chosen clock."""
    return time.thread_time() if CLOCK == "cpu" else time.perf_counter()


def delay_s(pids: Iterable[int | str] = ("self",)) -> float:
    """Return the seconds that the threads of these processes could have run but waited for a core, from Linux's
    schedstat."""
    total = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(thread.read_text().split()[1])
            except OSError:  # the thread is gone
                continue
    return total / 1e9


def sample(
    run: Callable[[], None],
    count: int,
    *,
    max_s: float,
    most: int = MOST_STEPS,
    clock: Callable[[], float] = now,
    pids: Sequence[int | str] = ("self",),
) -> Samples:
    """Call `run` until `count` samples are good, or until `max_s` is over.

    On the CPU clock all samples are good; on the wall clock, only clean ones. If too few are clean, the cleanest three
    are used instead, and `clean` says so.
    """
    found: list[tuple[float, float]] = []
    process_s = time.process_time()
    end = time.perf_counter() + max_s
    good = 0
    while good < count and len(found) < most and (time.perf_counter() < end or len(found) < min(count, 2)):
        delayed, wall, started = delay_s(pids), time.perf_counter(), clock()
        run()
        seconds, wall = clock() - started, time.perf_counter() - wall
        found.append(((delay_s(pids) - delayed) / wall, seconds))
        good += CLOCK == "cpu" or found[-1][0] <= CLEAN
    num_clean = sum(share <= CLEAN for share, _ in found)
    kept = found if CLOCK == "cpu" else sorted(found)[: max(num_clean, min(len(found), 3))]
    process_s = (time.process_time() - process_s) / len(found)
    return Samples([seconds for _, seconds in kept], (num_clean, len(found)), process_s)


def probe() -> dict[str, float]:
    """Return what the machine delivers right now: GB/s of a sum over 256 MiB, GFLOP/s of a bfloat16 product."""
    import torch  # imported here, so that it does not count in the memory of an engine that needs no torch

    values = torch.ones(64 << 20)
    matrix = torch.randn(1024, 1024).to(torch.bfloat16)

    def fastest(run: Callable[[], object], count: int) -> float:
        run()
        seconds = []
        for _ in range(count):
            started = now()
            run()
            seconds.append(max(now() - started, 1e-9))
        return statistics.median(seconds)

    return {
        "read_gbps": round(4 * values.numel() / fastest(values.sum, 3) / 1e9, 1),
        "bf16_gflops": round(2 * 1024**3 / fastest(lambda: matrix @ matrix, 5) / 1e9),
    }


def peak_bytes() -> int:
    """Return the most memory that this process has held, without what an ancestor held before the process started."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise SystemExit("this benchmark needs Linux: /proc/self/status has no VmHWM")


def emit(**fields: object) -> None:
    print(json.dumps({**fields, "cpu": cpu_here()}), flush=True)


def sampled(case: Case, found: Samples, name: str) -> dict[str, object]:
    return {
        "tok_s": found.rate(case.count),
        name: found.ms(),
        "clean": found.clean,
        "process_ms": round(1e3 * found.process_s, 3),
    }


def measured(case: Case, engine: Engine, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the figures of one case of the kinds that every engine runs."""
    match case.kind:
        case "prefill":
            with engine.prefill(case.count) as run:
                run()
                return sampled(case, sample(run, arguments.reps, max_s=arguments.max_s), "ttft_ms")
        case "decode":
            with engine.decode(case.count, case.context) as step:
                step()
                step()
                found = sample(step, arguments.steps, max_s=arguments.max_s, most=MOST_STEPS - 4)
            return sampled(case, found, "step_ms") | engine.notes()
        case "memory":
            with engine.prefill(CONTEXT) as run:
                run()
            with engine.decode(case.count, case.context) as step:
                for _ in range(3):
                    step()
            return {}
    raise SystemExit(f"{case} is not for this runner")


def traffic(case: Case, serve: Callable[[Sequence[Order]], Server], vocab_size: int) -> dict[str, object]:
    """Return the figures of the mixed traffic; four of its requests run before, so that the engine is warm."""
    orders = mixed_orders(case.count, vocab_size, case.at)
    server = serve(orders)
    play(server, mixed_orders(4, vocab_size, 0.0), Timeline())
    delayed, started = delay_s(), time.perf_counter()
    found = latencies(orders, play(server, orders, Timeline()))
    waited = (delay_s() - delayed) / (time.perf_counter() - started)
    return found | {"clean": (int(waited <= CLEAN), 1)}


def run_cases(
    engine: Engine, arguments: argparse.Namespace, serve: Callable[[Sequence[Order]], Server] | None = None
) -> None:
    """Measure an engine and print a line per case, or its five best tokens when the flags say so. `serve` brings the
    scheduler of an engine that has one."""
    if arguments.check:
        best = engine.best(CHECK_TOKENS)
        scores = {best.kind: [round(score, 4) for score in best.scores]}
        emit(case="check", **engine.tag, tokens=best.tokens, **scores)
        return
    for case in cases_of(arguments):
        before = None if case.kind == "memory" else probe()
        if case.kind == "mixed" and serve is not None:
            found = traffic(case, serve, engine.vocab_size)
        else:
            found = measured(case, engine, arguments)
        emit(case=str(case), **engine.tag, clock=CLOCK, **found, peak_bytes=peak_bytes(), probe=before)


# -- mixed traffic ---


def mixed_orders(count: int, vocab_size: int, rate: float) -> list[Order]:
    """Return requests with lengths spread evenly over their logarithms, the same for every engine. At a rate of 0 all
    come at once; otherwise the gaps are those of a Poisson process of `rate` requests per second."""
    chance = random.Random(MIXED_SEED)

    def length(low: int, high: int) -> int:
        return round(math.exp(chance.uniform(math.log(low), math.log(high))))

    sizes = [(length(*MIXED_PROMPTS), length(*MIXED_OUTPUTS)) for _ in range(count)]
    found, arrival_s = [], 0.0
    for index, (num_prompt, num_new) in enumerate(sizes):
        found.append(Order(prompt_ids(num_prompt, vocab_size, index), num_new, arrival_s))
        arrival_s += chance.expovariate(rate) if rate else 0.0
    return found


@dataclass
class Timeline:
    """A clock that starts when it is made, and a way to advance to the next arrival. On the CPU clock, time in which
    nobody computes is skipped."""

    skipped_s: float = 0.0

    def __post_init__(self) -> None:
        self.started = now()

    def now(self) -> float:
        return now() - self.started + self.skipped_s

    def wait_until(self, then_s: float) -> None:
        left_s = max(0.0, then_s - self.now())
        if CLOCK == "cpu":
            self.skipped_s += left_s
        else:
            time.sleep(left_s)


def play(server: Server, orders: Sequence[Order], timeline: Timeline) -> list[list[float]]:
    """Send the requests when they are due and step the server until each has all its tokens; return when each token
    came."""
    times: list[list[float]] = [[] for _ in orders]
    coming = deque(enumerate(orders))
    unfinished: set[int] = set()
    while coming or unfinished:
        while coming and coming[0][1].arrival_s <= timeline.now():
            index, order = coming.popleft()
            server.submit(index, order)
            unfinished.add(index)
        if not unfinished:
            timeline.wait_until(coming[0][1].arrival_s)
            continue
        came = list(server.step())
        at_s = timeline.now()
        for index in came:
            times[index].append(at_s)
            if len(times[index]) == orders[index].num_new_tokens:
                unfinished.discard(index)
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` of all values are at or below, without interpolation."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def latencies(orders: Sequence[Order], times: Sequence[Sequence[float]]) -> dict[str, object]:
    """Return the total time, the TTFT from arrival to the first token, and the ITL between the tokens of a request,
    over all requests."""
    firsts = [found[0] - order.arrival_s for order, found in zip(orders, times, strict=True)]
    gaps = [after - before for found in times for before, after in itertools.pairwise(found)]
    total_s = max(found[-1] for found in times)
    milliseconds = {
        f"{name}_p{percent}_ms": 1e3 * percentile(values, percent)
        for name, values in (("ttft", firsts), ("itl", gaps))
        for percent in (50, 99)
    }
    rounded = {name: round(value, 3) for name, value in milliseconds.items()}
    return {"total_s": round(total_s, 4), "requests_s": round(len(orders) / total_s, 5), **rounded}
