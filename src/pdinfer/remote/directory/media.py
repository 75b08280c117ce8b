"""Where announcements are kept: names with a few kilobytes each, which anything that hosts share can hold.

A medium judges nothing. `Directory` decides what to believe, so a medium of your own is three functions.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pdinfer.checks import clip, typed
from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.files import open_regular
from pdinfer.kv.transports.stream.endpoints import endpoint_of
from pdinfer.remote.directory.announcement import MAX_BYTES

MAX_ENTRIES = 1024
"""How many entries are read at a time; in a folder the newest ones."""
ABANDONED_S = 3600.0
"""How much older than an engine's own announcement a file may be before that engine removes it."""
SUFFIX = ".json"


class Medium(Protocol):
    """A place that front ends can read. `read` returns the data of every entry by its name, None where the medium can
    carry none: the name is then an endpoint. It raises whatever it likes when the place cannot be read, and may take
    its time: no step waits for it."""

    def read(self) -> Mapping[str, bytes | None]: ...


@runtime_checkable
class WritableMedium(Medium, Protocol):
    """A place where engines can announce themselves. One that knows leases may drop what was not written anew for
    `ttl_s`; others keep it until it is removed, and readers notice that it is old."""

    def write(self, name: str, data: bytes, *, ttl_s: float) -> None: ...

    def remove(self, name: str) -> None: ...


class Folder(WritableMedium):
    """A folder that all hosts see, such as one on NFS or Lustre: a file for each entry.

    A file is replaced whole, by a rename, so nobody reads half of one. It is not flushed to disk: after a crash of the
    file server engines write theirs again. Writers remove what was left behind an hour ago (ABANDONED_S), by the times
    that the file system gives files. The folder has to be there: one that is missing counts as lost."""

    @typed
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def read(self) -> Mapping[str, bytes | None]:
        """Return the newest MAX_ENTRIES entries. Raises OSError when the folder cannot be read."""
        with os.scandir(self._path) as files:
            whole = (file for file in files if file.name.endswith(SUFFIX) and not file.name.startswith("."))
            names = [(_changed_s(file), file.name) for file in whole]
        found: dict[str, bytes | None] = {}
        for _, name in heapq.nlargest(MAX_ENTRIES, names):
            # one that is no regular file, or was replaced or removed meanwhile, which NFS says as late as it is read
            with (
                contextlib.suppress(TransferError, OSError),
                os.fdopen(open_regular(self._path, name, TransferError), "rb") as file,
            ):
                found[name.removesuffix(SUFFIX)] = file.read(MAX_BYTES + 1)
        return found

    def write(self, name: str, data: bytes, *, ttl_s: float) -> None:
        made, path = self._path / f".{name}{SUFFIX}", self._path / f"{name}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(made, flags, 0o644), "wb") as file:
            file.write(data)
        os.replace(made, path)
        self._remove_abandoned(path.stat().st_mtime - ABANDONED_S)

    def remove(self, name: str) -> None:
        (self._path / f"{name}{SUFFIX}").unlink(missing_ok=True)

    def _remove_abandoned(self, before_s: float) -> None:
        with os.scandir(self._path) as files:
            for file in files:
                if file.name.endswith(SUFFIX) and _changed_s(file) < before_s:
                    with contextlib.suppress(OSError):  # another engine was quicker
                        os.unlink(file.path)


def _changed_s(file: os.DirEntry[str]) -> float:
    try:
        return file.stat(follow_symlinks=False).st_mtime
    except OSError:  # as above
        return float("inf")


class HeadlessService(Medium):
    """A name in DNS that has an address for each host of engines, such as a headless service of Kubernetes. It is read
    only, and tells nothing but addresses. Ports are served at `port`, and where a host has several, at the next ones,
    `num_ports` in all. `resolve` is called like `socket.getaddrinfo`."""

    @typed
    def __init__(
        self,
        host: str,
        port: int,
        *,
        num_ports: int = 1,
        resolve: Callable[..., Sequence[tuple[Any, ...]]] = socket.getaddrinfo,
    ) -> None:
        if not 0 < port < port + num_ports <= 1 << 16:
            raise ConfigError(f"a service has ports from 1 to 65535, got {clip(num_ports)} from {clip(port)} on")
        self._host, self._ports, self._resolve = host, range(port, port + num_ports), resolve

    def read(self) -> Mapping[str, bytes | None]:
        """Return an endpoint for each address and port. Raises OSError when the name cannot be resolved, also where no
        engine is ready."""
        found = self._resolve(self._host, self._ports[0], type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in found})
        endpoints = (endpoint_of(host, port) for host in hosts for port in self._ports)
        return dict.fromkeys(islice(endpoints, MAX_ENTRIES))


class KeyValues(Protocol):
    """What is needed of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, value: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


class Store(WritableMedium):
    """A store of torch.distributed, such as a `TCPStore`. It knows no lists, so entries have numbered slots, and after
    MAX_ENTRIES writers the next one takes the oldest slot. Whoever keeps the store is best no engine: when it is gone
    nobody is found any more, since torch's clients do not connect again. Give this its own client (`store.clone()`),
    since a call may wait for as long as the store's timeout."""

    @typed
    def __init__(self, store: KeyValues, *, prefix: str = "pdinfer.directory") -> None:
        self._store, self._prefix = store, prefix
        self._slots: dict[str, str] = {}

    def read(self) -> Mapping[str, bytes | None]:
        """Return all entries. Raises what the store raises."""
        num_slots = min(self._store.add(f"{self._prefix}/count", 0), MAX_ENTRIES)
        held = (self._held(f"{self._prefix}/{number}") for number in range(num_slots))
        return {name: data for name, data in held if name}

    def write(self, name: str, data: bytes, *, ttl_s: float) -> None:
        slot = self._slots.get(name)
        if slot is None or self._held(slot)[0] != name:  # a later writer may have taken it
            number = self._store.add(f"{self._prefix}/count", 1) - 1
            slot = self._slots[name] = f"{self._prefix}/{number % MAX_ENTRIES}"
        self._store.set(slot, f"{name}\n{data.decode()}")

    def remove(self, name: str) -> None:
        slot = self._slots.pop(name, None)
        if slot is not None and self._held(slot)[0] == name:
            self._store.set(slot, "")

    def _held(self, slot: str) -> tuple[str, bytes]:
        """Return the name and the data in a slot, two empty ones where nobody wrote: `get` would wait for a writer."""
        name, _, data = (self._store.get(slot) if self._store.check([slot]) else b"").partition(b"\n")
        return name.decode("utf-8", "replace"), data


def host_and_port(endpoint: str, error: type[PDInferError]) -> tuple[str, int]:
    """Invert `endpoint_of`. Raises `error` for what is no endpoint."""
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise error(f"an endpoint is a host and a port, such as 10.42.0.7:7000, got {clip(endpoint)}")
    return host, int(port)
