"""Policies tried on the simulator: conversations that share prefixes, on equal engines and beside a slow one.

`benchmarks/goodput.py policies` does the same with real traces, and searches for the highest rate.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.planning import Change
from pdinfer.values import changed_fields

SLO = pd.bench.SLO(ttft_s=2.0, ttft_per_token_s=225e-6, tpot_s=0.05)
NUM_SESSIONS, NUM_TURNS, BLOCK_TOKENS, PAGE_SIZE = 100, 6, 512, 256
LIMITS: dict[str, Any] = {
    "page_size": PAGE_SIZE,
    "chunked_prefill_size": 8192,
    "max_running_requests": 128,
    "bytes_per_s": 25e9,
    "token_bytes": 70_272,
    "num_pushes": 10,
    "latency_s": 0.002,
}
"""Those of engines and links, as in test_overload.py and test_switching.py."""


@attrs.frozen
class Case:
    """A rate that some policies cannot bear, and by what `traffic_aware` must beat those that do not look at pages or
    step times, and all others."""

    rate: float
    blind: float
    best: float
    changes: tuple[Change, ...] = ()


CASES = {
    "equal engines": Case(14.0, blind=1.15, best=0.97),
    "a slow prefill": Case(10.0, blind=1.3, best=1.0, changes=(Change(engine="P0", at_s=0.0, speed=0.5),)),
    "a slow decode": Case(5.0, blind=1.15, best=1.1, changes=(Change(engine="D0", at_s=0.0, speed=1 / 2.2),)),
}
BLIND = ("round_robin", "least_tokens", "power_of_two")


@pytest.mark.parametrize("name", CASES)
def test_reading_the_traffic_wins(name: str) -> None:
    found = attained(CASES[name], ("round_robin", "least_tokens", "cache_aware"), seed=1)
    assert_won(CASES[name], found)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_it_does_with_other_arrivals(name: str, seed: int) -> None:
    assert_won(CASES[name], attained(CASES[name], (*BLIND, "cache_aware"), seed=seed))


def assert_won(case: Case, found: dict[str, float]) -> None:
    won = found.pop("traffic_aware")
    assert won >= case.blind * max(found.get(policy, 0.0) for policy in BLIND), (won, found)
    assert won >= case.best * max(found.values()), (won, found)


def attained(case: Case, others: tuple[str, ...], *, seed: int) -> dict[str, float]:
    """Return the share of the requests that kept the SLO, by policy."""
    cluster = planning.cluster(
        "2P2D",
        prefill_s=lambda rows: 0.03 + rows.num_tokens / 14_000,
        decode_s=lambda rows: 0.02 + 1e-4 * rows.num_rows + 2e-8 * rows.num_context_tokens,
        prefill={"num_pages": 2000},
        decode={"num_pages": 1600},
        **LIMITS,
        changes=case.changes,
    )
    load = conversations(case.rate, seed)
    found = {}
    for policy in (*others, "traffic_aware"):
        summary = planning.simulate(cluster, load, policy=getattr(pd.policy, policy), slo=SLO, seed=seed)
        assert summary.attainment is not None
        found[policy] = summary.attainment
    return found


def conversations(rate: float, seed: int) -> bench.Load:
    """Return about `rate` requests/s: conversations that begin as a Poisson process, each turn after its answer was
    read."""
    draw = random.Random(seed)
    arrivals, begins_at = [], 0.0
    for session in range(NUM_SESSIONS):
        begins_at += draw.expovariate(rate / NUM_TURNS)
        at_s, size = begins_at, draw.randrange(500, 4000)
        if draw.random() < 0.15:
            size = draw.randrange(12_000, 30_000)
        for _ in range(NUM_TURNS):
            output_tokens = draw.randrange(50, 500)
            hash_ids = tuple(1000 * session + block for block in range(-(-size // BLOCK_TOKENS)))
            arrivals.append(
                bench.Arrival(at_s=at_s, prompt_tokens=size, output_tokens=output_tokens, hash_ids=hash_ids)
            )
            at_s += 5 + draw.expovariate(1 / 5)
            size += output_tokens + draw.randrange(50, 800)
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return bench.Load(
        mode="open_loop", arrivals=tuple(arrivals), request_rate=rate, seed=seed, block_tokens=BLOCK_TOKENS
    )


LEFT_OUT = {
    *("transport", "providers", "kv"),  # as of real engines
    *("step_age_s", "unsent_bytes", "prefix_query_tokens", "prefix_hit_tokens"),
    *("placement_epoch", "is_placement_staged", "placement_error"),
    *("num_draft_tokens", "num_accepted_tokens", "accept_length"),
}
"""What simulated loads do not say. The links have the bytes that were not sent."""


def test_policies_are_shown_what_real_engines_say_but_for_a_few_fields() -> None:
    """A policy that reads another field would decide otherwise than on real engines. One that is new is told by
    simulated engines, too, or stands in LEFT_OUT."""
    told: set[str] = set()

    def note(shape: pd.policy.RequestShape, prefills: Any, decodes: Any) -> pd.policy.Choice | None:
        for load in (*prefills, *decodes):
            told.update(changed_fields(load))
        return pd.policy.round_robin(shape, prefills, decodes)

    planning.simulate(
        planning.cluster("1P1D", prefill_s=lambda rows: 0.5, decode_s=lambda rows: 0.1, page_size=16, token_bytes=64),
        bench.open_loop(4.0, 40, prompt_tokens=100, output_tokens=50),
        policy=note,
    )
    fields = {field.name for kind in (pd.policy.PrefillLoad, pd.policy.DecodeLoad) for field in attrs.fields(kind)}
    assert fields - told == LEFT_OUT
