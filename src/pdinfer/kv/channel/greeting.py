"""What the messages of a handshake must say, and the errors of those that do not."""

from __future__ import annotations

from pdinfer.errors import LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.peer import Occupied, Peer
from pdinfer.kv.layout import KVLayout
from pdinfer.types import PeerAddress, peer_key


def check_open(message: wire.Open, *, keyed: bool) -> TransferError | None:
    """Return the reason to refuse the peer's first frame, or None. `keyed` tells whether this end has a key."""
    if message.version[0] != wire.MAJOR:
        return TransferError(f"the peer speaks protocol {message.version[0]}, this end speaks {wire.MAJOR}")
    if message.keyed != keyed:
        has, lacks = ("the peer", "this end") if message.keyed else ("this end", "the peer")
        return TransferError(f"{has} has a key and {lacks} has none; give both ends the same one")
    return None


def check_greeting(peer: Peer, message: wire.Hello | wire.Welcome, us: PeerAddress, layout: KVLayout) -> None:
    """Raise TransferError or LayoutMismatch when the peer is not welcome at `us`."""
    if isinstance(message, wire.Hello) == peer.dialled:
        raise TransferError(f"a {type(message).__name__} frame came from the wrong end of the link")
    if peer.dialled and peer.asked_for is None:
        raise TransferError("a Welcome frame came before this end said who it is")
    if peer_key(message.address) == peer_key(us):
        raise TransferError("the peer says that it is this very end; an engine id is made anew for every end")
    unknown = set(message.required if isinstance(message, wire.Hello) else ()) - wire.FEATURES
    if unknown:
        raise TransferError(f"the peer requires features this end does not have: {', '.join(sorted(unknown))}")
    if peer.asked_for is not None and peer_key(peer.asked_for) != peer_key(message.address):
        raise TransferError(f"{peer.link.endpoint} answers as another engine: the peer asked for was restarted")
    layout.compatible_with(message.layout)


def refusal(message: wire.Reject) -> PDInferError:
    """Return the peer's reason for refusing, from the point of view of this end."""
    error = message.error
    if isinstance(error, LayoutMismatch) and message.fields:
        fields = tuple((name, ours, theirs) for name, theirs, ours in message.fields)
        error = LayoutMismatch.of(fields, said_by="the peer refuses: ")
    return Occupied(str(error)) if message.again else error
