"""The C compiler of this machine, as tests need it."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from pdinfer.process.compiled import cpu_flags
from pdinfer.process.compiler import COMPILERS, CompilationError, Compiler


@functools.cache
def why_no_compiler() -> str | None:
    """Return what this machine lacks to compile kernels, or None: Debian's clang comes without its OpenMP."""
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None:
        return "a C compiler"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.touch()
        command = [path, "-shared", "-fopenmp", str(source), "-o", f"{folder}/empty.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"the OpenMP runtime of {path}" if done.returncode and "omp" in done.stderr else None


@functools.cache
def why_no_code_for_this_cpu() -> str | None:
    """Return what this machine lacks to run kernels that it compiles, or None."""
    try:
        cc = Compiler.here()
    except CompilationError:
        return None
    return "a C compiler that makes code for this CPU" if cc and cc.beyond(cpu_flags()) else why_no_compiler()
