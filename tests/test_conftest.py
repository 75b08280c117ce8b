"""No test is skipped or hangs in silence: pytest's last lines name what was missing, and what did not end."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import turned

TESTS = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_needs_a_library(n):
    pytest.importorskip("no_such_library.inside")

@pytest.mark.needs("pytest", "never_installed")
def test_is_not_collected():
    raise AssertionError

def test_skips_for_another_reason():
    pytest.skip("not today")

def test_tells(record_property):
    record_property("information", "one two")
"""


@pytest.mark.full
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_what_is_missing_is_named(tmp_path, workers):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_skips.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('another_library')")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", *workers]
    command += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-4:-1] == [
        "for information: one two",
        "skipped for a missing library: another_library (1 module), no_such_library (3 tests)",
        "not collected for want of never_installed (1 test)",
    ]


MANY = """
import time
import pytest

passed_s, monotonic = [0], time.monotonic
time.monotonic = lambda: monotonic() + sum(passed_s)

@pytest.mark.parametrize("n", range(10))
def test_is_slow(n):
    passed_s.append(1000)
    print(f"ran {n}")

@pytest.mark.full(minutes=1)
def test_is_long():
    print("ran too late")
"""


@pytest.mark.full
def test_what_no_time_was_left_for_is_counted(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_many.py").write_text(MANY)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    options = ["--turn", "1", "--minutes", "60", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    said = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    numbers = [int(number) for number in re.findall(r"ran (\d)", said)]
    assert numbers == [6, 7, 8, 9]
    assert "too late" not in said
    assert f"{11 - len(numbers)} tests did not run for lack of time" in said


HANGS = """
import pytest
import threading

@pytest.fixture
def never_torn_down():
    yield
    threading.Event().wait()

def test_hangs():
    threading.Event().wait()

def test_fails_and_then_hangs(never_torn_down):
    assert not "an error"

def test_goes_on():
    pass
"""


@pytest.mark.full
def test_what_hangs_is_ended_and_named(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-n", "1"]
    result = subprocess.run([*command, "--longest", "1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    named = re.findall(r"worker '\w+' crashed while running 'test_hangs.py::(\w+)'", result.stdout)
    assert {*named} == {"test_hangs", "test_fails_and_then_hangs"}
    assert "1 passed" in result.stdout
    assert re.search(r'test_hangs.py", line \d+ in test_hangs', result.stderr), "its stack"


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_every_test_gets_its_turn_soon(share: float) -> None:
    """Where there is time for `share` of the tests, that many turns in a row run them all, whichever comes first."""
    tests = list(range(500))
    turns = round(3 / share)
    for first in range(40):
        ran = {test for turn in range(first, first + turns) for test in turned(tests, turn)[: int(share * 500)]}
        assert ran == set(tests)
