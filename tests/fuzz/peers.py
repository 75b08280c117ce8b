"""A welcome peer that says anything: frames of its choice reach a channel behind a good handshake and good tags."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pdinfer as pd
from pdinfer.errors import TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.wire import NONCE_BYTES, FrameMac
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Link, Receiver, Transfer, Transport
from pdinfer.testing import random_model
from pdinfer.types import PeerAddress
from tests.unit.kv.channel.channels import granted

MAX_FRAMES = 64


class Deaf(Transport):
    """A Transport that sends nowhere; `Stranger` calls the receiver itself."""

    name = "deaf"

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        return ("deaf://0",)

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        raise TransferError("nobody is there")

    def send(self, link: Link, frame: bytes) -> None:
        pass

    def write(
        self,
        link: Link,
        frame: bytes,
        source: Spans,
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        transfer = Transfer(0, then)
        transfer.complete()
        return transfer

    def fence(self, link: Link) -> None:
        pass

    def close(self) -> None:
        pass


class Stranger:
    """A peer that talks to one channel over a new link each time."""

    def __init__(self, pool: pd.PagePool | None = None) -> None:
        pool = pool or pd.PagePool(random_model(), pd.CacheConfig(page_size=4, num_pages=16))
        self.channel = pd.KVChannel(pool, Deaf(), random_bytes=bytes)
        self.layout = pool.layout
        self._rooms = itertools.count()
        self._pages = pool.grant(4)

    def talk(self, data: bytes) -> None:
        """Send the frames in `data`, each u16 length, u8 whether it is a write, then the frame; the first error ends
        it. Rooms of 16 bytes "r" name one that this peer may write."""
        me = PeerAddress(b"stranger", next(self._rooms), 0)
        link = Link("deaf://1")
        channel = self.channel
        channel.arrivals.opened(link)
        nonce = bytes(NONCE_BYTES)
        channel.arrivals.received(link, wire.encode(wire.Open((wire.MAJOR, wire.MINOR), nonce, keyed=False)))
        mac = FrameMac(nonce + bytes(NONCE_BYTES), from_dialler=True, key=None)
        channel.arrivals.received(link, mac.sign(wire.encode(wire.Hello(me, self.layout))))
        granted(channel, me, tokens=range(16), room=b"r" * 16, pages=self._pages)
        error: TransferError | None = None
        try:
            self._say(link, mac, data)
        except TransferError as raised:
            error = raised
        finally:
            channel.arrivals.closed(link, error or TransferError("over"))
        words = channel.poll()
        assert len(words) == 1, words  # however it went, the room has one end
        assert not channel.has_news

    def _say(self, link: Link, mac: FrameMac, data: bytes) -> None:
        for _ in range(MAX_FRAMES):
            if len(data) < 3:
                return
            length, is_write = int.from_bytes(data[:2], "little"), data[2] & 1
            frame, data = data[3 : 3 + length], data[3 + length :]
            tagged = mac.sign(frame)
            if not is_write:
                self.channel.arrivals.received(link, tagged)
                continue
            message = wire.decode(frame)
            num_bytes = 0
            if isinstance(message, wire.Data):
                num_bytes = self.layout.payload_bytes(message.layers, message.tokens, message.heads)
            spans = self.channel.arrivals.place(link, tagged, num_bytes)
            if spans is not None:
                assert sum(length for _, length in spans) == num_bytes
                self.channel.arrivals.placed(link, tagged, None)
