"""The native library, compiled as for another CPU or with planted failures."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.native import build
from pdinfer.process import compiled

HEADERS = Path(__file__).parent / "native"
IN_C = ("-O1", "-march=x86-64-v3", "-include", str(HEADERS / "avx512.h"))
BODIES = {
    "as it is": (),
    "floats": ("-mno-avx512bf16",),
    "x86-64": ("-O1", "-march=x86-64"),
    "AVX2": ("-O1", "-march=x86-64-v3"),
    "tiles in C": ("-mno-avx512bf16", "-DTILES_IN_C"),
    "AVX-512 in C": (*IN_C, "-DLIKE=1"),
    "AVX-512 BF16 in C": (*IN_C, "-DLIKE=2"),
    "AMX in C": (*IN_C, "-DLIKE=3"),
}
"""How the library is compiled to have the bodies that it has for such CPUs."""


def why_no_native() -> str | None:
    """Return what this machine lacks to have kernels in C, or None. Where it lacks nothing they must be there."""
    if not compiled.cpu_flags():
        return "an x86-64 CPU"
    if any(map(shutil.which, ("cc", "gcc", "clang"))):
        return None
    try:
        build.library()  # which somebody compiled before
    except BackendUnavailable:
        return "a C compiler"
    return None


@functools.cache
def built_with(*flags: str) -> ctypes.CDLL:
    """Return the library compiled with more flags. Skips the test where this machine has no such library at all."""
    try:
        build.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    headers = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HEADERS.iterdir()))).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "FLAGS", (*compiled.FLAGS, *flags, *([f"-DHEADERS_{headers}"] if flags else [])))
        library = compiled.find_or_build(build.sources(), compiled.cpu_flags())
        library.find_tiles()
        return library


@contextmanager
def as_native(library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """Let the native ops be those of this library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_library", lambda: library)  # so that recordings hear of its calls
        yield library
