"""Programs that use pdinfer are checked as their authors check them: with mypy, strictly. `make lint` does so too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = ("examples", "tests/typing")


def check(*targets: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", *targets]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_library_says_that_it_is_typed():
    assert (ROOT / "src/pdinfer/py.typed").is_file()


@pytest.mark.full
def test_programs_are_right_and_what_is_wrong_in_them_is_an_error():
    """An error that is expected has `# type: ignore[code]`; where none comes, the unused ignore is an error."""
    checked = check(*PROGRAMS)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_what_is_wrong_says_what_is_wrong_with_it():
    programs = "".join(path.read_text("utf-8") for path in (ROOT / "tests/typing").glob("*.py"))
    assert len(re.findall(r"# type: ignore\[", programs)) > 40
    assert not re.findall(r"# type: ignore(?!\[)", programs)
