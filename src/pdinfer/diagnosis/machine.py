"""Everything that the doctor looks at, in one value. A test gives another one, in which something is broken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from pdinfer.kernels.native.build import lost_kernels
from pdinfer.kernels.resolve import OpChoice, resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.process.compiler import CompilationError, Compiler

IMPORT_TIMEOUT_S = 120.0


@attrs.frozen(kw_only=True)
class Gpu:
    """A CUDA device, and its address on the PCI bus ("0000:18:00.0", or "" where it is not known)."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    pci: str = ""


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, or None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_imported(module: str) -> str | None:
    """Return why a module cannot be imported, or None. A process of its own tries it: a broken library may end it."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=IMPORT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode < 0:
        return f"the import ends the process with signal {-done.returncode}"
    words = done.stderr.decode(errors="replace").strip().splitlines()
    return (words[-1] if words else f"exit status {done.returncode}") if done.returncode else None


def gpus_here() -> tuple[Gpu, ...]:
    """Return the CUDA devices that torch can use. Starts CUDA in this process when there are any."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(index) for index in range(torch.cuda.device_count()))


def _gpu(index: int) -> Gpu:
    about = torch.cuda.get_device_properties(index)
    place = [getattr(about, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return Gpu(
        index=index,
        name=about.name,
        capability=(about.major, about.minor),
        memory_bytes=about.total_memory,
        pci="" if -1 in place else "{:04x}:{:02x}:{:02x}.0".format(*place),
    )


def current_device() -> int | None:
    """Return the number of this thread's current CUDA device, or None without any."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def choices_on(device: str) -> Sequence[OpChoice]:
    """Return the provider of each op on a kind of device, for a model in bfloat16."""
    return resolve_ops(OpSpec(device=device)).choices


def compiler_sets() -> frozenset[str] | None:
    """Return the instruction sets that the C compiler uses for this CPU, or None without one that works."""
    try:
        here = Compiler.here()
    except CompilationError:
        return None
    return None if here is None else here.sets


def free_bytes(folder: Path) -> tuple[int, int] | None:
    """Return (total, free) of the file system of a folder, or None without the folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total, usage.free


def why_not_written(folder: Path) -> str | None:
    """Return why no file can be made in a folder, or None. Leaves no file: of a folder that is not there yet,
    the nearest one above it is tried."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@attrs.frozen(kw_only=True)
class Machine:
    """This machine, as far as the doctor may see it. Files (/proc, /sys, /dev) are read below `root`."""

    root: Path = Path("/")
    environment: Mapping[str, str] = attrs.field(factory=_environment)
    python: str = attrs.field(factory=platform.python_version)
    system: str = attrs.field(factory=platform.platform)
    num_cpus: int = attrs.field(factory=_num_cpus)
    torch_cuda: str | None = torch.version.cuda
    version: Callable[[str], str | None] = installed
    why_not_imported: Callable[[str], str | None] = why_not_imported
    gpus: Callable[[], Sequence[Gpu]] = gpus_here
    current_device: Callable[[], int | None] = current_device
    choices: Callable[[str], Sequence[OpChoice]] = choices_on
    lost_kernels: Callable[[], Mapping[str, str]] = lost_kernels
    compiler_sets: Callable[[], frozenset[str] | None] = compiler_sets
    free_bytes: Callable[[Path], tuple[int, int] | None] = free_bytes
    why_not_written: Callable[[Path], str | None] = why_not_written

    def at(self, path: str) -> Path:
        """Return where an absolute path is."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """Return the text of a small file, without white space around it, or None when it cannot be read."""
        try:
            return self.at(path).read_text("utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none without the folder."""
        try:
            return sorted(entry.name for entry in self.at(folder).iterdir())
        except OSError:
            return []

    def which(self, *programs: str) -> str | None:
        """Return the path of the first of these programs that is there."""
        path = self.environment.get("PATH", "")
        return next(filter(None, (shutil.which(program, path=path) for program in programs)), None)
