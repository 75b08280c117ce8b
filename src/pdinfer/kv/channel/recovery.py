"""How a channel goes on after an interrupt that may have left it half changed."""

from __future__ import annotations

import threading

from pdinfer.kv.channel.links import Peers
from pdinfer.kv.channel.pushes import Pushes
from pdinfer.kv.channel.rooms import Accepted, Expected
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import Transport
from pdinfer.kv.transports.loopback import LoopbackTransport
from pdinfer.process.forked import OfOneProcess


class Recoverable(OfOneProcess):
    """The part of a channel that makes it anew: links first, which proves that no peer writes any more, then what is
    known of rooms."""

    _in_doubt = False
    pool: PagePool
    transport: Transport
    _lock: threading.RLock
    _changed: threading.Condition
    _peers: Peers
    _expected: Expected
    _accepted: Accepted
    _pushes: Pushes

    @property
    def in_doubt(self) -> bool:
        """Whether it is time to recover: a host was interrupted inside one of our callbacks."""
        return self._in_doubt

    def recover(self) -> None:
        """Closes every link and forgets all rooms, after a call that was interrupted. Links come back as after any
        loss."""
        if isinstance(self.transport, LoopbackTransport):
            self.transport.cut()
        self._peers.cut()
        with self._lock:
            self._expected = Expected(self.pool.layout.layers)
            self._accepted = Accepted()
            self._pushes = Pushes(self.pool.layout, self._changed)
            self._in_doubt = False

    def redial_in_s(self) -> float:
        """When `redial` would do something; infinity for a transport whose own thread dials lost peers."""
        return self._peers.redial_in_s() if isinstance(self.transport, LoopbackTransport) else float("inf")

    def redial(self) -> None:
        """Dials the lost peers that are due."""
        if self.redial_in_s() <= 0:
            self._peers.redial()
