"""Plots: columns by hand, what is censored and left out is said, and drawings are the same each time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pdinfer as pd
from pdinfer import bench
from pdinfer.bench import plots
from pdinfer.bench.summary import EngineUse, Finding, Interval
from pdinfer.testing import VirtualClock
from tests.slices import one_in
from tests.unit.bench.served import OneSlot

SLO = pd.bench.SLO(ttft_s=0.5, tpot_s=0.1)


def record(
    number: int,
    *,
    ttft_s: float = 0.4,
    count: int = 3,
    outcome: str = "length",
    prompt_tokens: int = 100,
    prefill: str = "p0",
    decode: str = "d0",
) -> bench.Record:
    """Due at `number`, chosen 0.1 s later, computed 0.1 s before its first token, then a token each 0.05 s."""
    due_s = float(number)
    read_s = tuple(due_s + ttft_s + at * 0.05 for at in range(count))
    return bench.Record(
        request_id=str(number),
        intended_s=due_s,
        sent_s=due_s,
        prompt_tokens=prompt_tokens,
        outcome=outcome,
        chosen_s=due_s + 0.1,
        prefill_ended_s=read_s[0] - 0.1 if read_s else None,
        token_s=read_s,
        read_s=read_s,
        ended_s=read_s[-1] if read_s else None,
        prefill=prefill,
        decode=decode,
    )


FAILED = record(9, count=0, outcome="failed")
HALF = record(8, ttft_s=0.1, outcome="failed")  # failed after three tokens


def summary(**fields: Any) -> bench.Summary:
    figures = {"output_throughput": 100.0, "median_tpot_ms": 20.0, "request_goodput": 2.0, "concurrency": 4.0}
    return bench.Summary(**{**figures, **fields})


def listed(plot: plots.Plot) -> dict[str, list[Any]]:
    return {name: column.tolist() for name, column in plot.columns.items()}


def test_requests_that_did_not_complete_keep_the_curve_below_1() -> None:
    runs = {
        "before": [record(0, ttft_s=0.4), record(0, ttft_s=0.2), record(0, ttft_s=0.4), HALF, FAILED],
        "after": [record(0, ttft_s=0.3)],
    }
    plot = plots.latency_cdf(runs, slo=SLO)
    assert listed(plot)["run"] == ["before"] * 3 + ["after"]
    assert plot.columns["ttft_s"] == pytest.approx([0.2, 0.4, 0.4, 0.3])
    assert plot.columns["share"] == pytest.approx([0.2, 0.6, 0.6, 1.0])
    assert plot.notes == ("before: 2 of 5 requests did not complete",)


def test_each_latency_has_its_curve() -> None:
    records = [record(0), record(1, count=1), FAILED]
    assert plots.latency_cdf(records, "e2e").columns["e2e_s"] == pytest.approx([0.4, 0.5])
    for metric in ("tpot", "itl_p99"):  # one token has no gap, and is no miss either
        plot = plots.latency_cdf(records, metric)
        assert plot.columns[f"{metric}_s"] == pytest.approx([0.05])
        assert plot.columns["share"] == pytest.approx([0.5])
    with pytest.raises(pd.ConfigError, match="metric is one of ttft, tpot"):
        plots.latency_cdf(records, "speed")


def test_load_is_what_each_engine_held_on_average() -> None:
    records = [
        record(0, ttft_s=1.1, prefill="p0"),  # at p0 from 0.1 to 1.0
        record(1, ttft_s=2.1, prefill="p0", prompt_tokens=300),  # at p0 from 1.1 to 3.0
        record(2, ttft_s=2.1, prefill="p1"),  # at p1 from 2.1 to 4.0
        FAILED,
    ]
    uses = [EngineUse(name="p2", role="prefill"), EngineUse(name="d1", role="decode")]
    plot = plots.load_per_engine({"blind": records}, engines=uses, num_points=4)
    assert listed(plot)["engine"] == ["p0"] * 4 + ["p1"] * 4 + ["p2"] * 4
    assert plot.columns["at_s"][:4] == pytest.approx([0.5, 1.5, 2.5, 3.5])
    assert plot.columns["requests"] == pytest.approx([0.9, 0.9, 1.0, 0.0, 0.0, 0.0, 0.9, 1.0, 0, 0, 0, 0])
    assert plot.columns["prompt_tokens"][:4] == pytest.approx([90, 270, 300, 0], abs=1e-6)
    assert plot.notes == ("blind: left out: 1 of 4 requests, whose time at prefill is unknown",)


@pytest.mark.parametrize("num_points", [1, 3, 50])
def test_load_over_time_has_all_the_time_that_requests_spent(num_points: int) -> None:
    records = [record(at % 7, ttft_s=0.3 + 0.1 * (at % 5), decode=f"d{at % 3}") for at in range(40)]
    plot = plots.load_per_engine(records, "decode", num_points=num_points)
    spent_s = sum(one.token_s[-1] - one.chosen_s for one in records if one.chosen_s is not None)
    width_s = max(one.token_s[-1] for one in records) / num_points
    assert plot.columns["requests"].sum() * width_s == pytest.approx(spent_s)
    assert plot.columns["prompt_tokens"].sum() == pytest.approx(100 * plot.columns["requests"].sum())


def test_throughput_over_concurrency_is_sorted_by_what_was_held() -> None:
    sweep = [
        summary(concurrency=7.5, max_concurrency=8.0, output_throughput=300.0),
        summary(concurrency=None, max_concurrency=2.0),  # as other tools tell it
        summary(median_tpot_ms=None),
    ]
    plot = plots.over_concurrency({"P1D1": sweep})
    assert listed(plot) == {
        "run": ["P1D1", "P1D1"],
        "concurrency": [2.0, 7.5],
        "output_throughput": [100.0, 300.0],
        "median_tpot_ms": [20.0, 20.0],
    }
    assert plot.notes == ("P1D1: left out: 1 of 3 summaries, which lack these figures",)


def test_stages_follow_each_other_and_end_at_ttft() -> None:
    whole = bench.summarize([record(0), record(1, ttft_s=0.8)], slo=SLO)
    plot = plots.stage_waterfall(whole)
    assert listed(plot)["stage"] == list(bench.STAGES)
    assert plot.columns["began_ms"][0] == 0
    assert plot.columns["began_ms"][1:] == pytest.approx(np.cumsum(plot.columns["mean_ms"])[:-1])
    assert plot.columns["began_ms"][-1] + plot.columns["mean_ms"][-1] == pytest.approx(whole.mean_ttft_ms)
    two = plots.stage_waterfall({"a": bench.merge([whole, whole]), "b": summary()})
    assert set(listed(two)["run"]) == {"a"}
    assert two.notes == (
        "a: stages are those of the first of 2 repeats",
        "b: left out: 1 of 1 summaries, which lack these figures",
    )
    with pytest.raises(pd.ConfigError, match="one summary per name, got 2"):
        plots.stage_waterfall([whole, whole])


def test_the_frontier_is_what_no_other_run_beats() -> None:
    def point(tpot_ms: float, goodput: float, num_gpus: int = 2) -> bench.Summary:
        return summary(median_tpot_ms=tpot_ms, request_goodput=goodput, goodput_per_gpu=goodput / num_gpus)

    runs = {"P1D1": [point(20, 4), point(10, 2), point(40, 3)], "P2D2": [point(10, 8, 4), summary(median_tpot_ms=0.0)]}
    assert "goodput_per_gpu" not in plots.goodput_frontier(runs).columns
    runs["P2D2"].pop()
    plot = plots.goodput_frontier(runs)
    assert listed(plot) == {
        "run": ["P1D1", "P1D1", "P1D1", "P2D2"],
        "tokens_per_s_per_user": [25.0, 50.0, 100.0, 100.0],
        "goodput_per_gpu": [1.5, 2.0, 1.0, 2.0],
        "is_on_frontier": [False, False, False, True],
    }
    alike = plots.goodput_frontier([point(20, 4), point(20, 4)])
    assert listed(alike)["is_on_frontier"] == [True, True]


def test_a_prediction_stands_beside_what_was_observed() -> None:
    sure = Interval(mean=100.0, low=90.0, high=110.0, cv=0.1)
    rough: dict[str, Any] = {"time_resolution_ms": 100.0}
    measured = [summary(**rough, median_ttft_ms=100.0, p99_ttft_ms=0.0, intervals={"median_ttft_ms": sure})] * 2
    simulated = [
        summary(**rough, median_ttft_ms=ttft_ms, p99_ttft_ms=59.0, source="simulated") for ttft_ms in (90.0, 120.0)
    ]
    plot = plots.predicted_against_observed(simulated, measured)
    assert listed(plot) == {
        "experiment": [0, 0, 1, 1],
        "metric": ["median_ttft_ms", "median_tpot_ms"] * 2,
        "predicted": [90.0, 20.0, 120.0, 20.0],
        "observed": [100.0, 20.0, 100.0, 20.0],
        "observed_low": [90.0, 20.0, 90.0, 20.0],
        "observed_high": [110.0, 20.0, 110.0, 20.0],
        "ratio": [0.9, 1.0, 1.2, 1.0],
    }
    assert plot.notes == ("left out: 4 of 8 figures, which one side lacks, or observed as 0",)
    assert listed(plots.predicted_against_observed(measured[0], measured[0], ["request_goodput"]))["ratio"] == [1.0]


def test_a_prediction_of_another_experiment_is_refused() -> None:
    failed = Finding(check="Little", expected="8", found="6", advice="look")
    with pytest.raises(pd.ConfigError, match="request_rate is"):
        plots.predicted_against_observed(summary(request_rate=1.0), summary(request_rate=2.0))
    with pytest.raises(pd.ConfigError, match="Little"):
        plots.predicted_against_observed(summary(), summary(findings=(failed,)))
    with pytest.raises(pd.ConfigError, match="got 1 and 2 summaries"):
        plots.predicted_against_observed(summary(), [summary()] * 2)
    for metrics in (["attainment", "p99_ttft_ms"], ["p98_ttft_ms"], []):
        with pytest.raises(pd.ConfigError, match="of one unit"):
            plots.predicted_against_observed(summary(), summary(), metrics)


def test_checks_that_failed_stand_on_every_plot_of_a_run() -> None:
    failed = Finding(check="Little", expected="8", found="6", advice="look")
    one = summary(findings=(failed, failed))
    for plot in (plots.over_concurrency([one, one]), plots.stage_waterfall(one), plots.goodput_frontier({"": [one]})):
        assert "failed checks: Little" in plot.notes


MAKERS: dict[str, Callable[[Any], plots.Plot]] = {
    "cdf": lambda runs: plots.latency_cdf(runs, slo=pd.bench.SLO(ttft_per_token_s=0.01)),
    "prefill": plots.load_per_engine,
    "decode": lambda runs: plots.load_per_engine(runs, "decode"),
    "concurrency": plots.over_concurrency,
    "waterfall": plots.stage_waterfall,
    "frontier": plots.goodput_frontier,
    "predicted": lambda runs: plots.predicted_against_observed(list(runs.values()), list(runs.values())),
}
OF_RECORDS = ("cdf", "prefill", "decode")


def runs_of(kind: str, records: Sequence[Sequence[bench.Record]]) -> dict[str, Any]:
    """Runs for a kind of plot: records, or their summaries."""
    if kind in OF_RECORDS:
        return {f"run {at}, $": one for at, one in enumerate(records)}
    made = [msgspec.structs.replace(bench.summarize(one, slo=SLO), findings=()) for one in records]
    return {f"run {at}, $": one for at, one in enumerate(made)}


MANY = [record(at, ttft_s=0.1 + 0.02 * at, prefill=f"p{at % 9}", prompt_tokens=10 * at + 1) for at in range(20)]
INPUTS = {"nothing": [], "one": [[record(0)]], "failed": [[FAILED]], "empty": [[]]}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("records", INPUTS.values(), ids=INPUTS)
def test_whatever_came_makes_columns_and_is_drawn(kind: str, records: Any) -> None:
    pytest.importorskip("matplotlib")
    plot = MAKERS[kind](runs_of(kind, records))
    assert len({len(column) for column in plot.columns.values()}) == 1
    assert all(np.isfinite(column).all() for column in plot.columns.values() if column.dtype.kind == "f")
    assert len(plot.draw().axes) == plot.num_panels


@pytest.mark.parametrize("kind", one_in(3, MAKERS))
def test_equal_columns_give_equal_files(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = []
    for name in ("a.svg", "b.svg"):
        plot = MAKERS[kind](runs_of(kind, [MANY, [*MANY, FAILED]]))
        plot.draw(tmp_path / name)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert b"<dc:date>" not in written[0]
    assert (b"run 1, $" in written[0]) == (kind != "predicted")
    for note in plot.notes:
        assert note[:20].encode() in written[0]


def test_the_drawing_shows_the_limit_and_the_censored_tail() -> None:
    pytest.importorskip("matplotlib")
    plot = plots.latency_cdf({"whole": [record(0)], "half": [record(0), FAILED]}, slo=SLO)
    (panel,) = plot.draw().axes
    assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "SLO"] == [0.5]
    tails = [line for line in panel.lines if len(line.get_xdata()) == 2 and line.get_xdata()[1] == panel.get_xlim()[1]]
    assert [(line.get_ydata()[1], line.get_linestyle()) for line in tails] == [(1.0, "-"), (0.5, ":")]


def test_a_time_of_0_is_no_obstacle_to_logarithms() -> None:
    pytest.importorskip("matplotlib")
    predicted, observed = (summary(p99_tpot_ms=tpot_ms, time_resolution_ms=20.0) for tpot_ms in (0.0, 4.0))
    plot = plots.predicted_against_observed(predicted, observed)
    assert listed(plot)["ratio"] == [1.0, 0.0]
    (panel,) = plot.draw().axes
    assert panel.get_xlim() == panel.get_ylim() == pytest.approx((2.5, 32.0))


def test_limits_that_depend_on_the_prompt_are_two() -> None:
    pytest.importorskip("matplotlib")
    records = [record(at, prompt_tokens=100 * (at + 1)) for at in range(3)]
    (panel,) = plots.latency_cdf(records, slo=pd.bench.SLO(ttft_s=0.15, ttft_per_token_s=0.001)).draw().axes
    assert [line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == "--"] == pytest.approx([0.15, 0.3])


def test_a_plot_goes_into_axes_that_are_there(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    axes = figures.Figure().subplots(2)
    plot = plots.over_concurrency([summary()])
    assert plot.draw(tmp_path / "plot.PNG", axes=axes) is axes[0].figure
    assert (tmp_path / "plot.PNG").read_bytes().startswith(b"\x89PNG")
    assert axes[1].get_ylabel() == "median TPOT (ms)"
    with pytest.raises(pd.ConfigError, match="has 2 panels, got 1 axes"):
        plot.draw(axes=axes[0])
    with pytest.raises(pd.ConfigError, match=r"plot\.txt: its suffix must be one of .*svg"):
        plot.draw(tmp_path / "plot.txt")


def test_without_matplotlib_there_are_columns_and_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = plots.latency_cdf([record(0)])
    assert listed(plot) == {"run": [""], "ttft_s": [0.4], "share": [1.0]}
    with pytest.raises(pd.BackendUnavailable, match=r"pip install 'pdinfer\[plot\]'") as caught:
        plot.draw("plot.svg")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plots.latency_cdf(summary()), "takes Record values.*got a Summary.*on_record"),
        (lambda: plots.latency_cdf({"a": [1]}), "got a int"),
        (lambda: plots.stage_waterfall(record(0)), "takes Summary values"),
        (lambda: plots.predicted_against_observed({"a": summary()}, summary()), "got a str"),
        (lambda: plots.load_per_engine([], "both"), "'prefill' or 'decode'"),
        (lambda: plots.load_per_engine([], num_points=0), "at least 1"),
        (lambda: plots.Plot(columns={"a": [1.0], "b": []}, paint=print), "one length"),
        (lambda: plots.Plot(columns={"a": [float("nan")]}, paint=print), "not finite"),
    ],
)
def test_what_is_no_plot_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(pd.ConfigError, match=words):
        make()


def test_a_run_hands_its_records_over() -> None:
    clock, records = VirtualClock(), list[bench.Record]()
    load = bench.open_loop(10.0, 5, prompt_tokens=8, output_tokens=2, arrivals="constant")
    whole = bench.run(OneSlot(clock), load, clock=clock, on_record=records.append)
    assert [one.intended_s for one in records] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert plots.latency_cdf(records).columns["ttft_s"].max() * 1e3 == pytest.approx(whole.max_ttft_ms)
