"""The way into a Pairing: checks what hosts submit, and carries it to the thread that steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from pdinfer.config import PairingConfig
from pdinfer.errors import Overloaded, RequestError
from pdinfer.inbox import Inbox
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.choosing import FoundTokens
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.queue import full, gives_way
from pdinfer.pairing.request import TrackedRequest
from pdinfer.process.locks import HeldBack
from pdinfer.scheduling.admission import check_request
from pdinfer.scheduling.rules import queueing_s
from pdinfer.types import Request, RequestShape


class Intake:
    """Takes requests from any thread. The `inbox` has those that the thread that steps has to look at. `lock` is held
    only briefly, since a step needs it too. Nothing comes in once it is `closed`."""

    def __init__(
        self,
        broker: Broker,
        ports: Ports,
        config: PairingConfig,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.inbox: Inbox[TrackedRequest] = Inbox()
        self.lock = threading.RLock()
        self.closed = False
        self._broker = broker
        self._ports = ports
        self._config = config
        self._clock = clock
        self._random_bytes = random_bytes

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
        return len(self._queued()) < self._config.max_queued_requests

    def _find_place(self, tracked: TrackedRequest) -> TrackedRequest | None:
        """Return the request of a lower priority that gives its place in a full queue to this one, or None.

        Raises Overloaded when there is no place, when the request's deadline would probably pass before its turn, or
        when it would probably miss the SLO.
        """
        displaced, reason = None, full(self._config.max_queued_requests)
        if not self.has_room:
            displaced = gives_way(self._queued(), tracked.request.priority)
            if displaced is None:
                self._broker.refused["the queue is full"] += 1
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
            self._broker.refused["its deadline would pass before its turn"] += 1
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
            self._broker.refused["it would miss the SLO"] += 1
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
        decode, decodes first generate what the requests ahead are expected to generate.
        """
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
