"""The same tokens on a CUDA device as on the CPU, through every transport, with the torch provider."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.testing import FAMILIES, random_model, tiny_config

pytestmark = pytest.mark.gpu

PROMPTS = [tuple((7 * i + j) % 97 for j in range(length)) for i, length in enumerate((1, 16, 33, 70))]


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "changed": {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": ((5, 3.0), (6, -3.0)),
        "min_new_tokens": 8,
        "stop_token_ids": (7,),
        "logprobs": 4,
    },
}


def requests() -> list[pd.Request]:
    """Greedy, sampled, and with all that changes logits."""
    return [
        pd.Request(
            request_id=f"{number}/{name}",
            prompt=prompt,
            sampling=pd.SamplingParams(max_new_tokens=16, seed=number, ignore_eos=True, **asked),
        )
        for number, prompt in enumerate(PROMPTS)
        for name, asked in ASKED.items()
    ]


def serve(pairing: pd.Pairing) -> dict[str, list[int | None]]:
    """The tokens of the requests, run twice: the second time they find their prefixes."""
    tokens: dict[str, list[int | None]] = {}
    with pairing:
        for event in (*pairing.generate(requests()), *pairing.generate(requests())):
            assert event.error is None
            tokens.setdefault(event.request_id, []).append(event.token)
    return tokens


@pytest.mark.parametrize("transport", ["shared", "loopback", "tcp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_cpu(family: str, transport: str) -> None:
    """Exact float32 products: TF32 would round the logits of both sides differently."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = serve(pd.Pairing.local(random_model(tiny_config(family))))
    model = random_model(tiny_config(family), device="cuda")
    cache, config = pd.CacheConfig(page_size=16, num_pages=128), pd.EngineConfig(chunked_prefill_size=20)
    if transport == "shared":
        pairing = pd.Pairing.local(model, cache=cache, engine=config)
    else:
        pools = [pd.PagePool(model, cache) for _ in range(2)]
        if transport == "loopback":
            ends = list(pd.KVChannel.loopback(*pools))
        else:
            ends = [pd.KVChannel(pool, pd.kv.SocketTransport()) for pool in pools]
        pairing = pd.Pairing(pd.PrefillEngine(model, ends[0], config), pd.DecodeEngine(model, ends[1], config))
    assert serve(pairing) == expected
