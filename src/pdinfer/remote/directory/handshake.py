"""Connections on which both ends have proven, within a limit, that they know the key.

Both speak as `multiprocessing.connection` does, so either end may be its `Client` or `Listener`. These wait for ever
for who says nothing, and one such stranger would keep an engine from all others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Self

from pdinfer.bounds import cause
from pdinfer.checks import typed
from pdinfer.errors import Overloaded, TransferError
from pdinfer.kv.channel.wire import check_key
from pdinfer.kv.transports.stream.endpoints import check_port, listen_tcp
from pdinfer.log import log
from pdinfer.process.threads import start
from pdinfer.remote.directory.media import host_and_port

DIAL_S = 10.0
"""How long all of it may take: to connect, to prove the key to each other, and to hear what the engine is. An engine
that has a client does not answer."""
GREET_S = 2.0
"""How long a newcomer may take to prove the key."""
MAX_NEWCOMERS = 16
"""How many prove it at once. Each has a thread."""


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
    system chooses one. Newcomers prove the key side by side, so that one that says nothing keeps nobody waiting. Raises
    ConfigError for no key of at least 16 bytes, and where nothing can listen."""

    @typed
    def __init__(self, host: str, port: int, *, key: bytes) -> None:
        check_key(key)
        self._key = key
        check_port(port)
        self._socket = listen_tcp(host, port).sock
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._lock, self._is_closed = threading.Lock(), False
        self._newcomers: dict[socket.socket, None] = {}  # in the order in which they came
        self._proven: deque[Connection] = deque()
        self._bell, self._rings = socket.socketpair()
        """Wakes `accept` for one that has proven the key."""

    def accept(self) -> Connection:
        """Wait for a client that proves the key, and return the connection. Raises OSError once it is closed."""
        while True:
            with contextlib.suppress(IndexError):
                return self._proven.popleft()
            try:
                rung = self._rings in wait([self._socket, self._rings])
            except ValueError as error:  # of a closed socket
                raise OSError(errno.EBADF, "the door is closed") from error
            if rung:
                self._rings.recv(MAX_NEWCOMERS)
            else:
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has gone meanwhile
                    self._let_in(*self._socket.accept())

    def _let_in(self, sock: socket.socket, where: tuple[str, int]) -> None:
        """Hear a newcomer in a thread of its own. The one that has been heard longest makes room for it."""
        with self._lock:
            if len(self._newcomers) == MAX_NEWCOMERS:
                oldest = next(iter(self._newcomers))
                del self._newcomers[oldest]
                _shut(oldest)
            self._newcomers[sock] = None
        try:
            start(threading.Thread(target=self._hear, args=(sock, where[0]), name="pdinfer-door", daemon=True))
        except Overloaded as error:
            self._refuse(sock, where[0], str(error))

    def _hear(self, sock: socket.socket, host: str) -> None:
        try:
            with _limited(sock, GREET_S) as connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
        except Overloaded as error:
            self._refuse(sock, host, str(error))
            return
        except (OSError, EOFError, AuthenticationError) as error:
            self._refuse(sock, host, f"it has not proven the key: {cause(error)}")
            return
        with self._lock:
            self._newcomers.pop(sock, None)
            sock.close()
            if self._is_closed:
                connection.close()
            else:
                self._proven.append(connection)
                self._bell.send(b"!")

    def _refuse(self, sock: socket.socket, host: str, why: str) -> None:
        log.warning("a connection from %s was refused: %s", host, why)
        with self._lock:
            self._newcomers.pop(sock, None)
            sock.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for newcomer in self._newcomers:
                _shut(newcomer)
            while self._proven:
                self._proven.popleft().close()
        with contextlib.suppress(OSError):  # closing alone does not end an `accept` in another thread
            self._socket.shutdown(socket.SHUT_RDWR)
        for ours in (self._socket, self._bell, self._rings):
            ours.close()

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
