"""An engine in another process, as a port of a Pairing here.

`serve(engine, connection)` runs where the engine is; `PrefillClient(connection)` or `DecodeClient(connection)` stand
for it where the Pairing is. A connection is anything with `send_bytes`, `recv_bytes` and `poll`, such as one end of
`multiprocessing.Pipe()`; each process hosts its own loop, and KV never passes through here.

    client ── Connect, Submit, Cancel, Close, Beat ──► serve          one message, one send_bytes
    client ◄── Ready, Connected, Stepped, Beat ─────── serve

Neither end waits for the other: messages leave in threads of their own (`pdinfer.mailman`), where it is also noticed
that a process is gone or stands still.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import attrs

from pdinfer import messages
from pdinfer.decode import DecodeEngine
from pdinfer.errors import PDInferError, TransferError
from pdinfer.forked import OfOneProcess
from pdinfer.inbox import Inbox
from pdinfer.kv.wire import PackedGrant
from pdinfer.locks import new_lock
from pdinfer.mailman import Connection, Mailman
from pdinfer.messages import (
    Beat,
    Cancel,
    ChangeWriters,
    Close,
    Command,
    Connect,
    Connected,
    Load,
    PackedRequest,
    Ready,
    Report,
    Stepped,
    SubmitDecode,
    SubmitPrefill,
)
from pdinfer.prefill import PrefillEngine
from pdinfer.types import (
    DecodeLoad,
    Event,
    Granted,
    PageGrant,
    PeerAddress,
    PrefillLoad,
    Refused,
    Request,
)

READY_S = 300.0
"""How long a client waits for its engine to say that it is ready: loading a model takes a while."""
REPORT_S = 0.02
"""How old a busy engine's load may become where no event carries a newer one."""
IDLE_S = 0.1
"""How long a served engine sleeps at most, and so how late a deadline of a request that is not running can be."""
CONNECT_MARGIN_S = 5.0

_log = logging.getLogger("pdinfer")

M = TypeVar("M")


def serve(engine: PrefillEngine | DecodeEngine, connection: Connection | None) -> None:
    """Hosts `engine` for the client at the other end: returns, the engine closed, when that one closes, is gone or was
    silent for SILENT_S. A process that wakes from a longer sleep finds itself given up and closes as well.

    Of an engine that runs as ranks every rank is served, those to which nobody talks with `connection` None. All return
    when one of them does, and raise RankLost when one is lost.
    """
    if connection is None:
        with engine:
            while not engine.closed:
                engine.step()
                engine.wait(IDLE_S)
        return
    host = _Host(engine, connection)
    try:
        host.run()
    except TransferError as error:
        _log.error("a served engine stops: %s", error)
    finally:
        engine.close()
        host.mailman.close()


class _Host(OfOneProcess):
    """The loop around a served engine."""

    def __init__(self, engine: PrefillEngine | DecodeEngine, connection: Connection) -> None:
        self.engine = engine
        self.inbox: Inbox[Command | None] = Inbox()
        self.num_seen = 0
        self.stepped_at = time.monotonic()
        self.reported: Load | None = None
        self.reported_at = 0.0
        engine.notify(self.inbox.wake)
        self.mailman = Mailman(connection, messages.decode_command, self.deliver, self.beat)

    def deliver(self, command: Command | None) -> None:
        if not isinstance(command, Beat):
            self.inbox.put(command)

    def beat(self) -> Beat:
        return Beat(time.monotonic() - self.stepped_at)

    def run(self) -> None:
        """Steps until the client is done with the engine or lost."""
        self.mailman.post(
            Ready(
                self.engine.address, self.engine.limits, Load.of(self.engine), self.engine.addresses, messages.VERSION
            )
        )
        while True:
            commands = self.inbox.take()
            for command in commands:
                if command is None or isinstance(command, Close):
                    _log.info("a served engine stops: its client %s", self.mailman.loss or "has closed it")
                    return
                self.obey(command)
            if self.engine.closed:
                _log.info("a served engine stops: it was closed on another of its ranks")
                return
            events = self.engine.step()
            self.stepped_at = time.monotonic()
            busy = self.engine.wait(0.0)
            self.report(events, urgent=bool(events or commands), busy=busy)
            if not busy:
                self.inbox.wait(IDLE_S)

    def obey(self, command: Command) -> None:
        engine = self.engine
        if isinstance(command, Connect):
            threading.Thread(target=self.connect, args=(command,), name="pdinfer-connect", daemon=True).start()
        elif isinstance(command, Cancel):
            engine.cancel(command.request_id)
        elif isinstance(command, ChangeWriters) and isinstance(engine, DecodeEngine):
            engine.change_writers(command.request_id, writers=command.writers)
        elif isinstance(command, SubmitPrefill) and isinstance(engine, PrefillEngine):
            engine.submit(command.request.unpack(), command.grant.unpack())
            self.num_seen += 1
        elif isinstance(command, SubmitDecode) and isinstance(engine, DecodeEngine):
            engine.submit(command.request.unpack(), writers=command.writers)
            self.num_seen += 1
        else:
            _log.error("a %s does not understand %s", type(engine).__name__, type(command).__name__)

    def connect(self, command: Connect) -> None:
        """In a thread of its own: a peer that does not answer must not hold up the steps."""
        error: PDInferError | None = None
        try:
            self.engine.connect(command.peer, timeout_s=command.timeout_s)
        except PDInferError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001 - the client waits for an answer, whatever it is
            _log.exception("connecting to a peer failed")
            error = TransferError(f"connecting failed: {type(problem).__name__}")
        self.mailman.post(Connected(command.peer, error, getattr(error, "fields", ())))

    def report(self, events: Sequence[Event], *, urgent: bool, busy: bool) -> None:
        """Tells what a step gave; of one that gave nothing the new load, now and then."""
        report = _stepped(self.engine, events, self.num_seen)
        now = time.monotonic()
        load = report.load.ageless()
        if urgent or (load != self.reported and (not busy or now > self.reported_at + REPORT_S)):
            self.mailman.post(report)
            self.reported, self.reported_at = load, now


def _stepped(engine: PrefillEngine | DecodeEngine, events: Sequence[Event], num_seen: int) -> Stepped:
    report = Stepped(num_seen, Load.of(engine))
    for event in events:
        if isinstance(event, Granted):
            report.granted.append((PackedGrant.of(event.grant), PackedRequest.of(event.request)))
        elif isinstance(event, Refused):
            report.refused.append(event)
        else:
            report.tokens.append(event)
    return report


class _Client(OfOneProcess):
    """What both clients share. Methods may be called from any thread but `step`, `connect` and `close`; none but
    `connect` waits for the engine's process."""

    role: ClassVar[str]

    def __init__(self, connection: Connection, *, timeout_s: float = READY_S) -> None:
        self._inbox: Inbox[Report | None] = Inbox()
        self._lock = new_lock()
        self._events: list[Event] = []
        self._lost = False
        self._num_submitted = self._num_seen = 0
        self._ready: Ready | None = None
        self._unseen: list[tuple[int, int]] = []
        self._load = Load()
        self._step_age_s, self._told_at = 0.0, time.monotonic()
        self._mailman = Mailman(connection, messages.decode_report, self._deliver)
        try:
            ready = self._await(Ready, timeout_s)
            if getattr(ready.load, self.role) is None:
                raise TransferError(f"a {self.role} engine was asked for, the other end serves a {ready.limits.name}")
        except BaseException:
            self._mailman.close(Close())
            raise
        self.address = ready.address
        self.limits = ready.limits
        self.addresses = ready.addresses or (ready.address,)

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Has the engine connect its channel; raises what that raised."""
        self._mailman.post(Connect(peer, timeout_s))
        # an answer that came too late for an earlier call is not this one's
        answer = self._await(Connected, timeout_s + CONNECT_MARGIN_S, lambda connected: connected.peer == peer)
        if answer.error is not None:
            if answer.fields:
                answer.error.fields = answer.fields  # type: ignore[attr-defined]
            raise answer.error

    def cancel(self, request_id: str) -> None:
        self._mailman.post(Cancel(request_id))

    def step(self) -> list[Event]:
        """What the engine said since the last call. TransferError when its process is lost."""
        for report in self._inbox.take():
            self._read(report)
        events, self._events = self._events, []
        if self._lost and not events:
            raise self._loss()
        return events

    def notify(self, listener: Callable[[], None]) -> None:
        self._inbox.listen(listener)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a step would give something."""
        return bool(self._events) or self._lost or self._inbox.wait(timeout_s)

    def close(self) -> None:
        """Tells the engine's process to close it, and does not wait until it has. A second call does nothing."""
        self._mailman.close(Close())

    def _send_submit(self, message: Command, num_tokens: int) -> None:
        with self._lock:  # numbered in the order in which they are sent
            self._num_submitted += 1
            self._unseen.append((self._num_submitted, num_tokens))
            self._mailman.post(message)

    def _seen(self) -> tuple[Load, int, int, float]:
        """The engine's own load, requests and tokens submitted that are not yet part of it, and its last step's age."""
        with self._lock:
            age_s = self._step_age_s + time.monotonic() - self._told_at
            return self._load, len(self._unseen), sum(tokens for _, tokens in self._unseen), age_s

    def _deliver(self, report: Report | None) -> None:
        """In the reading thread: loads are kept, only the newest, so that a host that does not step collects nothing
        but its events."""
        if isinstance(report, Beat):
            with self._lock:
                self._step_age_s, self._told_at = report.step_age_s or 0.0, time.monotonic()
            return
        if isinstance(report, Ready | Stepped):
            with self._lock:
                self._check(report)
                self._load = report.load
                self._unseen = [(number, tokens) for number, tokens in self._unseen if number > self._num_seen]
        if isinstance(report, Stepped) and not (report.granted or report.refused or report.tokens):
            self._inbox.wake()
        else:
            self._inbox.put(report)

    def _check(self, report: Ready | Stepped) -> None:
        """TransferError for what the engine that said Ready cannot say now: it is given up. Its load is what policies
        go by."""
        if isinstance(report, Ready):
            if self._ready is not None or report.address not in (report.addresses or (report.address,))[:1]:
                raise TransferError("it says who it is twice, or in two ways")
            if report.version != messages.VERSION:
                raise TransferError(f"it speaks version {report.version}, this end speaks {messages.VERSION}")
            self._ready = report
        ready, load = self._ready, getattr(report.load, self.role)
        if ready is None or (load is not None and load.address != ready.address):
            raise TransferError("it tells the load of another engine than it said it is")
        if isinstance(report, Ready):
            return
        if load is None:
            raise TransferError(f"it tells of no load of a {self.role} engine")
        if not self._num_seen <= report.num_seen <= self._num_submitted:
            raise TransferError(
                f"it has seen {report.num_seen} of {self._num_submitted} submits, {self._num_seen} before"
            )
        self._num_seen = report.num_seen
        for event in report.tokens:
            ids = [0 if event.token is None else event.token, *(token for token, _ in event.top_logprobs)]
            if max(ids) >= ready.limits.vocab_size:
                raise TransferError(f"token {max(ids)} is not one of a vocabulary of {ready.limits.vocab_size}")

    def _read(self, report: Report | None) -> None:
        if report is None:
            self._lost = True
        elif isinstance(report, Stepped):
            self._events += [Granted(grant=g.unpack(), request=r.unpack()) for g, r in report.granted]
            self._events += report.refused
            self._events += report.tokens

    def _loss(self) -> TransferError:
        return TransferError(f"the process at the other end of a port {self._mailman.loss}")

    def _await(self, kind: type[M], timeout_s: float, wanted: Callable[[M], bool] = lambda _: True) -> M:
        """The next report of that kind that is `wanted`; what else arrives meanwhile is kept for `step`."""
        end = time.monotonic() + timeout_s
        while True:
            woken = self._inbox.wait(max(0.0, end - time.monotonic()))
            found = None
            for report in self._inbox.take():
                if isinstance(report, kind) and wanted(report):
                    found = report
                else:
                    self._read(report)
            if found is not None:
                return found
            if self._lost:
                raise self._loss()
            if not woken:
                raise TransferError(f"the process at the other end of a port did not answer within {timeout_s:g} s")


class PrefillClient(_Client):
    """A prefill engine behind a connection: a `PrefillPort`. Waits until the engine is ready; TransferError when its
    process goes away, takes longer than `timeout_s` or serves a decode engine."""

    role = "prefill"

    def submit(self, request: Request, grant: PageGrant) -> None:
        message = SubmitPrefill(PackedRequest.of(request), PackedGrant.of(grant))
        self._send_submit(message, len(request.prompt) + len(request.output))

    def load(self) -> PrefillLoad:
        known, requests, tokens, step_age_s = self._seen()
        load = known.prefill
        assert load is not None
        return attrs.evolve(
            load,
            step_age_s=step_age_s,
            num_queued_requests=load.num_queued_requests + requests,
            num_queued_tokens=load.num_queued_tokens + tokens,
        )


class DecodeClient(_Client):
    """A decode engine behind a connection: a `DecodePort`. Otherwise as `PrefillClient`."""

    role = "decode"

    def submit(self, request: Request, *, writers: Sequence[PeerAddress]) -> None:
        message = SubmitDecode(PackedRequest.of(request), tuple(writers))
        self._send_submit(message, len(request.prompt) + len(request.output))

    def change_writers(self, request_id: str, *, writers: Sequence[PeerAddress]) -> None:
        self._mailman.post(ChangeWriters(request_id, tuple(writers)))

    def load(self) -> DecodeLoad:
        known, requests, tokens, step_age_s = self._seen()
        load = known.decode
        assert load is not None
        return attrs.evolve(
            load,
            step_age_s=step_age_s,
            num_waiting_requests=load.num_waiting_requests + requests,
            num_waiting_tokens=load.num_waiting_tokens + tokens,
        )
