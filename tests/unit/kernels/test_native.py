"""The native kernels are compiled once, into a folder of our own. Where that is impossible a sentence says why."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.native import build as native_build
from pdinfer.kernels.native import ops as native_ops
from pdinfer.kernels.native.build import SIGNATURES, Kernels
from pdinfer.process import compiled as process_compiled
from pdinfer.process import compiler as process_compiler
from pdinfer.process.compiler import INSTRUCTION_SETS, NAMED_LATE, Compiler
from pdinfer.testing import random_model, tiny_config
from tests.compilers import why_no_compiler
from tests.waiting import check_ends, started

Build = Callable[[], Kernels]

can_build = pytest.mark.skipif(why_no_compiler() is not None, reason=f"needs {why_no_compiler()}")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Return a function that loads two families anew, as in a new process, for a CPU that can run them and with a home
    of its own. Their kernels do nothing, so that they compile in no time; "attention" and "rows" share a source."""
    folder = tmp_path / "source"
    folder.mkdir()
    stub = '__attribute__((visibility("default"))) int {}(void) {{ return 0; }}\n'
    for family in ("attention", "rows"):
        kernels = "".join(stub.format(name) for name in SIGNATURES[family])
        (folder / f"{family}.c").write_text(f'#include "{family}.h"\n{kernels}')
        (folder / f"{family}.h").write_text('#include "sets.h"\n')
    (folder / "sets.h").write_text("")
    (folder / "shared.c").write_text("")
    monkeypatch.setattr(native_build, "FAMILIES", {name: (f"{name}.c", "shared.c") for name in ("attention", "rows")})
    monkeypatch.setattr(native_build, "FIND_TILES", ())
    monkeypatch.setattr(process_compiler, "FLAGS", ("-O0", *process_compiler.FLAGS[1:]))  # nothing to optimise
    monkeypatch.setattr(native_build, "FOLDER", folder)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native_build, "cpu_flags", lambda: frozenset(INSTRUCTION_SETS.values()))

    def anew() -> Kernels:
        native_build.library_or_reason.cache_clear()
        native_build._library.cache_clear()
        try:
            return native_build._library()
        finally:
            native_build.library_or_reason.cache_clear()
            native_build._library.cache_clear()

    return anew


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which command of the compiler runs, and how often: "-E", "-c" or "-shared"."""
    ran: list[str] = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> object:
        ran.extend({"-E", "-c", "-shared"} & set(command))
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", noted)
    return ran


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the only compiler in PATH a shell script, which fails with a message of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "cc"
    path.write_text("#!/bin/sh\necho 'In function f:\ncc: error: no such flag' >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return path


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that puts a script before the compiler in PATH: it does what it is told, and then compiles with
    these flags in front."""
    real, path = shutil.which("cc"), tmp_path / "bin" / "cc"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    def write(first: str, flags: str = "") -> None:
        path.write_text(f'#!/bin/sh\n{first}\nexec {real} {flags} "$@"\n')
        path.chmod(0o755)

    return write


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
    with pytest.raises(BackendUnavailable, match=r"needs a C compiler .* build-kernels\) is in .*pdinfer or next to"):
        build()


def test_what_the_compiler_says_is_told(build: Build, compiler: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"could not be compiled by .*: cc: error: no such flag$"):
        build()


def test_what_is_slower_for_want_of_it_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
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
    monkeypatch.setattr(process_compiler, "COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(BackendUnavailable, match="timed out"):
        build()


@can_build
def test_it_is_compiled_once(build: Build, commands: list[str], tmp_path: Path) -> None:
    build()
    folder = tmp_path / ".cache" / "pdinfer"
    compiled = kept(tmp_path)  # and nothing of the build
    assert [path.name.partition("-")[0] for path in compiled] == ["attention", "rows"]
    for path in (folder, *compiled):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022
    assert sorted(commands) == ["-E", *["-c"] * 3, *["-shared"] * 2]  # what they share, once
    commands.clear()
    build()
    assert commands == ["-E"]


@can_build
def test_what_is_not_whole_is_built_anew(build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build()
    compiled, other = kept(tmp_path)
    content = compiled.read_bytes()
    for broken in (b"", content[:-1], bytes(len(content))):
        compiled.unlink()  # it is mapped: cutting it short would be felt
        compiled.write_bytes(broken)
        compiled.chmod(0o700)
        caplog.clear()
        build()
        assert "is not what was written there" in caplog.text
        assert kept(tmp_path) == [compiled, other]
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
def test_a_source_that_changes_makes_other_libraries_of_what_it_is_part_of(
    build: Build, commands: list[str], tmp_path: Path
) -> None:
    build()
    for name, families in (
        ("rows.c", {"rows"}),
        ("attention.h", {"attention"}),
        ("sets.h", {"attention", "rows"}),
        ("shared.c", {"attention", "rows"}),
    ):
        before = kept(tmp_path)
        with (native_build.FOLDER / name).open("a") as source:
            source.write("/* another */\n")
        commands.clear()
        build()
        assert {path.name.partition("-")[0] for path in kept(tmp_path) if path not in before} == families, name
        assert commands.count("-shared") == len(families)
        assert commands.count("-c") == len(families) + 1


def breaks(name: str) -> None:
    with (native_build.FOLDER / name).open("a") as source:
        source.write("int unknown(void) { return missing; }\n")


@can_build
def test_a_source_that_does_not_compile_costs_its_own_family(build: Build) -> None:
    breaks("rows.c")
    kernels = build()
    assert kernels.mla_prefill
    assert set(kernels.reasons) == {"rows"}
    said = r"^has a source, rows\.c, that \S+ does not compile; please report this: rows\.c:\d+:\d+: error: .*missing"
    assert re.search(said, kernels.reasons["rows"])
    with pytest.raises(BackendUnavailable, match=said):
        kernels.rms_norm  # noqa: B018


@can_build
def test_a_source_of_two_families_that_does_not_compile_costs_both(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    breaks("shared.c")
    with pytest.raises(BackendUnavailable, match=r"shared\.c:1:"):
        build()
    assert [record.getMessage().count("(attention, rows)") for record in caplog.records] == [1]


@can_build
def test_what_does_not_compile_is_not_compiled_in_vain(build: Build, commands: list[str], tmp_path: Path) -> None:
    breaks("rows.c")
    first = build().reasons["rows"]
    (remembered,) = (tmp_path / ".cache" / "pdinfer").glob("*.failed")
    assert remembered.read_text() == first
    assert not stat.S_IMODE(remembered.stat().st_mode) & 0o077
    commands.clear()
    assert build().reasons["rows"] == f"{first} (found earlier; to try again, delete {remembered})"
    assert commands == ["-E"]
    remembered.chmod(0o622)  # others could have written it
    assert build().reasons["rows"] == first
    with (native_build.FOLDER / "rows.c").open("a") as source:
        source.write("#define missing 1\n")  # which is too late
    assert "rows" in build().reasons
    (native_build.FOLDER / "rows.h").write_text("#define missing 1\n")
    assert not build().reasons


@can_build
def test_a_failure_that_may_pass_is_not_remembered(build: Build, wrap: Callable[..., None]) -> None:
    for script in (
        "echo 'rows.c:1:1: error: no' >&2; kill -9 $$",
        "echo 'rows.c:1:10: fatal error: stdlib.h: No such file or directory' >&2; exit 1",
        "echo 'rows.c:9:1: fatal error: error writing to rows.s: No space left on device' >&2; exit 1",
        "echo 'gcc: fatal error: Killed signal terminated program cc1' >&2; exit 1",
        "echo 'rows.c:3:2: internal compiler error: Segmentation fault' >&2; exit 4",
    ):
        wrap(f'case "$*" in *rows.c*) {script};; esac')
        reasons = build().reasons
        assert set(reasons) == {"rows"}
        assert "found earlier" not in reasons["rows"], script
    wrap(":")
    assert not build().reasons


@can_build
@pytest.mark.parametrize("reason", ["No space left on device", "Disk quota exceeded"])
def test_where_the_folder_is_full_it_is_built_for_this_process(
    build: Build, wrap: Callable[..., None], tmp_path: Path, reason: str
) -> None:
    said = f"/tmp/cc1.s: Fatal error: can't write 70 bytes to section .text of rows.o: '{reason}'"
    (tmp_path / "said").write_text(said)
    wrap(f'case "$*" in *.cache/pdinfer*) cat {tmp_path / "said"} >&2; exit 1;; esac')
    assert not build().reasons
    assert not kept(tmp_path)


@can_build
def test_the_header_of_all_sources_is_compiled_once_and_its_loss_costs_nothing_but_time(
    build: Build, wrap: Callable[..., None], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    wrap(f'echo "$*" >> {log}')
    assert not build().reasons
    ran = log.read_text().splitlines()
    assert sum("-x c-header" in line for line in ran) == 1
    assert [line.startswith("-include") for line in ran if " -c " in line] == [True] * 3
    for number, fails in enumerate(("*c-header*", "*-include*")):
        wrap(f'case "$*" in {fails}) exit 1;; esac', f"-DOTHER={number}")
        assert not build().reasons


@can_build
def test_what_clang_compiles_is_linked_with_the_openmp_of_clang(
    build: Build, wrap: Callable[..., None], tmp_path: Path
) -> None:
    """It calls LLVM's runtime, and what torch has loaded is GNU's. The linker's own line says that it is missing."""
    log = tmp_path / "log"
    wrap(f'echo "$*" >> {log}', "-D__clang__")
    assert not build().reasons
    linked = [line for line in log.read_text().splitlines() if "-shared" in line]
    assert len(linked) == 2
    assert all("-fopenmp" in line and "libgomp" not in line for line in linked)
    for path in kept(tmp_path):
        path.unlink()
    said = "ld: cannot find -lomp", "clang: error: linker command failed with exit code 1 (use -v to see invocation)"
    fails = f"printf '%s\\n' '{said[0]}' '{said[1]}' >&2; exit 1"
    wrap(f'case "$*" in *-shared*) {fails};; esac', "-D__clang__ -DANOTHER")
    with pytest.raises(BackendUnavailable, match=r"could not be compiled by .*: ld: cannot find -lomp$"):
        build()


@can_build
def test_without_a_compiler_one_that_was_built_for_this_cpu_will_do(
    monkeypatch: pytest.MonkeyPatch, build: Build, commands: list[str], tmp_path: Path
) -> None:
    build()
    compiled = kept(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    commands.clear()
    build()
    assert commands == []
    beside = tmp_path / "installed"
    beside.mkdir()
    for path in (*native_build.FOLDER.iterdir(), *compiled):
        shutil.copy2(path, beside)
    for path in compiled:
        path.unlink()
    monkeypatch.setattr(native_build, "FOLDER", beside)
    assert not build().reasons
    monkeypatch.setattr(native_build, "cpu_flags", lambda: frozenset({"sse"}))
    with pytest.raises(BackendUnavailable, match="needs a C compiler"):
        build()


@can_build
def test_a_compiler_that_fails_leaves_one_that_another_compiler_made(
    build: Build, request: pytest.FixtureRequest
) -> None:
    build()
    request.getfixturevalue("compiler")
    build()


@can_build
def test_a_compiler_whose_code_this_cpu_cannot_run_is_not_used(
    monkeypatch: pytest.MonkeyPatch, build: Build, commands: list[str], tmp_path: Path
) -> None:
    used = Compiler.here().sets
    lacking = min(used - NAMED_LATE)
    monkeypatch.setattr(native_build, "cpu_flags", lambda: used - {lacking})
    with pytest.raises(BackendUnavailable, match=rf"cc uses instructions that this CPU lacks \({lacking}\)"):
        build()
    assert not any("-c" in command for command in commands)
    monkeypatch.setattr(native_build, "cpu_flags", lambda: used - NAMED_LATE)
    assert not build().reasons


@can_build
def test_a_folder_that_others_can_write_is_not_used(
    build: Build, tmp_path: Path, commands: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ".cache" / "pdinfer"
    folder.mkdir(parents=True)
    for mode in (0o770, 0o702):
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
    assert len(list((tmp_path / "mine" / "pdinfer").glob("*.so"))) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    build()
    assert len(kept(tmp_path)) == 2
    monkeypatch.setattr(Path, "home", lambda: Path("relative"))
    monkeypatch.chdir(tmp_path)
    assert not build().reasons
    assert not Path("relative").exists()


@can_build
def test_many_may_build_at_once_and_one_of_them_does(build: Build, commands: list[str], tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def one() -> None:
        try:
            found = process_compiled.find_or_build(native_build.families(), native_build.cpu_flags())
            assert not any(isinstance(each, str) for each in found.values())
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    check_ends(*[started(one) for _ in range(3)])
    assert not failures
    assert all(path.suffix == ".so" for path in kept(tmp_path))
    assert commands.count("-c") == 3
    build()


@can_build
def test_a_process_that_stands_still_keeps_no_other_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch, build: Build, tmp_path: Path
) -> None:
    folder, passed = tmp_path / ".cache" / "pdinfer", []
    folder.mkdir(parents=True, mode=0o700)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    clock = SimpleNamespace(sleep=lambda _: passed.append(1), monotonic=lambda: 1000.0 * len(passed))
    monkeypatch.setattr(process_compiled, "time", clock)
    assert not build().reasons
    assert passed == [1]
    os.close(held)


@can_build
def test_a_folder_that_cannot_be_locked_will_do(
    monkeypatch: pytest.MonkeyPatch, build: Build, commands: list[str]
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fails)
        assert not build().reasons
    commands.clear()
    build()
    assert "-c" not in commands


@pytest.mark.parametrize("lost", SIGNATURES)
def test_an_op_whose_family_is_lost_says_why_and_the_others_do_without(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    there = native_build.library_or_reason()
    if isinstance(there, str):
        pytest.skip(f"the library {there}")
    if there.reasons:
        pytest.fail(str(there.reasons))
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
    whole = random_model(tiny_config("v3", **sizes), dtype=torch.bfloat16)
    expected = whole.logits(list(range(40)))
    before = {choice.op: choice.provider for choice in whole.resolved.choices}
    monkeypatch.setattr(native_build, "_library", lambda: Kernels({**there.libraries, lost: "has a bad source"}))
    model = random_model(tiny_config("v3", **sizes), dtype=torch.bfloat16)
    for choice in model.resolved.choices:
        its_own = lost in map(native_build.FAMILY_OF.get, native_ops.kernels_of(choice.op))
        assert ("native: has a bad source" in choice.refusals) == its_own
        assert choice.provider == before[choice.op] or its_own
    difference = (model.logits(list(range(40))) - expected).abs()
    assert difference.median() < 0.05  # a rounded score may choose another expert, which some rows show
