"""Hosts an engine behind a connection, in its own process, and decides what to do without a client.

A silent client has stopped or cannot be reached, and may come back. What it asked for goes on, and waits for it on the
connection. When the connection ends, the client can come back only over another one, in a new session, and what ran in
the old session is cancelled. In both cases it has `RemoteConfig.return_s` to come back.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from typing import Protocol, runtime_checkable

import attrs
from msgspec import UNSET

from pdinfer.checks import clip, typed
from pdinfer.config import RemoteConfig
from pdinfer.config.options import hung_after_s
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.engine.roles import become, roles_of
from pdinfer.errors import PDInferError, RequestError, TransferError
from pdinfer.inbox import Inbox
from pdinfer.kv.channel.channel import turn_away
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.silence import SESSIONS, SilenceWatch
from pdinfer.remote import messages, orphan
from pdinfer.remote.directory import Directory
from pdinfer.remote.directory.announcing import Announcer, announced_at
from pdinfer.remote.messages import Command, LoadMessage, Ready, Stepped
from pdinfer.remote.news import PageNews
from pdinfer.remote.session import MessageStream, Session
from pdinfer.stats import EngineLoad, PeerStats
from pdinfer.types import Event, PeerAddress, Refused

REPORT_S = 0.02
"""How old the reported load of a busy engine may get while no event carries a newer one."""
IDLE_S = 0.1
"""How long a served engine sleeps at most. The deadline of a request that is not running may be this late."""
ACCEPT_AGAIN_S = 1.0

_log = logging.getLogger("pdinfer")


@runtime_checkable
class SessionListener(Protocol):
    """The place where clients connect, such as a `multiprocessing.connection.Listener` with an `authkey`."""

    def accept(self) -> MessageStream: ...


@typed
def serve(
    engine: PrefillEngine | DecodeEngine,
    connection: MessageStream | SessionListener | None,
    *,
    config: RemoteConfig | None = None,
    directory: Directory | None = None,
    advertise: str | None = None,
    drain: threading.Event | None = None,
) -> None:
    """Host `engine` for the client at the other end. Return, with the engine closed, when the client closes it or is
    gone for good. A new engine waits for its first client without a limit.

    A client that falls silent finds what it asked for when it comes back within `config.return_s`. Where `connection`
    is a listener, a client whose connection broke has the same time to make another one, but what it asked for is
    cancelled.

    A step that never ends does not keep the process alive: when the client is gone for good and the same step still
    runs `config.exit_s` later, the process exits with status 1 if `serve` runs in its main thread.

    With a `directory` the engine announces itself there while it takes clients, at `advertise` ("host:port") or else
    where the listener says that it listens. Once `drain` is set, by a handler of SIGTERM say, the announcement is
    withdrawn and the client is told, and `serve` returns when no client has the engine any more.

    When an engine runs as ranks, serve every rank, with `connection` None on those that no client talks to. All of them
    return when one does, and raise RankLost when one is lost.

    Raises ConfigError when there is a `directory` and no listener, no address to advertise, or no way to announce.
    """
    announcer = None
    if directory is not None:
        announcer = Announcer(directory, engine, announced_at(connection, advertise))
    if connection is None:
        with engine:
            while not engine.closed:
                engine.step()
                engine.wait(IDLE_S)
        return
    host = _Host(engine, connection, config or RemoteConfig(), drain or threading.Event())
    if announcer is not None:
        announcer.start(host)
    try:
        host.run()
    except TransferError as error:
        _log.error("a served engine stops: %s", error)
    finally:
        host.dismissed = True
        if announcer is not None:
            announcer.close()
        host.engine.close()
        host.close()


class _Host(OfOneProcess):
    """The loop around a served engine. `renewal` is the number of the session's renewal that has to be answered, 0 for
    a new session, and None while commands are obeyed. `dismissed` means that nobody wants the engine any more."""

    def __init__(
        self,
        engine: PrefillEngine | DecodeEngine,
        connection: MessageStream | SessionListener,
        config: RemoteConfig,
        drain: threading.Event,
    ) -> None:
        self.engine = engine
        self.config = config
        self.drain = drain
        self.inbox: Inbox[Command | MessageStream | None] = Inbox()
        self.renewal: int | None = 0
        self.has_begun = False
        self.num_seen = 0
        self.refused: list[Refused] = []
        self.num_steps = 0
        self.pages = PageNews(engine.pool) if engine.key_scheme is not None else None
        self.stepped_at = time.monotonic()
        self.reported: tuple[EngineLoad, list[PeerStats]] | None = None
        self.reported_at = 0.0
        self.dismissed = False
        self.role = engine.role
        self.links: dict[PeerAddress, threading.Thread] = {}
        self.ended = threading.Event()
        self.exits = threading.current_thread() is threading.main_thread()
        self.is_armed = self.exits and orphan.arm()
        self.session: Session[Command] | None = None
        self.listener: SessionListener | None = None
        self.listen()
        if isinstance(connection, SessionListener):
            self.listener = connection
            _start(self.accept)
        else:
            self.meet(connection)
        _start(self.watch)

    def listen(self) -> None:
        """Hear of news of the engine, and of what it is about to compute."""
        self.engine.notify(self.inbox.wake)
        self.engine.tell_computing(self.tell_computing)

    def close(self) -> None:
        """End the connection and our threads. The thread that accepts ends with the next connection."""
        self.ended.set()
        if self.session is not None:
            self.session.close()

    # -- the client -------------------------------------------------------------------------------------------------

    def meet(self, connection: MessageStream) -> None:
        """Begin a session with the client at the other end of a new connection."""
        if self.session is not None:
            self.session.close()
        self.session = Session(
            connection,
            messages.decode_command,
            self.deliver,
            self.beat,
            silent_s=self.config.silent_s,
            return_s=self.config.return_s,
        )

    def accept(self) -> None:
        while not self.ended.is_set():
            try:
                connection = self.listener.accept()  # type: ignore[union-attr]
            except (OSError, EOFError, AuthenticationError) as error:
                _log.warning("a connection to a served engine was not made: %s", error)
                self.ended.wait(ACCEPT_AGAIN_S)
                continue
            if self.ended.is_set():
                connection.close()
            self.inbox.put(connection)
            return

    def deliver(self, command: Command | None) -> None:
        if isinstance(command, messages.Close) or (command is None and self.listener is None):
            self.dismissed = True  # so that `watch` sees it even if the step hangs
        if not isinstance(command, messages.BeatMessage):
            self.inbox.put(command)

    def beat(self) -> messages.BeatMessage:
        return messages.BeatMessage(time.monotonic() - self.stepped_at, True if self.drain.is_set() else UNSET)

    @property
    def is_taken(self) -> bool:
        """Whether a client has the engine."""
        return self.session is not None and self.session.loss is None

    def watch(self) -> None:
        """Count how long there has been no client, and how long a step has gone on since nobody wants the engine. Time
        is counted in ticks, like silence, so that the time in which this process was stopped does not count."""
        away, stuck = (SilenceWatch(SESSIONS, time.monotonic()) for _ in range(2))
        num_steps = 0
        while not self.ended.wait(SESSIONS.look_s):
            if self.is_armed:
                orphan.disarm()
            now = time.monotonic()
            is_away = self.listener is not None and self.session is not None and self.session.loss is not None
            away_s = away.look(now, heard_ago_s=math.inf if is_away else 0.0)
            if away_s > self.config.return_s and not self.dismissed:
                self.dismissed = True
                self.inbox.wake()
            is_stuck = self.dismissed and num_steps == self.num_steps
            num_steps = self.num_steps
            if (stuck_s := stuck.look(now, heard_ago_s=math.inf if is_stuck else 0.0)) > self.config.exit_s:
                what = "the process of a served engine exits" if self.exits else "a served engine hangs"
                _log.critical("%s: its client is gone, and a step has not ended in the %.0f s since", what, stuck_s)
                if self.exits:
                    os._exit(1)
                return

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until nobody wants the engine any more."""
        while True:
            self.begin()
            items = self.inbox.take()
            for item in items:
                if isinstance(item, messages.Close):
                    _log.info("a served engine stops: its client has closed it")
                    return
                self.obey(item)
            if self.dismissed:
                _log.info("a served engine stops: its client %s", self.session.loss if self.session else "never came")
                return
            if self.drain.is_set() and not self.is_taken:
                _log.info("a served engine stops: it was to be drained, and no client has it")
                return
            if self.engine.closed:
                _log.info("a served engine stops: it was closed on another of its ranks")
                return
            events = [*self.refused, *self.engine.step()]
            self.refused.clear()
            self.num_steps += 1
            self.stepped_at = time.monotonic()
            busy = self.engine.wait(0.0)
            if self.renewal is None:
                self.report(events, urgent=bool(events or items), busy=busy)
            if not busy:
                self.inbox.wait(IDLE_S)

    def begin(self) -> None:
        """Send Ready for a session that is new or renewed, once nothing runs for the client: its ids may come again."""
        if self.renewal is None:
            return
        engine = self.engine
        if self.has_begun:
            for request_id in engine.request_ids:
                engine.cancel(request_id)
        if self.session is None or self.session.loss is not None or (self.has_begun and engine.num_unfinished):
            return
        if self.role != engine.role:
            engine = self.engine = become(engine, self.role) or engine
            self.listen()
        hung_s = hung_after_s(engine.longest_warm_up_s) if self.config.hung_s is None else self.config.hung_s
        self.session.post(
            Ready(
                engine.address,
                engine.limits,
                LoadMessage.of(engine),
                engine.addresses,
                messages.VERSION,
                messages.MINOR,
                session=self.renewal,
                hung_s=hung_s,
                key_scheme=engine.key_scheme,
                pages=None if self.pages is None else self.pages.all(),
                roles=roles_of(engine),
            )
        )
        self.renewal, self.has_begun, self.num_seen = None, True, 0

    def obey(self, item: Command | MessageStream | None) -> None:
        if item is None:
            self.renewal = 0
            if self.listener is not None:
                _log.warning("the client of a served engine %s; it may come back", self.session and self.session.loss)
                _start(self.accept)
        elif isinstance(item, messages.Renew):
            self.renewal = item.session
        elif isinstance(item, messages.Become):
            if item.role in roles_of(self.engine):
                self.role, self.renewal = item.role, 0
            else:
                _log.error("a %s engine was asked to become %s, which it cannot", self.engine.role, clip(item.role))
        elif not isinstance(item, Command):
            self.meet(item)
        elif self.renewal is None:
            self.act(item)

    def act(self, command: Command) -> None:
        """Act on a command that was sent after Ready."""
        engine = self.engine
        if isinstance(command, messages.ConnectMessage):
            self.about(command.peer, self.connect, command, self.session)
        elif isinstance(command, messages.Disconnect):
            self.about(command.peer, engine.disconnect, command.peer)
        elif isinstance(command, messages.CancelMessage):
            engine.cancel(command.request_id)
        elif isinstance(command, messages.ChangeWritersMessage) and isinstance(engine, DecodeEngine):
            engine.change_writers(command.request_id, writers=command.writers)
        elif isinstance(command, messages.SubmitPrefillMessage) and isinstance(engine, PrefillEngine):
            self.num_seen += 1
            self.submit_prefill(engine, command)
        elif isinstance(command, messages.SubmitDecodeMessage) and isinstance(engine, DecodeEngine):
            self.num_seen += 1
            self.submit_decode(engine, command)
        else:
            _log.error("a %s does not understand %s", type(engine).__name__, type(command).__name__)

    def submit_prefill(self, engine: PrefillEngine, command: messages.SubmitPrefillMessage) -> None:
        """Submit a prompt, or end its room when it requires what this engine does not know."""
        grant = command.grant.unpack()
        try:
            request = command.request.unpack()
        except RequestError as error:
            turn_away(engine.channel, grant, error)
        else:
            engine.submit(request, grant)

    def submit_decode(self, engine: DecodeEngine, command: messages.SubmitDecodeMessage) -> None:
        """Submit a request, or refuse it when it requires what this engine does not know."""
        try:
            request = command.request.unpack()
        except RequestError as error:
            self.refused.append(Refused(request_id=command.request.request.request_id or "", error=error))
        else:
            engine.submit(request, writers=command.writers)

    def about(self, peer: PeerAddress, work: Callable[..., None], *arguments: object) -> None:
        """Do work about a peer in a thread of its own, since a peer that does not answer must not delay the steps. Work
        about one peer is done in order, since a link that is closed before it is opened would stay."""
        self.links = {other: thread for other, thread in self.links.items() if thread.is_alive()}
        before = self.links.get(peer)

        def work_in_turn() -> None:
            if before is not None:
                before.join()
            work(*arguments)

        self.links[peer] = _start(work_in_turn)

    def connect(self, command: messages.ConnectMessage, session: Session[Command]) -> None:
        """Connect to a peer, and answer in any case."""
        error: PDInferError | None = None
        try:
            self.engine.connect(command.peer, timeout_s=command.timeout_s)
        except PDInferError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001 - the client waits for an answer, whatever it is
            _log.exception("connecting to a peer failed")
            error = TransferError(f"connecting failed: {type(problem).__name__}")
        session.post(messages.Connected(command.peer, error, getattr(error, "fields", ())))

    def tell_computing(self, request_ids: frozenset[str]) -> None:
        """Tell the client, before a step that may end this process, of which requests it computes rows."""
        if self.renewal is None and self.session is not None:
            self.session.tell(messages.Computing(tuple(sorted(request_ids))))

    def report(self, events: Sequence[Event], *, urgent: bool, busy: bool) -> None:
        """Report the events of a step or, after a step without any, a new load now and then."""
        assert self.session is not None
        peers = [attrs.evolve(peer, step_age_s=None) for peer in self.engine.peers()]  # ages grow all the time
        load, now = (self.engine.brief_load(), peers), time.monotonic()
        is_news = load != self.reported and not self.session.is_behind
        if urgent or (is_news and (not busy or now > self.reported_at + REPORT_S)):
            report = Stepped.of(self.engine, events, self.num_seen)
            report.pages = None if self.pages is None else self.pages.take()
            self.session.post(report)
            self.reported, self.reported_at = load, now


def _start(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="pdinfer-served", daemon=True)
    thread.start()
    return thread
