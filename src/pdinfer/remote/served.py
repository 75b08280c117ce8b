"""Hosts an engine for its clients, in its own process, and decides what to do without a client.

A silent client has stopped or cannot be reached, and may come back. What it asked for goes on, and waits for it on the
connection. When the connection ends, the client can come back only over another one, in a new session, and what ran in
the old session is cancelled. In both cases it has `RemoteConfig.return_s` to come back."""

from __future__ import annotations

import math
import os
import threading
import time
from multiprocessing import AuthenticationError
from typing import Protocol, runtime_checkable

from msgspec import UNSET

from pdinfer.checks import clip, typed
from pdinfer.config import RemoteConfig
from pdinfer.config.options import hung_after_s
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.engine.roles import become, followed, roles_of, stay
from pdinfer.errors import ConfigError, Overloaded, TransferError
from pdinfer.inbox import Inbox
from pdinfer.log import log
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.silence import SESSIONS, SilenceWatch
from pdinfer.process.threads import start
from pdinfer.remote import messages, orphan
from pdinfer.remote.directory import Directory
from pdinfer.remote.directory.announcing import Announcer, announced_at
from pdinfer.remote.messages import Command, LoadMessage, Ready
from pdinfer.remote.served_client import ServedClient
from pdinfer.remote.session import MessageStream
from pdinfer.remote.shared_engine import SharedEngine, beside

IDLE_S = 0.1
"""How long a served engine sleeps at most. The deadline of a request that is not running may be this late."""
ACCEPT_AGAIN_S = 1.0


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
    max_clients: int = 8,
) -> None:
    """Host `engine` for the client at the other end. Return, with the engine closed, when the client closes it or is
    gone for good. A new engine waits for its first client without a limit.

    A client that falls silent finds what it asked for when it comes back within `config.return_s`. Where `connection`
    is a listener, a client whose connection broke has the same time to make another one, but what it asked for is
    cancelled.

    Through a listener up to `max_clients` share the engine, each with requests of its own; others wait for a place.
    The last one to close the engine closes it. One that changes its role (`Pairing.switch`) takes it from the others.

    A step that never ends keeps no process alive: when the client is gone for good and the step still runs
    `config.exit_s` later, the process exits with status 1 if `serve` runs in its main thread.

    With a `directory` the engine announces itself there while it takes clients, at `advertise` ("host:port") or else
    where the listener says that it listens. Once `drain` is set, by a handler of SIGTERM say, the announcement is
    withdrawn, clients are told, no other is let in, and `serve` returns when no client has the engine any more, nor
    another leader of its ranks: drain all of them.

    When an engine runs as ranks, serve every rank, with `connection` None on those that no client talks to. All of them
    return when one does, and raise RankLost when one is lost.

    Raises ConfigError when there is a `directory` and no listener, no address to advertise, or no way to announce;
    and for no `max_clients`."""
    if max_clients < 1:
        raise ConfigError(f"max_clients is how many clients share an engine, at least 1, got {max_clients}")
    announcer = None
    if directory is not None:
        announcer = Announcer(directory, engine, announced_at(connection, advertise))
    if connection is None:
        try:
            while not engine.closed:
                engine.step()
                engine = followed(engine)
                engine.wait(IDLE_S)
        finally:
            engine.close()
        return
    host = _Host(engine, connection, config or RemoteConfig(), drain or threading.Event(), max_clients)
    try:
        if announcer is not None:
            announcer.start(host)
        host.run()
    except TransferError as error:
        log.error("a served engine stops: %s", error)
    finally:
        host.dismissed = True
        if announcer is not None:
            announcer.close()
        host.engine.close()
        host.close()


class _Host(OfOneProcess):
    """The loop around a served engine, which its clients share. `dismissed` means that nobody wants the engine any
    more, and `last_loss` says how the last client was lost. `role` is the one that the engine has or is to have: if
    all leaders of its ranks are not asked by `asks_until`, when its `asker` has left, it keeps its own."""

    def __init__(
        self,
        engine: PrefillEngine | DecodeEngine,
        connection: MessageStream | SessionListener,
        config: RemoteConfig,
        drain: threading.Event,
        max_clients: int,
    ) -> None:
        self.shared = SharedEngine(engine)
        self.config = config
        self.drain = drain
        self.max_clients = max_clients
        self.inbox: Inbox[tuple[ServedClient, Command | None] | MessageStream] = Inbox()
        self.num_steps = 0
        self.stepped_at = time.monotonic()
        self.dismissed = False
        self.last_loss = "never came"
        self.has_met = self.has_begun = False
        self.role = engine.role
        self.asker: ServedClient | None = None
        self.asks_until = math.inf
        self.ended = threading.Event()
        self.places = threading.Semaphore(max_clients)
        self.exits = threading.current_thread() is threading.main_thread()
        self.is_armed = self.exits and orphan.arm()
        self.listener: SessionListener | None = None
        self.listen()
        if isinstance(connection, SessionListener):
            self.listener = connection
            start(threading.Thread(target=self.accept, name="pdinfer-served", daemon=True))
        else:
            self.meet(connection)
        start(threading.Thread(target=self.watch, name="pdinfer-served", daemon=True))

    @property
    def engine(self) -> PrefillEngine | DecodeEngine:
        """The engine, which is another one once it has changed its role."""
        return self.shared.engine

    def listen(self) -> None:
        """Hear of news of the engine, and of what it is about to compute."""
        self.engine.notify(self.inbox.wake)
        self.engine.tell_computing(self.shared.tell_computing)

    def close(self) -> None:
        """End the connections and our threads. The thread that accepts ends with the next connection."""
        self.ended.set()
        self.places.release()
        for thread in [beside(client.close) for client in self.shared.clients]:
            if thread is not None:
                thread.join()

    # -- the clients --------------------------------------------------------------------------------------------------

    def meet(self, connection: MessageStream) -> None:
        """Begin a session with the client at the other end of a new connection."""
        self.shared.clients += (ServedClient(connection, self.config, self.deliver, self.beat),)
        self.has_met = True

    def accept(self) -> None:
        """Let clients in while there is a place for another one."""
        while self.places.acquire() and not self.ended.is_set():
            try:
                connection = self.listener.accept()  # type: ignore[union-attr]
            except (OSError, EOFError, AuthenticationError) as error:
                self.places.release()
                if not self.ended.is_set():
                    log.warning("a connection to a served engine was not made: %s", error)
                self.ended.wait(ACCEPT_AGAIN_S)
                continue
            if self.ended.is_set() or self.drain.is_set():
                connection.close()
                self.places.release()
                continue
            self.inbox.put(connection)

    def deliver(self, client: ServedClient, command: Command | None) -> None:
        if isinstance(command, messages.Close):
            client.has_left = True
        is_end = client.has_left or (command is None and self.listener is None)
        if is_end and not any(other.is_here for other in self.shared.clients if other is not client):
            self.dismissed = True  # so that `watch` sees it even if the step hangs
        if not isinstance(command, messages.BeatMessage):
            self.inbox.put((client, command))

    def beat(self) -> messages.BeatMessage:
        return messages.BeatMessage(time.monotonic() - self.stepped_at, True if self.drain.is_set() else UNSET)

    @property
    def is_taken(self) -> bool:
        """Whether it has as many clients as it may have."""
        return self.shared.num_here >= self.max_clients

    def watch(self) -> None:
        """Count how long there has been no client, and how long a step has gone on since nobody wants the engine. Time
        is counted in ticks, like silence, so that the time in which this process was stopped does not count."""
        away, stuck = (SilenceWatch(SESSIONS, time.monotonic()) for _ in range(2))
        num_steps = 0
        while not self.ended.wait(SESSIONS.look_s):
            if self.is_armed:
                orphan.disarm()
            now = time.monotonic()
            is_away = self.listener is not None and self.has_met and not self.shared.num_here
            away_s = away.look(now, heard_ago_s=math.inf if is_away else 0.0)
            if away_s > self.config.return_s and not self.dismissed:
                self.dismissed = True
                self.inbox.wake()
            is_stuck = self.dismissed and num_steps == self.num_steps
            num_steps = self.num_steps
            if (stuck_s := stuck.look(now, heard_ago_s=math.inf if is_stuck else 0.0)) > self.config.exit_s:
                what = "the process of a served engine exits" if self.exits else "a served engine hangs"
                log.critical("%s: its client is gone, and a step has not ended in the %.0f s since", what, stuck_s)
                if self.exits:
                    os._exit(1)
                return

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until nobody wants the engine any more."""
        while True:
            self.begin()
            for item in self.inbox.take():
                self.obey(item)
            if self.dismissed:
                log.info("a served engine stops: its client %s", self.last_loss)
                return
            if self.drain.is_set() and not self.shared.num_here and self.engine.ranks.may_close():
                log.info("a served engine stops: it was to be drained, and no client has it")
                return
            if self.engine.closed:
                log.info("a served engine stops: it was closed on another of its ranks")
                return
            for client in self.shared.clients:
                self.shared.let_in(client)
            self.shared.route(self.engine.step())
            self.num_steps += 1
            self.stepped_at = time.monotonic()
            busy = self.engine.wait(0.0)
            self.shared.report(busy=busy)
            if not busy:
                self.inbox.wait(IDLE_S)

    def begin(self) -> None:
        """Send Ready in every session that is new or renewed, once nothing is left of what its client asked for before.
        Pages that a writer may still write are of no client; the only one waits for them, to begin with all there are.
        """
        if self.role != self.engine.role and (changed := become(self.engine, self.role)) is not None:
            self.shared.engine = changed
            self.listen()
        elif self.role != self.engine.role and time.monotonic() > self.asks_until:
            stay(self.engine)
            self.role = self.engine.role
        if self.role != self.engine.role:
            return
        waits = self.has_begun and len(self.shared.clients) == 1 and self.engine.num_unfinished > 0
        for client in self.shared.clients:
            if client.renewal is not None and client.is_here and not waits and not self.shared.names.of_client(client):
                client.begin(self.engine, self.ready())
                self.has_begun = True

    def ready(self) -> Ready:
        """Say who the engine is."""
        engine = self.engine
        hung_s = hung_after_s(engine.longest_warm_up_s) if self.config.hung_s is None else self.config.hung_s
        return Ready(
            engine.address,
            engine.limits,
            LoadMessage.of(engine),
            engine.addresses,
            messages.VERSION,
            messages.MINOR,
            hung_s=hung_s,
            key_scheme=engine.key_scheme,
            roles=roles_of(engine),
            leaders=engine.ranks.leaders,
        )

    def obey(self, item: tuple[ServedClient, Command | None] | MessageStream) -> None:
        if not isinstance(item, tuple):
            try:
                self.meet(item)
            except Overloaded as error:
                log.error("a client of a served engine is turned away: %s", error)
                self.places.release()
            return
        client, command = item
        if client not in self.shared.clients:
            return
        if command is None:
            log.warning("a client of a served engine %s; it may come back", client.session.loss)
            self.part(client, str(client.session.loss))
        elif isinstance(command, messages.Close):
            self.part(client, "has closed it")
        elif isinstance(command, messages.Renew):
            self.shared.stop(client, command.session)
        elif isinstance(command, messages.Become):
            self.change(client, command.role)
        elif client.renewal is None:
            client.has_asked = True
            self.shared.act(client, command)

    def part(self, client: ServedClient, loss: str) -> None:
        """Let a client go, and end what it has asked for."""
        self.shared.clients = tuple(other for other in self.shared.clients if other is not client)
        self.last_loss = loss
        if client is self.asker:
            self.asks_until = time.monotonic() + (0.0 if client.has_left else self.config.return_s)
        self.shared.stop(client, 0)
        client.forget_pages()
        beside(client.close)
        self.places.release()

    def change(self, client: ServedClient, role: str) -> None:
        """Begin to change the role, as a client asks. The engine is lost to all others."""
        if role not in roles_of(self.engine):
            log.error("a %s engine was asked to become %s, which it cannot", self.engine.role, clip(role))
            return
        for other in self.shared.clients:
            if other is not client:
                self.part(other, "was let go of, since the engine changes its role")
        self.shared.stop(client, 0)
        self.role, self.asker, self.asks_until = role, client, math.inf
