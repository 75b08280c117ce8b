"""The ports of a Pairing: which take part, which of them reach each other, and which were lost and may come back."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product
from typing import TypeVar, cast

import attrs

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.prefix import KeyScheme
from pdinfer.pairing.port import BriefPort, CachingPort, DecodePort, LinkedPort, Port, PrefillPort, ReturningPort
from pdinfer.process.locks import new_lock
from pdinfer.stats import DecodeLoad, EngineLoad, Links, LostPort, PeerStats, PrefillLoad
from pdinfer.types import Link, PeerAddress, PeerKey, RequestLimits, peer_key

MAX_PORTS_LOST = 64
"""How many losses `stats` lists."""
PORT_WAIT_S = 60.0
"""How long requests wait for a port where the last one was in another process, which comes back or is replaced."""

AnyPort = TypeVar("AnyPort", bound=Port)
T = TypeVar("T")

_log = logging.getLogger("pdinfer")


class Ports:
    """The ports of both sides by address, and which of them reach each other. A port in `leaving` serves what it has
    and is not chosen any more. `caching` are the prefills and the decodes that tell which pages they hold.
    `num_changes` grows whenever a port or a link comes or goes. One thread calls `look`, while any thread may add and
    drop ports: `prefills`, `decodes` and `caching` are replaced, never changed."""

    def __init__(self) -> None:
        self.prefills: dict[PeerAddress, PrefillPort] = {}
        self.decodes: dict[PeerAddress, DecodePort] = {}
        self.caching = CachingPorts(), CachingPorts()
        self.leaving: set[PeerAddress] = set()
        self.links_down: frozenset[tuple[PeerAddress, PeerAddress]] = frozenset()
        self.num_changes = 0
        self._met: frozenset[tuple[PeerKey, PeerKey]] = frozenset()
        self._version = 0
        self._links: tuple[int, Links] = (-1, Links())
        self._peers: dict[PeerAddress, tuple[PeerStats, ...]] = {}
        self._longest: dict[PeerAddress, int] = {}
        self._tell: dict[PeerAddress, Callable[[], EngineLoad]] = {}
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
    def fits_all(self) -> int:
        """The longest request that every port can hold; 0 while one side has no port. Any thread may read it."""
        longest = self._longest
        return min(longest.values(), default=0) if self.prefills and self.decodes else 0

    def opposite(self, port: Port) -> list[Port]:
        """Return the ports of the other side."""
        return [*(self.decodes if port.role == "prefill" else self.prefills).values()]

    def add(self, port: Port, unlinked: Collection[PeerAddress] = ()) -> None:
        """Add a port that is connected to all ports of the other side except the `unlinked` ones. Those pairs are down
        until one end reports a link."""
        others = [other for other in self.opposite(port) if other.address in unlinked]
        address, tell = port.address, port.brief_load if isinstance(port, BriefPort) else port.load
        with self._changing:
            self._longest = {**self._longest, address: port.limits.max_tokens}
            self._tell = {**self._tell, address: tell}
            if isinstance(port, CachingPort):
                prefills, decodes = self.caching
                is_prefill = port.role == "prefill"
                self.caching = (
                    prefills.plus(address, port) if is_prefill else prefills,
                    decodes if is_prefill else decodes.plus(address, port),
                )
            if port.role == "prefill":
                down: list[tuple[Port, Port]] = [(port, other) for other in others]
                self.prefills = {**self.prefills, port.address: cast(PrefillPort, port)}
                if isinstance(port, PrefillEngine):
                    port.take_turns(self._decoding_s)
            else:
                down = [(other, port) for other in others]
                self.decodes = {**self.decodes, port.address: cast(DecodePort, port)}
            self._met |= {
                (peer_key(prefill.address), peer_key(rank)) for prefill, decode in down for rank in decode.addresses
            }
            self.links_down |= {(prefill.address, decode.address) for prefill, decode in down}
            self.num_changes += 1
            self._version += 1

    def drop(self, address: PeerAddress) -> None:
        """Remove a port and its links."""
        with self._changing:
            keys = set(map(peer_key, self._ranks_of(address)))
            if isinstance(left := self.prefills.get(address), PrefillEngine):
                left.take_turns(None)
            self.leaving.discard(address)
            self._longest = _without(self._longest, address)
            self.caching = self.caching[0].minus(address), self.caching[1].minus(address)
            self._tell = _without(self._tell, address)
            self.prefills = _without(self.prefills, address)
            self.decodes = _without(self.decodes, address)
            self.links_down = frozenset(pair for pair in self.links_down if address not in pair)
            self._met = frozenset(pair for pair in self._met if keys.isdisjoint(pair))
            self.num_changes += 1
            self._version += 1

    def brief_loads(self) -> tuple[dict[PeerAddress, PrefillLoad], dict[PeerAddress, DecodeLoad]]:
        """Return what policies are told of all ports, leaving or not. Called from the thread that steps."""
        with self._changing:
            tell, prefills, decodes = self._tell, self.prefills, self.decodes
        loads = {address: cast(PrefillLoad, tell[address]()) for address in prefills}
        return loads, {address: cast(DecodeLoad, tell[address]()) for address in decodes}

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
        return {*prefills.by_scheme, *(scheme for scheme in decodes.by_scheme if not scheme.by_writer)}

    def _ranks_of(self, address: PeerAddress) -> tuple[PeerAddress, ...]:
        port: Port | None = self.prefills.get(address) or self.decodes.get(address)
        return (address,) if port is None else port.addresses

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
        peers = {port.address: _peers_of(port) for port in self.all}
        told = {
            (peer_key(address), peer_key(peer.address)): peer.connected
            for address, of_port in peers.items()
            for peer in of_port
        }
        with self._changing:
            self._peers = peers
            self._met |= told.keys()
            lost = {pair for pair in self._met if not told.get(pair, False)}
            links_down = frozenset(
                (prefill, decode)
                for prefill in self.prefills
                for decode, port in self.decodes.items()
                if any(_meets(lost, prefill, rank) for rank in port.addresses)
            )
            self.num_changes += links_down != self.links_down
            self.links_down = links_down
            self._version += 1

    def linked(self, prefill: PeerAddress | None, decode: PeerAddress) -> bool:
        """Return whether both ports are here and reach each other."""
        return prefill in self.prefills and decode in self.decodes and (prefill, decode) not in self.links_down

    def has_linked_pair(self, total: int) -> bool:
        """Return whether any prefill and decode that can hold `total` tokens reach each other."""
        prefills, decodes = self.fitting(total)
        return any(self.linked(prefill, decode) for prefill in prefills for decode in decodes)

    def links(self) -> Links:
        """Return every pair that reaches each other, with what was measured on its link around the last look."""
        version = self._version
        if self._links[0] != version:
            self._links = version, Links(self._measured())
        return self._links[1]

    def _measured(self) -> Iterator[Link]:
        prefills, decodes = self.prefills, self.decodes
        looked: list[Port] = [*prefills.values(), *decodes.values()]
        known = {port.address: {peer_key(peer.address): peer for peer in self._peers_of(port)} for port in looked}
        for prefill, decode in product(prefills.values(), decodes.values()):
            if self.linked(prefill.address, decode.address):
                yield Link(
                    prefill=prefill.address,
                    decode=decode.address,
                    bytes_per_s=_arriving(known[decode.address], prefill),
                    inflight_bytes=_inflight(known[prefill.address], decode),
                )

    def _peers_of(self, port: Port) -> tuple[PeerStats, ...]:
        """Return the peers that a port had at the last look. A port that came since is asked now."""
        peers = self._peers.get(port.address)
        return _peers_of(port) if peers is None else peers

    def writers(self, prefill: PeerAddress) -> tuple[PeerAddress, ...]:
        """Return the ranks that write what is submitted to this prefill."""
        return self.prefills[prefill].addresses

    def roomiest_limits(self) -> list[RequestLimits]:
        """Return, for each side, the limits of the port that takes the longest request, with the logits processors of
        all ports. Any thread may call it."""
        sides = [
            [port.limits for port in list(self.prefills.values())],
            [port.limits for port in list(self.decodes.values())],
        ]
        return [
            attrs.evolve(
                max(side, key=lambda limits: limits.max_tokens),
                logits_processors=tuple(sorted({name for limits in side for name in limits.logits_processors})),
            )
            for side in sides
            if side
        ]

    @property
    def rooms(self) -> tuple[list[int], list[int]]:
        """The longest request of each prefill, and of each decode, that may be chosen; both in ascending order."""
        prefills, decodes = self.fitting(0)
        longest = self._longest
        return sorted([longest.get(at, 0) for at in prefills]), sorted([longest.get(at, 0) for at in decodes])

    def fitting(self, total: int) -> tuple[dict[PeerAddress, PrefillPort], dict[PeerAddress, DecodePort]]:
        """Return the prefills and the decodes that may be chosen for a request of `total` tokens, full or not."""
        return self._fitting(self.prefills, total), self._fitting(self.decodes, total)

    def _fitting(self, ports: Mapping[PeerAddress, AnyPort], total: int) -> dict[PeerAddress, AnyPort]:
        longest, leaving = self._longest, self.leaving
        return {
            address: port
            for address, port in ports.items()
            if longest.get(address, 0) >= total and not (leaving and address in leaving)
        }


@attrs.frozen
class CachingPorts:
    """The ports of one side that tell which pages they hold, by how they make the keys of their pages."""

    by_scheme: Mapping[KeyScheme, Mapping[PeerAddress, CachingPort]] = attrs.field(factory=dict)

    def plus(self, address: PeerAddress, port: CachingPort) -> CachingPorts:
        """Return these ports and another one, if that caches pages."""
        scheme = port.key_scheme
        if scheme is None:
            return self
        return CachingPorts({**self.by_scheme, scheme: {**self.by_scheme.get(scheme, {}), address: port}})

    def minus(self, address: PeerAddress) -> CachingPorts:
        """Return these ports without one."""
        left = {
            scheme: {known: port for known, port in ports.items() if known != address}
            for scheme, ports in self.by_scheme.items()
        }
        return CachingPorts({scheme: ports for scheme, ports in left.items() if ports})


def _peers_of(port: Port) -> tuple[PeerStats, ...]:
    return port.peers() if isinstance(port, LinkedPort) else port.load().kv.peers


def _without(known: Mapping[PeerAddress, T], address: PeerAddress) -> dict[PeerAddress, T]:
    return {other: item for other, item in known.items() if other != address}


def _meets(pairs: Collection[tuple[PeerKey, PeerKey]], one: PeerAddress, other: PeerAddress) -> bool:
    keys = peer_key(one), peer_key(other)
    return keys in pairs or keys[::-1] in pairs


def _arriving(peers: Mapping[PeerKey, PeerStats], prefill: PrefillPort) -> float | None:
    """Return how many bytes per second all ranks of a prefill send together, or None when no speed was measured."""
    speeds = [peers[key].mb_per_s for key in map(peer_key, prefill.addresses) if key in peers]
    return sum(speeds) * 1e6 or None


def _inflight(peers: Mapping[PeerKey, PeerStats], decode: DecodePort) -> int:
    return sum(peers[key].inflight_bytes for key in map(peer_key, decode.addresses) if key in peers)


class LostPorts:
    """The losses of a Pairing. `away` are the ports that may come back; `num_lost` counts all losses."""

    def __init__(self) -> None:
        self.away: dict[PeerAddress, ReturningPort] = {}
        self.num_lost = 0
        self._lost: deque[tuple[float, LostPort]] = deque(maxlen=MAX_PORTS_LOST)
        self._waits_s: dict[str, float] = {}

    def told(self, now: float) -> tuple[LostPort, ...]:
        """Return the newest losses, in order of time."""
        return tuple(attrs.evolve(lost, age_s=now - at) for at, lost in list(self._lost))

    def last(self, role: str) -> str:
        """Return the end of a sentence that says which port of a role was lost last; empty where none was."""
        found = next((lost for _, lost in reversed(self._lost) if lost.role == role), None)
        return f"; the last that was lost is {found.address}: {found.reason}" if found else ""

    def waits_s(self, role: str) -> float:
        """Return how long requests wait for a port of a role where none is left: not at all for an engine of this
        process, which only its host can replace."""
        return self._waits_s.get(role, 0.0)

    def set_aside(self, port: Port, ports: Ports) -> None:
        """Close a port, which proves that it has stopped. Of one that may come back the others close their links."""
        self._waits_s[port.role] = PORT_WAIT_S if isinstance(port, ReturningPort) else 0.0
        if isinstance(port, ReturningPort):
            self.away[port.address] = port
            ports.part(port)
        else:
            self._close(port)

    def add(self, port: Port, reason: str, now: float) -> None:
        """Count and record a loss."""
        self.num_lost += 1
        lost = LostPort(address=port.address, role=port.role, age_s=0.0, reason=reason, is_back=False)
        self._lost.append((now, lost))

    def recover(self, ports: Ports) -> None:
        """Use ports again that are back, and close those that never will be."""
        for address, port in list(self.away.items()):
            try:
                if not port.recover():
                    continue
                if address in (known.address for known in ports.all if known is not port):
                    raise ConfigError("the host has added another port to it")
                ports.take_back(port)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - as of a step
                _log.error("a port that was lost will not come back: %s: %s", address, error)
                self._close(port)
            else:
                _log.warning("a port that was lost is back: %s", address)
                for at, (lost_at, lost) in enumerate(self._lost):
                    if lost.address == address:
                        self._lost[at] = lost_at, attrs.evolve(lost, is_back=True)
            del self.away[address]

    def _close(self, port: Port) -> None:
        try:
            port.close()
        except Exception:  # noqa: BLE001 - it is broken already
            _log.exception("closing the lost port failed")
