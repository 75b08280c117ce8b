"""Machines of a test's making: a laptop with a CPU, and a server with two GPUs and two RDMA cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdinfer.diagnosis.machine import Gpu, Machine
from pdinfer.diagnosis.software import REQUIRED
from pdinfer.kernels.resolve import OpChoice

LIMITS = (
    "Max open files            {files:<20} {files:<20} files\nMax locked memory         {locked:<20} 8388608 bytes\n"
)
REQUIRED_VERSIONS = {name: ".".join(map(str, version)) for name, version in REQUIRED.items()}
ON_CPU = (OpChoice("linear", "native", ()),)
PARAMS = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'
PLACES = ("pci0000:15/0000:15:01.0", "pci0000:97/0000:97:01.0")


def write(root: Path, path: str, text: str = "") -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def link(root: Path, path: str, to: str) -> None:
    """Make a relative link, which stays below `root`."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    depth = len(Path(path).parent.parts)
    (root / path).symlink_to(Path(*[".."] * depth) / to)


def limited(root: Path, *, files: object = 1024, locked: object = 8388608, capabilities: int = 0) -> None:
    """Set limits of the process."""
    write(root, "proc/self/limits", LIMITS.format(files=files, locked=locked))
    write(root, "proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities:016x}\nCpus_allowed_list:\t0-3\n")


def laptop(root: Path, **changes: Any) -> Machine:
    """No GPU, no RDMA, the limits that Linux gives a user, no optional library; a C compiler."""
    limited(root)
    write(root, "proc/cpuinfo", "model name\t: a CPU\nflags\t\t: sse avx2\n")
    write(root, "proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    for name in ("lo", "eth0"):
        write(root, f"sys/class/net/{name}/operstate", "up\n")
    write(root, "bin/cc")
    (root / "bin/cc").chmod(0o755)
    (root / "home").mkdir()
    versions = {**REQUIRED_VERSIONS, "pdinfer": "0.1.0", **changes.pop("versions", {})}
    environment = {"PATH": str(root / "bin"), "HOME": str(root / "home"), "XDG_CACHE_HOME": str(root / "home")}
    given: dict[str, Any] = {
        "root": root,
        "environment": environment | changes.pop("environment", {}),
        "python": "3.12.1",
        "system": "Linux",
        "num_cpus": 2,
        "torch_cuda": None,
        "version": versions.get,
        "why_not_imported": lambda _: None,
        "gpus": tuple,
        "current_device": lambda: None,
        "choices": lambda _: ON_CPU,
        "lost_kernels": dict,
        "compiler_sets": lambda: frozenset({"avx2"}),
        "free_bytes": lambda _: (8 << 30, 8 << 30),
    }
    return Machine(**given | changes)


def server(root: Path, **changes: Any) -> Machine:
    """Two GPUs, each with two CPUs near it and an RDMA card behind its PCIe switch, set up as a deployment asks."""
    gpus = []
    for number, place in enumerate(PLACES):
        gpu, card = f"0000:{0x16 + number:02x}:00.0", f"0000:{0x26 + number:02x}:00.0"
        for address in (gpu, card):
            write(root, f"sys/devices/{place}/{address}/numa_node", str(number))
        write(root, f"sys/devices/system/node/node{number}/cpulist", f"{2 * number}-{2 * number + 1}\n")
        link(root, f"sys/bus/pci/devices/{gpu}", f"sys/devices/{place}/{gpu}")
        link(root, f"sys/class/infiniband/mlx5_{number}/device", f"sys/devices/{place}/{card}")
        port = f"sys/class/infiniband/mlx5_{number}/ports/1"
        write(root, f"{port}/state", "4: ACTIVE\n")
        write(root, f"{port}/link_layer", "Ethernet\n")
        write(root, f"{port}/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n")
        write(root, f"{port}/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001\n")
        gpus.append(Gpu(index=number, name="H800", capability=(9, 0), memory_bytes=80 << 30, pci=gpu))
    write(root, "dev/infiniband/uverbs0")
    write(root, "sys/module/nvidia_peermem/version")
    write(root, "proc/driver/nvidia/params", PARAMS)
    write(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\n")
    changes["versions"] = {
        "triton": "3.6.0",
        "mooncake-transfer-engine": "0.3.13.post1",
        **changes.get("versions", {}),
    }
    given = {"gpus": lambda: gpus, "current_device": lambda: 0, "torch_cuda": "12.8"}
    machine = laptop(root, **{**given, **changes})
    limited(root, files=65536, locked="unlimited")
    return machine
