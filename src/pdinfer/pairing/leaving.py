"""How a port leaves a Pairing: for good, or to come back in the other role. An engine of this process changes its role
at once, one of another process on request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial

from pdinfer.bounds import cause
from pdinfer.checks import clip, is_number
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.engine.roles import become, stay
from pdinfer.errors import ConfigError, TransferError
from pdinfer.pairing.broker import Broker
from pdinfer.pairing.following import Following
from pdinfer.pairing.intake import Stepping
from pdinfer.pairing.joining import Joining
from pdinfer.pairing.port import DecodePort, Port, PrefillPort, SwitchingPort, changing_with
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

    def removal(self, *ports: Port, drain_s: float) -> Generator[float, None, None]:
        """Let ports go, all at the same time, see `Pairing.removal`."""
        check_drain(drain_s)
        addresses, end = [port.address for port in ports], time.monotonic() + drain_s
        for address in addresses:
            self._broker.lost_ports.away.pop(address, None)
            self._joining.give_up(address)
            self._ports.leaving.add(address)
        try:
            while any(map(self._broker.assigned, addresses)) and (left_s := end - time.monotonic()) > 0:
                yield left_s
            stepping = self._stepping
            with stepping.lock:
                alive = [port for port in ports if port in self._ports.all]
                for port in ports:
                    stepping.change(partial(self._part_with, port, steps=port in alive))
                stepping.advance()
                for port in alive:  # so that it answers the peers that took its rooms away
                    stepping.change(partial(self._broker.step_port, port))
                for address in addresses:
                    self._broker.lost_ports.away.pop(address, None)  # if it was lost meanwhile
        finally:  # after an interrupt a port may still be here, and then stays
            self._ports.leaving.difference_update(addresses)

    def _part_with(self, port: Port, *, steps: bool) -> None:
        """Let go of a port, and step it unless it was lost before, so that it lets go, too."""
        self._broker.remove(port)
        self._joining.release(port)
        if steps:
            self._broker.step_port(port)

    def switching(
        self, port: Port, role: str, *, drain_s: float, leaves_none: bool
    ) -> Generator[float, None, PrefillPort | DecodePort]:
        """Let a port, and all that change with it, take the other role, see `Pairing.switching`."""
        ports = find_together(self._ports, port, role)
        check_rest(self._ports, ports, list(self._broker.requests.values()), leaves_none=leaves_none)
        self._switching.update(ports)
        try:
            with contextlib.closing(self.removal(*ports, drain_s=drain_s)) as removal:
                for left_s in removal:
                    yield left_s
                    if lost := [each.address for each in ports if each not in self._ports.all]:
                        raise TransferError(f"{lost[0]} was lost while it was drained, or removed; its role stays")
            with self._stepping.lock:
                for each in ports:
                    self._stepping.change(partial(self._broker.switch, each))
            changed = yield from _switched(ports, role)
            yield from self._joined(changed)
            return changed[port]
        finally:
            self._switching.difference_update(ports)
            for each in ports:
                if isinstance(each, PrefillEngine | DecodeEngine):
                    stay(each)

    def _joined(self, changed: Mapping[Port, PrefillPort | DecodePort]) -> Iterator[float]:
        """Have all ports join that others have become, although one of them cannot: the others step with it. Raise
        then what the first one raised."""
        errors = []
        for before, port in changed.items():
            try:
                yield from self._joining.beside(port)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
            else:
                self._broker.counts.num_switches += 1
                for following in self._followings:
                    following.replace(before, port)
        if errors:
            raise errors[0]


def check_drain(drain_s: float) -> None:
    """Raise ConfigError for what is no time that requests may take to end."""
    if not is_number(drain_s) or not 0 <= drain_s <= MAX_DRAIN_S:
        raise ConfigError(
            f"drain_s must be seconds from 0, which moves requests at once, to {MAX_DRAIN_S:g}, got {clip(drain_s)}"
        )


def find_together(ports: Ports, port: Port, role: str) -> list[Port]:
    """Return the ports that take a role together: this one and, where several leaders lead the ranks of its engine,
    theirs. Raise ConfigError when one of them cannot, or is not here."""
    if port not in ports.all:
        raise ConfigError(f"{port} is no port of this pairing: name one of its `ports`")
    known = {other.address: other for other in ports.all}
    leaders = changing_with(port, role)
    if missing := [str(address) for address in leaders if address not in known]:
        raise ConfigError(
            f"{port.address} changes its role together with the other leaders of its ranks, and {', '.join(missing)} "
            "is no port of this pairing: add it first"
        )
    together = [known[address] for address in leaders]
    for each in together:
        changing_with(each, role)
        if each.address in ports.leaving:
            raise ConfigError(
                f"{each.address} leaves already: let that end, or close its iterator, before it is switched"
            )
    return together


def check_rest(ports: Ports, going: Sequence[Port], requests: Iterable[TrackedRequest], *, leaves_none: bool) -> None:
    """Raise ConfigError when the ports that stay in the role of those which are `going` cannot hold the `requests`;
    with `leaves_none` there need be no such ports. Nothing has changed then."""
    if leaves_none:
        return
    role, names = going[0].role, ", ".join(str(port.address) for port in going)
    side = [other for other in ports.all if other.role == role and other not in going]
    staying = [other for other in side if other.address not in ports.leaving]
    if not staying:
        raise ConfigError(
            f"without {names} there is no {role} port, and no request is served: add another one first, or switch it "
            "with leaves_none=True"
        )
    room = max(other.limits.max_tokens for other in staying)
    most = max(port.limits.max_tokens for port in going)
    held = [one.max_tokens for one in requests if room < one.max_tokens <= most]
    if longest := max(held, default=0):
        raise ConfigError(
            f"a request of {longest} tokens fits no {role} port but {names}; the others hold {room}: wait until it has "
            "ended, or switch the port with leaves_none=True"
        )


def _switched(ports: Sequence[Port], role: str) -> Generator[float, None, dict[Port, PrefillPort | DecodePort]]:
    """Ask ports to change their role until all have, and return what each has become."""
    changed: dict[Port, PrefillPort | DecodePort] = {}
    while True:
        for port in ports:
            if port not in changed and (other := switched(port, role)) is not None:
                changed[port] = other
        if len(changed) == len(ports):
            return changed
        yield SWITCH_POLL_S


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
