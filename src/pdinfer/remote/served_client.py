"""One client of a served engine, where the engine is: what it has asked for, and what it has not been told yet."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import attrs

from pdinfer.config import RemoteConfig
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import Overloaded, PDInferError
from pdinfer.kv.pool import PagePool
from pdinfer.remote import messages
from pdinfer.remote.messages import KEY_BYTES, Command, LoadMessage, PageChanges, Stepped
from pdinfer.remote.session import MessageStream, Session
from pdinfer.stats import EngineLoad, PeerStats, with_waiting
from pdinfer.types import Event, Granted, PeerAddress, Refused, Request

REPORT_S = 0.02
"""How old the load that a client was told may get while the engine is busy and no event carries a newer one."""
MAX_UNGRANTED = 16
"""How many requests of a client may stand in the line of a decode that has other clients. Enough to fill the places
that a step sets free; few enough that the first request of another client soon has its turn."""

ORDER = attrgetter("order")

Told = tuple[EngineLoad, list[PeerStats]]


@attrs.frozen(kw_only=True)
class Submitted:
    """A request for decode that has come `at`, and who prefills it."""

    request: Request
    writers: tuple[PeerAddress, ...]
    at: float

    @property
    def order(self) -> int:
        """The sort key among those of one client: higher priorities come first."""
        return -self.request.priority

    @property
    def deadline_at(self) -> float:
        return math.inf if self.request.deadline_s is None else self.at + self.request.deadline_s

    def request_at(self, now: float) -> Request:
        """Return the request with what is left of its time."""
        if self.request.deadline_s is None:
            return self.request
        return attrs.evolve(self.request, deadline_s=max(0.0, self.deadline_at - now))


class ServedClient:
    """A client, over a session of its own. `deliver` gets its commands, and None when the session has ended.

    `renewal` is the number of the session's renewal that has to be answered, 0 for a new session, and None while
    commands are obeyed. `num_seen` submits have come since. `events` are to be told; `has_asked` says that something
    has come since the last report. `held` are requests that the engine does not have yet, in the order of their turns,
    and `ungranted` those in its line that have no pages yet."""

    def __init__(
        self,
        connection: MessageStream,
        config: RemoteConfig,
        deliver: Callable[[ServedClient, Command | None], None],
        beat: Callable[[], messages.BeatMessage],
    ) -> None:
        self.renewal: int | None = 0
        self.num_seen = 0
        self.held: list[Submitted] = []
        self.ungranted: set[str] = set()
        self.events: list[Event] = []
        self.has_asked = False
        self.has_left = False
        self._pages: PageNews | None = None
        self._computing: set[str] = set()
        self._told: Told | None = None
        self._told_at = 0.0
        self.session: Session[Command] = Session(
            connection,
            messages.decode_command,
            lambda command: deliver(self, command),
            beat,
            silent_s=config.silent_s,
            return_s=config.return_s,
        )

    @property
    def is_here(self) -> bool:
        return self.session.loss is None and not self.has_left

    # -- what it asks for ---------------------------------------------------------------------------------------------

    def hold(self, submitted: Submitted, *, most: int) -> None:
        """Take a request, or refuse it when `most` are held."""
        if len(self.held) < most:
            insort(self.held, submitted, key=ORDER)
            return
        error = Overloaded(f"decode already has {len(self.held)} requests of this client waiting for their turn")
        self.refuse(submitted.request.request_id, error)

    def refuse(self, request_id: str | None, error: PDInferError) -> None:
        self.events.append(Refused(request_id=request_id or "", error=error))

    def let_in(self, now: float, *, has_others: bool) -> Iterator[Submitted]:
        """Yield the requests whose turn it is to stand in the engine's line: all, unless there are other clients. Those
        whose time is over have no turn: the engine ends them."""
        late = [submitted for submitted in self.held if submitted.deadline_at <= now]
        self.held = [submitted for submitted in self.held if submitted.deadline_at > now]
        yield from late
        while self.held and not (has_others and len(self.ungranted) >= MAX_UNGRANTED):
            submitted = self.held.pop(0)
            self.ungranted.add(submitted.request.request_id or "")
            yield submitted

    def let_go(self, request_id: str) -> Submitted | None:
        """Return a request that is held, which is not from now on, or None."""
        for at, submitted in enumerate(self.held):
            if submitted.request.request_id == request_id:
                return self.held.pop(at)
        return None

    def change_writers(self, request_id: str, writers: tuple[PeerAddress, ...]) -> bool:
        """Name other writers for a request that is held, and return whether it is."""
        for at, submitted in enumerate(self.held):
            if submitted.request.request_id == request_id:
                self.held[at] = attrs.evolve(submitted, writers=writers)
                return True
        return False

    def end(self, renewal: int) -> None:
        """Forget what it has asked for. Its session has to be begun or renewed."""
        self.renewal, self.held, self.ungranted, self.events = renewal, [], set(), []

    # -- what it is told ----------------------------------------------------------------------------------------------

    def begin(self, engine: PrefillEngine | DecodeEngine, ready: messages.Ready) -> None:
        """Send Ready, with all pages that can be found, and obey from now on."""
        if self._pages is None and engine.key_scheme is not None:
            self._pages = PageNews(engine.pool)
        ready.session, ready.pages = self.renewal or 0, None if self._pages is None else self._pages.all()
        self.session.post(ready)
        self.renewal, self.num_seen, self._computing = None, 0, set()

    def take(self, event: Event, request_id: str) -> None:
        """Take an event of its request, in which the engine may call it something else."""
        if self.renewal is not None:
            return
        if isinstance(event, Granted | Refused) or event.finish_reason is not None:
            self.ungranted.discard(request_id)
        self.events.append(renamed(event, request_id))

    def tell_computing(self, request_ids: set[str]) -> None:
        """Tell it of which requests the engine computes rows, if there are others than those it was told of."""
        if self.renewal is None and not request_ids <= self._computing:
            self._computing = request_ids
            self.session.tell(messages.Computing(tuple(sorted(request_ids))))

    def wants_report(self, news: Told, now: float, *, busy: bool) -> bool:
        """Return whether to report: events at once, and without any the load now and then."""
        if self.renewal is not None:
            return False
        is_news = news != self._told and not self.session.is_behind
        return bool(self.events) or self.has_asked or (is_news and (not busy or now > self._told_at + REPORT_S))

    def report(self, load: LoadMessage, news: Told, now: float) -> None:
        """Report the events of a step, and the load. That has the requests of all clients that are in the engine, and
        those held back of this one: others have their turn before or after them all the same."""
        if self.held and load.decode is not None:
            held = [len(submitted.request.tokens) for submitted in self.held]
            load = LoadMessage(decode=with_waiting(load.decode, held))
        report = Stepped.of(load, self.events, self.num_seen)
        report.pages = None if self._pages is None else self._pages.take()
        self.session.post(report)
        self.events, self.has_asked, self._told, self._told_at = [], False, news, now

    def close(self) -> None:
        """End the session, within a second."""
        self.has_left = True
        self.session.close()

    def forget_pages(self) -> None:
        """Hear no more of pages."""
        if self._pages is not None:
            self._pages.close()


class PageNews:
    """What a client has not been told yet about the pages of its engine's pool. The pool calls it as a watcher."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._is_there: dict[bytes, bool] = {}
        self._forgotten = False
        pool.watch(self)

    def close(self) -> None:
        """Hear of no more changes."""
        self._pool.watchers.all.remove(self)

    def all(self) -> PageChanges:
        """Return all pages that can be found now. What changed before is told by it."""
        self.take()
        return PageChanges(True, b"".join(key[:KEY_BYTES] for key in self._pool.keys))

    def take(self) -> PageChanges | None:
        """Return what has changed since the last call, or None."""
        is_there, self._is_there = self._is_there, {}
        forgotten, self._forgotten = self._forgotten, False
        if not is_there and not forgotten:
            return None
        return PageChanges(
            forgotten,
            b"".join(key for key, there in is_there.items() if there),
            b"".join(key for key, there in is_there.items() if not there),
        )

    def stored(self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], page_size: int) -> None:
        for key in keys:
            self._is_there[key[:KEY_BYTES]] = True

    def removed(self, key: bytes) -> None:
        self._is_there[key[:KEY_BYTES]] = False

    def cleared(self) -> None:
        self._is_there, self._forgotten = {}, True


def renamed(event: Event, request_id: str) -> Event:
    """Return an event as one of the request `request_id`."""
    if not isinstance(event, Granted):
        return event if event.request_id == request_id else attrs.evolve(event, request_id=request_id)
    if event.grant.request_id == request_id:
        return event
    grant = attrs.evolve(event.grant, request_id=request_id)
    return attrs.evolve(event, grant=grant, request=attrs.evolve(event.request, request_id=request_id))
