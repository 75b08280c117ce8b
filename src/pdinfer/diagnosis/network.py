"""Network cards, those with RDMA, and which of them are near which GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import attrs

from pdinfer.diagnosis.machine import Gpu, Machine
from pdinfer.diagnosis.report import Fact, Found, failure, warning
from pdinfer.kv.transports.mooncake import PEER_MEMORY, RDMA_DEVICES

DRIVER_PARAMS = "/proc/driver/nvidia/params"
GDRDRV = "/sys/module/gdrdrv"
NEARNESS = ("on another NUMA node", "on its NUMA node", "below its PCIe root", "below its PCIe switch")
"""The distances of a card to a GPU, from far to near."""


@attrs.frozen(kw_only=True)
class RdmaDevice:
    """A card with RDMA: its name ("mlx5_0"), whether a port of it is up, what its ports say, and where it is."""

    name: str
    is_active: bool
    ports: tuple[str, ...]
    place: Path
    numa_node: str | None


def rdma_devices(machine: Machine) -> list[RdmaDevice]:
    """Return the cards with RDMA."""
    return [_rdma_device(machine, name) for name in machine.names(str(RDMA_DEVICES))]


def has_rdma(machine: Machine) -> bool:
    """Return whether a port of a card with RDMA is up."""
    return any(device.is_active for device in rdma_devices(machine))


def _rdma_device(machine: Machine, name: str) -> RdmaDevice:
    folder = f"{RDMA_DEVICES}/{name}"
    states = {port: _state(machine, f"{folder}/ports/{port}") for port in machine.names(f"{folder}/ports")}
    return RdmaDevice(
        name=name,
        is_active=any(state[0] == "ACTIVE" for state in states.values()),
        ports=tuple(f"port {port}: {', '.join(filter(None, state))}" for port, state in states.items()),
        place=machine.at(f"{folder}/device").resolve(),
        numa_node=machine.read(f"{folder}/device/numa_node"),
    )


def _state(machine: Machine, port: str) -> tuple[str, str, str]:
    state = (machine.read(f"{port}/state") or "").rpartition(":")[2].strip()
    return state, machine.read(f"{port}/link_layer") or "", machine.read(f"{port}/rate") or ""


def interfaces(machine: Machine) -> list[str]:
    """Return the names of the network interfaces."""
    return machine.names("/sys/class/net")


def network(machine: Machine) -> Found:
    """Interfaces, cards with RDMA, and their distance from GPUs."""
    for name in interfaces(machine):
        folder = f"/sys/class/net/{name}"
        speed, state = machine.read(f"{folder}/speed"), machine.read(f"{folder}/operstate")
        shown = f"{int(speed) / 1000:g} Gb/s" if speed and speed.isdecimal() else "speed not known"
        yield Fact(name=name, value=f"{state or 'state not known'}, {shown}", remarks=_at_node(machine, folder))
    devices = rdma_devices(machine)
    yield Fact(name="RDMA", value=f"{len(devices)} devices" if devices else "none, so KV goes over sockets")
    for device in devices:
        remarks = (*device.ports, f"NUMA node {device.numa_node or 'not known'}")
        yield Fact(name=device.name, value="up" if device.is_active else "down", remarks=remarks)
        if not device.is_active:
            yield warning(f"{device.name} has no active port and is not used")
    active = [device for device in devices if device.is_active]
    if active and not any(name.startswith("uverbs") for name in machine.names("/dev/infiniband")):
        yield failure(
            f"{', '.join(device.name for device in active)} cannot be opened: /dev/infiniband has no uverbs, so "
            'MooncakeTransport(protocol="rdma") fails',
            "modprobe ib_uverbs  # in Docker: --device /dev/infiniband",
        )
    gpus = machine.gpus()
    if active and gpus and not machine.at(str(PEER_MEMORY)).exists():
        yield warning(
            "nvidia_peermem is not loaded: MooncakeTransport(gpu_direct=True) is refused, and KV goes through the host",
            "modprobe nvidia_peermem",
        )
    if active and gpus:
        yield from _ibgda(machine)
    yield from _affinity(machine, gpus, active)


def _ibgda(machine: Machine) -> Found:
    """Whether GPUs can drive network cards, as NVSHMEM under DeepEP's first API does it (its docs/nvshmem.md)."""
    params = machine.read(DRIVER_PARAMS)
    streams = re.search(r"^EnableStreamMemOPs:\s*1$", params or "", re.MULTILINE) is not None
    peers = "PeerMappingOverride=1" in (params or "")
    helped = machine.at(GDRDRV).exists()
    how = "by the driver's options" if streams and peers else "through gdrdrv, a little slower" if helped else None
    remark = f"gdrdrv is {'' if helped else 'not '}loaded"
    unknown = "none" if params else "not known: the driver shows no options"
    yield Fact(name="IBGDA", value=how or unknown, remarks=(remark,))
    if how is None and params and machine.version("deep_ep") is not None:
        lacking = " and ".join(["EnableStreamMemOPs=1"] * (not streams) + ["PeerMappingOverride=1"] * (not peers))
        yield failure(
            f"the driver lacks {lacking}, and gdrdrv is not loaded: DeepEP cannot start between nodes, nor in its "
            "low-latency mode",
            "echo 'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' > "
            "/etc/modprobe.d/nvidia.conf  # then update-initramfs -u and reboot; or install GDRCopy: modprobe gdrdrv",
        )


def _affinity(machine: Machine, gpus: Sequence[Gpu], devices: Sequence[RdmaDevice]) -> Found:
    for gpu in gpus:
        place = machine.at(f"/sys/bus/pci/devices/{gpu.pci}")
        if not gpu.pci or not place.exists():
            yield Fact(name=f"cuda:{gpu.index}", value="its place on the PCI bus is not known")
            continue
        node = machine.read(f"/sys/bus/pci/devices/{gpu.pci}/numa_node")
        near = {device.name: _nearness(place.resolve(), node, device) for device in devices}
        best = max(near.values(), default=0)
        nearest = ", ".join(name for name, rank in near.items() if rank == best)
        remarks = (f"{nearest} {NEARNESS[best]}",) if near else ()
        yield Fact(name=f"cuda:{gpu.index}", value=f"{gpu.pci}, NUMA node {node or 'not known'}", remarks=remarks)
        if near and best == 0:
            yield warning(
                f"cuda:{gpu.index} ({gpu.pci}) has no RDMA card on its NUMA node {node}: its KV crosses the sockets"
            )


def _nearness(place: Path, node: str | None, device: RdmaDevice) -> int:
    """Return how near a card is to the GPU at `place`, as an index of NEARNESS. What two places on the PCI bus have in
    common are the bridges between them and the root: `/sys/devices/pci0000:15/0000:15:01.0/…`."""
    shared = [ours for ours, theirs in zip(place.parts, device.place.parts, strict=False) if ours == theirs]
    roots = [part.startswith("pci") for part in shared]
    if any(roots):
        return 3 if len(shared) > roots.index(True) + 1 else 2
    return int(node is not None and node == device.numa_node and node != "-1")


def _at_node(machine: Machine, folder: str) -> tuple[str, ...]:
    node = machine.read(f"{folder}/device/numa_node")
    return () if node in (None, "-1") else (f"NUMA node {node}",)
