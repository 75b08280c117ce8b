"""The page of results says what the results files say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report() -> Any:
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_results_say(report: Any) -> None:
    text = report.page(report.read(ROOT / "benchmarks" / "results"))
    assert report.PAGE.read_text("utf-8") == text, "run python benchmarks/report.py"
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
    text = report.page(report.read(tmp_path))
    assert "| a | 5 | 3 | 9 |" in text
    assert "| b | 5 | 2 | 9 |" in text
    assert "| a | 5 | 1 |" not in text


def test_every_case_of_the_benchmark_is_on_the_page(report: Any) -> None:
    told = (ROOT / "benchmarks" / "goodput.py").read_text("utf-8")
    cases = re.search(r"^CASES = \((.*?)\)", told, re.MULTILINE | re.DOTALL)
    assert cases is not None
    assert set(re.findall(r'"(\w+)"', cases[1])) == set(report.CASES) == set(report.NAMED_BY)
