"""Planted bugs are up to date: each bug's text is there once, its tests exist, and what is judged is said."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests import mutants, versions
from tests.mutants import ROOT, Verdict, all_mutants
from tests.places import NotFoundOnce, defined_in, file_of, place
from tests.planted.mutant import Mutant, parsed


def wrong(root: Path, planted: Sequence[Mutant]) -> Iterator[str]:
    """Yield what is wrong with the bugs that are planted below `root`."""
    for what in ("name", "digest"):
        counts = Counter(getattr(mutant, what) for mutant in planted)
        yield from (f"{m.name}: another has the same {what}" for m in planted if counts[getattr(m, what)] > 1)
    for mutant in planted:
        if mutant.new == mutant.old:
            yield f"{mutant.name}: nothing changes"
        try:
            place(root, mutant)
        except NotFoundOnce as error:
            yield str(error)
    for named in sorted({named for mutant in planted for named in mutant.tests.split()}):
        try:
            if _is_left_out(root, named):
                yield f"{named} is left out of make test"
        except NotFoundOnce as error:
            yield str(error)


def _is_left_out(root: Path, named: str) -> bool:
    """Return whether the test is marked `full`, all of its cases."""
    path, test = file_of(root, named), named.partition("[")[0].partition("::")[2].partition("::")[0]
    return bool(test) and "@pytest.mark.full\n" in defined_in(root, path)[test]


def test_bugs_and_their_tests_are_there() -> None:
    found = [*wrong(ROOT, all_mutants())]
    assert not found, "\n".join(found)
    assert len(all_mutants()) >= 800


def test_bugs_are_written_as_a_diff_is() -> None:
    text = """What they break.

test_a.py::test_x test_a.py::test_y
  a line goes
-    x = 1
  lines become others @ a.py
-if x:
-    y()
+y()
>z

test_b.py
  a part of two lines
<a
<    b
"""
    assert [*parsed(text)] == [
        Mutant("a line goes", "    x = 1\n", "", "test_a.py::test_x test_a.py::test_y"),
        Mutant("lines become others", "if x:\n    y()\n", "y()\nz", "test_a.py::test_x test_a.py::test_y", "a.py"),
        Mutant("a part of two lines", "a\n    b", "", "test_b.py"),
    ]
    with pytest.raises(ValueError, match="lines become others: 'if x:' does not begin with"):
        [*parsed(text.replace("-if", "if"))]


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    files = {
        "src/room/a.py": "x = 1\ny = 2\nz = 1\n",
        "src/b.py": "y = 2\n",
        "tests/here/test_one.py": "def test_a(): ...\nTestB = object\n@pytest.mark.full\ndef test_c(): ...\n",
        "tests/there/test_one.py": "def test_d(): ...\n@pytest.mark.full(minutes=1)\ndef test_e(): ...\n",
        "tests/planted/quotes.py": "x = 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    bug = Mutant("right", "x = 1", "x = 2", "test_one.py::test_a[1-2] test_one.py::TestB here/test_one.py")
    right = [bug, bug._replace(name="by file", old="y = 2", where="b.py", tests="test_one.py::test_e")]
    assert [*wrong(tmp_path, right)] == []
    found = [
        *wrong(
            tmp_path,
            [
                Mutant("twice in one", "= 1", "", "test_one.py::test_a"),
                Mutant("in two", "y = 2", "", "test_one.py::test_a"),
                Mutant("nowhere", "x = 3", "", "test_one.py::test_a"),
                Mutant("one name", "x = 1", "x = 1", "test_one.py"),
                Mutant("one name", "x = 1", "", "test_one.py::test_x"),
                Mutant("one bug", "x = 1", "2", "test_one.py::test_c"),
                Mutant("the same bug", "x = 1", "2", "test_one.py::test_c"),
            ],
        )
    ]
    for what in (
        "twice in one: its text is to be once in the paths with 'src/', and is in {'src/room/a.py': 2}",
        "in two: its text is to be once in the paths with 'src/', and is in {'src/b.py': 1, 'src/room/a.py': 1}",
        "nowhere: its text is to be once in the paths with 'src/', and is in none",
        "one name: nothing changes",
        "one name: another has the same name",
        "one bug: another has the same digest",
        "the same bug: another has the same digest",
        "test_one.py is to be one test, and is in ['tests/here/test_one.py', 'tests/there/test_one.py']",
        "test_one.py::test_x is to be one test, and is in none of ['tests/here/test_one.py'",
        "test_one.py::test_c is left out of make test",
    ):
        assert any(complaint.startswith(what) for complaint in found), what
    assert len(found) == 11


def test_the_page_says_how_many_were_judged() -> None:
    """It may lag behind new bugs a little, so that not each of them changes the page."""
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text("utf-8").split())
    said = re.search(r"`benchmarks/results/(\S+)` has the verdicts on (\d+) of (\d+) planted bugs", page)
    assert said is not None
    judged = mutants.read(mutants.recorded())
    assert (said[1], int(said[2])) == (mutants.recorded().name, len(judged))
    assert abs(int(said[3]) - len(all_mutants())) <= len(all_mutants()) / 20, "say how many there are now"
    assert len({verdict.digest for verdict in judged}) == len(judged) <= int(said[3])


def test_a_run_that_was_cut_off_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def judge(planted: Sequence[Mutant], num_processes: int) -> Iterator[Verdict]:
        asked[:] = [mutant.name for mutant in planted]
        for mutant in planted[:3]:
            yield Verdict(mutant.name, mutant.digest, mutants.commit(), mutants.NOT_SEEN, 1.5)
        if planted:
            raise KeyboardInterrupt

    monkeypatch.setattr(mutants, "judge", judge)
    monkeypatch.setattr(mutants, "all_mutants", lambda: all_mutants()[:8])
    monkeypatch.setattr(mutants, "recorded", lambda: tmp_path / "none")
    names = [mutant.name for mutant in all_mutants()[:8]]
    command, at = ["--verdicts", str(tmp_path / "build" / "verdicts")], "a"
    monkeypatch.setattr(mutants, "commit", lambda: at)
    for first in (0, 3, 6):
        with pytest.raises(KeyboardInterrupt):
            mutants.main(command)
        assert asked == names[first:]
    at = "b"
    for more, expected in (
        ([], names),
        (["--unjudged"], []),
        (["--random", "0"], []),
        (["--only", names[5]], names[5:6]),
    ):
        with suppress(KeyboardInterrupt):
            mutants.main([*command, *more])
        assert asked == expected
    at = "b+changes"  # is not one state
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            mutants.main(command)
        assert asked == names
    assert mutants.main([*command, "--unjudged", "--out", str(tmp_path / "out")]) == 0
    last = mutants.read(tmp_path / "out")
    assert [verdict.name for verdict in last] == sorted(names)
    assert {verdict.name for verdict in last if verdict.commit == "b+changes"} == set(names[:3])


def test_those_that_a_change_touches_are_chosen() -> None:
    mutant = all_mutants()[0]
    assert mutants.touches(mutant, {"README.md", place(ROOT, mutant)})
    assert mutants.touches(mutant, {file_of(ROOT, mutant.tests)})
    assert not mutants.touches(mutant, {"README.md"})


@pytest.mark.parametrize("path", [os.environ["PATH"], ""])
def test_a_tree_that_is_no_checkout_has_no_commit(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", path)
    assert versions.commit() == "unknown"


def test_bugs_are_judged_by_their_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = "[parser.addoption(each) for each in ('--longest', '--far')]"
    files = {
        "src/a.py": "x = 1\ny = False\n",
        "tests/conftest.py": f"def pytest_addoption(parser): {options}",
        "tests/test_a.py": "import a\ndef test_x():\n assert a.x == 1\n while a.y: ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "COPIED", ("src", "tests"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    bugs = [Mutant("seen", "x = 1", "x = 2", "test_a.py::test_x"), Mutant("not seen", "x = 1", "x = 1.0", "test_a.py")]
    outcomes = {verdict.name: verdict.outcome for verdict in mutants.judge(bugs, 1)}
    assert outcomes == {"seen": mutants.SEEN, "not seen": mutants.NOT_SEEN}
    monkeypatch.setattr(mutants, "LIMIT_S", 0)
    (hangs,) = mutants.judge([Mutant("hangs", "y = False", "y = True", "test_a.py")], 2)
    assert hangs.outcome == mutants.HANGS
    assert mutants.outcome_of(-11, "") == mutants.SEEN
    assert mutants.outcome_of(4, "first\nno match\n") == f"{mutants.NO_TEST_RAN}: no match"
    assert mutants.outcome_of(0, "2 skipped in 0.1s") == f"{mutants.NO_TEST_RAN}: 2 skipped in 0.1s"
