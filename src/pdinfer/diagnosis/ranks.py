"""What each rank of a node gets: its GPU, the NUMA node of that, and the CPUs that are near it."""

from __future__ import annotations

import re

from pdinfer.diagnosis.affinity import cpu_affinity, cpus_in, near_cpus, numa_node
from pdinfer.diagnosis.machine import Machine
from pdinfer.diagnosis.report import Fact, Found, failure, warning

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
