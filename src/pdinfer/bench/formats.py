"""Result files of other tools, read into summaries: vLLM, SGLang, AIPerf, genai-bench.

The notes of a summary name what it could not take over; the checks run on what is there. Times are ms in vLLM, SGLang
and AIPerf (which names its units), seconds in genai-bench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdinfer.bench.checks import check
from pdinfer.bench.record import Record
from pdinfer.bench.summarize import summarize
from pdinfer.bench.summary import Summary
from pdinfer.checks import clip, is_number, typed
from pdinfer.errors import ConfigError
from pdinfer.files import BOM, unambiguous

MAX_BYTES = 256 << 20
STATISTICS = {name: name for name in ("mean", "median", "std", "p90", "p95", "p99", "max")}
PLAIN = (
    "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
    "request_rate", "max_concurrency",
)  # fmt: skip
SECONDS = {"ms": 1e-3, "sec": 1.0, "s": 1.0, "us": 1e-6, "ns": 1e-9}


def _family(names: Mapping[str, str], statistics: Mapping[str, str], path: str) -> dict[str, str]:
    """Return our names of latencies, each with its name in a format: {"p99_ttft_ms": "p99_ttft_ms"}."""
    return {
        f"{ours}_{metric}_ms": path.format(metric=theirs, statistic=statistic)
        for metric, theirs in names.items()
        for ours, statistic in statistics.items()
    }


_SAME = {metric: metric for metric in ("ttft", "tpot", "itl", "e2el")}
VLLM = {
    **{name: name for name in PLAIN},
    **_family(_SAME, STATISTICS, "{statistic}_{metric}_ms"),
    "duration_s": "duration",
    "num_requests": "num_prompts",
    "total_token_throughput": "total_token_throughput",
    "request_goodput": "request_goodput",
    "peak_output_throughput": "max_output_tokens_per_s",
}
SGLANG = {
    **{name: name for name in PLAIN},
    **_family({**_SAME, "e2el": "e2e_latency"}, STATISTICS, "{statistic}_{metric}_ms"),
    "duration_s": "duration",
    "input_throughput": "input_throughput",
    "total_token_throughput": "total_throughput",
    "concurrency": "concurrency",
    "accept_length": "accept_length",
}
_AIPERF_STATISTICS = {**STATISTICS, "mean": "avg", "median": "p50"}
_AIPERF_METRICS = {
    "ttft": "time_to_first_token", "tpot": "inter_token_latency", "itl": "inter_chunk_latency",
    "e2el": "request_latency",
}  # fmt: skip
AIPERF = {
    **_family(_AIPERF_METRICS, _AIPERF_STATISTICS, "{metric}.{statistic}"),
    "duration_s": "benchmark_duration.avg",
    "completed": "request_count.avg",
    "failed": "error_request_count.avg",
    "request_throughput": "request_throughput.avg",
    "output_throughput": "output_token_throughput.avg",
    "total_token_throughput": "total_token_throughput.avg",
    "request_goodput": "goodput.avg",
    "mean_input_tokens": "input_sequence_length.avg",
    "mean_output_tokens": "output_sequence_length.avg",
    "total_output_tokens": "total_output_tokens.avg",
}
GENAI_BENCH = {
    **_family(
        {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e_latency"},
        {**STATISTICS, "median": "p50", "std": "stddev"},
        "stats.{metric}.{statistic}",
    ),
    "duration_s": "run_duration",
    "num_requests": "num_requests",
    "completed": "num_completed_requests",
    "failed": "num_error_requests",
    "request_throughput": "requests_per_second",
    "input_throughput": "mean_input_throughput_tokens_per_s",
    "output_throughput": "mean_output_throughput_tokens_per_s",
    "total_token_throughput": "mean_total_tokens_throughput_tokens_per_s",
    "max_concurrency": "num_concurrency",
}
COUNTS = frozenset(
    {"completed", "failed", "num_requests", "total_input_tokens", "total_output_tokens", "max_output_tokens"}
)


@typed
def from_vllm(text: bytes | str) -> Summary:
    """Read a file of `vllm bench serve --save-result`, with `request_goodput` or, as many versions write it,
    `request_goodput:`."""
    found = _object(text)
    if "request_goodput:" in found:
        found.setdefault("request_goodput", found.pop("request_goodput:"))
    return _summary(found, VLLM, "vllm")


@typed
def from_sglang(text: bytes | str, *, resolution_s: float = 0.0, fastest_step_s: float | None = None) -> Summary:
    """Read a line of `bench_serving`, or of `bench_one_batch_server`, whose `last_ttft` is that of the slowest request.

    `resolution_s` is how far its times were rounded, where a table was typed in; `fastest_step_s` is the shortest
    decode step that the engines recorded, which the client cannot have beaten."""
    found = _object(text)
    if "batch_size" not in found:
        summary = _summary(found, SGLANG, "sglang")
        fastest_ms = None if fastest_step_s is None else fastest_step_s * 1e3
        summary = msgspec.structs.replace(summary, fastest_step_ms=fastest_ms, time_resolution_ms=resolution_s * 1e3)
        return msgspec.structs.replace(summary, findings=check(summary))
    return _one_batch(found, resolution_s, fastest_step_s)


def _one_batch(found: Mapping[str, Any], resolution_s: float, fastest_step_s: float | None) -> Summary:
    """Return a burst of equal requests. Its input rate counts until the last first token, its output rate after it."""
    size, isl, osl = (_number(found, name) or 0.0 for name in ("batch_size", "input_len", "output_len"))
    latency_s, ttft_s = _number(found, "latency"), _number(found, "last_ttft")
    output_s = None if latency_s is None or ttft_s is None else latency_s - ttft_s
    step_s = output_s / (osl - 1) if output_s is not None and osl > 1 else None
    summary = Summary(
        source="sglang",
        name=str(found.get("run_name", "")),
        mode="burst",
        num_requests=int(size),
        completed=int(size) if latency_s is not None else 0,
        failed=0 if latency_s is not None else int(size),
        duration_s=latency_s,
        input_duration_s=ttft_s,
        output_duration_s=output_s,
        total_input_tokens=int(size * isl),
        total_output_tokens=int(size * osl),
        mean_input_tokens=isl,
        mean_output_tokens=osl,
        max_output_tokens=int(osl),
        input_throughput=_number(found, "input_throughput"),
        output_throughput=_number(found, "output_throughput"),
        total_token_throughput=_number(found, "overall_throughput"),
        peak_output_throughput=_number(found, "last_gen_throughput"),
        max_ttft_ms=None if ttft_s is None else ttft_s * 1e3,
        min_tpot_ms=None if step_s is None else step_s * 1e3,
        fastest_step_ms=None if fastest_step_s is None else fastest_step_s * 1e3,
        time_resolution_ms=resolution_s * 1e3,
        notes=("TTFT is that of the slowest request of the burst; its rates are computed, not measured",),
    )
    return msgspec.structs.replace(summary, findings=check(summary))


@typed
def from_aiperf(text: bytes | str) -> Summary:
    """Read the summary, or `profile_export.jsonl`, a line per request, of which warm-up requests are left out."""
    data = text.encode(errors="replace") if isinstance(text, str) else text
    lines = [line for line in data.removeprefix(BOM).splitlines() if line.strip()]
    if lines and b'"metadata"' in lines[0]:
        return _aiperf_records(lines)
    found = _object(data)
    for name, figures in found.items():
        unit = figures.get("unit") if isinstance(figures, dict) else None
        if unit in SECONDS and name in (*_AIPERF_METRICS.values(), "benchmark_duration"):
            scale = SECONDS[unit] * (1.0 if name == "benchmark_duration" else 1e3)
            found[name] = {key: value * scale if is_number(value) else value for key, value in figures.items()}
    return _summary(found, AIPERF, "aiperf")


def _aiperf_records(lines: list[bytes]) -> Summary:
    records = []
    for number, line in enumerate(lines, start=1):
        row = _object(line, f"line {number}: ")
        about, metrics = row.get("metadata"), row.get("metrics")
        if not isinstance(about, dict) or not isinstance(metrics, dict):
            raise ConfigError(f"line {number}: metadata and metrics must be objects, as AIPerf writes them")
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        start_ns, end_ns = _number(about, "request_start_ns"), _number(about, "request_end_ns")
        if start_ns is None or end_ns is None or end_ns < start_ns:
            raise ConfigError(f"line {number}: metadata needs request_start_ns <= request_end_ns")
        ttft_s = _in_seconds(metrics, "time_to_first_token")
        count = int(_value(metrics, "output_sequence_length") or 0)
        start_s, end_s = start_ns / 1e9, end_ns / 1e9
        first_s = end_s if ttft_s is None else start_s + ttft_s
        gap_s = (end_s - first_s) / (count - 1) if count > 1 else 0.0
        read_s = tuple(first_s + at * gap_s for at in range(count))
        is_whole = not about.get("was_cancelled") and count > 0
        records.append(
            Record(
                request_id=str(number),
                intended_s=start_s,
                sent_s=start_s,
                prompt_tokens=int(_value(metrics, "input_sequence_length") or 0),
                outcome="length" if is_whole else "failed",
                token_s=read_s,
                read_s=read_s,
                ended_s=end_s,
            )
        )
    note = "AIPerf does not report single tokens: ITL, delivery and stages are left out, and slip is unknown"
    blank = {name: None for name in Summary.__struct_fields__ if "_itl_" in name or "_slip_" in name}
    blank |= {"p99_delivery_ms": None, "max_delivery_ms": None, "fastest_step_ms": None}
    summary = summarize(records, source="aiperf", notes=(note,))
    return msgspec.structs.replace(summary, **blank, stages=())


@typed
def from_genai_bench(text: bytes | str) -> Summary:
    """Read an experiment's file, or only its aggregated metrics."""
    found = _object(text)
    found = found.get("aggregated_metrics", found)
    if not isinstance(found, dict):
        raise ConfigError("aggregated_metrics must be an object")
    return _summary(found, GENAI_BENCH, "genai_bench", scale=1e3)


# -- what they share ------------------------------------------------------------------------------------------------


def _summary(found: dict[str, Any], names: Mapping[str, str], source: str, *, scale: float = 1.0) -> Summary:
    """Take over what has a name of ours, and note what has none."""
    fields: dict[str, Any] = {}
    for ours, theirs in names.items():
        *folders, leaf = theirs.split(".")
        at: Any = found
        for folder in folders:
            at = at.get(folder) if isinstance(at, dict) else None
        value = _number(at, leaf) if isinstance(at, dict) else None
        if value is not None:
            fields[ours] = int(value) if ours in COUNTS else value * scale if ours.endswith("_ms") else value
    if not fields:
        raise ConfigError(f"has no figure of {source}: is it a result file of another tool?")
    fields.setdefault("num_requests", fields.get("completed", 0) + fields.get("failed", 0))
    fields.setdefault("failed", fields["num_requests"] - fields.get("completed", fields["num_requests"]))
    known = {theirs.split(".")[0] for theirs in names.values()}
    unknown = sorted(name for name in found if name not in known)
    notes = (f"left out, since a summary has no place for it: {', '.join(map(clip, unknown[:40]))}",) if unknown else ()
    # vLLM writes an infinite rate as text: where concurrency is bounded, that is a closed loop
    is_closed = bool(fields.get("max_concurrency")) and found.get("request_rate") in ("inf", "Infinity")
    mode = "closed_loop" if is_closed else "unknown"
    summary = Summary(source=source, mode=mode, notes=notes, **fields)
    return msgspec.structs.replace(summary, findings=check(summary))


def _object(text: bytes | str, where: str = "") -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}a result file has at most {MAX_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(unambiguous(text), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{where}is not a JSON object: {error}") from error


def _number(found: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number that is at least 0, or None. Anything else that stands there raises ConfigError."""
    value = found.get(name)
    if value is None or value in ("inf", "Infinity"):
        return None
    if not is_number(value) or abs(value) > 1e18:
        raise ConfigError(f"{name} must be a finite number, got {clip(value)}")
    return float(value)


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    figure = metrics.get(name)
    return _number(figure, "value") if isinstance(figure, dict) else None


def _in_seconds(metrics: Mapping[str, Any], name: str) -> float | None:
    value = _value(metrics, name)
    unit = metrics[name].get("unit") if value is not None else None
    if value is not None and unit not in SECONDS:
        raise ConfigError(f"{name}: the unit must be one of {', '.join(SECONDS)}, got {clip(unit)}")
    return None if value is None else value * SECONDS[str(unit)]
