"""The ports that a Pairing has lost: what `stats` tells of them, and which may come back."""

from __future__ import annotations

import logging
from collections import deque

import attrs

from pdinfer.errors import ConfigError
from pdinfer.pairing.ports import Port, Ports, ReturningPort
from pdinfer.stats import LostPort
from pdinfer.types import PeerAddress

MAX_PORTS_LOST = 64
"""How many losses `stats` lists."""

_log = logging.getLogger("pdinfer")


class LostPorts:
    """The losses of a Pairing. `away` are the ports that may come back; `num_lost` counts all losses."""

    def __init__(self) -> None:
        self.away: dict[PeerAddress, ReturningPort] = {}
        self.num_lost = 0
        self._lost: deque[tuple[float, LostPort]] = deque(maxlen=MAX_PORTS_LOST)

    def told(self, now: float) -> tuple[LostPort, ...]:
        """Return the newest losses, in order of time."""
        return tuple(attrs.evolve(lost, age_s=now - at) for at, lost in list(self._lost))

    def set_aside(self, port: Port, ports: Ports) -> None:
        """Close a port, which proves to the others that it has stopped. One that may come back stays open, and the
        others close their links to it."""
        if isinstance(port, ReturningPort):
            self.away[port.address] = port
            ports.part(port)
        else:
            self._close(port)

    def add(self, lost: LostPort, now: float) -> None:
        """Count and record a loss."""
        self.num_lost += 1
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
