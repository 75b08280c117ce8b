"""How a port leaves a Pairing: for good, or to come back in the other role. An engine of this process changes its role
at once, one of another process on request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable
from functools import partial

from pdinfer.bounds import cause
from pdinfer.checks import clip, is_number
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.engine.roles import become, check_role, stay
from pdinfer.errors import ConfigError, TransferError
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.following import Following
from pdinfer.pairing.intake import Stepping
from pdinfer.pairing.joining import Joining
from pdinfer.pairing.port import DecodePort, Port, PrefillPort, SwitchingPort
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.request import TrackedRequest

SWITCH_POLL_S = 0.02
"""How often an engine in another process is asked whether it has changed its role."""
MAX_DRAIN_S = 1e9


class Leaving:
    """The ports that leave. `followings` learn what a port that comes back has become."""

    def __init__(
        self, ports: Ports, broker: Broker, joining: Joining, stepping: Stepping, followings: Iterable[Following]
    ) -> None:
        self._ports = ports
        self._broker = broker
        self._joining = joining
        self._stepping = stepping
        self._followings = followings
        self._switching: set[Port] = set()

    def has(self, port: Port) -> bool:
        """Return whether a port is in use, changes its role, or was lost and may come back."""
        return port in (*self._ports.all, *list(self._broker.lost_ports.away.values()), *list(self._switching))

    def removal(self, port: Port, *, drain_s: float) -> Generator[float, None, None]:
        """Let a port go, see `Pairing.removal`."""
        check_drain(drain_s)
        address, end = port.address, time.monotonic() + drain_s
        self._broker.lost_ports.away.pop(address, None)
        self._joining.give_up(address)
        self._ports.leaving.add(address)
        try:
            while self._broker.assigned(address) and (left_s := end - time.monotonic()) > 0:
                yield left_s
            stepping = self._stepping
            with stepping.lock:
                is_alive = port in self._ports.all
                stepping.change(partial(self._part_with, port, steps=is_alive))
                stepping.advance()
                if is_alive:  # so that it answers the peers that took its rooms away
                    stepping.change(partial(self._broker.step_port, port))
                self._broker.lost_ports.away.pop(address, None)  # if it was lost meanwhile
        finally:  # after an interrupt the port may still be here, and then stays
            self._ports.leaving.discard(address)

    def _part_with(self, port: Port, *, steps: bool) -> None:
        """Let go of a port, and step it unless it was lost before, so that it lets go, too."""
        self._broker.remove(port)
        self._joining.release(port)
        if steps:
            self._broker.step_port(port)

    def switching(
        self, port: Port, role: str, *, drain_s: float, leaves_none: bool
    ) -> Generator[float, None, PrefillPort | DecodePort]:
        """Let a port take the other role, see `Pairing.switching`."""
        check_switch(self._ports, port, role, list(self._broker.requests.values()), leaves_none=leaves_none)
        self._switching.add(port)
        try:
            with contextlib.closing(self.removal(port, drain_s=drain_s)) as removal:
                for left_s in removal:
                    yield left_s
                    if port not in self._ports.all:
                        raise TransferError(f"{port.address} was lost while it was drained, or removed; its role stays")
            with self._stepping.lock:
                self._stepping.change(partial(self._broker.switch, port))
                changed = switched(port, role)
            while changed is None:
                yield SWITCH_POLL_S
                changed = switched(port, role)
            yield from self._joining.beside(changed)
            self._broker.counts.num_switches += 1
            for following in self._followings:
                following.replace(port, changed)
            return changed
        finally:
            self._switching.discard(port)
            if isinstance(port, PrefillEngine | DecodeEngine):
                stay(port)


def check_drain(drain_s: float) -> None:
    """Raise ConfigError for what is no time that requests may take to end."""
    if not is_number(drain_s) or not 0 <= drain_s <= MAX_DRAIN_S:
        raise ConfigError(
            f"drain_s must be seconds from 0, which moves requests at once, to {MAX_DRAIN_S:g}, got {clip(drain_s)}"
        )


def check_switch(ports: Ports, port: Port, role: str, requests: Iterable[TrackedRequest], *, leaves_none: bool) -> None:
    """Raise ConfigError when a port cannot change its role, or when the ports that stay in its old one cannot hold the
    `requests`; with `leaves_none` there need be no such ports. Nothing has changed then."""
    if port not in ports.all:
        raise ConfigError(f"{port} is no port of this pairing: name one of its `ports`")
    if port.address in ports.leaving:
        raise ConfigError(f"{port.address} leaves already: let that end, or close its iterator, before it is switched")
    if isinstance(port, PrefillEngine | DecodeEngine):
        check_role(port, role)
    elif isinstance(port, SwitchingPort):
        port.check_role(role)
    else:
        raise ConfigError(f"{port} has no way to change its role: remove it, and add a port of the other role")
    if leaves_none:
        return
    side = [other for other in ports.all if other.role == port.role and other is not port]
    staying = [other for other in side if other.address not in ports.leaving]
    if not staying:
        raise ConfigError(
            f"{port.address} is the last {port.role} port, without which no request is served: add another one first, "
            "or switch it with leaves_none=True"
        )
    room = max(other.limits.max_tokens for other in staying)
    held = [one.max_tokens for one in requests if room < one.max_tokens <= port.limits.max_tokens]
    if longest := max(held, default=0):
        raise ConfigError(
            f"a request of {longest} tokens fits no {port.role} port but {port.address}; the others hold {room}: wait "
            "until it has ended, or switch the port with leaves_none=True"
        )


def switched(port: Port, role: str) -> PrefillPort | DecodePort | None:
    """Return the port that a port without requests has become, or None while it changes: ask again. Raise TransferError
    when it was lost meanwhile."""
    if isinstance(port, PrefillEngine | DecodeEngine):
        lost = f"{port.address} was lost before it could change its role"
        if port.closed:
            raise TransferError(lost)
        try:
            port.step()  # what it ends was given to other ports
            return become(port, role)
        except Exception as error:
            raise TransferError(f"{lost}: {cause(error)}") from error
    assert isinstance(port, SwitchingPort)
    return port.become(role)
