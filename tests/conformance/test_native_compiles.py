"""Every C source compiles for every kind of x86-64 CPU, and every library has all that it calls.

A kind is a list of flags that every compiler knows from OLDEST on, as `-march=native` gives them on such a CPU: to one
newer than itself a compiler gives the name of an earlier one, and flags for what it has besides. `make test` compiles
for some with the compiler of this machine; not optimised, which finds an instruction that is not allowed as well.
`.ci/compilers` compiles for all of them, optimised, with every compiler that Debian has: for the quick ones, which
read every body, as users do.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdinfer.kernels.native import build
from pdinfer.kernels.native.build import Kernels
from pdinfer.process import compiled, compiler
from pdinfer.process.compiler import CompilationError, Compiler
from tests.backends import ROOT
from tests.compilers import why_no_compiler
from tests.conformance.native_builds import as_native
from tests.conformance.test_native_shapes import CASES, assert_cases_give

ZEN_4 = (
    *("-march=znver3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512cd", "-mavx512ifma"),
    *("-mavx512vbmi", "-mavx512vbmi2", "-mavx512vnni", "-mavx512bitalg", "-mavx512bf16", "-mavx512vpopcntdq"),
)
QUICK = {
    "x86-64": ("-march=x86-64",),
    "x86-64-v3": ("-march=x86-64-v3",),
    "Zen 4 as gcc 12 sees it": ZEN_4,
    "Skylake": ("-march=skylake-avx512",),
    "Cooper Lake with AMX": ("-march=cooperlake", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "this CPU": ("-march=native",),
}
"""What `make test` compiles for."""
OTHERS = {
    "x86-64-v2": ("-march=x86-64-v2",),
    "x86-64-v4": ("-march=x86-64-v4",),
    "Zen 1": ("-march=znver1",),
    "Zen 2": ("-march=znver2",),
    "Zen 3": ("-march=znver3",),
    "Zen 4": ("-march=znver4",),
    "Zen 5 as gcc 12 sees it": (*ZEN_4, "-mavx512vp2intersect", "-mavxvnni"),
    "Zen 5": ("-march=znver5",),
    "Haswell": ("-march=haswell",),
    "Ice Lake": ("-march=icelake-server",),
    "Cooper Lake": ("-march=cooperlake",),
    "Sapphire Rapids": ("-march=sapphirerapids",),
    "Alder Lake": ("-march=alderlake",),
    "AVX2 alone": ("-march=x86-64", "-mavx2"),
    "AVX-512 F alone": ("-march=haswell", "-mavx512f"),
    "AVX-512 BF16 and what it implies": ("-march=x86-64", "-mavx512bf16"),
    "AMX without AVX": ("-march=x86-64", "-mamx-tile", "-mamx-bf16"),
}

OLDEST = {"gcc": 11, "clang": 14}
"""The first versions that have to compile for every list."""
KNOWN_FROM = {
    "-march=znver4": {"gcc": 13, "clang": 16},
    "-march=znver5": {"gcc": 14, "clang": 19},
}
"""Flags that only later versions have to know: those before are too old for the lists that have them."""


def kind_of(path: str) -> tuple[str, int]:
    """Return whether a compiler is gcc or clang, and its version."""
    done = subprocess.run([path, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True, check=True)
    defined = dict(re.findall(r"^#define (__GNUC__|__clang_major__) (\d+)$", done.stdout, re.MULTILINE))
    kind = "clang" if "__clang_major__" in defined else "gcc"
    return kind, int(defined["__clang_major__" if kind == "clang" else "__GNUC__"])


def is_too_old(kind: str, version: int, flags: Collection[str]) -> bool:
    """Return whether a compiler need not know all of these flags."""
    return version < max(KNOWN_FROM.get(flag, OLDEST)[kind] for flag in flags)


def complaints(
    path: str, lists: Mapping[str, tuple[str, ...]], level: str, folder: Path, *, as_for_users: bool = False
) -> list[str]:
    """Compile every source for every list, side by side, into a folder for each -> what the compiler finds wrong. As
    for users the header of all is compiled once; else a source has to include what it uses."""
    sources = sorted(ROOT.glob("src/pdinfer/**/*.c"))
    assert len(sources) > 10
    flags = [flag for flag in compiler.FLAGS if not flag.startswith("-O")]
    is_clang = kind_of(path)[0] == "clang"
    kinds = {name: Compiler(path, (*flags, *lists[name], level), "", frozenset(), is_clang) for name in lists}
    for name in lists:
        (folder / name).mkdir()
    headers = {
        name: cc.precompile(build.FOLDER / "sets.h", folder / name, openmp=True) if as_for_users else None
        for name, cc in kinds.items()
    }

    def compile_one(name: str, source: Path) -> str | None:
        try:
            kinds[name].compile(source, folder / name, openmp=True, header=headers[name])
        except CompilationError as error:
            return f"{name}: {source.name}: {error}"
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        told = pool.map(lambda job: compile_one(*job), [(name, source) for name in lists for source in sources])
        return [each for each in told if each]


def on_path() -> dict[str, str]:
    """Return every gcc and clang in PATH, each once, under the first of its names."""
    found: dict[Path, str] = {}
    for folder in os.get_exec_path():
        named = glob.glob(os.path.join(glob.escape(folder), "*-*"))  # none in a folder that is not for this user
        for name in (*compiler.COMPILERS, *(Path(path).name for path in sorted(named))):
            path = Path(folder, name)
            if re.fullmatch(r"cc|(gcc|clang)(-\d+)?", name) and os.access(path, os.X_OK):
                found.setdefault(path.resolve(), str(path))
    return {Path(path).name: path for path in reversed(found.values())}


x86 = pytest.mark.skipif(not compiled.cpu_flags(), reason="compiles for x86-64 CPUs, on one")


@x86
@pytest.mark.parametrize("name", QUICK)
def test_every_source_compiles_and_every_library_links_for(name: str, tmp_path: Path) -> None:
    if lacking := why_no_compiler():
        pytest.skip(f"needs {lacking}")
    cc = next(filter(None, map(shutil.which, compiler.COMPILERS)))
    kind, version = kind_of(cc)
    if is_too_old(kind, version, QUICK[name]):
        pytest.skip(f"needs {kind} {OLDEST[kind]}, {cc} is {version}")
    assert complaints(cc, {name: QUICK[name]}, "-O0", tmp_path, as_for_users=True) == []
    for library in build.families():
        objects = [str(tmp_path / name / f"{Path(source).stem}.o") for source in library.sources]
        linked = str(tmp_path / f"{library.name}.so")
        command = [cc, "-shared", "-Wl,-z,defs", *objects, "-fopenmp", "-lm", "-o", linked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{library.name}: {done.stderr}"


@x86
@pytest.mark.full(minutes=3)
@pytest.mark.parametrize("name", on_path())
def test_every_source_is_optimised_for_every_cpu_by(name: str, tmp_path: Path) -> None:
    path = on_path()[name]
    kind, version = kind_of(path)
    if version < OLDEST[kind]:
        pytest.skip(f"needs {kind} {OLDEST[kind]}, {path} is {version}")
    for folder, lists, level in (("users", QUICK, "-O3"), ("others", OTHERS, "-O1")):  # -O3 takes twice as long
        (tmp_path / folder).mkdir()
        known = {name: flags for name, flags in lists.items() if not is_too_old(kind, version, flags)}
        assert complaints(path, known, level, tmp_path / folder, as_for_users=True) == []
    (tmp_path / "alone").mkdir()
    alone = {name: QUICK[name] for name in ("x86-64", "x86-64-v3", "Cooper Lake with AMX")}  # each reads other bodies
    assert complaints(path, alone, "-O0", tmp_path / "alone") == []


@x86
@pytest.mark.full(minutes=1)
@pytest.mark.parametrize("name", on_path())
def test_every_op_gives_the_same_when_compiled_by(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {case: op(*inputs) for case, (op, inputs) in CASES.items()}
    (tmp_path / "cc").symlink_to(on_path()[name])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = Kernels(compiled.find_or_build(build.families(), compiled.cpu_flags()))
    if any("cannot find -lomp" in reason or "-lomp: not found" in reason for reason in kernels.reasons.values()):
        pytest.skip(f"needs LLVM's runtime of OpenMP for {name}")
    assert kernels.reasons == {}
    with as_native(kernels):
        assert_cases_give(expected)


def test_a_compiler_may_miss_what_is_named_as_too_new_for_it_and_nothing_else() -> None:
    assert is_too_old("gcc", 12, OTHERS["Zen 4"])
    assert not is_too_old("gcc", 13, OTHERS["Zen 4"])
    assert not any(is_too_old(kind, version, flags) for kind, version in OLDEST.items() for flags in QUICK.values())
    assert sum(is_too_old("gcc", 11, flags) for flags in OTHERS.values()) == 2
