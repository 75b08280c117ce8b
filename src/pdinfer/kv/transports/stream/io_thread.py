"""The thread that moves all bytes of a transport and makes all calls to its receiver. A link that says little is not
held up by those that say much.

other threads: post ──► commands ──┐
sockets that are ready ────────────┼──► each link's turn ──► tick, when it is due
a listener with newcomers ─────────┘"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

from pdinfer.errors import TransferError
from pdinfer.kv.transports.base import TICK_S, Link, Receiver
from pdinfer.kv.transports.stream.connection import StreamConnection
from pdinfer.kv.transports.stream.endpoints import Listener
from pdinfer.log import log
from pdinfer.process.locks import new_lock, open_lock
from pdinfer.process.threads import start

CLOSE_S = 5.0
MAX_FAILED, FAILED_S = 10, 0.05
"""How many turns of the I/O thread may fail in a row, and how long it then waits: what the process is out of comes
back, what is broken does not."""
CATCH_UP_ROUNDS = 3
"""How often a late I/O thread looks for what has arrived before it ticks anyway."""
ROUND_S = 0.001
"""How long links have their turns before the thread checks which others can move something by now."""


class IOThread:
    """The I/O thread, with the connections that it serves and the listener that it watches.

    From `start` on it calls `accept` when newcomers wait at the listener, and `sweep` before every tick. When it ends,
    for any reason, it closes the connections and the listener."""

    def __init__(self, listener: Listener, receiver: Receiver, clock: Callable[[], float]) -> None:
        self.connections: dict[Link, StreamConnection] = {}
        self._listener = listener
        self._receiver = receiver
        self._clock = clock
        self._lock = new_lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._running = True
        self._stopping = False
        self._woken = False
        self._listens_at = -math.inf
        self._turns = Turns(clock)
        self._unfinished: set[StreamConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, self._awake)
        self._next_tick = clock() + TICK_S
        self._thread = threading.Thread(target=self._run, name="pdinfer-kv-io", daemon=True)

    def start(self, *, accept: Callable[[], None], sweep: Callable[[], None]) -> None:
        self._accept, self._sweep = accept, sweep
        try:
            self._listen()
            start(self._thread)
        except BaseException:
            self._end(None)
            raise

    # Any thread may call these.

    def add(self, connection: StreamConnection) -> bool:
        """Make the connection known, so that it is closed with this thread. Return False when the thread has ended."""
        with self._lock:
            if self._running:
                self.connections[connection.link] = connection
            return self._running

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` in the I/O thread soon, or not at all once that thread has ended."""
        with self._lock:
            if not self._running:
                return
            self._commands.append(command)
            if self._woken or self._is_current:
                return
            with contextlib.suppress(OSError):  # then it looks at its next tick
                self._waker.send(b"\0")
                self._woken = True

    def shut(self, connection: StreamConnection, error: TransferError | None) -> None:
        """Close a link: at once when called in the I/O thread, otherwise soon."""
        if self._is_current:
            self._shut(connection, error)
        else:
            self.post(lambda: self._shut(connection, error))

    def fence(self, connection: StreamConnection) -> None:
        """Close a link, and return when nothing of it can land any more."""
        self.shut(connection, None)
        if not self._is_current:
            # Nobody comes here with one of these locks, unless an interrupt kept it from giving one back.
            connection.let_go()
            open_lock(self._lock)
            connection.gone.wait()

    def close(self) -> None:
        """Shut all links and end the thread. Raise TransferError when a callback keeps it for more than CLOSE_S."""
        if self._is_current:
            self._stop()
            return
        self.post(self._stop)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TransferError(f"the I/O thread is still inside a callback after {CLOSE_S} s; memory may be in use")

    @property
    def _is_current(self) -> bool:
        return threading.current_thread() is self._thread

    # Everything below runs in the I/O thread.

    def watch(self, connection: StreamConnection) -> None:
        """Give the connection turns from now on."""
        if not connection.closed:
            self.guarded(connection, lambda: self._watch(connection))

    def transmit(self, connection: StreamConnection) -> None:
        if not connection.closed and not connection.opening:
            self.guarded(connection, lambda: self._send_turn(connection))

    def guarded(self, connection: StreamConnection, work: Callable[[], None]) -> None:
        """Run `work`. An exception closes the link, and is logged unless it is a TransferError."""
        try:
            work()
        except TransferError as error:
            self._shut(connection, error)
        except Exception as error:  # noqa: BLE001 - whatever a receiver raises
            name = connection.link.endpoint
            self._shut(connection, TransferError(f"a callback failed, so the link to {name} was closed: {error!r}"))
            log.exception("a callback failed; the link to %s is closed", name)

    def pause_listening(self, until: float) -> None:
        """Leave newcomers in the backlog until then."""
        self._selector.unregister(self._listener.sock)
        self._listens_at = until

    def _listen(self) -> None:
        self._selector.register(self._listener.sock, selectors.EVENT_READ, lambda _: self._accept())
        self._listens_at = -math.inf  # now, since the kernel may have had no room for it

    def _watch(self, connection: StreamConnection) -> None:
        event = selectors.EVENT_WRITE if connection.opening else selectors.EVENT_READ
        try:
            self._selector.register(connection.sock, event, connection)
        except OSError as error:
            raise TransferError(f"the link to {connection.link.endpoint} cannot be watched: {error}") from error
        self._turns.enter(connection)

    def _run(self) -> None:
        error: TransferError | None = None
        try:
            num_failed = 0
            while not self._stopping:
                try:
                    self._step()
                    num_failed = 0
                except Exception as raised:
                    num_failed += 1
                    if num_failed > MAX_FAILED:
                        raise
                    self._start_over(raised)
        except BaseException as raised:  # noqa: BLE001 - a SystemExit out of a callback, too, must not look like an orderly close
            log.critical("the I/O thread failed; all its links are closed", exc_info=True)
            error = TransferError(f"the transport's I/O thread failed: {raised!r}; make a new transport")
        finally:
            self._end(error)

    def _start_over(self, raised: Exception) -> None:
        """Close every link after a turn that failed half-way. Those that are wanted are dialled again."""
        error = TransferError(f"a turn of the transport's I/O thread failed: {raised!r}")
        for connection in list(self.connections.values()):
            self._shut(connection, error)
        with self._lock:
            self._woken = False  # it may have read the byte, and not have noted it
        log.error("a turn of the I/O thread failed; all its links are closed", exc_info=raised)
        time.sleep(FAILED_S)

    def _end(self, error: TransferError | None) -> None:
        with self._lock:
            self._running = False
        for connection in list(self.connections.values()):
            self._shut(connection, error)
        self._selector.close()
        self._wake.close()
        self._waker.close()
        self._listener.close()

    def _step(self) -> None:
        pausing = self._listens_at > -math.inf
        wakes_at = min(self._next_tick, self._listens_at) if pausing else self._next_tick
        self._serve(0.0 if self._commands or self._unfinished else max(0.0, wakes_at - self._clock()))
        if pausing and self._clock() >= self._listens_at and not self._stopping:
            self._listen()
        if self._clock() >= self._next_tick:
            self._tick()

    def _serve(self, timeout_s: float, round_s: float = ROUND_S) -> None:
        """Give turns to the links that can move something, and run what other threads have posted."""
        ready = dict.fromkeys(self._unfinished, selectors.EVENT_READ)
        for key, mask in self._selector.select(timeout_s):
            if isinstance(key.data, StreamConnection):
                ready[key.data] = ready.get(key.data, 0) | mask
            else:
                key.data(mask)
        for connection in self._turns.of(ready, round_s):
            self._unfinished.discard(connection)
            self._turn(connection, ready[connection])
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def _tick(self) -> None:
        """Tick, but first read what has arrived: an end that was stopped itself must not take that for silence of its
        peers."""
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
            self._receiver.tick()
        except Exception:  # noqa: BLE001 - as above
            log.exception("tick failed")

    def _awake(self, mask: int) -> None:
        self._wake.recv(1)
        with self._lock:
            self._woken = False

    def _turn(self, connection: StreamConnection, mask: int) -> None:
        """Let one link receive and send a bounded amount, and ask to be called when it can do more."""
        if connection.closed:
            return
        if connection.opening:
            self.guarded(connection, connection.opened)
        elif mask & selectors.EVENT_READ:
            self.guarded(connection, lambda: self._receive_turn(connection))
        if mask & selectors.EVENT_WRITE or connection.wants_turn:
            self.transmit(connection)

    def _receive_turn(self, connection: StreamConnection) -> None:
        if connection.receive():
            self._unfinished.add(connection)  # the socket may not become readable again

    def _send_turn(self, connection: StreamConnection) -> None:
        more = connection.transmit()
        if connection.closed:
            return
        key = self._selector.get_key(connection.sock)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)

    def _shut(self, connection: StreamConnection, error: TransferError | None) -> None:
        if connection.closed:
            return
        if connection.sock in self._selector.get_map():
            self._selector.unregister(connection.sock)
        self._turns.leave(connection)
        self._unfinished.discard(connection)
        try:
            connection.shut(error or TransferError(f"the link to {connection.link.endpoint} was closed by this end"))
        finally:
            self._gone(connection, error)

    def _gone(self, connection: StreamConnection, error: TransferError | None) -> None:
        """Say that a link is closed, whatever comes of that: `fence` waits for it."""
        try:
            self._receiver.closed(connection.link, error)
        except Exception:  # noqa: BLE001 - as above
            log.exception("closed(%s) failed", connection.link.endpoint)
        finally:
            with self._lock:
                del self.connections[connection.link]
            connection.gone.set()

    def _stop(self) -> None:
        self._stopping = True
        for connection in list(self.connections.values()):
            self._shut(connection, None)


class Turns:
    """The order of the links: those that used the thread least of late come first. Belongs to the I/O thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used_s: dict[StreamConnection, float] = {}

    def enter(self, connection: StreamConnection) -> None:
        """Add a newcomer, which is not ahead of the others: otherwise a peer that reconnects again and again would
        always be first."""
        self._used_s[connection] = max(self._used_s.values(), default=0.0)

    def leave(self, connection: StreamConnection) -> None:
        self._used_s.pop(connection, None)

    def of(self, ready: Collection[StreamConnection], round_s: float = ROUND_S) -> Iterator[StreamConnection]:
        """Yield, of those that can move something, the ones to serve now, one after the other, until `round_s` have
        passed. The time that each takes is counted."""
        began = self._clock()
        for connection in sorted(ready, key=lambda each: self._used_s.get(each, 0.0)):
            before = self._clock()
            yield connection
            after = self._clock()
            if connection in self._used_s:
                self._used_s[connection] += after - before
            if after - began > round_s:
                return

    def fade(self) -> None:
        """Halve what each connection has used, so that older use counts less."""
        for connection in self._used_s:
            self._used_s[connection] /= 2
