"""Two summaries side by side, if they can be compared at all."""

from __future__ import annotations

import attrs

from pdinfer.bench.checks import IMPOSSIBLE, check
from pdinfer.bench.summary import Summary
from pdinfer.checks import typed
from pdinfer.errors import ConfigError
from pdinfer.values import Value

METRICS = (
    "request_goodput", "token_goodput", "goodput_per_gpu", "attainment", "request_throughput", "output_throughput",
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_e2el_ms",
)  # fmt: skip
SAME = ("mode", "slo", "request_rate", "speed", "max_concurrency")
LENGTHS_WITHIN = 0.02


@attrs.frozen(kw_only=True)
class ComparedRow(Value):
    """One figure of both. `ratio` is second / first. `is_distinct` says whether their 95 % intervals are apart; None
    without repeats of both."""

    metric: str
    first: float
    second: float
    ratio: float | None
    is_distinct: bool | None


@attrs.frozen(kw_only=True)
class Comparison(Value):
    """The figures that two summaries share."""

    rows: tuple[ComparedRow, ...]

    def __str__(self) -> str:
        """Return a table for people."""
        lines = [f"{'':20} {'first':>12} {'second':>12} {'ratio':>8}"]
        for row in self.rows:
            ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
            verdict = {None: "one run each", True: "", False: "intervals overlap: no difference shown"}[row.is_distinct]
            lines.append(f"{row.metric:20} {row.first:12.4g} {row.second:12.4g} {ratio:>8}  {verdict}".rstrip())
        return "\n".join(lines)


@typed
def compare(first: Summary, second: Summary) -> Comparison:
    """Compare the figures of two runs of the same experiment, measured or simulated.

    Raises ConfigError, with every reason, when they are two experiments: another mode, SLO, rate, concurrency, trace or
    lengths, or when a check of either failed or finds figures that cannot be. Figures whose intervals overlap are
    marked, not ranked."""
    reasons = [
        f"{name} is {getattr(first, name)!r} in the first and {getattr(second, name)!r} in the second"
        for name in SAME
        if getattr(first, name) != getattr(second, name)
    ]
    traces = [summary.environment.get("trace_sha256") for summary in (first, second)]
    if traces[0] != traces[1]:
        reasons.append("their traces differ (sha256)")
    for name in ("mean_input_tokens", "mean_output_tokens"):
        sizes = getattr(first, name), getattr(second, name)
        if None not in sizes and abs(sizes[0] - sizes[1]) > LENGTHS_WITHIN * max(sizes):
            reasons.append(f"{name} is {sizes[0]:g} in the first and {sizes[1]:g} in the second")
    for which, summary in (("first", first), ("second", second)):
        forged = [finding for finding in check(summary) if finding.check in IMPOSSIBLE]
        findings = dict.fromkeys(map(str, (*summary.findings, *forged)))
        reasons += [f"a check of the {which} failed: {finding}" for finding in findings]
    if reasons:
        raise ConfigError("these summaries cannot be compared: " + "; ".join(reasons))
    rows = [_row(name, first, second) for name in METRICS]
    return Comparison(rows=tuple(row for row in rows if row is not None))


def _row(metric: str, first: Summary, second: Summary) -> ComparedRow | None:
    a, b = getattr(first, metric), getattr(second, metric)
    if a is None or b is None:
        return None
    one, other = first.intervals.get(metric), second.intervals.get(metric)
    apart = None if one is None or other is None else one.high < other.low or other.high < one.low
    return ComparedRow(metric=metric, first=a, second=b, ratio=b / a if a else None, is_distinct=apart)
