"""What all transports over stream sockets share: links that are dialled and accepted, frames, and writes.

One I/O thread moves all bytes and makes all calls to the receiver:

    any thread: send, write ── queue ──► pdinfer-kv-io: transmit ──► kernel ──► the peer's pdinfer-kv-io: receive
                                             ▲ wake-up socket                      ├─ place ─► our memory, in place
                                                                                   └─ received, placed, closed, tick

A small frame with nothing before it leaves from the thread that sends it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import attrs

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Link, Receiver, Transfer, Transport, check_frame, total_bytes
from pdinfer.kv.transports.budget import MAX_ARRIVING_BYTES, MAX_WAITING_BYTES, Budget, Limits, Message
from pdinfer.kv.transports.stream.connection import StreamConnection
from pdinfer.kv.transports.stream.door import Acceptor, Door, Strangers
from pdinfer.kv.transports.stream.endpoints import Addresses, Listener, dial
from pdinfer.kv.transports.stream.io_thread import IOThread
from pdinfer.kv.transports.stream.payloads import Payloads
from pdinfer.process.forked import NotCopied


@attrs.frozen
class _Registered:
    """What `register` was given, and the thread that it started."""

    memory: Memory
    receiver: Receiver
    io: IOThread


class StreamTransport(NotCopied, Transport):
    """Frames and writes over stream sockets.

    `listen` opens the socket that peers find, `schemes` are the endpoints that can be dialled, and `payloads` makes the
    part of a link that moves its payloads.

    `strangers` limits how many accepted links may exist without being trusted, and for how long. All links together may
    hold no more frames, waiting to be sent or arrived in part, than `kv.transports.budget` says: past that limit the
    link that stands still is closed. The transport belongs to the process that called `register`: in a forked child
    every method raises TransferError, except `close`, which does nothing.
    """

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
        self._listen = listen
        self._schemes = tuple(schemes)
        self._payloads = payloads
        self._clock = clock
        self._pid = os.getpid()
        self._owned: _Registered | None = None
        self._strangers = strangers
        waiting, arriving = (
            Budget[StreamConnection](limit, clock) for limit in (MAX_WAITING_BYTES, MAX_ARRIVING_BYTES)
        )
        self.limits = Limits(waiting, arriving, self._crowded)
        self._known: dict[str, Addresses] = {}

    @property
    def name(self) -> str:
        return self._name

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        """Listen and start the I/O thread. Raise ConfigError when the address cannot be used."""
        if self._owned is not None:
            raise ConfigError("this transport already has its memory and receiver; make one transport per channel")
        listener, door = self._listen(), Door(self._strangers)
        try:
            io = IOThread(listener, receiver, self._clock)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot serve {listener.endpoint}: {error}") from error
        self._owned = _Registered(memory, receiver, io)
        self._pid = os.getpid()
        acceptor = Acceptor(listener, door, io, receiver, self._clock, connect=self._connection)
        io.start(accept=acceptor.accept, sweep=acceptor.sweep)
        return (listener.endpoint,)

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        """Open a link, blocking the caller but not the I/O thread. With `timeout_s` 0 a host's name is looked up only
        when it never was."""
        io = self._registered().io
        self._check_process()
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
        owned = self._registered()
        payloads = self._payloads(link, owned.memory, owned.receiver)
        return StreamConnection(sock, link, payloads, owned.receiver, self._clock, limits=self.limits, opening=opening)

    def send(self, link: Link, frame: bytes) -> None:
        check_frame(frame)
        self._queue(link, Message(frame))

    def write(
        self,
        link: Link,
        frame: bytes,
        source: Spans,
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Queue a write. `ready` runs in the I/O thread: while it waits, nothing of this transport moves."""
        check_frame(frame)
        transfer = Transfer(total_bytes(source, self._registered().memory), then)
        if not self._queue(link, Message(frame, transfer, source, ready)):
            transfer.complete(TransferError(f"the link to {link.endpoint} is closed"))
        return transfer

    def fence(self, link: Link) -> None:
        self._check_process()
        connection = self._connected(link)
        if connection is not None:
            self._registered().io.fence(connection)

    def close(self) -> None:
        """Close every link. Raise TransferError when a receiver callback keeps the I/O thread for more than
        `io_thread.CLOSE_S`."""
        if os.getpid() == self._pid and self._owned is not None:
            self._owned.io.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TransferError(
                f"this transport belongs to process {self._pid}, not to its forked child {os.getpid()}; "
                f"make a new one here"
            )

    def _registered(self) -> _Registered:
        if self._owned is None:
            raise ConfigError("register a memory and a receiver first")
        return self._owned

    def _connected(self, link: Link) -> StreamConnection | None:
        return None if self._owned is None else self._owned.io.connections.get(link)

    def _queue(self, link: Link, message: Message) -> bool:
        """Queue a message. Return False when the link is closed."""
        self._check_process()
        connection = self._connected(link)
        if connection is None:
            return False
        io = self._registered().io
        return connection.queue(message, lambda: io.post(lambda: io.transmit(connection)))

    def _crowded(self, connection: StreamConnection, reason: str) -> None:
        """Close a link that holds what others need."""
        self._registered().io.shut(connection, TransferError(f"{connection.link.endpoint} {reason}"))
