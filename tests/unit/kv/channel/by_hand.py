"""Two ends on a network that a test moves by hand, and a stranger that sends what the test wants."""

from __future__ import annotations

from pdinfer.kv.channel import wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.wire import FrameMac
from tests.unit.engine.by_hand import HandNet


def linked(net: HandNet, **more: object) -> tuple[KVChannel, KVChannel]:
    """Make a prefill that has dialled a decode."""
    prefill, decode = net.end(**more), net.end(**more)  # type: ignore[arg-type]
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    assert are_linked(prefill, decode)
    return prefill, decode


def are_linked(one: KVChannel, other: KVChannel) -> bool:
    """Return whether two ends are linked; both must agree."""
    both = (one.connected(other.address), other.connected(one.address))
    assert both[0] == both[1], "one end thinks that it is connected"
    return all(both)


class Deaf:
    """A Receiver that answers nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


class Stranger:
    """An end that sends what the test wants, at either side of a new link to `peer`."""

    def __init__(self, net: HandNet, peer: KVChannel, *, dials: bool = True) -> None:
        self.net, self.peer = net, peer
        self.channel = net.end()
        self.channel.transport.receiver = Deaf()  # type: ignore[attr-defined]
        if dials:
            self.channel.transport.connect(peer.address.endpoints, timeout_s=0)
            self.side = net.sides[-2]
        else:
            peer.connect(self.channel.address, timeout_s=0)
            self.side = net.sides[-1]
        net.settle()
        theirs = wire.decode(self.side.other.sent[0])
        assert isinstance(theirs, wire.Open)
        nonce = b"n" * 16
        self.mac = FrameMac(nonce + theirs.nonce if dials else theirs.nonce + nonce, dials, None)
        self.open = wire.encode(wire.Open((wire.MAJOR, wire.MINOR), nonce, keyed=False))

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.side.owner.send(self.side.link, frame)
        self.net.settle()

    def say(self, message: wire.Message) -> None:
        self.send(self.mac.sign(wire.encode(message)))

    def hello(self) -> wire.Hello:
        return wire.Hello(self.channel.address, self.peer.pool.layout)

    def welcome(self) -> wire.Welcome:
        return wire.Welcome(self.channel.address, self.peer.pool.layout)

    @property
    def is_welcome(self) -> bool:
        return self.peer.connected(self.channel.address)
