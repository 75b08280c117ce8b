"""The grants that decodes have sent to this end over their links, until its host takes them: no I/O, no clock.

offer ──► waiting ──take──► the host's, to accept or to refuse
   │         └──withdrawn by its decode, declined by the host, or the link is lost──► forgotten
   └──► not kept: too many wait, nobody takes any, or the host has declined its room
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from pdinfer.errors import TransferError
from pdinfer.kv.channel.wire import PackedGrant
from pdinfer.types import PageGrant, PeerAddress, PeerKey, peer_key

MAX_OFFERS_BYTES = 16 << 20
"""The most that grants may hold which nobody has taken, over all peers, each counted with OFFER_BYTES and its pages."""
OFFER_BYTES = 4096
MAX_DECLINED = 4096
"""How many declined rooms are remembered, the latest."""
DECLINED = "its request has ended at this prefill"


def _num_bytes(grant: PackedGrant) -> int:
    return OFFER_BYTES + len(grant.pages) + len(grant.generations)


@attrs.define
class Offers:
    """The grants that wait here, none unless somebody `takes` them. They stay packed, and so small, until they are
    taken."""

    takes: bool
    _waiting: dict[bytes, tuple[PeerKey, PackedGrant]] = attrs.field(factory=dict)
    _num_bytes: int = 0
    _declined: dict[bytes, None] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, peer: PeerKey, packed: PackedGrant, us: PeerAddress) -> str:
        """Keep a grant from `peer`. Return why it is not kept, "" when it is. Raises TransferError for a grant that is
        not the peer's to make, or that waits already."""
        grant = packed.grant
        if peer not in map(peer_key, grant.destinations):
            raise TransferError("a grant was offered by an end that is none of its destinations")
        if peer_key(us) not in map(peer_key, grant.writers):
            raise TransferError("a grant was offered to an end that is none of its writers")
        if grant.room in self._waiting:
            raise TransferError(f"room {grant.room.hex()} was offered twice")
        if not self.takes:
            return "no grants are taken over links at this prefill"
        if grant.room in self._declined:
            return DECLINED
        if self._num_bytes + _num_bytes(packed) > MAX_OFFERS_BYTES:
            return "too many grants wait at this prefill"
        self._waiting[grant.room] = peer, packed
        self._num_bytes += _num_bytes(packed)
        return ""

    def decline(self, room: bytes) -> PeerKey | None:
        """Keep no grant of a room from now on. Return whose grant of it waited here, if one did."""
        peer, _ = self._waiting.get(room, (None, None))
        if peer is not None:
            self._drop(room)
            return peer
        self._declined[room] = None
        if len(self._declined) > MAX_DECLINED:
            del self._declined[next(iter(self._declined))]
        return None

    def withdraw(self, peer: PeerKey, room: bytes) -> bool:
        """Forget a grant that its decode has given up. Return whether it waited here."""
        if self._waiting.get(room, (None,))[0] != peer:
            return False
        self._drop(room)
        return True

    def lost(self, peer: PeerKey) -> None:
        """Forget the grants of a peer whose link is lost: its rooms are over."""
        for room in [room for room, (owner, _) in self._waiting.items() if owner == peer]:
            self._drop(room)

    def take(self, rooms: Collection[bytes] | None = None) -> list[PageGrant]:
        """Return the grants that wait, of these rooms or of all, in the order in which they came, and forget them."""
        wanted = [room for room in self._waiting if rooms is None or room in rooms]
        return [self._drop(room).unpack() for room in wanted]

    def _drop(self, room: bytes) -> PackedGrant:
        _, packed = self._waiting.pop(room)
        self._num_bytes -= _num_bytes(packed)
        return packed
