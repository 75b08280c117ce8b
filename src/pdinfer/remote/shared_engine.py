"""An engine that several clients share: each request is one client's, and the engine knows nothing of clients."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import attrs

from pdinfer.bounds import escaped
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import Overloaded, PDInferError, RequestError, TransferError
from pdinfer.kv.channel.channel import turn_away
from pdinfer.log import log
from pdinfer.process.threads import start
from pdinfer.remote import messages
from pdinfer.remote.messages import Command, LoadMessage
from pdinfer.remote.served_client import ServedClient, Submitted
from pdinfer.remote.session import Session
from pdinfer.types import Event, Granted, PeerAddress, Request

C = TypeVar("C")


class Names(Generic[C]):
    """The names of the requests that an engine has, and whose they are. A client's own id is the name, unless a request
    of another client has it."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[C, str]] = {}
        self._names: dict[tuple[C, str], str] = {}
        self._numbers = itertools.count(1)

    def give(self, client: C, request_id: str) -> str:
        """Return the name of a request, which is a new one if the engine has none of this client's by that id."""
        ours = client, request_id
        name = self._names.get(ours, request_id)
        while self._owners.get(name, ours) != ours:
            name = str(next(self._numbers))
        if name != request_id and name not in self._owners:
            log.info("two clients have a request %s: that of one is called %s here", escaped(request_id), name)
        self._owners[name], self._names[ours] = ours, name
        return name

    def of(self, client: C, request_id: str) -> str | None:
        """Return the name of a request, or None when the engine does not have it."""
        return self._names.get((client, request_id))

    def owner(self, name: str) -> tuple[C, str] | None:
        """Return whose request it is, and the client's own id for it, or None when it is nobody's."""
        return self._owners.get(name)

    def of_client(self, client: C) -> list[str]:
        """Return the names of the requests of a client."""
        return [name for name, (owner, _) in self._owners.items() if owner is client]

    def keep(self, names: Iterable[str]) -> None:
        """Forget all names but these."""
        for name in self._owners.keys() - set(names):
            del self._names[self._owners.pop(name)]


class SharedEngine:
    """An `engine` and its `clients`, in the order in which they came. `names` say whose each request is. One thread
    calls it."""

    def __init__(self, engine: PrefillEngine | DecodeEngine) -> None:
        self.engine = engine
        self.clients: tuple[ServedClient, ...] = ()
        self.names: Names[ServedClient] = Names()
        self._links: dict[PeerAddress, threading.Thread] = {}

    @property
    def num_here(self) -> int:
        """How many clients have the engine. Any thread may ask."""
        return sum(client.is_here for client in self.clients)

    def stop(self, client: ServedClient, renewal: int) -> None:
        """End what a client has asked for. Its session has to begin or to be renewed."""
        client.end(renewal)
        for name in self.names.of_client(client):
            self.engine.cancel(name)

    # -- what they ask for --------------------------------------------------------------------------------------------

    def act(self, client: ServedClient, command: Command) -> None:
        """Act on a command that was sent after Ready."""
        engine = self.engine
        if isinstance(command, messages.ConnectMessage):
            self._about(command.peer, self._connect, command, client.session)
        elif isinstance(command, messages.Disconnect):
            self._about(command.peer, engine.disconnect, command.peer)
        elif isinstance(command, messages.CancelMessage):
            self._cancel(client, command.request_id)
        elif isinstance(command, messages.ChangeWritersMessage) and isinstance(engine, DecodeEngine):
            self._change_writers(engine, client, command)
        elif isinstance(command, messages.SubmitPrefillMessage) and isinstance(engine, PrefillEngine):
            client.num_seen += 1
            self._submit_prefill(engine, client, command)
        elif isinstance(command, messages.SubmitDecodeMessage) and isinstance(engine, DecodeEngine):
            client.num_seen += 1
            self._submit_decode(client, command)
        else:
            log.error("a %s does not understand %s", type(engine).__name__, type(command).__name__)

    def _submit_prefill(
        self, engine: PrefillEngine, client: ServedClient, command: messages.SubmitPrefillMessage
    ) -> None:
        """Submit a prompt, or end its room when it requires what this engine does not know."""
        grant = command.grant.unpack()
        try:
            request = command.request.unpack()
        except RequestError as error:
            turn_away(engine.channel, grant, error)
        else:
            engine.submit(self._named(client, request), grant)

    def _submit_decode(self, client: ServedClient, command: messages.SubmitDecodeMessage) -> None:
        """Take a request, or refuse it when it requires what this engine does not know."""
        try:
            request = command.request.unpack()
        except RequestError as error:
            client.refuse(command.request.request.request_id, error)
        else:
            submitted = Submitted(request=request, writers=command.writers, at=time.monotonic())
            client.hold(submitted, most=self.engine.config.max_queued_requests)
            self.let_in(client)

    def let_in(self, client: ServedClient) -> None:
        """Submit the requests of a client whose turn it is."""
        for submitted in client.let_in(time.monotonic(), has_others=len(self.clients) > 1):
            self._enter(client, submitted)

    def _enter(self, client: ServedClient, submitted: Submitted) -> None:
        assert isinstance(self.engine, DecodeEngine)
        request = self._named(client, submitted.request_at(time.monotonic()))
        self.engine.submit(request, writers=submitted.writers)

    def _named(self, client: ServedClient, request: Request) -> Request:
        """Return a request under the name that it has in the engine."""
        name = self.names.give(client, request.request_id or "")
        return request if name == (request.request_id or "") else attrs.evolve(request, request_id=name)

    def _cancel(self, client: ServedClient, request_id: str) -> None:
        """End a request. The engine says how, so one that is held enters it for that."""
        if (submitted := client.let_go(request_id)) is not None:
            self._enter(client, submitted)
        if (name := self.names.of(client, request_id)) is not None:
            self.engine.cancel(name)

    def _change_writers(
        self, engine: DecodeEngine, client: ServedClient, command: messages.ChangeWritersMessage
    ) -> None:
        name = self.names.of(client, command.request_id)
        if not client.change_writers(command.request_id, command.writers) and name is not None:
            engine.change_writers(name, writers=command.writers)

    def route(self, events: Sequence[Event]) -> None:
        """Give each client the events of its requests. What has ended has no name any more."""
        for event in events:
            owner = self.names.owner(event.grant.request_id if isinstance(event, Granted) else event.request_id)
            if owner is not None:
                client, request_id = owner
                client.take(event, request_id)
        self.names.keep(self.engine.request_ids)

    def _about(self, peer: PeerAddress, work: Callable[..., None], *arguments: object) -> None:
        """Do work about a peer in a thread of its own, since a peer that does not answer must not delay the steps. Work
        about one peer is done in order, since a link that is closed before it is opened would stay."""
        self._links = {other: thread for other, thread in self._links.items() if thread.is_alive()}
        before = self._links.get(peer)

        def work_in_turn() -> None:
            if before is not None:
                before.join()
            work(*arguments)

        if (thread := beside(work_in_turn)) is not None:
            self._links[peer] = thread

    def _connect(self, command: messages.ConnectMessage, session: Session[Command]) -> None:
        """Connect to a peer, and answer in any case."""
        error: PDInferError | None = None
        try:
            self.engine.connect(command.peer, timeout_s=command.timeout_s)
        except PDInferError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001 - the client waits for an answer, whatever it is
            log.exception("connecting to a peer failed")
            error = TransferError(f"connecting failed: {type(problem).__name__}")
        session.post(messages.Connected(command.peer, error, getattr(error, "fields", ())))

    # -- what they are told -------------------------------------------------------------------------------------------

    def tell_computing(self, names: frozenset[str]) -> None:
        """Tell each client, before a step that may end this process, of which of its requests it computes rows."""
        computing: defaultdict[ServedClient, set[str]] = defaultdict(set)
        for client, request_id in filter(None, map(self.names.owner, names)):
            computing[client].add(request_id)
        for client, request_ids in computing.items():
            client.tell_computing(request_ids)

    def report(self, *, busy: bool) -> None:
        """Report to each client the events of its requests or, after a step without any, a new load now and then."""
        peers = [attrs.evolve(peer, step_age_s=None) for peer in self.engine.peers()]  # ages grow all the time
        news, now = (self.engine.brief_load(), peers), time.monotonic()
        due = [client for client in self.clients if client.wants_report(news, now, busy=busy)]
        load = LoadMessage.of(self.engine) if due else LoadMessage()
        for client in due:
            client.report(load, news, now)


def beside(work: Callable[[], None]) -> threading.Thread | None:
    """Do `work` in a thread of its own, and return it. Where there is none, do it here, and return None."""
    try:
        return start(threading.Thread(target=work, name="pdinfer-served", daemon=True))
    except Overloaded:
        work()
        return None
