"""What all transports over stream sockets share: links that are dialled and accepted, frames, and writes.

One I/O thread moves all bytes and makes all calls to the receiver:

    any thread: send, write ── queue ──► pdinfer-kv-io: transmit ──► kernel ──► the peer's pdinfer-kv-io: receive
                                             ▲ wake-up socket                      ├─ place ─► our memory, in place
                                                                                   └─ received, placed, closed, tick

A small frame with nothing before it leaves from the thread that sends it."""

from __future__ import annotations

import errno
import ipaddress
import math
import resource
import socket
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from pdinfer.checks import float_field, int_field
from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import (
    MAX_ARRIVING_BYTES,
    MAX_WAITING_BYTES,
    TICK_S,
    Budget,
    Limits,
    Link,
    Message,
    QueuingTransport,
    Receiver,
)
from pdinfer.kv.transports.stream.connection import StreamConnection
from pdinfer.kv.transports.stream.endpoints import Addresses, Listener, dial, prepare_socket, tcp_endpoint
from pdinfer.kv.transports.stream.framing import Payloads
from pdinfer.kv.transports.stream.io_thread import IOThread
from pdinfer.log import log

CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid, as SO_PEERCRED returns them."""
DESCRIPTOR_SHARE = 8
"""Of the descriptors that this process may have, one in so many is for links that are not trusted yet."""
LOOPBACK = "loopback"
V6_NETWORK_BITS = 64
"""The smallest network that one customer gets: its addresses are one source."""
ACCEPTS, PACE_S = 12, 0.005
"""How many newcomers are let in at once, and how long the next ones wait. Other links have their turns meanwhile, and
strangers that come again and again take little of the I/O thread's time."""
MOST_LINKS, MOST_S = 2**20, 3600.0
RETRY_S = TICK_S
"""How long an end that could not accept waits before it tries again."""


@attrs.frozen(kw_only=True)
class Strangers:
    """What the links that peers have opened may cost before they are trusted.

    At most `max_links` at once and `max_links_per_source` of them from one source, and fewer where the process may open
    only few descriptors. A newcomer takes the place of the link that has waited longest, if that one has waited for
    `grace_s`. Otherwise the newcomer waits, or is turned away when its own source has used up its share. The first
    message is due within `first_message_s`, each later one within `message_s`. Raises ConfigError for numbers that are
    out of range."""

    max_links: int = int_field(1, MOST_LINKS, default=128)
    max_links_per_source: int = int_field(1, MOST_LINKS, default=64)
    grace_s: float = float_field(0, MOST_S, default=0.1)
    first_message_s: float = float_field(0, MOST_S, default=2.0)
    message_s: float = float_field(0, MOST_S, default=5.0)


@attrs.define(eq=False)
class Door:
    """The links of one listening socket that are not trusted yet, with the source and the time of each, in the order in
    which they came. Belongs to the I/O thread.

    No honest peer waits here for long: a handshake takes some milliseconds. So a newcomer is let in, and the link that
    has waited longest leaves, from the source that has the most links. A source is the address of another machine, or
    the process at the other end of a Unix socket. Over loopback TCP all processes of this host are one source, so that
    source has no limit of its own."""

    _strangers: Strangers
    _max_links: float = attrs.field(init=False)
    _waiting: dict[StreamConnection, tuple[Hashable, float]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        affordable = math.inf if descriptors == resource.RLIM_INFINITY else max(1, descriptors // DESCRIPTOR_SHARE)
        self._max_links = min(self._strangers.max_links, affordable)

    def __len__(self) -> int:
        return len(self._waiting)

    def look(self) -> None:
        """Forget the links that are trusted or gone."""
        left = {each: entry for each, entry in self._waiting.items() if not (each.closed or each.link.trusted)}
        self._waiting = left

    def room_in_s(self, now: float) -> float:
        """Return how long a newcomer has to wait outside: 0 when there is room for it, or a link that can give way."""
        if len(self) >= self._max_links:
            self.look()
        return 0.0 if len(self) < self._max_links else max(0.0, self._gives_way_at(self.oldest()) - now)

    def oldest(self) -> StreamConnection:
        """Return the link that has waited longest, from the source that has the most."""
        ((most, _),) = Counter(source for source, _ in self._waiting.values()).most_common(1)
        return self._from(most)[0]

    def turns_away(self, source: Hashable, now: float) -> bool:
        """Whether a newcomer of that source must leave because the links before it have just come."""
        if len(self._from(source)) >= self._limit(source):
            self.look()
        own = self._from(source)
        return len(own) >= self._limit(source) and now < self._gives_way_at(own[0])

    def enter(self, connection: StreamConnection, source: Hashable, now: float) -> StreamConnection | None:
        """Take a newcomer in. Return the link that gives way for it, or None."""
        own = self._from(source)
        leaves: StreamConnection | None = None
        if len(own) >= self._limit(source):
            leaves = own[0]
        elif len(self) >= self._max_links:
            leaves = self.oldest()
        if leaves is not None:
            del self._waiting[leaves]
        self._waiting[connection] = source, now
        return leaves

    def late(self, now: float) -> list[tuple[StreamConnection, float]]:
        """Return (link, limit in seconds) of each link that sent no whole message in time."""
        self.look()
        first_s, later_s = self._strangers.first_message_s, self._strangers.message_s
        limits = [(each, later_s if each.num_messages else first_s) for each in self._waiting]
        return [(each, limit_s) for each, limit_s in limits if now - each.idle_since > limit_s]

    def _from(self, source: Hashable) -> list[StreamConnection]:
        return [each for each, (its_source, _) in self._waiting.items() if its_source == source]

    def _gives_way_at(self, connection: StreamConnection) -> float:
        return self._waiting[connection][1] + self._strangers.grace_s

    def _limit(self, source: Hashable) -> float:
        own = self._max_links if source == LOOPBACK else self._strangers.max_links_per_source
        return min(own, self._max_links)


def source_of(sock: socket.socket, address: Any) -> Hashable:
    """Return who has connected, as far as the kernel knows: the process at a Unix socket (uid and pid), otherwise the
    machine."""
    if sock.family == socket.AF_UNIX:
        if not hasattr(socket, "SO_PEERCRED"):
            return LOOPBACK
        pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        return uid, pid
    host = ipaddress.ip_address(address[0].partition("%")[0])
    host = getattr(host, "ipv4_mapped", None) or host
    if host.is_loopback:
        return LOOPBACK
    return host if host.version == 4 else ipaddress.ip_network((host, V6_NETWORK_BITS), strict=False)


@attrs.frozen(eq=False)
class Acceptor:
    """Lets newcomers in at a listener. `connect` makes a connection from a socket. Belongs to the I/O thread."""

    _listener: Listener
    _door: Door
    _io: IOThread
    _receiver: Receiver
    _clock: Callable[[], float]
    _connect: Callable[[socket.socket, Link], StreamConnection]

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
                    log.error("cannot accept at %s: %s", self._listener.endpoint, error)
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


class StreamTransport(QueuingTransport):
    """Frames and writes over stream sockets.

    `listen` opens the socket that peers find, `schemes` are the endpoints that can be dialled, and `payloads` makes the
    part of a link that moves its payloads. The `ready` of a write runs in the I/O thread: while it waits, nothing of
    this transport moves.

    `strangers` limits how many accepted links may exist without being trusted, and for how long. All links together may
    hold no more frames, waiting to be sent or arrived in part, than MAX_WAITING_BYTES and MAX_ARRIVING_BYTES: past that
    limit the link that stands still is closed."""

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
