"""Tokens of a tiny model through prefill, channel and decode on the device, against the reference on the CPU.

The model is small and its sizes are those that kernels are made for. What the card computes in float32 gives the same
tokens, but where the two best of the CPU are as close as the last bits.
"""

from __future__ import annotations

from typing import Any

import torch

import pdinfer as pd
from pdinfer.testing import random_model, tiny_config

SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_size": 256}
TIE = 1e-3
PAGE_SIZE = 16


def requests() -> list[pd.Request]:
    sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=2)
    prompts = [tuple((7 * index + at) % 97 for at in range(length)) for index, length in enumerate((1, 16, 33))]
    return [pd.Request(request_id=str(index), prompt=prompt, sampling=sampling) for index, prompt in enumerate(prompts)]


def served(model: pd.Model, *, joined: bool) -> dict[str, list[tuple[int, float]]]:
    """Return the tokens of the requests, each with the distance of the two best, through one pool or a channel."""
    cache, config = pd.CacheConfig(page_size=PAGE_SIZE, num_pages=64), pd.EngineConfig(chunked_prefill_size=20)
    if joined:
        pairing = pd.Pairing.local(model, cache=cache, engine=config)
    else:
        ends = pd.KVChannel.loopback(*(pd.PagePool(model, cache) for _ in range(2)))
        pairing = pd.Pairing(pd.PrefillEngine(model, ends[0], config), pd.DecodeEngine(model, ends[1], config))
    found: dict[str, list[tuple[int, float]]] = {}
    with pairing:
        for event in pairing.generate(requests()):
            if event.error is not None:
                raise RuntimeError(event.error)
            found.setdefault(event.request_id, []).append((event.token or 0, margin_of(event)))
    return found


def margin_of(event: Any) -> float:
    """Return by how much the best token of an event is better than the second."""
    best = sorted((logprob for _, logprob in event.top_logprobs), reverse=True)
    return best[0] - best[1]


def complaints(device: torch.device) -> list[str]:
    """Return where tokens differ from those of the reference on the CPU, for both ways of handing pages over."""
    config = tiny_config("v3", **SIZES)
    wanted = served(random_model(config, providers="reference"), joined=True)
    model, found = random_model(config, device=device), []
    for joined in (True, False):
        for name, tokens in served(model, joined=joined).items():
            for at, ((got, _), (want, margin)) in enumerate(zip(tokens, wanted[name], strict=True)):
                if got != want:
                    if margin > TIE:
                        found.append(f"request {name}, token {at}: {got}, not {want} (margin {margin:.2g})")
                    break
    return found
