"""Metrics for Prometheus, and spans for OpenTelemetry.

    metrics = pd.metrics.Recorder()
    metrics.read(pairing.step())
    metrics.render(pairing)

    recorder.py   from events and loads to metrics
    spans.py      a span for each request and for its stages
    series.py     counts and histograms, and their text
    names.py      the metrics there are

May import: the ground."""

from __future__ import annotations

from pdinfer.metrics.recorder import CONTENT_TYPE, Recorder
from pdinfer.metrics.spans import STAGES, Spans
from pdinfer.stats import PairingStats
from pdinfer.trace import join_traces
from pdinfer.types import Timeline, Usage
from pdinfer.values import asdict

__all__ = [
    "CONTENT_TYPE",
    "STAGES",
    "PairingStats",
    "Recorder",
    "Spans",
    "Timeline",
    "Usage",
    "asdict",
    "join_traces",
]
