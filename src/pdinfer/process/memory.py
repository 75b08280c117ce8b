"""How much memory a device has, and how much of it is in use by any process; what the host's memory is asked to do: be
copied by a device itself, lie on huge pages, stay when it was freed."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

MEMFD_PREFIX = "pdinfer-"
"""The prefix of the names of this library's memfds."""

LEAST_HUGE_BYTES = 4 << 20
"""Smaller tensors may hold no whole huge page."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BYTES = 1 << 30
MOST_KEPT_BYTES = 2**31 - 1

_BLOCK_BYTES = 512
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """Bytes that a device has for us, and those of them in use. `shared_by` is a number that ranks with the same memory
    have in common: 0 for a GPU, which each rank has to itself."""

    total: int
    in_use: int
    shared_by: int = 0


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a device. For a GPU or an NPU, that is what the driver reports for all processes, without
    what torch's allocator keeps for later, which is given back here. For a CPU, see `main_memory`."""
    if device.type == "cpu":
        return main_memory()
    module = torch.get_device_module(device)
    module.empty_cache()
    free, total = module.mem_get_info(device)
    return DeviceMemory(total=total, in_use=total - free)


def device_memory_bytes(device: torch.device) -> int:
    """Return the size, used or not, of the memory in which tensors on `device` live."""
    if device.type == "cpu":
        return main_memory_bytes()
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def pinned_empty(num_bytes: int, device: torch.device) -> Tensor:
    """Return uninitialised host memory, uint8 [num_bytes], for copies to and from `device`. It is page-locked, so that
    copies with `non_blocking=True` stop no thread, and neither side may touch the bytes before an event behind the
    copy. For a CPU it is plain memory.

    Locking takes milliseconds and the memory cannot be swapped: allocate once, and reuse."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if device.type == "cpu" else _page_locked(num_bytes)


def _page_locked(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def ask_huge_pages(tensor: Tensor) -> bool:
    """Ask the kernel for huge pages below a CPU tensor that nobody has written to yet, and return whether it will try.

    Reading then waits for fewer page walks: on one core of a Zen 3, products of one row read 13.1 GB/s of weights
    instead of 10.6. Return False for tensors elsewhere, small ones, and where the system has no such pages."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu" or tensor.nbytes < LEAST_HUGE_BYTES:
        return False
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, last - first, advice) == 0)


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 1 GiB, 2 GiB of them in all, for the next allocation. Return whether it
    does.

    Torch has no cache of its own for the CPU, so that otherwise each large tensor of a step is new memory, which the
    kernel zeroes page by page: 13 to 17 % of a prefill step. This is a setting of the whole process (mallopt(3)), and
    replaces what its host has set there. Return False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES))


def main_memory_bytes(root: Path = Path("/")) -> int:
    """Return the main memory that this process may have, used or not: the machine's or, if that is less, that of its
    control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _control_groups(root))])


def main_memory(root: Path = Path("/")) -> DeviceMemory:
    """Return the main memory with what is in use: by all processes that the kernel counts, without files that it can
    drop, and by the pages of this process's pools that have not been touched yet, which the kernel does not count.

    Where control groups leave less than the machine does, the group that leaves least counts. Without /proc/meminfo,
    the most that this process ever had counts as in use."""
    try:
        lines = (root / "proc/meminfo").read_text("ascii").splitlines()
        fields = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines)}
        machine = (fields["MemTotal"], fields["MemTotal"] - fields["MemAvailable"])
    except (OSError, ValueError, KeyError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1 << 10
        machine = (main_memory_bytes(root), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    total, in_use = min([machine, *_control_groups(root)], key=lambda both: both[0] - both[1])
    return DeviceMemory(total=total, in_use=in_use + _untouched_bytes(root), shared_by=_boot(root))


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, in use) of every control group around this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        folder = Path(path.lstrip("/"))
        for at in (folder, *folder.parents):
            found = _control_group(base / at, *(_V1_FILES if controllers else _V2_FILES))
            if found is not None:
                yield found


def _control_group(folder: Path, limit: str, usage: str, droppable: str) -> tuple[int, int] | None:
    """Return (limit, in use) of one control group, or None when it has no limit or cannot be seen from inside a
    container."""
    try:
        most = int((folder / limit).read_text("ascii"))  # first: where it is "max", the rest need not be read
        stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
        used = int((folder / usage).read_text("ascii")) - int(stat.get(droppable, 0))
        return most, max(0, used)
    except (OSError, ValueError):
        return None


def _untouched_bytes(root: Path) -> int:
    """Return the bytes of this process's memfds that the kernel has not taken yet."""
    sizes: dict[int, int] = {}
    for descriptor in (root / "proc/self/fd").glob("*"):
        try:
            if os.readlink(descriptor).startswith(f"/memfd:{MEMFD_PREFIX}"):
                about = os.stat(descriptor)
                sizes[about.st_ino] = max(0, about.st_size - about.st_blocks * _BLOCK_BYTES)
        except OSError:  # closed meanwhile
            continue
    return sum(sizes.values())


def _boot(root: Path) -> int:
    """Return a number that ranks on one machine have in common and ranks on others hardly ever; never 0."""
    try:
        return 1 + zlib.crc32((root / "proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return 1
