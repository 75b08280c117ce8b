"""`make test` runs what is promised, and leaves the rest to `make test-all`."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_itemcollected, pytest_pycollect_makeitem
from tests.mutants import all_mutants
from tests.tiers import ROOT, is_run_each_time

ARGS, TESTPATHS = pytest.Config.ArgsSource.ARGS, pytest.Config.ArgsSource.TESTPATHS
UNNAMED = "tests/e2e/test_pairing.py::test_no_page_has_this_name[1]"


def test_every_promise_is_tested_each_time() -> None:
    named = re.findall(r"tests/\w+/\w+\.py::\w+", (ROOT / "docs" / "protocol.md").read_text("utf-8"))
    assert len(named) > 40
    assert [test for test in named if not is_run_each_time(f"{test}[a case]")] == []


def test_every_planted_bug_is_found_each_time() -> None:
    named = {test for mutant in all_mutants() for test in mutant.tests.split() if "::" in test}
    names = {test.rpartition("/")[2] for test in named}
    assert [name for name in sorted(names) if not is_run_each_time(f"tests/e2e/{name}")] == []


def test_of_fleets_and_simulated_runs_the_rest_is_left_out() -> None:
    assert not is_run_each_time(UNNAMED)
    assert not is_run_each_time("tests/sim/test_engines.py::test_real_engines_say_what_the_model_says[0]")
    assert is_run_each_time("tests/sim/test_runs.py::test_every_promise_holds[0]")
    assert is_run_each_time("tests/unit/kv/test_pool.py::test_anything")


@pytest.mark.parametrize(
    ("source", "asked", "made"),
    [(TESTPATHS, "not full", []), (TESTPATHS, "full or not full", None), (ARGS, "not full", None)],
)
def test_no_case_is_made_of_what_is_left_out(
    source: pytest.Config.ArgsSource, asked: str, made: list[object] | None
) -> None:
    path, _, name = UNNAMED.partition("[")[0].partition("::")
    config = SimpleNamespace(args_source=source, option=SimpleNamespace(markexpr=asked))
    collector: Any = SimpleNamespace(config=config, nodeid=path)
    assert pytest_pycollect_makeitem(collector, name) == made
    assert pytest_pycollect_makeitem(collector, "helper") is None


@pytest.mark.parametrize(("source", "left_out"), [(TESTPATHS, ["full"]), (ARGS, [])])
def test_who_names_tests_gets_them(source: pytest.Config.ArgsSource, left_out: list[str]) -> None:
    marks: list[pytest.MarkDecorator] = []
    item = SimpleNamespace(config=SimpleNamespace(args_source=source), nodeid=UNNAMED, add_marker=marks.append)
    pytest_itemcollected(item)
    assert [mark.name for mark in marks] == left_out
