"""How links that peers open come in: at a limited pace, and through the door while they are not trusted yet."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

from pdinfer.errors import TransferError
from pdinfer.kv.transports.base import TICK_S, Link, Receiver
from pdinfer.kv.transports.stream.connection import StreamConnection
from pdinfer.kv.transports.stream.door import Door, source_of
from pdinfer.kv.transports.stream.endpoints import Listener, prepare_socket, tcp_endpoint
from pdinfer.kv.transports.stream.io_thread import IOThread

ACCEPTS, PACE_S = 12, 0.005
"""How many newcomers are let in at once, and how long the next ones wait. Other links have their turns meanwhile, and
strangers that come again and again take little of the I/O thread's time."""
RETRY_S = TICK_S
"""How long an end that could not accept waits before it tries again."""


class Acceptor:
    """Lets newcomers in at a listener. `connect` makes a connection from a socket. Belongs to the I/O thread."""

    def __init__(
        self,
        listener: Listener,
        door: Door,
        io: IOThread,
        receiver: Receiver,
        clock: Callable[[], float],
        *,
        connect: Callable[[socket.socket, Link], StreamConnection],
    ) -> None:
        self._listener = listener
        self._door = door
        self._io = io
        self._receiver = receiver
        self._clock = clock
        self._connect = connect

    def accept(self) -> None:
        """Let newcomers in; a link that waits without being trusted gives way to them. A newcomer that cannot come in
        yet waits in the backlog."""
        for _ in range(ACCEPTS):
            now = self._clock()
            if (wait_s := self._door.room_in_s(now)) > 0:
                self._io.pause_listening(now + wait_s)
                return
            try:
                sock, address = self._listener.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                # The peer keeps waiting in the backlog, and asking again at once would spin.
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not len(self._door):
                    logging.getLogger("pdinfer").error("cannot accept at %s: %s", self._listener.endpoint, error)
                    self._io.pause_listening(now + RETRY_S)
                    return
                self._turn_out(self._door.oldest(), "there are no more descriptors")
                continue
            try:
                self._enter(sock, address, now)
            except OSError:  # the newcomer has already left
                sock.close()
        self._io.pause_listening(now + PACE_S)

    def sweep(self) -> None:
        """Close the links of strangers that sent no whole message in time."""
        for connection, limit_s in self._door.late(self._clock()):
            reason = f"{connection.link.endpoint} sent no whole message for {limit_s:g} s and is not trusted"
            self._io.shut(connection, TransferError(reason))

    def _enter(self, sock: socket.socket, address: Any, now: float) -> None:
        source = source_of(sock, address)
        if self._door.turns_away(source, now):
            sock.close()
            return
        prepare_socket(sock)
        # A Unix socket that dials has no address of its own.
        endpoint = tcp_endpoint(*address[:2]) if address else self._listener.endpoint
        connection = self._connect(sock, Link(endpoint))
        self._io.add(connection)
        leaves = self._door.enter(connection, source, now)
        if leaves is not None:
            self._turn_out(leaves, "others want to get in")
        self._io.guarded(connection, lambda: self._receiver.opened(connection.link))
        self._io.watch(connection)

    def _turn_out(self, connection: StreamConnection, reason: str) -> None:
        self._io.shut(connection, TransferError(f"{connection.link.endpoint} is not trusted yet, and {reason}"))
