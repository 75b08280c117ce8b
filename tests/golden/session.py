"""A small hand-off in which every byte is known: two ends with fixed random bytes, a clock that stands still, one
key."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdinfer.errors import TransferError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.layout import Spans
from pdinfer.kv.transports.base import Link, Transfer, WriteMessage
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.transports.stream.framing import Header, InlinePayloads, MessageKind
from tests.unit.kv.channel.channels import ABORTED, LAYERS, granted, handoff, pool_of

TOKENS = range(4, 7)


class _Recorded(LoopbackTransport):
    """A link that records what a socket would carry for each message, in order."""

    def __init__(self, hub: LoopbackHub) -> None:
        super().__init__(hub)
        self.sent: list[bytes] = []

    def send(self, link: Link, frame: bytes) -> None:
        self.sent.append(Header(MessageKind.FRAME, len(frame)).packed() + frame)
        super().send(link, frame)

    def write(
        self,
        link: Link,
        frame: bytes,
        source: Spans,
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        assert self._owned is not None
        memory, receiver = self._owned
        transfer = Transfer(sum(length for _, length in source))
        self.sent.append(b"")
        for part in InlinePayloads(link, memory, receiver, digest=True).outgoing(
            WriteMessage(frame, transfer, source, None)
        ):
            assert part is not None
            views, num_bytes = part.batch()
            self.sent[-1] += b"".join(views)
            part.advance(num_bytes)
        return super().write(link, frame, source, ready=ready, then=then)


def _counting(first: int) -> Callable[[int], bytes]:
    """Return a predictable source of random bytes: each call gives the next byte value, repeated."""
    calls = iter(range(first, 256))
    return lambda count: bytes([next(calls)]) * count


def record(key: bytes | None) -> dict[str, list[str]]:
    """Return what each end sends, in hexadecimal: both handshakes, a beat each, a room that lands and one that is
    aborted."""
    hub = LoopbackHub()
    transports = _Recorded(hub), _Recorded(hub)
    prefill, decode = (
        KVChannel(pool_of(), transport, key=key, clock=lambda: 100.0, random_bytes=_counting(first))
        for transport, first in zip(transports, (0x10, 0x80), strict=True)
    )
    prefill.connect(decode.address)
    prefill.arrivals.tick()
    decode.arrivals.tick()
    pages = prefill.pool.own(2)
    counted = torch.arange(prefill.pool.num_pages * prefill.pool.layout.page_bytes) % 251
    # behind the pages of each layer lies the scratch page, of which nothing is sent
    for region, part in zip(prefill.pool.memory.buffer.chunk(len(LAYERS)), counted.chunk(len(LAYERS)), strict=True):
        region[: len(part)] = part
    for room in (b"room that lands.", b"room that aborts"):
        grant = granted(decode, prefill.address, tokens=TOKENS, room=room)
        prefill.accept(grant)
        if room == b"room that aborts":
            decode.abort(grant, TransferError("not wanted any more"))
            prefill.finish(grant, handoff(grant, prefill, ABORTED))
        else:
            for layer in LAYERS:
                prefill.push(grant, layers=range(layer, layer + 1), tokens=TOKENS, pages=pages)
            prefill.finish(grant, handoff(grant, prefill, token=7, logprob=-0.5))
    statuses = [settled.status.value for settled in decode.poll()]
    assert statuses == ["landed", "aborted"], statuses
    prefill.close()
    decode.close()
    names = "from prefill", "from decode"
    return {name: [part.hex() for part in transport.sent] for name, transport in zip(names, transports, strict=True)}
