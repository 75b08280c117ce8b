"""One queue as a simulated cluster, and what the formulas of queues say of it."""

from __future__ import annotations

import numpy as np

from pdinfer import bench, planning
from pdinfer.bench.traces import Arrival
from pdinfer.planning import Simulator
from pdinfer.planning.simulation import Cluster

SERVICE_S = 0.01
MANY = 1 << 20


def one_queue() -> Cluster:
    """Return a prefill that serves one prompt at a time, SERVICE_S for 1000 tokens; all else takes no time."""
    return planning.cluster(
        "1P1D",
        prefill_s=lambda rows: rows.num_tokens * SERVICE_S / 1000,
        decode_s=lambda rows: 0.0,
        prefill={"max_running_requests": 1, "chunked_prefill_size": -1},
        decode={"max_running_requests": MANY},
        page_size=256,
        prefix_cache=False,
    )


def arriving(services: np.ndarray, rho: float, seed: int) -> bench.Load:
    """Return Poisson arrivals of prompts that take these shares of SERVICE_S."""
    times_s = np.cumsum(np.random.default_rng([seed, 7]).exponential(SERVICE_S / rho, len(services)))
    arrivals = tuple(
        Arrival(at_s=at_s, prompt_tokens=tokens, output_tokens=1)
        for at_s, tokens in zip(
            times_s.tolist(), np.maximum(1, np.rint(services * 1000)).astype(int).tolist(), strict=True
        )
    )
    return bench.Load(mode="open_loop", arrivals=arrivals)


def drawn(kind: str, count: int, seed: int) -> np.ndarray:
    """Return service times with a mean of 1."""
    rng = np.random.default_rng(seed)
    return {
        "M/D/1": lambda: np.ones(count),
        "M/M/1": lambda: rng.exponential(1.0, count),
        "M/G/1": lambda: rng.uniform(0.0, 2.0, count),
    }[kind]()


CV2 = {"M/D/1": 0.0, "M/M/1": 1.0, "M/G/1": 1 / 3}


def waited_s(kind: str, rho: float, *, num_requests: int, num_seeds: int = 1) -> tuple[float, float]:
    """Return the mean TTFT of simulated requests, and that of Pollaczek and Khinchine's formula."""
    means = []
    for seed in range(num_seeds):
        records = Simulator(one_queue(), arriving(drawn(kind, num_requests, seed), rho, seed)).run()
        means.append(np.mean([record.ttft_s for record in records]))
    return float(np.mean(means)), SERVICE_S * (1 + rho * (1 + CV2[kind]) / (2 * (1 - rho)))
