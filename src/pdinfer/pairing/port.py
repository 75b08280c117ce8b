"""What an engine has to offer to be a port of a Pairing, in this process or another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.engine.roles import check_role
from pdinfer.errors import ConfigError
from pdinfer.kv.prefix import KeyScheme
from pdinfer.stats import DecodeLoad, EngineLoad, PeerStats, PrefillLoad
from pdinfer.types import Event, PageGrant, PeerAddress, Request, RequestLimits


class Port(Protocol):
    """What prefill and decode ports have in common. `submit` and `cancel` never raise. A `step` that raises means that
    the port is lost. The events that it returns are the Pairing's, which counts their times from its own submit."""

    @property
    def role(self) -> str:
        """The side of the port: "prefill" or "decode"."""

    @property
    def address(self) -> PeerAddress: ...

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """The addresses of all ranks that share the port's requests, its own `address` first."""

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
    """A prefill engine, in this process or another."""

    def submit(self, request: Request, grant: PageGrant) -> None: ...

    def load(self) -> PrefillLoad: ...


class DecodePort(Port, Protocol):
    """A decode engine, in this process or another."""

    def submit(self, request: Request, *, writers: Sequence[PeerAddress]) -> None: ...

    def change_writers(self, request_id: str, *, writers: Sequence[PeerAddress]) -> None: ...

    def load(self) -> DecodeLoad: ...


@runtime_checkable
class ReturningPort(Port, Protocol):
    """A port that may be lost and come back, without its requests. `recover` returns whether it is back, and raises
    when it never will be."""

    def recover(self) -> bool: ...


@runtime_checkable
class SwitchingPort(Protocol):
    """A port that can change its role, while it is not part of a pairing."""

    def check_role(self, role: str) -> tuple[PeerAddress, ...]:
        """Return the addresses of the ports that take this role only together, its own among them. Raise ConfigError
        when it cannot take it."""

    def become(self, role: str) -> PrefillPort | DecodePort | None:
        """Return the port that it has become, None while that is under way. Raise TransferError when it is lost."""


def changing_with(port: Port, role: str) -> tuple[PeerAddress, ...]:
    """Return the addresses of the ports that take a role only together, this one's among them. Raise ConfigError when
    it cannot take it."""
    if isinstance(port, PrefillEngine | DecodeEngine):
        return check_role(port, role)
    if isinstance(port, SwitchingPort):
        return port.check_role(role)
    raise ConfigError(f"{port} has no way to change its role: remove it, and add a port of the other role")


@runtime_checkable
class BriefPort(Protocol):
    """A port that quickly reports the part of its load that policies need, and its links, which are the load's
    `kv.peers`. Others are asked for all of their load."""

    def brief_load(self) -> EngineLoad: ...

    def peers(self) -> tuple[PeerStats, ...]: ...


@runtime_checkable
class TellingPort(Protocol):
    """A port that reports of which requests it computes rows, also once it is lost. Others may compute all that they
    were granted."""

    @property
    def computing(self) -> Collection[str]: ...


@runtime_checkable
class CachingPort(Protocol):
    """A port that reports which pages it holds."""

    @property
    def addresses(self) -> tuple[PeerAddress, ...]: ...

    @property
    def key_scheme(self) -> KeyScheme | None:
        """How the keys of its pages are made; None when it keeps none for later requests."""

    def count_known(self, keys: Sequence[bytes]) -> int:
        """Return how many of these keys, from the first, belong to its pages. It may be a little out of date."""
