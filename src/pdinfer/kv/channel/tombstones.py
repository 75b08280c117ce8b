"""Rooms that were aborted before their request came, so that the request is refused when it does come.

A request that comes after its tombstone is gone is computed in vain, and nothing worse: decode drops what it does not
expect. So tombstones are bounded, in number over all peers together and in time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

import attrs

MAX_TOMBSTONES = 1 << 15
"""Limit over all peers together. Past it the peer with the most loses its oldest, so a flood pushes out its own."""
MAX_TOMBSTONE_PEERS = 256
"""Past it the peer that has been quiet for longest loses all of its tombstones."""
TOMBSTONE_S = 120.0
"""Twice as long as a lost peer is dialled: a request that has not come by then is not under way."""


@attrs.define
class Tombstones:
    """The aborted rooms of each peer and when they were aborted, the peer that was quiet for longest first."""

    _rooms: OrderedDict[Hashable, OrderedDict[bytes, float]] = attrs.field(factory=OrderedDict)
    _num: int = 0

    def __len__(self) -> int:
        return self._num

    def rooms(self) -> Iterator[bytes]:
        """Iterate over all rooms that some peer has aborted."""
        for rooms in self._rooms.values():
            yield from rooms

    def has(self, peer: Hashable, room: bytes) -> bool:
        """Return whether the peer has aborted the room."""
        return room in self._rooms.get(peer, ())

    def bury(self, peer: Hashable, room: bytes, now: float) -> None:
        """Note that the peer has aborted a room that is unknown here."""
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
        """Forget the tombstones older than TOMBSTONE_S."""
        for peer in list(self._rooms):
            while (rooms := self._rooms.get(peer)) and next(iter(rooms.values())) < now - TOMBSTONE_S:
                self._pop_oldest(peer)

    def _pop_oldest(self, peer: Hashable) -> None:
        self._rooms[peer].popitem(last=False)
        self._num -= 1
        if not self._rooms[peer]:
            del self._rooms[peer]
