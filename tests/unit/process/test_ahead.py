"""Libraries that are compiled ahead: each CPU takes the best that it can run, and none that it cannot."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pdinfer import __main__ as commands
from pdinfer.errors import BackendUnavailable
from pdinfer.process import ahead
from pdinfer.process.ahead import Built, build_ahead
from pdinfer.process.compiled import NativeLibrary, find_or_build
from pdinfer.process.compiler import COMPILERS, Compiler
from tests.backends import ROOT, child_environment
from tests.compilers import why_no_compiler

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=f"needs {why_no_compiler()}")

SOURCE = """__attribute__((visibility("default"))) int lanes(void) {
#if defined(__AVX512BF16__)
    return 32;
#elif defined(__AVX512F__)
    return 16;
#else
    return 8;
#endif
}
"""


def heeds_flags(path: Path) -> bool:
    """Return whether a compiler is there that makes code for the CPU it is told, unlike one that was wrapped to have a
    CPU of its own."""
    if not os.access(path, os.X_OK):
        return False
    asked = [
        subprocess.run(
            [path, f"-march={cpu}", "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True, check=False
        ).stdout
        for cpu in ("x86-64", "haswell")
    ]
    return ["__AVX2__" in macros for macros in asked] == [False, True]


@functools.cache
def obedient() -> Path | None:
    """Return the first compiler in PATH that heeds the flags for a CPU."""
    paths = (Path(folder, name) for folder in os.get_exec_path() for name in COMPILERS)
    return next(filter(heeds_flags, paths), None)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeLibrary:
    """Return a library that tells which CPU it was compiled for, and whose user has an empty cache."""
    found = obedient()
    if found is None:
        pytest.skip("needs a C compiler that heeds -march")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").symlink_to(found)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "lanes.c").write_text(SOURCE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    results = {"lanes": ctypes.c_int}
    return NativeLibrary(name="lanes", folder=folder, sources=("lanes.c",), signatures={"lanes": ()}, results=results)


def lanes_of(library: NativeLibrary, cpu: frozenset[str]) -> int | str:
    found = find_or_build([library], cpu)["lanes"]
    return found if isinstance(found, str) else int(found.lanes())


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def built(library: NativeLibrary, *cpus: str, into: Path | None = None) -> dict[str, Built]:
    return {each.cpu: each for each in build_ahead([library], cpus, into)}


def test_the_best_is_taken_of_those_whose_instruction_sets_a_cpu_has(
    monkeypatch: pytest.MonkeyPatch, library: NativeLibrary
) -> None:
    made = built(library, "haswell", "znver4", "skylake-avx512")
    assert all(each.files and not each.failures for each in made.values())
    without_compiler(monkeypatch)
    sets = {name: each.sets for name, each in made.items()}
    assert lanes_of(library, sets["haswell"]) == 8
    assert lanes_of(library, sets["skylake-avx512"] | {"avx_vnni"}) == 16
    assert lanes_of(library, sets["znver4"] | sets["skylake-avx512"]) == 32
    assert lanes_of(library, sets["skylake-avx512"] - {"avx512bw"} | sets["haswell"]) == 8
    for cpu in (sets["haswell"] - {"bmi2"}, frozenset[str]()):
        assert "needs a C compiler" in str(lanes_of(library, cpu))


def test_a_cpu_that_the_compiler_does_not_know_is_built_for_by_its_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, library: NativeLibrary
) -> None:
    monkeypatch.setitem(ahead.CPUS, "made-up", ahead.CPUS["znver4"])
    (made,) = built(library, "made-up").values()
    assert not made.known
    assert {"avx512_bf16", "avx512_vnni", "avx512bw", "avx2", "f16c"} <= made.sets
    with pytest.raises(BackendUnavailable, match="neither the compiler nor pdinfer knows a CPU called unheard-of"):
        built(library, "unheard-of")
    with pytest.raises(BackendUnavailable, match="is not the name of a CPU"):
        built(library, "-o /etc/passwd")


@pytest.mark.parametrize("cpu", ahead.CPUS)
def test_the_flags_for_a_cpu_are_some_that_the_compiler_knows(cpu: str) -> None:
    assert ahead._compiler(ahead.CPUS[cpu]).sets >= {"avx2", "fma", "f16c"}


def test_files_can_be_read_by_all_and_written_by_none_but_the_owner(
    monkeypatch: pytest.MonkeyPatch, library: NativeLibrary, tmp_path: Path
) -> None:
    before = os.umask(0o077)
    try:
        (made,) = built(library).values()
    finally:
        os.umask(before)
    (path,) = made.files
    assert path.parent == library.folder
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert sorted(each.name for each in library.folder.iterdir()) == sorted(["lanes.c", path.name])
    without_compiler(monkeypatch)
    assert not isinstance(lanes_of(library, made.sets), str)
    path.chmod(0o775)
    assert "needs a C compiler" in str(lanes_of(library, made.sets))
    monkeypatch.undo()
    (made,) = built(library, into=tmp_path / "a" / "b").values()
    assert [path.parent for path in made.files] == [tmp_path / "a" / "b"]


def test_what_cannot_be_built_is_told(monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> None:
    (library.folder / "lanes.c").write_text("int lanes(void) { return missing; }\n")
    (made,) = built(library).values()
    assert not made.files
    assert "lanes.c:1:" in made.failures[0]
    without_compiler(monkeypatch)
    with pytest.raises(BackendUnavailable, match=r"compiled by a C compiler, and none .* is in PATH"):
        built(library)


def test_the_command_tells_what_was_built_for_which_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, library: NativeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "families", lambda: (library,))
    monkeypatch.setattr(commands, "SOURCES", library)
    arguments = ["build-kernels", "--for", "haswell,znver4", "--into", str(tmp_path / "into")]
    monkeypatch.chdir(tmp_path)
    assert commands.main([*arguments[:-1], "relative"]) == 0
    assert capsys.readouterr().out.endswith(", in relative\n")
    assert commands.main(arguments) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"haswell: lanes, lanes for CPUs with avx2 f16c, in {tmp_path / 'into'}"
    assert "avx512_bf16" in second
    (library.folder / "lanes.c").write_text("none\n")
    assert commands.main(arguments) == 1
    assert "please report this" in capsys.readouterr().err
    without_compiler(monkeypatch)
    assert commands.main(arguments) == 1
    told = capsys.readouterr()
    assert not told.out
    assert told.err.startswith("build-kernels: kernels are compiled by a C compiler, and none")
    assert told.err.count("\n") == 1


@pytest.mark.full(minutes=2)
def test_the_line_of_the_page_about_containers_serves_this_cpu_without_a_compiler(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "containers.md").read_text("utf-8")
    (names,) = re.findall(r"^RUN python -m pdinfer build-kernels --for (\S+)$", page, re.MULTILINE)
    cache = tmp_path / "pdinfer"
    assert commands.main(["build-kernels", "--for", names, "--into", str(cache)]) == 0
    cache.chmod(0o700)
    environment = child_environment(PATH="/nowhere", XDG_CACHE_HOME=str(tmp_path))
    command = [sys.executable, "-c", "import pdinfer as pd; print(pd.explain_backends('cpu'))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert re.search(r"^linear +native$", done.stdout, re.MULTILINE), done.stdout


def test_a_header_is_compiled_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"gespr\xe4ch")
    folder.mkdir()
    (folder / "lanes.h").write_text("#define LANES 8\n")
    (tmp_path / "lanes.c").write_text("int lanes(void) { return LANES; }\n")
    cc = Compiler.here()
    assert cc is not None
    header = cc.precompile(folder / "lanes.h", tmp_path, openmp=False)
    assert cc.compile(tmp_path / "lanes.c", tmp_path, openmp=False, header=header).exists()
