"""Where ranks of a host run: beside their GPUs, each on cores of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import attrs

from pdinfer.checks import clip, instance_of, int_in, typed
from pdinfer.diagnosis.machine import Gpu, Machine
from pdinfer.diagnosis.report import Fact, Found, failure, warning
from pdinfer.errors import ConfigError
from pdinfer.values import Value

_LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", re.ASCII)


def _check_list(instance: object, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not _LIST.fullmatch(value):
        raise ConfigError(f'{attribute.name} must be CPUs as the kernel lists them, such as "0-3,8", got {clip(value)}')


@attrs.frozen(kw_only=True)
class CpuAffinity(Value):
    """The NUMA node of a rank's GPU, and CPUs of that node as the kernel lists them, such as "0-11,96-107". As a
    command: `numactl --physcpubind=0-11,96-107 --membind=0`."""

    numa_node: int = attrs.field(validator=int_in(0, 1 << 16))
    cpus: str = attrs.field(validator=_check_list)


AFFINITIES = attrs.validators.deep_iterable(attrs.validators.optional(instance_of(CpuAffinity)), instance_of(tuple))
"""Checks what `cpu_affinity` returns."""


def in_words(ranks: Sequence[CpuAffinity | None]) -> str:
    """Return where each of these ranks runs."""
    places = ["CPUs that are not known" if at is None else f"{at.cpus} of NUMA node {at.numa_node}" for at in ranks]
    return ", ".join(f"rank {rank} on {place}" for rank, place in enumerate(places))


@typed
def cpu_affinity(machine: Machine | None = None) -> tuple[CpuAffinity | None, ...]:
    """Return where the ranks of this host run, for each GPU that torch sees; None for one whose NUMA node is not known.

    GPUs of a node divide its cores in order, and a core with all of its threads is one rank's. Reads /sys, and starts
    CUDA in this process. Raises ConfigError where there is no GPU. `machine` is for tests."""
    machine = machine or Machine()
    gpus = machine.gpus()
    if not gpus:
        raise ConfigError("torch sees no GPU here, beside which a rank could run; ask on a host of the cluster")
    nodes = [numa_node(machine, gpu) for gpu in gpus]
    return tuple(_share(machine, node, at, nodes) for at, node in enumerate(nodes))


def _share(machine: Machine, node: int | None, at: int, nodes: list[int | None]) -> CpuAffinity | None:
    near = None if node is None else near_cpus(machine, node)
    if node is None or near is None:
        return None
    cores, place, size = _cores(machine, cpus_in(near)), nodes[:at].count(node), nodes.count(node)
    mine = cores[len(cores) * place // size : len(cores) * (place + 1) // size]
    return CpuAffinity(numa_node=node, cpus=_listed(cpu for core in mine or cores for cpu in core))


def numa_node(machine: Machine, gpu: Gpu) -> int | None:
    """Return the NUMA node of a GPU, or None where the machine does not say it."""
    text = machine.read(f"/sys/bus/pci/devices/{gpu.pci}/numa_node") if gpu.pci else None
    return int(text) if text is not None and text.isdecimal() else None


def near_cpus(machine: Machine, node: int) -> str | None:
    """Return the CPUs of a NUMA node as the kernel lists them, or None where it has none."""
    return _list_at(machine, f"/sys/devices/system/node/node{node}/cpulist")


def _list_at(machine: Machine, path: str) -> str | None:
    text = machine.read(path)
    return text if text and _LIST.fullmatch(text) else None


def _cores(machine: Machine, cpus: set[int]) -> list[tuple[int, ...]]:
    """Return the CPUs by cores, whose threads the kernel names."""
    cores = set()
    for cpu in cpus:
        threads = _list_at(machine, f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(tuple(sorted(cpus_in(threads or str(cpu)) & cpus)))
    return sorted(cores)


def cpus_in(text: str) -> set[int]:
    """Return the numbers in a list of the kernel's, such as "0-3,8"."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _listed(cpus: Iterable[int]) -> str:
    """Return numbers as the kernel lists them."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


LOCAL_RANK = "LOCAL_RANK"
"""torchrun's number of a rank on its node, which is the number of its GPU."""


def ranks(machine: Machine) -> Found:
    """The current device, the CPUs of this process, and for each rank of a node its GPU and the CPUs near that."""
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", machine.read("/proc/self/status") or "", re.MULTILINE)
    gpus = machine.gpus()
    local = machine.environment.get(LOCAL_RANK, "")
    rank = int(local) if re.fullmatch(r"\d{1,6}", local, re.ASCII) else None
    yield Fact(name="CPUs of this process", value=allowed[1] if allowed else None)
    if not gpus:
        return
    current = machine.current_device()
    remarks = (
        (f"load_model(device='cuda:{rank}') makes that of {LOCAL_RANK} current",) if rank not in (None, current) else ()
    )
    yield Fact(name="current device", value=f"cuda:{current}", remarks=remarks)
    if rank is not None and rank >= len(gpus):
        yield failure(
            f"{LOCAL_RANK} is {rank} and this process sees {len(gpus)} GPUs: load_model(device='cuda:{rank}') fails",
            "unset CUDA_VISIBLE_DEVICES",
        )
    for gpu, share in zip(gpus, cpu_affinity(machine), strict=True):
        node = numa_node(machine, gpu)
        near = None if node is None else near_cpus(machine, node)
        remarks = ("which CPUs are near it is not known",)
        if near and share is not None:
            remarks = (f"CPUs {near} are near it, and {share.cpus} are its share of them",)
        yield Fact(
            name=f"rank {gpu.index}",
            value=f"cuda:{gpu.index}, NUMA node {'not known' if node is None else node}",
            remarks=remarks,
        )
        if allowed is None or not near:
            continue
        ours, theirs = cpus_in(allowed[1]), cpus_in(near)
        if rank == gpu.index and not ours <= theirs:
            yield warning(
                f"rank {rank} may run on CPUs {allowed[1]}, and cuda:{rank} is near {near} of NUMA node {node}: what "
                "it copies crosses the sockets",
                f"numactl --cpunodebind={node} --membind={node} python serve.py  # what torchrun starts for this rank",
            )
        elif rank is None and not ours & theirs:
            yield warning(
                f"rank {gpu.index} gets none of the CPUs {near} near cuda:{gpu.index}: this process has {allowed[1]}, "
                "and what the rank copies crosses the sockets"
            )
