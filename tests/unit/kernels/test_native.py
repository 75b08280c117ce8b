"""The native kernels are compiled once, into a folder of our own. Where that is impossible a sentence says why."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.native import build as native_build
from pdinfer.kernels.native.build import SIGNATURES
from pdinfer.process import compiled as process_compiled

Build = Callable[[], ctypes.CDLL]

can_build = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Return a function that loads the library anew, as in a new process, for a CPU that can run it and with a home of
    its own. Its kernels do nothing, so that they compile in no time."""
    source = tmp_path / "source" / "native.c"
    source.parent.mkdir()
    first, *others = SIGNATURES
    stub = '__attribute__((visibility("default"))) void {}(void) {{}}\n'
    source.with_name("first.c").write_text('#include "shared.h"\n' + stub.format(first))
    source.with_name("shared.h").write_text("")
    source.write_text("".join(stub.format(name) for name in others))
    monkeypatch.setattr(native_build, "FOLDER", source.parent)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native_build, "cpu_flags", lambda: frozenset({"avx2"}))

    def anew() -> ctypes.CDLL:
        native_build.library_or_reason.cache_clear()
        native_build._library.cache_clear()
        try:
            return native_build.library()
        finally:
            native_build.library_or_reason.cache_clear()
            native_build._library.cache_clear()

    return anew


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which command of the compiler runs, and how often: "--version", "-c" or "-shared"."""
    ran: list[str] = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> object:
        ran.extend({"--version", "-c", "-shared"} & set(command))
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", noted)
    return ran


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the only compiler in PATH a shell script, which fails with a message of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "cc"
    path.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return path


def kept(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "pdinfer").iterdir())


def test_a_cpu_that_cannot_run_it_is_told_and_is_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_build, "cpu_flags", frozenset)
    with pytest.raises(BackendUnavailable, match="is for x86-64 CPUs, and this "):
        build()
    assert not caplog.records


def test_without_a_compiler_it_is_told(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendUnavailable, match=r"needs a C compiler .* built for this CPU is in .*pdinfer"):
        build()


def test_what_the_compiler_says_is_told(build: Build, compiler: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"could not be compiled by .*: no such flag"):
        build()


def test_what_is_slower_for_want_of_it_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(native_build, "cpu_flags", lambda: frozenset({"avx2"}))
    native_build.library_or_reason.cache_clear()
    native_build._library.cache_clear()
    try:
        for _ in range(3):
            with pytest.raises(BackendUnavailable):
                native_build.library()
    finally:
        native_build.library_or_reason.cache_clear()
        native_build._library.cache_clear()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no such flag" in record.getMessage()


def test_a_compiler_that_hangs_or_is_no_program_is_told(
    monkeypatch: pytest.MonkeyPatch, build: Build, compiler: Path
) -> None:
    compiler.write_bytes(b"\x7fELF nonsense")
    with pytest.raises(BackendUnavailable, match="could not be compiled"):
        build()
    compiler.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(process_compiled, "COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(BackendUnavailable, match="timed out"):
        build()


@can_build
def test_it_is_compiled_once(build: Build, commands: list[str], tmp_path: Path) -> None:
    build()
    folder = tmp_path / ".cache" / "pdinfer"
    (compiled,) = kept(tmp_path)  # and nothing of the build
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o022
    assert not stat.S_IMODE(compiled.stat().st_mode) & 0o022
    build()
    assert sorted(commands) == ["--version", "--version", "-c", "-shared"]


@can_build
def test_what_is_not_whole_is_built_anew(build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build()
    (compiled,) = kept(tmp_path)
    content = compiled.read_bytes()
    for broken in (b"", content[:4096], content[:-1], content + b"\0", bytes(len(content)), b"nonsense"):
        compiled.unlink()  # it is mapped: cutting it short would be felt
        compiled.write_bytes(broken)
        compiled.chmod(0o700)
        caplog.clear()
        build()
        assert "is not what was written there" in caplog.text
        assert kept(tmp_path) == [compiled]
        assert compiled.read_bytes() == content
    compiled.chmod(0o722)  # others could have written it
    build()
    assert not compiled.stat().st_mode & 0o022
    elsewhere = tmp_path / "elsewhere.so"
    compiled.rename(elsewhere)
    compiled.symlink_to(elsewhere)
    build()
    assert not compiled.is_symlink()


@can_build
@pytest.mark.parametrize("name", ["first.c", "native.c", "shared.h"])
def test_any_source_that_changes_makes_another_library(build: Build, tmp_path: Path, name: str) -> None:
    build()
    with (native_build.FOLDER / name).open("a") as source:
        source.write("/* another */\n")
    build()
    assert len(kept(tmp_path)) == 2


@can_build
def test_without_a_compiler_one_that_was_built_for_this_cpu_will_do(
    monkeypatch: pytest.MonkeyPatch, build: Build, commands: list[str], tmp_path: Path
) -> None:
    build()
    (compiled,) = kept(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    commands.clear()
    build()
    assert commands == []
    beside = tmp_path / "installed"
    beside.mkdir()
    for source in native_build.FOLDER.iterdir():
        shutil.copy(source, beside)
    monkeypatch.setattr(native_build, "FOLDER", beside)
    compiled.rename(beside / compiled.name)
    build()
    monkeypatch.setattr(native_build, "cpu_flags", lambda: frozenset({"avx2", "another"}))
    with pytest.raises(BackendUnavailable, match="needs a C compiler"):
        build()


@can_build
def test_a_compiler_that_fails_leaves_one_that_another_compiler_made(
    build: Build, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    build()
    request.getfixturevalue("compiler")
    build()


@can_build
def test_a_folder_that_others_can_write_is_not_used(
    build: Build, tmp_path: Path, commands: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ".cache" / "pdinfer"
    folder.mkdir(parents=True)
    for mode in (0o777, 0o770, 0o702):
        folder.chmod(mode)
        commands.clear()
        caplog.clear()
        build()
        assert kept(tmp_path) == []
        assert "-c" in commands
        assert "others can write it" in caplog.text


@can_build
def test_a_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, build: Build, tmp_path: Path) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    build()
    assert kept(tmp_path) == []


@can_build
def test_where_the_folder_cannot_be_written_it_is_built_for_this_process(
    monkeypatch: pytest.MonkeyPatch, build: Build, tmp_path: Path
) -> None:
    made = process_compiled.ScratchFolder

    def only_elsewhere(parent: Path | None = None) -> object:
        if parent is not None:
            raise OSError(30, "Read-only file system")
        return made()

    monkeypatch.setattr(process_compiled, "ScratchFolder", only_elsewhere)
    build()
    assert kept(tmp_path) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build()


@can_build
def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, build: Build, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    build()
    assert len(list((tmp_path / "mine" / "pdinfer").glob("native-*.so"))) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    build()
    assert len(kept(tmp_path)) == 1


@can_build
def test_many_may_build_at_once(build: Build, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def one() -> None:
        try:
            process_compiled.find_or_build(native_build.sources(), native_build.cpu_flags())
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(path.suffix == ".so" for path in kept(tmp_path))
    build()
