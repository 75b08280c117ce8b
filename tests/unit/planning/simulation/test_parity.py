"""Real engines in virtual time and the simulation give the same run, to the microsecond."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.planning import Simulator, StepRows
from pdinfer.planning.simulation import Cluster
from tests.each_time import others_in_full
from tests.unit.planning.simulation.timed import Timed

Records = tuple[bench.Record, ...]


def prefill_s(rows: StepRows) -> float:
    return 0.004 + rows.num_tokens / 20_000 + 2e-9 * rows.num_pairs


def decode_s(rows: StepRows) -> Any:
    return 0.008 + 1e-7 * rows.num_context_tokens + 2e-4 * rows.num_rows


def cluster(shape: str, *, prefill_pages: int, decode_pages: int) -> Cluster:
    return planning.cluster(
        shape,
        prefill_s=prefill_s,
        decode_s=decode_s,
        page_size=16,
        prefill={"num_pages": prefill_pages, "chunked_prefill_size": 512},
        decode={"num_pages": decode_pages, "max_running_requests": 64},
    )


def conversations(load: bench.Load, *, block: int = 64, seed: int = 1) -> bench.Load:
    """Give every request the beginning of an earlier one of the same conversation, in blocks, and a tail of its own."""
    rng, num_names = np.random.default_rng(seed), 0
    known: list[list[int]] = [[] for _ in range(40)]
    arrivals = []
    for arrival in load.arrivals:
        blocks = known[rng.integers(len(known))]
        count = int(rng.integers(1, 4))
        blocks += range(num_names, num_names + count)
        num_names += count + 1
        if len(blocks) > 10:
            del blocks[1:]
        tail = int(rng.integers(1, block))
        arrivals.append(
            attrs.evolve(arrival, prompt_tokens=block * len(blocks) + tail, hash_ids=(*blocks, num_names - 1))
        )
    return attrs.evolve(load, arrivals=tuple(arrivals), block_tokens=block)


def assert_alike(real: Records, simulated: Records) -> None:
    """The same engines serve each request, and its host reads every token at the same time."""
    for one, other in zip(real, simulated, strict=True):
        assert (one.prefill, one.decode) == (other.prefill, other.decode), one.request_id
        assert one.read_s == pytest.approx(other.read_s, abs=1e-6), one.request_id
        assert (one.cached_tokens, one.num_retries) == (other.cached_tokens, other.num_retries), one.request_id


@pytest.mark.parametrize(
    ("shape", "rate", "num_requests"),
    [
        pytest.param("2P2D", 28.0, 60),
        pytest.param("2P2D", 28.0, 500, marks=pytest.mark.full),
        pytest.param("4P4D", 55.0, 500, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    "policy",
    others_in_full([pd.policy.round_robin, pd.policy.least_tokens, pd.policy.traffic_aware], [pd.policy.traffic_aware]),
)
def test_real_engines_and_simulated_ones_serve_alike(shape: str, rate: float, num_requests: int, policy: Any) -> None:
    lengths = {"prompt_tokens": (50, 900), "output_tokens": (20, 200)}
    load = conversations(bench.open_loop(rate, num_requests, **lengths))
    scarce = cluster(shape, prefill_pages=150, decode_pages=300)
    simulator = Simulator(scarce, load, policy=policy)
    simulated = simulator.run()
    real = Timed(scarce, load, policy=policy).run()
    assert sum(record.num_retries for record in simulated) > 0, "no pool was under pressure"
    assert sum(record.cached_tokens for record in simulated) > 0, "no prompt was found"
    assert_alike(real, simulated)


def test_unlike_prompts_and_full_pools_are_alike_too() -> None:
    load = bench.open_loop(28.0, 80, prompt_tokens=(50, 900), output_tokens=(20, 200))
    scarce = cluster("2P2D", prefill_pages=2000, decode_pages=450)
    simulated = Simulator(scarce, load, policy=pd.policy.least_tokens).run()
    assert_alike(Timed(scarce, load, policy=pd.policy.least_tokens).run(), simulated)


def test_priorities_are_alike_too() -> None:
    load = bench.open_loop(28.0, 80, prompt_tokens=(50, 900), output_tokens=(20, 200))
    load = attrs.evolve(
        load, arrivals=tuple(attrs.evolve(each, priority=at % 3) for at, each in enumerate(load.arrivals))
    )
    scarce = cluster("2P2D", prefill_pages=150, decode_pages=200)
    simulated = Simulator(scarce, load, policy=pd.policy.least_tokens).run()
    assert sum(record.num_retries for record in simulated) > 0, "no pool was under pressure"
    assert_alike(Timed(scarce, load, policy=pd.policy.least_tokens).run(), simulated)


def test_deadlines_end_the_same_requests_within_a_step() -> None:
    """An engine counts what is left of a deadline from the step that takes the request."""
    load = bench.open_loop(12.0, 60, prompt_tokens=(50, 900), output_tokens=(20, 200))
    arrivals = [
        attrs.evolve(arrival, priority=number % 3, deadline_s=(None, None, 1.2, 2.0)[number % 4])
        for number, arrival in enumerate(load.arrivals)
    ]
    load = attrs.evolve(load, arrivals=tuple(arrivals))
    scarce = cluster("2P2D", prefill_pages=150, decode_pages=160)
    simulated = Simulator(scarce, load, policy=pd.policy.least_tokens).run()
    real = Timed(scarce, load, policy=pd.policy.least_tokens).run()
    assert {record.outcome for record in simulated} == {"length", "deadline"}
    assert [record.outcome for record in real] == [record.outcome for record in simulated]
    for one, other in zip(real, simulated, strict=True):
        assert len(one.read_s) == pytest.approx(len(other.read_s), abs=1), one.request_id
