"""Memory that a step has freed is there for the next one."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from pdinfer.process.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(32):  # malloc caches up to seven leftovers of a size beside aligned blocks, and each parts two blocks
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def next_time(how: str) -> int:
    """Return the page faults of filling 64 MiB that were filled and freed several times."""
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=300)
    return int(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's mallopt")
def test_freed_memory_is_used_again() -> None:
    assert next_time("keep") < 1000 < next_time("leave")
