"""No test fails because the machine is slow: it asks for no few seconds, and what it waits for has a far limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BESIDE = (
    "tests/soak/",
    "tests/vllm/",
    "tests/test_waits.py",
    "tests/conformance/test_native_memory.py",
)
"""What `make test` does not run; this file; and one that looks for a leak for 10 s, which is no wait for an event."""
HASTE = re.compile(
    r"\bassert .*monotonic\(\) - [^<\n]*< *\d"  # it took less than so many seconds
    r"|\bmonotonic\(\) \+ [1-9][\d.]*\b(?! \*)"  # until so many seconds have passed
    r"|\b(?:join|acquire|result|drain|wait|settimeout|alarm|timeout)\((?:timeout=)?(?:[3-9]|\d\d+)(?:\.\d*)?\)"
    r"|\btimeout=(?:[3-9]|[1-5]\d)(?:\.\d*)?\b"  # shorter ones are in vain, and Python takes a while to start
    r"|\bcreate_connection\(.*, \d+(?:\.\d*)?\)"
)


def hasty(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if HASTE.search(line):
            yield f"{name}:{number} asks how many seconds it takes: wait tests.forks.FAR_S, or let time be virtual"


def test_no_test_is_in_haste() -> None:
    paths = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "tests").rglob("*.py"))}
    looked_at = {name: path.read_text("utf-8") for name, path in paths.items() if not name.startswith(BESIDE)}
    assert len(looked_at) > 300
    assert [each for name, text in looked_at.items() for each in hasty(name, text)] == []


@pytest.mark.parametrize(
    ("line", "is_hasty"),
    [
        ("assert time.monotonic() - started < 5.0", True),
        ("assert 0.2 < time.monotonic() - started < 8", True),
        ("end = time.monotonic() + 10", True),
        ("thread.join(15.0)", True),
        ("assert answered.acquire(timeout=10)", True),
        ("assert stopped.wait(5)", True),
        ("sock.settimeout(5.0)", True),
        ("sock = socket.create_connection((host, int(port)), 5.0)", True),
        ("signal.alarm(5)  # it hangs", True),
        ("subprocess.run(command, timeout=30, check=True)", True),
        ("async with asyncio.timeout(10):", True),
        ("assert time.monotonic() - started >= 0.1", False),
        ("assert time.monotonic() - started < TIMEOUT_S", False),
        ("thread.join(0.2)", False),
        ("end = time.monotonic() + FAR_S", False),
        ("end = time.monotonic() + 60 * minutes", False),
        ("while time.monotonic() - since < 0.05:", False),
        ("channel.wait(1.0)", False),
        ('receiver.wait("opened", 4)', False),
        ("subprocess.run(command, timeout=300)", False),
    ],
)
def test_haste_is_seen(line: str, is_hasty: bool) -> None:
    assert [*hasty("a.py", line)] == (
        ["a.py:1 asks how many seconds it takes: wait tests.forks.FAR_S, or let time be virtual"] * is_hasty
    )
