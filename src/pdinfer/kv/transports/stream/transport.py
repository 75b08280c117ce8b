"""What all transports over stream sockets share: listening, connecting, and one thread that serves every link.

One I/O thread moves all bytes and makes all calls to the receiver:

    any thread: send, write ── queue ──► pdinfer-kv-io: transmit ──► kernel ──► the peer's pdinfer-kv-io: receive
                                             ▲ wake-up socket                      ├─ place ─► our memory, in place
                                                                                   └─ received, placed, closed, tick

A small frame that nothing is before leaves from the thread that sends it.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory, total_bytes
from pdinfer.kv.transports.base import TICK_S, Link, Receiver, Transfer, check_frame
from pdinfer.kv.transports.budget import MAX_ARRIVING_BYTES, MAX_WAITING_BYTES, Budget, Limits
from pdinfer.kv.transports.message import Message
from pdinfer.kv.transports.stream import endpoints as dial
from pdinfer.kv.transports.stream.connection import Connection
from pdinfer.kv.transports.stream.door import Door, Strangers, source_of
from pdinfer.kv.transports.stream.payloads import Payloads
from pdinfer.kv.transports.stream.turns import ROUND_S, Turns
from pdinfer.process.locks import new_lock

CLOSE_S = 5.0
ACCEPTS, PACE_S = 12, 0.005
"""How many newcomers are let in at once, and how long the next ones wait: other links have their turn meanwhile, and
strangers who come again and again take little of this thread's time."""
RETRY_S = TICK_S
"""When an end that could not accept tries again."""
CATCH_UP_ROUNDS = 3
"""How often a late I/O thread looks for what has arrived before it ticks all the same."""


class StreamTransport:
    """Frames and writes over stream sockets.

    `listen` opens the socket that peers find; `schemes` are the endpoints that can be dialled; `payloads` makes what
    moves the payloads of one link.

    `strangers` says how many links that were accepted may be there without being trusted, and for how long. Of all
    links together no more waits to be sent, or has arrived in part, than `kv.transports.budget` says: past it the one
    that stands still is closed. Belongs to the process that called `register`: in a forked child every method raises
    TransferError, except `close`, which does nothing.
    """

    def __init__(
        self,
        name: str,
        *,
        listen: Callable[[], dial.Listener],
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
        self._lock = new_lock()
        self._owned: tuple[Memory, Receiver] | None = None
        self._connections: dict[Link, Connection] = {}
        self._strangers = strangers
        waiting, arriving = (Budget[Connection](limit, clock) for limit in (MAX_WAITING_BYTES, MAX_ARRIVING_BYTES))
        self._limits = Limits(waiting, arriving, self._crowded)
        self._known: dict[str, dial.Addresses] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._running = False
        self._stopping = False
        self._woken = False
        self._accepts_at = -math.inf
        self._turns = Turns(clock)
        self._unfinished: set[Connection] = set()

    @property
    def name(self) -> str:
        return self._name

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        """Listens and starts the I/O thread; raises ConfigError when the address cannot be had."""
        if self._owned is not None:
            raise ConfigError("this transport already has its memory and receiver; make one transport per channel")
        self._listener = self._listen()
        self._door = Door(self._strangers)
        self._owned = memory, receiver
        self._pid = os.getpid()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._awake)
        self._selector.register(self._listener.sock, selectors.EVENT_READ, self._accept)
        self._next_tick = self._clock() + TICK_S
        self._running = True
        self._thread = threading.Thread(target=self._run, name="pdinfer-kv-io", daemon=True)
        self._thread.start()
        return (self._listener.endpoint,)

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        """Blocks the caller, not the I/O thread. With `timeout_s` 0 a host's name is looked up only if it never was."""
        self._registered()
        self._check_process()
        sock, endpoint, problem = dial.dial(endpoints, self._schemes, self._known, timeout_s=timeout_s)
        connection = self._connection(sock, Link(endpoint), opening=not timeout_s)
        if connection is None:
            sock.close()
            raise TransferError(f"cannot connect to {endpoint}: this transport is closed; make a new one")
        if problem is None:
            self._post(lambda: self._watch(connection))
        else:
            error = TransferError(f"cannot connect to {endpoint}: {problem}")
            self._post(lambda: self._shut(connection, error))
        return connection.link

    def _connection(
        self, sock: socket.socket, link: Link, *, accepted: bool = False, opening: bool = False
    ) -> Connection | None:
        """The link's connection, known from now on; None when this transport is closed."""
        memory, receiver = self._registered()
        payloads = self._payloads(link, memory, receiver)
        limits, clock = self._limits, self._clock
        connection = Connection(
            sock, link, payloads, receiver, clock, limits=limits, accepted=accepted, opening=opening
        )
        with self._lock:
            if not self._running:
                return None
            self._connections[link] = connection
        return connection

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
        """`ready` runs in the I/O thread: while it waits, nothing of this transport moves."""
        check_frame(frame)
        memory, _ = self._registered()
        transfer = Transfer(total_bytes(source, memory), then)
        if not self._queue(link, Message(frame, transfer, source, ready)):
            transfer.complete(TransferError(f"the link to {link.endpoint} is closed"))
        return transfer

    def fence(self, link: Link) -> None:
        self._check_process()
        connection = self._connections.get(link)
        if connection is None:
            return
        if threading.current_thread() is self._thread:
            self._shut(connection, None)
            return
        self._post(lambda: self._shut(connection, None))
        connection.gone.wait()

    def close(self) -> None:
        """Raises TransferError when a receiver callback keeps the I/O thread for more than CLOSE_S."""
        if os.getpid() != self._pid or self._owned is None:
            return
        if threading.current_thread() is self._thread:
            self._stop()
            return
        self._post(self._stop)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TransferError(f"the I/O thread is still inside a callback after {CLOSE_S} s; memory may be in use")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TransferError(
                f"this transport belongs to process {self._pid}, not to its forked child {os.getpid()}; "
                f"make a new one here"
            )

    def _registered(self) -> tuple[Memory, Receiver]:
        if self._owned is None:
            raise ConfigError("register a memory and a receiver first")
        return self._owned

    def _queue(self, link: Link, message: Message) -> bool:
        self._check_process()
        connection = self._connections.get(link)
        if connection is None:
            return False
        return connection.queue(message, lambda: self._post(lambda: self._transmit(connection)))

    def _crowded(self, connection: Connection, reason: str) -> None:
        """Closes a link that holds what others need."""
        error = TransferError(f"{connection.link.endpoint} {reason}")
        if threading.current_thread() is self._thread:
            self._shut(connection, error)
        else:
            self._post(lambda: self._shut(connection, error))

    def _post(self, command: Callable[[], None]) -> None:
        """Runs `command` in the I/O thread soon; after the end of that thread, not at all."""
        with self._lock:
            if not self._running:
                return
            self._commands.append(command)
            if self._woken or threading.current_thread() is self._thread:
                return
            self._waker.send(b"\0")
            self._woken = True

    # Everything below runs in the I/O thread.

    def _run(self) -> None:
        error: TransferError | None = None
        try:
            while not self._stopping:
                self._step()
        except BaseException as raised:  # a SystemExit out of a callback, too, must not look like an orderly close
            logging.getLogger("pdinfer").critical("the I/O thread failed; all its links are closed", exc_info=True)
            error = TransferError(f"the transport's I/O thread failed: {raised!r}; make a new transport")
        finally:
            with self._lock:
                self._running = False
            for connection in list(self._connections.values()):
                self._shut(connection, error)
            self._selector.close()
            self._wake.close()
            self._waker.close()
            self._listener.close()

    def _step(self) -> None:
        pausing = self._accepts_at > -math.inf
        wakes_at = min(self._next_tick, self._accepts_at) if pausing else self._next_tick
        self._serve(0.0 if self._commands or self._unfinished else max(0.0, wakes_at - self._clock()))
        if pausing and self._clock() >= self._accepts_at and not self._stopping:
            self._accepts_at = -math.inf
            self._selector.register(self._listener.sock, selectors.EVENT_READ, self._accept)
        if self._clock() >= self._next_tick:
            self._tick()

    def _serve(self, timeout_s: float, round_s: float = ROUND_S) -> None:
        """Gives links that can move something their turns, and runs what other threads have posted."""
        ready = dict.fromkeys(self._unfinished, selectors.EVENT_READ)
        for key, mask in self._selector.select(timeout_s):
            if isinstance(key.data, Connection):
                ready[key.data] = ready.get(key.data, 0) | mask
            else:
                key.data(mask)
        for connection in self._turns.of(ready, round_s):
            self._unfinished.discard(connection)
            self._turn(connection, ready[connection])
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def _tick(self) -> None:
        """Whoever was stopped himself must not think that his peers were silent, so what has come is read first."""
        rounds = CATCH_UP_ROUNDS if self._clock() - self._next_tick > TICK_S else 0
        for _ in range(rounds):
            started = self._clock()
            self._serve(0.0, math.inf)
            if self._stopping:
                return
            if self._clock() - started < TICK_S:
                break
        self._next_tick = self._clock() + TICK_S
        self._sweep()
        self._turns.fade()
        try:
            self._registered()[1].tick()
        except Exception:
            logging.getLogger("pdinfer").exception("tick failed")

    def _awake(self, mask: int) -> None:
        self._wake.recv(1)
        with self._lock:
            self._woken = False

    def _accept(self, mask: int) -> None:
        """Lets newcomers in: who waits unproven gives way for them. Who cannot come in yet waits in the backlog."""
        for _ in range(ACCEPTS):
            now = self._clock()
            if (wait_s := self._door.room_in_s(now)) > 0:
                self._pause(now + wait_s)
                return
            try:
                sock, address = self._listener.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                # The peer keeps waiting in the backlog, and asking again at once would spin.
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not len(self._door):
                    logging.getLogger("pdinfer").error("cannot accept at %s: %s", self._listener.endpoint, error)
                    self._pause(now + RETRY_S)
                    return
                self._crowded(self._door.oldest(), "is not trusted yet, and there are no more descriptors")
                continue
            try:
                self._enter(sock, address, now)
            except OSError:  # it has gone again
                sock.close()
        self._pause(now + PACE_S)

    def _enter(self, sock: socket.socket, address: Any, now: float) -> None:
        source = source_of(sock, address)
        if self._door.turns_away(source, now):
            sock.close()
            return
        dial.prepare(sock)
        # A Unix socket that dials has no address of its own.
        endpoint = dial.tcp_endpoint(*address[:2]) if address else self._listener.endpoint
        connection = self._connection(sock, Link(endpoint), accepted=True)
        assert connection is not None, "this thread runs"
        leaves = self._door.enter(connection, source, now)
        if leaves is not None:
            self._crowded(leaves, "is not trusted yet, and others want to get in")
        self._guarded(connection, lambda: self._registered()[1].opened(connection.link))
        self._watch(connection)

    def _pause(self, until: float) -> None:
        self._selector.unregister(self._listener.sock)
        self._accepts_at = until

    def _watch(self, connection: Connection) -> None:
        if not connection.closed:
            event = selectors.EVENT_WRITE if connection.opening else selectors.EVENT_READ
            self._selector.register(connection.sock, event, connection)
            self._turns.enter(connection)

    def _turn(self, connection: Connection, mask: int) -> None:
        """Lets one link receive and send a bounded amount, and asks to be called when it can do more."""
        if connection.closed:
            return
        if connection.opening:
            self._guarded(connection, connection.opened)
        elif mask & selectors.EVENT_READ:
            self._guarded(connection, lambda: self._receive_turn(connection))
        if mask & selectors.EVENT_WRITE or connection.wants_turn:
            self._transmit(connection)

    def _receive_turn(self, connection: Connection) -> None:
        if connection.receive():
            self._unfinished.add(connection)  # the socket may have nothing more to tell of

    def _transmit(self, connection: Connection) -> None:
        if not connection.closed and not connection.opening:
            self._guarded(connection, lambda: self._send_turn(connection))

    def _send_turn(self, connection: Connection) -> None:
        more = connection.transmit()
        if connection.closed:
            return
        key = self._selector.get_key(connection.sock)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)

    def _guarded(self, connection: Connection, work: Callable[[], None]) -> None:
        """Runs `work`; what it raises closes the link, and is logged unless it is a TransferError."""
        try:
            work()
        except TransferError as error:
            self._shut(connection, error)
        except Exception as error:
            name = connection.link.endpoint
            logging.getLogger("pdinfer").exception("a callback failed; the link to %s is closed", name)
            self._shut(connection, TransferError(f"a callback failed, so the link to {name} was closed: {error!r}"))

    def _shut(self, connection: Connection, error: TransferError | None) -> None:
        if connection.closed:
            return
        if connection.sock in self._selector.get_map():
            self._selector.unregister(connection.sock)
        self._turns.leave(connection)
        self._unfinished.discard(connection)
        connection.shut(error or TransferError(f"the link to {connection.link.endpoint} was closed by this end"))
        try:
            self._registered()[1].closed(connection.link, error)
        except Exception:
            logging.getLogger("pdinfer").exception("closed(%s) failed", connection.link.endpoint)
        with self._lock:
            del self._connections[connection.link]
        connection.gone.set()

    def _stop(self) -> None:
        self._stopping = True
        for connection in list(self._connections.values()):
            self._shut(connection, None)

    def _sweep(self) -> None:
        for connection, limit_s in self._door.late(self._clock()):
            reason = f"{connection.link.endpoint} sent no whole message for {limit_s:g} s and is not trusted"
            self._shut(connection, TransferError(reason))
