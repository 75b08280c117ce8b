"""What prefill has pushed and which pages are still being read: layers joined into groups, bytes counted per peer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import attrs

from pdinfer.errors import TransferError
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transports.base import Transfer
from pdinfer.types import PageGrant, PeerKey, peer_key

GROUP_BYTES = 4 << 20
"""Pushes of consecutive layers are joined up to this size. Below it the fixed cost of a message shows."""


@attrs.define(eq=False)
class Group:
    """Pushes of one room with the same tokens and consecutive layers, which become one write to each destination."""

    grant: PageGrant
    layers: range
    tokens: range
    pages: tuple[int, ...]
    transfer: Transfer
    ready: list[Callable[[], None]] = attrs.field(factory=list)
    num_writes: int = 0
    error: TransferError | None = None

    def joins(self, layers: range, tokens: range, pages: Sequence[int]) -> bool:
        """Return whether these layers continue the group."""
        return self.layers.stop == layers.start and self.tokens == tokens and self.pages == tuple(pages)

    def wait_ready(self) -> None:
        """Wait until the pages may be read."""
        for wait in self.ready:
            wait()


class Pushes:
    """The groups of one end. Methods take the lock of `changed`, which is notified when bytes have left."""

    def __init__(self, layout: KVLayout, changed: threading.Condition) -> None:
        self._layout = layout
        self._changed = changed
        self._open: dict[bytes, Group] = {}
        self._writing: Counter[bytes] = Counter()
        self._ended: dict[bytes, Transfer] = {}
        self._unsent: set[Transfer] = set()
        self._inflight: Counter[PeerKey] = Counter()

    def add(
        self, grant: PageGrant, layers: range, tokens: range, pages: Sequence[int], ready: Callable[[], None] | None
    ) -> tuple[Transfer, list[Group]]:
        """Add a push. Return its Transfer and the groups that have to be written now, in order."""
        full: list[Group] = []
        with self._changed:
            group = self._open.get(grant.room)
            if group is not None and not group.joins(layers, tokens, pages):
                full.append(self._take(group))
                group = None
            if group is None:
                group = self._open[grant.room] = Group(grant, layers, tokens, tuple(pages), Transfer(0))
                self._unsent.add(group.transfer)
            group.layers = range(group.layers.start, layers.stop)
            added = self._layout.payload_bytes(group.layers, tokens) - group.transfer.num_bytes
            group.transfer.num_bytes += added
            for destination in grant.destinations:
                self._inflight[peer_key(destination)] += added
            if ready is not None:
                group.ready.append(ready)
            if group.transfer.num_bytes >= GROUP_BYTES or layers.stop == self._layout.layers.stop:
                full.append(self._take(group))
        return group.transfer, full

    def flush(self, room: bytes) -> list[Group]:
        """Close the room's open group. Return it, if there is one, to be written now."""
        with self._changed:
            group = self._open.get(room)
            return [] if group is None else [self._take(group)]

    def flush_all(self) -> list[Group]:
        """Close every open group. Return them, to be written now."""
        with self._changed:
            return [self._take(group) for group in list(self._open.values())]

    def end(self, room: bytes) -> Transfer:
        """Note that nothing more is pushed for the room. The Transfer is done when none of its pages are being read."""
        with self._changed:
            last = Transfer(0, done=room not in self._writing)
            if not last.done:
                self._ended[room] = last
            return last

    def written(self, group: Group, error: TransferError | None) -> None:
        """Note that one of the group's writes no longer reads our memory."""
        with self._changed:
            group.num_writes -= 1
            group.error = group.error or error
            if group.num_writes:
                return
            self._unsent.discard(group.transfer)
            for destination in group.grant.destinations:
                key = peer_key(destination)
                self._inflight[key] -= group.transfer.num_bytes
                if not self._inflight[key]:
                    del self._inflight[key]
            group.transfer.complete(group.error)
            room = group.grant.room
            self._writing[room] -= 1
            if not self._writing[room]:
                del self._writing[room]
                if room in self._ended:
                    self._ended.pop(room).complete()
            self._changed.notify_all()

    def rooms(self) -> frozenset[bytes]:
        """Return the rooms whose pushes wait for more layers or are still being read."""
        with self._changed:
            return frozenset((*self._open, *self._writing, *self._ended))

    @property
    def unsent_bytes(self) -> int:
        """The bytes pushed and not yet read from our pages."""
        with self._changed:
            return sum(transfer.num_bytes for transfer in self._unsent)

    def inflight(self) -> dict[PeerKey, int]:
        """Return the unsent bytes per destination."""
        with self._changed:
            return dict(self._inflight)

    def most_inflight(self, peers: Iterable[PeerKey]) -> int:
        """Return the most bytes that are on their way to any one of `peers`."""
        with self._changed:
            return max((self._inflight[peer] for peer in peers), default=0)

    def _take(self, group: Group) -> Group:
        del self._open[group.grant.room]
        self._writing[group.grant.room] += 1
        group.num_writes = len(group.grant.destinations)
        return group
