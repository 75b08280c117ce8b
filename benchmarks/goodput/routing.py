"""Policies at one rate, simulated: the share of the requests within the SLO, means of three seeds.

Settings are those of `policies`, and conversations of several turns, at rates near the highest that a policy bears. One
rate takes a twentieth of the time that the search for the highest does, so that more seeds can be run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from overload import replayed
from policies import POLICIES, SETTINGS

from pdinfer import bench, planning

RATES = {
    "sessions": 16.5,
    "conversation": 4.2,
    "synthetic": 4.4,
    "slow-prefill": 3.4,
    "slow-decode": 4.05,
    "azure": 6.0,
}
"""Requests per second."""
NUM_PLACES, NUM_TURNS, BLOCK_TOKENS = 60, 8, 512
SEEDS = (0, 1, 2)


def routing(
    folder: Path, names: Sequence[str] = tuple(RATES), *, num_requests: int | None = None
) -> Iterator[dict[str, Any]]:
    """Attainment by policy, and that of `traffic_aware` over the best of the others."""
    for name in names:
        setting = SETTINGS["conversation" if name == "sessions" else name]
        count, rate = num_requests or setting.num_requests, RATES[name]
        load_at = sessions if name == "sessions" else replayed(folder / setting.trace)
        means = {}
        for policy, choose in POLICIES.items():
            attained = [
                planning.simulate(
                    setting.cluster(), load_at(rate, count, seed), policy=choose, slo=setting.slo, seed=seed
                ).attainment
                or 0.0
                for seed in SEEDS
            ]
            means[policy] = sum(attained) / len(attained)
            yield {
                "setting": name,
                "num_requests": count,
                "req_s": rate,
                "policy": policy,
                "attainment": [round(each, 4) for each in attained],
                "mean": round(means[policy], 4),
            }
        won = means.pop("traffic_aware")
        yield {
            "setting": name,
            "num_requests": count,
            "over_the_best_other": round(won / max(means.values()), 3),
            "asked": 1.0 if name == "sessions" else 0.97,
        }


def sessions(rate: float, count: int | None, seed: int) -> bench.Load:
    """Return conversations in NUM_PLACES places, one after the other in each, with turns as a Poisson process. A turn
    repeats what was said before it; 15 % of them begin with a long document."""
    draw, arrivals = random.Random(seed), list[bench.Arrival]()
    count = count or 1200
    for place in range(NUM_PLACES):
        at_s = draw.uniform(0.0, NUM_PLACES / rate)
        for turn in range(-(-count // NUM_PLACES // NUM_TURNS) * NUM_TURNS):
            if turn % NUM_TURNS == 0:
                size = draw.randrange(12_000, 30_000) if draw.random() < 0.15 else draw.randrange(500, 4000)
            blocks = range(-(-size // BLOCK_TOKENS))
            first = (place * count + turn // NUM_TURNS) << 16
            answer = draw.randrange(50, 500)
            arrivals.append(
                bench.Arrival(
                    at_s=at_s,
                    prompt_tokens=size,
                    output_tokens=answer,
                    hash_ids=tuple(first + block for block in blocks),
                )
            )
            at_s += draw.expovariate(rate / NUM_PLACES)
            size += answer + draw.randrange(50, 800)
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return bench.Load(
        mode="open_loop",
        arrivals=tuple(arrivals[:count]),
        request_rate=rate,
        seed=seed,
        block_tokens=BLOCK_TOKENS,
    )
