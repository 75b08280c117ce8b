"""Simulated requests come to the schedulers as what they are: new ones, streams that were moved, and by age."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdinfer.bench.traces import Arrival
from pdinfer.config import CacheConfig, EngineConfig
from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.deployment import EngineModel
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.pages import SimPages
from pdinfer.planning.simulation.prefill import Prefill
from pdinfer.planning.simulation.world import World

LINKS: Any = SimpleNamespace(backlog={})
MODEL = EngineModel(step_s=lambda rows: 0.0, engine=EngineConfig(), cache=CacheConfig(page_size=16))


def job_of(number: int, *, output: int = 0) -> Job:
    job = Job.of(number, Arrival(at_s=0.0, prompt_tokens=4, output_tokens=9), 0.0, 0.0, block_tokens=16)
    job.offset += output
    return job


def test_prompts_wait_at_prefill_by_age_behind_those_that_stream() -> None:
    world = World()
    prefill = Prefill(
        0, MODEL, SimPages(64), world, LINKS, landed=lambda _: None, stopped=lambda _: None, shares_pool=False
    )
    for number, (output, world.now_s) in enumerate([(0, 1.0), (0, 1.0), (2, 3.0), (0, 0.5), (2, 2.0)]):
        prefill.submit(job_of(number, output=output))
    assert [prompt.job.number for prompt in prefill.scheduler.queue] == [4, 2, 3, 0, 1]


def test_a_request_that_moves_to_another_decode_is_new_there_but_for_its_tokens() -> None:
    world, jobs = World(), [job_of(4), job_of(5), job_of(6, output=7)]
    decode = Decode(0, MODEL, SimPages(64), world, tell=lambda *_: None, abort=lambda _: None, shares_pool=False)
    for job, world.now_s in zip(jobs, (5.0, 4.0, 6.0), strict=True):
        job.attempts = job.num_taken_over = 2
        decode.submit(job)
    assert [(job.attempts, job.num_taken_over, job.submitted_at, job.arrival) for job in jobs] == [
        (0, 0, 5.0, 0),
        (0, 0, 4.0, 1),
        (0, 0, 6.0, 2),
    ]
    assert decode.scheduler.waiting == [jobs[2], jobs[1], jobs[0]]
