"""Which pages of a pool can be found, told as vLLM tells it, so that routers made for vLLM can read it.

The messages are those of `vllm.distributed.kv_events`, in MessagePack: a batch with a time and events. A block is a
page of the prefix cache, and its hash is the page's key, which covers all tokens up to its last one, the layout and the
salt.

    events = pd.kv.KVEvents(engine.pool)
    while serving:
        engine.step()
        if (batch := events.take()) is not None:
            socket.send_multipart([b"", events.num_batches.to_bytes(8, "big"), batch])     # of ZeroMQ, as vLLM does
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from pdinfer.checks import typed
from pdinfer.kv.pool import PagePool
from pdinfer.process.locks import new_lock
from pdinfer.values import brief

MAX_BLOCKS = 1 << 18
"""The most blocks of a batch. Beyond, what a slow reader has not taken is dropped, and it is told to begin anew."""


class KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """What all events have in common: nothing but a tag, the name of the class."""


class BlockStored(KVEvent):
    """Blocks of `block_size` tokens that follow each other, and the block before them if there is one."""

    __repr__ = brief

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVEvent):
    """Blocks that cannot be found any more."""

    __repr__ = brief

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(KVEvent):
    """No block can be found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events in the order in which they happened. `ts` is in seconds of the epoch."""

    __repr__ = brief

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEvents:
    """The events of one pool since it was watched. Blocks that were there before are told of as removed only.

    `medium` says where the pages are, in vLLM's words ("GPU"). With `as_maps` the events of a batch are maps by name,
    as in vLLM 0.32; older versions have arrays. `take` may be called from any thread."""

    @typed
    def __init__(
        self,
        pool: PagePool,
        *,
        medium: str | None = None,
        data_parallel_rank: int | None = None,
        as_maps: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.num_batches = 0
        self._medium = medium
        self._rank = data_parallel_rank
        self._as_maps = as_maps
        self._clock = clock
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._num_blocks = 0
        self._lock = new_lock()
        pool.watch(self)

    def take(self) -> bytes | None:
        """Return the batch of the events since the last call, encoded; None when there are none."""
        with self._lock:
            events, self._events, self._num_blocks = self._events, [], 0
        if not events:
            return None
        self.num_batches += 1
        batch = KVEventBatch(self._clock(), events, self._rank)
        return msgspec.msgpack.encode(_mapped(batch) if self._as_maps else batch)

    def stored(self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], page_size: int) -> None:
        self._add(BlockStored(list(keys), parent, list(tokens), page_size, None, self._medium), len(keys))

    def removed(self, key: bytes) -> None:
        with self._lock:
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved) and self._num_blocks < MAX_BLOCKS:
                last.block_hashes.append(key)
                self._num_blocks += 1
                return
        self._add(BlockRemoved([key], self._medium), 1)

    def cleared(self) -> None:
        with self._lock:
            self._events, self._num_blocks = [AllBlocksCleared()], 0

    def _add(self, event: BlockStored | BlockRemoved, num_blocks: int) -> None:
        with self._lock:
            if self._num_blocks + num_blocks > MAX_BLOCKS:
                self._events, self._num_blocks = [AllBlocksCleared()], 0
            self._events.append(event)
            self._num_blocks += num_blocks


def _mapped(batch: KVEventBatch) -> list[object]:
    events = [{"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in batch.events]
    return [batch.ts, events, batch.data_parallel_rank]
