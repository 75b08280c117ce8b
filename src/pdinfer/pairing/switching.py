"""Whether a port may change its role, and how it does: at once in this process, on request in another one."""

from __future__ import annotations

from collections.abc import Iterable

from pdinfer.bounds import cause
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.engine.roles import become, check_role
from pdinfer.errors import ConfigError, TransferError
from pdinfer.pairing.port import DecodePort, Port, PrefillPort, SwitchingPort
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.request import TrackedRequest

SWITCH_POLL_S = 0.02
"""How often an engine in another process is asked whether it has changed its role."""


def check_switch(ports: Ports, port: Port, role: str, requests: Iterable[TrackedRequest], *, leaves_none: bool) -> None:
    """Raise ConfigError when a port cannot change its role, or when the ports that stay in its old one cannot hold the
    `requests`; with `leaves_none` there need be no such ports. Nothing has changed then."""
    if port not in ports.all:
        raise ConfigError(f"{port} is no port of this pairing: name one of its `ports`")
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
        except Exception as error:
            raise TransferError(f"{lost}: {cause(error)}") from error
        return become(port, role)
    assert isinstance(port, SwitchingPort)
    return port.become(role)
