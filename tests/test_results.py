"""The page of results and the front page say what the results files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.backends import script

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report() -> Any:
    return script("benchmarks/report.py")


def test_the_pages_say_what_the_results_say(report: Any) -> None:
    results = ROOT / "benchmarks" / "results"
    text, raced = report.page(report.read(results), report.races(results)), report.races(results)
    assert report.PAGE.read_text("utf-8") == text, "run python benchmarks/report.py"
    readme = report.README.read_text("utf-8")
    assert all(readme.count(mark) == 1 for mark in report.MARKS)
    assert report.front(readme, raced) == readme, "run python benchmarks/report.py"
    plots = re.findall(r"\((plots/\w+\.svg)\)", text)
    assert plots
    assert all((report.PAGE.parent / plot).is_file() for plot in plots)


def test_the_newest_line_of_a_name_counts(report: Any, tmp_path: Path) -> None:
    def line(policy: str, seconds: float) -> str:
        told = {"policy": policy, "num_requests": 5, "seconds": seconds, "events_per_s": 9}
        return json.dumps({"case": "speed", **told}) + "\n"

    (tmp_path / "2026-01-01-goodput.jsonl").write_text(line("a", 1.0) + line("b", 2.0))
    (tmp_path / "2026-01-02-goodput.jsonl").write_text(line("a", 3.0))
    (tmp_path / "2026-01-03-other.jsonl").write_text("{}")
    text = report.page(report.read(tmp_path), {})
    assert "| a | 5 | 3 | 9 |" in text
    assert "| b | 5 | 2 | 9 |" in text
    assert "| a | 5 | 1 |" not in text


def test_every_case_of_the_benchmark_is_on_the_page(report: Any) -> None:
    told = (ROOT / "benchmarks" / "goodput.py").read_text("utf-8")
    cases = re.search(r"^CASES = \((.*?)\)", told, re.MULTILINE | re.DOTALL)
    assert cases is not None
    assert set(re.findall(r'"(\w+)"', cases[1])) == set(report.CASES) == set(report.NAMED_BY)


def raced(case: str, peer: str, ratio: float, flags: tuple[str, ...] = ("avx2",), name: str = "AMD EPYC") -> str:
    """A line of the race, in which the peer gave 10."""
    told = {"case": case, "baseline": peer, "value": 10 * ratio, "baseline_value": 10, "unit": "tok/s", "runs": 3}
    told |= {"ratio": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.1, "clock": "cpu", "threads": 1}
    return json.dumps({"bench": "cpu_race", **told, "dtype": "bfloat16", "cpu": {"name": name, "flags": flags}}) + "\n"


def test_each_make_of_cpu_has_its_table_and_the_newest_line_of_a_peer_counts(report: Any, tmp_path: Path) -> None:
    amx = ("avx2", "amx_bf16")
    old = raced("decode:8", "a", 0.5) + raced("decode:8", "b", 3.0) + raced("decode:8", "a", 0.9, amx, "INTEL(R) XEON")
    (tmp_path / "2026-01-01-cpu-race.jsonl").write_text(old)
    missing = json.dumps({"bench": "cpu_race", "case": "decode:8", "baseline": "c", "missing": "why"}) + "\n"
    new = raced("decode:8", "a", 2.0) + raced("decode:32", "a", 1.5) + missing
    (tmp_path / "2026-01-02-cpu-race.jsonl").write_text(new)
    found = report.races(tmp_path)
    assert [*found] == [("amd", "avx2"), ("intel", *amx)]
    assert [(line["case"], line["baseline"], line["ratio"]) for line in found["amd", "avx2"]] == [
        ("decode:8", "a", 2.0),
        ("decode:8", "b", 3.0),
        ("decode:32", "a", 1.5),
    ]
    tables = report.summary(found)
    assert re.findall(r"### (.*)", tables) == ["AMD EPYC (avx2)", "INTEL(R) XEON (avx2, amx_bf16)"]
    assert "| decode, 8 sequences of 512 tokens | cpu | 20 tok/s | a 10 | 2.00 (1.90 to 2.10) |" in tables
    assert "b 10" not in tables
    assert "b 10" in report.whole(found)


def test_where_we_are_behind_is_in_the_table_of_the_closest_peers(report: Any, tmp_path: Path) -> None:
    lines = [raced("mixed/itl_p50", "a", 0.9), raced("mixed/itl_p50", "b", 1.2), raced("mixed/ttft_p50", "a", 2.0)]
    (tmp_path / "2026-01-01-cpu-race.jsonl").write_text("".join(lines))
    tables = report.summary(report.races(tmp_path))
    assert "| many requests at once: ITL, median | cpu | 9 tok/s | a 10 | **0.90** (0.80 to 1.00) |" in tables
    assert "TTFT, median" not in tables


def test_who_was_raced_on_a_make_and_who_never_was(report: Any, tmp_path: Path) -> None:
    lines = [raced("decode:1", "llama.cpp", 1.2), raced("decode:8", "llama.cpp", 1.05), raced("decode:1", "vllm", 2.0)]
    (tmp_path / "2026-01-02-cpu-race.jsonl").write_text("".join(lines))
    other = raced("decode:1", "llama.cpp", 1.3, ("avx2", "amx_int8"), "Xeon")
    (tmp_path / "2026-01-03-cpu-race.jsonl").write_text(other)
    told = report.opponents(report.races(tmp_path))
    assert "| AMD EPYC (avx2) | llama.cpp | 2 | " in told
    assert "| 2026-01-02 | 1 of 2 |" in told
    assert "| Xeon (avx2, amx_int8) | vllm | never |" in told
    assert "| Xeon (avx2, amx_int8) | llama.cpp | 1 | " in told
