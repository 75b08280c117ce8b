"""Which of many links an I/O thread serves next, so that one that says little is not held up by those that say much."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from pdinfer.kv.transports.stream.connection import StreamConnection

ROUND_S = 0.001
"""How long links have their turns before it is looked which others can move something by now."""


class Turns:
    """Those come first that used the thread least of late. Belongs to the I/O thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used_s: dict[StreamConnection, float] = {}

    def enter(self, connection: StreamConnection) -> None:
        """A newcomer has nothing ahead of the others: whoever comes again and again would always be first."""
        self._used_s[connection] = max(self._used_s.values(), default=0.0)

    def leave(self, connection: StreamConnection) -> None:
        """It has no more turns."""
        self._used_s.pop(connection, None)

    def of(self, ready: Collection[StreamConnection], round_s: float = ROUND_S) -> Iterator[StreamConnection]:
        """Of those that can move something, who does so now, one after the other, until `round_s` have passed. What
        each takes is counted."""
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
        """What was used longer ago counts less: half at each call."""
        for connection in self._used_s:
            self._used_s[connection] /= 2
