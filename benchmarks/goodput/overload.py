"""Overload on real traces, simulated: goodput below, at and beyond the knee, with `PairingConfig(slo=)` and without.

The knee is the highest rate at which 90 % of the requests keep the SLO with an open door. Settings are those of
`policies`, and another one in which decode binds: prompts of 200 to 800 tokens, answers of 100 to 1,500.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from policies import SETTINGS, Setting, trace_of

import pdinfer as pd
from pdinfer import bench, planning

FACTORS = (0.5, 1.0, 1.3, 2.0)
DECODE_BOUND = Setting(trace="", num_requests=1500, shape="2P2D", rates=(1.0, 30.0), sequence_s=3e-4)


def overload(
    folder: Path,
    names: Sequence[str] = ("conversation", "azure", "decode-bound"),
    *,
    num_requests: int | None = None,
    num_seeds: int = 3,
    num_steps: int = 6,
) -> Iterator[dict[str, Any]]:
    """Goodput by rate as a share of the knee's, means of seeds."""
    for name in names:
        setting = DECODE_BOUND if name == "decode-bound" else SETTINGS[name]
        count = num_requests or setting.num_requests
        cluster = setting.cluster()
        guarded = attrs.evolve(cluster, pairing=pd.PairingConfig(slo=setting.slo))
        load_at = _answers if name == "decode-bound" else replayed(folder / setting.trace)

        def run(rate: float, seed: int, *, door: bool) -> bench.Summary:
            cluster_of = guarded if door else cluster  # noqa: B023 - called in this turn alone
            load = load_at(rate, count, seed)  # noqa: B023
            return planning.simulate(cluster_of, load, slo=setting.slo, seed=seed)  # noqa: B023

        found = bench.find_goodput(
            lambda rate, seed: run(rate, seed, door=False),
            *setting.rates,
            num_steps=num_steps,
            max_seeds=3,
        )
        best = _mean([run(found.rate, seed, door=False) for seed in range(num_seeds)])[0] * found.rate
        for factor in FACTORS:
            for door in (False, True):
                attained, refused = _mean([run(factor * found.rate, seed, door=door) for seed in range(num_seeds)])
                yield {
                    "setting": name,
                    "num_requests": count,
                    "num_seeds": num_seeds,
                    "knee_req_s": round(found.rate, 3),
                    "factor": factor,
                    "door": door,
                    "of_the_knees_goodput": round(attained * factor * found.rate / best, 3),
                    "refused": round(refused, 4),
                }


def _mean(summaries: Sequence[bench.Summary]) -> tuple[float, float]:
    """Return the mean attainment, and the share of the requests that were refused."""
    attained = [summary.attainment or 0.0 for summary in summaries]
    return sum(attained) / len(attained), sum(each.failed / (each.failed + each.completed) for each in summaries) / len(
        summaries
    )


def replayed(path: Path) -> Callable[[float, int | None, int], bench.Load]:
    """Return the function that gives the first so many requests of a trace at a rate, spread by a seed."""

    def load_at(rate: float, count: int | None, seed: int) -> bench.Load:
        trace = trace_of(path, seed)
        chosen = trace.arrivals[:count]
        natural = (len(chosen) - 1) / (chosen[-1].at_s - chosen[0].at_s)
        return bench.replay(trace, speed=rate / natural, num_requests=count, seed=seed)

    return load_at


def _answers(rate: float, count: int | None, seed: int) -> bench.Load:
    """Return a Poisson process of short prompts with long answers."""
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(count or 0):
        at_s += draw.expovariate(rate)
        sizes = {"prompt_tokens": draw.randrange(200, 800), "output_tokens": draw.randrange(100, 1500)}
        arrivals.append(bench.Arrival(at_s=at_s, **sizes))
    return bench.Load(mode="open_loop", arrivals=tuple(arrivals), request_rate=rate, seed=seed)
