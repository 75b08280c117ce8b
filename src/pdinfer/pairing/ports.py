"""The ports of a Pairing: what an engine has to offer, here or elsewhere, and the book of those that take part."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, cast, runtime_checkable

import attrs

from pdinfer.errors import ConfigError, TransferError
from pdinfer.pairing.policy import Policy
from pdinfer.process.locks import new_lock
from pdinfer.stats import DecodeLoad, EngineLoad, PrefillLoad
from pdinfer.types import Choice, Event, PageGrant, PeerAddress, PeerKey, Request, RequestLimits, RequestShape, peer_key


class Port(Protocol):
    """What prefill and decode ports have in common. `submit` and `cancel` never raise; a `step` that does says that the
    port is lost."""

    @property
    def address(self) -> PeerAddress: ...

    @property
    def limits(self) -> RequestLimits: ...

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[Event]: ...

    def load(self) -> EngineLoad: ...

    def notify(self, listener: Callable[[], None]) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


def addresses_of(port: Port) -> tuple[PeerAddress, ...]:
    """Of every rank that has what is submitted to the port, its own first: what the port says in `addresses`, if it is
    one that speaks for several ranks."""
    return getattr(port, "addresses", ()) or (port.address,)


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


class PendingLoad:
    """What each prefill will get once decode has granted its pages. It cannot know of that itself, and a policy that
    went by its load alone would send a whole burst to one prefill."""

    def __init__(self, coming: Iterable[tuple[PeerAddress | None, RequestShape]] = ()) -> None:
        self._requests: Counter[PeerAddress] = Counter()
        self._tokens: Counter[PeerAddress] = Counter()
        for prefill, shape in coming:
            if prefill is not None:
                self.add(prefill, shape)

    def add(self, prefill: PeerAddress, shape: RequestShape) -> None:
        self._requests[prefill] += 1
        self._tokens[prefill] += shape.num_prompt_tokens + shape.num_output_tokens

    def on_top_of(self, load: PrefillLoad) -> PrefillLoad:
        """The load with what is pending."""
        return attrs.evolve(
            load,
            num_queued_requests=load.num_queued_requests + self._requests[load.address],
            num_queued_tokens=load.num_queued_tokens + self._tokens[load.address],
        )


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
        return [*(self.decodes if isinstance(port.load(), PrefillLoad) else self.prefills).values()]

    def add(self, port: Port, unlinked: Collection[PeerAddress] = ()) -> None:
        """Lists a port that is connected to those of the other side but the `unlinked`: these pairs are down until one
        end tells of a link."""
        others = [other for other in self.opposite(port) if other.address in unlinked]
        with self._changing:
            if isinstance(port.load(), PrefillLoad):
                down: list[tuple[Port, Port]] = [(port, other) for other in others]
                self.prefills = {**self.prefills, port.address: cast(PrefillPort, port)}
            else:
                down = [(other, port) for other in others]
                self.decodes = {**self.decodes, port.address: cast(DecodePort, port)}
            self._met |= {
                (peer_key(prefill.address), peer_key(rank)) for prefill, decode in down for rank in addresses_of(decode)
            }
            self.links_down |= {(prefill.address, decode.address) for prefill, decode in down}
            self.num_changes += 1

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

    def _ranks_of(self, address: PeerAddress) -> tuple[PeerAddress, ...]:
        port: Port | None = self.prefills.get(address) or self.decodes.get(address)
        return (address,) if port is None else addresses_of(port)

    def part(self, port: Port) -> None:
        """Has the ports of the other side close their links to one that is lost: it may still be alive."""
        for other in self.opposite(port):
            if (disconnect := getattr(other, "disconnect", None)) is not None:
                for rank in addresses_of(port):
                    disconnect(rank)

    def take_back(self, port: Port) -> None:
        """Lists a port that was lost. Its links are dialled anew, for which nobody waits."""
        for other in self.opposite(port):
            prefill, decode = (port, other) if isinstance(port.load(), PrefillLoad) else (other, port)
            for rank in addresses_of(decode):
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
                if any(_meets(lost, prefill, rank) for rank in addresses_of(port))
            )
            self.num_changes += links_down != self.links_down
            self.links_down = links_down

    def linked(self, prefill: PeerAddress | None, decode: PeerAddress) -> bool:
        """Whether both are here and reach each other."""
        return prefill in self.prefills and decode in self.decodes and (prefill, decode) not in self.links_down

    def writers(self, prefill: PeerAddress) -> tuple[PeerAddress, ...]:
        """Who writes what is submitted to this prefill."""
        return addresses_of(self.prefills[prefill])

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

    def fitting(self, total: int) -> tuple[list[PeerAddress], list[PeerAddress]]:
        """The prefills and the decodes that may be chosen for a request of so many tokens, were they not full."""
        return list(self._fitting(self.prefills, total)), list(self._fitting(self.decodes, total))

    def choose(
        self,
        policy: Policy,
        shape: RequestShape,
        pending: PendingLoad,
        *,
        max_queued_per_decode: int = 0,
        decode: PeerAddress | None = None,
    ) -> Choice | None:
        """What `policy` says of the ports that can hold the request, reach each other and are not full; with `decode`,
        of the prefills for that one, full or not. ConfigError when it names a port that is not here."""
        total = shape.num_prompt_tokens + shape.max_new_tokens
        prefills = [pending.on_top_of(port.load()) for port in self._fitting(self.prefills, total).values()]
        if decode is not None:
            decodes = [self.decodes[decode].load()]
        else:
            decodes = [port.load() for port in self._fitting(self.decodes, total).values()]
            decodes = [load for load in decodes if load.num_waiting_requests < max_queued_per_decode]
        near = prefills
        while (choice := policy(shape, near, decodes)) is not None:
            if not (_shows(near, choice.prefill) and _shows(decodes, choice.decode)):
                raise ConfigError(
                    "the policy chose a port that is not part of this pairing, is full or out of the other's reach; "
                    "it must take one it was shown"
                )
            if self.linked(choice.prefill, choice.decode):
                break
            # Asked once more with only the prefills of that decode, or without a decode that has none.
            near = [load for load in prefills if self.linked(load.address, choice.decode)]
            decodes = [load for load in decodes if (load.address == choice.decode) == bool(near)]
            near = near or prefills
        return choice

    def _fitting(self, ports: Mapping[PeerAddress, AnyPort], total: int) -> dict[PeerAddress, AnyPort]:
        return {
            address: port
            for address, port in ports.items()
            if address not in self.leaving and port.limits.max_tokens >= total
        }


def _meets(pairs: Collection[tuple[PeerKey, PeerKey]], one: PeerAddress, other: PeerAddress) -> bool:
    keys = peer_key(one), peer_key(other)
    return keys in pairs or keys[::-1] in pairs


def _shows(loads: Iterable[EngineLoad], address: PeerAddress) -> bool:
    return any(load.address == address for load in loads)
