"""What a process holds over time, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import attrs

MIB = 1 << 20
LEAST = 9
"""A shorter series of samples is not compared: a third of it would be one or two."""
TOLERANCE = {"rss_bytes": 16 * MIB, "threads": 2, "descriptors": 8, "files": 2}
"""How far the median of the last third may lie above that of the second one.

Bytes: malloc gives each of several threads an arena of its own, which fills to its high-water mark whenever that thread
first meets its worst case, and torch keeps freed buffers of a step. Threads and descriptors: at the moment of some
samples there is a thread that dials, a link that is made anew and one that is not yet forgotten (2 threads, and for 2
peers 2 links with 2 descriptors each). Files: the socket and the folder of a process that is just replaced.
"""


@attrs.frozen
class Usage:
    """What one process uses at one moment; `files` counts those in its folder and below."""

    rss_bytes: int
    threads: int
    descriptors: int
    files: int = 0


def usage(pid: int, folder: Path, apart: Path | None = None) -> Usage:
    """Measure what `pid` holds now, and `folder` without what is below `apart`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    of = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "Threads"))}
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    files = sum(apart is None or apart not in path.parents for path in folder.rglob("*"))
    return Usage(int(of["VmRSS"]) << 10, int(of["Threads"]), descriptors, files)


def growth(series: Sequence[Usage]) -> dict[str, float]:
    """Return the median of the last third less that of the second; the first third is warm-up. Empty for a short
    series."""
    if len(series) < LEAST:
        return {}
    third = len(series) // 3
    second, last = series[third : 2 * third], series[2 * third :]
    return {
        name: statistics.median(getattr(one, name) for one in last)
        - statistics.median(getattr(one, name) for one in second)
        for name in TOLERANCE
    }


def leaks(series: Sequence[Usage]) -> list[str]:
    """Return what grew by more than is tolerated."""
    return [
        f"{name} grew by {by:g}, more than {TOLERANCE[name]}"
        for name, by in growth(series).items()
        if by > TOLERANCE[name]
    ]
