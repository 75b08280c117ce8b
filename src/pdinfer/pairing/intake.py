"""Between the threads of a host and the broker: the way in, which any thread may take, the steps that one thread at a
time takes, and the events on their way out."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Set
from functools import partial
from typing import TypeVar

import attrs

from pdinfer.config import PairingConfig
from pdinfer.errors import Overloaded, RequestError
from pdinfer.inbox import Inbox
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.choosing import FoundTokens, OfPolicy
from pdinfer.pairing.port import Port
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.queue import full, gives_way
from pdinfer.pairing.request import TrackedRequest
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import HeldBack, check_not_inside, let_go, open_lock
from pdinfer.process.modes import check_tensors_are_real
from pdinfer.scheduling.admission import check_request
from pdinfer.scheduling.rules import queueing_s
from pdinfer.types import Request, RequestShape, TokenEvent

Result = TypeVar("Result")


class Outbox:
    """The `events` that the host has not fetched."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self._unread_ids: set[str] = set()

    def put(self, event: TokenEvent) -> None:
        """Keep an event, unless nobody will read it."""
        if event.request_id not in self._unread_ids:
            self.events.append(event)
        elif event.finish_reason is not None:
            self._unread_ids.discard(event.request_id)

    def take(self, request_ids: Set[str]) -> list[TokenEvent]:
        """Return the events of these requests. All others stay."""
        events = self.events
        self.events = [event for event in events if event.request_id not in request_ids]
        return [event for event in events if event.request_id in request_ids]

    def shut(self, unfinished_ids: Iterable[str]) -> None:
        """Keep no event of these requests from now on."""
        self._unread_ids.update(unfinished_ids)


@attrs.define(eq=False, repr=False)
class Intake:
    """Takes requests from any thread. The `inbox` has those that the thread that steps has to look at. `lock` is held
    only briefly, since a step needs it too. Nothing comes in once it is `closed`."""

    _broker: Broker
    _ports: Ports
    _config: PairingConfig
    _clock: Callable[[], float]
    _random_bytes: Callable[[int], bytes]
    inbox: Inbox[TrackedRequest] = attrs.field(factory=Inbox)
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    closed: bool = False

    def submit(self, request: Request) -> str:
        with HeldBack():  # or what an alarm raises is taken for an error of a matcher
            request = check_request(request, self._ports.roomiest_limits)
            tracked = TrackedRequest.of(request, self._clock(), self._config.default_deadline_s, self._random_bytes)
            for scheme in self._ports.key_schemes:
                tracked.keys.of(scheme)  # before the thread that steps needs them
        with self.lock:  # only one of two threads gets an id, or the last place in the queue
            if self.closed:
                raise RequestError("the pairing is closed")
            if tracked.request_id in self._broker.requests:
                raise RequestError(f"request_id {tracked.request_id!r} is in use by a request that has not ended")
            displaced = self._find_place(tracked)
            try:
                self._broker.requests[tracked.request_id] = tracked
                if displaced is not None:
                    self.inbox.put(displaced)
                self.inbox.put(tracked)
                return tracked.request_id
            except BaseException:  # the caller never learns that it was taken
                self._broker.requests.pop(tracked.request_id, None)
                if displaced is not None:
                    displaced.displaced = None
                raise

    def cancel(self, request_id: str) -> None:
        """Have a request ended, unless it has ended."""
        tracked = self._broker.requests.get(request_id)  # now, since the id may name another request later
        if tracked is not None:
            tracked.cancel_wanted = True
            self.inbox.put(tracked)

    def act(self) -> None:
        """Have the broker do what was asked for since the last step, in the thread that steps."""
        with self.lock:  # so that no submit is half done, and each request is counted in one place
            for tracked in self.inbox.take():
                self._broker.heed(tracked)

    def look_up(self) -> None:
        """Let the door see how things are after a step, in the thread that steps."""
        if self._broker.door is not None:
            with self.lock:  # so that no request is counted twice, or not at all
                self._broker.show(self._broker.door)

    @property
    def num_unfinished(self) -> int:
        return len(self._broker.requests)

    @property
    def has_room(self) -> bool:
        most, named = self._config.max_queued_requests, len(self._broker.queue) + len(self.inbox.peek())
        return named < most or len(self._queued()) < most  # some may be named twice, and to look at all takes long

    def _find_place(self, tracked: TrackedRequest) -> TrackedRequest | None:
        """Return the request of a lower priority that gives its place in a full queue to this one, or None.

        Raises Overloaded when there is no place, when the request's deadline would probably pass before its turn, or
        when it would probably miss the SLO."""
        displaced, reason = None, full(self._config.max_queued_requests)
        if not self.has_room:
            displaced = gives_way(self._queued(), tracked.request.priority)
            if displaced is None:
                self._broker.counts.refused["the queue is full"] += 1
                raise Overloaded(reason, retry_after_s=self._half_empty_in_s())
        self._check_deadline(tracked)
        self._check_promise(tracked)
        if displaced is not None:
            displaced.displaced = Overloaded(
                f"{reason}, and one of priority {tracked.request.priority} took the place of this one, "
                f"which has {displaced.request.priority}",
                retry_after_s=self._half_empty_in_s(),
            )
        return displaced

    def _check_deadline(self, tracked: TrackedRequest) -> None:
        if tracked.deadline_at == math.inf:  # no load has to be asked for
            return
        waits_s = self._turn_in_s(tracked.request.priority)
        left_s = tracked.deadline_at - tracked.submitted_at
        if waits_s is not None and waits_s > left_s:
            self._broker.counts.refused["its deadline would pass before its turn"] += 1
            raise Overloaded(
                f"the request would wait about {waits_s:.2g} s for its turn and its deadline is {left_s:.2g} s",
                retry_after_s=waits_s - left_s,
            )

    def _check_promise(self, tracked: TrackedRequest) -> None:
        if self._broker.door is None:
            return
        request = tracked.request
        shape = RequestShape(
            ordinal=0,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=tracked.num_tokens,
            max_new_tokens=request.sampling.max_new_tokens,
            priority=request.priority,
            found_tokens=FoundTokens(tracked.keys, *self._ports.caching),
        )
        kind = self._broker.class_of(tracked)
        try:
            self._broker.door.take(shape, kind, request.expected_new_tokens, self._clock())
        except Overloaded:
            self._broker.counts.refused["it would miss the SLO"] += 1
            raise

    def _queued(self) -> list[TrackedRequest]:
        """Return the requests that hold a place in the queue or, since the last step, will get one."""
        requests = dict.fromkeys((*self._broker.queue, *self.inbox.peek()))
        return [tracked for tracked in requests if tracked.attempt.decode is None and tracked.displaced is None]

    def _half_empty_in_s(self) -> float | None:
        waits_s = self._turn_in_s()
        return None if waits_s is None else waits_s / 2

    def _turn_in_s(self, priority: float = -math.inf) -> float | None:
        """Estimate how many seconds a new request of this priority waits for its turn; None before speeds are known.

        Prefills first compute what they have and what the requests ahead bring. When requests wait for pages at every
        decode, decodes first generate what the requests ahead are expected to generate."""
        prefills, decodes = self._ports.brief_loads()
        requests = [tracked for tracked in list(self._broker.requests.values()) if not tracked.attempt.num_grants]
        ahead = [tracked for tracked in requests if tracked.request.priority >= priority]
        to_compute = sum(tracked.num_prompt_tokens for tracked in ahead) + sum(
            load.num_queued_tokens for load in prefills.values()
        )
        full = all(load.num_waiting_requests for load in decodes.values())
        to_generate = sum(tracked.to_generate for tracked in ahead) if full else 0
        return queueing_s(
            (to_compute, sum(load.tokens_per_s for load in prefills.values())),
            (to_generate, sum(load.tokens_per_s for load in decodes.values())),
        )


class Stepping(OfOneProcess):
    """Steps a Pairing, in the thread that holds `lock`. A step is whole, or the next one makes it whole again: one that
    was interrupted is `is_unfinished`. Before each step, `before` are called."""

    _ends = frozenset({"close", "forget"})  # `forget` ends a `generate` that a forked child drops

    def __init__(
        self, broker: Broker, intake: Intake, ports: Ports, outbox: Outbox, clock: Callable[[], float]
    ) -> None:
        self.lock = threading.RLock()
        self.is_unfinished = False
        self.before: list[Callable[[], None]] = []
        self.intake = intake
        self.outbox = outbox
        self._broker = broker
        self._ports = ports
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._forgotten: deque[dict[str, TrackedRequest | None]] = deque()

    @property
    def is_between(self) -> bool:
        """Whether the last step was in this thread, which is not inside of it."""
        return self._thread is threading.current_thread() and not self.is_unfinished

    def advance(self) -> None:
        """Take one step. Its events are in the outbox."""
        with self.lock:
            self._thread = threading.current_thread()
            self._drop_forgotten()
            if not self.intake.closed:
                check_tensors_are_real()  # an engine that found it out in its own step would be a lost port
                for act in self.before:
                    act()
                self.change(self._go_on)

    def _go_on(self) -> None:
        self.intake.act()
        self._broker.advance()
        self.intake.look_up()

    def change(self, change: Callable[[], None]) -> None:
        """Make a change that must not stay half done, in the thread that holds `lock`. After an interrupt that no
        signal brought, the next change first makes everything consistent."""
        with HeldBack():
            if self.intake.closed:
                change()
                return
            if self.is_unfinished:
                check_not_inside(self, "Pairing")
                let_go()
                with self.intake.lock:
                    self._broker.recover(self.outbox.events)
            self.is_unfinished, failed = True, None  # until this one has ended
            try:
                change()
            except OfPolicy as error:
                failed = error.error
            self.is_unfinished = False
            if failed is not None:
                raise failed

    def advance_for(self, request_ids: set[str]) -> list[TokenEvent]:
        """Take one step, and return the events of these requests. All others wait for the host."""
        with self.lock:
            self.advance()
            return self.outbox.take(request_ids)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Cancel requests whose events nobody will read: at once in the thread that steps, unless it is inside a step,
        and otherwise in the next step. Garbage collection calls it, too, in any thread, whatever locks that holds, so
        it waits for none that is held during a step."""
        with HeldBack():
            self._forgotten.append({request_id: self._broker.requests.get(request_id) for request_id in request_ids})
            self.intake.inbox.wake()
            if self.is_between and self.lock.acquire(blocking=False):
                try:
                    self.advance()
                finally:
                    self.lock.release()

    def _drop_forgotten(self) -> None:
        """Do what `forget` says, unless a request has ended and its id names another one by now."""
        forgotten: dict[str, TrackedRequest | None] = {}
        requests = self._broker.requests
        try:
            while self._forgotten:
                forgotten = self._forgotten.popleft()
                self.outbox.take(forgotten.keys())
                unfinished = [name for name, tracked in forgotten.items() if tracked and requests.get(name) is tracked]
                self.outbox.shut(unfinished)
                for request_id in unfinished:
                    self.intake.cancel(request_id)
        except BaseException:
            self._forgotten.append(forgotten)
            raise

    def live(self, request_ids: set[str]) -> tuple[set[str], bool]:
        """Return which of these requests will have another event, and whether one waits already."""
        collected = {event.request_id for event in self.outbox.events}
        return request_ids & (self._broker.requests.keys() | collected), not request_ids.isdisjoint(collected)

    def carry_out(self, change: Generator[float, None, Result]) -> Result:
        """Step until a change of ports has ended, and return what came of it. It yields the seconds that it may
        take."""
        with contextlib.closing(change):
            while True:
                try:
                    left_s = next(change)
                except StopIteration as ended:
                    changed: Result = ended.value
                    return changed
                self.advance()
                self.sleep(min(0.05, left_s))

    def find_lost(self, others: Iterable[Port]) -> None:
        """Step the ports that did not answer: those that are lost are no reason to refuse a new one. Another thread
        that steps finds them itself."""
        if self.lock.acquire(blocking=False):
            try:
                for other in others:
                    if other in self._ports.all:
                        self.change(partial(self._broker.step_port, other))
            finally:
                self.lock.release()

    def sleep(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would. Events that the host
        has not fetched do not count."""
        if self.intake.closed or any(port.wait(0.0) for port in self._ports.all):
            return True
        left_s = self._broker.wakes_at() - self._clock()
        return self.intake.inbox.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    def let_go(self) -> None:
        """Open the locks that an interrupted call of this thread still holds. Ports open their own."""
        let_go()
        open_lock(self.intake.lock)
        open_lock(self.lock)
