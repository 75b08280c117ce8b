"""The suites of all providers on a card, each in processes of its own: a fault of a kernel ends one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.backends import ROOT, child_environment

SUITES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests" / "conformance").glob("test_*.py")
    if "for_every_provider" in path.read_text() or "every_place" in path.read_text()
)
MINUTES = 9
WORKERS = str(max(1, min(8, len(os.sched_getaffinity(0)) // 2)))
"""Processes of a suite. The largest has 2100 tests, of a quarter of a second each on an H200: most of it compiles."""


def pytest_in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not full", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60 * MINUTES,
        check=False,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES)
def test_ops_of_every_provider(suite: str) -> None:
    done = pytest_in_a_process("-n", WORKERS, "--dist", "worksteal", suite)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_there_are_suites_for_a_card() -> None:
    """Each has cases there, which are counted where there is no card."""
    assert {"tests/conformance/test_ops.py", "tests/conformance/test_attention_ops.py"} <= set(SUITES)
    done = pytest_in_a_process("--collect-only", "tests/conformance/test_page_ops.py")
    assert ("-cuda]" if torch.cuda.is_available() else "for want of CUDA (3 tests)") in done.stdout
