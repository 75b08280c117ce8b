"""Ends whose pages have heads: each rank holds some of them, in an order of its own, and every value says where it
belongs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from pdinfer.config import CacheConfig
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.pool import PagePool
from pdinfer.kv.shapes import AxisOrder, PageShape
from pdinfer.kv.view import PageMemory
from pdinfer.types import PageGrant, PeerAddress
from tests.unit.kv.channel.channels import SmallModel

NUM_HEADS = 8
LAYERS = (0, 1, 3)
WIDTH = 2
rooms = itertools.count(1)


@attrs.frozen(kw_only=True)
class HeadModel(SmallModel):
    """What a pool needs of a model with keys and values per head, of which a rank holds `heads`."""

    heads: range = range(NUM_HEADS)
    order: AxisOrder = AxisOrder.LBHNC
    packed: bool = False

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        shape = PageShape(heads=self.heads, num_heads=NUM_HEADS, order=self.order, packed=self.packed)
        part = KVComponent(
            name="kv", format="k|v", dtype="float32", width=WIDTH, token_bytes=4 * WIDTH, layers=LAYERS, shape=shape
        )
        return KVLayout(model_id=b"model", weights_id=b"weights", page_size=cache.page_size, components=(part,))


def pool_of(page_size: int = 4, **model: object) -> PagePool:
    return PagePool(HeadModel(**model), CacheConfig(page_size=page_size))  # type: ignore[arg-type]


def values_of(layer: int, heads: range, tokens: range) -> Tensor:
    """Return what the rows of some heads hold, [heads, tokens, WIDTH]: a number that no other row has."""
    head, token, value = torch.meshgrid(
        torch.tensor(list(heads)), torch.tensor(list(tokens)), torch.arange(WIDTH), indexing="ij"
    )
    return (((layer * NUM_HEADS + head) * 1000 + token) * WIDTH + value + 1).float()


def compute(end: KVChannel, num_tokens: int) -> tuple[int, ...]:
    """Return pages of an end that hold the tokens of a prompt, of the heads that it has, as a prefill leaves them."""
    pool = end.pool
    assert isinstance(pool, PagePool)
    assert pool.layout.heads is not None
    pool.release(pool.own(3))
    pages = pool.own(pool.layout.num_pages(num_tokens))[::-1]
    for layer in LAYERS:
        rows = values_of(layer, pool.layout.heads, range(num_tokens))
        for at, page in enumerate(pages):
            part = rows[:, at * pool.layout.page_size :][:, : pool.layout.page_size]
            pool.memory.pages("kv", layer)[page, :, : part.shape[1]] = part  # type: ignore[attr-defined]
    return pages


def grant_to(decodes: Sequence[KVChannel], writers: Sequence[PeerAddress], tokens: range) -> PageGrant:
    """Return a grant of the same pages at every rank of a decode, which none of them expects so far."""
    pages = [end.pool.grant(end.pool.layout.num_pages(len(tokens)))[::-1] for end in decodes]  # type: ignore[attr-defined]
    assert len(set(pages)) == 1
    return PageGrant(
        room=next(rooms).to_bytes(16, "big"),
        request_id="r",
        writers=tuple(writers),
        destinations=tuple(end.address for end in decodes),
        tokens=tokens,
        pages=pages[0],
        generations=decodes[0].pool.generations(pages[0]),
        layout_id=decodes[0].pool.layout.layout_id,
    )


def check_landed(end: KVChannel, grant: PageGrant) -> None:
    """Fail unless every row of the grant is right in the pages of an end, and every other byte is 0."""
    layout, memory = end.pool.layout, end.pool.memory
    assert layout.heads is not None
    assert isinstance(memory, PageMemory)
    for layer in LAYERS:
        expected = torch.zeros_like(memory.pages("kv", layer))
        rows = values_of(layer, layout.heads, grant.tokens)
        for at, page in enumerate(grant.pages):
            part = rows[:, at * layout.page_size :][:, : layout.page_size]
            expected[page, :, : part.shape[1]] = part
        assert torch.equal(memory.pages("kv", layer), expected), f"layer {layer}"
