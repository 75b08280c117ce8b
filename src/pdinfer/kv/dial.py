"""Endpoints as text, and the sockets behind them: `tcp://host:port` and `unix:///path`."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

import attrs

from pdinfer.errors import ConfigError, TransferError

TCP = "tcp://"
UNIX = "unix://"
BACKLOG = 128
BUFFER_BYTES = 4 << 20


@attrs.define(eq=False)
class Listener:
    """A bound, non-blocking socket. `inode` is the socket file it made, so that no other is ever removed."""

    sock: socket.socket
    endpoint: str
    path: str | None = None
    inode: tuple[int, int] | None = None

    def close(self) -> None:
        self.sock.close()
        if self.path is not None and _inode(self.path) == self.inode:
            os.unlink(self.path)


def check_host(host: str, port: int, *, allow_remote: bool) -> None:
    """Raises ConfigError for a port that is none, and for a host that others can reach without being asked to."""
    if type(port) is not int or not 0 <= port <= 65535:
        raise ConfigError(f"port {port!r} is not a TCP port; use 1 to 65535, or 0 for any free one")
    if not allow_remote and not _is_local(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines, and KV bytes travel unencrypted; use 127.0.0.1, "
            f"or say allow_remote=True on a network you trust"
        )


def listen_tcp(host: str, port: int) -> Listener:
    """Raises ConfigError when the address cannot be had. A wildcard is announced by this machine's name."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error}; use an address of this machine") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _enlarge(sock)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; port 0 takes any free one") from error
    sock.setblocking(False)
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    return Listener(sock, tcp_endpoint(name, sock.getsockname()[1]))


def listen_unix(path: str) -> Listener:
    """A socket file that only this user can open; raises ConfigError when `path` exists or cannot be made."""
    path = os.path.abspath(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
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
    return Listener(sock, UNIX + path, path, _inode(path))


def dial(endpoints: Sequence[str], *, timeout_s: float) -> tuple[socket.socket, str]:
    """A connected, non-blocking socket to the first endpoint that is ours to understand; raises TransferError."""
    endpoint = next((e for e in endpoints if e.startswith((TCP, UNIX))), None)
    if endpoint is None:
        raise TransferError(f"a socket cannot reach {list(endpoints)}; it needs {TCP}host:port or {UNIX}/path")
    try:
        sock = _dial(endpoint, timeout_s)
        if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            sock.close()
            raise ConnectionRefusedError("nobody listens there; the kernel connected the socket to itself")
    except (OSError, ValueError) as error:
        raise TransferError(f"cannot connect to {endpoint} within {timeout_s} s: {error}") from error
    prepare(sock)
    return sock, endpoint


def _dial(endpoint: str, timeout_s: float) -> socket.socket:
    if endpoint.startswith(TCP):
        host, _, port = endpoint.removeprefix(TCP).rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(endpoint.removeprefix(UNIX))
    except (OSError, ValueError):
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket) -> None:
    """What every connected socket needs, whichever side opened it."""
    sock.setblocking(False)
    _enlarge(sock)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def tcp_endpoint(host: str, port: int) -> str:
    """The text by which peers find a listener; IPv6 hosts go in brackets."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def _enlarge(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _inode(path: str) -> tuple[int, int] | None:
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
