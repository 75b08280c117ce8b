"""Summaries: figures by hand, JSON that its schema accepts, and other tools' files there and back."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest

import pdinfer as pd
from pdinfer import bench
from tests.unit.bench.schema import problems

SCHEMA_FILE = Path(bench.__file__).with_name("summary.schema.json")
SLO = pd.bench.SLO(ttft_s=0.5, tpot_s=0.1)


def record(number: int, *, ttft_s: float, gap_s: float, count: int = 5, outcome: str = "length") -> bench.Record:
    sent_s = float(number)
    read_s = tuple(sent_s + ttft_s + at * gap_s for at in range(count))
    return bench.Record(
        request_id=str(number),
        intended_s=sent_s,
        sent_s=sent_s + 0.01,
        prompt_tokens=10 * (number + 1),
        outcome=outcome,
        chosen_s=sent_s + 0.02,
        token_s=tuple(at - 0.001 for at in read_s),
        read_s=read_s,
        ended_s=read_s[-1] if read_s else sent_s,
        prefill="p0",
        decode=f"d{number % 2}",
    )


RECORDS = [
    record(0, ttft_s=0.1, gap_s=0.05),
    record(1, ttft_s=0.6, gap_s=0.05),  # TTFT missed
    record(2, ttft_s=0.2, gap_s=0.2),  # TPOT missed
    record(3, ttft_s=0.3, gap_s=0.1, count=1),  # has no TPOT
    record(4, ttft_s=0.4, gap_s=0.05, count=0, outcome="failed"),
]
SUMMARY = bench.summarize(RECORDS, slo=SLO, num_gpus=2, mode="open_loop", request_rate=1.0, environment={"cpus": "2"})


def test_the_figures_are_those_that_a_person_computes() -> None:
    assert (SUMMARY.num_requests, SUMMARY.completed, SUMMARY.failed, SUMMARY.unfinished) == (5, 4, 1, 0)
    assert SUMMARY.duration_s == pytest.approx(3.3)
    assert SUMMARY.attainment == pytest.approx(2 / 5)
    assert SUMMARY.request_goodput == pytest.approx(2 / 3.3)
    assert SUMMARY.token_goodput == pytest.approx(6 / 3.3)
    assert SUMMARY.goodput_per_gpu == pytest.approx(1 / 3.3)
    assert (SUMMARY.total_input_tokens, SUMMARY.total_output_tokens) == (100, 16)
    assert SUMMARY.output_throughput == pytest.approx(16 / 3.3)
    ttfts = [100.0, 600.0, 200.0, 300.0]
    assert SUMMARY.mean_ttft_ms == pytest.approx(300.0)
    assert SUMMARY.p99_ttft_ms == pytest.approx(float(np.percentile(ttfts, 99)))
    assert SUMMARY.median_tpot_ms == pytest.approx(50.0)
    assert SUMMARY.max_slip_ms == pytest.approx(10.0)
    assert SUMMARY.max_delivery_ms == pytest.approx(1.0)
    assert sum(stage.mean_ms for stage in SUMMARY.stages) == pytest.approx(SUMMARY.mean_ttft_ms)
    assert sum(stage.share for stage in SUMMARY.stages) == pytest.approx(1.0)
    assert {use.name: use.num_requests for use in SUMMARY.engines} == {"p0": 5, "d0": 3, "d1": 2}
    assert [finding.check for finding in SUMMARY.findings] == ["failures"]


def test_the_limits_of_an_slo_are_each_a_limit() -> None:
    def attained(**limits: float) -> float | None:
        return bench.summarize(RECORDS[:4], slo=pd.bench.SLO(**limits)).attainment

    assert attained(ttft_s=0.25) == 0.5
    assert attained(ttft_s=0.15, ttft_per_token_s=0.008) == 0.75
    assert attained(tpot_s=0.1) == 0.75
    assert attained(itl_p99_s=0.1) == 0.75
    assert attained(e2e_s=0.5) == 0.5


def test_refusals_are_counted_by_reason_and_the_rare_ones_together() -> None:
    refused = [attrs.evolve(RECORDS[4], outcome="refused", error=f"reason {at}") for at in range(10) for _ in range(2)]
    summary = bench.summarize([*RECORDS, *refused, attrs.evolve(RECORDS[4], outcome="refused")])
    assert summary.refusals == {**{f"reason {at}": 2 for at in range(8)}, "other reasons": 5}
    assert summary.failed == 22


def test_nothing_is_none_and_not_nan() -> None:
    for records in ([], [attrs.evolve(RECORDS[4])]):
        summary = bench.summarize(records, slo=SLO)
        assert summary.mean_ttft_ms is None
        assert "NaN" not in str(summary)
        assert b"NaN" not in summary.to_json()


@pytest.mark.parametrize("summary", [bench.Summary(), SUMMARY, bench.merge([SUMMARY] * 3), bench.summarize([])])
def test_the_schema_of_the_package_accepts_what_is_written(summary: bench.Summary) -> None:
    whole = json.loads(SCHEMA_FILE.read_bytes())
    assert problems(json.loads(summary.to_json()), whole, whole) == []
    assert bench.Summary.from_json(summary.to_json()) == summary


def test_the_schema_is_that_of_the_code() -> None:
    assert bench.json_schema() == SCHEMA_FILE.read_bytes(), "write it again with SCHEMA_FILE.write_bytes(json_schema())"
    whole = json.loads(SCHEMA_FILE.read_bytes())
    assert problems({"mean_ttft_ms": "fast"}, whole, whole)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"schema": "pdinfer.bench/9"}',
        b'{"completed": "x"}',
        b'{"attainment": 1.01}',
        b'{"completed": 1, "completed": 2}',
        b'{"completed": 1, "compl\\u0065ted": 1}',
        b'{"slo": {"ttft_s": 1, "ttft_s": 2}}',
        b"\xff",
        b"{" * 9000,
        None,
    ],
)
def test_what_is_no_summary_is_refused(text: bytes) -> None:
    with pytest.raises(pd.ConfigError):
        bench.Summary.from_json(text)


VLLM = {
    "duration": 3.3, "completed": 4, "num_prompts": 4, "total_input_tokens": 100, "total_output_tokens": 16,
    "request_throughput": 4 / 3.3, "output_throughput": 16 / 3.3, "total_token_throughput": 116 / 3.3,
    "request_goodput:": 0.6, "mean_ttft_ms": 300.0, "median_ttft_ms": 250.0, "p99_ttft_ms": 591.0,
    "mean_tpot_ms": 100.0, "mean_itl_ms": 90.0, "mean_e2el_ms": 600.0, "request_rate": "inf", "tokenizer_id": "x",
}  # fmt: skip
SGLANG = {
    "duration": 3.3, "completed": 4, "total_input_tokens": 100, "total_output_tokens": 16, "request_rate": 1.0,
    "request_throughput": 4 / 3.3, "input_throughput": 100 / 3.3, "output_throughput": 16 / 3.3,
    "mean_e2e_latency_ms": 600.0, "p99_e2e_latency_ms": 900.0, "mean_ttft_ms": 300.0, "concurrency": 0.7,
    "accept_length": 1.5, "backend": "sglang",
}  # fmt: skip
AIPERF = {
    "time_to_first_token": {"unit": "ms", "avg": 300.0, "p50": 250.0, "p99": 591.0, "std": 10.0},
    "inter_token_latency": {"unit": "ms", "avg": 100.0},
    "request_latency": {"unit": "sec", "avg": 0.6},
    "benchmark_duration": {"unit": "sec", "avg": 3.3},
    "request_count": {"unit": "requests", "avg": 4},
    "request_throughput": {"unit": "requests/sec", "avg": 4 / 3.3},
    "goodput": {"unit": "requests/sec", "avg": 0.6},
    "input_config": {},
}
GENAI_BENCH = {
    "aggregated_metrics": {
        "run_duration": 3.3, "num_completed_requests": 4, "num_error_requests": 0, "num_requests": 4,
        "requests_per_second": 4 / 3.3, "num_concurrency": 2, "scenario": "D(100,16)",
        "stats": {"ttft": {"mean": 0.3, "p50": 0.25}, "tpot": {"mean": 0.1}, "e2e_latency": {"mean": 0.6}},
    }
}  # fmt: skip
TOOLS = {
    "vllm": (bench.from_vllm, VLLM),
    "sglang": (bench.from_sglang, SGLANG),
    "aiperf": (bench.from_aiperf, AIPERF),
    "genai_bench": (bench.from_genai_bench, GENAI_BENCH),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_file_of_another_tool_is_read(tool: str) -> None:
    read, sample = TOOLS[tool]
    summary = read(json.dumps(sample))
    assert summary.source == tool
    assert (summary.completed, summary.duration_s) == (4, 3.3)
    assert (summary.mean_ttft_ms, summary.mean_e2el_ms) == pytest.approx((300.0, 600.0))
    assert summary.findings == ()
    assert "left out" in summary.notes[0]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_byte_order_mark_is_no_part_of_a_file_and_a_key_is_there_once(tool: str) -> None:
    read, sample = TOOLS[tool]
    text = json.dumps(sample)
    assert read("\ufeff" + text) == read(b"\xef\xbb\xbf" + text.encode()) == read(text)
    name = next(iter(sample))
    with pytest.raises(pd.ConfigError, match=f"'{name}' appears twice"):
        read(text.replace("{", f'{{"{name}": 1, ', 1))


def test_a_summary_of_an_editor_that_writes_a_byte_order_mark_is_read() -> None:
    assert bench.Summary.from_json(b"\xef\xbb\xbf" + SUMMARY.to_json()) == SUMMARY


def test_the_goodput_of_vllm_is_read_with_and_without_its_colon() -> None:
    assert bench.from_vllm(json.dumps(VLLM)).request_goodput == 0.6
    assert bench.from_vllm(json.dumps({"completed": 1, "request_goodput": 0.5})).request_goodput == 0.5


def test_concurrency_that_was_asked_for_is_compared_with_what_was_held() -> None:
    summary = bench.from_vllm(json.dumps({**VLLM, "max_concurrency": 8}))
    assert (summary.mode, summary.max_concurrency) == ("closed_loop", 8)
    assert [finding.check for finding in summary.findings] == ["Little"]


def test_an_import_is_checked() -> None:
    found = bench.from_vllm(json.dumps({**VLLM, "output_throughput": 9.0}))
    assert [finding.check for finding in found.findings] == ["identities"]


def test_requests_of_aiperf_become_a_summary() -> None:
    def line(start: int, ttft: float, unit: str, phase: str = "profiling", *, cancelled: bool = False) -> str:
        return json.dumps(
            {
                "metadata": {
                    "request_start_ns": start * 10**9,
                    "request_end_ns": start * 10**9 + 2 * 10**9,
                    "was_cancelled": cancelled,
                    "benchmark_phase": phase,
                },
                "metrics": {
                    "time_to_first_token": {"value": ttft, "unit": unit},
                    "input_sequence_length": {"value": 7, "unit": "tokens"},
                    "output_sequence_length": {"value": 3, "unit": "tokens"},
                },
            }
        )

    text = "\n".join(
        [line(0, 9.0, "ms", "warmup"), line(5, 500.0, "ms"), line(6, 1.0, "sec"), line(7, 1, "s", cancelled=True)]
    )
    summary = bench.from_aiperf(text)
    assert (summary.num_requests, summary.completed, summary.failed) == (3, 2, 1)
    assert summary.mean_ttft_ms == pytest.approx(750.0)
    assert summary.mean_tpot_ms == pytest.approx(625.0)
    assert summary.mean_itl_ms is None
    with pytest.raises(pd.ConfigError, match="unit"):
        bench.from_aiperf(line(1, 1.0, "fortnights"))


@pytest.mark.parametrize("read", [row[0] for row in TOOLS.values()])
@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", "\ud800", '{"duration": "long"}', '{"completed": 1e999}', "\x00", '{"a":' * 3000, "null"]
)
def test_a_file_that_is_none_is_refused(read: object, text: str) -> None:
    with pytest.raises(pd.ConfigError):
        read(text)  # type: ignore[operator]
