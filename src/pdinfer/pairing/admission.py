"""The way into a Pairing: checks that there is a place in the queue, and carries requests and cancellations to a
step."""

from __future__ import annotations

import threading
from collections import deque

from pdinfer.config import PairingConfig
from pdinfer.engine.schedule import queueing_s
from pdinfer.errors import Overloaded
from pdinfer.inbox import Inbox
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.queue import gives_way
from pdinfer.pairing.tracked_request import TrackedRequest, Wish


class Admission:
    """Carries what hosts ask of a Pairing from `inbox` to its broker. Any thread may check for a place, and one thread
    acts. `lock` is held only briefly, since a step needs it too."""

    def __init__(
        self,
        broker: Broker,
        ports: Ports,
        inbox: Inbox[tuple[TrackedRequest, Wish]],
        lock: threading.RLock,
        config: PairingConfig,
    ) -> None:
        self._broker = broker
        self._ports = ports
        self._inbox = inbox
        self._lock = lock
        self._config = config
        self._wishes: deque[tuple[TrackedRequest, Wish]] = deque()  # taken by a step and not handled yet

    def take(self) -> None:
        """Take what came in. The caller holds the lock."""
        self._wishes.extend(self._inbox.take())

    def act(self) -> None:
        """Queue, cancel and displace what was asked for since the last step."""
        with self._lock:  # a thread that counts the queue sees each request in one place
            self.take()
            for tracked, wish in self._wishes:
                if wish is Wish.SERVE and self._broker.requests.get(tracked.request_id) is tracked:
                    self._broker.queue.put(tracked)
        while self._wishes:
            tracked, wish = self._wishes[0]
            if wish is Wish.CANCEL:
                self._broker.cancel(tracked)
            elif wish is Wish.DISPLACE:
                self._broker.displace(tracked)
            self._wishes.popleft()

    @property
    def has_room(self) -> bool:
        """Whether the queue has a free place."""
        return len(self._queued()) < self._config.max_queued_requests

    def check(self, tracked: TrackedRequest) -> TrackedRequest | None:
        """Return the request of a lower priority that gives its place in a full queue to this one, or None.

        Raises Overloaded when there is no place, or when the request's deadline would probably pass before its turn.
        """
        displaced, full = None, f"the queue already holds {self._config.max_queued_requests} requests"
        if not self.has_room:
            displaced = gives_way(self._queued(), tracked.request.priority)
            if displaced is None:
                raise Overloaded(full, retry_after_s=self._half_empty_in_s())
        self._check_deadline(tracked)
        if displaced is not None:
            displaced.displaced = Overloaded(
                f"{full}, and one of priority {tracked.request.priority} took the place of this one, "
                f"which has {displaced.request.priority}",
                retry_after_s=self._half_empty_in_s(),
            )
        return displaced

    def withdraw(self, tracked: TrackedRequest, displaced: TrackedRequest | None) -> None:
        """Take back a request whose `submit` was interrupted. The request that was to give way for it still does."""
        self._broker.requests.pop(tracked.request_id, None)
        if displaced is not None:
            self._inbox.put((displaced, Wish.DISPLACE))

    def _check_deadline(self, tracked: TrackedRequest) -> None:
        if tracked.deadline_at is None:
            return
        waits_s = self._turn_in_s(tracked.request.priority)
        left_s = tracked.deadline_at - tracked.submitted_at
        if waits_s is not None and waits_s > left_s:
            raise Overloaded(
                f"the request would wait about {waits_s:.2g} s for its turn and its deadline is {left_s:.2g} s",
                retry_after_s=waits_s - left_s,
            )

    def _queued(self) -> list[TrackedRequest]:
        """Return the requests that hold a place in the queue after the last step and the submits since then."""
        unseen = [tracked for tracked, wish in self._inbox.peek() if wish is Wish.SERVE]
        return [tracked for tracked in (*self._broker.queue, *unseen) if tracked.displaced is None]

    def _half_empty_in_s(self) -> float | None:
        waits_s = self._turn_in_s()
        return None if waits_s is None else waits_s / 2

    def _turn_in_s(self, priority: float = float("-inf")) -> float | None:
        """Estimate how many seconds a new request of this priority waits for its turn; None before speeds are known.

        Prefills first compute what they have and what the requests ahead bring. When requests wait for pages at every
        decode, decodes first generate what the requests ahead are expected to generate.
        """
        prefills = [port.load() for port in list(self._ports.prefills.values())]
        decodes = [port.load() for port in list(self._ports.decodes.values())]
        requests = [tracked for tracked in list(self._broker.requests.values()) if not tracked.num_grants]
        ahead = [tracked for tracked in requests if tracked.request.priority >= priority]
        to_compute = sum(tracked.num_prompt_tokens for tracked in ahead) + sum(
            load.num_queued_tokens for load in prefills
        )
        full = all(load.num_waiting_requests for load in decodes)
        to_generate = sum(tracked.to_generate for tracked in ahead) if full else 0
        return queueing_s(
            (to_compute, sum(load.tokens_per_s for load in prefills)),
            (to_generate, sum(load.tokens_per_s for load in decodes)),
        )
