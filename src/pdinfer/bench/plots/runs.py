"""Plots of whole runs, from their summaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdinfer.bench.compare import METRICS, compare
from pdinfer.bench.plots.plot import (
    COLOURS,
    GREY,
    Columns,
    Plot,
    are_known,
    by_name,
    failed_checks,
    groups,
    legend,
    log_scale,
    look,
    table,
    titled,
)
from pdinfer.bench.summary import Summary
from pdinfer.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Iterable[Summary] | Mapping[str, Iterable[Summary]]
LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
UNITS = {
    "request_goodput": "requests/s",
    "goodput_per_gpu": "requests/s per GPU",
    "token_goodput": "tokens/s",
    "attainment": "share of requests",
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
}
"""Units of the figures other than times, which are in ms."""
MARKERS = "osD^vP"


def over_concurrency(runs: Runs) -> Plot:
    """Plot output throughput and the median TPOT over the requests in flight, in two panels.

    `runs` are the summaries of a sweep, or a mapping from names to such. In flight is what was held on average, or,
    where a summary does not have it, what was asked for. Summaries without one of the figures are left out and noted.
    Columns: run, concurrency, output_throughput (tokens/s), median_tpot_ms."""
    rows: list[tuple[Any, ...]] = []
    notes = []
    for name, summaries in by_name(runs, Summary).items():
        held = [one.max_concurrency if one.concurrency is None else one.concurrency for one in summaries]
        points = [(at, one.output_throughput, one.median_tpot_ms) for at, one in zip(held, summaries, strict=True)]
        found = sorted(point for point in points if are_known(*point) and point[0])
        rows += [(name, *point) for point in found]
        notes += _missing(name, len(summaries) - len(found), len(summaries)) + failed_checks(name, summaries)
    columns = table({"run": str, "concurrency": float, "output_throughput": float, "median_tpot_ms": float}, rows)
    return Plot(columns=columns, notes=tuple(notes), num_panels=2, paint=_paint_concurrency)


def _paint_concurrency(columns: Columns, panels: Sequence[Axes]) -> None:
    labels = {"output_throughput": "output (tokens/s)", "median_tpot_ms": "median TPOT (ms)"}
    for panel, (metric, label) in zip(panels, labels.items(), strict=True):
        for at, (name, rows) in enumerate(groups(columns, "run")):
            panel.plot(rows["concurrency"], rows[metric], marker="o", markersize=4, label=name, **look(at))
        log_scale(panel, "x", columns["concurrency"])
        panel.set_ylim(bottom=0)
        panel.set_ylabel(label)
    panels[-1].set_xlabel("requests in flight")
    legend(panels[0])


def stage_waterfall(runs: Runs) -> Plot:
    """Plot how the stages of TTFT follow each other, as means, one panel per run: they end at the mean TTFT.

    `runs` is a summary, or a mapping from names to summaries. Columns: run, stage, began_ms, mean_ms, p99_ms, share
    (of the sum of all TTFTs). Raises ConfigError for more than one summary of one name."""
    rows: list[tuple[Any, ...]] = []
    notes = []
    named = by_name(runs, Summary)
    for name, summaries in named.items():
        if len(summaries) != 1:
            raise ConfigError(f"stage_waterfall takes one summary per name, got {len(summaries)}; see bench.merge")
        (summary,) = summaries
        began_ms = 0.0
        for stage in summary.stages:
            rows.append((name, stage.name, began_ms, stage.mean_ms, stage.p99_ms, stage.share))
            began_ms += stage.mean_ms
        notes += _missing(name, int(not summary.stages), 1) + failed_checks(name, summaries)
        if summary.stages and summary.num_repeats > 1:
            notes.append(titled(name, f"stages are those of the first of {summary.num_repeats} repeats"))
    kinds = {"run": str, "stage": str, "began_ms": float, "mean_ms": float, "p99_ms": float, "share": float}
    paint = partial(_paint_waterfall, names=tuple(named) or ("",))
    return Plot(columns=table(kinds, rows), notes=tuple(notes), num_panels=max(1, len(named)), paint=paint)


def _paint_waterfall(columns: Columns, panels: Sequence[Axes], *, names: Sequence[str]) -> None:
    runs = dict(groups(columns, "run"))
    right = 1.12 * (columns["began_ms"] + columns["mean_ms"]).max(initial=0.0) or 1.0
    for panel, name in zip(panels, names, strict=True):
        if name in runs:
            ends = runs[name]["began_ms"] + runs[name]["mean_ms"]
            panel.barh(runs[name]["stage"], runs[name]["mean_ms"], left=runs[name]["began_ms"], color=COLOURS[0])
            for stage, end, share in zip(runs[name]["stage"], ends, runs[name]["share"], strict=True):
                panel.annotate(f"{share:.0%}", (end, stage), (3, 0), textcoords="offset points", va="center")
            panel.set_ylim(len(ends) - 0.5, -0.5)
        panel.set(xlim=(0, right), ylabel=name)
        panel.grid(visible=False, axis="y")
    panels[-1].set_xlabel("mean time since the request was due (ms)")


def goodput_frontier(runs: Runs) -> Plot:
    """Plot goodput over the speed that one user sees, and the runs that no other beats in both.

    `runs` are summaries with an SLO, or a mapping from names, such as those of deployments, to them. The speed is
    1000 / median TPOT in ms. Goodput is per GPU where all summaries have it, else of the whole. Summaries without one
    of the figures are left out and noted. Columns: run, tokens_per_s_per_user, goodput_per_gpu or request_goodput,
    is_on_frontier."""
    named = by_name(runs, Summary)
    everything = [summary for summaries in named.values() for summary in summaries]
    is_per_gpu = bool(everything) and all(are_known(summary.goodput_per_gpu) for summary in everything)
    metric = "goodput_per_gpu" if is_per_gpu else "request_goodput"
    points: list[tuple[str, float, float]] = []
    notes = []
    for name, summaries in named.items():
        found = [
            (name, 1e3 / summary.median_tpot_ms, getattr(summary, metric))
            for summary in summaries
            if are_known(summary.median_tpot_ms, getattr(summary, metric)) and summary.median_tpot_ms
        ]
        points += sorted(found)
        notes += _missing(name, len(summaries) - len(found), len(summaries)) + failed_checks(name, summaries)
    rows = [(*point, not any(_beats(other, point) for other in points)) for point in points]
    columns = table({"run": str, "tokens_per_s_per_user": float, metric: float, "is_on_frontier": bool}, rows)
    return Plot(columns=columns, notes=tuple(notes), paint=partial(_paint_frontier, metric=metric))


def _beats(other: tuple[str, float, float], point: tuple[str, float, float]) -> bool:
    """Return whether a point is nowhere worse than another, and better somewhere."""
    return other[1] >= point[1] and other[2] >= point[2] and other[1:] != point[1:]


def _paint_frontier(columns: Columns, panels: Sequence[Axes], *, metric: str) -> None:
    panel, is_best = panels[0], columns["is_on_frontier"]
    best = sorted(zip(columns["tokens_per_s_per_user"][is_best], columns[metric][is_best], strict=True))
    panel.plot(*zip(*best, strict=True) if best else ((), ()), color=GREY, drawstyle="steps-pre", linewidth=1)
    for at, (name, rows) in enumerate(groups(columns, "run")):
        marker, colour = MARKERS[at % len(MARKERS)], look(at)["color"]
        panel.plot(rows["tokens_per_s_per_user"], rows[metric], marker, color=colour, label=name)
    panel.set(xlabel="tokens/s that one user sees", ylabel=f"goodput ({UNITS[metric]})")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    legend(panel)


def predicted_against_observed(
    predicted: Summary | Sequence[Summary], observed: Summary | Sequence[Summary], metrics: Sequence[str] = LATENCIES
) -> Plot:
    """Plot figures of simulated runs against those of the measured runs of the same experiments, one by one.

    What is on the diagonal was predicted. `metrics` are of `compare.METRICS`, in one unit. Repeats show their 95 %
    interval. Figures that one of both does not have are left out and noted, and so is what was observed as 0. Columns:
    experiment (its number), metric, predicted, observed, observed_low, observed_high, ratio (predicted / observed).
    Raises ConfigError for what `bench.compare` refuses, for lists of two lengths, and for metrics of two units."""
    first, second = (by_name({"": side}, Summary)[""] for side in (predicted, observed))
    metrics = tuple(dict.fromkeys(metrics))
    if len(first) != len(second):
        raise ConfigError(f"each prediction needs its observation: got {len(first)} and {len(second)} summaries")
    units = {UNITS.get(metric, "ms") for metric in metrics if metric in METRICS}
    if len(units) != 1 or not set(metrics) <= set(METRICS):
        raise ConfigError(f"metrics must be of one unit, and among {', '.join(METRICS)}; got {', '.join(metrics)}")
    rows: list[tuple[Any, ...]] = []
    for at, (simulated, measured) in enumerate(zip(first, second, strict=True)):
        for row in compare(simulated, measured).rows:
            if row.metric in metrics and row.second:
                interval = measured.intervals.get(row.metric)
                low, high = (row.second, row.second) if interval is None else (interval.low, interval.high)
                rows.append((at, row.metric, row.first, row.second, low, high, row.first / row.second))
    total = len(metrics) * len(first)
    left_out = f"left out: {total - len(rows)} of {total} figures, which one side lacks, or observed as 0"
    notes = (left_out,) if len(rows) < total else ()
    kinds = ("predicted", "observed", "observed_low", "observed_high", "ratio")
    columns = table({"experiment": int, "metric": str, **dict.fromkeys(kinds, float)}, rows)
    return Plot(columns=columns, notes=notes, paint=partial(_paint_predicted, unit=units.pop()))


def _paint_predicted(columns: Columns, panels: Sequence[Axes], *, unit: str) -> None:
    panel = panels[0]
    for at, (metric, rows) in enumerate(groups(columns, "metric")):
        spread = rows["observed"] - rows["observed_low"], rows["observed_high"] - rows["observed"]
        panel.errorbar(
            rows["observed"], rows["predicted"], xerr=spread, fmt=MARKERS[at % len(MARKERS)],
            color=look(at)["color"], label=metric,
        )  # fmt: skip
    both = np.concatenate((columns["predicted"], columns["observed"]))
    if unit == "ms":
        log_scale(panel, "xy", both)
    elif both.size:
        panel.set(xlim=(0, 1.05 * both.max()), ylim=(0, 1.05 * both.max()))
    panel.plot(panel.get_xlim(), panel.get_xlim(), color=GREY, linewidth=1, linestyle="--", scalex=False, scaley=False)
    panel.set(xlabel=f"observed ({unit})", ylabel=f"predicted ({unit})")
    legend(panel)


def _missing(name: str, count: int, total: int) -> list[str]:
    return [titled(name, f"left out: {count} of {total} summaries, which lack these figures")] if count else []
