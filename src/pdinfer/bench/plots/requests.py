"""Plots of single requests: how long they took, and which engine held them when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdinfer.bench.plots.plot import GREY, Columns, Plot, are_known, by_name, groups, legend, look, table, titled
from pdinfer.bench.record import Record
from pdinfer.bench.summary import EngineUse
from pdinfer.config import SLO
from pdinfer.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Iterable[Record] | Mapping[str, Iterable[Record]]
METRICS: dict[str, tuple[str, Callable[[Record], float | None]]] = {
    "ttft": ("TTFT", lambda record: record.ttft_s),
    "tpot": ("TPOT", lambda record: record.tpot_s),
    "itl_p99": ("P99 of the gaps between tokens", lambda record: record.itl_p99_s),
    "e2e": ("E2E", lambda record: record.e2e_s),
}
MAX_NAMED = 8
"""A legend of more engines than these hides what it names."""


def latency_cdf(runs: Runs, metric: str = "ttft", *, slo: SLO | None = None) -> Plot:
    """Plot the share of all requests that took at most so long, with the limit of the SLO.

    `runs` are the records of one run, or a mapping from names to records; `metric` is "ttft", "tpot", "itl_p99" or
    "e2e". The tail is censored: requests that failed, were refused or did not end count and have no time, so the curve
    ends below 1. Of "tpot" and "itl_p99", completed requests of one token have none and are left out. Columns: run,
    the metric in seconds, share. Raises ConfigError for another metric."""
    if metric not in METRICS:
        raise ConfigError(f"metric is one of {', '.join(METRICS)}, got {metric!r}")
    label, measure = METRICS[metric]
    rows: list[tuple[Any, ...]] = []
    notes, limits = [], set[float]()
    for name, records in by_name(runs, Record).items():
        took_s, num_missing = _times(records, measure)
        total = len(took_s) + num_missing
        shares = np.searchsorted(took_s, took_s, side="right") / max(total, 1)
        rows += [(name, second, share) for second, share in zip(took_s.tolist(), shares.tolist(), strict=True)]
        if num_missing:
            notes.append(titled(name, f"{num_missing} of {total} requests did not complete"))
        limits |= {limit for record in records if (limit := _limit_s(slo, metric, record)) is not None}
    bounds = sorted({min(limits), max(limits)}) if limits else []
    columns = table({"run": str, f"{metric}_s": float, "share": float}, rows)
    return Plot(columns=columns, notes=tuple(notes), paint=partial(_paint_cdf, label=label, limits_s=bounds))


def _times(records: Sequence[Record], measure: Callable[[Record], float | None]) -> tuple[np.ndarray, int]:
    """Return the sorted times of completed requests, and how many requests have none because they did not complete."""
    measured = [measure(record) if record.is_completed else np.inf for record in records]
    took = np.array([second for second in measured if second is not None], dtype=float)
    known = np.isfinite(took)
    return np.sort(took[known]), int((~known).sum())


def _limit_s(slo: SLO | None, metric: str, record: Record) -> float | None:
    if slo is None:
        return None
    return slo.ttft_limit_s(record.prompt_tokens) if metric == "ttft" else getattr(slo, f"{metric}_s")


def _paint_cdf(columns: Columns, panels: Sequence[Axes], *, label: str, limits_s: Sequence[float]) -> None:
    panel, (_, metric, _) = panels[0], columns
    right = 1.05 * max([*columns[metric].tolist(), *limits_s], default=1.0) or 1.0
    for at, (name, rows) in enumerate(groups(columns, "run")):
        times, shares, line = rows[metric], rows["share"], look(at)
        panel.step([times[0], *times], [0.0, *shares], where="post", label=name, **line)
        is_censored = shares[-1] < 1
        panel.plot([times[-1], right], [shares[-1]] * 2, **{**line, **({"linestyle": ":"} if is_censored else {})})
    for at, limit in enumerate(limits_s):
        what = "SLO" if len(limits_s) == 1 else "SLO of the shortest and the longest prompt"
        panel.axvline(limit, color=GREY, linestyle="--", linewidth=1, label=None if at else what)
    panel.set(xlim=(0, right), ylim=(0, 1.02), xlabel=f"{label} (s)", ylabel="share of all requests")
    legend(panel)


def load_per_engine(
    runs: Runs, role: str = "prefill", *, engines: Iterable[EngineUse] = (), num_points: int = 200
) -> Plot:
    """Plot how many requests each engine of a role ("prefill" or "decode") held over time, one panel per run.

    `runs` are the records of one run, or a mapping from names, such as those of policies, to records. `engines`, those
    of a Summary, also shows the engines that served nothing. A request counts for its prefill from the choice of its
    pair until its prompt is computed, and for its decode until the last token; after a retry, for those of the last
    choice. Each figure is the mean over one of `num_points` equal stretches of time, so nothing falls between two
    samples. Requests whose engine, or the time it took, is unknown are left out and noted. Columns: run,
    engine, at_s (the middle of a stretch, seconds since the run began), requests, prompt_tokens (of the same
    requests). Raises ConfigError for another role and for less than one point."""
    if role not in ("prefill", "decode"):
        raise ConfigError(f"role is 'prefill' or 'decode', got {role!r}")
    if num_points < 1:
        raise ConfigError(f"num_points is at least 1, got {num_points!r}")
    named, idle = by_name(runs, Record), {use.name for use in engines if use.role == role}
    held = {name: [span for record in records if (span := _span(record, role))] for name, records in named.items()}
    edges_s = np.linspace(0.0, max((span[2] for spans in held.values() for span in spans), default=0.0), num_points + 1)
    rows: list[tuple[Any, ...]] = []
    notes = []
    for name, spans in held.items():
        total = len(named[name])
        if len(spans) < total:
            why = f"left out: {total - len(spans)} of {total} requests, whose time at {role} is unknown"
            notes.append(titled(name, why))
        for engine in sorted({span[0] for span in spans} | idle) if edges_s[-1] > 0 else ():
            figures = _means([span for span in spans if span[0] == engine], edges_s)
            rows += [(name, engine, *stretch) for stretch in figures]
    columns = table({"run": str, "engine": str, "at_s": float, "requests": float, "prompt_tokens": float}, rows)
    paint = partial(_paint_load, names=tuple(named) or ("",), role=role)
    return Plot(columns=columns, notes=tuple(notes), num_panels=max(1, len(named)), paint=paint)


def _span(record: Record, role: str) -> tuple[str, float, float, float] | None:
    """Return the engine, when the request came to it and left it, and its prompt tokens; None if that is not known."""
    engine, ended_s = record.decode, record.token_s[-1] if record.token_s else None
    if role == "prefill":
        engine = record.prefill
        ended_s = record.prefill_ended_s if record.prefill_ended_s is not None else min(record.token_s, default=None)
    began_s = record.chosen_s
    if engine is None or began_s is None or ended_s is None or not are_known(began_s, ended_s):
        return None
    return engine, began_s, max(began_s, ended_s), float(record.prompt_tokens)


def _means(spans: Sequence[tuple[str, float, float, float]], edges_s: np.ndarray) -> np.ndarray:
    """Return, per stretch between two edges, its middle and the mean requests and prompt tokens that were held."""
    began_s, ended_s, tokens = np.array([span[1:] for span in spans]).reshape(-1, 3).T
    columns = [(edges_s[1:] + edges_s[:-1]) / 2]
    for weights in (np.ones_like(tokens), tokens):
        area = np.diff(_area(began_s, weights, edges_s) - _area(ended_s, weights, edges_s))
        columns.append(np.maximum(area / np.diff(edges_s), 0.0))  # rounding may leave -1e-12
    return np.stack(columns, axis=1)


def _area(times_s: np.ndarray, weights: np.ndarray, until_s: np.ndarray) -> np.ndarray:
    """Return the integrals of a function that rises by each weight at its time."""
    order = np.argsort(times_s)
    past = np.searchsorted(times_s[order], until_s, side="right")
    height, moment = (np.append(0.0, np.cumsum(x[order])) for x in (weights, weights * times_s))
    area: np.ndarray = until_s * height[past] - moment[past]
    return area


def _paint_load(columns: Columns, panels: Sequence[Axes], *, names: Sequence[str], role: str) -> None:
    engines = list(dict.fromkeys(columns["engine"].tolist()))
    top, runs = 1.05 * columns["requests"].max(initial=0.0) or 1.0, dict(groups(columns, "run"))
    for panel, name in zip(panels, names, strict=True):
        for engine, rows in groups(runs[name], "engine") if name in runs else ():
            label = engine if len(engines) <= MAX_NAMED else None
            panel.plot(rows["at_s"], rows["requests"], label=label, linewidth=1, **look(engines.index(engine)))
        panel.set_xlim(left=0)
        panel.set(ylim=(0, top), ylabel=f"requests per {role}" + (f"\n{name}" if name else ""))
        legend(panel)
    panels[-1].set_xlabel("seconds since the run began")
