"""Compiling the native kernels: once, into a folder of our own, and a sentence where it cannot be."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import native_build


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """`library` anew, for a CPU that can run it and a home of its own."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(native_build, "_cpu_flags", lambda: frozenset({native_build.NEEDED}))
    return native_build.library.__wrapped__


def test_a_cpu_that_cannot_run_it_is_told(monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]) -> None:
    monkeypatch.setattr(native_build, "_cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(BackendUnavailable, match="needs a CPU with avx512_bf16"):
        build()


def test_without_a_compiler_it_is_told(monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendUnavailable, match="needs a C compiler"):
        build()


def test_what_the_compiler_says_is_told(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any], tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"could not be compiled by .*: no such flag"):
        build()


@pytest.mark.skipif(
    shutil.which("cc") is None or native_build.NEEDED not in native_build._cpu_flags(),
    reason="needs a C compiler and a CPU with AVX-512 BF16",
)
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any], tmp_path: Path) -> None:
    build()
    folder = tmp_path / ".cache" / "pdinfer"
    (compiled,) = folder.glob("native-*.so")
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o022
    commands: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    build()
    assert [command[1:] for command in commands] == [["--version"]]
    folder.chmod(0o777)  # what others may write is not loaded
    compiled.write_bytes(b"nonsense")
    build()
    assert len(commands) > 2
