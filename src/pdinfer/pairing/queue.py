"""The queue of a Pairing: who waits for a prefill and a decode, and whose turn it is.

    priority ─► who streams already ─► the tenant that has had least, if shares are fair ─► deadline and age

Every OLDEST_EVERY-th turn goes by age alone, so that low priorities have theirs. Who cannot go now is asked again at
the next step, in its place: nobody waits behind it for ports that it cannot use.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator

from pdinfer.engine.schedule import PATIENCE_S, is_turn_of_oldest
from pdinfer.pairing.tracked_request import TrackedRequest

MAX_TENANTS = 1024
"""Of so many tenants it is kept what they have had; beyond it, of the half that has had most."""


class Queue:
    """Requests that wait. One thread puts, removes and serves; any may count them and look for one that gives way."""

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
        """Adds one; where it stands is its priority's, its tenant's and its age's to say."""
        self._waiting[tracked] = None

    def remove(self, tracked: TrackedRequest) -> None:
        """Takes one out that is not served: it has ended."""
        del self._waiting[tracked]

    def serve(self, tracked: TrackedRequest) -> None:
        """Takes one out that has had its turn."""
        self.remove(tracked)
        self._num_turns += 1
        if self._fair_share and not tracked.is_resumed:
            self._shares.add(tracked.request.cache_salt, tracked.max_tokens)

    def restore(self, requests: Iterable[TrackedRequest]) -> None:
        """These wait, and nobody else, whatever an interrupt has left of the queue; shares stay."""
        self._waiting = dict.fromkeys(requests)

    def in_turn(self, now: float) -> Iterator[TrackedRequest]:
        """Everybody once, the next one always whose turn it is after those served meanwhile."""
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
    """Who loses its place to a request of this priority: of the lowest below it, the one that came last, unless its
    stream has begun."""
    below = [one for one in requests if one.request.priority < priority and not one.is_resumed]
    return min(reversed(below), key=lambda one: (one.request.priority, -one.submitted_at), default=None)


class Shares:
    """The tokens that each tenant has had. Who was away has saved up nothing: it begins with the least that one of
    those who waited had, as in start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996)."""

    def __init__(self) -> None:
        self._had: dict[bytes, int] = {}
        self._least = 0

    def of(self, tenant: bytes) -> int:
        """Who has the least has the next turn."""
        return max(self._had.get(tenant, 0), self._least)

    def look(self, tenants: Collection[bytes]) -> None:
        """These wait now."""
        self._least = min(map(self.of, tenants), default=self._least)

    def add(self, tenant: bytes, num_tokens: int) -> None:
        """The tenant has had a turn for so many tokens."""
        self._had[tenant] = self.of(tenant) + num_tokens
        if len(self._had) > MAX_TENANTS:
            most = sorted(self._had.items(), key=lambda item: item[1])[MAX_TENANTS // 2 :]
            self._had = dict(most)
