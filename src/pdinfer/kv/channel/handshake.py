"""The handshake, which opens a link between two ends that fit each other.

    connecting end ── Open (nonce) ──────► ◄── Open (nonce) ── accepting end
                   ── Hello (who, layout) ──►
                   ◄── Welcome or Reject ───

Every frame after the two Open frames carries a tag (`kv.channel.frame_mac`). Both ends compare layouts, so either may
refuse, and no payload moves before both agree. There is one link per pair of ends. When both dial at once, the link
dialled by the lesser identity stays.
"""

from __future__ import annotations

import attrs

from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.book import LinkBook
from pdinfer.kv.channel.frame_mac import check_key
from pdinfer.kv.channel.greeting import check_greeting, check_open, refusal
from pdinfer.kv.channel.peer import Occupied, Peer
from pdinfer.kv.layout import KVLayout
from pdinfer.types import PeerKey, peer_key


class Handshake:
    """What one end sends and reads until a link is open."""

    def __init__(self, book: LinkBook, layout: KVLayout, key: bytes | None) -> None:
        check_key(key)
        self._book = book
        self._layout = attrs.evolve(layout)  # without what a layout keeps of itself once asked: that would travel too
        self._key = key

    def open(self, peer: Peer) -> None:
        """Send this end's first frame, unless it was sent before."""
        version = (wire.MAJOR, wire.MINOR)
        peer.open(wire.encode(wire.Open(version, peer.nonce, self._key is not None)))

    def introduce(self, peer: Peer) -> None:
        """Send who dialled."""
        peer.post(wire.encode(wire.Hello(self._book.us, self._layout)))

    def read(self, peer: Peer, frame: bytes) -> tuple[PeerKey, wire.Message] | None:
        """Read a frame. Return the message and its sender on an open link, None when the frame was part of the
        handshake. Raises TransferError when it does not verify, or was sent after a refusal."""
        if peer.refusal is not None:
            raise TransferError(f"{peer.link.endpoint} went on after it was refused: {peer.refusal}")
        if not peer.has_session:
            self._meet(peer, wire.decode(frame))
            return None
        if peer.address is not None:
            return peer_key(peer.address), wire.decode(peer.verify(frame))
        try:
            verified = peer.verify(frame)
        except TransferError as error:
            self._reject(peer, error)
            return None
        self._greet(peer, wire.decode(verified))
        return None

    def _meet(self, peer: Peer, message: wire.Message) -> None:
        """Read the first frame of the other end. From here on frames carry tags, and the end that dialled says who it
        is."""
        if not isinstance(message, wire.Open):
            raise TransferError(f"a link begins with its peer's nonce, not with a {type(message).__name__} frame")
        self.open(peer)
        if (error := check_open(message, keyed=self._key is not None)) is not None:
            self._book.refuse(peer, error)
        else:
            with self._book.changed:
                peer.begin_session(message.nonce, self._key)
                is_asked = peer.asked_for is not None
            if is_asked:
                self.introduce(peer)

    def _greet(self, peer: Peer, message: wire.Message) -> None:
        """Read a tagged frame on a link that is not open yet. Anything but a handshake closes the link."""
        if isinstance(message, wire.Reject):
            self._book.refuse(peer, refusal(message))
        elif isinstance(message, wire.Hello | wire.Welcome):
            try:
                check_greeting(peer, message, self._book.us, self._layout)
                crowded = self._admit(peer, message)
            except PDInferError as error:
                self._reject(peer, error)
            else:
                peer.flush()
                if crowded is not None:
                    self._book.give_up(crowded, f"{crowded.link.endpoint} had nothing to do here, and others came")
        else:
            raise TransferError(f"a {type(message).__name__} frame came before the handshake")

    def _admit(self, peer: Peer, message: wire.Hello | wire.Welcome) -> Peer | None:
        """Open the link. Return the guest that has to give way for it, if there is one.

        There is one link per identity. If there were two, closing either would look like proof that the peer has
        stopped writing, while it still writes over the other. A Welcome is queued first, so that no frame from another
        thread overtakes it.
        """
        with self._book.changed:
            key = peer_key(message.address)
            if self._book.link_to(key) is not None:
                raise Occupied("this peer has an open link already; drop that one before opening another")
            if isinstance(message, wire.Hello):
                if self._book.is_dialling(key) and peer_key(self._book.us) < key:
                    raise Occupied("both ends dial, and it is the other one's link that stays")
                peer.queue(wire.encode(wire.Welcome(self._book.us, self._layout)))
            return self._book.admit(peer, message.address, message.layout.layout_id)

    def _reject(self, peer: Peer, error: PDInferError) -> None:
        """Refuse the link. An end that dialled is told why and closes it; if it goes on instead, this end closes it."""
        self._book.refuse(peer, error)
        if not peer.dialled:
            peer.post(wire.rejection(error, again=isinstance(error, Occupied)))
