"""What tests of the channel share: ends that can reach each other, rooms between them, and frames made by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs
import torch

from pdinfer.config import CacheConfig
from pdinfer.errors import TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.links import ChannelLinks
from pdinfer.kv.channel.peer import Peer, Write
from pdinfer.kv.layout import KVComponent, KVLayout, Spans
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import Link, Transfer, Transport
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.view import PageMemory
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, peer_key
from tests.waiting import TIMEOUT_S, wait_until

LANDED, ABORTED = HandoffStatus.LANDED, HandoffStatus.ABORTED
LAYERS = range(3)
NUM_PAGES = 24
rooms = itertools.count(1)


@attrs.frozen(kw_only=True)
class SmallModel:
    """What a pool needs of a model: a latent of two values per token in three layers."""

    model_id: bytes = b"model"
    weights_id: bytes = b"weights"
    dtype: str = "float16"

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        part = KVComponent(name="latent", format="f", dtype=self.dtype, width=2, token_bytes=4, layers=tuple(LAYERS))
        return KVLayout(
            model_id=self.model_id, weights_id=self.weights_id, page_size=cache.page_size, components=(part,)
        )

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int:
        return NUM_PAGES

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> PageMemory:
        return PageMemory(layout, num_pages, device=torch.device("cpu"))


def pool_of(page_size: int = 4, **model: object) -> PagePool:
    return PagePool(SmallModel(**model), CacheConfig(page_size=page_size))  # type: ignore[arg-type]


def refusal(connect: Callable[..., object]) -> str:
    """Return why a connection is refused, again and again: the first answer may take its time."""
    for timeout_s in (0.2, 2.0, 20.0, TIMEOUT_S):
        try:
            connect(timeout_s=timeout_s)
        except TransferError as error:
            if "did not answer" not in str(error):
                return str(error)
    raise AssertionError("it is not refused")


def granted(
    decode: KVChannel,
    *writers: PeerAddress,
    tokens: range,
    room: bytes | None = None,
    pages: tuple[int, ...] | None = None,
    request_id: str = "r",
) -> PageGrant:
    """Return a grant that decode expects, of new pages in no particular order or of `pages`."""
    pool = decode.pool
    pages = pages or pool.grant(pool.layout.num_pages(len(tokens)))[::-1]
    grant = PageGrant(
        room=room or next(rooms).to_bytes(16, "big"),
        request_id=request_id,
        writers=writers,
        destinations=(decode.address,),
        tokens=tokens,
        pages=pages,
        generations=pool.generations(pages),
        layout_id=pool.layout.layout_id,
    )
    decode.expect(grant)
    return grant


@attrs.define
class Case:
    """Ends that can reach each other: makes them, fills their pages, and knows which bytes must arrive where."""

    kind: str
    hub: LoopbackHub = attrs.field(factory=LoopbackHub)
    open: list[KVChannel] = attrs.field(factory=list)

    def end(self, pool: PagePool | None = None, *, key: bytes | None = None) -> KVChannel:
        transport: Transport = SocketTransport() if self.kind == "tcp" else LoopbackTransport(self.hub)
        self.open.append(KVChannel(pool or pool_of(), transport, key=key))
        return self.open[-1]

    def close(self) -> None:
        for end in self.open:
            end.close()

    def pair(self, prefill_pages: int = 4, decode_pages: int = 4) -> tuple[KVChannel, KVChannel]:
        """Make a prefill and a decode that are connected. In the kind "shared" they hold one pool."""
        prefill = self.end(pool_of(prefill_pages))
        decode = self.end(prefill.pool if self.kind == "shared" else pool_of(decode_pages))
        prefill.connect(decode.address)
        return prefill, decode

    def grant(self, decode: KVChannel, *writers: KVChannel, tokens: range = range(4, 14)) -> PageGrant:
        """Make a grant that decode expects, with its pages in no particular order."""
        decode.pool.release(decode.pool.own(3))
        return granted(decode, *(writer.address for writer in writers), tokens=tokens)

    def room(
        self, prefill_pages: int = 4, decode_pages: int = 4, tokens: range = range(4, 14)
    ) -> tuple[KVChannel, KVChannel, PageGrant, tuple[int, ...]]:
        """Make a pair and a room that prefill has accepted. Return also prefill's pages with the bytes to be pushed."""
        prefill, decode = self.pair(prefill_pages, decode_pages)
        grant = self.grant(decode, prefill, tokens=tokens)
        return prefill, decode, grant, self.accept(prefill, grant)

    def accept(self, prefill: KVChannel, grant: PageGrant) -> tuple[int, ...]:
        """Accept a room. Return prefill's pages with the bytes to be pushed into it."""
        pages = self.source(prefill, grant)
        prefill.accept(grant)
        return pages

    def source(self, prefill: KVChannel, grant: PageGrant) -> tuple[int, ...]:
        """Return prefill's pages for every token up to the grant's end, filled at random where they will be read."""
        if self.kind == "shared":
            # page i of a push holds tokens from i * page_size: those before the grant are somebody else's
            pages = (-1,) * (grant.tokens.start // prefill.pool.layout.page_size) + grant.pages
        else:
            pages = prefill.pool.own(prefill.pool.layout.num_pages(grant.tokens.stop))
        for offset, length in self.at(prefill, grant.tokens, pages, 0):
            prefill.pool.memory.buffer[offset : offset + length].random_(1, 255)
        return pages

    def at(self, end: KVChannel, tokens: range, pages: tuple[int, ...], first_token: int) -> list[tuple[int, int]]:
        layout = end.pool.layout
        return layout.spans(end.pool.memory_pages, layers=LAYERS, tokens=tokens, pages=pages, first_token=first_token)

    def sent(self, prefill: KVChannel, tokens: range, pages: tuple[int, ...]) -> bytes:
        return b"".join(prefill.pool.memory.read(self.at(prefill, tokens, pages, 0)))

    def arrived(self, decode: KVChannel, grant: PageGrant) -> bytes:
        return b"".join(decode.pool.memory.read(self.at(decode, grant.tokens, grant.pages, grant.tokens.start)))

    def push_all(self, prefill: KVChannel, grant: PageGrant, pages: tuple[int, ...]) -> list[Transfer]:
        tokens = grant.tokens
        return [prefill.push(grant, layers=range(layer, layer + 1), tokens=tokens, pages=pages) for layer in LAYERS]

    def hand_over(self, prefill: KVChannel, decode: KVChannel, grant: PageGrant, pages: tuple[int, ...]) -> None:
        """Push and finish a room that prefill has accepted. It must land."""
        self.push_all(prefill, grant, pages)
        prefill.finish(grant, handoff(grant, prefill))
        assert settled(decode)[0].status is LANDED


def handoff(grant: PageGrant, writer: KVChannel, status: HandoffStatus = LANDED, **more: object) -> Handoff:
    error = TransferError("gave up") if status is ABORTED else None
    return Handoff(room=grant.room, writer=writer.address, status=status, error=error, **more)  # type: ignore[arg-type]


def links(end: KVChannel) -> ChannelLinks:
    """Return the part of an end that a test replaces to make it a peer that breaks the rules."""
    return end.links


def link_to(end: KVChannel, address: PeerAddress) -> Link:
    """Return the open link to a peer."""
    link = links(end).book.link_to(peer_key(address))
    assert link is not None
    return link


def record(end: KVChannel, peer: KVChannel) -> Peer:
    """Return what an end knows of a linked peer."""
    there = links(end).book.peer_at(peer_key(peer.address))
    assert there is not None
    return there


def say(end: KVChannel, peer: KVChannel, message: wire.Message, source: Spans | None = None) -> None:
    """Send a frame made by hand, and a payload, past the rules of the end that sends it."""
    write = None if source is None else Write(source, None, lambda _: None)
    record(end, peer).post(wire.encode(message), write)


def settled(decode: KVChannel, count: int = 1) -> list[Handoff]:
    handoffs: list[Handoff] = []
    wait_until(lambda: handoffs.extend(decode.poll()) or len(handoffs) >= count)
    assert len(handoffs) == count
    return handoffs
