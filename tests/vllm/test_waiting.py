"""What waiting costs: vLLM steps all the time while a request waits for its grant or its pages."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import Engine, ready


def test_a_waiting_pair_hardly_uses_a_core(start: Callable[..., Engine]) -> None:
    """One request of either side waits for a peer that has none for it."""
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", hold_s=30.0)
    decode = start("decode", "kv_consumer", lease_s=30.0)
    ready(prefill, decode)
    prompt = prompts(1)[0]
    sends, loads, _ = asks(prefill)
    prefill.say(add="a", prompt=prompt, max_tokens=1, params=sends)
    decode.say(add="b", prompt=prompt, max_tokens=8, params={**loads, "room": "ab" * 16})
    time.sleep(1.0)
    before = [engine.stats()["cpu_s"] for engine in (prefill, decode)]
    began = time.monotonic()
    time.sleep(8.0)
    after = [engine.stats()["cpu_s"] for engine in (prefill, decode)]
    shares = [(late - early) / (time.monotonic() - began) for early, late in zip(before, after, strict=True)]
    print("share of a core, prefill and decode:", [round(share, 4) for share in shares])
    assert max(shares) < 0.05
