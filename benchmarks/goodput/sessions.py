"""Conversations through real engines in one process: what a policy wins where prefixes are shared.

24 conversations of 5 turns; each turn's prompt begins with the one before it. They arrive as a Poisson process at the
rate at which `round_robin` keeps the SLO for 50 to 60 % of the requests. Then every policy has its turn in each round,
with engines that hold nothing yet and the same requests.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pdinfer as pd
from pdinfer import bench

MODEL = Path(__file__).parents[2] / "examples" / "tiny"
SLO = pd.bench.SLO(ttft_s=0.5)
NUM_SESSIONS, NUM_TURNS, BLOCK_TOKENS = 24, 5, 50
OUTPUT_TOKENS = 16
ROUNDS = 5
POLICIES = ("round_robin", "least_tokens", "traffic_aware")


class Recorded(pd.Pairing):
    """A Pairing that keeps the tokens of every request, by its place in the load."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)

    def step(self) -> list[pd.TokenEvent]:
        events = super().step()
        for event in events:
            if event.token is not None:
                self.tokens[int(event.request_id.rpartition("-")[2])].append(event.token)
        return events


def load_at(rate: float, seed: int) -> bench.Load:
    """Return the turns of all conversations in some order, `rate` of them a second."""
    draw = random.Random(seed)
    turns = [session for session in range(NUM_SESSIONS) for _ in range(NUM_TURNS)]
    draw.shuffle(turns)
    sizes = {session: draw.randrange(250, 400) for session in range(NUM_SESSIONS)}
    arrivals, at_s = [], 0.0
    for session in turns:
        num_blocks = -(-sizes[session] // BLOCK_TOKENS)
        arrivals.append(
            bench.Arrival(
                at_s=at_s,
                prompt_tokens=sizes[session],
                output_tokens=OUTPUT_TOKENS,
                hash_ids=tuple(range(1000 * session, 1000 * session + num_blocks)),
            )
        )
        sizes[session] = min(1400, sizes[session] + draw.randrange(100, 400))
        at_s += draw.expovariate(rate)
    return bench.Load(
        mode="open_loop", arrivals=tuple(arrivals), request_rate=rate, seed=seed, block_tokens=BLOCK_TOKENS
    )


def served(model: pd.Model, policy: str, load: bench.Load) -> tuple[bench.Summary, dict[int, list[int]]]:
    """Run a load through 2 prefills and 2 decodes that are warm and hold no pages."""
    cache = pd.CacheConfig(page_size=16, num_pages=700)
    ports: dict[str, list[Any]] = {"prefill": [], "decode": []}
    for role, kind in (("prefill", pd.PrefillEngine), ("decode", pd.DecodeEngine)):
        for _ in range(2):
            engine = kind(model, pd.KVChannel(pd.PagePool(model, cache), pd.kv.ShmTransport()))
            engine.warm_up()
            ports[role].append(engine)
    with Recorded(ports["prefill"], ports["decode"], policy=getattr(pd.policy, policy)) as pairing:
        return bench.run(pairing, load, slo=SLO), dict(pairing.tokens)


def calibrated(model: pd.Model) -> float:
    """Return a rate at which `round_robin` keeps the SLO for 50 to 60 % of the requests."""
    low, high = 0.5, 16.0
    for _ in range(9):
        rate = (low * high) ** 0.5
        attainment = served(model, "round_robin", load_at(rate, seed=0))[0].attainment or 0.0
        if 0.5 <= attainment <= 0.6:
            break
        low, high = (rate, high) if attainment > 0.6 else (low, rate)
    return rate


def sessions(policies: Sequence[str] = POLICIES) -> Iterator[dict[str, Any]]:
    """Attainment and P99 TTFT of each policy, with the medians of the rounds' ratios to the better of the first two."""
    model = pd.load_model(MODEL, dtype="float32")  # so that tokens can be compared, and no CPU is slow at it
    rate = calibrated(model)
    found: dict[str, list[bench.Summary]] = {policy: [] for policy in policies}
    equal_tokens = True
    for number in range(ROUNDS):
        load, tokens = load_at(rate, seed=number), []
        for at in range(len(policies)):
            policy = policies[(at + number) % len(policies)]
            summary, drawn = served(model, policy, load)
            found[policy].append(summary)
            tokens.append(drawn)
        equal_tokens &= all(drawn == tokens[0] for drawn in tokens)
    for policy, runs in found.items():
        others = [[_both(run) for run in found[other]] for other in policies[:2]]
        yield {
            "policy": policy,
            "request_rate": round(rate, 3),
            "attainment": [run.attainment for run in runs],
            "p99_ttft_ms": [run.p99_ttft_ms for run in runs],
            "attainment_to_best": _median(
                [_both(run)[0] / max(other[at][0] for other in others) for at, run in enumerate(runs)]
            ),
            "p99_ttft_to_best": _median(
                [_both(run)[1] / min(other[at][1] for other in others) for at, run in enumerate(runs)]
            ),
            "equal_tokens": equal_tokens,
            "findings": sorted({finding.check for run in runs for finding in run.findings}),
        }


def _both(run: bench.Summary) -> tuple[float, float]:
    return max(run.attainment or 0.0, 1e-3), run.p99_ttft_ms or float("inf")


def _median(ratios: list[float]) -> float:
    return round(statistics.median(ratios), 3)
