"""The CPU of this machine, for every line of the race. Needs the standard library alone."""

import functools
import os
import re
from pathlib import Path

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8")
"""The instructions that decide how fast products are, as Linux names them."""


def cpu_of(cpuinfo: str, cores: int) -> dict[str, object]:
    """Return the name of the first CPU in the text of /proc/cpuinfo, and which of FLAGS it has."""
    name = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.+)$", cpuinfo, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return {
        "name": name[1].strip() if name else "unknown",
        "flags": [flag for flag in FLAGS if flag in has],
        "cores": cores,
    }


@functools.cache
def cpu_here() -> dict[str, object]:
    """Return name, flags and number of cores of this machine's CPU."""
    return cpu_of(Path("/proc/cpuinfo").read_text("utf-8"), len(os.sched_getaffinity(0)))
