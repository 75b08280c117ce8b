"""The queue of a Pairing: requests that wait for a prefill and a decode, which of them is next, and how the policy is
asked for its pair.

    priority ─► streams that have begun ─► the tenant that has had least, with fair shares ─► deadline and age

Every OLDEST_EVERY-th turn goes by age alone, so that low priorities are served too. A request that cannot be served now
keeps its place until the next step, and does not block requests that need other ports.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs

from pdinfer.engine.schedule import PATIENCE_S, is_turn_of_oldest
from pdinfer.errors import ConfigError
from pdinfer.pairing.policy import Policy
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.tracked_request import TrackedRequest
from pdinfer.stats import DecodeLoad, EngineLoad, PrefillLoad
from pdinfer.types import Choice, PeerAddress, RequestShape

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

    def __len__(self) -> int:
        return len(self._had)

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


class PendingLoad:
    """The work that each prefill will get once decode has granted pages for it. The prefill's own load does not include
    it yet, so a policy that saw only that load would send a whole burst to one prefill."""

    def __init__(self, coming: Iterable[tuple[PeerAddress | None, RequestShape]] = ()) -> None:
        self._requests: Counter[PeerAddress] = Counter()
        self._tokens: Counter[PeerAddress] = Counter()
        for prefill, shape in coming:
            if prefill is not None:
                self.add(prefill, shape)

    def add(self, prefill: PeerAddress, shape: RequestShape) -> None:
        """Count a request that this prefill will get."""
        self._requests[prefill] += 1
        self._tokens[prefill] += shape.num_prompt_tokens + shape.num_output_tokens

    def on_top_of(self, load: PrefillLoad) -> PrefillLoad:
        """Return the load including the pending work."""
        return attrs.evolve(
            load,
            num_queued_requests=load.num_queued_requests + self._requests[load.address],
            num_queued_tokens=load.num_queued_tokens + self._tokens[load.address],
        )


class Chooser:
    """Asks one policy for every request, and counts its choices."""

    def __init__(self, ports: Ports, policy: Policy, max_queued_per_decode: int) -> None:
        self._ports = ports
        self._policy = policy
        self._max_queued_per_decode = max_queued_per_decode
        self._num_choices = 0

    def pending(self, requests: Iterable[TrackedRequest]) -> PendingLoad:
        """Return the work that the prefills of these requests do not know of yet."""
        coming = [tracked for tracked in requests if not tracked.forwarded]
        return PendingLoad((tracked.prefill, tracked.shape(self._num_choices)) for tracked in coming)

    def pair(self, tracked: TrackedRequest, pending: PendingLoad) -> Choice | None:
        """Return a prefill and a decode for a request, and add it to `pending`; None lets the request wait."""
        shape = tracked.shape(self._num_choices)
        choice = choose(self._ports, self._policy, shape, pending, max_queued_per_decode=self._max_queued_per_decode)
        if choice is not None:
            pending.add(choice.prefill, shape)
            self._num_choices += 1
        return choice

    def prefill(self, tracked: TrackedRequest, decode: PeerAddress, pending: PendingLoad) -> PeerAddress | None:
        """Return another prefill for a request that `decode` holds, and add it to `pending`; None when there is
        none."""
        shape = tracked.shape(self._num_choices)
        choice = choose(self._ports, self._policy, shape, pending, decode=decode)
        if choice is None:
            return None
        pending.add(choice.prefill, shape)
        return choice.prefill


def choose(
    ports: Ports,
    policy: Policy,
    shape: RequestShape,
    pending: PendingLoad,
    *,
    max_queued_per_decode: int = 0,
    decode: PeerAddress | None = None,
) -> Choice | None:
    """Return the pair that `policy` chooses for a request, or None to let it wait.

    The policy is shown the ports that can hold the request and are not full, with every link between them. With
    `decode`, it is shown that decode alone, full or not. A policy that names a link of `shape.links` is asked once. One
    that looks at loads alone may name two ports without a link: it is asked again with only the prefills that reach
    that decode, or without a decode that no prefill reaches. Raises ConfigError when it names a port it was not shown.
    """
    fitting, decode_ports = ports.fitting(shape.num_prompt_tokens + shape.max_new_tokens)
    prefills = [pending.on_top_of(port.load()) for port in fitting.values()]
    if decode is not None:
        decodes = [ports.decodes[decode].load()]
    else:
        decodes = [port.load() for port in decode_ports.values()]
        decodes = [load for load in decodes if load.num_waiting_requests < max_queued_per_decode]
    near = prefills
    while (choice := policy(_with_links(shape, ports, near, decodes), near, decodes)) is not None:
        if not (_shows(near, choice.prefill) and _shows(decodes, choice.decode)):
            raise ConfigError(
                "the policy chose a port that is not part of this pairing, is full or out of the other's reach; "
                "it must take one it was shown"
            )
        if ports.linked(choice.prefill, choice.decode):
            break
        near = [load for load in prefills if ports.linked(load.address, choice.decode)]
        decodes = [load for load in decodes if (load.address == choice.decode) == bool(near)]
        near = near or prefills
    return choice


def _with_links(
    shape: RequestShape, ports: Ports, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]
) -> RequestShape:
    """Return the shape with the links between these ports."""
    shown = {load.address for load in (*prefills, *decodes)}
    links = tuple(link for link in ports.links() if link.prefill in shown and link.decode in shown)
    return attrs.evolve(shape, links=links)


def _shows(loads: Iterable[EngineLoad], address: PeerAddress) -> bool:
    return any(load.address == address for load in loads)
