"""On a CUDA device, tokens in bfloat16, with drafts, with a packed cache and with quantized weights.

The CPU answers the same requests with the reference provider, in float32 from the same numbers. Where a token differs,
the two best must be close there: by TIE, which is what the roundings of a format may move. The comparison of that
stream then ends, and few streams may end so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pdinfer as pd
from pdinfer.kernels import DeviceSpec
from pdinfer.testing import random_model, tiny_config
from tests.e2e.setups import prompt_of
from tests.gpu.serving import TIE, TRANSPORTS, check, joined, requests, serve

pytestmark = pytest.mark.gpu

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(CHECKPOINT.parent))

from tiny_tasks import calc_prompt, copy_prompt, recall_prompt, text_prompt  # noqa: E402

DEVICE = "cuda"
HOPPER = 9


@functools.cache
def trained_requests() -> list[pd.Request]:
    rng = np.random.default_rng(3)
    kinds = (copy_prompt, lambda rng: recall_prompt(rng, 60), calc_prompt, text_prompt)
    return requests([tuple(kinds[number % 4](rng)[0]) for number in range(8)])


@functools.cache
def exact_model(folder: Path, weights: str = "auto") -> pd.Model:
    return pd.load_model(folder, dtype="float32", weights=weights, providers="reference")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_draft_tokens", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trained_model(dtype: str, num_draft_tokens: int, transport: str) -> None:
    exact, asked = exact_model(CHECKPOINT), trained_requests()
    expected = serve(joined(exact), asked, times=1)
    model = pd.load_model(CHECKPOINT, device=DEVICE, dtype=dtype, mtp=num_draft_tokens > 0)
    pairing = joined(model, transport, num_draft_tokens=num_draft_tokens)
    check(asked, serve(pairing, asked), expected, exact, TIE["exact" if dtype == "float32" else dtype])


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_captured_steps(num_draft_tokens: int) -> None:
    exact, asked = exact_model(CHECKPOINT), trained_requests()
    expected = serve(joined(exact), asked, times=1)
    model = pd.load_model(CHECKPOINT, device=DEVICE, dtype="float32", mtp=num_draft_tokens > 0)
    pairing = joined(model, "loopback", num_draft_tokens=num_draft_tokens)
    (decode,) = (port for port in pairing.ports if isinstance(port, pd.DecodeEngine))
    decode.warm_up()
    check(asked, serve(pairing, asked), expected, exact, TIE["exact"])
    assert int(str(decode.graphs).partition("steps that ran captured: ")[2].split()[0]) > 10


def test_drafts_are_accepted() -> None:
    """Drafts that were always wrong would change no token."""
    model = pd.load_model(CHECKPOINT, device=DEVICE, mtp=True)
    with joined(model, num_draft_tokens=2) as pairing:
        usages = [event.usage for event in pairing.generate(trained_requests()) if event.usage]
    assert sum(usage.num_accepted_tokens for usage in usages) > sum(usage.num_draft_tokens for usage in usages) / 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("family", ["v3", "v32", "glm"])
def test_a_packed_cache(family: str, transport: str) -> None:
    config = tiny_config(family, kv_lora_rank=128)
    exact = random_model(config, providers="reference")
    asked = requests([prompt_of(length) for length in (1, 16, 33, 70)])
    expected = serve(joined(exact, kv_format="fp8"), asked, times=1)
    model = random_model(config, device=DEVICE)
    check(asked, serve(joined(model, transport, kv_format="fp8"), asked), expected, exact, TIE["packed"])


@pytest.fixture(scope="module", params=["fp8", "w8a8_dynamic", "int4", "mxfp4"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    pd.quantize_checkpoint(CHECKPOINT, folder, scheme=request.param)
    yield folder
    exact_model.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights(quantized: Path, dtype: str) -> None:
    exact, asked = exact_model(quantized, "stored"), trained_requests()
    expected = serve(joined(exact), asked, times=1)
    model = pd.load_model(quantized, device=DEVICE, dtype=dtype, weights="stored")
    tie = TIE["quantized" if dtype == "float32" else dtype]
    check(asked, serve(joined(model, "loopback"), asked), expected, exact, tie)


def test_quantized_weights_stay_so_on_hopper(quantized: Path) -> None:
    card = DeviceSpec.of(DEVICE)
    if card.capability is None or card.capability[0] != HOPPER:
        pytest.skip(f"{card} is no Hopper card: weights become floats there")
    told = pd.explain_backends(pd.load_model(quantized, device=DEVICE))
    assert "weights are held as they are stored" in told


def distance(model: pd.Model, exact: pd.Model) -> float:
    """Return by how much logits differ, on average over all tokens of some prompts."""
    pairs = [(model.logits(request.prompt).cpu(), exact.logits(request.prompt)) for request in trained_requests()[::2]]
    return max(float((ours - wanted).abs().mean()) for ours, wanted in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_as_close_to_the_exact_ones_as_on_the_cpu(quantized: Path, dtype: str) -> None:
    """Tokens of a trained model stand errors of several percent."""
    for folder, weights in ((CHECKPOINT, "float"), (quantized, "stored")):
        exact = exact_model(folder, weights)
        here = pd.load_model(folder, dtype=dtype, weights=weights, providers="torch")
        there = pd.load_model(folder, device=DEVICE, dtype=dtype, weights=weights)
        assert distance(there, exact) < 2 * distance(here, exact) + 0.02
