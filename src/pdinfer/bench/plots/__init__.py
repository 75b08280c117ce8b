"""Plots of records and summaries. Each function returns its columns, which need no library, and draws them when asked.

    from pdinfer.bench import plots
    plot = plots.latency_cdf({"round_robin": before, "traffic_aware": after}, slo=slo)
    plot.columns["ttft_s"]                  # plain numpy arrays of one length, as pandas and polars take them
    plot.draw("ttft.svg")                   # needs matplotlib: pip install 'pdinfer[plot]'

    requests.py            from records: latency CDFs, load per engine over time
    runs.py                from summaries: over concurrency, stages, goodput frontier, predicted against observed
    plot.py                columns with their notes, and how they are drawn

May import: bench.compare, bench.record, bench.summary, config, the ground."""

from __future__ import annotations

from pdinfer.bench.plots.plot import Plot
from pdinfer.bench.plots.requests import latency_cdf, load_per_engine
from pdinfer.bench.plots.runs import goodput_frontier, over_concurrency, predicted_against_observed, stage_waterfall

__all__ = [
    "Plot",
    "goodput_frontier",
    "latency_cdf",
    "load_per_engine",
    "over_concurrency",
    "predicted_against_observed",
    "stage_waterfall",
]
