"""No test is skipped in silence: pytest's last lines name what was missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_needs_a_library(n):
    pytest.importorskip("no_such_library.inside")

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
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-3:-1] == [
        "for information: one two",
        "skipped for a missing library: another_library (1 module), no_such_library (3 tests)",
    ]
