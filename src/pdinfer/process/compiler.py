"""The C compiler of this machine: its version, the instruction sets that it may use, and what its failures mean."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import attrs

from pdinfer.errors import BackendUnavailable

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden")
FOR_THIS_CPU = ("-march=native",)
COMPILE_TIMEOUT_S = 120.0

INSTRUCTION_SETS = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__SSE4A__": "sse4a",
    "__POPCNT__": "popcnt",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__MOVBE__": "movbe",
    "__AVX__": "avx",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__FMA4__": "fma4",
    "__XOP__": "xop",
    "__AVX2__": "avx2",
    "__AVX512F__": "avx512f",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512BW__": "avx512bw",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVXVNNI__": "avx_vnni",
    "__AVXIFMA__": "avx_ifma",
    "__AVXNECONVERT__": "avx_ne_convert",
    "__AVXVNNIINT8__": "avx_vnni_int8",
    "__GFNI__": "gfni",
    "__AMX_TILE__": "amx_tile",
    "__AMX_INT8__": "amx_int8",
    "__AMX_BF16__": "amx_bf16",
}
"""Macros of a compiler that may use an instruction set, and Linux' names for the sets: those that our sources look at,
and those that a compiler uses unasked."""

NAMED_LATE = {
    "avx512_fp16",
    "avx_vnni",
    "avx_ifma",
    "avx_ne_convert",
    "avx_vnni_int8",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
}
"""Linux names these since 5.11 to 6.3: an older one may keep silent about what the CPU has. Our sources use AMX of
them, and ask the kernel first."""

_ERROR = re.compile(r"(^|: )(fatal |internal compiler )?error: ", re.IGNORECASE)
_OF_LINKER = re.compile(r"^collect2: |: linker command failed")
"""What says no more than that the linker, in a line before, has said something."""
_OF_CODE = re.compile(r"^\S+:\d+(:\d+)?: error: ", re.MULTILINE)
"""A fatal error is one of the machine: a header that is not installed, a full disk. Another one is one of the code."""


class CompilationError(BackendUnavailable):
    """A source that could not be compiled. `of_code` tells whether the same compiler will say so again."""

    def __init__(self, reason: str, *, of_code: bool) -> None:
        super().__init__(reason)
        self.of_code = of_code

    @property
    def of_room(self) -> bool:
        """Whether the disk is full, or the user's part of it."""
        return any(os.strerror(number) in str(self) for number in (errno.ENOSPC, errno.EDQUOT))


@attrs.frozen
class Compiler:
    """A program that compiles C with these `flags`. `version` is a digest of what it is and makes of them; `sets` are
    the instruction sets that it may use with them, as Linux names them. What clang compiles calls LLVM's runtime of
    OpenMP, and GNU's does not do for it."""

    path: str
    flags: tuple[str, ...]
    version: str
    sets: frozenset[str]
    is_clang: bool = False

    @classmethod
    def here(cls, cpu: Sequence[str] = FOR_THIS_CPU) -> Compiler | None:
        """Return the first of COMPILERS in PATH, with flags for a CPU, or None where there is none. Raises
        CompilationError when it does not know the flags or does not work."""
        path = next(filter(None, map(shutil.which, COMPILERS)), None)
        if path is None:
            return None
        flags = (*cpu, *FLAGS)
        done = _run([path, *flags, "-v", "-dM", "-E", "-x", "c", os.devnull], Path("/"))
        macros = set(re.findall(r"^#define (\w+)", done.stdout.decode(errors="replace"), re.MULTILINE))
        told = [line for line in done.stderr.splitlines() if b" version " in line]
        sets = frozenset(name for macro, name in INSTRUCTION_SETS.items() if macro in macros)
        return cls(path, flags, digest(done.stdout, *told), sets, "__clang__" in macros)

    def beyond(self, cpu: frozenset[str]) -> list[str]:
        """Return the instruction sets that it may use and that a CPU with these flags lacks; none where a CPU names no
        flags."""
        return sorted(self.sets - cpu - NAMED_LATE) if cpu else []

    def precompile(self, header: Path, folder: Path, *, openmp: bool) -> Path | None:
        """Compile a header that many sources include, in `folder`, for `compile`; None where that fails. Reading the
        intrinsics of x86-64 takes longer than most of our sources."""
        made = folder / header.name
        made.write_bytes(b'#include "%s"\n' % os.fsencode(header))
        threads = ["-fopenmp"] if openmp else []
        ending = "pch" if self.is_clang else "gch"  # what they look for behind the name that -include gives
        try:
            _run([self.path, *self.flags, *threads, "-x", "c-header", str(made), "-o", f"{made}.{ending}"], folder)
        except CompilationError:
            return None
        return made

    def compile(self, source: Path, folder: Path, *, openmp: bool, header: Path | None = None) -> Path:
        """Compile a source into an object in `folder`, with a header from `precompile`. Raises CompilationError."""
        made = folder / f"{source.stem}.o"
        command = [*self.flags, *(["-fopenmp"] if openmp else []), "-c", str(source), "-o", str(made)]
        if header is not None:
            # where the address that it was mapped at is taken, some versions of gcc give up
            with contextlib.suppress(CompilationError):
                _run([self.path, "-include", str(header), *command], folder)
                return made
        _run([self.path, *command], folder)
        return made

    def link(self, objects: Collection[Path], made: Path, *, openmp: str | None) -> Path:
        """Link objects to a library `made`, with this runtime of GNU's OpenMP if the objects can do with it, or a flag
        that chooses one. Raises CompilationError."""
        runtime = ["-fopenmp" if self.is_clang else openmp] if openmp else []
        _run([self.path, "-shared", *map(str, objects), *runtime, "-lm", "-o", str(made)], made.parent)
        return made


def bits_of(sets: Collection[str]) -> int:
    """Return instruction sets as a number, as the names of libraries have them."""
    return sum(1 << bit for bit, name in enumerate(INSTRUCTION_SETS.values()) if name in sets)


def digest(*parts: bytes | str) -> str:
    """Return a digest for the name of a file."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part if isinstance(part, bytes) else part.encode())
        whole.update(b"\0")
    return whole.hexdigest()[:24]


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    english = {**os.environ, "LC_ALL": "C"}  # "error:" is translated
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            timeout=COMPILE_TIMEOUT_S,
            cwd=folder,
            env=english,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilationError(f"could not be compiled: {error}", of_code=False) from error
    if done.returncode:
        raise _failure(command, done)
    return done


def _failure(command: Sequence[str], done: subprocess.CompletedProcess[bytes]) -> CompilationError:
    words = done.stderr.decode(errors="replace").strip()
    lines = words.splitlines() or [f"no message, exit status {done.returncode}"]
    errors = [line for line in lines if _ERROR.search(line) and not _OF_LINKER.search(line)]
    line = errors[0] if errors else lines[0]
    if done.returncode == 1 and _OF_CODE.search(words) and "-c" in command:
        source = Path(command[list(command).index("-c") + 1])
        line = line.replace(f"{source.parent}/", "")
        reason = f"has a source, {source.name}, that {command[0]} does not compile; {REPORT}: {line}"
        return CompilationError(reason, of_code=True)
    return CompilationError(f"could not be compiled by {command[0]}: {line}", of_code=False)


REPORT = "please report this"
"""What the reason of a failure says that is a fault of ours."""
