"""The same tokens on a CUDA device as on the CPU, through every transport, with the torch provider."""

from __future__ import annotations

from typing import Any

import pytest

import pdinfer as pd
from pdinfer.testing import FAMILIES, random_model, tiny_config
from tests.gpu.serving import TRANSPORTS, joined, serve

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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_cpu(family: str, transport: str) -> None:
    """Float32 products are exact on both: torch uses no TF32 unless it is told to."""
    expected = serve(joined(random_model(tiny_config(family))), requests())
    model = random_model(tiny_config(family), device="cuda")
    assert serve(joined(model, transport), requests()) == expected
