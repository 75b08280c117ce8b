"""Clients that make an engine in another process a port of a Pairing here.

`serve(engine, connection)` runs where the engine is, and `PrefillClient(connection)` or `DecodeClient(connection)`
stand for it where the Pairing is. A connection is anything with `send_bytes`, `recv_bytes` and `poll`, such as one end
of `multiprocessing.Pipe()`. Each process hosts its own loop, and KV never passes through here.

    client ── Connect, Submit, Cancel, Renew, Become, Close, Beat ──► serve          one message, one send_bytes
    client ◄── Ready, Connected, Computing, Stepped, Beat ─── serve

Neither end waits for the other. Messages leave in threads of their own (`pdinfer.remote.session`), which also notice
when a process is gone or stands still.

A session lasts as long as its connection. A client that hears from a lost engine again asks to renew the session, and
gets Ready when nothing runs any more of what it asked for before. So does one that asks the engine to become one of
the other role; a client of that role takes over the session."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic

import attrs

from pdinfer.checks import MAX_WAIT_S, typed
from pdinfer.config import RemoteConfig
from pdinfer.errors import TransferError
from pdinfer.inbox import Inbox
from pdinfer.kv.channel.wire import PackedGrant
from pdinfer.kv.prefix import KeyScheme
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import new_lock
from pdinfer.remote import messages
from pdinfer.remote.line import KnownEngine, Line
from pdinfer.remote.messages import AnyLoad, BeatMessage, Connected, PackedRequest, Ready, Report, Stepped
from pdinfer.remote.session import MessageStream
from pdinfer.stats import DecodeLoad, PeerStats, PrefillLoad
from pdinfer.types import Event, PageGrant, PeerAddress, Request

READY_S = 300.0
"""How long a client waits for its engine to say that it is ready: loading a model takes a while."""
CONNECT_MARGIN_S = 5.0


class EngineClient(OfOneProcess, Generic[AnyLoad]):
    """What both clients share. Methods other than `step`, `recover` and `close` may be called from any thread. Only
    `connect` waits for the engine's process, and it delays no other method.

    `is_draining` says that the engine has asked to be let go of.

    The threads of the `Line` put events into `_inbox`. The thread that steps learns of a loss by its number:
    `_num_losses_seen` are those after which the host was told that the engine is back."""

    role: ClassVar[str]

    @typed
    def __init__(
        self,
        connection: MessageStream | Callable[[], MessageStream],
        *,
        timeout_s: float = READY_S,
        config: RemoteConfig | None = None,
    ) -> None:
        self._begin(config or RemoteConfig(), connection if callable(connection) else None)
        self._line.meet(connection() if callable(connection) else connection)
        try:
            ready = self._await_ready(timeout_s)
            if ready.load.of_role(self.role) is None:
                served = ready.limits.name
                raise TransferError(f"a {self.role} engine was asked for, but the other end serves a {served} engine")
        except BaseException:
            self.close()
            raise

    def _begin(self, config: RemoteConfig, dial: Callable[[], MessageStream] | None, *, follows: bool = False) -> None:
        """Know of no engine yet."""
        self._inbox: Inbox[list[Event]] = Inbox()
        self._answered = threading.Condition(new_lock())
        self._answers: dict[PeerAddress, Connected | None] = {}
        self._line: Line[AnyLoad] = Line(self.role, config, dial, self._hear, self._wake, follows=follows)
        self._engine: KnownEngine[AnyLoad] = self._line.engine
        self._num_losses_seen = 0
        self.is_draining = False
        self._successor: PrefillClient | DecodeClient | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address}{', lost' if self._is_lost else ''})"

    @property
    def hung_s(self) -> float | None:
        """How long a step of the engine may take before the port is given up: our own limit, or else the engine's."""
        return self._line.hung_s

    @typed
    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Make the engine connect its channel to a peer, and raise what that raised. With `timeout_s` 0, return at
        once."""
        if timeout_s <= 0:
            self._line.post(messages.ConnectMessage(peer, timeout_s))
            return
        timeout_s = min(timeout_s, MAX_WAIT_S)
        waits_s = timeout_s + CONNECT_MARGIN_S
        with self._answered:
            self._answers[peer] = None
            self._line.post(messages.ConnectMessage(peer, timeout_s))
            self._answered.wait_for(lambda: self._answers.get(peer) or not self._engine.is_live, waits_s)
            answer = self._answers.pop(peer, None)
        if answer is None:
            raise self._no_answer(waits_s) if self._engine.is_live else self._line.loss()
        answer.check()

    @typed
    def disconnect(self, peer: PeerAddress) -> None:
        self._line.post(messages.Disconnect(peer))

    @typed
    def cancel(self, request_id: str) -> None:
        self._line.post(messages.CancelMessage(request_id))

    def step(self) -> list[Event]:
        """Return the engine's events since the last call. Raises TransferError when its process is gone, silent or
        hangs."""
        events = [event for report in self._inbox.take() for event in report]
        if self._is_lost and not events:
            raise self._line.loss()
        return events

    @property
    def _is_lost(self) -> bool:
        return self._engine.num_losses != self._num_losses_seen

    def recover(self) -> bool:
        """Return whether a lost engine is back, without its requests. Raises TransferError when it never will be."""
        if self._line.is_gone:
            raise self._line.loss()
        num_losses = self._engine.num_losses  # first: it may be lost again in the next line
        if self._engine.is_live:
            self._inbox.take()  # events of requests that were given up with it
            self._num_losses_seen = num_losses
        return not self._is_lost

    @typed
    def notify(self, listener: Callable[[], None]) -> None:
        self._inbox.listen(listener)

    @typed
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would."""
        return self._is_lost or self._inbox.wait(timeout_s)

    def close(self) -> None:
        """Make the engine's process close it, without waiting for that. A second call does nothing."""
        if self._successor is not None:
            self._successor.close()
            return
        self._line.close(messages.Close())

    @typed
    def check_role(self, role: str) -> tuple[PeerAddress, ...]:
        """Return the addresses of the ports that take this role only together: the leaders of the engine's ranks. Raise
        ConfigError when it cannot take it."""
        return self._engine.check_role(role)

    @typed
    def become(self, role: str) -> PrefillClient | DecodeClient | None:
        """Make the engine change its role, and return the client of what it has become, None until it says so: ask
        again. This client is of no use any more. Raise ConfigError as `check_role` does, and TransferError when the
        process is lost."""
        successor = self._successor
        if successor is None:
            self.check_role(role)
            kind = self._other()
            successor = kind.__new__(kind)
            successor._follow(self)  # noqa: SLF001 - another of us
            self._successor = successor
            self._line.post(messages.Become(role))
        return successor if successor._has_come() else None  # noqa: SLF001 - another of us

    @abstractmethod
    def _other(self) -> type[PrefillClient] | type[DecodeClient]:
        """Return what clients of the other role are."""

    def _follow(self, before: EngineClient[Any]) -> None:
        """Hear what comes over the session of a client whose engine will be ours."""
        self._begin(before._line.config, before._line.dial, follows=True)
        self._line.follow(before._line)

    def _has_come(self) -> bool:
        if (ready := self._engine.ready) is not None:
            self._know(ready)
        elif self._line.is_gone:
            raise self._line.loss()
        return ready is not None

    def _know(self, ready: Ready) -> None:
        """Note what no engine changes."""
        self.address, self.limits = ready.address, ready.limits
        self.addresses = ready.addresses or (ready.address,)

    @property
    def key_scheme(self) -> KeyScheme | None:
        return None if self._engine.ready is None else self._engine.ready.key_scheme

    @property
    def computing(self) -> frozenset[str]:
        return self._engine.computing

    @typed
    def count_known(self, keys: Sequence[bytes]) -> int:
        return self._engine.pages.count_known(keys)

    def peers(self) -> tuple[PeerStats, ...]:
        return self._engine.peers

    def load(self) -> AnyLoad:
        with self._line.lock:
            return attrs.evolve(self._engine.load_now(), step_age_s=self._engine.step_age_s)

    def brief_load(self) -> AnyLoad:
        with self._line.lock:
            return self._engine.brief_load()

    # -- what is heard, in the threads of the session ------------------------------------------------------------------

    def _hear(self, report: Report) -> None:
        """Take a report. If the host does not step, nothing but events collects."""
        if isinstance(report, BeatMessage):
            self.is_draining = report.is_draining is True
        elif isinstance(report, Connected):
            with self._answered:
                if report.peer in self._answers:  # otherwise it comes too late
                    self._answers[report.peer] = report
                self._answered.notify_all()
        elif isinstance(report, Ready) and not self._is_lost:  # the first one
            with self._answered:
                self._answered.notify_all()
        elif isinstance(report, Stepped) and (events := report.events):
            self._inbox.put(events)
        else:
            self._inbox.wake()

    def _wake(self) -> None:
        """Wake the host, and whoever waits for an answer."""
        with self._answered:
            self._answered.notify_all()
        self._inbox.wake()

    def _no_answer(self, timeout_s: float) -> TransferError:
        return TransferError(f"the process at the other end of a port did not answer within {timeout_s:g} s")

    def _await_ready(self, timeout_s: float) -> Ready:
        with self._answered:
            self._answered.wait_for(lambda: self._engine.ready or self._line.is_gone, min(timeout_s, MAX_WAIT_S))
        if (ready := self._engine.ready) is None:
            raise self._line.loss() if self._line.is_gone else self._no_answer(timeout_s)
        self._know(ready)
        return ready


class PrefillClient(EngineClient[PrefillLoad]):
    """A prefill engine behind a connection: a `PrefillPort`. The constructor waits until the engine is ready, and
    raises TransferError when its process goes away, takes longer than `timeout_s`, or serves a decode engine.

    `connection` may be a function that makes one, such as `partial(multiprocessing.connection.Client, address,
    authkey=key)`. It is called again when a connection breaks, for up to `config.return_s`."""

    role = "prefill"

    @typed
    def submit(self, request: Request, grant: PageGrant) -> None:
        message = messages.SubmitPrefillMessage(PackedRequest.of(request), PackedGrant.of(grant))
        self._line.submit(message, len(request.prompt) + len(request.output))

    def _other(self) -> type[DecodeClient]:
        return DecodeClient


class DecodeClient(EngineClient[DecodeLoad]):
    """A decode engine behind a connection: a `DecodePort`. In all else like `PrefillClient`."""

    role = "decode"

    @typed
    def submit(self, request: Request, *, writers: Sequence[PeerAddress]) -> None:
        message = messages.SubmitDecodeMessage(PackedRequest.of(request), tuple(writers))
        self._line.submit(message, len(request.prompt) + len(request.output))

    @typed
    def change_writers(self, request_id: str, *, writers: Sequence[PeerAddress]) -> None:
        self._line.post(messages.ChangeWritersMessage(request_id, tuple(writers)))

    def _other(self) -> type[PrefillClient]:
        return PrefillClient
