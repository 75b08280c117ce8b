"""Tokens and logits are the same whatever the host has set, where it makes engines, where it steps them, or both."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pdinfer as pd
from pdinfer.process.modes import own_modes
from pdinfer.scheduling import rules
from pdinfer.testing import random_model, tiny_config
from pdinfer.testing.models import FAMILIES
from tests.backends import ROOT
from tests.e2e.setups import prompt_of
from tests.hosts import SETTINGS, around_ours, precision
from tests.slices import one_in

TINY = ROOT / "examples" / "tiny"
SIZES = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
MODELS: dict[str, tuple[str, torch.dtype, str | None]] = {
    "bfloat16": ("v3", torch.bfloat16, None),
    "bfloat16-by-torch": ("v3", torch.bfloat16, "torch"),
    "bfloat16-by-reference": ("v3", torch.bfloat16, "reference"),
    "sparse": ("v32", torch.bfloat16, None),
    "sparse-by-torch": ("v32", torch.float32, "torch"),
    "float32": ("v3", torch.float32, None),
    "from-a-file": ("", torch.bfloat16, None),
    "fp8": ("fp8", torch.bfloat16, None),
    "fp8-by-torch": ("fp8", torch.bfloat16, "torch"),
    "int8": ("w8a8_dynamic", torch.bfloat16, None),
    "int8-by-torch": ("w8a8_dynamic", torch.bfloat16, "torch"),
}
"""Models of random weights by their family; others are the trained one, as it is or quantized."""
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logprobs": 3},
)
CONFIG = pd.EngineConfig(chunked_prefill_size=8, max_running_requests=4, num_draft_tokens=1)


Plain = tuple[torch.Tensor, list[dict[str, list[Any]]]]
"""Logits in one piece, and what is served twice: the second time over known pages, which may round otherwise."""


@pytest.fixture(autouse=True)
def _endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine that stands still keeps waiting shares its steps with others, and rounds otherwise."""
    monkeypatch.setattr(rules, "PATIENCE_S", float("inf"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by how they are quantized."""
    found = {"": TINY}
    for scheme in {family for family, _, _ in MODELS.values()} - {"", *FAMILIES}:
        found[scheme] = tmp_path_factory.mktemp(scheme)
        pd.quantize_checkpoint(TINY, found[scheme], scheme=scheme)
    return found


def made(name: str, folders: Mapping[str, Path]) -> tuple[pd.Model, pd.Pairing]:
    family, dtype, providers = MODELS[name]
    if family in folders:
        model = pd.load_model(folders[family], dtype=dtype, providers=providers, mtp=True, weights="stored")
    else:
        sizes = SIZES | ({"index_head_dim": 32} if family == "v32" else {})
        model = random_model(tiny_config(family, **sizes), dtype=dtype, providers=providers, mtp=True)
    pairing = pd.Pairing.local(model, cache=pd.CacheConfig(page_size=4, num_pages=100), engine=CONFIG)
    return model, pairing


def served(pairing: pd.Pairing) -> dict[str, list[Any]]:
    """Return the tokens of some requests and the logits that they tell. Each call serves them anew."""
    requests = [
        pd.Request(
            request_id=f"{index}",
            prompt=prompt_of(5 + 9 * index, seed=index),
            sampling=pd.SamplingParams(max_new_tokens=9, seed=index, ignore_eos=True, **way),
        )
        for index, way in enumerate(WAYS)
    ]
    events: dict[str, list[Any]] = {}
    for event in pairing.generate(requests):
        assert event.error is None
        events.setdefault(str(event.request_id), []).append((event.token, event.top_logprobs))
    return events


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, Plain]]:
    """What each model gives where nothing is set, by the names of MODELS."""
    yield (given := {})
    given.clear()


@pytest.mark.parametrize(("setting", "name"), one_in(80, itertools.product(SETTINGS, MODELS)))
def test_what_the_host_has_set_changes_no_token(
    setting: str, name: str, plain: dict[str, Plain], folders: Mapping[str, Path]
) -> None:
    enter, prompt = SETTINGS[setting], prompt_of(30)
    if name not in plain:
        model, pairing = made(name, folders)
        with pairing:
            plain[name] = model.logits(prompt), [served(pairing) for _ in range(2)]
    for around_making, around_steps in (
        (enter, enter),
        (enter, contextlib.nullcontext),
        (contextlib.nullcontext, enter),
    ):
        with around_making():
            model, pairing = made(name, folders)
        with pairing:
            with around_steps():
                logits, first = model.logits(prompt), served(pairing)
            got = [first, served(pairing)]
        if setting == "other-threads" and MODELS[name][1] == torch.float32:  # torch adds up in another order then
            assert list(map(tokens_of, got)) == list(map(tokens_of, plain[name][1]))
            torch.testing.assert_close(logits, plain[name][0], rtol=1e-4, atol=1e-4)
        else:
            assert got == plain[name][1]
            assert torch.equal(logits, plain[name][0])


def tokens_of(events: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {name: [token for token, _ in stream] for name, stream in events.items()}


def test_other_tests_step_engines_under_a_setting_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, step = [], pd.PrefillEngine._step

    def watched(engine: pd.PrefillEngine) -> None:
        seen.append(torch.get_default_dtype())
        step(engine)

    monkeypatch.setattr(pd.PrefillEngine, "_step", watched)
    with made("float32", {})[1] as pairing, around_ours("default-dtype-bfloat16"):
        served(pairing)
    assert {*seen} == {torch.bfloat16}


def test_tensors_that_hold_nothing_are_refused_and_nothing_is_lost() -> None:
    model, pairing = made("bfloat16", {})
    with pairing:
        before = served(pairing)
        with FakeTensorMode():
            for call in (
                lambda: made("bfloat16", {}),
                lambda: served(pairing),
                pairing.step,
                lambda: model.logits([1]),
            ):
                with pytest.raises(pd.ConfigError, match=r"tensors are FakeTensors.*leave the mode before this call"):
                    call()
        assert served(pairing).keys() == before.keys()


def test_what_a_host_compiles_may_serve_requests() -> None:
    model, pairing = made("float32", {})
    prompt = prompt_of(9)

    def score(x: torch.Tensor) -> torch.Tensor:
        return x + model.logits(prompt)[0, 0]

    def serve(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        return x + 1, served(pairing)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, list[int | None]]:
        pairing.submit(pd.Request(prompt=prompt, sampling=pd.SamplingParams(max_new_tokens=4, temperature=0.0)))
        tokens = []
        while pairing.num_unfinished:
            tokens += [event.token for event in pairing.step()]
            pairing.wait(0.1)
        return x + 1, tokens

    one = torch.ones(1, device="cpu")
    with pairing:
        for host in (score, serve, step):
            host(one)  # over known pages from here on
            plain, compiled = host(one), torch.compile(host, backend="eager")(one)
            assert compiled == plain, host
        with pytest.raises(RuntimeError, match=r"pdinfer serves requests, .* compiled with fullgraph=True"):
            torch.compile(lambda x: x + model.logits(prompt)[0, 0], backend="eager", fullgraph=True)(one)


def test_a_failed_step_says_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pairing = made("float32", {})[1]
    with pairing:
        monkeypatch.setattr(pd.Model, "head", lambda *_: torch.zeros(1, dtype=torch.int8, device="cpu") @ 3)
        (last,) = pairing.generate([pd.Request(request_id="a", prompt=(1, 2))])
    assert "the prefill step failed: TypeError: unsupported operand type(s) for @" in str(last.error)


def backends() -> tuple[str, ...]:
    """What torch tells of each backend's products of float32."""
    return tuple(place.matmul.fp32_precision for place in (torch.backends.mkldnn, torch.backends.cuda))


def told() -> tuple[str, ...]:
    """What torch tells of its products of float32."""
    return (torch.get_float32_matmul_precision(), *backends())


@pytest.mark.parametrize("value", ["high", "medium", "allow_tf32"])
def test_products_find_settings_that_agree(value: str) -> None:
    """A product on a card raises where they do not."""
    with precision("highest"):
        if value == "allow_tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
        else:
            torch.set_float32_matmul_precision(value)
        before = told()
        with own_modes():
            assert told() == ("highest", "ieee", "ieee")
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert told() == before


def test_backends_that_a_host_has_set_apart_are_exact_within_a_step() -> None:
    """Not every CPU and version of torch rounds where it is told to, so that no token need tell."""
    with precision("each"):
        assert backends() == ("bf16", "tf32")
        with own_modes():
            assert backends() == ("ieee", "ieee")
        assert backends() == ("bf16", "tf32")


def test_the_host_finds_its_settings_as_they_were() -> None:
    pairing = made("float32", {})[1]
    place = torch.backends.mkldnn.matmul
    with pairing, precision("medium"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        before = place.fp32_precision, torch.get_float32_matmul_precision()
        served(pairing)
        assert (place.fp32_precision, torch.get_float32_matmul_precision()) == before
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")


def test_settings_are_given_back_when_the_last_step_has_ended() -> None:
    place = torch.backends.mkldnn.matmul
    with precision("medium"):
        before, first, second = place.fp32_precision, own_modes(), own_modes()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert place.fp32_precision == "ieee" != before
        second.__exit__(None, None, None)
        assert place.fp32_precision == before
