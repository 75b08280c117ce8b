"""Loads are sent when they are due, whoever is slow, and latency counts from then."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import attrs
import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.errors import ConfigError
from pdinfer.testing import VirtualClock
from tests.unit.bench.served import OneSlot

SLO = pd.bench.SLO(ttft_s=1.0, tpot_s=0.2)
DUE = bench.Arrival(at_s=1.0, prompt_tokens=4, output_tokens=2)
LATER = attrs.evolve(DUE, at_s=2.0)


def served(load: bench.Load, **options: object) -> tuple[bench.Summary, OneSlot]:
    clock = VirtualClock(50.0)
    pairing = OneSlot(clock, **options)  # type: ignore[arg-type]
    return bench.run(pairing, load, slo=SLO, clock=clock), pairing


@pytest.mark.parametrize("max_concurrency", [None, 1])
def test_waiting_before_a_send_is_part_of_latency(max_concurrency: int | None) -> None:
    """Constant 10 requests/s, 0.5 s each, one at a time: a tool that starts its clock at the send says 0.5 s."""
    load = bench.open_loop(
        10.0, 8, prompt_tokens=4, output_tokens=5, arrivals="constant", max_concurrency=max_concurrency
    )
    summary, _ = served(load)
    assert summary.mean_e2el_ms == pytest.approx(1900.0, rel=1e-3)
    assert summary.duration_s == pytest.approx(4.0, rel=1e-3)
    assert summary.request_throughput == pytest.approx(2.0, rel=1e-3)
    slip = summary.max_slip_ms
    assert slip == pytest.approx(0.0 if max_concurrency is None else 2800.0, abs=1.0)


def test_a_host_that_sleeps_shows_slip_and_delivery_and_not_speed() -> None:
    load = bench.open_loop(4.0, 12, prompt_tokens=4, output_tokens=2, arrivals="constant")
    quiet, _ = served(load, step_s=0.05)
    slept, pairing = served(load, step_s=0.05, sleep_s=0.5, sleeps_at=[50.9])
    assert pairing.sleeps_at == []
    assert (quiet.max_slip_ms, quiet.max_delivery_ms) == pytest.approx((0.0, 0.0), abs=1.0)
    assert slept.max_slip_ms == pytest.approx(400.0, abs=60.0)
    assert slept.mean_e2el_ms > quiet.mean_e2el_ms
    assert slept.request_throughput == pytest.approx(quiet.request_throughput, rel=1e-3)


def test_tokens_that_a_sleeping_host_reads_late_are_delivered_late() -> None:
    load = bench.burst(1, prompt_tokens=4, output_tokens=20)
    summary, _ = served(load, step_s=0.05, sleep_s=0.5, sleeps_at=[50.05])
    assert summary.max_delivery_ms == pytest.approx(450.0, abs=10.0)
    assert summary.fastest_step_ms == pytest.approx(50.0)
    assert {finding.check for finding in summary.findings} >= {"delivery", "decode floor"}


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    summary, _ = served(bench.closed_loop(3, 30, prompt_tokens=4, output_tokens=3))
    assert summary.concurrency == pytest.approx(3.0, rel=0.05)
    assert summary.duration_s == pytest.approx(30 * 0.3, rel=1e-3)
    assert summary.mean_e2el_ms == pytest.approx(900.0, rel=0.1)
    assert summary.findings == ()


def test_the_clients_of_a_closed_loop_start_within_the_ramp() -> None:
    load = bench.closed_loop(4, 8, prompt_tokens=4, output_tokens=1, ramp_s=2.0)
    assert [arrival.at_s for arrival in load.arrivals[:4]] == [0.0, 0.5, 1.0, 1.5]


def test_an_engine_that_dies_ends_the_run_and_its_requests_are_misses() -> None:
    summary, _ = served(bench.open_loop(4.0, 8, prompt_tokens=4, output_tokens=2, arrivals="constant"), dies_at=51.0)
    assert (summary.num_requests, summary.completed + summary.failed, summary.unfinished) == (8, 8, 0)
    assert summary.failed >= 4
    assert summary.attainment == summary.completed / 8
    assert str(summary).startswith("CHECK FAILED  failures")
    assert "censored" in str(summary)


def test_silence_ends_a_run_and_what_is_unfinished_is_cancelled() -> None:
    clock = VirtualClock()
    pairing = OneSlot(clock, prefill_s=1e6)
    summary = bench.run(pairing, bench.burst(3, prompt_tokens=4, output_tokens=2), slo=SLO, timeout_s=5, clock=clock)
    assert (summary.completed, summary.unfinished, summary.attainment) == (0, 3, 0.0)
    assert len(pairing.cancelled) == 3
    assert summary.mean_ttft_ms is None


def test_what_is_raised_while_a_run_goes_on_ends_its_requests() -> None:
    clock = VirtualClock()
    pairing = OneSlot(clock)

    def stop(ended: int, requests: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(pairing, bench.burst(3, prompt_tokens=4, output_tokens=2), progress=stop, clock=clock)
    assert len(pairing.cancelled) == 2


@pytest.mark.parametrize(
    "times", [[5.0] * 9999, [math.nan] * 9999, range(0, -9999, -1)], ids=["stands", "says nothing", "goes back"]
)
def test_a_clock_that_does_not_go_on_ends_the_run(times: Sequence[float]) -> None:
    """Nothing more would be due by it, and no silence too long. It ends itself, so that a run that goes on fails."""
    load = bench.open_loop(4.0, 8, prompt_tokens=4, output_tokens=2)
    with pytest.raises(ConfigError, match=r"the clock did not go on in 100 waits, .* give the clock of the Pairing"):
        bench.run(OneSlot(VirtualClock()), load, clock=iter(times).__next__)


def test_a_name_that_json_cannot_have_is_refused_before_anything_is_sent() -> None:
    pairing, load = OneSlot(VirtualClock()), bench.burst(3, prompt_tokens=4, output_tokens=2)
    cluster = planning.cluster("1P1D", prefill_s=lambda rows: 1.0, decode_s=lambda rows: 1.0)
    for call in (
        lambda: bench.run(pairing, load, name="\ud800"),
        lambda: planning.simulate(cluster, load, name="\ud800"),
    ):
        with pytest.raises(ConfigError, match=r"cannot be written as JSON: .*surrogates not allowed; give plain text"):
            call()
    with pytest.raises(ConfigError, match=r"Expected `str`, got `int` - at `\$.notes"):
        bench.run(pairing, attrs.evolve(load, notes=(5,)))
    assert not pairing.events


def test_prompts_share_exactly_the_blocks_whose_hashes_they_share() -> None:
    hashes = [(0, 1, 2), (0, 1, 3), (0, 4), (5,), (0, 1, 2)]
    arrivals = tuple(
        bench.Arrival(at_s=0.0, prompt_tokens=512 * len(ids) - 100, output_tokens=1, hash_ids=ids) for ids in hashes
    )
    maker = bench.PromptMaker(300, seed=3)
    prompts = [maker.prompt(arrival) for arrival in arrivals]
    assert [len(prompt) for prompt in prompts] == [arrival.prompt_tokens for arrival in arrivals]

    def shared(one: int, other: int) -> int:
        pairs = zip(prompts[one], prompts[other], strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), len(prompts[one]))

    assert (shared(0, 1), shared(0, 2), shared(0, 3), shared(0, 4)) == (1024, 512, 0, 512 * 3 - 100)
    alone = [maker.prompt(bench.Arrival(at_s=0.0, prompt_tokens=9, output_tokens=1)) for _ in range(20)]
    assert len({prompt[0] for prompt in alone}) == 20
    assert all(0 <= token < 300 for prompt in prompts for token in prompt)
    small = bench.Trace(
        name="", format="", sha256="", arrivals=(attrs.evolve(DUE, prompt_tokens=9, hash_ids=(1, 2)),), block_tokens=8
    )
    for load in (bench.replay(small), bench.burst(3, prompt_tokens=small, output_tokens=small)):
        assert load.block_tokens == 8


def test_goodput_is_bisected_over_seeds() -> None:
    asked: list[tuple[float, int]] = []

    def run_at(rate: float, seed: int) -> bench.Summary:
        asked.append((rate, seed))
        return bench.Summary(attainment=1.0 if rate <= 5.0 else 0.5)

    found = bench.find_goodput(run_at, 1.0, 9.0, num_steps=8)
    assert found.rate == pytest.approx(5.0, abs=0.05)
    assert found.upper is not None
    assert found.upper > 5.0
    assert {seed for _, seed in asked} == {0, 1, 2}
    assert bench.find_goodput(run_at, 1.0, 4.0).upper is None
    assert bench.find_goodput(run_at, 6.0, 9.0).rate == 0.0
    with pytest.raises(pd.ConfigError, match="0 < low < high"):
        bench.find_goodput(run_at, 3.0, 2.0)
    with pytest.raises(pd.ConfigError, match="run_at must return the Summary of a run, got None"):
        bench.find_goodput(lambda rate, seed: None, 1.0, 2.0)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("num_gpus", [0, -8])
def test_nothing_runs_on_no_gpu(num_gpus: int) -> None:
    """It is refused before anything runs, and goodput per GPU is never negative."""
    load = bench.burst(1, prompt_tokens=1, output_tokens=1)
    cluster = planning.cluster("1P1D", prefill_s=lambda rows: 1.0, decode_s=lambda rows: 1.0)
    for call in (
        lambda: bench.summarize([], num_gpus=num_gpus),
        lambda: planning.simulate(cluster, load, num_gpus=num_gpus),
        lambda: bench.run(OneSlot(VirtualClock()), load, num_gpus=num_gpus),
    ):
        with pytest.raises(pd.ConfigError, match=f"num_gpus must be an int of at least 1, got {num_gpus}"):
            call()


@pytest.mark.parametrize(
    ("ttft_s", "rate", "said"),
    [
        (0.05, 0.0, "cannot be met at any rate"),  # a prompt alone takes 0.1 s
        (0.11, 1.0, ""),  # a prompt that meets no other keeps it: nine of ten at a load of a tenth
    ],
)
def test_a_search_goes_on_below_where_any_rate_could_keep_the_slo(ttft_s: float, rate: float, said: str) -> None:
    cluster = planning.cluster("1P1D", prefill_s=lambda rows: 0.1, decode_s=lambda rows: 0.0)

    def run_at(rate: float, seed: int) -> bench.Summary:
        load = bench.open_loop(rate, 100, prompt_tokens=8, output_tokens=4, seed=seed)
        return planning.simulate(cluster, load, slo=bench.SLO(ttft_s=ttft_s))

    found = bench.find_goodput(run_at, 8.0, 20.0)
    assert said in found.reason
    assert bool(said) == bool(found.reason)
    assert found.rate == pytest.approx(rate, rel=0.25)
    assert found.upper == (8.0 if said else pytest.approx(1.1 * rate, rel=0.2))
    assert found.trials[2].rate < 1.0


def test_a_search_that_cannot_know_advises_a_lower_rate() -> None:
    found = bench.find_goodput(lambda rate, seed: bench.Summary(attainment=0.0), 1.0, 2.0)
    assert "try a lower `low`" in found.reason
    assert bench.find_goodput(lambda rate, seed: bench.Summary(attainment=1.0), 1.0, 2.0).reason == ""
    crowded = bench.find_goodput(lambda rate, seed: bench.Summary(attainment=0.0, concurrency=2.0), 1.0, 2.0)
    assert "2 requests are in flight" in crowded.reason


def test_an_attainment_that_is_no_share_is_refused() -> None:
    with pytest.raises(pd.ConfigError, match=r"attainment of 1\.5"):
        bench.find_goodput(lambda rate, seed: bench.Summary(attainment=1.5), 1.0, 2.0)


def test_seeds_are_added_while_the_interval_holds_the_target() -> None:
    figures = [0.8, 1.0, 0.89, 0.95, 0.85, 0.99]
    found = bench.find_goodput(lambda _, seed: bench.Summary(attainment=figures[seed]), 1.0, 2.0)
    assert found.trials[0].num_seeds == 6


@pytest.mark.parametrize(("cv", "arrivals"), [(1.0, "poisson"), (0.0, "constant"), (2.0, "gamma")])
def test_an_open_loop_has_the_rate_and_the_spread_that_were_asked_for(cv: float, arrivals: str) -> None:
    load = bench.open_loop(8.0, 20_000, prompt_tokens=(3, 9), output_tokens=1, arrivals=arrivals, cv=cv or 1.0, seed=4)
    times = [arrival.at_s for arrival in load.arrivals]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert spread / mean == pytest.approx(cv, rel=0.1, abs=1e-9)
    assert {arrival.prompt_tokens for arrival in load.arrivals} == set(range(3, 10))
    again = bench.open_loop(8.0, 20_000, prompt_tokens=(3, 9), output_tokens=1, arrivals=arrivals, cv=cv or 1.0, seed=4)
    assert load == again


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: bench.burst(0, prompt_tokens=1, output_tokens=1), "num_requests"),
        (lambda: bench.burst(1, prompt_tokens=0, output_tokens=1), "prompt_tokens"),
        (lambda: bench.burst(1, prompt_tokens=(4, 3), output_tokens=1), "prompt_tokens"),
        (lambda: bench.open_loop(float("nan"), 2, prompt_tokens=1, output_tokens=1), "request_rate"),
        (lambda: bench.open_loop(1.0, 2, prompt_tokens=1, output_tokens=1, arrivals="pareto"), "arrivals"),
        (lambda: bench.open_loop(1.0, 2, prompt_tokens=1, output_tokens=1, seed=-1), "seed must be an int from 0"),
        (
            lambda: bench.replay(bench.Trace(name="", format="", sha256="", arrivals=(DUE,)), seed=-1),
            "seed must be an int from 0",
        ),
        (lambda: bench.Trace(name="a.csv", format="csv", sha256="", arrivals=()), r"trace 'a.csv' has no request"),
        (lambda: attrs.evolve(DUE, at_s=math.nan), "at_s must be a finite number, at least 0"),
        (lambda: attrs.evolve(DUE, at_s=-1.0), "at_s must be a finite number, at least 0"),
        (lambda: attrs.evolve(DUE, prompt_tokens=0), "prompt_tokens must be an int from 1"),
        (lambda: attrs.evolve(DUE, output_tokens=0), "output_tokens must be an int from 1"),
        (lambda: attrs.evolve(DUE, output_tokens=1.5), "output_tokens must be an int from 1"),
        (lambda: attrs.evolve(DUE, priority="high"), "priority must be an int"),
        (lambda: attrs.evolve(DUE, deadline_s=-1.0), "deadline_s must be a finite number"),
        (lambda: bench.Load(mode="poisson", arrivals=(DUE,)), "mode must be one of burst, closed_loop, "),
        (lambda: bench.Load(mode="burst", arrivals=[1]), "a load has a tuple of arrivals, got"),  # type: ignore[arg-type]
        (lambda: bench.Load(mode="replay", arrivals=(LATER, DUE)), "arrivals go back from 2 s to 1 s; sort them"),
        (lambda: bench.Load(mode="closed_loop", arrivals=(DUE,)), "max_concurrency of a closed loop must be an int"),
        (lambda: bench.Load(mode="burst", arrivals=(DUE,), max_concurrency=0), "max_concurrency must be an int from 1"),
        (lambda: bench.Load(mode="burst", arrivals=(DUE,), block_tokens=0), "block_tokens must be an int from 1"),
        (lambda: attrs.evolve(DUE, hash_ids=(-1,)), "hash_ids must be a tuple of ints from 0"),
        (lambda: attrs.evolve(DUE, hash_ids=("a",)), "hash_ids must be a tuple of ints from 0"),
        (
            lambda: bench.Load(mode="burst", arrivals=(attrs.evolve(DUE, hash_ids=(1, 2)),)),
            "one for each block, or none",
        ),
        (lambda: bench.PromptMaker(9).prompt(attrs.evolve(DUE, hash_ids=(1, 2))), "one for each block, or none"),
        (lambda: bench.PromptMaker(9, block_tokens=0), "block_tokens must be an int from 1"),
        (lambda: bench.PromptMaker(9, seed=-1), "seed must be an int from 0"),
        (lambda: bench.Trace(name="", format="", sha256="", arrivals=(5,)), "a trace has a tuple of arrivals, got"),  # type: ignore[arg-type]
        (lambda: bench.open_loop(1.0, 2, prompt_tokens=1, output_tokens=1, cv=1e-300), "cv must be from 1e-06 to 1e"),
        (lambda: bench.open_loop(1.0, 2, prompt_tokens=1, output_tokens=1, cv=1e155), "cv must be from 1e-06 to 1e"),
        (lambda: bench.open_loop(1e-300, 2, prompt_tokens=1, output_tokens=1), "at_s must be a finite number"),
        (lambda: bench.closed_loop(0, 2, prompt_tokens=1, output_tokens=1), "concurrency"),
        (pd.bench.SLO, "needs a limit"),
        (lambda: pd.bench.SLO(ttft_s=-1.0), "ttft_s"),
    ],
)
def test_a_load_that_cannot_be_is_refused(wrong: object, said: str) -> None:
    with pytest.raises(pd.ConfigError, match=said):
        wrong()  # type: ignore[operator]


def test_an_slo_gives_long_prompts_more_time() -> None:
    slo = pd.bench.SLO(ttft_s=2.0, ttft_per_token_s=0.001)
    assert (slo.ttft_limit_s(100), slo.ttft_limit_s(5000)) == (2.0, 5.0)
