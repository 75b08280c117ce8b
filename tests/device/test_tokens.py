"""Engines whose model is on the simulated device give the tokens of engines on the CPU, with every feature and over
every transport. Tokens may differ only where two are as close as rounding: the CPU has ops of its own."""

from __future__ import annotations

import functools
import tempfile
from itertools import product
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.kernels import torch_ops
from pdinfer.kernels.ops import OP_NAMES
from pdinfer.model import load
from pdinfer.testing import FAMILIES, random_model, tiny_config, tiny_config_dict, write_checkpoint
from tests.backends import need_mooncake
from tests.e2e.drafts import Streams, check_equal
from tests.e2e.setups import by_request, collect, join, prompt_of
from tests.simulated.device import DEVICE

CPU = torch.device("cpu")


@attrs.frozen
class Case:
    """A model, and what its engines do with it. `scheme` is that of weights that stay quantized."""

    family: str = "v3"
    sizes: tuple[tuple[str, int], ...] = ()
    num_drafts: int = 0
    kv_format: str = "auto"
    scheme: str | None = None


PACKED = (("kv_lora_rank", 128),)
WIDE = (("hidden_size", 128), ("moe_intermediate_size", 128), *PACKED)
DRAFTED = (("num_nextn_predict_layers", 1),)

FEATURES = {
    "drafts": (Case(sizes=DRAFTED, num_drafts=2), "tcp"),
    "sparse": (Case("v32"), "shared"),
    "packed": (Case(sizes=PACKED, kv_format="fp8"), "loopback"),
    "fp8": (Case(sizes=WIDE, scheme="fp8"), "shared"),
    "int8": (Case(sizes=WIDE, scheme="w8a8_dynamic"), "shared"),
}
FULL = {
    **{f"{family} {end}": (Case(family), end) for family, end in product(FAMILIES, ("shared", "tcp"))},
    **{
        f"{family} drafts {end}": (Case(family, DRAFTED, num_drafts=2), end)
        for family, end in product(FAMILIES, ("shared", "tcp"))
    },
    **{f"{family} packed": (Case(family, PACKED, kv_format="fp8"), "loopback") for family in ("v32", "glm", "v2")},
    "packed drafts": (Case("v32", PACKED + DRAFTED, num_drafts=1, kv_format="fp8"), "shared"),
    "fp8 packed": (Case("v32", WIDE, kv_format="fp8", scheme="fp8"), "loopback"),
}

SAME = {op: "reference" if "int8" in op else "torch" for op in OP_NAMES if hasattr(torch_ops, op)}
"""For quantized weights. INT8 products are summed in integers on a CPU and in float64 elsewhere, which round otherwise
when they are scaled."""

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": ((5, 3.0), (6, -3.0)),
        "min_new_tokens": 4,
        "stop_token_ids": (7,),
    },
)
"""Greedy, drawn from a part of the tokens, and with all that changes logits."""

PAGE_SIZE, NUM_PAGES = 4, 256


def requests(again: bool) -> list[pd.Request]:
    return [
        pd.Request(
            request_id=f"{length} {way} {again}",
            prompt=prompt_of(length),
            sampling=pd.SamplingParams(**{"max_new_tokens": 6, "seed": length, "ignore_eos": True, **WAYS[way]}),
        )
        for length, way in ((3, 0), (14, 1), (14, 2), (37, 0))
    ]


@functools.cache
def model_of(case: Case, device: torch.device) -> pd.Model:
    """Return the model on a device. One of quantized weights has the same ops on every device: where others round the
    last bit otherwise, activations move to the next step of their format."""
    mtp = case.num_drafts > 0
    if case.scheme is None:
        return random_model(tiny_config(case.family, **dict(case.sizes)), device=device, mtp=mtp)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/floats", tiny_config_dict(case.family, **dict(case.sizes)), mtp=mtp)
        quantize_checkpoint(f"{folder}/floats", f"{folder}/quantized", scheme=case.scheme)
        return pd.load_model(f"{folder}/quantized", device=device, mtp=mtp, weights="stored", providers=SAME)


def served(case: Case, transport: str, device: torch.device) -> Streams:
    """Return the events of requests that run twice: the second time they find the beginnings of their prompts."""
    model = model_of(case, device)
    cache = pd.CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES, kv_format=case.kv_format)
    pools = [pd.PagePool(model, cache) for _ in range(2)]
    engine = pd.EngineConfig(chunked_prefill_size=16, num_draft_tokens=case.num_drafts)
    streams: Streams = {}
    with join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
        for again in (False, True):
            for request in requests(again):
                setup.pairing.submit(request)
            streams |= by_request(collect(setup.pairing))
        setup.check_idle()
    for name, stream in streams.items():
        usage = stream[-1].usage
        assert stream[-1].error is None
        assert usage is not None
        assert (usage.cached_tokens > 0) == (name.endswith("True") and not name.startswith("3 "))
    return streams


@functools.cache
def expected(case: Case) -> Streams:
    return served(case, "shared", CPU)


def check(case: Case, transport: str) -> None:
    asked = requests(False) + requests(True)
    check_equal(model_of(case, CPU), asked, served(case, transport, DEVICE), expected(case))


@pytest.fixture(autouse=True)
def loads_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_checked_device", torch.device)


@pytest.mark.parametrize("transport", ["shared", "loopback", "tcp", "unix", "shm"])
def test_tokens_over_every_transport_are_those_of_the_cpu(transport: str) -> None:
    check(Case(), transport)


def test_tokens_over_mooncake_are_those_of_the_cpu() -> None:
    need_mooncake()
    check(Case(), "mooncake")


@pytest.mark.parametrize("name", FEATURES)
def test_tokens_of_every_feature_are_those_of_the_cpu(name: str) -> None:
    check(*FEATURES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_tokens_of_every_family_are_those_of_the_cpu(name: str) -> None:
    check(*FULL[name])


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_quantized_weights_stay_quantized(name: str) -> None:
    """Otherwise the test above compares floats."""
    assert "69" in model_of(FEATURES[name][0], DEVICE).resolved.weights[0]
    assert "are held as they are stored" in model_of(FEATURES[name][0], DEVICE).resolved.weights[0]
