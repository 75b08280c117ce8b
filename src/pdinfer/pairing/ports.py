"""The ports of a Pairing: which take part, which of them reach each other, and which were lost and may come back."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from operator import attrgetter
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import attrs

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.prefix import KeyScheme
from pdinfer.log import log
from pdinfer.pairing.port import BriefPort, CachingPort, DecodePort, Port, PrefillPort, ReturningPort, changing_with
from pdinfer.process.locks import EXHAUSTED, new_lock
from pdinfer.stats import DecodeLoad, EngineLoad, Links, LostPort, PeerStats, PrefillLoad
from pdinfer.types import Link, PeerAddress, PeerKey, RequestLimits, peer_key

LOOK_S = 0.1
"""How often loads are searched for links that were lost or came back."""
DIAL_S = 5.0
"""How often links that are down are dialled anew: the channels may have given up the peer, or never reached it."""
MAX_PORTS_LOST = 64
"""How many losses `stats` lists."""
BACK_S = 1.0
"""How often a port comes back at most: one that fails in every step would be dialled in every step."""
PORT_WAIT_S = 60.0
"""How long requests wait for a port where the last one was in another process, which comes back or is replaced."""

AnyPort = TypeVar("AnyPort", bound=Port)


ByScheme = Mapping[KeyScheme, Mapping[PeerAddress, CachingPort]]
"""Ports that report which pages they hold, by how the keys of these pages are made."""


@attrs.frozen
class _Member:
    """A port, the requests that it takes, the ports that change their role with it, and how it reports a brief load and
    its links."""

    port: Port
    limits: RequestLimits
    together: tuple[PeerAddress, ...]
    brief_load: Callable[[], EngineLoad]
    peers: Callable[[], tuple[PeerStats, ...]]

    @classmethod
    def of(cls, port: Port) -> _Member:
        try:
            together = changing_with(port, "decode" if port.role == "prefill" else "prefill")
        except ConfigError:
            together = (port.address,)
        if isinstance(port, BriefPort):
            return cls(port, port.limits, together, port.brief_load, port.peers)
        return cls(port, port.limits, together, port.load, lambda: port.load().kv.peers)


class Ports:
    """The ports of both sides by address, and which of them reach each other. A port in `leaving` serves what it has
    and is not chosen any more. `caching` are the prefills and the decodes that report which pages they hold.
    `roomiest_limits` are, for each side that has ports, those of the port that takes the longest request.
    `num_changes` grows whenever a port or a link comes or goes. One thread calls `look`, while any thread may add and
    drop ports: `prefills`, `decodes`, `caching` and `roomiest_limits` are replaced, never changed."""

    def __init__(self) -> None:
        self.prefills: dict[PeerAddress, PrefillPort] = {}
        self.decodes: dict[PeerAddress, DecodePort] = {}
        self.caching: tuple[ByScheme, ByScheme] = {}, {}
        self.roomiest_limits: list[RequestLimits] = []
        self.leaving: set[PeerAddress] = set()
        self.links_down: frozenset[tuple[PeerAddress, PeerAddress]] = frozenset()
        self.num_changes = 0
        self._members: dict[PeerAddress, _Member] = {}
        self._met: frozenset[tuple[PeerKey, PeerKey]] = frozenset()
        self._version = 0
        self._links: tuple[int, Links] = (-1, Links())
        self._peers: dict[PeerAddress, tuple[PeerStats, ...]] = {}
        self._changing = new_lock()

    @property
    def has_links(self) -> bool:
        """Whether any port has reported a link, which can then be lost."""
        return bool(self._met)

    @property
    def all(self) -> list[Port]:
        """All ports, decodes first: they grant what prefills then run."""
        return [*self.decodes.values(), *self.prefills.values()]

    @property
    def most_tokens(self) -> dict[str, int]:
        """The longest request that a port which may be chosen can hold, by role; 0 without such a port."""
        prefills, decodes = self.rooms
        return {"prefill": max(prefills, default=0), "decode": max(decodes, default=0)}

    @property
    def together(self) -> tuple[tuple[PeerAddress, ...], ...]:
        """Groups of ports that change their role together."""
        groups = dict.fromkeys(member.together for member in list(self._members.values()))
        return tuple(group for group in groups if len(group) > 1)

    @property
    def fits_all(self) -> int:
        """The longest request that every port can hold; 0 while one side has no port. Any thread may read it."""
        held = [member.limits.max_tokens for member in self._members.values()]
        return min(held, default=0) if self.prefills and self.decodes else 0

    def opposite(self, port: Port) -> list[Port]:
        return [*(self.decodes if port.role == "prefill" else self.prefills).values()]

    def add(self, port: Port, unlinked: Collection[PeerAddress] = ()) -> None:
        """Add a port that is linked to all of the other side but the `unlinked` ones. Those pairs are down until one
        end reports a link."""
        others = [other for other in self.opposite(port) if other.address in unlinked]
        down = [(port, other) if port.role == "prefill" else (other, port) for other in others]
        member = _Member.of(port)
        with self._changing:
            self._met |= {
                (peer_key(prefill.address), peer_key(rank)) for prefill, decode in down for rank in decode.addresses
            }
            self.links_down |= {(prefill.address, decode.address) for prefill, decode in down}
            self._replace({**self._members, port.address: member})
        if isinstance(port, PrefillEngine):
            port.take_turns(self._decoding_s)

    def drop(self, address: PeerAddress) -> None:
        with self._changing:
            members = dict(self._members)
            left = members.pop(address, None)
            keys = set(map(peer_key, (address,) if left is None else left.port.addresses))
            if left is not None and isinstance(left.port, PrefillEngine):
                left.port.take_turns(None)
            self._replace(members)
            self.leaving.discard(address)
            self.links_down = frozenset(pair for pair in self.links_down if address not in pair)
            self._met = frozenset(pair for pair in self._met if keys.isdisjoint(pair))

    def _replace(self, members: dict[PeerAddress, _Member]) -> None:
        self._members = members
        ports = [(address, member.port) for address, member in members.items()]
        self.prefills = {address: cast(PrefillPort, port) for address, port in ports if port.role == "prefill"}
        self.decodes = {address: cast(DecodePort, port) for address, port in ports if port.role == "decode"}
        self.caching = by_scheme(self.prefills.values()), by_scheme(self.decodes.values())
        sides = [[members[address].limits for address in side] for side in (self.prefills, self.decodes)]
        self.roomiest_limits = [_roomiest(side) for side in sides if side]
        self.num_changes += 1
        self._version += 1

    def brief_loads(self) -> tuple[dict[PeerAddress, PrefillLoad], dict[PeerAddress, DecodeLoad]]:
        """Return what policies are shown of all ports, leaving or not. Any thread may ask."""
        prefills: dict[PeerAddress, PrefillLoad] = {}
        decodes: dict[PeerAddress, DecodeLoad] = {}
        for address, member in list(self._members.items()):
            load = member.brief_load()
            if isinstance(load, PrefillLoad):
                prefills[address] = load
            elif isinstance(load, DecodeLoad):
                decodes[address] = load
        return prefills, decodes

    def _decoding_s(self) -> float | None:
        """Return how many seconds the decodes in this process compute in their next steps together, or None when
        nothing runs in them. Clients of engines in other processes compute there."""
        steps = [port.next_step_s() for port in self.decodes.values() if isinstance(port, DecodeEngine)]
        running = [step_s for step_s in steps if step_s is not None]
        return sum(running) if running else None

    @property
    def key_schemes(self) -> set[KeyScheme]:
        """The ways in which prefills, and decodes that trust all prefills alike, make the keys of their pages."""
        prefills, decodes = self.caching
        return {*prefills, *(scheme for scheme in decodes if not scheme.by_writer)}

    def part(self, port: Port) -> None:
        """Make the ports of the other side close their links to a lost port, which may still be alive."""
        for other in self.opposite(port):
            for rank in port.addresses:
                other.disconnect(rank)

    def take_back(self, port: Port) -> None:
        """Add a port again that was lost, and have its links dialled again without waiting for them."""
        self.add(port, [other.address for other in self.opposite(port)])
        self.dial()

    def dial(self) -> None:
        """Have the links dialled that are down, without waiting for them. Channels dial again by themselves, but give
        up a peer that they have not reached for a minute."""
        for prefill, decode in product(self.prefills.values(), self.decodes.values()):
            if (prefill.address, decode.address) in self.links_down:
                for rank in decode.addresses:
                    with contextlib.suppress(TransferError):
                        prefill.connect(rank, timeout_s=0.0)

    def look(self) -> None:
        """Find out which pairs have lost each other: one end reports a closed link, or no longer reports a link it had.
        Channels dial again by themselves, so a pair may be back at the next look."""
        peers = {address: member.peers() for address, member in self._members.items()}
        told = {
            (peer_key(address), peer_key(peer.address)): peer.connected
            for address, of_port in peers.items()
            for peer in of_port
        }
        with self._changing:
            self._peers = peers
            self._met |= told.keys()
            lost = {frozenset(pair) for pair in self._met if not told.get(pair, False)}
            links_down = frozenset(
                (prefill, decode)
                for prefill in self.prefills
                for decode, port in self.decodes.items()
                if lost and any(frozenset((peer_key(prefill), peer_key(rank))) in lost for rank in port.addresses)
            )
            self.num_changes += links_down != self.links_down
            self.links_down = links_down
            self._version += 1

    def linked(self, prefill: PeerAddress | None, decode: PeerAddress) -> bool:
        """Return whether both ports are here and reach each other."""
        return prefill in self.prefills and decode in self.decodes and (prefill, decode) not in self.links_down

    def has_linked_pair(self, total: int) -> bool:
        prefills, decodes = self.fitting(total)
        return any(self.linked(prefill, decode) for prefill in prefills for decode in decodes)

    def links(self) -> Links:
        """Return every pair that reaches each other, with what was measured on its link around the last look."""
        version = self._version
        if self._links[0] != version:
            self._links = version, Links(self._measured())
        return self._links[1]

    def _measured(self) -> Iterator[Link]:
        with self._changing:  # other threads may add ports
            members, prefills, decodes = self._members, self.prefills, self.decodes
        known = {}
        for address, member in members.items():
            peers = self._peers.get(address)
            known[address] = {peer_key(peer.address): peer for peer in (member.peers() if peers is None else peers)}
        for prefill, decode in product(prefills.values(), decodes.values()):
            if self.linked(prefill.address, decode.address):
                there, here = known[decode.address], known[prefill.address]
                speeds = [there[key].mb_per_s for key in map(peer_key, prefill.addresses) if key in there]
                inflight = [here[key].inflight_bytes for key in map(peer_key, decode.addresses) if key in here]
                yield Link(
                    prefill=prefill.address,
                    decode=decode.address,
                    bytes_per_s=sum(speeds) * 1e6 or None,  # of all ranks together; None when nothing was measured
                    inflight_bytes=sum(inflight),
                )

    @property
    def rooms(self) -> tuple[list[int], list[int]]:
        """The longest request of each prefill, and of each decode, that may be chosen; both in ascending order."""
        prefills, decodes = self.fitting(0)
        return self._longest(prefills), self._longest(decodes)

    def _longest(self, side: Iterable[PeerAddress]) -> list[int]:
        members = self._members
        return sorted([members[address].limits.max_tokens for address in side if address in members])

    def fitting(self, total: int) -> tuple[dict[PeerAddress, PrefillPort], dict[PeerAddress, DecodePort]]:
        """Return the prefills and the decodes that may be chosen for a request of `total` tokens, full or not."""
        return self._fitting(self.prefills, total), self._fitting(self.decodes, total)

    def _fitting(self, ports: Mapping[PeerAddress, AnyPort], total: int) -> dict[PeerAddress, AnyPort]:
        members, leaving = self._members, self.leaving
        return {
            address: port
            for address, port in ports.items()
            if address in members
            and members[address].limits.max_tokens >= total
            and not (leaving and address in leaving)
        }


def _roomiest(limits: Sequence[RequestLimits]) -> RequestLimits:
    """Return the limits of the port of one side that takes the longest request, with all ports' logits processors."""
    names = {name for each in limits for name in each.logits_processors}
    return attrs.evolve(max(limits, key=attrgetter("max_tokens")), logits_processors=tuple(sorted(names)))


def by_scheme(ports: Iterable[Port]) -> ByScheme:
    """Return those of the ports that report which pages they hold, unless they keep none."""
    found: dict[KeyScheme, dict[PeerAddress, CachingPort]] = {}
    for port in ports:
        if isinstance(port, CachingPort) and (scheme := port.key_scheme) is not None:
            found.setdefault(scheme, {})[port.address] = port
    return found


class LinkWatch:
    """Looks for links that were lost or came back, at `looks_at` again, and has those dialled that are down."""

    def __init__(self, ports: Ports) -> None:
        self.looks_at = -math.inf
        self._dials_at = -math.inf
        self._ports = ports

    def act(self, now: float) -> None:
        if now < self.looks_at:
            return
        self._ports.look()
        self.looks_at = now + LOOK_S
        if now >= self._dials_at:
            self._ports.dial()
            self._dials_at = now + DIAL_S


class LostPorts:
    """The losses of a Pairing. `away` are the ports that may come back; `num_lost` counts all losses."""

    def __init__(self, ports: Ports, port_wait_s: float | None) -> None:
        self._ports = ports
        self._port_wait_s = port_wait_s
        self.away: dict[PeerAddress, ReturningPort] = {}
        self.num_lost = 0
        self._next_return_at: WeakKeyDictionary[Port, float] = WeakKeyDictionary()
        self._lost: deque[tuple[float, LostPort]] = deque(maxlen=MAX_PORTS_LOST)
        self._waits_s: dict[str, float] = {}

    def told(self, now: float) -> tuple[LostPort, ...]:
        return tuple(attrs.evolve(lost, age_s=now - at) for at, lost in list(self._lost))

    def last(self, role: str) -> str:
        """Return the end of a sentence that says which port of a role was lost last; empty where none was."""
        found = next((lost for _, lost in reversed(self._lost) if lost.role == role), None)
        return f"; the last that was lost is {found.address}: {found.reason}" if found else ""

    def waits_s(self, role: str) -> float:
        """Return how long requests wait where no port of a role is left or holds them. Unless that is configured, they
        do not wait for an engine of this process, which only its host can replace."""
        return self._waits_s.get(role, 0.0) if self._port_wait_s is None else self._port_wait_s

    def expect_ports(self) -> None:
        """Let requests wait for ports that nobody has added yet."""
        self._waits_s = {"prefill": PORT_WAIT_S, "decode": PORT_WAIT_S, **self._waits_s}

    def add(self, port: Port, reason: str, now: float) -> None:
        """Record a loss, and close the port, which proves that it has stopped. If it may come back, the others close
        their links to it."""
        self.num_lost += 1
        lost = LostPort(address=port.address, role=port.role, age_s=0.0, reason=reason, is_back=False)
        self._lost.append((now, lost))
        self._waits_s[port.role] = PORT_WAIT_S if isinstance(port, ReturningPort) else 0.0
        if isinstance(port, ReturningPort):
            self.away[port.address] = port
            self._ports.part(port)
        else:
            self._close(port)

    def returns_at(self, now: float) -> float:
        """Return when the next of the ports may come back that were back a moment ago; infinity without such a port."""
        returns_at = [self._next_return_at.get(port, now) for port in list(self.away.values())]
        return min((at for at in returns_at if at > now), default=math.inf)

    def recover(self, now: float) -> None:
        """Use ports again that are back, and close those that never will be."""
        for address, port in list(self.away.items()):
            if now < self._next_return_at.get(port, now):
                continue
            try:
                if not port.recover():
                    continue
                if address in (known.address for known in self._ports.all if known is not port):
                    raise ConfigError("the host has added another port to it")
                self._ports.take_back(port)
            except EXHAUSTED:
                raise
            except Exception as error:  # noqa: BLE001 - as of a step
                log.error("a port that was lost will not come back: %s: %s", address, error)
                self._close(port)
            else:
                log.warning("a port that was lost is back: %s", address)
                self._next_return_at[port] = now + BACK_S
                for at, (lost_at, lost) in enumerate(self._lost):
                    if lost.address == address:
                        self._lost[at] = lost_at, attrs.evolve(lost, is_back=True)
            del self.away[address]

    def _close(self, port: Port) -> None:
        try:
            port.close()
        except Exception:  # noqa: BLE001 - it is broken already
            log.exception("closing the lost port failed")
