"""An engine in another process, as a port of a Pairing here.

`serve(engine, connection)` runs where the engine is; `PrefillClient(connection)` or `DecodeClient(connection)` stand
for it where the Pairing is. A connection is anything with `send_bytes`, `recv_bytes` and `poll`, such as one end of
`multiprocessing.Pipe()`; each process hosts its own loop, and KV never passes through here.

    client ── Connect, Submit, Cancel, Close ──► serve          one message, one send_bytes
    client ◄── Ready, Connected, Stepped ─────── serve
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import attrs

from pdinfer import messages
from pdinfer.decode import DecodeEngine
from pdinfer.errors import PDInferError, TransferError
from pdinfer.inbox import Inbox
from pdinfer.messages import (
    Cancel,
    ChangeWriters,
    Close,
    Command,
    Connect,
    Connected,
    Load,
    PackedGrant,
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
POLL_S = 0.2
REPORT_S = 0.02
"""How old a busy engine's load may become where no event carries a newer one."""
IDLE_S = 0.1
"""How long a served engine sleeps at most, and so how late a deadline of a request that is not running can be."""
CONNECT_MARGIN_S = 5.0

_log = logging.getLogger("pdinfer")


class Connection(Protocol):
    """Whole messages over some byte stream; `recv_bytes` raises EOFError or OSError when the other end is gone."""

    def send_bytes(self, buf: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def poll(self, timeout: float, /) -> bool: ...

    def close(self) -> None: ...


M = TypeVar("M")


class _Mailman(Generic[M]):
    """Reads a connection in a thread of its own and puts the messages into a box, None once the other end is gone."""

    def __init__(self, connection: Connection, decode: Callable[[bytes], M], inbox: Inbox[M | None]) -> None:
        self.connection = connection
        self._decode = decode
        self._inbox = inbox
        self._stopping = False
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="pdinfer-remote", daemon=True)
        self._thread.start()

    def send(self, message: Command | Report) -> None:
        """Raises TransferError when the other end is gone."""
        try:
            with self._sending:
                self.connection.send_bytes(messages.encode(message))
        except (OSError, EOFError, ValueError) as error:
            raise TransferError(f"the process at the other end of a port is gone: {error}") from error

    def _read(self) -> None:
        try:
            while not self._stopping:
                if self.connection.poll(POLL_S):
                    self._inbox.put(self._decode(self.connection.recv_bytes()))
        except (OSError, EOFError):
            pass
        except TransferError as error:
            _log.error("a port is given up: %s", error)
        except Exception:  # noqa: BLE001 - whatever a connection raises, nobody reads it any more
            _log.exception("reading a connection failed; the port is given up")
        finally:
            self._inbox.put(None)

    def close(self) -> None:
        self._stopping = True
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * POLL_S)
        self.connection.close()


def serve(engine: PrefillEngine | DecodeEngine, connection: Connection) -> None:
    """Hosts `engine` for the client at the other end: returns, the engine closed, when that one closes or is gone."""
    inbox: Inbox[Command | None] = Inbox()
    engine.notify(inbox.wake)
    mailman = _Mailman(connection, messages.decode_command, inbox)
    num_seen, reported, reported_at = 0, None, 0.0
    try:
        mailman.send(Ready(engine.address, engine.limits, Load.of(engine)))
        while True:
            commands = inbox.take()
            for command in commands:
                if command is None or isinstance(command, Close):
                    return
                num_seen += _obey(engine, command, mailman)
            events = engine.step()
            busy = engine.wait(0.0)
            report = _stepped(engine, events, num_seen)
            news = events or commands
            if news or (report.load != reported and (not busy or time.monotonic() > reported_at + REPORT_S)):
                mailman.send(report)
                reported, reported_at = report.load, time.monotonic()
            if not busy:
                inbox.wait(IDLE_S)
    except TransferError as error:
        _log.info("a served engine stops: %s", error)
    finally:
        engine.close()
        mailman.close()


def _obey(engine: PrefillEngine | DecodeEngine, command: Command, mailman: _Mailman[Command]) -> int:
    """Carries out a command; returns how many submits it was."""
    if isinstance(command, Connect):
        try:
            engine.connect(command.peer, timeout_s=command.timeout_s)
            mailman.send(Connected(command.peer))
        except PDInferError as error:
            mailman.send(Connected(command.peer, error, getattr(error, "fields", ())))
    elif isinstance(command, Cancel):
        engine.cancel(command.request_id)
    elif isinstance(command, ChangeWriters) and isinstance(engine, DecodeEngine):
        engine.change_writers(command.request_id, writers=command.writers)
    elif isinstance(command, SubmitPrefill) and isinstance(engine, PrefillEngine):
        engine.submit(command.request.unpack(), command.grant.unpack())
        return 1
    elif isinstance(command, SubmitDecode) and isinstance(engine, DecodeEngine):
        engine.submit(command.request.unpack(), writers=command.writers)
        return 1
    else:
        _log.error("a %s does not understand %s", type(engine).__name__, type(command).__name__)
    return 0


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


class _Client:
    """What both clients share. Methods may be called from any thread but `step`, `connect` and `close`."""

    role: ClassVar[str]

    def __init__(self, connection: Connection, *, timeout_s: float = READY_S) -> None:
        self._inbox: Inbox[Report | None] = Inbox()
        self._mailman = _Mailman(connection, messages.decode_report, self._inbox)
        self._events: list[Event] = []
        self._lost = False
        self._closed = False
        self._num_submitted = 0
        self._unseen: list[tuple[int, int]] = []
        try:
            ready = self._await(Ready, timeout_s)
            if getattr(ready.load, self.role) is None:
                raise TransferError(f"a {self.role} engine was asked for, the other end serves a {ready.limits.name}")
        except BaseException:
            self._mailman.close()
            raise
        self.address = ready.address
        self.limits = ready.limits
        self._load = ready.load

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Has the engine connect its channel; raises what that raised."""
        self._mailman.send(Connect(peer, timeout_s))
        # an answer that came too late for an earlier call is not this one's
        answer = self._await(Connected, timeout_s + CONNECT_MARGIN_S, lambda connected: connected.peer == peer)
        if answer.error is not None:
            if answer.fields:
                answer.error.fields = answer.fields  # type: ignore[attr-defined]
            raise answer.error

    def cancel(self, request_id: str) -> None:
        self._post(Cancel(request_id))

    def step(self) -> list[Event]:
        """What the engine said since the last call. TransferError when its process is gone."""
        for report in self._inbox.take():
            self._read(report)
        events, self._events = self._events, []
        if self._lost and not events:
            raise TransferError("the process at the other end of a port is gone")
        return events

    def notify(self, listener: Callable[[], None]) -> None:
        self._inbox.listen(listener)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a step would give something."""
        return bool(self._events) or self._lost or self._inbox.wait(timeout_s)

    def close(self) -> None:
        """Tells the engine's process to close it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self._lost:
            try:
                self._mailman.send(Close())
            except TransferError as error:
                _log.info("closing a port: %s", error)
        self._mailman.close()

    def _send_submit(self, message: Command, num_tokens: int) -> None:
        self._num_submitted += 1
        self._unseen.append((self._num_submitted, num_tokens))
        self._post(message)

    def _post(self, message: Command) -> None:
        """Sends; that the other end is gone shows in the next step."""
        try:
            self._mailman.send(message)
        except TransferError:
            self._lost = True
            self._inbox.wake()

    def _unseen_load(self) -> tuple[int, int]:
        """(requests, tokens) submitted and not yet part of the engine's own numbers."""
        unseen = list(self._unseen)
        return len(unseen), sum(tokens for _, tokens in unseen)

    def _read(self, report: Report | None) -> None:
        if report is None:
            self._lost = True
        elif isinstance(report, Stepped):
            self._load = report.load
            self._unseen = [(number, tokens) for number, tokens in self._unseen if number > report.num_seen]
            self._events += [Granted(grant=g.unpack(), request=r.unpack()) for g, r in report.granted]
            self._events += report.refused
            self._events += report.tokens

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
            if self._lost or not woken:
                reason = "is gone" if self._lost else f"did not answer within {timeout_s:g} s"
                raise TransferError(f"the process at the other end of a port {reason}")


class PrefillClient(_Client):
    """A prefill engine behind a connection: a `PrefillPort`. Waits until the engine is ready; TransferError when its
    process goes away, takes longer than `timeout_s` or serves a decode engine."""

    role = "prefill"

    def submit(self, request: Request, grant: PageGrant) -> None:
        message = SubmitPrefill(PackedRequest.of(request), PackedGrant.of(grant))
        self._send_submit(message, len(request.prompt) + len(request.output))

    def load(self) -> PrefillLoad:
        load = self._load.prefill
        assert load is not None
        requests, tokens = self._unseen_load()
        return attrs.evolve(
            load,
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
        self._post(ChangeWriters(request_id, tuple(writers)))

    def load(self) -> DecodeLoad:
        load = self._load.decode
        assert load is not None
        requests, tokens = self._unseen_load()
        return attrs.evolve(
            load,
            num_waiting_requests=load.num_waiting_requests + requests,
            num_waiting_tokens=load.num_waiting_tokens + tokens,
        )
