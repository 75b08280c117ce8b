"""The names of metrics are those of the docs."""

from __future__ import annotations

import re
from pathlib import Path

from pdinfer.metrics.names import METRICS

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "observe.md"


def test_the_docs_list_every_metric() -> None:
    rows = re.findall(r"^\| `(pdinfer_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    labels = {metric.name: ", ".join(f"`{label}`" for label in metric.labels) for metric in METRICS}
    assert rows == [(metric.name, metric.kind, labels[metric.name], metric.meaning) for metric in METRICS]


def test_names_are_as_prometheus_advises() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"pdinfer_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")
        assert metric.meaning.endswith(".")
