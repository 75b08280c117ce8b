"""What is not finite in a page fails the requests that read it, by name, and nobody else; then nobody finds it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch

import pdinfer as pd
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.testing import random_model, tiny_config
from tests.e2e.setups import Setup, by_request, collect, greedy, join, pool_of, prompt_of, tokens_of
from tests.slices import one_in

COUNT = 8
PROMPT = prompt_of(11, seed=3)
BAD = [math.nan, math.inf, -math.inf]
every_bad = pytest.mark.parametrize("bad", BAD, ids=["nan", "inf", "-inf"])


@functools.cache
def model_of(dtype: torch.dtype) -> pd.Model:
    """In bfloat16 native kernels run it where a CPU has them: its sizes fit them."""
    return random_model(
        tiny_config(num_hidden_layers=2, kv_lora_rank=32, qk_rope_head_dim=32, v_head_dim=64), dtype=dtype
    )


def split(transport: str, dtype: torch.dtype = torch.float32) -> Setup:
    model = model_of(dtype)
    pools = [pool_of(model, page_size=4, trust_domain="all") for _ in range(2)]
    return join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:])


def request(name: str, prompt: tuple[int, ...] = PROMPT, *, max_new_tokens: int = COUNT) -> pd.Request:
    return pd.Request(request_id=name, prompt=prompt, sampling=greedy(max_new_tokens, ignore_eos=True))


def spoil(pool: pd.PagePool, page: int, layer: int, bad: float, *, offset: int = 0, column: int = -1) -> None:
    """Puts a bad value into a token's latent, by default into the last element of its key."""
    assert isinstance(pool.memory, PageMemory)
    KVView.of(pool.memory).latents[layer][page, offset, column] = bad


def run(
    setup: Setup, *asked: pd.Request, while_they_run: Callable[[dict[str, list[int]]], None] | None = None
) -> dict[str, list[pd.TokenEvent]]:
    """Their events. `while_they_run` is called with the pages of each as soon as all of them decode."""
    for one in asked:
        setup.pairing.submit(one)
    events = []
    if while_they_run is not None:
        decode = setup.decodes[0]
        while decode.load().num_running_requests < len(asked):
            assert setup.pairing.num_unfinished == len(asked), "one has ended before the last one runs"
            events += setup.pairing.step()
        while_they_run({sequence.request_id: sequence.pages for sequence in decode.snapshot().running})
    events += collect(setup.pairing)
    setup.check_idle()
    return by_request(events)


def failed(stream: list[pd.TokenEvent]) -> bool:
    """By name; the others ran to their length."""
    last = stream[-1]
    if last.finish_reason is pd.FinishReason.LENGTH:
        return False
    assert (last.finish_reason, type(last.error)) == (pd.FinishReason.FAILED, pd.PDInferError)
    assert "the model's logits are not finite" in str(last.error)
    assert all(event.logprob is None or math.isfinite(event.logprob) for event in stream)
    return True


@pytest.mark.parametrize(
    ("bad", "dtype", "column"), one_in(5, itertools.product(BAD, [torch.float32, torch.bfloat16], [0, 31, 32, 63]))
)
def test_a_bad_latent_fails_its_request_and_no_other_of_the_batch(dtype: torch.dtype, column: int, bad: float) -> None:
    prompts = [prompt_of(5 + 3 * n, seed=n) for n in range(3)]
    asked = [request(str(n), prompt) for n, prompt in enumerate(prompts)]
    with split("loopback", dtype) as setup:
        pool = setup.decodes[0].channel.pool
        streams = run(
            setup, *asked, while_they_run=lambda pages: spoil(pool, pages["1"][0], 1, bad, offset=1, column=column)
        )
        assert [failed(streams[name]) for name in "012"] == [False, True, False]
        # its pages are known to nobody, and free
        again = run(setup, asked[1])["1"]
    with split("loopback", dtype) as setup:  # the same steps, which round alike, with nothing to fail
        as_long = request("1", prompts[1], max_new_tokens=len(tokens_of(streams["1"])) + 1)
        expected = run(setup, asked[0], as_long, asked[2])
        pool = setup.decodes[0].channel.pool
        pool.forget(pool.find(keys_of(pool, prompts[1])))
        assert tokens_of(again) == tokens_of(run(setup, asked[1])["1"])
    assert [tokens_of(streams[name]) for name in "02"] == [tokens_of(expected[name]) for name in "02"]


@pytest.mark.parametrize(
    ("bad", "transport", "side"), one_in(5, itertools.product(BAD, ["shared", "loopback"], ["prefill", "decode"]))
)
def test_a_bad_page_that_was_cached_fails_one_request_and_is_forgotten(transport: str, side: str, bad: float) -> None:
    """Whoever shares it fails; who comes after them computes it anew."""
    with split(transport) as setup:
        expected = tokens_of(run(setup, request("first"))["first"])
        engine = setup.prefills[0] if side == "prefill" else setup.decodes[0]
        pool = engine.channel.pool
        spoil(pool, pool.find(keys_of(pool))[0], 0, bad)
        assert failed(run(setup, request("second"))["second"])
        assert pool.find(keys_of(pool)) == ()
        again = run(setup, request("third"))["third"]
        assert not failed(again)
        assert tokens_of(again) == expected


def keys_of(pool: pd.PagePool, prompt: tuple[int, ...] = PROMPT) -> list[bytes]:
    """Of the full pages of a prompt."""
    chain = pool.key_scheme.chain(b"")
    chain.extend(prompt)
    return chain.keys


def mtp_setup() -> Setup:
    model = random_model(tiny_config(num_nextn_predict_layers=1), mtp=True)
    pools = [pool_of(model, page_size=4) for _ in range(2)]
    return join(
        model,
        "loopback",
        prefill_pools=pools[:1],
        decode_pools=pools[1:],
        engine=pd.EngineConfig(num_draft_tokens=2),
    )


@every_bad
@pytest.mark.parametrize("layer", ["of the model", "that drafts"])
def test_bad_pages_of_the_layer_that_drafts_change_no_token(layer: str, bad: float) -> None:
    """They cost drafts; those of the model fail the request with drafts as without."""
    with mtp_setup() as setup:
        whole = run(setup, request("a"))["a"]
    with mtp_setup() as setup:
        pool, drafter = setup.decodes[0].channel.pool, setup.decodes[0].model.mtp
        assert drafter is not None
        at = drafter.layer if layer == "that drafts" else 0
        stream = run(setup, request("a"), while_they_run=lambda pages: spoil(pool, pages["a"][0], at, bad))["a"]
        assert failed(stream) == (layer == "of the model")
        if layer == "that drafts":
            assert tokens_of(stream) == tokens_of(whole)


def test_a_logit_of_infinity_ends_a_request_that_may_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In prefill and in decode: `min_new_tokens` forbids the token, and another one would be drawn in its place."""
    head, model = pd.Model.head, model_of(torch.float32)
    eos = model.config.eos_token_ids[0]
    for at_call in (1, 3):
        calls = []

        def damaged(
            model: pd.Model, state_TD: torch.Tensor, calls: list[int] = calls, at_call: int = at_call
        ) -> torch.Tensor:
            logits_BV = head(model, state_TD)
            calls.append(len(state_TD))
            if len(calls) == at_call:
                logits_BV[0, eos] = torch.inf
            return logits_BV

        with split("loopback") as setup, monkeypatch.context() as patch:
            patch.setattr(pd.Model, "head", damaged)
            sampling = greedy(COUNT, min_new_tokens=COUNT)
            assert failed(run(setup, pd.Request(request_id="a", prompt=PROMPT, sampling=sampling))["a"])
