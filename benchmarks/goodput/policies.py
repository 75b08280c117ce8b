"""Policies on real traces, simulated: the highest rate at which 90 % of the requests keep the SLO.

Engines: a prefill computes 14,000 tokens/s and 30 ms a step, in chunks of 8192, and caches 2 million tokens; a decode
step takes 20 ms, 0.1 ms per sequence and 20 ns per token of context, has 128 slots and room for 400,000 tokens; a link
carries 25 GB/s, 70,272 bytes a token, of which a tenth is left when the prefill ends, and 2 ms. SLO: TTFT within 2 s or
225 us per token of the prompt, whichever is more, which is 3 times what a prompt takes alone; TPOT within 50 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.planning import Change
from pdinfer.planning.simulation import Cluster
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape

PAGE_SIZE = 256
SLO = pd.bench.SLO(ttft_s=2.0, ttft_per_token_s=225e-6, tpot_s=0.05)


@attrs.frozen(kw_only=True)
class Setting:
    """A trace, a cluster and an SLO, and the factors by which `traffic_aware` must beat other policies."""

    trace: str
    num_requests: int | None
    shape: str
    rates: tuple[float, float]
    prefill_tokens_s: float = 14_000.0
    sequence_s: float = 1e-4
    slo: pd.bench.SLO = SLO
    changes: tuple[Change, ...] = ()
    factors: Mapping[str, float] = attrs.field(factory=dict)

    def cluster(self) -> Cluster:
        """Return the cluster as a value to simulate."""
        return planning.cluster(
            self.shape,
            prefill_s=lambda rows: 0.03 + rows.num_tokens / self.prefill_tokens_s,
            decode_s=lambda rows: 0.02 + self.sequence_s * rows.num_rows + 2e-8 * rows.num_context_tokens,
            prefill={"num_pages": 4000 * 512 // PAGE_SIZE},
            decode={"num_pages": 400_000 // PAGE_SIZE},
            page_size=PAGE_SIZE,
            chunked_prefill_size=8192,
            max_running_requests=128,
            bytes_per_s=25e9,
            token_bytes=70_272,
            num_pushes=10,
            latency_s=0.002,
            changes=self.changes,
        )


CONVERSATION, SYNTHETIC = "mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"
SETTINGS = {
    "conversation": Setting(
        trace=CONVERSATION,
        num_requests=6000,
        shape="4P4D",
        rates=(2.0, 7.0),
        factors={"least_tokens": 1.28, "round_robin": 1.48, "queued_and_uncached": 1.10, "cache_aware": 1.02},
    ),
    "synthetic": Setting(
        trace=SYNTHETIC,
        num_requests=None,
        shape="4P2D",
        rates=(2.0, 8.0),
        factors={"least_tokens": 1.55, "round_robin": 1.70, "queued_and_uncached": 1.02, "cache_aware": 0.98},
    ),
    "slow-prefill": Setting(
        trace=CONVERSATION,
        num_requests=4000,
        shape="4P4D",
        rates=(0.8, 6.0),
        changes=(Change(engine="P0", at_s=0.0, speed=0.5),),
        factors={"least_tokens": 1.15, "best": 1.0},
    ),
    "slow-decode": Setting(
        trace=CONVERSATION,
        num_requests=4000,
        shape="4P4D",
        rates=(0.8, 6.0),
        changes=(Change(engine="D0", at_s=0.0, speed=1 / 2.2),),
        factors={"best": 1.6},
    ),
    "azure": Setting(
        trace="azure_2023_conv.csv",
        num_requests=6000,
        shape="2P2D",
        rates=(2.0, 10.0),
        prefill_tokens_s=6000.0,
        sequence_s=3e-4,
        slo=pd.bench.SLO(ttft_s=1.0, tpot_s=0.04),
        factors={"best": 1.0},
    ),
}


def queued_and_uncached(
    shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]
) -> Choice | None:
    """Choose as Dynamo's router scores: the fewest queued and uncached tokens, and the fewest held ones."""
    if not prefills or not decodes:
        return None
    prefill = min(prefills, key=lambda load: sum(load.queued.num_tokens) - shape.found_tokens.get(load.address, 0))
    decode = min(decodes, key=lambda load: load.num_running_tokens + load.num_waiting_tokens)
    return Choice(prefill=prefill.address, decode=decode.address)


POLICIES: Mapping[str, pd.policy.Policy] = {
    "round_robin": pd.policy.round_robin,
    "least_tokens": pd.policy.least_tokens,
    "power_of_two": pd.policy.power_of_two,
    "queued_and_uncached": queued_and_uncached,
    "cache_aware": pd.policy.cache_aware,
    "traffic_aware": pd.policy.traffic_aware,
}


def policies(
    folder: Path, names: Sequence[str] = tuple(SETTINGS), *, num_requests: int | None = None, num_steps: int = 5
) -> Iterator[dict[str, Any]]:
    """The goodput of each policy in each setting, and whether `traffic_aware` beats the others by what is asked. With
    `num_requests`, only so many of a trace are sent, which takes less time and fills caches less."""
    for name in names:
        setting = SETTINGS[name]
        if num_requests is not None:
            setting = attrs.evolve(setting, num_requests=num_requests)
        found = {}
        for policy, choose in POLICIES.items():
            found[policy] = goodput(setting, folder, choose, num_steps=num_steps)
            yield {"setting": name, "num_requests": setting.num_requests, "policy": policy, **_told(found[policy])}
        rates = {policy: each.rate for policy, each in found.items()}
        won = rates.pop("traffic_aware")
        rates["best"] = max(rates.values())
        ratios = {rival: round(won / rates[rival], 3) for rival in (*setting.factors, "best")}
        yield {
            "setting": name,
            "num_requests": setting.num_requests,
            "ratios": ratios,
            "asked": dict(setting.factors),
            "met": all(ratios[rival] >= factor for rival, factor in setting.factors.items()),
            "at_least_097_of_the_best": ratios["best"] >= 0.97,
        }


def goodput(setting: Setting, folder: Path, policy: pd.policy.Policy, *, num_steps: int) -> bench.Goodput:
    """Bisect for the highest rate; seeds spread arrivals in the trace's bins."""
    cluster = setting.cluster()

    def run_at(rate: float, seed: int) -> bench.Summary:
        trace = trace_of(folder / setting.trace, seed)
        chosen = trace.arrivals[: setting.num_requests]
        natural = (len(chosen) - 1) / (chosen[-1].at_s - chosen[0].at_s)
        load = bench.replay(trace, speed=rate / natural, num_requests=setting.num_requests, seed=seed)
        return planning.simulate(cluster, load, policy=policy, slo=setting.slo, seed=seed)

    return bench.find_goodput(run_at, *setting.rates, num_steps=num_steps, max_seeds=3)


@cache
def trace_of(path: Path, seed: int) -> bench.Trace:
    """Return a trace whose bins are spread by a seed."""
    return bench.read_trace(path, seed=seed)


def _told(found: bench.Goodput) -> dict[str, Any]:
    at_rate = [trial.attainment.mean for trial in found.trials if trial.rate == found.rate]
    return {
        "goodput_req_s": round(found.rate, 3),
        "attainment": round(at_rate[0], 4) if at_rate else None,
        "num_runs": sum(trial.num_seeds for trial in found.trials),
    }
