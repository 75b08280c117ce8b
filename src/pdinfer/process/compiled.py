"""C sources that are compiled for this machine on first use, and loaded.

A library is kept in a folder of the user's cache (XDG_CACHE_HOME, or ~/.cache, and pdinfer in it) that nobody else
may write. Without such a folder, or room in it, it is built anew for each process. Its name says what went into it and
what came out:

    <name>-<sources, flags, OpenMP>-<instruction sets>-<compiler and CPU>-<the file's own bytes>.so

so that a library that was cut short or changed is recognised and built anew. Where the compiler finds fault with a
source, a file of this name, without the last part and with the ending .failed, keeps its words: the next process does
not compile in vain. Without a compiler the library with most instruction sets will do of those whose sets this CPU has,
in the cache or beside the sources. A library uses the OpenMP runtime that torch has loaded: two of them would each keep
a thread per core spinning."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from pdinfer.log import log
from pdinfer.process import compiler
from pdinfer.process.compiler import FOR_THIS_CPU, INSTRUCTION_SETS, CompilationError, Compiler, bits_of, digest
from pdinfer.process.scratch import ScratchFolder
from pdinfer.process.threads import loaded_openmp


@attrs.frozen(kw_only=True, eq=False)
class NativeLibrary:
    """A library of some `sources` in `folder`; a source may be part of several. `header`, which they include, is
    compiled once for all of them. `signatures` are the types of the arguments of each function, `results` those of the
    functions that return something. With `keeps_lock` calls keep the interpreter lock."""

    name: str
    folder: Path
    sources: tuple[str, ...]
    signatures: Mapping[str, tuple[Any, ...]]
    results: Mapping[str, Any]
    header: str | None = None
    openmp: bool = False
    keeps_lock: bool = False

    def text(self) -> list[bytes]:
        """Return the sources and the headers that they include, each once, with their names."""
        left, seen = [*self.sources], {}
        while left:
            name = left.pop()
            if name not in seen and (path := self.folder / name).exists():
                seen[name] = path.read_bytes()
                left += re.findall(r'^#include "([\w./]+)"', seen[name].decode(errors="replace"), re.MULTILINE)
        return [part for name in sorted(seen) for part in (name.encode(), seen[name])]


def find_or_build(libraries: Sequence[NativeLibrary], cpu: frozenset[str]) -> dict[str, ctypes.CDLL | str]:
    """Load those of the libraries that were kept, and build the others, side by side, for a CPU with these flags ->
    each by its name, or the reason why there is none."""
    folder, openmp = _cache_folder(), loaded_openmp()
    reason = (
        "is compiled on first use and needs a C compiler (cc, gcc or clang), none is in PATH, and none that was "
        f"built for this CPU (python -m pdinfer build-kernels) is in {folder or 'a cache folder'} or next to pdinfer"
    )
    try:
        cc = Compiler.here()
    except CompilationError as error:
        cc, reason = None, str(error)
    if cc is not None and (lacking := cc.beyond(cpu)):
        reason = (
            f"is not compiled, because {cc.path} uses instructions that this CPU lacks ({', '.join(lacking)}), with "
            f"options behind {' '.join(FOR_THIS_CPU)}: the first call would end the process"
        )
        cc = None
    found: dict[str, ctypes.CDLL | str] = {library.name: reason for library in libraries}
    if cc is not None:
        found |= _by_compiler(libraries, cc, openmp, folder)
    for library in libraries:
        if isinstance(found[library.name], str):
            fitting = _fitting(library, stem_of(library, openmp), folder, cpu)
            found[library.name] = _first_loaded(library, fitting, folder) or found[library.name]
    return found


def _by_compiler(
    libraries: Sequence[NativeLibrary], cc: Compiler, openmp: str | None, folder: Path | None
) -> dict[str, ctypes.CDLL | str]:
    """Return what this compiler made, or makes now."""
    exact = {library.name: stem_of(library, openmp, cc) for library in libraries}
    found = _kept(libraries, exact, folder)
    if len(found) < len(libraries):
        with _in_turn(folder):
            found = _kept(libraries, exact, folder)  # also by a process that was here first
            if missing := [library for library in libraries if library.name not in found]:
                found |= _built(missing, cc, openmp, exact, folder)
    return found


def _kept(
    libraries: Sequence[NativeLibrary], stems: Mapping[str, str], folder: Path | None
) -> dict[str, ctypes.CDLL | str]:
    """Return what this compiler made of them before, or said of them."""
    found: dict[str, ctypes.CDLL | str] = {}
    for library in libraries:
        stem = stems[library.name]
        kept = _first_loaded(library, _named(library, stem, folder), folder) or _remembered(library, stem, folder)
        if kept is not None:
            found[library.name] = kept
    return found


def _is_ours(lock: int) -> bool:
    """Take a lock, which a process that ends gives back, unless another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _in_turn(folder: Path | None) -> Iterator[None]:
    """Wait for other processes that compile for this folder: the ranks of a node begin at once, and one compiles for
    all. Where a folder has no locks, or one process takes longer than a compiler may, each compiles for itself."""
    until = time.monotonic() + compiler.COMPILE_TIMEOUT_S
    with contextlib.ExitStack() as stack:
        if folder is not None:
            with contextlib.suppress(OSError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, lock)
                while not _is_ours(lock) and time.monotonic() < until:
                    time.sleep(0.05)
        yield


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets of this machine's CPU, as /proc/cpuinfo names them; empty where it is not there."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def stem_of(library: NativeLibrary, openmp: str | None, cc: Compiler | None = None) -> str:
    """Return the beginning of a library's name: as far as CPUs and compilers have no part in it, or all that is known
    before it is made by a compiler."""
    runtime = Path(openmp).name if openmp and library.openmp else ""
    fits = digest(*library.text(), " ".join(compiler.FLAGS), runtime, " ".join(INSTRUCTION_SETS))
    made = f"-{bits_of(cc.sets):x}-{cc.version}" if cc else ""
    return f"{library.name}-{fits}{made}"


def cache_path(environment: Mapping[str, str]) -> Path | None:
    """Return our folder in the user's cache, which need not be there, or None when nobody knows where the user is at
    home."""
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    try:
        cache = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "pdinfer" if cache.is_absolute() else None


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
    log.warning("compiled kernels are not kept: %s is another user's, or others can write it (chmod go-w)", folder)
    return None


def _others_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _first_loaded(library: NativeLibrary, paths: Iterable[Path], folder: Path | None) -> ctypes.CDLL | None:
    """Return the first of these libraries that is whole and can be loaded."""
    for path in paths:
        with contextlib.suppress(OSError):
            content = _read_ours(library, path)
            if content is None or path.stem.rpartition("-")[2] != digest(content):
                log.warning("%s is not what was written there, and is not used", path)
                if path.parent == folder:
                    path.unlink()
            elif not isinstance(loaded := _loaded_or_reason(library, path), str):
                return loaded
    return None


def _named(library: NativeLibrary, stem: str, folder: Path | None) -> Iterator[Path]:
    """Yield the libraries whose name begins with `stem`."""
    for each in (folder, library.folder):
        if each is not None:
            yield from sorted(each.glob(f"{stem}-*.so"))


def _fitting(library: NativeLibrary, stem: str, folder: Path | None, cpu: frozenset[str]) -> list[Path]:
    """Return those of them that use no instruction set that the CPU lacks, the one with most sets first."""
    has = bits_of(cpu)
    names = [(re.fullmatch(rf"{stem}-([0-9a-f]+)-.*", path.name), path) for path in _named(library, stem, folder)]
    sets = {path: int(name[1], 16) for name, path in names if name and cpu}
    return sorted((path for path in sets if not sets[path] & ~has), key=lambda path: -sets[path].bit_count())


def _read_ours(library: NativeLibrary, path: Path) -> bytes | None:
    """Return what is in a file of this user, or of the one who installed us, that others cannot write; else None."""
    owners = (os.getuid(), library.folder.stat().st_uid)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners or _others_write(status):
            return None
        return file.read()


def _remembered(library: NativeLibrary, stem: str, folder: Path | None) -> str | None:
    """Return what the compiler said of the same sources before, or None where it was not asked or may say another
    thing now."""
    if folder is None:
        return None
    path = folder / f"{stem}.failed"
    with contextlib.suppress(OSError):
        if (content := _read_ours(library, path)) is not None:
            return f"{content.decode(errors='replace')} (found earlier; to try again, delete {path})"
    return None


def _built(
    libraries: Sequence[NativeLibrary], cc: Compiler, openmp: str | None, stems: Mapping[str, str], folder: Path | None
) -> dict[str, ctypes.CDLL | str]:
    """Compile and load libraries. They are kept in `folder` if that can be written."""
    reason = ""
    for parent in dict.fromkeys((folder, None)):
        try:
            with ScratchFolder(parent) as scratch:
                return {
                    library.name: _loaded_and_kept(library, made, scratch.path, parent, stems[library.name])
                    for library, made in build(libraries, cc, openmp, scratch.path)
                }
        except OSError as error:
            reason = f"could not be compiled: {error}"
    return {library.name: reason for library in libraries}


def _loaded_and_kept(
    library: NativeLibrary, made: Path | CompilationError, scratch: Path, folder: Path | None, stem: str
) -> ctypes.CDLL | str:
    """Load what was made, or return why it was not. Either is kept in `folder`, if there is one. Raises OSError where
    that is full."""
    if isinstance(made, Path):
        return _loaded_or_reason(library, made if folder is None else keep(made, folder, stem))
    if made.of_room and folder is not None:
        raise OSError(str(made))  # a temporary folder may have the room
    if made.of_code and folder is not None:
        words = scratch / f"{stem}.failed"
        words.write_text(str(made))
        words.chmod(0o600)
        os.replace(words, folder / words.name)
    return str(made)


def keep(compiled: Path, folder: Path, stem: str, mode: int = 0o700) -> Path:
    """Name the library once its bytes are on disk, so that a process that finds the name finds all of it."""
    compiled.chmod(mode)
    with compiled.open("rb") as file:
        path = folder / f"{stem}-{digest(file.read())}.so"
        os.fsync(file.fileno())
    os.replace(compiled, path)
    listing = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(listing)
    finally:
        os.close(listing)
    return path


def build(
    libraries: Sequence[NativeLibrary], cc: Compiler, openmp: str | None, folder: Path
) -> Iterator[tuple[NativeLibrary, Path | CompilationError]]:
    """Compile in `folder`, with a compiler on each core -> each library's file, or what the compiler said."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        with_header = {library.folder / library.header: library for library in libraries if library.header}
        headers = {
            header: pool.submit(cc.precompile, header, folder, openmp=library.openmp)
            for header, library in with_header.items()
        }

        def compiled(source: Path, library: NativeLibrary) -> Path:
            header = headers[library.folder / library.header].result() if library.header else None
            return cc.compile(source, folder, openmp=library.openmp, header=header)

        needed = {library.folder / source: library for library in libraries for source in library.sources}
        longest_first = sorted(needed.items(), key=lambda each: -each[0].stat().st_size)
        objects = {source: pool.submit(compiled, source, library) for source, library in longest_first}
        for library in libraries:
            try:
                parts = [objects[library.folder / source].result() for source in library.sources]
                runtime = (openmp or "-fopenmp") if library.openmp else None
                yield library, cc.link(parts, folder / f"{library.name}.so", openmp=runtime)
            except CompilationError as error:
                yield library, error


def _loaded_or_reason(library: NativeLibrary, path: Path) -> ctypes.CDLL | str:
    try:
        loaded = (ctypes.PyDLL if library.keeps_lock else ctypes.CDLL)(str(path))
    except OSError as error:
        return f"was compiled and cannot be loaded: {error}"
    for name, arguments in library.signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, library.results.get(name)
    return loaded
