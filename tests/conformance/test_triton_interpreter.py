"""Kernels in Triton do what the reference does, on a CPU: Triton's interpreter runs them, in a process of its own.

The same by hand, for one suite: TRITON_INTERPRET=1 python -m pytest tests/conformance/test_ops.py -k triton
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.backends import ROOT, child_environment
from tests.each_time import others_in_full

EACH_TIME = ("test_ops",)
FEW = 3
FEW_OF = {"test_routing_ops": 10, "test_sparse_ops": 4, "test_draws": 5, "test_not_finite": 2, "test_four_bit_ops": 12}
"""How many cases of each test run in `test_kernels_do_what_the_reference_does`, joined ones counted, and of those of
some suites."""
SUITES = {
    "test_ops": (16, 16),
    "test_fused_ops": (30, 30),
    "test_page_ops": (3, 3),
    "test_not_finite": (53, 65),
    "test_quantized_ops": (23, 24),
    "test_four_bit_ops": (4, 4),
    "test_attention_ops": (19, 19),
    "test_sparse_ops": (35, 35),
    "test_routing_ops": (3, 3),
    "test_draws": (12, 12),
}
"""How many tests of each suite must pass at least, with a few of their cases and with more, so that none is left out in
silence."""
MOST_CASES = {"test_not_finite": 6, "test_attention_ops": 16, "test_sparse_ops": 12}
"""How many cases of each test are run, joined ones counted, where all of them would take many minutes."""


@pytest.mark.parametrize("suite", others_in_full(SUITES, EACH_TIME, minutes=1))
def test_kernels_do_what_the_reference_does(suite: str) -> None:
    passed, told = interpreted(suite, f"--most-cases={FEW_OF.get(suite, FEW)}")
    assert passed >= SUITES[suite][0], told


@pytest.mark.full(minutes=4)
@pytest.mark.parametrize("suite", SUITES)
def test_kernels_do_so_in_more_cases(suite: str) -> None:
    passed, told = interpreted(suite, *([f"--most-cases={MOST_CASES[suite]}"] if suite in MOST_CASES else []))
    assert passed >= SUITES[suite][1], told


def interpreted(suite: str, *options: str) -> tuple[int, str]:
    """Run the tests of a suite that are of Triton. Return how many passed, and what pytest told."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "-m", "not full and not gpu", "-k", "triton", f"tests/conformance/{suite}.py"],
        cwd=ROOT,
        env=child_environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1] if passed else 0), done.stdout[-1000:]
