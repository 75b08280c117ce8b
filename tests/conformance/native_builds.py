"""The native libraries, compiled as for another CPU or with planted failures."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.native import build
from pdinfer.kernels.native.build import Kernels
from pdinfer.process import compiled, compiler
from tests.compilers import why_no_code_for_this_cpu

HEADERS = Path(__file__).parent / "native"
IN_C = ("-O1", "-march=x86-64-v3", "-include", str(HEADERS / "avx512.h"))
BODIES = {
    "as it is": (),
    "AVX-512 BF16": ("-mno-amx-tile",),
    "floats": ("-mno-avx512bf16", "-mno-amx-tile"),
    "x86-64": ("-O1", "-march=x86-64"),
    "AVX2": ("-O1", "-march=x86-64-v3", "-DFAST_DENORMALS=0"),
    "AVX2, fast denormals": ("-O1", "-march=x86-64-v3", "-DFAST_DENORMALS=1"),
    "AVX-512": ("-O1", "-march=x86-64-v4"),
    "tiles in C": ("-O1", "-mno-avx512bf16", "-DTILES_IN_C"),
    "AVX-512 in C": (*IN_C, "-DLIKE=1"),
    "AVX-512 BF16 in C": (*IN_C, "-DLIKE=2"),
    "AMX in C": (*IN_C, "-DLIKE=3"),
}
"""How the libraries are compiled to have the bodies that they have for such CPUs."""
V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
NEEDS = {
    "AVX-512 BF16": frozenset({"amx_tile", "avx512_bf16"}),
    "floats": frozenset({"avx512_bf16"}),
    "AVX-512": V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
} | dict.fromkeys((name for name, flags in BODIES.items() if "-march=x86-64-v3" in flags), V3)
"""What a CPU needs to run these bodies. Without it the first two are what it has as it is."""
BODIES_HERE = tuple(name for name in BODIES if NEEDS.get(name, frozenset()) <= compiled.cpu_flags())
"""Those that the CPU at hand can run."""


def why_no_native() -> str | None:
    """Return what this machine lacks to have kernels in C, or None. Where it lacks nothing they must be there."""
    if not compiled.cpu_flags():
        return "an x86-64 CPU"
    if not (lacking := why_no_code_for_this_cpu()):
        return None
    try:
        build.library()  # which somebody compiled before
    except BackendUnavailable:
        return lacking
    return None


@functools.cache
def built_with(*flags: str) -> Kernels:
    """Return the kernels compiled with more flags. Skips the test where this machine has none at all."""
    try:
        build.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    headers = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HEADERS.iterdir()))).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, *flags, *([f"-DHEADERS_{headers}"] if flags else [])))
        kernels = Kernels(compiled.find_or_build(build.families(), frozenset()))  # what the CPU lacks is in C
        assert not kernels.reasons
        return kernels


@contextmanager
def as_native(kernels: Kernels) -> Iterator[Kernels]:
    """Let the native ops be those of these libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_library", lambda: kernels)  # so that recordings hear of its calls
        yield kernels


class Shared:
    """A variable of a planted header, which every library has for itself."""

    def __init__(self, kernels: Kernels, kind: type[Any], name: str) -> None:
        self._all = [kind.in_dll(library, name) for library in kernels.libraries.values()]

    @property
    def values(self) -> list[int]:
        return [each.value for each in self._all]

    def set(self, value: int) -> None:
        for each in self._all:
            each.value = value
