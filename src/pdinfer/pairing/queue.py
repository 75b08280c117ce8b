"""The queue of a Pairing: requests that wait for a prefill and a decode, and which of them is next.

    priority ─► streams that have begun ─► the tenant that has had least, with fair shares ─► deadline and age

Every OLDEST_EVERY-th turn goes by age alone, so that low priorities are served too. A request that cannot be served now
keeps its place until the next step, and does not block requests that need other ports."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter

from pdinfer.errors import TransferError
from pdinfer.pairing.ports import LostPorts, Ports
from pdinfer.pairing.request import End, TrackedRequest
from pdinfer.scheduling.decode import WRITER_GRACE_S
from pdinfer.scheduling.rules import PATIENCE_S, forecast_tokens, is_turn_of_oldest
from pdinfer.types import FinishReason, PeerAddress

MAX_TENANTS = 1024
"""Shares are kept for this many tenants. When there are more, only the half that has had most is kept."""
LINK_WAIT_S = WRITER_GRACE_S
"""How long a request waits for a link that is down: as long as decode waits for the prefill of a request it holds."""

Level = tuple[int, bool]
"""Minus the priority, and whether no stream has begun: lower ones go first."""


def full(most: int) -> str:
    """Return why a queue that holds `most` requests takes no other."""
    return f"the queue already holds {most} requests (PairingConfig.max_queued_requests)"


class Queue:
    """Requests that wait. One thread puts, removes and serves them; any thread may count and iterate over them.

    They are kept in order, in a line for each level and tenant. `newcomers` were put in since they were last taken, and
    `next_deadline` is not later than the first deadline of any."""

    def __init__(self, *, fair_share: bool = False) -> None:
        self._fair_share = fair_share
        self._shares = Shares()
        self._num_turns = 0
        self.next_deadline = math.inf
        self.clear()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(list(self._waiting))

    def put(self, tracked: TrackedRequest) -> None:
        """Add a request, unless it is there. Its place follows from its priority, its tenant and its age."""
        if tracked in self._waiting:
            return
        level = -tracked.request.priority, not tracked.is_resumed
        tenant = tracked.request.cache_salt if self._fair_share and not tracked.is_resumed else b""
        self._waiting[tracked] = level, tenant
        insort(self._lines.setdefault(level, {}).setdefault(tenant, []), tracked, key=attrgetter("due_at"))
        self._newcomers.append(tracked)
        self.next_deadline = min(self.next_deadline, tracked.deadline_at)

    def remove(self, tracked: TrackedRequest) -> None:
        level, tenant = self._waiting.pop(tracked)
        tenants = self._lines[level]
        line = tenants[tenant]
        del line[line.index(tracked, bisect_left(line, tracked.due_at, key=attrgetter("due_at")))]
        if not line:
            del tenants[tenant]
        if not tenants:
            del self._lines[level]

    def serve(self, tracked: TrackedRequest) -> None:
        """Remove a request that is served, and count it for its tenant."""
        self.remove(tracked)
        self._num_turns += 1
        if self._fair_share and not tracked.is_resumed:
            self._shares.add(tracked.request.cache_salt, forecast_tokens(tracked.request))

    def clear(self) -> None:
        """Remove all requests. Shares stay as they are."""
        self._waiting: dict[TrackedRequest, tuple[Level, bytes]] = {}
        self._lines: dict[Level, dict[bytes, list[TrackedRequest]]] = {}
        self._newcomers: list[TrackedRequest] = []
        self.next_deadline = math.inf

    def take_newcomers(self) -> list[TrackedRequest]:
        """Return the requests that were put in since the last call and still wait."""
        newcomers, self._newcomers = self._newcomers, []
        return [tracked for tracked in newcomers if tracked in self._waiting]

    def take_all(self) -> list[TrackedRequest]:
        """Return all requests, newcomers or not, and work out the next deadline."""
        self._newcomers = []
        self.next_deadline = min((tracked.deadline_at for tracked in self._waiting), default=math.inf)
        return list(self._waiting)

    def in_turn(self, now: float) -> Iterator[TrackedRequest]:
        """Yield every request once, each time the one that is next after those served meanwhile."""
        self._shares.look({tenant for tenants in self._lines.values() for tenant in tenants})
        levels = {level: {name: deque(line) for name, line in of.items()} for level, of in self._lines.items()}
        in_order = self._in_order(levels)
        by_age: Iterator[TrackedRequest] | None = None
        asked: set[TrackedRequest] = set()
        while True:
            oldest = None
            if is_turn_of_oldest(self._num_turns):
                if by_age is None:
                    patient = [tracked for tracked in self._waiting if now - tracked.attempt.waiting_since > PATIENCE_S]
                    by_age = iter(sorted(patient, key=lambda tracked: tracked.attempt.waiting_since))
                oldest = next(by_age, None)
            turn = next(in_order, None) if oldest is None else oldest
            if turn is None:
                return
            if turn not in asked:
                asked.add(turn)
                yield turn

    def _in_order(self, levels: Mapping[Level, dict[bytes, deque[TrackedRequest]]]) -> Iterator[TrackedRequest]:
        for level in sorted(levels):
            tenants = levels[level]
            while tenants:
                tenant = min(tenants, key=lambda name: (self._shares.of(name), tenants[name][0].due_at))
                yield tenants[tenant].popleft()
                if not tenants[tenant]:
                    del tenants[tenant]


def gives_way(requests: Iterable[TrackedRequest], priority: int) -> TrackedRequest | None:
    """Return the newest of the lowest priority below this one among requests without a stream; None without one."""
    below = [one for one in requests if one.request.priority < priority and not one.is_resumed]
    return min(reversed(below), key=lambda one: (one.request.priority, -one.submitted_at), default=None)


class WaitLimits:
    """How long queued requests wait for what is missing: ports that hold them, and links between these."""

    def __init__(self, ports: Ports, lost_ports: LostPorts) -> None:
        self._ports = ports
        self._lost_ports = lost_ports
        self._num_changes_seen = -1
        self._some_give_up = False

    def ends(self, queue: Queue, now: float) -> Iterator[tuple[TrackedRequest, End]]:
        """Yield the queued requests that have to end, and how. While no port or link is missing, and no deadline is
        over, only newcomers may have to."""
        ports = self._ports
        all_is_well = not (ports.links_down or ports.leaving or self._some_give_up) and now < queue.next_deadline
        if all_is_well and ports.num_changes == self._num_changes_seen:
            waiting = queue.take_newcomers()
        else:
            waiting, self._some_give_up, self._num_changes_seen = queue.take_all(), False, ports.num_changes
        most = ports.most_tokens if waiting else {}
        for tracked in waiting:
            end = self._end(tracked, now, most)
            self._some_give_up |= tracked.attempt.give_up_at < math.inf
            if end is not None:
                yield tracked, end

    def _end(self, tracked: TrackedRequest, now: float, most_tokens: Mapping[str, int]) -> End | None:
        """Return how a queued request ends now, or None while it waits. `most_tokens` is what the ports of each side
        can hold."""
        if now >= tracked.deadline_at:
            return FinishReason.DEADLINE, None
        side = next((side for side, tokens in most_tokens.items() if tracked.max_tokens > tokens), None)
        if side is not None:
            reason = f"no {side} port is left that holds its {tracked.max_tokens} tokens"
            reason += f"; {tracked.lost}" if tracked.lost is not None else self._lost_ports.last(side)
            grace_s = self._lost_ports.waits_s(side)
        elif self._ports.links_down and not self._ports.has_linked_pair(tracked.max_tokens):
            reason = f"no prefill and decode that hold it have been connected for {LINK_WAIT_S:g} s"
            grace_s = LINK_WAIT_S
        else:
            tracked.attempt.give_up_at = math.inf
            return None
        return (FinishReason.FAILED, TransferError(reason)) if tracked.attempt.gives_up(now, grace_s) else None


class Shares:
    """The tokens that each tenant has had. A tenant that was away has saved nothing up: it starts with the least that
    any waiting tenant had, as in start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996)."""

    def __init__(self) -> None:
        self._had: dict[bytes, int] = {}
        self._least = 0

    def __len__(self) -> int:
        return len(self._had)

    def of(self, tenant: bytes) -> int:
        """Return the tokens of a tenant. The tenant with the fewest is next."""
        return max(self._had.get(tenant, 0), self._least)

    def look(self, tenants: Collection[bytes]) -> None:
        """Note which tenants wait now."""
        self._least = min(map(self.of, tenants), default=self._least)

    def add(self, tenant: bytes, num_tokens: int) -> None:
        self._had[tenant] = self.of(tenant) + num_tokens
        if len(self._had) > MAX_TENANTS:
            most = sorted(self._had.items(), key=lambda item: item[1])[MAX_TENANTS // 2 :]
            self._had = dict(most)


class AwaitingRelease:
    """Requests that were taken away from a decode, by ending them or by removing the port. Each id stays reserved until
    that decode has released it, as long as the decode is a port."""

    def __init__(self) -> None:
        self._forget_at: dict[tuple[str, PeerAddress], float] = {}

    def __len__(self) -> int:
        return len(self._forget_at)

    def add(self, request_id: str, decode: PeerAddress) -> None:
        """Reserve an id until the decode releases it."""
        self._forget_at[request_id, decode] = math.inf

    def forget_at(self, at: float) -> None:
        """Free all these ids at `at` by the broker's clock even if no decode has released them."""
        self._forget_at = dict.fromkeys(self._forget_at, at)

    def discard(self, request_id: str, decode: PeerAddress) -> None:
        self._forget_at.pop((request_id, decode), None)

    def waits(self, request_id: str, decodes: Iterable[PeerAddress]) -> bool:
        """Return whether any of these decodes has not released the id."""
        return bool(self._forget_at) and any((request_id, decode) in self._forget_at for decode in decodes)

    def keep(self, decodes: Collection[PeerAddress]) -> None:
        """Forget the ids of all other decodes."""
        self._forget_at = {each: at for each, at in self._forget_at.items() if each[1] in decodes}

    def drop(self, decode: PeerAddress) -> None:
        self._forget_at = {each: at for each, at in self._forget_at.items() if each[1] != decode}

    def expire(self, now: float) -> None:
        self._forget_at = {each: at for each, at in self._forget_at.items() if now < at}

    def ends_at(self) -> Iterator[float]:
        """Return when ids will be forgotten, where that is known."""
        return (at for at in list(self._forget_at.values()) if at < math.inf)
