"""The values of metrics, and Prometheus's text format for them.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/, "Text-based format"."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from pdinfer.metrics.names import BUCKETS_S, Metric

MAX_SERIES = 1 << 14
"""The most counters that are kept. Past it those go that have not been counted for the longest time."""

Labels = tuple[str, ...]


class Counters:
    """Counts that never fall, though their sources may: an engine or a link that starts again counts from 0."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Metric, Labels], tuple[float, float]] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Note the count that a source reports. Less than the last time means that the source started again."""
        before, total = self._counts.pop((metric, labels), (0, 0))
        self._counts[metric, labels] = value, total + (value - before if value >= before else value)
        if len(self._counts) > MAX_SERIES:
            del self._counts[next(iter(self._counts))]

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Count on."""
        before, _ = self._counts.get((metric, labels), (0, 0))
        self.set(metric, before + amount, *labels)

    def values(self) -> Iterator[tuple[Metric, Labels, float]]:
        """Yield every count, also of sources that have left."""
        return ((metric, labels, total) for (metric, labels), (_, total) in self._counts.items())


class Histogram:
    """Counts of values up to each of BUCKETS_S, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value. Clocks of two machines may make it less than 0, which counts as 0."""
        self._counts[bisect_left(BUCKETS_S, value)] += 1
        self._sum += max(0.0, value)

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        """Yield its samples."""
        total = 0
        for bound, count in zip((*map(repr, BUCKETS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f"{name}_bucket{_braces({**labels, 'le': bound})} {total}"
        yield f"{name}_sum{_braces(labels)} {_number(self._sum)}"
        yield f"{name}_count{_braces(labels)} {total}"


def render(
    metrics: Iterable[Metric],
    values: Iterable[tuple[Metric, Labels, float]],
    histograms: Mapping[Metric, Histogram],
    common: Mapping[str, str],
) -> str:
    """Return the text of all metrics, those without a value included. `common` are labels of every sample."""
    lines: dict[Metric, list[str]] = {metric: [] for metric in metrics}
    for metric, given, value in values:
        labels = {**common, **dict(zip(metric.labels, given, strict=True))}
        lines[metric].append(f"{metric.name}{_braces(labels)} {_number(value)}")
    for metric, histogram in histograms.items():
        lines[metric] += histogram.lines(metric.name, common)
    families = (
        "\n".join([f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}", *samples, ""])
        for metric, samples in lines.items()
    )
    return "".join(families)


def _braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
