"""C sources that are compiled for this machine on first use, and loaded.

A library is kept in a folder of the user's cache (XDG_CACHE_HOME, or ~/.cache, and pdinfer in it) that nobody else
may write. Without such a folder it is built anew for each process. Its name says what went into it and what came out:

    <name>-<sources, flags, CPU, OpenMP>-<compiler>-<the file's own bytes>.so

so that a library that was cut short or changed is recognised and built anew. Without a compiler any library that fits
this CPU will do, in the cache or beside the sources. It uses the OpenMP runtime that torch has loaded: two of them
would each keep a thread per core spinning.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from pdinfer.errors import BackendUnavailable
from pdinfer.process.scratch import ScratchFolder

_log = logging.getLogger("pdinfer")

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fvisibility=hidden")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 120.0


@attrs.frozen(kw_only=True, eq=False)
class NativeLibrary:
    """What the sources in `folder` become: every .c file is compiled, every .h file may be included. `signatures` are
    the types of the arguments of each function, `results` those of the functions that return something. With
    `keeps_lock` calls keep the interpreter lock."""

    name: str
    folder: Path
    signatures: Mapping[str, tuple[Any, ...]]
    results: Mapping[str, Any]
    openmp: bool = False
    keeps_lock: bool = False


def find_or_build(library: NativeLibrary, cpu: frozenset[str]) -> ctypes.CDLL:
    """Load a library that was kept, or build one, for a CPU with these flags. Raises BackendUnavailable with the reason
    when neither can be."""
    openmp = _loaded_openmp() if library.openmp else None
    sources = [path.read_bytes() for path in sorted(library.folder.glob("*.[ch]"))]
    fits = _digest(*sources, " ".join(FLAGS), openmp or "", " ".join(sorted(cpu)))
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    folder = _cache_folder()
    if compiler is not None:
        stem = f"{library.name}-{fits}-{_digest(_version(compiler))}"
        try:
            return _first_loaded(library, stem, folder) or _built(library, compiler, openmp, stem, folder)
        except BackendUnavailable as error:
            problem = error
    else:
        problem = BackendUnavailable(
            "is compiled on first use and needs a C compiler (cc, gcc or clang), none is in PATH, and none that was "
            f"built for this CPU is in {folder or 'a cache folder'}"
        )
    found = _first_loaded(library, f"{library.name}-{fits}", folder)
    if found is None:
        raise problem
    return found


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets of this machine's CPU, as /proc/cpuinfo names them; empty where it is not there."""
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


def _first_loaded(library: NativeLibrary, stem: str, folder: Path | None) -> ctypes.CDLL | None:
    """Return the first library whose name begins with `stem`, and which is whole and can be loaded."""
    for path in _candidates(library, stem, folder):
        with contextlib.suppress(OSError, BackendUnavailable):
            if _is_whole(library, path):
                return _load(library, path)
            _log.warning("%s is not what was written there, and is not used", path)
            if path.parent == folder:
                path.unlink()
    return None


def _candidates(library: NativeLibrary, stem: str, folder: Path | None) -> Iterator[Path]:
    for each in (folder, library.folder):
        if each is not None:
            yield from sorted(each.glob(f"{stem}-*.so"))


def _is_whole(library: NativeLibrary, path: Path) -> bool:
    """Return whether it is a file of ours, or of the user who installed us, and holds the bytes that its name tells."""
    owners = (os.getuid(), library.folder.stat().st_uid)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners or _others_write(status):
            return False
        return path.stem.rpartition("-")[2] == _digest(file.read())


def _built(library: NativeLibrary, compiler: str, openmp: str | None, stem: str, folder: Path | None) -> ctypes.CDLL:
    """Compile and load the library. It is kept in `folder` if that can be written."""
    if folder is not None:
        with contextlib.suppress(OSError), ScratchFolder(folder) as scratch:
            return _load(library, _kept(_compile(library, compiler, openmp, scratch.path), folder, stem))
    with ScratchFolder() as scratch:
        return _load(library, _compile(library, compiler, openmp, scratch.path))


def _kept(compiled: Path, folder: Path, stem: str) -> Path:
    """Name the library once its bytes are on disk, so that a process that finds the name finds all of it."""
    compiled.chmod(0o700)
    with compiled.open("rb") as file:
        path = folder / f"{stem}-{_digest(file.read())}.so"
        os.fsync(file.fileno())
    os.replace(compiled, path)
    listing = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(listing)
    finally:
        os.close(listing)
    return path


def _compile(library: NativeLibrary, compiler: str, openmp: str | None, folder: Path) -> Path:
    sources, linked = sorted(library.folder.glob("*.c")), folder / "native.so"
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    threads = ["-fopenmp"] if library.openmp else []
    link = [str(openmp)] if openmp else threads
    for command in (
        [compiler, *FLAGS, *threads, "-c", *map(str, sources)],
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


def _load(library: NativeLibrary, path: Path) -> ctypes.CDLL:
    try:
        loaded = (ctypes.PyDLL if library.keeps_lock else ctypes.CDLL)(str(path))
    except OSError as error:
        raise BackendUnavailable(f"was compiled and cannot be loaded: {error}") from error
    for name, arguments in library.signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, library.results.get(name)
    return loaded
