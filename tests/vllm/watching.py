"""What tests see of a connector's worker: the digest of every room that leaves or lands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash


def pages_digest(channel: Any, tokens: range, pages: Any, first: int) -> str:
    """Return the digest of some tokens over all layers, whatever the size of the pages."""
    pool = channel.pool
    layout = pool.layout
    spans = layout.spans(pool.memory_pages, layers=layout.layers, tokens=tokens, pages=pages, first_token=first)
    digest = xxhash.xxh3_64()
    for view in pool.memory.read(spans):
        digest.update(view)
    return digest.hexdigest()


def watch(worker: Any, say: Callable[..., None]) -> None:
    """Tell of every room that leaves or lands: the digest of its bytes at this end."""
    channel, receiving, sending = worker.channel, worker._receiving, worker._sending
    finish, land_out = receiving._finish, sending._land

    def landed(entry: Any) -> None:
        load = entry.load
        if not set(load.blocks) & receiving._bad_blocks:
            tokens = entry.grant.tokens
            digest = pages_digest(channel, tokens, load.blocks, tokens.start)
            say(moved=entry.grant.room.hex(), digest=digest, tokens=(tokens.start, tokens.stop), side="decode")
        finish(entry)

    blocks: dict[str, Any] = {}
    push = sending._push

    def pushed(out: Any, save: Any, layers: Any) -> None:
        blocks[out.grant.room.hex()] = save.blocks
        push(out, save, layers)

    def left(out: Any, token: Any) -> None:
        room, tokens = out.grant.room.hex(), out.grant.tokens
        digest = pages_digest(channel, tokens, blocks[room], 0)
        say(moved=room, digest=digest, tokens=(tokens.start, tokens.stop), side="prefill")
        land_out(out, token)

    receiving._finish, sending._push, sending._land = landed, pushed, left
