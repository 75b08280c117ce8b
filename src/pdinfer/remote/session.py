"""Messages over a connection, carried by threads of their own: a sender never waits for the other process, and a
process that stands still is noticed.

There are three threads, because each may be stuck alone: one reads, one sends, one keeps time. A live process sends a
beat every BEAT_S whatever its other threads do, so silence means that it was stopped, or that its machine is gone. A
long message travels in pieces, and each piece is a sign of life."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pdinfer.errors import Overloaded, TransferError
from pdinfer.log import log
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import new_lock
from pdinfer.process.silence import SESSIONS, SilenceWatch
from pdinfer.process.threads import start
from pdinfer.remote import messages
from pdinfer.remote.messages import BeatMessage, Command, Report

BEAT_S = 0.4
MAX_UNSENT_BYTES = 256 << 20
"""A live process empties its connection at once, so this much waits only for a process that does not read."""
FLUSH_S = 0.2
"""How long a last message may take to leave. It need not be longer: the end of the connection says the same."""
TOLD_S = 0.02
"""How long `tell` may wait. A pipe with room takes a message in a fraction of that."""


class MessageStream(Protocol):
    """Whole messages over some byte stream. `recv_bytes` raises EOFError or OSError when the other end is gone."""

    def send_bytes(self, buf: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def poll(self, timeout: float, /) -> bool: ...

    def close(self) -> None: ...


M = TypeVar("M")


class Session(OfOneProcess, Generic[M]):
    """Carries messages over one connection, with heartbeats.

    `deliver` gets every message that arrives, and a last None once the other end is lost or this end was closed. The
    other end is lost when it is gone, does not read, or has been silent for `silent_s` plus `return_s` after its first
    message. Then `loss` says how, such as "is gone". If the connection itself `broke`, another one may lead to the same
    process. `beat` makes the sign of life. `on_silence` is told when the other end falls silent, and when it is heard
    again. All are called from the session's threads."""

    def __init__(
        self,
        connection: MessageStream,
        decode: Callable[[bytes], M],
        deliver: Callable[[M | None], None],
        beat: Callable[[], BeatMessage] = BeatMessage,
        *,
        silent_s: float | None = None,
        return_s: float = 0.0,
        on_silence: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.connection = connection
        self._silent_s = SESSIONS.silent_s if silent_s is None else silent_s
        self._return_s = return_s
        self._on_silence = on_silence
        self._decode = decode
        self._deliver = deliver
        self._beat = beat
        self._changed = threading.Condition(new_lock())
        self._outgoing: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._num_heard = 0
        self._closing = False
        self.loss: str | None = None
        self.broke = False
        self._stopping = threading.Event()
        self._reader, self._sender, timekeeper = (
            threading.Thread(target=work, name="pdinfer-remote", daemon=True)
            for work in (self._read, self._send, self._keep_time)
        )
        self._threads = (self._reader, self._sender, timekeeper)
        try:
            for thread in self._threads:
                start(thread)
        except Overloaded as error:
            self.loss = str(error)  # so that nobody is told of a session that has not begun
            self.close()
            raise

    def report_to(self, deliver: Callable[[M | None], None], on_silence: Callable[[bool], None]) -> bool:
        """Call these functions from now on, instead of those that were given at first. Return False where the other end
        is lost, which those are told of."""
        with self._changed:
            if self.loss is None:
                self._deliver, self._on_silence = deliver, on_silence
            return self.loss is None

    @property
    def is_behind(self) -> bool:
        return bool(self._outgoing)

    def forget(self) -> None:
        with self._changed:
            self._unsent_bytes -= sum(map(len, self._outgoing))
            self._outgoing.clear()

    def post(self, message: Command | Report) -> None:
        """Queue a message. Never blocks. Once the other end is lost, the message is dropped."""
        data = messages.encode(message)
        with self._changed:
            if self.loss is None and not self._closing:
                self._outgoing.append(data)
                self._unsent_bytes += len(data)
                self._changed.notify_all()
            overfull = self._unsent_bytes > MAX_UNSENT_BYTES
        if overfull:
            self._give_up(f"does not read: {MAX_UNSENT_BYTES} bytes wait for it")

    def tell(self, message: Command | Report) -> None:
        """Post a message, and wait until it has left or TOLD_S are over: it then arrives even if this process ends."""
        self.post(message)
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent_bytes or self.loss is not None, TOLD_S)

    def close(self, *last_messages: Command | Report) -> None:
        """Send `last_messages` instead of those that wait, and end the connection within a second. A second call does
        nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._outgoing = deque(map(messages.encode, last_messages))
            self._changed.notify_all()
        if self._sender.is_alive():
            self._sender.join(FLUSH_S)
        self._stopping.set()
        self._shut()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(FLUSH_S)
        self.connection.close()
        if self.loss is None:
            self.loss = "is not heard any more: its port was closed here"
            self._deliver(None)

    # -- our threads ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        joiner = messages.Joiner()
        broke = False
        try:
            while not self._stopping.is_set():
                if self.connection.poll(SESSIONS.look_s):
                    data = self.connection.recv_bytes()
                    self._num_heard += 1
                    if (whole := joiner.add(data)) is not None:
                        self._deliver(self._decode(whole))
            return
        except (OSError, EOFError):
            reason, broke = "is gone", True
        except TransferError as error:
            reason = f"sent an invalid message: {error}"
        except Exception as error:  # noqa: BLE001 - whatever a connection raises, it cannot be read any more
            log.exception("reading a connection failed; the port is given up")
            reason = f"is gone: {type(error).__name__}"
        self._give_up(reason, broke=broke)

    def _send(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._outgoing or self._closing or self.loss)
                    if self.loss is not None or not self._outgoing:
                        return
                    data = self._outgoing.popleft()
                for piece in messages.pieces(data):
                    self.connection.send_bytes(piece)
                with self._changed:
                    self._unsent_bytes -= len(data)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - as for reading
            # Its last messages may still be on the way to the thread that reads, which ends by itself after them.
            self._reader.join(BEAT_S)
            self._give_up(f"is gone: {error}", broke=True)

    def _keep_time(self) -> None:
        """Send beats, and notice silence. Silence is counted in ticks, not read off a clock: a process that was stopped
        itself has heard nothing either, and has to read what has arrived before it judges."""
        num_heard, beaten_at, is_silent = 0, -math.inf, False
        silence = SilenceWatch(SESSIONS, time.monotonic())
        while not self._stopping.is_set() and self.loss is None:
            if (now := time.monotonic()) >= beaten_at + BEAT_S:
                beaten_at = now
                if not self._outgoing:  # a waiting message is as good a sign of life
                    self.post(self._beat())
            self._stopping.wait(SESSIONS.look_s)
            is_heard = self._num_heard != num_heard or not num_heard  # silence begins behind the first message
            num_heard = self._num_heard
            silent_s = silence.look(time.monotonic(), heard_ago_s=0.0 if is_heard else math.inf)
            limit_s = self._silent_s + self._return_s
            if silent_s >= limit_s:
                self._give_up(f"was silent for {limit_s:g} s")
            elif is_silent != (silent_s >= self._silent_s):
                is_silent = not is_silent
                self._on_silence(is_silent)

    def _give_up(self, reason: str, *, broke: bool = False) -> None:
        with self._changed:
            if self.loss is not None or self._closing:
                return
            self.loss, self.broke, deliver = reason, broke, self._deliver
            self._outgoing.clear()
            self._changed.notify_all()
        self._shut()
        deliver(None)

    def _shut(self) -> None:
        """End a read or a send that is stuck in another thread, where the connection is a socket: closing it does not.
        This also tells the other process, although a forked child may still hold the descriptor."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            end = socket.socket(fileno=self.connection.fileno())  # type: ignore[attr-defined]
            try:
                end.shutdown(socket.SHUT_RDWR)
            finally:
                end.detach()
