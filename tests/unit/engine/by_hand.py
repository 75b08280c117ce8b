"""A transport whose messages move when the test says so, one at a time, under a clock that the test moves."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from pdinfer.errors import TransferError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Link, Receiver, Transfer, Transport, check_arriving
from pdinfer.testing import VirtualClock
from tests.unit.kv.channel.channels import pool_of


@attrs.define(eq=False)
class Side:
    """One end of a link, and what is on its way to it. `sent` keeps every frame that left from here."""

    owner: HandTransport
    link: Link
    other: Side = attrs.field(init=False)
    inbox: deque[Callable[[], None]] = attrs.field(factory=deque)
    sent: list[bytes] = attrs.field(factory=list)
    open: bool = True

    def deliver(self) -> None:
        """The next message arrives."""
        self.link.heard_at = self.owner.net.clock()
        message = self.inbox.popleft()
        try:
            message()
        except TransferError as error:
            self.shut(error)

    def shut(self, error: TransferError | None) -> None:
        if not self.open:
            return
        self.open = False
        self.inbox.clear()
        self.owner.receiver.closed(self.link, error)
        if self.other.open:
            reason = TransferError("the peer closed the link")
            self.other.inbox.append(lambda: self.other.shut(reason))


class HandNet:
    """Ends that reach each other. `down` endpoints cannot be dialled; `dials` are the times at which any was. What
    other threads do while one dials is done in `while_dialling`."""

    def __init__(self) -> None:
        self.clock = VirtualClock(100.0)
        self.transports: dict[str, HandTransport] = {}
        self.sides: list[Side] = []
        self.down: set[str] = set()
        self.dials: list[float] = []
        self.random = random.Random(7)
        self.while_dialling: Callable[[], None] = lambda: None

    def end(self, *, key: bytes | None = None, **model: object) -> KVChannel:
        pool = pool_of(**model)  # type: ignore[arg-type]
        return KVChannel(pool, HandTransport(self), key=key, clock=self.clock, random_bytes=self.random.randbytes)

    def waiting(self) -> list[Side]:
        """Sides that a message can be delivered to."""
        return [side for side in self.sides if side.open and side.inbox]

    def settle(self) -> None:
        """Delivers until nothing waits."""
        while waiting := self.waiting():
            waiting[0].deliver()

    def pass_time(self, seconds: float, *ends: KVChannel, every_s: float = 0.4) -> None:
        """Time passes; these ends read and tick, the others do neither."""
        stop = self.clock() + seconds
        while self.clock() < stop - 1e-9:
            self.clock.advance(min(every_s, stop - self.clock()))
            for end in ends:
                while side := next((side for side in self.waiting() if side.owner.receiver is end.arrivals), None):
                    side.deliver()
                end.arrivals.tick()

    def side(self, end: KVChannel) -> Side:
        """The only open link of an end."""
        (side,) = [side for side in self.sides if side.open and side.owner.receiver is end.arrivals]
        return side

    def cut(self, side: Side) -> None:
        """The link breaks, and both ends learn of it at once."""
        other, error = side.other, TransferError("the connection was reset")
        for end in (side, other):
            end.shut(error)


class HandTransport(Transport):
    """A Transport of a HandNet."""

    name = "hand"
    receiver: Receiver
    memory: Memory

    def __init__(self, net: HandNet) -> None:
        self.net = net
        self.endpoint = f"hand://{len(net.transports)}"

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        self.memory, self.receiver = memory, receiver
        self.net.transports[self.endpoint] = self
        return (self.endpoint,)

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        (endpoint,) = endpoints
        self.net.dials.append(self.net.clock())
        if endpoint in self.net.down or endpoint not in self.net.transports:
            raise TransferError(f"nobody answers at {endpoint}")
        there = self.net.transports[endpoint]
        ours, theirs = (
            Side(owner, Link(name, heard_at=self.net.clock()))
            for owner, name in ((self, endpoint), (there, self.endpoint))
        )
        ours.other, theirs.other = theirs, ours
        theirs.inbox.append(lambda: there.receiver.opened(theirs.link))
        self.net.sides += [ours, theirs]
        self.net.while_dialling()
        return ours.link

    def at(self, link: Link) -> Side | None:
        return next((side for side in self.net.sides if side.link is link and side.open), None)

    def send(self, link: Link, frame: bytes) -> None:
        if (side := self.at(link)) is not None:
            side.sent.append(frame)
            self.put(side.other, frame)

    @staticmethod
    def put(side: Side, frame: bytes) -> None:
        """A frame is on its way to `side`."""

        def receive() -> None:
            check_arriving(side.link, len(frame), is_write=False)
            side.owner.receiver.received(side.link, frame)

        side.inbox.append(receive)

    def write(
        self,
        link: Link,
        frame: bytes,
        source: Spans,
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        transfer = Transfer(sum(length for _, length in source), then)
        side = self.at(link)
        if side is None:
            transfer.complete(TransferError("the link is closed"))
            return transfer
        payload = b"".join(self.memory.read(source))
        transfer.complete()
        there = side.other

        def place() -> None:
            receiver, memory = there.owner.receiver, there.owner.memory
            spans = receiver.place(there.link, frame, len(payload))
            if spans is None:
                return
            landing = memory.landing(spans)
            left = memoryview(payload)
            for view in landing.views:
                view[:] = left[: len(view)]
                left = left[len(view) :]
            landing.commit()
            receiver.placed(there.link, frame, None)

        there.inbox.append(place)
        return transfer

    def fence(self, link: Link) -> None:
        if (side := self.at(link)) is not None:
            side.shut(None)

    def close(self) -> None:
        for side in [side for side in self.net.sides if side.owner is self]:
            side.shut(None)
