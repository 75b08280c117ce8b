"""Two engines in processes of their own: costs that `planning.calibrate` finds in half of their loads, and the others.

Each load is served three times. The stats of a Pairing after each of its steps, during every second load, give the
costs of steps. `simulate` makes the latencies of the other loads of them; what was seen is the median of three runs.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import attrs

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.stats import PairingStats
from pdinfer.testing.models import tiny_config_dict, write_checkpoint

SIZES = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 256}
LAYERS = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 128}
HEADS = {"q_lora_rank": 192, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
LIMITS: dict[str, Any] = {"chunked_prefill_size": 512, "max_running_requests": 32}
PAGES: dict[str, Any] = {"page_size": 16, "num_pages": 1500}
RATES, NUM_REQUESTS, NUM_RUNS = (1.0, 1.5, 2.0, 2.5), 10, 3


class Watched(pd.Pairing):
    """A Pairing that keeps its stats after each step."""

    told: list[PairingStats]

    def step(self) -> list[pd.TokenEvent]:
        events = super().step()
        self.told.append(self.stats)
        return events


def calibration() -> Iterator[dict[str, Any]]:
    """The errors on held-out steps, and what was predicted of the other loads over what was seen."""
    engine, cache = pd.EngineConfig(num_threads=1, **LIMITS), pd.CacheConfig(**PAGES)
    loads = [load_at(rate, seed) for seed, rate in enumerate(RATES)]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, tiny_config_dict(**SIZES, **LAYERS, **HEADS))
        spawns = pd.remote.spawn_prefill, pd.remote.spawn_decode
        ports = [spawn(folder, cache=cache, engine=engine, warm_up=True, progress=False) for spawn in spawns]
        with Watched(*ports) as pairing:
            told, seen = list[PairingStats](), [list[bench.Summary]() for _ in loads]
            for run in range(NUM_RUNS):  # loads in turns: a machine that grows slower is so for each of them
                for at, load in enumerate(loads):
                    pairing.told = []
                    # other prompts each time, or the pages of the last run would be found
                    seen[at].append(bench.run(pairing, attrs.evolve(load, seed=at + run * len(loads))))
                    told += pairing.told if at % 2 == 0 else []
    # a millisecond a row, and nothing that a step costs beside its rows: both are what is looked for
    cost = planning.calibrate(told, prior=(lambda rows: 1e-3 * rows.num_tokens, lambda rows: 1e-3 * rows.num_rows))
    yield {"held_out": {kind: round(error, 3) for kind, error in cost.errors.items()}, "flat": cost.flat}
    cluster = planning.cluster("1P1D", prefill_s=cost.prefill, decode_s=cost.decode, **LIMITS, **PAGES)
    for at in range(1, len(loads), 2):
        told_ms = planning.simulate(cluster, loads[at])
        for metric in ("mean_ttft_ms", "mean_tpot_ms"):
            predicted = getattr(told_ms, metric)
            median = statistics.median(getattr(run, metric) for run in seen[at])
            yield {
                "req_s": RATES[at],
                "metric": metric,
                "predicted": round(predicted, 2),
                "seen": round(median, 2),
                "ratio": round(predicted / median, 3),
                "asked": "within 12 %",
            }


def load_at(rate: float, seed: int) -> bench.Load:
    """Return a Poisson process of prompts that share nothing."""
    draw, at_s, arrivals = random.Random(seed), 0.0, list[bench.Arrival]()
    for _ in range(NUM_REQUESTS):
        at_s += draw.expovariate(rate)
        sizes = {"prompt_tokens": draw.randrange(50, 440), "output_tokens": draw.randrange(8, 48)}
        arrivals.append(bench.Arrival(at_s=at_s, **sizes))
    return bench.Load(mode="open_loop", arrivals=tuple(arrivals), request_rate=rate, seed=seed)
