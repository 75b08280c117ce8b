"""Who is at the other end of each link: the handshake, and the book of open links.

    connecting end ── Hello (who, layout) ──► accepting end
                   ◄── Welcome or Reject ───

Both ends compare layouts, so either may refuse; no payload moves before both agree.
"""

from __future__ import annotations

import threading

import attrs

from pdinfer.errors import LayoutMismatch, PDInferError, TransferError
from pdinfer.kv import wire
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.protocol import PeerKey, peer_key
from pdinfer.kv.transport import MAX_UNTRUSTED_FRAME_BYTES, Link, Transport
from pdinfer.types import PeerAddress

MAX_REASON_CHARACTERS = 320
"""How much of a reason for refusing travels as text; differences also travel one by one."""


@attrs.define(eq=False)
class Peer:
    """What is known of the other end of a link: its `address` once it is welcome, else why it is not."""

    link: Link
    address: PeerAddress | None = None
    layout_id: bytes = b""
    refusal: PDInferError | None = None
    placing_since: float = 0.0


class Peers:
    """The links of one channel. `changed` is the channel's condition: its lock guards this book, is never held while
    the transport is called, and is notified when a handshake ends. `us` is set once the transport has an endpoint."""

    us: PeerAddress

    def __init__(self, transport: Transport, layout: KVLayout, changed: threading.Condition) -> None:
        self._transport = transport
        self._layout = layout
        self._changed = changed
        self._by_link: dict[Link, Peer] = {}
        self._links: dict[PeerKey, Link] = {}

    def at(self, link: Link) -> Peer:
        """The record of a link, made when it is new."""
        with self._changed:
            return self._by_link.setdefault(link, Peer(link))

    def link_to(self, key: PeerKey) -> Link | None:
        """The open link to a welcome peer."""
        with self._changed:
            return self._links.get(key)

    def connect(self, address: PeerAddress, *, timeout_s: float) -> None:
        """Opens a link and shakes hands; see `KVChannel.connect`."""
        if self.link_to(peer_key(address)) is not None:
            return
        link = self._transport.connect(address.endpoints, timeout_s=timeout_s)
        peer = self.at(link)
        self._transport.send(link, wire.encode(wire.Hello((wire.MAJOR, wire.MINOR), self.us, self._layout)))
        with self._changed:
            self._changed.wait_for(lambda: peer.address or peer.refusal, timeout_s)
            problem = peer.refusal
            if problem is None and peer.address is None:
                problem = TransferError(f"{link.endpoint} did not answer the handshake within {timeout_s} s")
            elif peer.address is not None and peer_key(peer.address) != peer_key(address):
                problem = TransferError(f"{link.endpoint} answers as another engine: the peer asked for was restarted")
        if problem is not None:
            self._transport.fence(link)
            with self._changed:
                self._by_link.pop(link, None)
            raise problem

    def greet(self, peer: Peer, message: wire.Message) -> None:
        """A frame on a link that is not open yet. Anything but a handshake closes it."""
        if isinstance(message, wire.Reject):
            error = message.error
            if isinstance(error, LayoutMismatch):
                fields = tuple((name, ours, theirs) for name, theirs, ours in message.fields)
                error = LayoutMismatch(f"the peer refuses: {error}", fields=fields)
            self._refuse(peer, error)
        elif isinstance(message, wire.Hello | wire.Welcome):
            self._judge(peer, message)
        else:
            raise TransferError(f"a {type(message).__name__} frame came before the handshake")

    def forget(self, link: Link, error: TransferError) -> PeerAddress | None:
        """The link is gone: who was there, if anyone welcome was."""
        with self._changed:
            peer = self._by_link.pop(link, None)
            if peer is None:
                # dialled and lost before `connect` could look: let it find out
                self._by_link[link] = Peer(link, refusal=error)
                return None
            peer.refusal = peer.refusal or error
            if peer.address is None or self._links.get(peer_key(peer.address)) is not link:
                return None
            del self._links[peer_key(peer.address)]
            return peer.address

    def _judge(self, peer: Peer, message: wire.Hello | wire.Welcome) -> None:
        asked = isinstance(message, wire.Hello)
        try:
            self._check(message)
            self._admit(peer, message)
        except PDInferError as error:
            self._refuse(peer, error)
            if asked:
                self._transport.send(peer.link, _reject(error))
            return
        if asked:
            # known here before the peer learns that it is welcome, so that whoever waits for it may use both ends
            welcome = wire.Welcome((wire.MAJOR, wire.MINOR), self.us, self._layout)
            self._transport.send(peer.link, wire.encode(welcome))

    def _check(self, message: wire.Hello | wire.Welcome) -> None:
        if message.version[0] != wire.MAJOR:
            raise TransferError(f"the peer speaks protocol {message.version[0]}, this end speaks {wire.MAJOR}")
        unknown = set(message.required if isinstance(message, wire.Hello) else ()) - wire.FEATURES
        if unknown:
            raise TransferError(f"the peer requires features this end does not have: {', '.join(sorted(unknown))}")
        self._layout.compatible_with(message.layout)

    def _admit(self, peer: Peer, message: wire.Hello | wire.Welcome) -> None:
        """One link per identity: were there two, closing either would count as proof that the peer writes no more,
        while the other still does."""
        with self._changed:
            key = peer_key(message.address)
            if key in self._links:
                raise TransferError("this peer has an open link already; drop that one before opening another")
            peer.address = message.address
            peer.layout_id = message.layout.layout_id
            peer.link.trusted = True
            self._links[key] = peer.link
            self._changed.notify_all()

    def _refuse(self, peer: Peer, error: PDInferError) -> None:
        with self._changed:
            peer.refusal = error
            self._changed.notify_all()


def _reject(error: PDInferError) -> bytes:
    """The refusal in a frame that an untrusted link takes: of many long differences the last ones stay unsaid."""
    fields = error.fields if isinstance(error, LayoutMismatch) else ()
    short = type(error)(str(error)[:MAX_REASON_CHARACTERS])
    while True:
        frame = wire.encode(wire.Reject(short, fields))
        if len(frame) <= MAX_UNTRUSTED_FRAME_BYTES or not fields:
            return frame
        fields = fields[:-1]
