"""What tests on a card share: two engines joined by a transport, what they answer, and how it may differ.

Where a token differs, the two best must be close in the exact model: by TIE, which is what the roundings of a format
may move. The comparison of that stream then ends, and few streams may end so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pdinfer as pd
from tests.e2e.setups import plain_reference

TRANSPORTS = ("shared", "loopback", "tcp")
TIE = {"exact": 1e-4, "packed": 0.05, "quantized": 0.2, "bfloat16": 0.5}
"""Of logits up to 24. On a CPU, bfloat16 moves those of the trained model by 0.03 on average and by 1.5 where another
expert is chosen; a rounding to FP8 or INT8 that falls to the other side moves them by 0.15."""
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


def requests(prompts: list[tuple[int, ...]]) -> list[pd.Request]:
    return [
        pd.Request(
            request_id=f"{number}/{temperature}",
            prompt=prompt,
            sampling=pd.SamplingParams(max_new_tokens=12, seed=number, ignore_eos=True, temperature=temperature),
        )
        for number, prompt in enumerate(prompts)
        for temperature in (0.0, 0.7)
    ]


def check(asked: list[pd.Request], answers: Answers, expected: Answers, exact: pd.Model, tie: float) -> None:
    """Compare streams with those expected; `exact` says how close the two best were where they part."""
    parted = []
    for request in asked:
        name = request.request_id or ""
        (wanted,) = expected[name]
        for tokens in answers[name]:
            assert len(tokens) == len(wanted)
            at = next((at for at, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), None)
            if at is None:
                continue
            margin = plain_reference(exact, request, [token or 0 for token in wanted[: at + 1]]).margins[at]
            assert margin < tie, f"{name}: token {at} is {tokens[at]}, not {wanted[at]} (margin {margin})"
            parted.append(f"{name} at {at}: margin {margin:.1e}")
    assert len(parted) <= sum(map(len, answers.values())) // 5, parted
