"""What all transports over stream sockets share: links that are dialled and accepted, frames, and writes.

One I/O thread moves all bytes and makes all calls to the receiver:

    any thread: send, write ── queue ──► pdinfer-kv-io: transmit ──► kernel ──► the peer's pdinfer-kv-io: receive
                                             ▲ wake-up socket                      ├─ place ─► our memory, in place
                                                                                   └─ received, placed, closed, tick

A small frame with nothing before it leaves from the thread that sends it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Link, Message, QueuingTransport, Receiver
from pdinfer.kv.transports.budget import MAX_ARRIVING_BYTES, MAX_WAITING_BYTES, Budget, Limits
from pdinfer.kv.transports.stream.connection import StreamConnection
from pdinfer.kv.transports.stream.door import Acceptor, Door, Strangers
from pdinfer.kv.transports.stream.endpoints import Addresses, Listener, dial
from pdinfer.kv.transports.stream.io_thread import IOThread
from pdinfer.kv.transports.stream.payloads import Payloads


class StreamTransport(QueuingTransport):
    """Frames and writes over stream sockets.

    `listen` opens the socket that peers find, `schemes` are the endpoints that can be dialled, and `payloads` makes the
    part of a link that moves its payloads. The `ready` of a write runs in the I/O thread: while it waits, nothing of
    this transport moves.

    `strangers` limits how many accepted links may exist without being trusted, and for how long. All links together may
    hold no more frames, waiting to be sent or arrived in part, than `kv.transports.budget` says: past that limit the
    link that stands still is closed.
    """

    _io: IOThread

    def __init__(
        self,
        name: str,
        *,
        listen: Callable[[], Listener],
        schemes: Sequence[str],
        payloads: Callable[[Link, Memory, Receiver], Payloads],
        clock: Callable[[], float],
        strangers: Strangers,
    ) -> None:
        self._name = name
        self._open_listener = listen
        self._schemes = tuple(schemes)
        self._payloads = payloads
        self._clock = clock
        self._strangers = strangers
        waiting, arriving = (
            Budget[StreamConnection](limit, clock) for limit in (MAX_WAITING_BYTES, MAX_ARRIVING_BYTES)
        )
        self.limits = Limits(waiting, arriving, self._crowded)
        self._known: dict[str, Addresses] = {}

    @property
    def name(self) -> str:
        return self._name

    def _listen(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        """Listen and start the I/O thread. Raise ConfigError when the address cannot be used, and Overloaded when there
        is no thread."""
        listener, door = self._open_listener(), Door(self._strangers)
        try:
            self._io = io = IOThread(listener, receiver, self._clock)
            acceptor = Acceptor(listener, door, io, receiver, self._clock, self._connection)
            io.start(accept=acceptor.accept, sweep=acceptor.sweep)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot serve {listener.endpoint}: {error}") from error
        return (listener.endpoint,)

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        """Open a link, blocking the caller but not the I/O thread. With `timeout_s` 0 a host's name is looked up only
        when it never was."""
        if self._owned is None:
            raise ConfigError("register a memory and a receiver first")
        io = self._io
        sock, endpoint, problem = dial(endpoints, self._schemes, self._known, timeout_s=timeout_s)
        connection = self._connection(sock, Link(endpoint), opening=not timeout_s)
        if not io.add(connection):
            sock.close()
            raise TransferError(f"cannot connect to {endpoint}: this transport is closed; make a new one")
        if problem is None:
            io.post(lambda: io.watch(connection))
        else:
            error = TransferError(f"cannot connect to {endpoint}: {problem}")
            io.post(lambda: io.shut(connection, error))
        return connection.link

    def _connection(self, sock: socket.socket, link: Link, *, opening: bool = False) -> StreamConnection:
        payloads = self._payloads(link, self._memory, self._receiver)
        return StreamConnection(sock, link, payloads, self._receiver, self._clock, limits=self.limits, opening=opening)

    def fence(self, link: Link) -> None:
        if (connection := self._connected(link)) is not None:
            self._io.fence(connection)

    def close(self) -> None:
        """Close every link. Raise TransferError when a receiver callback keeps the I/O thread for more than
        `io_thread.CLOSE_S`."""
        if self._owned is not None:
            self._io.close()

    def _connected(self, link: Link) -> StreamConnection | None:
        return None if self._owned is None else self._io.connections.get(link)

    def _queue(self, link: Link, message: Message) -> bool:
        connection = self._connected(link)
        if connection is None:
            return False
        io = self._io
        return connection.queue(message, lambda: io.post(lambda: io.transmit(connection)))

    def _crowded(self, connection: StreamConnection, reason: str) -> None:
        """Close a link that holds what others need."""
        self._io.shut(connection, TransferError(f"{connection.link.endpoint} {reason}"))
