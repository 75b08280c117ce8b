"""From records to a summary, and from the summaries of repeats to one with intervals. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from pdinfer.bench.checks import LEAST_TOKENS, check
from pdinfer.bench.record import REFUSED, STAGES, Record
from pdinfer.bench.summary import EngineUse, Interval, Stage, Summary, slo_fields
from pdinfer.checks import check_int, typed
from pdinfer.config import SLO
from pdinfer.errors import ConfigError

PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, two-sided 95 %, for 1 to 15 degrees of freedom. Beyond that 1.96 + 2.5 / degrees is close enough."""
MAX_REASONS = 8
"""Reasons of refusals that are told one by one."""
REPEATED = (
    "request_goodput", "token_goodput", "attainment", "request_throughput", "output_throughput", "mean_ttft_ms",
    "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "duration_s",
)  # fmt: skip
"""The figures that repeats get an interval for."""


@typed
def summarize(
    records: Sequence[Record],
    *,
    slo: SLO | None = None,
    num_gpus: int | None = None,
    max_concurrency: float | None = None,
    environment: Mapping[str, str] | None = None,
    engines: Sequence[EngineUse] = (),
    **said: Any,
) -> Summary:
    """Return the figures of one run, with the findings of `check`.

    The run lasts from the first intended send to the last token read. `said` are further fields of Summary that the
    records do not have: source, mode, request_rate, seed, name, notes. Raises ConfigError for `num_gpus` below 1."""
    check_gpus(num_gpus)
    done = [record for record in records if record.is_completed]
    began_s = min((record.intended_s for record in records), default=0.0)
    ended_s = max((record.read_s[-1] for record in records if record.read_s), default=began_s)
    duration_s = ended_s - began_s or None
    kept_s = duration_s if slo else None
    good = [record for record in done if meets(slo, record)]
    inputs = sum(record.prompt_tokens for record in done)
    outputs = sum(record.output_tokens for record in done)
    drafted = sum(record.num_accepted_tokens for record in done)
    summary = Summary(
        slo=slo_fields(slo),
        num_requests=len(records),
        completed=len(done),
        unfinished=sum(record.ended_s is None and record.outcome == "unfinished" for record in records),
        failed=sum(not record.is_completed and record.outcome != "unfinished" for record in records),
        refusals=_refusals(records),
        duration_s=duration_s,
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        mean_input_tokens=inputs / len(done) if done else None,
        mean_output_tokens=outputs / len(done) if done else None,
        max_output_tokens=max((record.output_tokens for record in done), default=0),
        cached_tokens=sum(record.cached_tokens for record in done),
        accept_length=outputs / max(1, outputs - drafted) if drafted else None,
        num_retries=sum(record.num_retries for record in records),
        num_first_of_shape=sum(record.is_first_of_shape for record in records),
        num_gpus=num_gpus,
        request_throughput=_rate(len(done), duration_s),
        input_throughput=_rate(inputs, duration_s),
        output_throughput=_rate(outputs, duration_s) if outputs > len(done) else None,  # requests of a token have none
        total_token_throughput=_rate(inputs + outputs, duration_s),
        request_goodput=_rate(len(good), kept_s),
        token_goodput=_rate(sum(record.output_tokens for record in good), kept_s),
        goodput_per_gpu=_rate(len(good), kept_s and kept_s * (num_gpus or 0)),
        attainment=len(good) / len(records) if slo and records else None,
        concurrency=in_flight(records),
        max_concurrency=max_concurrency,
        **_latencies(records, done),
        stages=_stages(done),
        engines=_served(records, engines),
        environment=dict(environment or {}),
        **said,
    )
    return msgspec.structs.replace(summary, findings=check(summary))


def check_gpus(num_gpus: int | None) -> None:
    """Raise ConfigError for a number of GPUs that nothing ran on."""
    if num_gpus is not None:
        check_int("num_gpus", num_gpus, 1)


def check_said(**said: Any) -> None:
    """Raise ConfigError for fields of a Summary that JSON cannot have: before a run, not when it is over."""
    Summary.from_json(Summary(**said).to_json())


def _latencies(records: Sequence[Record], done: Sequence[Record]) -> dict[str, Any]:
    """Return the fields of Summary that are statistics of times. Slip is of all requests, the rest of completed
    ones."""
    long = [record for record in done if record.output_tokens >= LEAST_TOKENS]
    counts = [len(record.read_s) for record in done]
    read_s, made_s = _joined([r.read_s for r in done]), _joined([r.token_s for r in done])
    gaps_s = np.delete(
        np.diff(read_s), np.cumsum(counts, dtype=int)[:-1] - 1
    )  # without the gaps between one request and the next
    figures = {
        **latency("ttft", [record.ttft_s for record in done]),
        **latency("tpot", [record.tpot_s for record in done]),
        **latency("itl", gaps_s),
        **latency("e2el", [record.e2e_s for record in done]),
    }
    slips = latency("slip", [record.sent_s - record.intended_s for record in records])
    late = latency("delivery", read_s - made_s)
    return {
        **{name: value for name, value in figures.items() if not name.startswith("min")},
        **{name: slips[name] for name in ("mean_slip_ms", "p99_slip_ms", "max_slip_ms")},
        **{name: late[name] for name in ("p99_delivery_ms", "max_delivery_ms")},
        "min_tpot_ms": latency("tpot", [record.tpot_s for record in long])["min_tpot_ms"],
        "fastest_step_ms": latency("step", [record.step_s for record in long])["min_step_ms"],
    }


def meets(slo: SLO | None, record: Record) -> bool:
    """Return whether a request completed inside the SLO; without one, whether it completed. What it does not have, it
    keeps: one of a single token has no TPOT."""
    if not record.is_completed or slo is None:
        return record.is_completed
    pairs = (
        (record.ttft_s, slo.ttft_limit_s(record.prompt_tokens)),
        (record.tpot_s, slo.tpot_s),
        (None if slo.itl_p99_s is None else record.itl_p99_s, slo.itl_p99_s),
        (record.e2e_s, slo.e2e_s),
    )
    return all(took is None or limit is None or took <= limit for took, limit in pairs)


def _joined(times_s: Sequence[tuple[float, ...]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(times_s), dtype=float, count=sum(map(len, times_s)))


def latency(metric: str, seconds: Iterable[float | None] | np.ndarray) -> dict[str, float | None]:
    """Return mean, std, min, max and PERCENTILES (linear interpolation) of a metric in ms; each None without values."""
    known = seconds if isinstance(seconds, np.ndarray) else [value for value in seconds if value is not None]
    values = np.asarray(known, dtype=float) * 1e3
    names = ["mean", "std", "min", "max", *PERCENTILES]
    if not values.size:
        return {f"{name}_{metric}_ms": None for name in names}
    found = [values.mean(), values.std(), values.min(), values.max(), *np.percentile(values, [*PERCENTILES.values()])]
    return {f"{name}_{metric}_ms": float(value) for name, value in zip(names, found, strict=True)}


def in_flight(records: Sequence[Record]) -> float | None:
    """Return the mean number of requests in flight from the first send to the last, while the load was offered. None
    when all were sent at once."""
    ends_s = [record.read_s[-1] if record.read_s else record.sent_s for record in records]
    first_s, last_s = min((r.sent_s for r in records), default=0.0), max((r.sent_s for r in records), default=0.0)
    if last_s <= first_s:
        return None
    held_s = sum(max(0.0, min(end_s, last_s) - record.sent_s) for record, end_s in zip(records, ends_s, strict=True))
    return held_s / (last_s - first_s)


@typed
def merge(repeats: Sequence[Summary]) -> Summary:
    """Return one summary of runs with the same settings: figures of rates and latencies are means over the runs,
    `intervals` says how sure they are. Raise ConfigError for runs of different modes or SLOs."""
    if not repeats:
        raise ConfigError("there is no summary to merge")
    first = repeats[0]
    for other in repeats:
        for field in ("mode", "source", "slo", "max_concurrency", "request_rate", "speed"):
            if getattr(other, field) != getattr(first, field):
                raise ConfigError(
                    f"repeats must have one {field}: {getattr(first, field)!r} and {getattr(other, field)!r} are two "
                    "experiments; compare them instead"
                )
    means, intervals = {}, {}
    for name in REPEATED:
        values = [value for repeat in repeats if (value := getattr(repeat, name)) is not None]
        if len(values) == len(repeats):
            intervals[name] = interval(values)
            means[name] = intervals[name].mean
    counts = ("num_requests", "completed", "failed", "unfinished")
    merged = msgspec.structs.replace(
        first,
        **means,
        **{name: sum(getattr(repeat, name) for repeat in repeats) for name in counts},
        refusals=dict(sum((Counter(repeat.refusals) for repeat in repeats), Counter())),
        input_duration_s=None,
        total_input_tokens=None,
        total_output_tokens=None,
        num_repeats=len(repeats),
        intervals=intervals if len(repeats) > 1 else {},
    )
    findings = {str(finding): finding for repeat in repeats for finding in repeat.findings}
    return msgspec.structs.replace(merged, findings=(*findings.values(), *check(merged)))


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of `values` with its 95 % interval (Student's t). One value has an interval of no width."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean=mean, low=mean, high=mean, cv=None)
    spread, degrees = float(np.std(values, ddof=1)), len(values) - 1
    t = T_95[degrees - 1] if degrees <= len(T_95) else 1.96 + 2.5 / degrees
    half = t * spread / math.sqrt(len(values))
    return Interval(mean=mean, low=mean - half, high=mean + half, cv=spread / abs(mean) if mean else None)


def _rate(count: float, seconds: float | None) -> float | None:
    """Return what there is of something per second; None where the time is not known, or none."""
    return count / seconds if seconds else None


def _refusals(records: Sequence[Record]) -> dict[str, int]:
    """Return how many requests were refused by reason, the most frequent first."""
    counts = Counter(record.error or "no reason given" for record in records if record.outcome == REFUSED)
    told = dict(counts.most_common(MAX_REASONS))
    return told | ({"other reasons": counts.total() - sum(told.values())} if len(counts) > MAX_REASONS else {})


def _stages(done: Sequence[Record]) -> tuple[Stage, ...]:
    took = [record.stages() for record in done]
    whole_ms = sum(sum(stages.values()) for stages in took) * 1e3
    if not took:
        return ()
    stages = []
    for name in STAGES:
        figures = np.array([one[name] for one in took]) * 1e3
        middle, late = np.percentile(figures, (50, 99))
        share = float(figures.sum()) / whole_ms if whole_ms else 0.0
        stages.append(
            Stage(name=name, mean_ms=float(figures.mean()), p50_ms=float(middle), p99_ms=float(late), share=share)
        )
    return tuple(stages)


def _served(records: Sequence[Record], engines: Sequence[EngineUse]) -> tuple[EngineUse, ...]:
    """Return every engine that served a request or reported its load."""
    counts = Counter(
        (role, name) for r in records for role, name in (("prefill", r.prefill), ("decode", r.decode)) if name
    )
    reported = {(use.role, use.name): use for use in engines}
    missing = {key: EngineUse(role=key[0], name=key[1]) for key in sorted(counts) if key not in reported}
    return tuple(msgspec.structs.replace(use, num_requests=counts[key]) for key, use in {**reported, **missing}.items())
