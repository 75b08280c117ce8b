"""The bench beside real engines: every request is recorded, and the stages of each sum to its TTFT."""

from __future__ import annotations

import json

import pytest

import pdinfer as pd
from pdinfer import bench
from pdinfer.testing import random_model
from tests.unit.bench.schema import problems

SLO = pd.bench.SLO(ttft_s=60.0, tpot_s=60.0)


def pairing(model: pd.Model) -> pd.Pairing:
    cache, engine = pd.CacheConfig(page_size=16, num_pages=128), pd.EngineConfig(num_threads=1)
    return pd.Pairing.local(model, cache=cache, engine=engine)


def test_a_run_over_real_engines_is_recorded_and_passes_its_checks() -> None:
    with pairing(random_model()) as served:
        load = bench.open_loop(40.0, 12, prompt_tokens=(8, 60), output_tokens=(1, 6), seed=2)
        summary = bench.run(served, load, slo=SLO, num_gpus=2)
    assert (summary.completed, summary.failed, summary.attainment) == (12, 0, 1.0)
    assert summary.total_output_tokens == sum(arrival.output_tokens for arrival in load.arrivals)
    assert summary.goodput_per_gpu == pytest.approx(summary.request_goodput / 2)
    assert {stage.name for stage in summary.stages} == set(bench.STAGES)
    assert sorted(use.role for use in summary.engines) == ["decode", "prefill"]
    assert all(use.num_requests == 12 for use in summary.engines)
    assert summary.findings == ()
    whole = bench.json_schema()
    schema = json.loads(whole)
    assert problems(json.loads(summary.to_json()), schema, schema) == []


def test_the_recorder_works_in_a_loop_of_the_hosts_own() -> None:
    recorder = bench.Recorder()
    with pairing(random_model()) as served:
        for length in (5, 33, 40):
            sampling = pd.SamplingParams(max_new_tokens=4, ignore_eos=True)
            recorder.sent(
                served.submit(pd.Request(prompt=tuple(range(1, length + 1)), sampling=sampling)), prompt_tokens=length
            )
        while served.num_unfinished:
            recorder.read(served.step())
    records = recorder.records()
    assert [record.output_tokens for record in records] == [4, 4, 4]
    for record in records:
        stages = record.stages()
        assert sum(stages.values()) == pytest.approx(record.ttft_s, abs=1e-3)
        assert record.prefill_began_s is not None
        assert record.prefill_ended_s is not None
        assert record.prefill_began_s <= record.prefill_ended_s <= record.token_s[0]
        assert stages["prefill"] > 0
        assert record.prefill is not None
        assert {"prefill_s", "step_s"} <= {name for name, _ in record.score}


def test_an_engine_that_is_lost_during_a_run_ends_it() -> None:
    def broken() -> list[pd.types.Event]:
        raise RuntimeError("gone")

    with pairing(random_model()) as served:
        decode = next(port for port in served.ports if isinstance(port, pd.DecodeEngine))
        decode.step = broken  # type: ignore[method-assign]
        summary = bench.run(served, bench.burst(3, prompt_tokens=8, output_tokens=4), slo=SLO, timeout_s=60.0)
    assert (summary.completed, summary.failed + summary.unfinished, summary.attainment) == (0, 3, 0.0)
    assert summary.findings[0].check == "failures"
