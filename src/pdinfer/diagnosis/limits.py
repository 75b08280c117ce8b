"""Limits of the system for a process: locked memory, shared memory, open files, local ports."""

from __future__ import annotations

import re
from collections.abc import Callable

from pdinfer.diagnosis.machine import Machine
from pdinfer.diagnosis.network import has_rdma
from pdinfer.diagnosis.report import Fact, Found, failure, warning
from pdinfer.kv.transports.one_sided.transport import NUM_SLOTS, SLOT_BYTES
from pdinfer.process.memory import main_memory

CAP_IPC_LOCK = 1 << 14
"""The bit of the capability whose owner may lock any amount of memory (linux/capability.h)."""
RING_BYTES = NUM_SLOTS * SLOT_BYTES
"""The bytes that an RDMA transport registers for a single peer."""
SHM = "/dev/shm"  # noqa: S108 - only looked at
SHM_BYTES, ROOMY_SHM_BYTES = 64 << 20, 1 << 30
"""The bytes of /dev/shm that NCCL needs between two GPUs at least, and those that its manual gives a container."""
FILES, ROOMY_FILES = 256, 1024
"""An engine with a few peers has about a hundred files and sockets open; each link to another one takes two more."""
PORTS, ROOMY_PORTS = 64, 1000


def limits(machine: Machine) -> Found:
    """Memory, locked and shared, and open files."""
    memory = main_memory(machine.root)
    yield Fact(name="memory", value=_size(memory.total), remarks=(f"{_size(memory.in_use)} in use",))
    yield from _locked(machine)
    yield from _shared(machine)
    files = _limit(machine, "Max open files")
    yield Fact(name="open files", value=_shown(files), remarks=(f"{len(machine.names('/proc/self/fd'))} now",))
    if files is not None and files < ROOMY_FILES:
        level = failure if files < FILES else warning
        yield level(f"{files} files and sockets may be open, which is soon too few for engines", "ulimit -n 65536")


def ports(machine: Machine) -> Found:
    """The local ports of outgoing connections."""
    text = machine.read("/proc/sys/net/ipv4/ip_local_port_range")
    yield Fact(name="local ports", value=None if text is None else "-".join(text.split()))
    match [int(word) for word in re.findall(r"\d+", text or "")]:
        case [low, high] if (number := high - low + 1) < ROOMY_PORTS:
            level = failure if number < PORTS else warning
            yield level(
                f"{number} local ports are for the connections of all processes: new ones fail when they are taken",
                'sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
            )


def _locked(machine: Machine) -> Found:
    locked = _limit(machine, "Max locked memory")
    held = re.search(r"^CapEff:\s*([0-9a-f]+)$", machine.read("/proc/self/status") or "", re.MULTILINE)
    is_free = locked is None or bool(held and int(held[1], 16) & CAP_IPC_LOCK)
    remarks = ("CAP_IPC_LOCK: the limit does not apply",) if is_free and locked is not None else ()
    yield Fact(name="locked memory", value=_shown(locked, _size), remarks=remarks)
    if locked is not None and not is_free and has_rdma(machine):
        level = failure if locked < RING_BYTES else warning
        yield level(
            f"{_size(locked)} may be locked, and RDMA locks what it registers: {_size(RING_BYTES)} for each peer",
            "ulimit -l unlimited  # in Docker: --ulimit memlock=-1 --cap-add IPC_LOCK",
        )


def _shared(machine: Machine) -> Found:
    """NCCL needs /dev/shm between GPUs; pdinfer's own shared memory has no name and is not in it."""
    found = machine.free_bytes(machine.at(SHM))
    total, free = found or (0, 0)
    yield Fact(name=SHM, value=_size(total) if found else None, remarks=(f"{_size(free)} free",) if found else ())
    num_gpus, mend = len(machine.gpus()), f"mount -o remount,size=32g {SHM}  # in Docker: --shm-size 32g"
    if num_gpus > 1 and free < SHM_BYTES:
        yield failure(f"{SHM} has {_size(free)} free, and NCCL between {num_gpus} GPUs needs it", mend)
    elif num_gpus > 1 and total < ROOMY_SHM_BYTES:
        yield warning(f"{SHM} has {_size(total)}, little for NCCL between {num_gpus} GPUs", mend)
    elif num_gpus < 2 and found and free < SHM_BYTES:
        yield warning(f"{SHM} has {_size(free)} free; other programs may need it, pdinfer does not", mend)


def _limit(machine: Machine, name: str) -> int | None:
    """Return the soft limit of that name in bytes or a number, or None without one."""
    text = machine.read("/proc/self/limits") or ""
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes / 1024:.3g} KiB"


def _shown(limit: int | None, show: Callable[[int], str] = str) -> str:
    return "unlimited" if limit is None else show(limit)
