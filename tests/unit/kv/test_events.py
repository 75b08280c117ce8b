"""KV events are what vLLM's classes decode, and following them gives the pages of the pool."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdinfer.config import CacheConfig
from pdinfer.kv import events
from pdinfer.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, KVEvents
from pdinfer.kv.pool import PagePool
from tests.unit.kv.test_pool import OneByteTokens

SIZE = 4


def pool_of(num_pages: int = 8) -> PagePool:
    return PagePool(OneByteTokens(), CacheConfig(num_pages=num_pages, page_size=SIZE))


def keep(pool: PagePool, tokens: tuple[int, ...]) -> tuple[list[bytes], tuple[int, ...]]:
    """Let a request leave these tokens, whose pages are full."""
    chain = pool.key_scheme.chain(b"")
    chain.extend(tokens)
    known = pool.find(chain.keys)
    pool.share(known)
    pages = pool.keep(chain.keys, (*known, *pool.own(len(chain.keys) - len(known))), lambda: tokens)
    pool.release(pages)
    return chain.keys, pages


def decoded(data: bytes | None) -> list[Any]:
    assert data is not None
    return msgspec.msgpack.decode(data, type=KVEventBatch).events


def test_a_request_stores_the_blocks_that_were_not_there() -> None:
    pool = pool_of()
    told = KVEvents(pool, medium="CPU", clock=lambda: 12.5)
    first, _ = keep(pool, tuple(range(8)))
    keys, _ = keep(pool, tuple(range(16)))
    assert keys[:2] == first
    assert decoded(told.take()) == [
        BlockStored(keys[:2], None, list(range(8)), SIZE, None, "CPU"),
        BlockStored(keys[2:], keys[1], list(range(8, 16)), SIZE, None, "CPU"),
    ]
    assert told.take() is None
    keep(pool, tuple(range(16)))
    assert told.take() is None


def test_eviction_removes_and_rebuilding_clears() -> None:
    pool = pool_of(4)
    told = KVEvents(pool)
    keys, _ = keep(pool, tuple(range(16)))
    told.take()
    keep(pool, tuple(range(100, 108)))
    removed, stored = decoded(told.take())
    assert removed == BlockRemoved([keys[3], keys[2]])  # the last page of a sequence goes first
    assert isinstance(stored, BlockStored)
    pool.rebuild()
    assert decoded(told.take()) == [AllBlocksCleared()]
    assert told.num_batches == 3


def test_a_page_in_doubt_is_removed_with_all_that_continue_it() -> None:
    pool = pool_of()
    told = KVEvents(pool)
    keys, pages = keep(pool, tuple(range(12)))
    told.take()
    pool.forget(pages[1:2])
    (removed,) = decoded(told.take())
    assert set(removed.block_hashes) == set(keys[1:])


def test_a_reader_that_does_not_read_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_BLOCKS", 3)
    pool = pool_of()
    told = KVEvents(pool)
    for start in (0, 100, 200):
        keep(pool, tuple(range(start, start + 8)))
    cleared, stored = decoded(told.take())
    assert isinstance(cleared, AllBlocksCleared)
    assert stored.token_ids == list(range(200, 208))


@pytest.mark.parametrize("as_maps", [False, True])
def test_the_bytes_are_those_of_vllm(as_maps: bool) -> None:
    """Events are arrays with a tag, or maps with a type since vLLM 0.32 at the latest. A batch is an array."""
    pool = pool_of()
    told = KVEvents(pool, as_maps=as_maps, clock=lambda: 1.0, data_parallel_rank=2, medium="GPU")
    keys, _ = keep(pool, (1, 2, 3, 4))
    data = told.take()
    assert data is not None
    plain = msgspec.msgpack.decode(data)
    if as_maps:
        event = {"block_hashes": keys, "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4}
        event |= {"type": "BlockStored", "lora_id": None, "medium": "GPU", "lora_name": None}
        assert plain == [1.0, [event], 2]
    else:
        assert plain == [1.0, [["BlockStored", keys, None, [1, 2, 3, 4], 4, None, "GPU", None]], 2]


@pytest.mark.needs("vllm")
def test_vllms_own_classes_decode_them() -> None:
    theirs = pytest.importorskip("vllm.distributed.kv_events")
    as_maps = not theirs.BlockStored.__struct_config__.array_like
    pool = pool_of(2)
    told = KVEvents(pool, as_maps=as_maps)
    keys, _ = keep(pool, tuple(range(8)))
    keep(pool, tuple(range(50, 58)))
    pool.rebuild()
    keep(pool, tuple(range(8)))
    batch = msgspec.msgpack.decode(told.take() or b"", type=theirs.KVEventBatch)
    cleared, stored = batch.events
    assert isinstance(cleared, theirs.AllBlocksCleared)
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == (keys, list(range(8)), SIZE)
