"""Products are right only where OpenMP gives the threads that torch counts on."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.process import threads
from pdinfer.process.forked import begin_to_compute


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime that gives any number of threads, until a test sets another thing."""
    answers = SimpleNamespace(limit=2**31 - 1, dynamic=0, levels=1)
    told = SimpleNamespace(
        omp_get_thread_limit=lambda: answers.limit,
        omp_get_dynamic=lambda: answers.dynamic,
        omp_get_max_active_levels=lambda: answers.levels,
    )
    monkeypatch.setattr(threads, "loaded_openmp", lambda: "libgomp.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: told)
    return answers


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("limit", 3, "OMP_THREAD_LIMIT is 3"),
        ("dynamic", 1, "OMP_DYNAMIC is set"),
        ("levels", 0, "OMP_MAX_ACTIVE_LEVELS is 0"),
    ],
    ids=["limit", "dynamic", "levels"],
)
def test_threads_that_openmp_may_not_give_are_refused(runtime: Any, name: str, value: int, told: str) -> None:
    begin_to_compute(4)
    setattr(runtime, name, value)
    with pytest.raises(pd.ConfigError, match=f"4 threads were to compute, and OpenMP may give fewer: {told}"):
        begin_to_compute(4)
    begin_to_compute(1)


def test_what_openmp_gives_is_used(runtime: Any) -> None:
    runtime.limit = 4
    begin_to_compute(4)


def test_the_runtime_of_torch_is_asked() -> None:
    path = threads.loaded_openmp()
    if path is None:
        pytest.skip("torch has another OpenMP here")
    runtime = ctypes.CDLL(path)
    runtime.omp_set_dynamic(1)
    try:
        with pytest.raises(pd.ConfigError, match="OMP_DYNAMIC"):
            threads.check_threads(2)
    finally:
        runtime.omp_set_dynamic(0)
    threads.check_threads(2)
