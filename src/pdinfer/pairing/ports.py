"""The ports of a Pairing: what an engine has to offer, here or elsewhere, and the book of those that take part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Protocol, TypeVar, cast, runtime_checkable

import attrs

from pdinfer.errors import TransferError
from pdinfer.process.locks import new_lock
from pdinfer.stats import DecodeLoad, EngineLoad, PeerStats, PrefillLoad
from pdinfer.types import Event, Link, PageGrant, PeerAddress, PeerKey, Request, RequestLimits, peer_key


class Port(Protocol):
    """What prefill and decode ports have in common. `submit` and `cancel` never raise; a `step` that does says that the
    port is lost."""

    @property
    def role(self) -> str:
        """Say which side the port is on: "prefill" or "decode"."""

    @property
    def address(self) -> PeerAddress: ...

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """Those of every rank that has what is submitted to the port, its own `address` first."""

    @property
    def limits(self) -> RequestLimits: ...

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None: ...

    def disconnect(self, peer: PeerAddress) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[Event]: ...

    def load(self) -> EngineLoad: ...

    def notify(self, listener: Callable[[], None]) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


class PrefillPort(Port, Protocol):
    """A prefill engine, here or elsewhere."""

    def submit(self, request: Request, grant: PageGrant) -> None: ...

    def load(self) -> PrefillLoad: ...


class DecodePort(Port, Protocol):
    """A decode engine, here or elsewhere."""

    def submit(self, request: Request, *, writers: Sequence[PeerAddress]) -> None: ...

    def change_writers(self, request_id: str, *, writers: Sequence[PeerAddress]) -> None: ...

    def load(self) -> DecodeLoad: ...


@runtime_checkable
class ReturningPort(Port, Protocol):
    """A port that may come back after it was lost, with nothing of what it had: `recover` tells whether it has, and
    raises when it will not."""

    def recover(self) -> bool: ...


AnyPort = TypeVar("AnyPort", bound=Port)


class Ports:
    """The ports of both sides by address, and which of them reach each other. A leaving port serves what it has and is
    chosen no more. `num_changes` grows whenever a port or a link comes or goes. One thread looks, and any may add and
    drop meanwhile: whoever goes through `prefills` or `decodes` has them as they were."""

    def __init__(self) -> None:
        self.prefills: dict[PeerAddress, PrefillPort] = {}
        self.decodes: dict[PeerAddress, DecodePort] = {}
        self.leaving: set[PeerAddress] = set()
        self.links_down: frozenset[tuple[PeerAddress, PeerAddress]] = frozenset()
        self.num_changes = 0
        self._met: frozenset[tuple[PeerKey, PeerKey]] = frozenset()
        self._version = 0
        self._links: tuple[int, tuple[Link, ...]] = (-1, ())
        self._changing = new_lock()

    @property
    def has_links(self) -> bool:
        """Whether any port told of a link, which may then be lost."""
        return bool(self._met)

    @property
    def all(self) -> list[Port]:
        """Decodes first: they grant what prefills then run."""
        return [*self.decodes.values(), *self.prefills.values()]

    @property
    def most_tokens(self) -> dict[str, int]:
        """By role, the longest request that a port which may be chosen can hold; 0 when there is none."""
        sides: dict[str, Mapping[PeerAddress, Port]] = {"prefill": self.prefills, "decode": self.decodes}
        return {
            role: max((port.limits.max_tokens for port in self._fitting(ports, 0).values()), default=0)
            for role, ports in sides.items()
        }

    def opposite(self, port: Port) -> list[Port]:
        """The ports of the other side."""
        return [*(self.decodes if port.role == "prefill" else self.prefills).values()]

    def add(self, port: Port, unlinked: Collection[PeerAddress] = ()) -> None:
        """Lists a port that is connected to those of the other side but the `unlinked`: these pairs are down until one
        end tells of a link."""
        others = [other for other in self.opposite(port) if other.address in unlinked]
        with self._changing:
            if port.role == "prefill":
                down: list[tuple[Port, Port]] = [(port, other) for other in others]
                self.prefills = {**self.prefills, port.address: cast(PrefillPort, port)}
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
        """Takes a port off the list."""
        with self._changing:
            keys = set(map(peer_key, self._ranks_of(address)))
            self.leaving.discard(address)
            self.prefills = {known: port for known, port in self.prefills.items() if known != address}
            self.decodes = {known: port for known, port in self.decodes.items() if known != address}
            self.links_down = frozenset(pair for pair in self.links_down if address not in pair)
            self._met = frozenset(pair for pair in self._met if keys.isdisjoint(pair))
            self.num_changes += 1
            self._version += 1

    def _ranks_of(self, address: PeerAddress) -> tuple[PeerAddress, ...]:
        port: Port | None = self.prefills.get(address) or self.decodes.get(address)
        return (address,) if port is None else port.addresses

    def part(self, port: Port) -> None:
        """Has the ports of the other side close their links to one that is lost: it may still be alive."""
        for other in self.opposite(port):
            for rank in port.addresses:
                other.disconnect(rank)

    def take_back(self, port: Port) -> None:
        """Lists a port that was lost. Its links are dialled anew, for which nobody waits."""
        for other in self.opposite(port):
            prefill, decode = (port, other) if port.role == "prefill" else (other, port)
            for rank in decode.addresses:
                with contextlib.suppress(TransferError):
                    prefill.connect(rank, timeout_s=0.0)
        self.add(port, [other.address for other in self.opposite(port)])

    def look(self) -> None:
        """Finds out which pairs have lost each other: either end tells of a link that is closed, or no more of one that
        it had. Channels dial again by themselves, so a pair may be back at the next look."""
        told = {
            (peer_key(port.address), peer_key(peer.address)): peer.connected
            for port in self.all
            for peer in port.load().kv.peers
        }
        with self._changing:
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
        """Whether both are here and reach each other."""
        return prefill in self.prefills and decode in self.decodes and (prefill, decode) not in self.links_down

    def has_linked_pair(self, total: int) -> bool:
        """Return whether a prefill and a decode that may be chosen for so many tokens reach each other."""
        prefills, decodes = self.fitting(total)
        return any(self.linked(prefill, decode) for prefill in prefills for decode in decodes)

    def links(self) -> tuple[Link, ...]:
        """Return the pairs that reach each other, with what was measured on their links by the last look."""
        version = self._version
        if self._links[0] != version:
            self._links = version, tuple(self._measured())
        return self._links[1]

    def _measured(self) -> Iterator[Link]:
        prefills, decodes = self.prefills, self.decodes
        known = {
            port.address: {peer_key(peer.address): peer for peer in port.load().kv.peers}
            for port in (*prefills.values(), *decodes.values())
        }
        for prefill, decode in product(prefills.values(), decodes.values()):
            if self.linked(prefill.address, decode.address):
                yield Link(
                    prefill=prefill.address,
                    decode=decode.address,
                    bytes_per_s=_arriving(known[decode.address], prefill),
                    inflight_bytes=_inflight(known[prefill.address], decode),
                )

    def writers(self, prefill: PeerAddress) -> tuple[PeerAddress, ...]:
        """Who writes what is submitted to this prefill."""
        return self.prefills[prefill].addresses

    def roomiest_limits(self) -> list[RequestLimits]:
        """Of each side the limits of the port that takes the longest request, with the logits processors of all. Any
        thread, while ports come and go."""
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
        """The longest request that each prefill and each decode holds which may be chosen, in ascending order."""
        prefills, decodes = self._fitting(self.prefills, 0), self._fitting(self.decodes, 0)
        return (
            sorted(port.limits.max_tokens for port in prefills.values()),
            sorted(port.limits.max_tokens for port in decodes.values()),
        )

    def fitting(self, total: int) -> tuple[dict[PeerAddress, PrefillPort], dict[PeerAddress, DecodePort]]:
        """The prefills and the decodes that may be chosen for a request of so many tokens, were they not full."""
        return self._fitting(self.prefills, total), self._fitting(self.decodes, total)

    def _fitting(self, ports: Mapping[PeerAddress, AnyPort], total: int) -> dict[PeerAddress, AnyPort]:
        return {
            address: port
            for address, port in ports.items()
            if address not in self.leaving and port.limits.max_tokens >= total
        }


def _meets(pairs: Collection[tuple[PeerKey, PeerKey]], one: PeerAddress, other: PeerAddress) -> bool:
    keys = peer_key(one), peer_key(other)
    return keys in pairs or keys[::-1] in pairs


def _arriving(peers: Mapping[PeerKey, PeerStats], prefill: PrefillPort) -> float | None:
    """Return the bytes a second that arrived from all ranks of a prefill together, None where none were measured."""
    speeds = [peers[key].mb_per_s for key in map(peer_key, prefill.addresses) if key in peers]
    return sum(speeds) * 1e6 or None


def _inflight(peers: Mapping[PeerKey, PeerStats], decode: DecodePort) -> int:
    return sum(peers[key].inflight_bytes for key in map(peer_key, decode.addresses) if key in peers)
