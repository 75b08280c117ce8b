"""Which of many links an I/O thread serves next, so that a link that says little is not held up by those that say
much."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from pdinfer.kv.transports.stream.connection import StreamConnection

ROUND_S = 0.001
"""How long links have their turns before the thread checks which others can move something by now."""


class Turns:
    """The order of the links: those that used the thread least of late come first. Belongs to the I/O thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used_s: dict[StreamConnection, float] = {}

    def enter(self, connection: StreamConnection) -> None:
        """Add a newcomer, which is not ahead of the others: otherwise a peer that reconnects again and again would
        always be first."""
        self._used_s[connection] = max(self._used_s.values(), default=0.0)

    def leave(self, connection: StreamConnection) -> None:
        """Give the connection no more turns."""
        self._used_s.pop(connection, None)

    def of(self, ready: Collection[StreamConnection], round_s: float = ROUND_S) -> Iterator[StreamConnection]:
        """Yield, of those that can move something, the ones to serve now, one after the other, until `round_s` have
        passed. The time that each takes is counted."""
        began = self._clock()
        for connection in sorted(ready, key=lambda each: self._used_s.get(each, 0.0)):
            before = self._clock()
            yield connection
            after = self._clock()
            if connection in self._used_s:
                self._used_s[connection] += after - before
            if after - began > round_s:
                return

    def fade(self) -> None:
        """Halve what each connection has used, so that older use counts less."""
        for connection in self._used_s:
            self._used_s[connection] /= 2
