"""The environment variables of deployments: NCCL's, Gloo's, NVSHMEM's and Mooncake's, and where they contradict each
other or the machine.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html and
https://docs.nvidia.com/nvshmem/api/gen/env.html. Gloo takes names of interfaces as they are, and no list of NCCL's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pdinfer.diagnosis.machine import Machine
from pdinfer.diagnosis.network import has_rdma, interfaces, rdma_devices
from pdinfer.diagnosis.report import Fact, Found, failure, warning
from pdinfer.kv.transports.mooncake import ALLOCATORS, DISTRIBUTIONS, EXPANDABLE, ORDERING, RDMA_DEVICES

VARIABLES: Mapping[str, tuple[str, range | None]] = {
    "NCCL_IB_HCA": ("the RDMA devices of NCCL", None),
    "NCCL_IB_DISABLE": ("1: no RDMA", range(2)),
    "NCCL_IB_GID_INDEX": ("the address of a RoCE port", range(-1, 256)),
    "NCCL_IB_TC": ("the traffic class", range(256)),
    "NCCL_IB_SL": ("the service level", range(16)),
    "NCCL_IB_QPS_PER_CONNECTION": ("queue pairs of a connection", range(1, 129)),
    "NCCL_IB_SPLIT_DATA_ON_QPS": ("1: all of them carry each message", range(2)),
    "NCCL_MIN_NCHANNELS": ("at least so many channels", range(1, 65)),
    "NCCL_MAX_NCHANNELS": ("at most so many channels", range(1, 65)),
    "NCCL_SOCKET_IFNAME": ("the interfaces of NCCL's sockets", None),
    "GLOO_SOCKET_IFNAME": ("the interfaces of Gloo", None),
    "NVSHMEM_ENABLE_NIC_PE_MAPPING": ("1: the lists below count", None),
    "NVSHMEM_HCA_LIST": ("the RDMA devices of NVSHMEM, and so of DeepEP", None),
    "NVSHMEM_HCA_PE_MAPPING": ("the same, by rank", None),
    "NVSHMEM_IB_GID_INDEX": ("the address of a RoCE port", range(-1, 256)),
    "MC_FORCE_TCP": ("set: Mooncake uses no RDMA", None),
    "MC_TCP_PROTO": ("1: an old protocol of Mooncake", None),
    "MC_TE_METRIC": ("set: Mooncake reports its speed", None),
    ORDERING: ("0: PCIe keeps the order of a NIC's writes", None),
    **dict.fromkeys(ALLOCATORS, ("how torch allocates memory of GPUs", None)),
}
"""What each is, and the range of those that are numbers."""


def variables(machine: Machine) -> Found:
    """Yield the variables that are set, and what is wrong with them."""
    given = {name: machine.environment[name] for name in VARIABLES if name in machine.environment}
    for name, (meaning, allowed) in VARIABLES.items():
        yield Fact(name=name, value=given.get(name, "unset"), remarks=(meaning,) if name in given else ())
        if name in given and allowed is not None and _number(given, name) not in allowed:
            yield warning(
                f"{name}={given[name]} is not a number from {allowed[0]} to {allowed[-1]} and is ignored",
                f"unset {name}",
            )
    yield from _interfaces(machine, given)
    yield from _devices(machine, given)
    yield from _addresses(machine, given)
    yield from _nvshmem(given)
    yield from _together(given)
    yield from _mooncake(machine, given)


def _interfaces(machine: Machine, given: Mapping[str, str]) -> Found:
    """NCCL and Gloo end with an error when no interface has the name."""
    here = interfaces(machine)
    names = given.get("NCCL_SOCKET_IFNAME", "")
    if names and not _matching(names, here):
        yield failure(
            f"NCCL_SOCKET_IFNAME={names} fits no interface; there are {', '.join(here)}", "unset NCCL_SOCKET_IFNAME"
        )
    names = given.get("GLOO_SOCKET_IFNAME", "")
    if unknown := [name for name in names.split(",") if names and name not in here]:
        only = " (Gloo takes plain names, not NCCL's patterns)" if set("^=") & set(names) else ""
        yield failure(
            f"GLOO_SOCKET_IFNAME={names}: there is no interface {unknown[0]}{only}; there are {', '.join(here)}",
            "unset GLOO_SOCKET_IFNAME",
        )


def _devices(machine: Machine, given: Mapping[str, str]) -> Found:
    here = [device.name for device in rdma_devices(machine)]
    listed, ours = ", ".join(here) or "none", ",".join(here)
    names = given.get("NCCL_IB_HCA", "")
    if names and not _matching(names, here):
        yield warning(
            f"NCCL_IB_HCA={names} fits no RDMA device here ({listed}): NCCL goes over sockets", "unset NCCL_IB_HCA"
        )
    elif unknown := [name for name in _listed(names) if not _matching(name, here)]:
        yield warning(
            f"NCCL_IB_HCA names {', '.join(unknown)}, and the machine has {listed}: NCCL goes without it",
            f"export NCCL_IB_HCA={ours}",
        )
    if unknown := [name for name in _listed(given.get("NVSHMEM_HCA_LIST", "")) if name not in here]:
        yield warning(
            f"NVSHMEM_HCA_LIST names {', '.join(unknown)}, and the machine has {listed}: DeepEP has no way to "
            "other nodes by it",
            f"export NVSHMEM_HCA_LIST={ours}" if here else "unset NVSHMEM_HCA_LIST",
        )


def _addresses(machine: Machine, given: Mapping[str, str]) -> Found:
    """An entry of a port's table of addresses that is empty is all zeros, and no connection can be made from it."""
    active = [device.name for device in rdma_devices(machine) if device.is_active]
    for name, devices in (("NCCL_IB_GID_INDEX", "NCCL_IB_HCA"), ("NVSHMEM_IB_GID_INDEX", "NVSHMEM_HCA_LIST")):
        index = _number(given, name)
        for device in active:
            is_used = not given.get(devices) or bool(_matching(given[devices], [device]))
            gid = machine.read(f"{RDMA_DEVICES}/{device}/ports/1/gids/{index}")
            if index is not None and index >= 0 and is_used and not (gid or "").strip("0:"):
                yield failure(
                    f"{name}={index} is not an address of {device}: connections over it fail", f"unset {name}"
                )
    indices = {given[name] for name in ("NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX") if name in given}
    if len(indices) > 1:
        yield warning(
            "NCCL_IB_GID_INDEX and NVSHMEM_IB_GID_INDEX differ, and both name the address of the same port",
            f"export NVSHMEM_IB_GID_INDEX={given['NCCL_IB_GID_INDEX']}",
        )


def _nvshmem(given: Mapping[str, str]) -> Found:
    lists = [name for name in ("NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING") if given.get(name)]
    if lists and given.get("NVSHMEM_ENABLE_NIC_PE_MAPPING", "0") in ("", "0"):
        yield warning(
            f"{lists[0]} counts only with NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "export NVSHMEM_ENABLE_NIC_PE_MAPPING=1"
        )
    if len(lists) > 1:
        yield warning("NVSHMEM_HCA_LIST and NVSHMEM_HCA_PE_MAPPING are both set: one is ignored", f"unset {lists[0]}")
    theirs, ours = set(_listed(given.get("NVSHMEM_HCA_LIST", ""))), set(_listed(given.get("NCCL_IB_HCA", "")))
    if theirs and ours and theirs != ours:
        only = ", ".join(sorted(theirs ^ ours))
        yield warning(
            f"NCCL_IB_HCA and NVSHMEM_HCA_LIST name other devices: only one of them has {only}",
            f"export NVSHMEM_HCA_LIST={','.join(f'{name}:1' for name in sorted(ours))}",
        )


def _together(given: Mapping[str, str]) -> Found:
    """Yield the variables of NCCL that have no effect, or cannot work, together with others."""
    idle = [name for name in given if name.startswith("NCCL_IB_") and name != "NCCL_IB_DISABLE"]
    if given.get("NCCL_IB_DISABLE") == "1" and idle:
        yield warning(f"NCCL_IB_DISABLE=1 makes NCCL ignore {', '.join(idle)}", "unset NCCL_IB_DISABLE")
    if given.get("NCCL_IB_SPLIT_DATA_ON_QPS") == "1" and (_number(given, "NCCL_IB_QPS_PER_CONNECTION") or 1) < 2:
        yield warning(
            "NCCL_IB_SPLIT_DATA_ON_QPS=1 does nothing with one queue pair", "export NCCL_IB_QPS_PER_CONNECTION=8"
        )
    least, most = _number(given, "NCCL_MIN_NCHANNELS"), _number(given, "NCCL_MAX_NCHANNELS")
    if least is not None and most is not None and least > most:
        yield warning(f"NCCL_MIN_NCHANNELS={least} is more than NCCL_MAX_NCHANNELS={most}", "unset NCCL_MAX_NCHANNELS")


def _mooncake(machine: Machine, given: Mapping[str, str]) -> Found:
    if given.get("MC_TCP_PROTO") == "1" and any(map(machine.version, DISTRIBUTIONS)):
        yield failure(
            "MC_TCP_PROTO=1 makes Mooncake report writes before they have landed: MooncakeTransport refuses it",
            "unset MC_TCP_PROTO",
        )
    expanding = [name for name in ALLOCATORS if EXPANDABLE.search(given.get(name, ""))]
    reordering = [ORDERING] * (given.get(ORDERING, "0") != "0")
    for name in (expanding + reordering) * (has_rdma(machine) and bool(machine.gpus())):
        why = "the memory of expandable_segments cannot be written" if name in ALLOCATORS else "writes may be reordered"
        yield warning(
            f"{name}={given[name]}: {why} by a NIC, so MooncakeTransport(gpu_direct=True) is refused", f"unset {name}"
        )
    if "MC_FORCE_TCP" in given and has_rdma(machine):
        yield warning(
            'MC_FORCE_TCP is set on a machine with RDMA devices: MooncakeTransport(protocol="rdma") refuses it',
            "unset MC_FORCE_TCP",
        )


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name, "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,9}", text, re.ASCII) else None


def _listed(names: str) -> list[str]:
    """Return the devices that a list names, without their ports; none for a list of exceptions."""
    return [] if names.startswith("^") else [name.partition(":")[0] for name in names.lstrip("=").split(",") if name]


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that NCCL takes for a list: prefixes, or whole names after "=", or all others after "^"."""
    text = pattern.removeprefix("^")
    words = [word.partition(":")[0] for word in text.removeprefix("=").split(",") if word]
    if text.startswith("="):
        found = [name for name in names if name in words]
    else:
        found = [name for name in names if name.startswith(tuple(words))]
    return [name for name in names if name not in found] if pattern.startswith("^") else found
