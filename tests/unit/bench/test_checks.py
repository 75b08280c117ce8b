"""The 10 checks, on the 93 rows of a study that prints figures of which 28 are none, and one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.bench import Summary, check
from pdinfer.bench.compare import ComparedRow
from pdinfer.bench.summary import EngineUse, Interval
from tests.each_time import others_in_full
from tests.unit.bench.study import WRONG, rows


def test_the_checks_flag_the_rows_of_the_study_that_are_none() -> None:
    found = rows()
    summaries = [summary for _, summary in found]
    flagged = [(row, check(summary, beside=summaries)) for row, summary in found]
    assert sum(row["class"] in WRONG for row, _ in flagged) == 28
    assert len(flagged) == 89
    missed = [(row["table"], row["row"]) for row, findings in flagged if row["class"] in WRONG and not findings]
    wrongly = [(row["table"], row["row"], str(f[0])) for row, f in flagged if row["class"] not in WRONG and f]
    assert len(missed) <= 2, missed
    assert len(wrongly) <= 4, wrongly


RUN = Summary(
    mode="open_loop",
    num_requests=100,
    completed=100,
    duration_s=50.0,
    total_input_tokens=5000,
    total_output_tokens=2000,
    max_output_tokens=20,
    request_throughput=2.0,
    input_throughput=100.0,
    output_throughput=40.0,
    total_token_throughput=140.0,
    concurrency=8.0,
    max_ttft_ms=500.0,
    p99_ttft_ms=400.0,
    min_tpot_ms=20.0,
    fastest_step_ms=20.0,
    p99_delivery_ms=5.0,
)
LONGER = msgspec.structs.replace(RUN, mode="burst", total_input_tokens=10_000, max_ttft_ms=1000.0)
INTERVAL = Interval(mean=1.0, low=0.1, high=1.9, cv=0.5)


def test_a_sound_run_passes() -> None:
    assert check(RUN, beside=[LONGER]) == ()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("identities", {"request_throughput": 2.02}),
        ("identities", {"input_throughput": 99.0}),
        ("identities", {"output_throughput": 41.0}),
        ("identities", {"total_token_throughput": 150.0}),
        ("identities", {"output_duration_s": -1.0}),
        ("decode floor", {"min_tpot_ms": 17.0}),
        ("decode floor", {"min_tpot_ms": None, "median_tpot_ms": 5.0}),
        ("single token", {"max_output_tokens": 1}),
        ("Little", {"mode": "closed_loop", "max_concurrency": 10.0}),
        ("delivery", {"p99_delivery_ms": 21.0}),
        ("monotone", {"mode": "burst", "max_ttft_ms": 2500.0}),
        ("repeats", {"num_repeats": 5, "intervals": {"mean_ttft_ms": INTERVAL}}),
        ("failures", {"completed": 98, "failed": 2, "request_throughput": 1.96}),
        ("Little", {"mean_e2el_ms": 40_000.0}),
        ("Little", {"mean_e2el_ms": 400.0}),
        ("order", {"median_ttft_ms": 401.0}),
        ("order", {"p95_e2el_ms": 2.0, "p99_e2el_ms": 1.0}),
        ("order", {"mean_ttft_ms": 501.0}),
        ("bounds", {"attainment": 1.01}),
        ("bounds", {"attainment": -0.01}),
        ("bounds", {"request_goodput": 2.1}),
        ("bounds", {"token_goodput": 41.0}),
        ("bounds", {"engines": (EngineUse(name="D0", role="decode", max_slots=1.5),)}),
        ("bounds", {"mean_e2el_ms": 50_100.0, "concurrency": None}),
        ("bounds", {"mean_e2el_ms": 4000.0, "mean_ttft_ms": 100.0, "max_tpot_ms": 30.0, "mean_output_tokens": 20.0}),
        ("bounds", {"mean_e2el_ms": 4000.0, "mean_ttft_ms": 4100.0, "max_ttft_ms": None}),
    ],
)
def test_each_check_bites(name: str, changes: dict[str, object]) -> None:
    (finding,) = check(msgspec.structs.replace(RUN, **changes), beside=[LONGER])  # type: ignore[arg-type]
    assert finding.check == name
    assert all((finding.expected, finding.found, finding.advice))


def simulated() -> Summary:
    cluster = planning.cluster(
        "1P1D", prefill_s=lambda rows: 0.01 + 1e-4 * rows.num_tokens, decode_s=lambda rows: 0.02 + 1e-3 * rows.num_rows
    )
    load = bench.open_loop(8.0, 200, prompt_tokens=(50, 400), output_tokens=(2, 60), seed=2)
    return planning.simulate(cluster, load, slo=bench.SLO(ttft_s=0.2, tpot_s=0.04))


@pytest.mark.parametrize(
    ("figure", "becomes"),
    [
        ("mean_e2el_ms", lambda run: run.mean_e2el_ms * 10),
        ("p99_ttft_ms", lambda run: run.median_ttft_ms / 2),
        ("p99_tpot_ms", lambda run: run.median_tpot_ms / 2),
        ("attainment", lambda run: 1.0001 + run.attainment),
    ],
)
def test_one_figure_that_cannot_be_is_found_in_a_sound_run_and_not_compared(
    figure: str, becomes: Callable[[Any], float]
) -> None:
    run = simulated()
    assert run.findings == check(run) == ()
    forged = msgspec.structs.replace(run, **{figure: becomes(run)})
    assert any(figure in finding.expected or finding.check == "Little" for finding in check(forged))
    with pytest.raises(pd.ConfigError, match="a check of the second failed"):
        bench.compare(run, forged)


@pytest.mark.parametrize("more", [{}, {"arrivals": "gamma", "cv": 4.0}, {"max_concurrency": 2}])
@pytest.mark.parametrize("rate", others_in_full([0.2, 5.0, 200.0], [5.0]))
def test_sound_open_loops_pass_however_they_end(rate: float, more: dict[str, Any]) -> None:
    """With much left at the end, with bursts, and with requests that wait to be sent."""
    cluster = planning.cluster("1P1D", prefill_s=lambda rows: 0.1, decode_s=lambda rows: 0.02)
    for seed in range(8):
        load = bench.open_loop(rate, 40, prompt_tokens=10, output_tokens=(1, 200), seed=seed, **more)
        assert planning.simulate(cluster, load, slo=bench.SLO(ttft_s=0.5)).findings == ()


def test_what_waits_to_be_sent_is_not_in_flight() -> None:
    waited = msgspec.structs.replace(RUN, request_rate=2.0, mean_e2el_ms=24_000.0, mean_slip_ms=20_000.0)
    assert check(waited) == ()
    assert check(msgspec.structs.replace(waited, mean_slip_ms=0.0)) != ()


def test_what_is_left_when_all_have_been_sent_may_be_everything() -> None:
    """100 requests are sent within 5 of 50 s, most of them late."""
    assert check(msgspec.structs.replace(RUN, request_rate=20.0, mean_e2el_ms=30_000.0)) == ()
    assert check(msgspec.structs.replace(RUN, request_rate=2.0, mean_e2el_ms=30_000.0)) != ()


def test_what_a_host_of_engines_may_take_is_no_fault_of_its_own() -> None:
    assert check(msgspec.structs.replace(RUN, p99_delivery_ms=60.0, max_step_ms=50.0)) == ()
    assert check(msgspec.structs.replace(RUN, p99_delivery_ms=80.0, max_step_ms=50.0)) != ()


def test_repeats_have_intervals_and_two_experiments_are_not_merged() -> None:
    runs = [msgspec.structs.replace(RUN, mean_ttft_ms=value) for value in (90.0, 100.0, 110.0)]
    merged = bench.merge(runs)
    found = merged.intervals["mean_ttft_ms"]
    assert (found.mean, found.low, found.high) == pytest.approx((100.0, 100 - 24.84, 100 + 24.84), abs=0.01)
    assert found.cv == pytest.approx(0.1)
    assert (merged.num_repeats, merged.num_requests, merged.findings) == (3, 300, ())
    with pytest.raises(pd.ConfigError, match="mode"):
        bench.merge([RUN, LONGER])


def test_two_experiments_are_not_compared() -> None:
    assert bench.compare(RUN, RUN).rows[0].is_distinct is None
    for changes, said in (
        ({"mode": "burst"}, "mode is"),
        ({"slo": {"ttft_s": 1.0}}, "slo is"),
        ({"environment": {"trace_sha256": "ab"}}, "traces differ"),
        ({"findings": check(msgspec.structs.replace(RUN, max_output_tokens=1))}, "a check of the second failed"),
    ):
        with pytest.raises(pd.ConfigError, match=said):
            bench.compare(RUN, msgspec.structs.replace(RUN, **changes))  # type: ignore[arg-type]


def test_figures_whose_intervals_overlap_are_not_ranked() -> None:
    def merged(*values: float) -> Summary:
        return bench.merge([msgspec.structs.replace(RUN, mean_ttft_ms=value) for value in values])

    def row(second: Summary) -> ComparedRow:
        compared = bench.compare(merged(100.0, 101.0, 102.0), second)
        return next(row for row in compared.rows if row.metric == "mean_ttft_ms")

    assert row(merged(150.0, 151.0, 152.0)).is_distinct is True
    assert row(merged(101.0, 102.0, 103.0)).is_distinct is False
