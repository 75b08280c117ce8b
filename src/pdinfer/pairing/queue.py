"""The queue of a Pairing: requests that wait for a prefill and a decode, and which of them is next.

    priority ─► streams that have begun ─► the tenant that has had least, with fair shares ─► deadline and age

Every OLDEST_EVERY-th turn goes by age alone, so that low priorities are served too. A request that cannot be served now
keeps its place until the next step, and does not block requests that need other ports.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator

from pdinfer.engine.schedule import PATIENCE_S, is_turn_of_oldest
from pdinfer.pairing.tracked_request import TrackedRequest

MAX_TENANTS = 1024
"""Shares are kept for this many tenants. When there are more, only the half that has had most is kept."""


class Queue:
    """Requests that wait. One thread puts, removes and serves them; any thread may count and iterate over them."""

    def __init__(self, *, fair_share: bool = False) -> None:
        self._fair_share = fair_share
        self._shares = Shares()
        self._waiting: dict[TrackedRequest, None] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(list(self._waiting))

    def put(self, tracked: TrackedRequest) -> None:
        """Add a request. Its place follows from its priority, its tenant and its age."""
        self._waiting[tracked] = None

    def remove(self, tracked: TrackedRequest) -> None:
        """Remove a request that has ended without being served."""
        del self._waiting[tracked]

    def serve(self, tracked: TrackedRequest) -> None:
        """Remove a request that is served, and count it for its tenant."""
        self.remove(tracked)
        self._num_turns += 1
        if self._fair_share and not tracked.is_resumed:
            self._shares.add(tracked.request.cache_salt, tracked.max_tokens)

    def restore(self, requests: Iterable[TrackedRequest]) -> None:
        """Make these the waiting requests, whatever an interrupt has left in the queue. Shares stay as they are."""
        self._waiting = dict.fromkeys(requests)

    def in_turn(self, now: float) -> Iterator[TrackedRequest]:
        """Yield every request once, each time the one that is next after those served meanwhile."""
        self._shares.look({self._tenant(tracked) for tracked in self._waiting})
        levels: dict[tuple[int, bool], dict[bytes, deque[TrackedRequest]]] = defaultdict(lambda: defaultdict(deque))
        for tracked in sorted(self._waiting, key=lambda tracked: tracked.due_at):
            levels[-tracked.request.priority, not tracked.is_resumed][self._tenant(tracked)].append(tracked)
        in_order = self._in_order(levels)
        patient = [tracked for tracked in self._waiting if now - tracked.waiting_since > PATIENCE_S]
        by_age = iter(sorted(patient, key=lambda tracked: tracked.waiting_since))
        asked: set[TrackedRequest] = set()
        while True:
            oldest = next(by_age, None) if is_turn_of_oldest(self._num_turns) else None
            turn = next(in_order, None) if oldest is None else oldest
            if turn is None:
                return
            if turn not in asked:
                asked.add(turn)
                yield turn

    def _in_order(self, levels: dict[tuple[int, bool], dict[bytes, deque[TrackedRequest]]]) -> Iterator[TrackedRequest]:
        for level in sorted(levels):
            tenants = levels[level]
            while tenants:
                tenant = min(tenants, key=lambda name: (self._shares.of(name), tenants[name][0].due_at))
                yield tenants[tenant].popleft()
                if not tenants[tenant]:
                    del tenants[tenant]

    def _tenant(self, tracked: TrackedRequest) -> bytes:
        return tracked.request.cache_salt if self._fair_share and not tracked.is_resumed else b""


def gives_way(requests: Iterable[TrackedRequest], priority: int) -> TrackedRequest | None:
    """Return the request that loses its place to one of this priority: the newest of the lowest priority below it whose
    stream has not begun, or None."""
    below = [one for one in requests if one.request.priority < priority and not one.is_resumed]
    return min(reversed(below), key=lambda one: (one.request.priority, -one.submitted_at), default=None)


class Shares:
    """The tokens that each tenant has had. A tenant that was away has saved nothing up: it starts with the least that
    any waiting tenant had, as in start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996)."""

    def __init__(self) -> None:
        self._had: dict[bytes, int] = {}
        self._least = 0

    def of(self, tenant: bytes) -> int:
        """Return the tokens of a tenant. The tenant with the fewest is next."""
        return max(self._had.get(tenant, 0), self._least)

    def look(self, tenants: Collection[bytes]) -> None:
        """Note which tenants wait now."""
        self._least = min(map(self.of, tenants), default=self._least)

    def add(self, tenant: bytes, num_tokens: int) -> None:
        """Count a turn of a tenant for this many tokens."""
        self._had[tenant] = self.of(tenant) + num_tokens
        if len(self._had) > MAX_TENANTS:
            most = sorted(self._had.items(), key=lambda item: item[1])[MAX_TENANTS // 2 :]
            self._had = dict(most)
