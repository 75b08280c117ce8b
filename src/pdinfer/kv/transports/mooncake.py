"""The Mooncake Transfer Engine: RDMA between hosts, and TCP where there is no NIC for it.

Mooncake moves the bytes; `kv/transports/one_sided/transport.py` says how its writes are kept out of pages. The engine
is configured by the environment, so this module sets what it needs there, where unset, and logs all of it."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pdinfer.checks import typed
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kv.transports.one_sided.block import NamedEngine
from pdinfer.kv.transports.one_sided.transport import NUM_SLOTS, SLOT_BYTES, TIMEOUT_S, RingTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.endpoints import endpoint_of
from pdinfer.kv.transports.stream.transport import Strangers
from pdinfer.log import log

PROTOCOLS = ("tcp", "rdma")
OLDEST = (0, 3, 13)
"""Older versions reported a TCP write as done when it had left, not when it had landed (Mooncake's protocol 2)."""
DISTRIBUTIONS = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
DEBIAN = {"libibverbs": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
ORDERING = "MC_IB_PCI_RELAXED_ORDERING"
DEFAULTS = {"MC_TCP_SLICE_SIZE": "1048576", "MC_LOG_LEVEL": "WARNING", ORDERING: "0"}
"""Set when unset. Slices of 1 MiB were 1.2 to 1.5 times as fast as those of 64 KiB. Where PCIe reorders writes, bytes
may be under way that the sender knows to have landed."""
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
RDMA_DEVICES = Path("/sys/class/infiniband")
PEER_MEMORY = Path("/sys/module/nvidia_peermem")
ORDERED = (116, 118)
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED and …_WRITES_ORDERING of cuda.h: 0 where a NIC cannot write a GPU, or
where a kernel may miss what was written before its launch."""


def _load(protocol: str, devices: Sequence[str]) -> Any:
    """Return the module `mooncake.engine`. BackendUnavailable says what is missing and what to install."""
    _prepare_environment(protocol, devices)  # some of it is read when the library is loaded
    try:
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"MooncakeTransport needs the package `mooncake` ({error}): install {DISTRIBUTIONS[0]} on a machine with "
            f"CUDA or {DISTRIBUTIONS[1]} on one without, never both"
        ) from error
    except (ImportError, OSError) as error:
        advice, _ = advice_for(str(error))
        raise BackendUnavailable(
            f"Mooncake cannot load {_missing(str(error)) or 'a library'} ({error}): {advice}"
        ) from error
    for distribution in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
            needed = ".".join(map(str, OLDEST))
            raise BackendUnavailable(
                f"{distribution} is {version}, and pdinfer needs {needed}: older ones report writes before they landed"
            )
    return module


def advice_for(error: str) -> tuple[str, str]:
    """Return what to do about an error of importing the library: a sentence, and the command."""
    name = _missing(error)
    if name.startswith("libcu") and name != "libcurl":
        sentence = f"that build is for CUDA; on a machine without it install {DISTRIBUTIONS[1]} instead"
        return sentence, f"pip uninstall -y {DISTRIBUTIONS[0]} && pip install {DISTRIBUTIONS[1]}"
    packages = DEBIAN.get(name) or " ".join(DEBIAN.values())
    return f"install it (Debian: {packages})", f"apt-get install -y {packages}"


def _missing(error: str) -> str:
    library = re.search(r"(lib\w+)\.so", error)
    return library[1] if library else ""


def _prepare_environment(protocol: str, devices: Sequence[str]) -> None:
    """Set what the engine reads when it is made. The engine ignores the protocol it is given: it takes RDMA when it
    finds a device and MC_FORCE_TCP is not set, and TCP otherwise, so both cases are made certain here."""
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise BackendUnavailable("MC_TCP_PROTO=1 makes Mooncake report writes before they have landed; unset it")
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
    else:
        if "MC_FORCE_TCP" in os.environ:
            raise BackendUnavailable(
                'protocol="rdma" was asked for, and MC_FORCE_TCP is set, by you or by an engine for "tcp" in this '
                "process; unset it, and use one protocol per process"
            )
        present = sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.exists() else []
        if not present or not set(devices) <= set(present):
            raise BackendUnavailable(
                f'protocol="rdma" was asked for with devices {list(devices) or "of any name"}; this machine has '
                f'{present or "no RDMA device"} in {RDMA_DEVICES}; use protocol="tcp", or one of them'
            )
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    now = {name: value for name, value in sorted(os.environ.items()) if name.startswith("MC_")}
    log.info("Mooncake reads %s", now)


class MooncakeEngine(NamedEngine):
    """One engine of this process. It listens on two ports, on every interface and without authentication, so it belongs
    on a network whose machines are all trusted. Only landing rings and send blocks are registered with it.

    `host` is the name by which peers reach this machine. `protocol` is "tcp" or "rdma"; `devices` are the RDMA devices
    to use, all of them when empty. Transports may share an engine: the one who made it closes it after them. Raises
    BackendUnavailable when the library or the hardware is missing."""

    @typed
    def __init__(self, *, host: str = "127.0.0.1", protocol: str = "tcp", devices: Sequence[str] = ()) -> None:
        check_engine(protocol, devices)
        library = _load(protocol, devices)
        engine = library.TransferEngine()
        if code := engine.initialize(host, "P2PHANDSHAKE", protocol, ",".join(devices)):
            raise BackendUnavailable(
                f"the Mooncake engine did not start on {host} with {protocol} and devices {list(devices)}: it returned "
                f"{code}, and wrote the reason to stderr"
            )
        super().__init__(engine, endpoint_of(host, engine.get_rpc_port()))
        # Destroying the engine joins its threads, and a forked child has none of them: it would wait for ever.
        os.register_at_fork(after_in_child=partial(_keep_for_ever, weakref.ref(self)))


def _keep_for_ever(segment: weakref.ref[NamedEngine]) -> None:
    """Keep the engine of a segment from being destroyed."""
    if (there := segment()) is not None and there.engine is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(there.engine))


def check_engine(protocol: str, devices: Sequence[str]) -> None:
    """Check the arguments of an engine. Raise ConfigError for those that no engine can be made of."""
    if protocol not in PROTOCOLS:
        raise ConfigError(f"Mooncake's protocol is one of {PROTOCOLS}, not {protocol!r}")
    if isinstance(devices, str) or any(not isinstance(name, str) or not name or "," in name for name in devices):
        raise ConfigError(f'devices are names like ("mlx5_0",), not {devices!r}')
    if devices and protocol == "tcp":
        raise ConfigError(f'devices {list(devices)} are for protocol="rdma"')


def check_gpu_direct(protocol: str) -> None:
    """Raise BackendUnavailable where the NIC cannot read and write the memory of GPUs."""
    if protocol != "rdma":
        reason = f'protocol is "{protocol}" and not "rdma"'
    elif not torch.cuda.is_available():
        reason = "there is no CUDA device"
    elif not PEER_MEMORY.exists():
        reason = "the kernel module nvidia_peermem is not loaded"
    elif os.environ.get(ORDERING, "0") != "0":
        reason = f"{ORDERING}={os.environ[ORDERING]} lets the last bytes of a write arrive before others: set it to 0"
    elif expanding := [name for name in ALLOCATORS if EXPANDABLE.search(os.environ.get(name, ""))]:
        reason = f"{expanding[0]} asks for expandable_segments, whose memory no NIC can write: take that out"
    else:
        lacking = [number for number in range(torch.cuda.device_count()) if not _is_ordered(number)]
        if not lacking:
            return
        reason = f"CUDA devices {lacking} do not take ordered writes of a NIC"
    raise BackendUnavailable(f"gpu_direct=True was asked for, and {reason}; or leave it out")


def _is_ordered(device: int) -> bool:
    """Whether a NIC can write that device, and kernels that are launched later see it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int()
    return cuda.cuInit(0) == 0 and all(
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0 and value.value for attribute in ORDERED
    )


class MooncakeTransport(RingTransport):
    """Frames over a socket, payloads through a Mooncake engine into a ring that the receiver makes for each peer.

    Listens for its peers on `host`:`port` (0 is any free port). Other machines reach it there only when the channel has
    a key or with `allow_remote=True`. The engine's own ports are open in any case and do not know who calls. `protocol`
    and `devices` are those of MooncakeEngine. With `engine` the transport shares that engine, whose host must be this
    machine's.

    Rings, blocks, `digest` and `timeout_s` are those of RingTransport. With `gpu_direct` they lie on the GPU of the
    pool, where the NIC reads and writes them. That needs RDMA, nvidia_peermem, ordered writes over PCIe, memory in one
    piece (no expandable_segments), and digest=False, so nothing tells a good slot from one that was hit late; it has
    not run on a GPU yet. `strangers` limits links that are not trusted yet. Raises ConfigError for an address or size
    that cannot be used, BackendUnavailable when Mooncake or its hardware is missing."""

    @typed
    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        protocol: str = "tcp",
        devices: Sequence[str] = (),
        allow_remote: bool = False,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
        digest: bool = True,
        timeout_s: float = TIMEOUT_S,
        gpu_direct: bool = False,
        engine: MooncakeEngine | None = None,
        strangers: Strangers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_engine(protocol, devices)
        if gpu_direct:
            check_gpu_direct(protocol)
        stream = SocketTransport(host=host, port=port, allow_remote=allow_remote, strangers=strangers, clock=clock)

        def start() -> NamedEngine:
            wildcard = host in ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
            return MooncakeEngine(host=socket.gethostname() if wildcard else host, protocol=protocol, devices=devices)

        if engine is None:
            _load(protocol, devices)
        super().__init__(
            f"mooncake+{protocol}",
            engine or start,
            stream,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
            digest=digest,
            timeout_s=timeout_s,
            on_device=gpu_direct,
        )
