"""Connections on which both ends have proven, within a limit, that they know the key.

Both speak as `multiprocessing.connection` does, so either end may be its `Client` or `Listener`. These wait for ever
for who says nothing, and one such stranger would keep an engine from all others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Self

from pdinfer.bounds import cause
from pdinfer.checks import clip, typed
from pdinfer.errors import ConfigError, Overloaded, TransferError
from pdinfer.kv.channel.wire import check_key
from pdinfer.log import log
from pdinfer.process.threads import start
from pdinfer.remote.directory.media import host_and_port

DIAL_S = 10.0
"""How long all of it may take: to connect, to prove the key to each other, and to hear what the engine is. An engine
that has a client does not answer."""
GREET_S = 2.0
"""How long a newcomer may take to prove the key. Others wait meanwhile."""


@contextlib.contextmanager
def connected(endpoint: str, key: bytes) -> Iterator[Connection]:
    """Give a connection to the engine at an endpoint. It is closed when the block raises, or takes longer than what is
    left of DIAL_S. Raises TransferError."""
    host, port = host_and_port(endpoint, TransferError)
    try:
        with socket.create_connection((host, port), timeout=DIAL_S) as sock, _limited(sock, DIAL_S) as connection:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            yield connection
    except (OSError, EOFError, UnicodeError, AuthenticationError) as error:  # of a host's name
        raise TransferError(f"no engine answers at {endpoint}: {cause(error)}") from error


class Door:
    """Where the clients of one engine connect: a listener for `serve`, at `address`, a host and a port. With port 0 the
    system chooses one. Raises ConfigError for no key of at least 16 bytes, and where nothing can listen."""

    @typed
    def __init__(self, host: str, port: int, *, key: bytes) -> None:
        check_key(key)
        self._key = key
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"a port is an int from 0 to 65535, got {clip(port)}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=16)
        except OSError as error:
            raise ConfigError(f"no engine can listen at {host}, port {port}: {cause(error)}") from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self) -> Connection:
        """Wait for a client that proves the key, and return the connection. Raises OSError once it is closed."""
        while True:
            sock, where = self._socket.accept()
            try:
                with sock, _limited(sock, GREET_S) as connection:
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    return connection
            except Overloaded as error:
                log.warning("a connection from %s was refused: %s", where[0], error)
            except (OSError, EOFError, AuthenticationError) as error:
                log.warning("a connection from %s was refused: it has not proven the key: %s", where[0], cause(error))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing alone does not end an `accept` in another thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _limited(sock: socket.socket, limit_s: float) -> Iterator[Connection]:
    """Give a connection over a copy of the socket. It is closed when the block raises, and shut when it takes longer
    than `limit_s`."""
    sock.settimeout(None)
    late = threading.Timer(limit_s, _shut, (sock,))
    late.daemon = True
    start(late)
    connection = Connection(os.dup(sock.fileno()))
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    finally:
        late.cancel()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended just now
        sock.shutdown(socket.SHUT_RDWR)
