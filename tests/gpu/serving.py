"""What tests on a card share: two engines joined by a transport, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pdinfer as pd

TRANSPORTS = ("shared", "loopback", "tcp")
Answers = dict[str, list[list[int | None]]]
"""The tokens of each request, once for each time that it was asked."""


def joined(
    model: pd.Model, transport: str = "shared", *, kv_format: str = "auto", num_draft_tokens: int = 0
) -> pd.Pairing:
    """Return a prefill and a decode engine of one model, which share a pool or have one each."""
    cache = pd.CacheConfig(page_size=16, num_pages=128, kv_format=kv_format)
    config = pd.EngineConfig(chunked_prefill_size=20, num_draft_tokens=num_draft_tokens)
    if transport == "shared":
        return pd.Pairing.local(model, cache=cache, engine=config)
    pools = [pd.PagePool(model, cache) for _ in range(2)]
    if transport == "loopback":
        ends = list(pd.KVChannel.loopback(*pools))
    else:
        ends = [pd.KVChannel(pool, pd.kv.SocketTransport()) for pool in pools]
    return pd.Pairing(pd.PrefillEngine(model, ends[0], config), pd.DecodeEngine(model, ends[1], config))


def serve(pairing: pd.Pairing, requests: Sequence[pd.Request], *, times: int = 2) -> Answers:
    """Return the tokens of the requests. The second time they find their prefixes."""
    answers: dict[str, list[Any]] = {request.request_id or "": [] for request in requests}
    with pairing:
        for _ in range(times):
            for tokens in answers.values():
                tokens.append([])
            for event in pairing.generate(requests):
                assert event.error is None
                answers[event.request_id][-1].append(event.token)
    return answers
