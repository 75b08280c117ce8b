"""Simulated engines queue requests in the order of real ones, those that come back and those that were moved too."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pdinfer as pd
from pdinfer.bench.traces import Arrival
from pdinfer.engine import sequence as real
from pdinfer.kv.prefix import PrefixChain
from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.pages import Pages
from pdinfer.planning.simulation.prefill import Prefill

CASES = [*itertools.product((0, 1), (0, 1, 7), (0.0, 3.0, 40.0), range(3))]
"""Attempts, tokens of output, when it was submitted, and its number among those that were."""


def job_of(attempts: int, output: int, submitted_at: float, number: int) -> Job:
    arrival = Arrival(at_s=0.0, prompt_tokens=4, output_tokens=9)
    return Job(
        number=number,
        arrival=arrival,
        intended_s=0.0,
        sent_s=0.0,
        block_tokens=16,
        attempts=attempts,
        num_tokens=4 + output,
        submitted_at=submitted_at,
        arrival_number=number,
    )


def request_of(output: int) -> pd.Request:
    return pd.Request(prompt=range(4), output=range(output))


def sequence_of(attempts: int, output: int, submitted_at: float, number: int) -> real.Sequence:
    request = request_of(output)
    return real.Sequence(
        request_id="r",
        request=request,
        writers=(),
        arrival=number,
        submitted_at=submitted_at,
        deadline_at=None,
        output=list(request.output),
        chain=PrefixChain(16, b""),
        attempts=attempts,
    )


def test_requests_wait_for_pages_in_the_order_of_an_engine() -> None:
    assert [job_of(*case).order for case in CASES] == [sequence_of(*case).order for case in CASES]


def test_prompts_wait_at_prefill_in_the_order_of_an_engine() -> None:
    nothing: Any = SimpleNamespace(max_total_tokens=None)
    model: Any = SimpleNamespace(engine=nothing, cache=SimpleNamespace(page_size=16))
    world: Any = SimpleNamespace(soon=lambda _: None)
    prefill = Prefill(0, model, Pages(64), world, shares_pool=False)
    rng, queue = random.Random(0), []
    for arrival in range(30):
        output, now_s = rng.choice([0, 2]), float(arrival // 3)
        grant: Any = SimpleNamespace(tokens=range(0))
        queue.append(real.Prompt(request_of(output), grant, arrival, now_s, num_pushed=0))
        prefill.submit(job_of(1, output, 0.0, arrival), now_s)
    expected = sorted(queue, key=lambda prompt: prompt.order)
    assert [prompt.order for prompt in prefill.queue] == [prompt.order for prompt in expected]


def test_a_request_that_moves_to_another_decode_is_new_there() -> None:
    config: Any = SimpleNamespace(max_total_tokens=None, growth_watermark=0.0)
    model: Any = SimpleNamespace(engine=config, cache=SimpleNamespace(page_size=16, trust_domain="all"))
    world: Any = SimpleNamespace(soon=lambda _: None)
    decode, job = Decode(0, model, Pages(64), world, shares_pool=False), job_of(2, 7, 0.0, 4)
    decode.submit(job, 5.0)
    assert (job.attempts, job.submitted_at, job.arrival_number) == (0, 5.0, 0)
