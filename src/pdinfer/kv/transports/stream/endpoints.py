"""Endpoints as text, and their sockets: `tcp://host:port` and `unix:///path`."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Sequence
from typing import Any

import attrs

from pdinfer.checks import clip
from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.transports.base import Receiver
from pdinfer.process.scratch import ScratchFolder

TCP = "tcp://"
UNIX = "unix://"
BACKLOG = 1024
"""Newcomers that cannot come in yet wait here, in one queue with everybody else. A short queue makes honest peers dial
again."""
MAX_KNOWN = 1024
MAX_PORT = 65535
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
_NAME = re.compile(r"[\w.-]{1,253}", re.ASCII)
Addresses = list[tuple[socket.AddressFamily, Any]]
BUFFER_BYTES = 4 << 20


@attrs.define(eq=False)
class Listener:
    """A bound, non-blocking socket. `inode` identifies the socket file that it made, so that no other file is ever
    removed. `folder` is the one that was made for that file alone."""

    sock: socket.socket
    endpoint: str
    path: str | None = None
    inode: tuple[int, int] | None = None
    folder: ScratchFolder | None = None

    def close(self) -> None:
        self.sock.close()
        if self.path is not None and _inode(self.path) == self.inode:
            os.unlink(self.path)
        if self.folder is not None:
            self.folder.close()


def check_port(port: int) -> None:
    """Raise ConfigError for a number that is not a TCP port."""
    if type(port) is not int or not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port {port!r} is not a TCP port; use 1 to {MAX_PORT}, or 0 for any free one")


def check_advertised(host: str, path: str | os.PathLike[str] | None) -> None:
    """Raise ConfigError for text that peers cannot dial as the host of a TCP endpoint, and next to a socket file."""
    if path is not None:
        raise ConfigError(f"advertise={clip(host)} is for TCP; peers find {os.fspath(path)!r} by its path")
    if not isinstance(host, str) or host in WILDCARDS or not (_NAME.fullmatch(host) or _is_address(host)):
        raise ConfigError(
            f"advertise must be a name or an address that peers reach, without scheme and port, got {clip(host)}"
        )


def check_local(host: str, receiver: Receiver) -> None:
    """Raise ConfigError for a host that other machines can reach, unless `receiver` authenticates its peers."""
    if not _is_local(host) and not receiver.authenticates:
        raise ConfigError(
            f"host {host!r} can be reached from other machines, and KV bytes travel unencrypted; use 127.0.0.1, give "
            f"every KVChannel the same key, or say allow_remote=True on a network you trust"
        )


def leads_here(endpoint: str) -> bool:
    """Return whether whoever answers at an endpoint is a process of this machine, by the text alone."""
    return not endpoint.startswith(TCP) or _is_local(_split(endpoint)[0])


def listen_tcp(host: str, port: int, advertise: str | None = None) -> Listener:
    """Listen on an address of this machine, announced as `advertise`. Raise ConfigError when that fails. Without
    `advertise` a wildcard is announced by this machine's name."""
    try:
        family, address = _resolve(host, port, socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # of a name
        raise ConfigError(f"cannot listen on host {clip(host)}: {error}; use an address of this machine") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _enlarge(sock)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; port 0 takes any free one") from error
    sock.setblocking(False)
    name = advertise or (socket.gethostname() if host in WILDCARDS else host)
    return Listener(sock, tcp_endpoint(name, sock.getsockname()[1]))


def listen_unix(path: str, *, scheme: str = UNIX, folder: ScratchFolder | None = None) -> Listener:
    """Listen on a socket file that only this user can open. Raise ConfigError when `path` exists or cannot be made. A
    socket file that a dead process left is replaced. A `folder` that was made for the file is removed with it."""
    path = os.path.abspath(path)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot make a socket: {error}") from error
    try:
        if _is_stale(path):
            os.unlink(path)
        # Nobody can connect before `listen`, so the mode is set in time.
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except (OSError, ValueError) as error:
        sock.close()
        raise ConfigError(
            f"cannot make a socket at {path!r}: {error}; name a file that does not exist yet, "
            f"of at most 107 bytes, in a directory of yours"
        ) from error
    sock.setblocking(False)
    return Listener(sock, scheme + path, path, _inode(path), folder)


def _is_stale(path: str) -> bool:
    """Whether a socket file of this user exists and nobody listens at it."""
    if not os.path.lexists(path):
        return False
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        return sock.connect_ex(path) == errno.ECONNREFUSED


def dial(
    endpoints: Sequence[str], schemes: Sequence[str], known: dict[str, Addresses], *, timeout_s: float
) -> tuple[socket.socket, str, OSError | None]:
    """Return (non-blocking socket, endpoint, what went wrong) for the first endpoint of one of `schemes`.

    With `timeout_s` 0 the socket is still opening, unless something went wrong at once: call `complete_dial` when it
    can be written to. Otherwise the socket is connected, or TransferError is raised. Looking up a host's name waits for
    the system's resolver; with `timeout_s` 0 that is done only for an endpoint that is not in `known`, where found
    addresses are kept."""
    endpoint = next((e for e in endpoints if e.startswith(tuple(schemes))), None)
    if endpoint is None:
        needed = " or ".join(f"{scheme}{'host:port' if scheme == TCP else '/path'}" for scheme in schemes)
        raise TransferError(f"cannot reach {list(endpoints)}; an endpoint for this transport looks like {needed}")
    try:
        addresses = known.get(endpoint) if timeout_s <= 0 else None
        if addresses is None:
            addresses = known[endpoint] = _addresses(endpoint)
            while len(known) > MAX_KNOWN:
                del known[next(iter(known))]
        if timeout_s > 0:
            return _connected(addresses, timeout_s), endpoint, None
        family, address = addresses[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise TransferError(f"cannot connect to {endpoint} within {timeout_s:g} s: {error}") from error
    sock.setblocking(False)
    problem: OSError | None = None
    try:
        sock.connect(address)
    except BlockingIOError as error:
        # A Unix socket does not wait for room in the listener's backlog: it says EAGAIN, and is not opening.
        problem = None if error.errno == errno.EINPROGRESS else error
    except OSError as error:
        problem = error
    except ValueError as error:
        sock.close()
        raise TransferError(f"cannot connect to {endpoint}: {error}") from error
    return sock, endpoint, problem


def complete_dial(sock: socket.socket) -> None:
    """Make an opening socket, once it can be written to, a connected one. Raise OSError when connecting failed."""
    if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError("nobody listens there; the kernel connected the socket to itself")
    prepare_socket(sock)


def _addresses(endpoint: str) -> Addresses:
    """Return the addresses of an endpoint. Raise ValueError or OSError for an endpoint that leads nowhere."""
    if not endpoint.startswith(TCP):
        return [(socket.AF_UNIX, endpoint.partition("://")[2])]
    host, port = _split(endpoint)
    number = int(port)
    if not 0 < number <= MAX_PORT:  # getaddrinfo takes it modulo 2**16, or raises an OverflowError
        raise ValueError(f"a TCP port is 1 to {MAX_PORT}")
    return _resolve(host, number)


def _split(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    return host.strip("[]"), port


def _resolve(host: str, port: int, flags: int = 0) -> Addresses:
    """Look up a name, IPv4 before IPv6 whatever the resolver's order, so that both ends of a name choose alike."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    return sorted(((family, address) for family, _, _, _, address in found), key=lambda each: each[0])


def _connected(addresses: Addresses, timeout_s: float) -> socket.socket:
    for number, (family, address) in enumerate(addresses, start=1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
            complete_dial(sock)
        except (OSError, ValueError):
            sock.close()
            if number == len(addresses):
                raise
        else:
            return sock
    raise ConnectionError("the name has no address")


def prepare_socket(sock: socket.socket) -> None:
    """Set what every connected socket needs, whichever side opened it."""
    sock.setblocking(False)
    _enlarge(sock)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def tcp_endpoint(host: str, port: int) -> str:
    """Return the text by which peers find a listener."""
    return TCP + endpoint_of(host, port)


def endpoint_of(host: str, port: int) -> str:
    """Return "host:port", with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _enlarge(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
