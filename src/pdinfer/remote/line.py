"""The line to an engine in another process: a session that is renewed when the engine was lost and is heard again, over
another connection where the first one broke."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Generic

from pdinfer.config import RemoteConfig
from pdinfer.errors import Overloaded, TransferError
from pdinfer.log import log
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import new_lock
from pdinfer.process.threads import start
from pdinfer.remote import messages
from pdinfer.remote.known import KnownEngine
from pdinfer.remote.messages import AnyLoad, BeatMessage, Command, Connected, Report
from pdinfer.remote.session import MessageStream, Session

REDIAL_S = (0.1, 5.0)
"""Seconds before the first and, doubling, before every later attempt to make another connection."""


class Line(OfOneProcess, Generic[AnyLoad]):
    """Carries messages to an `engine` and notes what it reports, under `lock`.

    `tell` gets what the engine says, but for reports that bring no news. `wake` is called when it is lost, and when it
    `is_gone`: then nothing will come any more. Both are called in the session's threads. `dial` makes another
    connection. A line that `follows` another takes over its session, and knows an engine of its own role only."""

    def __init__(
        self,
        role: str,
        config: RemoteConfig,
        dial: Callable[[], MessageStream] | None,
        tell: Callable[[Report], None],
        wake: Callable[[], None],
        *,
        follows: bool = False,
    ) -> None:
        self.config = config
        self.dial = dial
        self.engine: KnownEngine[AnyLoad] = KnownEngine(role, follows=follows)
        self.lock = new_lock()
        self.is_gone = False
        self._tell, self._wake = tell, wake
        self._reason = ""
        self._closing = threading.Event()
        self._session: Session[Report]

    def meet(self, connection: MessageStream) -> None:
        """Hold the session over this connection."""
        with self.lock:  # its threads may deliver a message at once
            self._session = Session(
                connection,
                messages.decode_report,
                self._deliver,
                silent_s=self.config.silent_s,
                return_s=self.config.return_s,
                on_silence=self._silent,
            )

    def follow(self, before: Line[Any]) -> None:
        """Take over the session of a line whose engine will be ours. Raise TransferError where it is lost, of which the
        other line is told: nobody would tell this one."""
        with before.lock:
            if not before.engine.is_live:
                raise before.loss()
            self._session = before._session
            if not self._session.report_to(self._deliver, self._silent):
                raise TransferError(f"the process at the other end of a port {self._session.loss}")
            before.engine.is_live = False  # what its threads are about to notice is not for them any more

    def post(self, message: Command) -> None:
        self._session.post(message)

    def submit(self, message: Command, num_tokens: int) -> None:
        """Send a request, unless the engine is lost."""
        with self.lock:  # so that numbers are in the order of sending
            if self.engine.submit(num_tokens):
                self.post(message)

    def close(self, *last_messages: Command) -> None:
        self._closing.set()
        self._session.close(*last_messages)

    @property
    def hung_s(self) -> float | None:
        """How long a step of the engine may take before the port is given up: our own limit, or else the engine's."""
        if self.config.hung_s is not None:
            return self.config.hung_s
        return None if self.engine.ready is None else self.engine.ready.hung_s

    def loss(self) -> TransferError:
        return TransferError(f"the process at the other end of a port {self._reason}")

    # -- what is heard, in the threads that read and keep time ---------------------------------------------------------

    def _deliver(self, report: Report | None) -> None:
        if report is None:
            self._disconnected()
            return
        if isinstance(report, BeatMessage):
            age_s = report.step_age_s or 0.0
            with self.lock:
                self.engine.beat(age_s)
            self._check_step(age_s)
        elif not isinstance(report, Connected):
            with self.lock:
                if not self.engine.take(report):
                    return
        self._tell(report)

    def _lose(self, reason: str) -> None:
        """Give the engine up. Reports before the next Ready are about requests that were given up too."""
        with self.lock:
            if not self.engine.is_live:
                return
            self.engine.lose()
            self._reason = reason
            self._session.forget()
        self._wake()

    def _end(self) -> None:
        self.is_gone = True
        self._wake()

    def _renew(self) -> None:
        with self.lock:
            self.engine.num_renewals += 1
            self.post(messages.Renew(self.engine.num_renewals))

    def _silent(self, is_silent: bool) -> None:
        if is_silent:
            self._lose(f"was silent for {self.config.silent_s:g} s")
        else:
            with self.lock:  # an answer to an earlier renewal may be about to make it live
                if not self.engine.is_live and self.engine.ready is not None:
                    self._renew()

    def _check_step(self, age_s: float) -> None:
        """Give up an engine whose step takes too long, for good if it takes `return_s` more. It is back when the step
        ends."""
        limit_s = self.hung_s
        if limit_s is None or age_s <= limit_s:
            return
        if self.engine.is_live:
            self._lose(f"hangs: its step has not ended for {age_s:.1f} s, and {limit_s:g} s are its limit")
            self._renew()
        elif age_s > limit_s + self.config.return_s and not self.is_gone:
            self._end()

    def _disconnected(self) -> None:
        """Note that nothing more will come over this connection."""
        with self.lock:
            session = self._session
        reason = str(session.loss)
        self._lose(reason)
        if self.dial is not None and session.broke and self.engine.ready is not None and not self._closing.is_set():
            with contextlib.suppress(Overloaded):
                start(threading.Thread(target=self._redial, args=(self.dial,), name="pdinfer-redial", daemon=True))
                return
        self._reason = self._reason or reason
        self._end()

    def _redial(self, dial: Callable[[], MessageStream]) -> None:
        """Make another connection."""
        pause_s, left_s = REDIAL_S[0], self.config.return_s
        while left_s > 0 and not self._closing.wait(min(pause_s, left_s)):
            left_s, pause_s = left_s - pause_s, min(2 * pause_s, REDIAL_S[1])
            try:
                connection = dial()
                self._session.close()
                self.engine.num_renewals = 0
                self.meet(connection)
            except Exception as error:  # noqa: BLE001 - whatever a host's own way to connect raises
                log.info("the process at the other end of a port cannot be reached: %s", error)
                continue
            if self._closing.is_set():
                self._session.close(messages.Close())
            return
        self._end()
