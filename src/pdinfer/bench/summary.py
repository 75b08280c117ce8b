"""The result of a run: one value for measured, simulated and imported runs, in JSON `pdinfer.bench/1`.

Names are those of vLLM's and SGLang's result files. Times are in ms there and here, where the name ends in `_ms`.
An unknown figure is None, never NaN."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated

import attrs
import msgspec
from msgspec import Meta

from pdinfer.checks import typed
from pdinfer.config import SLO
from pdinfer.errors import ConfigError
from pdinfer.files import unambiguous
from pdinfer.values import brief, table

SCHEMA = "pdinfer.bench/1"
MAX_SUMMARY_BYTES = 64 << 20


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of TTFT (`record.STAGES`). The `share` is of the sum of all TTFTs."""

    name: str
    mean_ms: float
    p50_ms: float
    p99_ms: float
    share: float


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: what it served, and the mean and greatest shares of its slots and pages that loads reported."""

    __repr__ = brief

    name: str
    role: str
    num_requests: int = 0
    mean_slots: float | None = None
    max_slots: float | None = None
    mean_pages: float | None = None
    max_pages: float | None = None
    max_inflight_bytes: int | None = None


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over repeats: its mean, 95 % interval (Student's t) and coefficient of variation, std / mean."""

    mean: float
    low: float
    high: float
    cv: float | None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A check that failed: what was expected, what is there, and what to do."""

    __repr__ = brief

    check: str
    expected: str
    found: str
    advice: str

    def __str__(self) -> str:
        """Return one line for people."""
        return f"{self.check}: expected {self.expected}; found {self.found}; {self.advice}"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run, or of several with the same settings (`num_repeats`).

    Latencies are of completed requests, from the intended send; failed, refused and unfinished requests count as
    misses of the SLO and in `duration_s`. Rates divide by `duration_s`; imported runs may say other times in
    `input_duration_s` and `output_duration_s`. `concurrency` is the mean number in flight while the load was
    offered, `max_concurrency` the number asked for. `fastest_step_ms` is the shortest TPOT by the engines' own
    clocks, `min_tpot_ms` the shortest that the client saw, of requests with 16 tokens and more. `max_step_ms` is
    the longest call of `step` in which engines of this process computed: a token may wait that long for the host.
    `time_resolution_ms` is how far a time in it may be rounded. `refusals` counts the requests that were refused, which
    are among the failed, by reason."""

    __repr__ = brief

    schema: str = SCHEMA
    name: str = ""
    source: str = "measured"
    mode: str = "unknown"
    request_rate: float | None = None
    speed: float | None = None
    max_concurrency: float | None = None
    seed: int | None = None
    slo: dict[str, float] = {}
    num_requests: int = 0
    completed: int = 0
    failed: int = 0
    unfinished: int = 0
    refusals: dict[str, int] = {}
    duration_s: float | None = None
    input_duration_s: float | None = None
    output_duration_s: float | None = None
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None
    mean_input_tokens: float | None = None
    mean_output_tokens: float | None = None
    max_output_tokens: int | None = None
    cached_tokens: int | None = None
    accept_length: float | None = None
    num_retries: int | None = None
    num_first_of_shape: int | None = None
    request_throughput: float | None = None
    input_throughput: float | None = None
    output_throughput: float | None = None
    total_token_throughput: float | None = None
    peak_output_throughput: float | None = None
    request_goodput: float | None = None
    token_goodput: float | None = None
    goodput_per_gpu: float | None = None
    num_gpus: int | None = None
    attainment: Annotated[float, Meta(ge=0, le=1)] | None = None
    concurrency: float | None = None
    mean_ttft_ms: float | None = None
    median_ttft_ms: float | None = None
    std_ttft_ms: float | None = None
    p90_ttft_ms: float | None = None
    p95_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    max_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    median_tpot_ms: float | None = None
    std_tpot_ms: float | None = None
    p90_tpot_ms: float | None = None
    p95_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None
    max_tpot_ms: float | None = None
    min_tpot_ms: float | None = None
    mean_itl_ms: float | None = None
    median_itl_ms: float | None = None
    std_itl_ms: float | None = None
    p90_itl_ms: float | None = None
    p95_itl_ms: float | None = None
    p99_itl_ms: float | None = None
    max_itl_ms: float | None = None
    mean_e2el_ms: float | None = None
    median_e2el_ms: float | None = None
    std_e2el_ms: float | None = None
    p90_e2el_ms: float | None = None
    p95_e2el_ms: float | None = None
    p99_e2el_ms: float | None = None
    max_e2el_ms: float | None = None
    mean_slip_ms: float | None = None
    p99_slip_ms: float | None = None
    max_slip_ms: float | None = None
    p99_delivery_ms: float | None = None
    max_delivery_ms: float | None = None
    fastest_step_ms: float | None = None
    max_step_ms: float | None = None
    time_resolution_ms: float = 0.0
    stages: tuple[Stage, ...] = ()
    engines: tuple[EngineUse, ...] = ()
    environment: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    num_repeats: int = 1
    intervals: dict[str, Interval] = {}
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> bytes:
        """Return the JSON of `pdinfer.bench/1`, with sorted keys. Raises ConfigError for what JSON cannot have."""
        try:
            return msgspec.json.encode(self, order="sorted")
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates, and objects of other kinds
            raise ConfigError(f"a summary cannot be written as JSON: {error}; give plain text and numbers") from error

    @classmethod
    @typed
    def from_json(cls, text: bytes | str) -> Summary:
        """Read what `to_json` wrote, with or without a byte order mark. Unknown fields are ignored. Raise ConfigError
        for anything else, such as a key that appears twice or an attainment above 1."""
        if len(text) > MAX_SUMMARY_BYTES:
            raise ConfigError(f"a summary has at most {MAX_SUMMARY_BYTES} bytes, this one {len(text)}")
        try:
            summary = msgspec.json.decode(unambiguous(text), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"not a summary: {error}") from error
        if summary.schema != SCHEMA:
            raise ConfigError(f"schema says {summary.schema!r}; this version reads {SCHEMA!r}")
        return summary

    def __str__(self) -> str:
        """Return the summary for people: failed checks first, then goodput, latencies and stages."""
        return "\n".join(name + text for name, text in self._rows())

    def _repr_html_(self) -> str:
        """Return the same as a table."""
        return table((" ".join(name.strip(" :").split()), text) for name, text in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines for people, each as its beginning and its end."""
        yield from (("CHECK FAILED  ", str(finding)) for finding in self.findings)
        what = f"{self.source} {self.mode}" + (f" ({self.name})" if self.name else "")
        yield f"{what}: ", f"{self.completed} of {self.num_requests} completed in {_shown(self.duration_s)} s"
        yield from ((f"refused {count}: ", reason) for reason, count in self.refusals.items())
        censored = f", censored: {self.failed + self.unfinished} requests have none" if self.failed_share > 0.01 else ""
        goodput = f"{_shown(self.request_goodput)} req/s, {_shown(self.token_goodput)} tok/s"
        throughput = f"{_shown(self.request_throughput)} req/s, {_shown(self.output_throughput)} tok/s out"
        yield "goodput ", f"{goodput}; attainment {_shown(self.attainment)}; throughput {throughput}"
        for metric in ("ttft", "tpot", "itl", "e2el"):
            figures = ", ".join(
                f"{part} {_shown(getattr(self, f'{part}_{metric}_ms'))}"
                for part in ("mean", "median", "p90", "p99", "max")
            )
            yield f"{metric.upper():5} ms  ", f"{figures}{censored}"
        yield "slip ms   ", f"p99 {_shown(self.p99_slip_ms)}, max {_shown(self.max_slip_ms)}"
        for stage in sorted(self.stages, key=lambda stage: -stage.share):
            figures = f"mean {_shown(stage.mean_ms)} ms, p99 {_shown(stage.p99_ms)} ms, {stage.share:.0%}"
            yield f"  {stage.name:14} ", figures
        for name, interval in self.intervals.items():
            figures = f"{_shown(interval.mean)}, 95 % {_shown(interval.low)} to {_shown(interval.high)}"
            yield f"{name}: ", figures + ("" if interval.cv is None else f", CV {interval.cv:.1%}")
        yield from (("", note) for note in self.notes)

    @property
    def failed_share(self) -> float:
        """The share of requests that did not complete."""
        return (self.failed + self.unfinished) / self.num_requests if self.num_requests else 0.0


def slo_fields(slo: SLO | None) -> dict[str, float]:
    """Return the limits of an SLO by name."""
    return {} if slo is None else {name: limit for name, limit in attrs.asdict(slo).items() if limit is not None}


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def json_schema() -> bytes:
    """Return the JSON Schema of a summary, as the package has it in `summary.schema.json`."""
    schema = msgspec.json.schema(Summary)
    for definition in schema["$defs"].values():  # whether docstrings are indented depends on Python's version
        definition["description"] = inspect.cleandoc(definition["description"])
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=1) + b"\n"
