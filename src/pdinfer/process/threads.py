"""Threads of ours: at any moment the process may have as many as it may have, so whoever needs one does without it. And
those of the OpenMP runtime that torch has loaded: whether it gives as many as torch is told to use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from pdinfer.errors import ConfigError, Overloaded


def start(thread: threading.Thread) -> threading.Thread:
    """Start a thread, and return it. Raises Overloaded as `starting` does."""
    with starting(thread.name):
        thread.start()
    return thread


@contextlib.contextmanager
def starting(name: str) -> Iterator[None]:
    """Raise Overloaded when the thread that the block starts is one too many."""
    try:
        yield
    except RuntimeError as error:
        raise Overloaded(
            f"the thread {name} cannot be started: {error}; end others, or raise the limits of this user (ulimit -u) "
            "and of its control group (pids.max)"
        ) from error


def loaded_openmp(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of the GNU OpenMP runtime in this process, which is torch's own in its wheels. None where there
    is none, and where /proc is not there to say it."""
    try:
        lines = os.fsdecode(maps.read_bytes()).split("\n")
    except OSError:
        return None
    # a path comes after five columns, and may have spaces
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((path for path in paths if re.fullmatch(r"libgomp[-.\w]*", path.rpartition("/")[2])), None)


def check_threads(num_threads: int) -> None:
    """Raise ConfigError where OpenMP may give fewer threads. torch's products of bfloat16 (oneDNN's) cut their work for
    the number that they are told, and leave out, without a word, what threads that do not come would have computed."""
    path = loaded_openmp() if num_threads > 1 else None
    if path is None:
        return
    runtime = ctypes.CDLL(path)
    limits = {
        f"OMP_THREAD_LIMIT is {(limit := runtime.omp_get_thread_limit())}": limit < num_threads,
        "OMP_DYNAMIC is set": runtime.omp_get_dynamic(),
        "OMP_MAX_ACTIVE_LEVELS is 0": runtime.omp_get_max_active_levels() < 1,
    }
    why = next((why for why, applies in limits.items() if applies), None)
    if why is not None:
        raise ConfigError(
            f"{num_threads} threads were to compute, and OpenMP may give fewer: {why}. torch's products would be wrong "
            "without a word; unset it, or call torch.set_num_threads with what OpenMP gives, and use "
            "EngineConfig(num_threads=None)"
        )
