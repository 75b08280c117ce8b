"""No test fails because the machine is slow: it asks for no few seconds, and what it waits for has a far limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests/e2e", "tests/sim", "tests/unit")
HASTE = re.compile(
    r"monotonic\(\) - [^<\n]*< *\d"  # it took less than so many seconds
    r"|\bmonotonic\(\) \+ [1-9]"  # until so many seconds have passed
    r"|\b(?:join|acquire|result|drain)\((?:timeout=)?(?:[3-9]|\d\d+)(?:\.\d*)?\)"  # shorter ones are in vain
)


def hasty(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if HASTE.search(line):
            yield f"{name}:{number} asks how many seconds it takes: wait tests.forks.FAR_S, or let time be virtual"


def test_no_test_is_in_haste() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 200
    assert [each for path in paths for each in hasty(str(path.relative_to(ROOT)), path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("line", "is_hasty"),
    [
        ("assert time.monotonic() - started < 5.0", True),
        ("assert 0.2 < time.monotonic() - started < 8", True),
        ("end = time.monotonic() + 10", True),
        ("thread.join(15.0)", True),
        ("assert answered.acquire(timeout=10)", True),
        ("assert time.monotonic() - started >= 0.1", False),
        ("assert time.monotonic() - started < TIMEOUT_S", False),
        ("thread.join(0.2)", False),
        ("end = time.monotonic() + FAR_S", False),
    ],
)
def test_haste_is_seen(line: str, is_hasty: bool) -> None:
    assert [*hasty("a.py", line)] == (
        ["a.py:1 asks how many seconds it takes: wait tests.forks.FAR_S, or let time be virtual"] * is_hasty
    )
