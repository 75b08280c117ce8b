"""The ports of a Pairing: what an engine has to offer, here or elsewhere, and the book of those that take part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import attrs

from pdinfer.errors import ConfigError
from pdinfer.policy import Policy
from pdinfer.schedule import RequestLimits
from pdinfer.types import Choice, DecodeLoad, Event, PageGrant, PeerAddress, PrefillLoad, Request, RequestShape


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


AnyPort = TypeVar("AnyPort", bound=Port)


class Promised:
    """What each prefill will get once decode has granted its pages. It cannot know of that itself, and a policy that
    went by its load alone would send a whole burst to one prefill."""

    def __init__(self, promises: Iterable[tuple[PeerAddress | None, RequestShape]] = ()) -> None:
        self._requests: Counter[PeerAddress] = Counter()
        self._tokens: Counter[PeerAddress] = Counter()
        for prefill, shape in promises:
            if prefill is not None:
                self.add(prefill, shape)

    def add(self, prefill: PeerAddress, shape: RequestShape) -> None:
        self._requests[prefill] += 1
        self._tokens[prefill] += shape.num_prompt_tokens + shape.num_output_tokens

    def on_top_of(self, load: PrefillLoad) -> PrefillLoad:
        """The load with what is promised."""
        return attrs.evolve(
            load,
            num_queued_requests=load.num_queued_requests + self._requests[load.address],
            num_queued_tokens=load.num_queued_tokens + self._tokens[load.address],
        )


class Roster:
    """The ports of both sides by address. A leaving port serves what it has and is chosen no more."""

    def __init__(self) -> None:
        self.prefills: dict[PeerAddress, PrefillPort] = {}
        self.decodes: dict[PeerAddress, DecodePort] = {}
        self.leaving: set[PeerAddress] = set()

    @property
    def all(self) -> list[Port]:
        """Decodes first: they grant what prefills then run."""
        return [*self.decodes.values(), *self.prefills.values()]

    @property
    def most_tokens(self) -> dict[str, int]:
        """By role, the longest request that a port which may be chosen can hold; 0 when there is none."""
        sides: dict[str, Mapping[PeerAddress, Port]] = {"prefill": self.prefills, "decode": self.decodes}
        return {
            role: max((port.limits.max_tokens for port in self._fitting(ports, 0)), default=0)
            for role, ports in sides.items()
        }

    def add(self, port: PrefillPort | DecodePort, *, timeout_s: float) -> None:
        """Connects a port to every port of the other side, then lists it; raises what connecting raised."""
        if isinstance(port.load(), PrefillLoad):
            for address in self.decodes:
                port.connect(address, timeout_s=timeout_s)
            self.prefills[port.address] = port  # type: ignore[assignment]
        else:
            for prefill in self.prefills.values():
                prefill.connect(port.address, timeout_s=timeout_s)
            self.decodes[port.address] = port  # type: ignore[assignment]

    def drop(self, address: PeerAddress) -> Port | None:
        """Takes a port off the list."""
        self.leaving.discard(address)
        return self.prefills.pop(address, None) or self.decodes.pop(address, None)

    def roomiest_limits(self) -> list[RequestLimits]:
        """Of each side the limits of the port that takes the longest request. Any thread, while ports come and go."""
        sides = [
            [port.limits for port in list(self.prefills.values())],
            [port.limits for port in list(self.decodes.values())],
        ]
        return [max(side, key=lambda limits: limits.max_tokens) for side in sides if side]

    def choose(
        self,
        policy: Policy,
        shape: RequestShape,
        promised: Promised,
        *,
        max_queued_per_decode: int = 0,
        decode: PeerAddress | None = None,
    ) -> Choice | None:
        """What `policy` says of the ports that can hold the request and are not full; with `decode`, of the prefills
        for that one, full or not. ConfigError when it names a port that is not here."""
        total = shape.num_prompt_tokens + shape.max_new_tokens
        prefills = [promised.on_top_of(port.load()) for port in self._fitting(self.prefills, total)]
        if decode is not None:
            decodes = [self.decodes[decode].load()]
        else:
            decodes = [port.load() for port in self._fitting(self.decodes, total)]
            decodes = [load for load in decodes if load.num_waiting_requests < max_queued_per_decode]
        choice = policy(shape, prefills, decodes)
        if choice is not None and (choice.prefill not in self.prefills or choice.decode not in self.decodes):
            raise ConfigError("the policy chose a port that is not part of this pairing; it must take one it was shown")
        return choice

    def _fitting(self, ports: Mapping[PeerAddress, AnyPort], total: int) -> list[AnyPort]:
        return [
            port for address, port in ports.items() if address not in self.leaving and port.limits.max_tokens >= total
        ]
