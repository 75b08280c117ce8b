"""Products are right only where OpenMP gives the threads that torch counts on."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
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


@pytest.mark.parametrize("folder", [b"/my venv/lib", b"/gespr\xe4ch/lib", "/\x85\u3000é/lib".encode()])
def test_the_runtime_is_found_in_any_folder(folder: bytes, tmp_path: Path) -> None:
    """In one with a space its end was loaded, so that no model could be."""
    path, maps = folder + b"/libgomp-24e2ab19.so.1.0.0", tmp_path / "maps"
    maps.write_bytes(
        b"7f00-7f01 r-xp 00000000 fe:00 1234    /lib/libm.so.6 (deleted)\n7f02-7f03 rw-p 00000000 00:00 0 \n"
        b"7f04-7f05 r-xp 00000000 fe:00 1235    " + path + b"\n7f06-7f07 r--p 00000000 00:00 0    [vvar]\n"
    )
    assert threads.loaded_openmp(maps) == os.fsdecode(path)
    assert threads.loaded_openmp(tmp_path / "there is no proc here") is None


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
