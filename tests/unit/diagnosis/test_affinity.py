"""Ranks of a host run on cores beside their GPUs, which they share with no other rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdinfer.diagnosis.affinity import CpuAffinity, cpu_affinity
from pdinfer.diagnosis.machine import Gpu, Machine
from pdinfer.errors import ConfigError
from tests.unit.diagnosis.machines import laptop, write


def host(root: Path, nodes: Sequence[int], lists: Sequence[str], threads: dict[int, str]) -> Machine:
    """A host whose GPUs are on these NUMA nodes, which have these CPUs; CPUs that share a core are named for each."""
    gpus = []
    for number, node in enumerate(nodes):
        pci = f"0000:{0x16 + number:02x}:00.0"
        write(root, f"sys/bus/pci/devices/{pci}/numa_node", f"{node}\n")
        gpus.append(Gpu(index=number, name="H800", capability=(9, 0), memory_bytes=80 << 30, pci=pci))
    for node, cpus in enumerate(lists):
        write(root, f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")
    for cpu, siblings in threads.items():
        write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{siblings}\n")
    return laptop(root, gpus=lambda: gpus)


def told(machine: Machine) -> list[Any]:
    return [None if at is None else (at.numa_node, at.cpus) for at in cpu_affinity(machine)]


def test_eight_gpus_divide_the_cores_of_two_sockets(tmp_path: Path) -> None:
    threads = {cpu: f"{cpu % 96},{cpu % 96 + 96}" for cpu in range(192)}
    machine = host(tmp_path, [0] * 4 + [1] * 4, ["0-47,96-143", "48-95,144-191"], threads)
    assert told(machine) == [
        (0, "0-11,96-107"),
        (0, "12-23,108-119"),
        (0, "24-35,120-131"),
        (0, "36-47,132-143"),
        (1, "48-59,144-155"),
        (1, "60-71,156-167"),
        (1, "72-83,168-179"),
        (1, "84-95,180-191"),
    ]


def test_cores_that_do_not_divide_and_gpus_between_each_other(tmp_path: Path) -> None:
    machine = host(tmp_path, [1, 0, 1, 1], ["0,2", "1,3,5-9"], {})
    assert told(machine) == [(1, "1,3"), (0, "0,2"), (1, "5-6"), (1, "7-9")]


def test_gpus_share_all_cores_where_there_are_fewer(tmp_path: Path) -> None:
    machine = host(tmp_path, [0, 0, 0], ["0-1"], {0: "0-1", 1: "0-1"})
    assert told(machine) == [(0, "0-1")] * 3


def test_what_the_host_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert told(host(tmp_path, [-1, 1, 0], ["0-3"], {})) == [None, None, (0, "0-3")]


def test_a_host_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch sees no GPU here, .*; ask on a host of the cluster"):
        cpu_affinity(laptop(tmp_path))
    with pytest.raises(ConfigError, match="machine must be Machine"):
        cpu_affinity("node-7")  # type: ignore[arg-type]


@pytest.mark.parametrize("cpus", ["", "all", "0-", "1,", "0-3;8", "٣", 3])
def test_what_is_no_list_of_cpus_is_refused(cpus: Any) -> None:
    with pytest.raises(ConfigError, match="cpus must be CPUs as the kernel lists them"):
        CpuAffinity(numa_node=0, cpus=cpus)
