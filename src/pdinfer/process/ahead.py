"""Libraries that are compiled before they are needed, for CPUs that need not be those of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from pdinfer.errors import BackendUnavailable
from pdinfer.process.compiled import NativeLibrary, build, keep, stem_of
from pdinfer.process.compiler import COMPILERS, FOR_THIS_CPU, CompilationError, Compiler
from pdinfer.process.scratch import ScratchFolder
from pdinfer.process.threads import loaded_openmp

_AVX2 = ("-march=haswell",)
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "cd", "bw", "dq", "vl", "vnni")))
_BF16 = (*_AVX512, "-mavx512bf16")
_AMX = (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
CPUS = {
    "x86-64-v3": _AVX2,
    "znver1": _AVX2,
    "znver2": _AVX2,
    "znver3": _AVX2,
    "alderlake": _AVX2,
    "x86-64-v4": _AVX512,
    "cascadelake": _AVX512,
    "icelake-server": _AVX512,
    "cooperlake": _BF16,
    "znver4": _BF16,
    "znver5": _BF16,
    "sapphirerapids": _AMX,
    "emeraldrapids": _AMX,
    "graniterapids": _AMX,
}
"""The flags for CPUs whose name the compiler does not know: the instruction sets that the sources look at."""


@attrs.frozen(kw_only=True)
class Built:
    """What was built for a CPU: the instruction sets that it must have, the files, and for each library that could not
    be built a sentence."""

    cpu: str
    known: bool
    sets: frozenset[str]
    files: tuple[Path, ...]
    failures: tuple[str, ...]


def build_ahead(libraries: Sequence[NativeLibrary], cpus: Sequence[str], into: Path | None) -> Iterator[Built]:
    """Compile libraries for each of these CPUs, by the names that compilers give them, or for this one where there are
    none, into a folder or beside their sources. Raises BackendUnavailable where there is no compiler, or none knows
    what such a CPU can do, and OSError where nothing can be written."""
    openmp = loaded_openmp()
    for cpu, known, cc in [_compiler_for(cpu) for cpu in cpus] or [("this CPU", True, _compiler(FOR_THIS_CPU))]:
        files, failures = [], []
        for folder in dict.fromkeys(into or library.folder for library in libraries):
            folder.mkdir(parents=True, exist_ok=True)
            own = [library for library in libraries if (into or library.folder) == folder]
            with ScratchFolder(folder) as scratch:
                for library, made in build(own, cc, openmp, scratch.path):
                    if isinstance(made, Path):
                        files.append(keep(made, folder, stem_of(library, openmp, cc), mode=0o755))
                    else:
                        failures.append(f"{library.name} {made}")
        yield Built(cpu=cpu, known=known, sets=cc.sets, files=tuple(files), failures=tuple(failures))


def _compiler(flags: Sequence[str]) -> Compiler:
    cc = Compiler.here(flags)
    if cc is None:
        raise BackendUnavailable(
            f"kernels are compiled by a C compiler, and none ({', '.join(COMPILERS)}) is in PATH: install one first, "
            "as by `apt-get install -y gcc libc6-dev`"
        )
    return cc


def _compiler_for(cpu: str) -> tuple[str, bool, Compiler]:
    if not re.fullmatch(r"[\w.-]+", cpu):
        raise BackendUnavailable(f"{cpu!r} is not the name of a CPU; there are {', '.join(CPUS)}")
    try:
        return cpu, True, _compiler((f"-march={cpu}",))
    except CompilationError as error:
        if cpu not in CPUS:
            raise BackendUnavailable(
                f"neither the compiler nor pdinfer knows a CPU called {cpu} ({error}); pdinfer knows {', '.join(CPUS)}"
            ) from error
        return cpu, False, _compiler(CPUS[cpu])
