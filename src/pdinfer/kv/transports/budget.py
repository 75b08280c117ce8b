"""A bound on what all links of a transport hold together, and the choice of the link that gives way when it is
reached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import attrs

from pdinfer.process.locks import new_lock

MAX_WAITING_BYTES = 32 << 20
"""Frames that may wait to be sent, over all links. More wait only when peers live and do not read."""
MAX_ARRIVING_BYTES = 16 << 20
"""Frames that have arrived in part, over all links."""

H = TypeVar("H", bound=Hashable)


@attrs.define
class _Share:
    num_bytes: int
    moved_at: float


@attrs.define(eq=False)
class Budget(Generic[H]):
    """Bytes that the holders have, `num_bytes` in all and at most `limit_bytes`. Any thread may call it.

    Past the limit, one holder gives way: of those with at least an even share, the one that has not moved for the
    longest. A holder that takes what it is sent, or that holds little, never gives way before one that stands still.
    """

    _limit_bytes: int
    _clock: Callable[[], float]
    num_bytes: int = 0
    _lock: threading.RLock = attrs.field(factory=new_lock)
    _shares: dict[H, _Share] = attrs.field(factory=dict)

    def take(self, holder: H, num_bytes: int) -> H | None:
        """Give the holder so many more bytes. Return the holder that must give way and no longer counts, or None."""
        with self._lock:
            share = self._shares.get(holder)
            if share is None:
                share = self._shares[holder] = _Share(0, self._clock())
            share.num_bytes += num_bytes
            self.num_bytes += num_bytes
            if self.num_bytes <= self._limit_bytes:
                return None
            even = self.num_bytes / len(self._shares)
            large = (each for each, share in self._shares.items() if share.num_bytes >= even)
            slowest = min(large, key=lambda each: self._shares[each].moved_at)
            self.num_bytes -= self._shares.pop(slowest).num_bytes
            return slowest

    def give(self, holder: H, num_bytes: int) -> None:
        """Take back so many of the holder's bytes: they have moved on."""
        with self._lock:
            share = self._shares.get(holder)
            if share is None:
                return
            share.num_bytes -= num_bytes
            share.moved_at = self._clock()
            self.num_bytes -= num_bytes
            if share.num_bytes <= 0:
                self.num_bytes -= share.num_bytes
                del self._shares[holder]

    def drop(self, holder: H) -> None:
        with self._lock:
            share = self._shares.pop(holder, None)
            self.num_bytes -= 0 if share is None else share.num_bytes


@attrs.frozen
class Limits(Generic[H]):
    """What all links of a transport may hold: frames that wait, and frames that have arrived in part. A holder that
    must give way is passed to `crowded`, with the reason."""

    waiting: Budget[H]
    arriving: Budget[H]
    crowded: Callable[[H, str], None]
