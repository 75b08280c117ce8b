"""Compiles the C sources beside it for this machine on first use, into one library, and loads it.

The library is kept in a folder of the user's cache (XDG_CACHE_HOME, or ~/.cache, and pdinfer in it) that nobody else
may write. Without such a folder it is built anew for each process. Its name says what went into it and what came out:

    native-<sources, flags, CPU, OpenMP>-<compiler>-<the file's own bytes>.so

so that a library that was cut short or changed is recognised and built anew. Without a compiler any library that fits
this CPU will do, in the cache or beside the sources. It uses the OpenMP runtime that torch has loaded: two of them
would each keep a thread per core spinning.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdinfer.errors import BackendUnavailable
from pdinfer.process.scratch import ScratchFolder

_log = logging.getLogger("pdinfer")

FOLDER = Path(__file__).parent
"""Where the sources are: every .c file is compiled, every .h file may be included."""
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fvisibility=hidden")
EXTENSIONS = ("avx512_bf16", "avx512f", "avx2")
"""What makes the kernels faster where a CPU has it, the best first."""
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 120.0

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "find_tiles": (),
    "is_served": (_N, _N),
    "experts_are_served": (_N, _N, _N),
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
    "mla_decode": (_P, _P, _P, _P, _N, _N, _P, _N, _N, _N, _N, _N, _F, _N, _P, _I),
    "is_served_int8": (_N,),
    "linear_int8": (_P, _N, _N, _P, _P, _N, _N, _P, _I),
    "experts_int8": (_P, _P, _N, _P, _P, _P, _P, _N, _N, _P, _P, _I),
    "linear_fp8": (_P, _P, _N, _N, _N, _P, _P, _N, _N, _N, _P, _I),
    "dequantize_fp8": (_P, _P, _N, _N, _N, _N, _N, _P, _I),
    "quantize_fp8": (_P, _N, _N, _N, _I, _P, _P, _I),
    "prefill_scratch": (_N, _N, _N, _N),
    "mla_prefill": (_P, _P, _P, _N, _N, _N, _N, _N, _N, _N, _N, _F, _P, _P, _P, _P, _I),
}

RESULTS = dict.fromkeys(("find_tiles", "is_served", "is_served_int8", "experts_are_served"), _I) | {
    "mla_decode": _N,
    "prefill_scratch": _N,
}
"""The kernels that return something."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels. Raises BackendUnavailable with the reason when this machine cannot have them."""
    found = library_or_reason()
    if isinstance(found, str):
        raise BackendUnavailable(found)
    return found


@functools.cache
def library_or_reason() -> ctypes.CDLL | str:
    """Return the compiled kernels, or the reason why there are none. It is found out once in a process.

    Where the CPU could run them the reason is also logged, because nothing fails without them.
    """
    if not cpu_flags():
        return f"is for x86-64 CPUs, and this {platform.machine()} is none that Linux describes as one"
    try:
        return find_or_build()
    except (BackendUnavailable, OSError, subprocess.SubprocessError) as error:
        reason = str(error) if isinstance(error, BackendUnavailable) else f"could not be compiled: {error}"
        _log.warning("kernels for this CPU are not used, and bfloat16 runs slower: the library %s", reason)
        return reason


def find_or_build() -> ctypes.CDLL:
    """Load a library that was kept, or build one. Raises BackendUnavailable with the reason when neither can be."""
    openmp = _loaded_openmp()
    sources = [path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))]
    fits = _digest(*sources, " ".join(FLAGS), openmp or "", " ".join(sorted(cpu_flags())))
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    folder = _cache_folder()
    if compiler is not None:
        stem = f"native-{fits}-{_digest(_version(compiler))}"
        try:
            return _first_loaded(stem, folder) or _built(compiler, openmp, stem, folder)
        except BackendUnavailable as error:
            problem = error
    else:
        problem = BackendUnavailable(
            "is compiled on first use and needs a C compiler (cc, gcc or clang), none is in PATH, and none that was "
            f"built for this CPU is in {folder or 'a cache folder'}"
        )
    library = _first_loaded(f"native-{fits}", folder)
    if library is None:
        raise problem
    return library


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets of this machine's x86 CPU, as /proc/cpuinfo names them; empty where there is none."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _loaded_openmp() -> str | None:
    """Return the path of the GNU OpenMP runtime in this process, which is torch's own in its wheels."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if re.fullmatch(r"libgomp[-.\w]*", path.rpartition("/")[2]):
            return path
    return None


def _version(compiler: str) -> bytes:
    done = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S)
    return done.stdout


def _digest(*parts: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:24]


def cache_path(environment: Mapping[str, str]) -> Path | None:
    """Return our folder in the user's cache, which need not be there, or None when nobody knows where the user is at
    home."""
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "pdinfer"
    except RuntimeError:
        return None


def is_open_to_others(folder: Path) -> bool:
    """Return whether a folder, if it is there, is another user's or can be written by others."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid != os.getuid() or _others_write(status)


def _cache_folder() -> Path | None:
    """Return our folder in the user's cache if nobody else can write it, because what lies there is loaded and run."""
    folder = cache_path(os.environ)
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.stat()
    except OSError:
        return None
    if not is_open_to_others(folder):
        return folder
    _log.warning("compiled kernels are not kept: %s is another user's, or others can write it (chmod go-w)", folder)
    return None


def _others_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _first_loaded(stem: str, folder: Path | None) -> ctypes.CDLL | None:
    """Return the first library whose name begins with `stem`, and which is whole and can be loaded."""
    for path in _candidates(stem, folder):
        with contextlib.suppress(OSError, BackendUnavailable):
            if _is_whole(path):
                return _load(path)
            _log.warning("%s is not what was written there, and is not used", path)
            if path.parent == folder:
                path.unlink()
    return None


def _candidates(stem: str, folder: Path | None) -> Iterator[Path]:
    for each in (folder, FOLDER):
        if each is not None:
            yield from sorted(each.glob(f"{stem}-*.so"))


def _is_whole(path: Path) -> bool:
    """Return whether it is a file of ours, or of the user who installed us, and holds the bytes that its name tells."""
    owners = (os.getuid(), FOLDER.stat().st_uid)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners or _others_write(status):
            return False
        return path.stem.rpartition("-")[2] == _digest(file.read())


def _built(compiler: str, openmp: str | None, stem: str, folder: Path | None) -> ctypes.CDLL:
    """Compile and load the library. It is kept in `folder` if that can be written."""
    if folder is not None:
        with contextlib.suppress(OSError), ScratchFolder(folder) as scratch:
            return _load(_kept(_compile(compiler, openmp, scratch.path), folder, stem))
    with ScratchFolder() as scratch:
        return _load(_compile(compiler, openmp, scratch.path))


def _kept(library: Path, folder: Path, stem: str) -> Path:
    """Name the library once its bytes are on disk, so that a process that finds the name finds all of it."""
    library.chmod(0o700)
    with library.open("rb") as file:
        path = folder / f"{stem}-{_digest(file.read())}.so"
        os.fsync(file.fileno())
    os.replace(library, path)
    listing = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(listing)
    finally:
        os.close(listing)
    return path


def _compile(compiler: str, openmp: str | None, folder: Path) -> Path:
    sources, linked = sorted(FOLDER.glob("*.c")), folder / "native.so"
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    link = [str(openmp)] if openmp else ["-fopenmp"]
    for command in (
        [compiler, *FLAGS, "-fopenmp", "-c", *map(str, sources)],
        [compiler, "-shared", *objects, *link, "-lm", "-o", str(linked)],
    ):
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S, cwd=folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendUnavailable(f"could not be compiled: {error}") from error
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            raise BackendUnavailable(f"could not be compiled by {compiler}: {words[0] if words else 'no message'}")
    return linked


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(f"was compiled and cannot be loaded: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, RESULTS.get(name)
    loaded.find_tiles()
    return loaded
