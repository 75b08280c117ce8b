"""Compiles `native.c` for this machine on first use and loads it.

The library is kept in ~/.cache/pdinfer, in a folder that nobody else may write, under a name made of everything that
went into it; where that folder cannot be had it is built anew for each process. It uses the OpenMP runtime that torch
has loaded: two of them would each keep a thread per core spinning.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from pdinfer.errors import BackendUnavailable

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fvisibility=hidden")
NEEDED = "avx512_bf16"
COMPILE_TIMEOUT_S = 120.0

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "linear": (_P, _N, _N, _P, _N, _N, _P, _I),
    "linear_float": (_P, _N, _N, _P, _N, _N, _P, _I),
    "rotate": (_P, _N, _N, _N, _N, _N, _P, _P, _P, _I),
    "gated_silu": (_P, _N, _N, _P, _I),
    "experts": (_P, _P, _N, _P, _P, _N, _N, _P, _P, _I),
    "route": (_P, _P, _N, _N, _I, _N, _N, _N, _I, _F, _P, _P, _I),
    "group_rows": (_P, _N, _N, _N, _P, _P, _P),
    "combine_rows": (_P, _P, _P, _N, _N, _N, _P, _I),
    "rms_norm": (_P, _N, _N, _N, _P, _F, _P, _I),
    "heads_in": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
    "heads_out": (_P, _N, _N, _N, _N, _N, _P, _N, _N, _P, _I),
    "mla_decode": (_P, _P, _P, _P, _N, _N, _P, _N, _N, _N, _N, _F, _N, _P, _I),
    "mla_prefill": (_P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _N, _F, _P, _P, _P, _P, _I),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels. Raises BackendUnavailable with the reason when this machine cannot have them."""
    if NEEDED not in _cpu_flags():
        raise BackendUnavailable(f"needs a CPU with {NEEDED}, this {platform.machine()} has none")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BackendUnavailable("is compiled on first use and needs a C compiler (cc, gcc or clang), none is in PATH")
    openmp = _loaded_openmp()
    name = f"native-{_digest(compiler, openmp)}.so"
    folder = _cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="pdinfer-") as private:
            return _load(_compile(compiler, openmp, Path(private) / name))
    path = folder / name
    return _load(path if path.exists() else _compile(compiler, openmp, path))


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _loaded_openmp() -> str | None:
    """Path of the GNU OpenMP runtime in this process, torch's own in its wheels."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if re.fullmatch(r"libgomp[-.\w]*", path.rpartition("/")[2]):
            return path
    return None


def _digest(compiler: str, openmp: str | None) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S
    ).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(FLAGS), openmp or "", " ".join(sorted(_cpu_flags())))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:24]


def _cache_folder() -> Path | None:
    """~/.cache/pdinfer, if it is ours alone: what lies there is loaded and run."""
    try:
        folder = Path.home() / ".cache" / "pdinfer"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    safe = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if safe and os.access(folder, os.W_OK) else None


def _compile(compiler: str, openmp: str | None, path: Path) -> Path:
    """Under another name first, so that a process that looks meanwhile sees all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as build:
        compiled, linked = Path(build) / "native.o", Path(build) / path.name
        link = [str(openmp)] if openmp else ["-fopenmp"]
        for command in (
            [compiler, *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), *link, "-lm", "-o", str(linked)],
        ):
            try:
                done = subprocess.run(command, capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BackendUnavailable(f"could not be compiled: {error}") from error
            if done.returncode:
                words = done.stderr.decode(errors="replace").strip().splitlines()
                raise BackendUnavailable(f"could not be compiled by {compiler}: {words[0] if words else 'no message'}")
        os.replace(linked, path)
    return path


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(f"was compiled and cannot be loaded: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
