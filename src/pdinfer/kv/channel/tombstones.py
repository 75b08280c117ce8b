"""Rooms that were aborted before their request came, so that it is refused when it does: few, and for a while.

A request that comes after its tombstone is gone is computed in vain, and no more: decode drops what it does not expect.
So what is kept is bounded over all peers together, by count and by time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

import attrs

MAX_TOMBSTONES = 1 << 15
"""Over all peers together. Past it the peer that has most loses its oldest, so that a flood pushes out its own."""
MAX_TOMBSTONE_PEERS = 256
"""Past it the peer that buried nothing for the longest loses all."""
TOMBSTONE_S = 120.0
"""Twice what a lost peer is dialled for: what has not come by then is not under way."""


@attrs.define
class Tombstones:
    """Per peer, in the order in which it was last heard, its rooms and when they were buried."""

    _rooms: OrderedDict[Hashable, OrderedDict[bytes, float]] = attrs.field(factory=OrderedDict)
    _num: int = 0

    def __len__(self) -> int:
        return self._num

    def rooms(self) -> Iterator[bytes]:
        """Every room that some peer has aborted."""
        for rooms in self._rooms.values():
            yield from rooms

    def has(self, peer: Hashable, room: bytes) -> bool:
        """Whether the peer has aborted the room."""
        return room in self._rooms.get(peer, ())

    def bury(self, peer: Hashable, room: bytes, now: float) -> None:
        """The peer has aborted a room that nobody heard of."""
        rooms = self._rooms.setdefault(peer, OrderedDict())
        self._rooms.move_to_end(peer)
        self._num += room not in rooms
        rooms[room] = now
        rooms.move_to_end(room)
        while len(self._rooms) > MAX_TOMBSTONE_PEERS:
            self._num -= len(self._rooms.popitem(last=False)[1])
        while self._num > MAX_TOMBSTONES:
            most = max(self._rooms, key=lambda each: len(self._rooms[each]))
            self._pop_oldest(most)

    def decay(self, now: float) -> None:
        """Forgets those older than TOMBSTONE_S."""
        for peer in list(self._rooms):
            while (rooms := self._rooms.get(peer)) and next(iter(rooms.values())) < now - TOMBSTONE_S:
                self._pop_oldest(peer)

    def _pop_oldest(self, peer: Hashable) -> None:
        self._rooms[peer].popitem(last=False)
        self._num -= 1
        if not self._rooms[peer]:
            del self._rooms[peer]
