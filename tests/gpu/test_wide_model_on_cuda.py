"""A model with the heads and the experts of DeepSeek-V3, of more than a thousand million parameters, on a card.

Its tokens go through prefill, channel and decode. The reference provider is asked on the same device, in float32 from
the same numbers. In float32 tokens are the same, but where the two best were close. In bfloat16 and with weights in FP8
blocks, the log-probability that engines report for their own tokens is compared: a rounding can make a token go to
another expert, so single tokens mean little, and the average says whether a kernel is wrong. It is about that of the
reference provider in the same dtype. On a CPU the same runs at small sizes.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import pdinfer as pd
from tests.backends import ROOT
from tests.e2e.setups import prompt_of
from tests.gpu.serving import TIE, check, joined, requests, serve

sys.path.append(str(ROOT / "benchmarks" / "gpu"))

from drawn_model import drawn_model, v3_config

WIDE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 7,
    "n_routed_experts": 64,
    "q_lora_rank": 768,
}
SIZES = [
    pytest.param("cpu", {"num_hidden_layers": 3}, id="cpu"),
    pytest.param("cuda", WIDE, id="cuda", marks=pytest.mark.gpu),
]
PROMPTS = [prompt_of(length) for length in (1, 16, 33, 70)]
NUM_TOKENS = 12
MORE = 1.5
"""How much farther from the exact numbers than the reference provider in the same dtype. Distances are 0.02 to 0.5 on a
CPU, of log-probabilities of about -5; a page that is read at a wrong place makes them 1 and more."""


@pytest.mark.parametrize(("device", "sizes"), SIZES)
def test_tokens_in_float32(device: str, sizes: dict[str, Any]) -> None:
    config, place = v3_config(tiny=device == "cpu", **sizes), torch.device(device)
    exact, model = (
        drawn_model(config, place, dtype=torch.float32, fp8=False, providers=name) for name in ("reference", None)
    )
    asked = requests(PROMPTS)
    expected = serve(joined(exact), asked, times=1)
    check(asked, serve(joined(model, "loopback"), asked), expected, exact, TIE["exact"])


def distance(model: pd.Model, exact: pd.Model, kv_format: str) -> float:
    """Return by how much the log-probabilities that engines tell of their tokens differ from the exact ones, on
    average."""
    sampling = pd.SamplingParams(temperature=1.0, seed=3, max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    asked = [pd.Request(request_id=str(at), prompt=prompt, sampling=sampling) for at, prompt in enumerate(PROMPTS)]
    drawn: dict[str, list[tuple[int, float]]] = {request.request_id or "": [] for request in asked}
    with joined(model, "loopback", kv_format=kv_format) as pairing:
        for event in pairing.generate(asked):
            assert event.error is None
            assert event.token is not None
            assert event.logprob is not None
            drawn[event.request_id].append((event.token, event.logprob))
    differences = []
    for prompt, told in zip(PROMPTS, drawn.values(), strict=True):
        tokens = [token for token, _ in told]
        logits_TV = exact.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        logprobs_TV = logits_TV.double().log_softmax(-1).cpu()
        differences += [abs(float(logprobs_TV[at, token]) - logprob) for at, (token, logprob) in enumerate(told)]
    return sum(differences) / len(differences)


@pytest.mark.parametrize(("device", "sizes"), SIZES)
@pytest.mark.parametrize(("fp8", "kv_format"), [(False, "auto"), (True, "auto"), (True, "fp8")])
def test_log_probabilities_in_bfloat16(device: str, sizes: dict[str, Any], fp8: bool, kv_format: str) -> None:
    config, place = v3_config(tiny=device == "cpu", **sizes), torch.device(device)
    exact = drawn_model(config, place, dtype=torch.float32, fp8=fp8, providers="reference")
    ours, plain = (
        distance(drawn_model(config, place, fp8=fp8, providers=name), exact, kv_format) for name in (None, "reference")
    )
    assert ours < MORE * plain + 0.05


def test_the_wide_model_has_more_than_a_thousand_million_parameters() -> None:
    sizes = v3_config(**WIDE)
    num_moe = sizes.num_hidden_layers - 1
    experts = num_moe * sizes.n_routed_experts * 3 * sizes.hidden_size * sizes.moe_intermediate_size
    assert 1e9 < experts < 2e9
