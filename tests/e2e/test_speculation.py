"""Decoding with drafts gives the tokens that decoding without gives, whatever else happens meanwhile, in fewer steps.

The model is the trained one, so drafts are often right. Tokens of two runs may differ only where two of them are as
close as rounding: batches of other shapes round differently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

import pdinfer as pd
from pdinfer.execution import drafting as speculation
from pdinfer.execution.runner import ModelRunner
from pdinfer.kv.view import PageMemory
from pdinfer.model.batch import Row
from pdinfer.testing import random_model, tiny_config
from tests.e2e.drafts import ACCEPTANCE_FLOOR, Streams, check_equal, drafted
from tests.e2e.setups import Setup, by_request, collect, join, prompt_of

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(CHECKPOINT.parent))

from tiny_tasks import calc_prompt, copy_prompt, recall_prompt, text_prompt  # noqa: E402

COUNT = 16


@pytest.fixture(scope="module")
def model() -> pd.Model:
    return pd.load_model(CHECKPOINT, dtype=torch.float32, mtp=True)


def requests(count: int = 8, *, seed: int = 5, only: int | None = None) -> list[pd.Request]:
    """Prompts of every kind in turn, and every way of sampling in turn."""
    rng = np.random.default_rng(seed)
    kinds = (copy_prompt, lambda rng: recall_prompt(rng, 60), calc_prompt, text_prompt)
    samplings = (
        {"temperature": 0.0, "logprobs": 2},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logprobs": 3},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_new_tokens": 4, "logit_bias": ((59, -1.0), (32, 2.0))},
        {"temperature": 0.0, "stop_token_ids": (59,), "ignore_eos": False},
        {"temperature": 1.0, "min_p": 0.02},
    )
    made = []
    for number in range(count):
        prompt, _ = kinds[number % 4](rng)
        chosen = samplings[number % 5 if only is None else only]
        sampling = pd.SamplingParams(**{"max_new_tokens": COUNT, "ignore_eos": True, "seed": number, **chosen})
        made.append(pd.Request(request_id=str(number), prompt=tuple(prompt), sampling=sampling))
    return made


@attrs.frozen
class Split:
    """How the two engines are joined and what they are given."""

    transport: str = "shared"
    page_size: int = 16
    num_pages: int = 400
    chunk: int = 50
    max_attempts: int = 3


def serve(model: pd.Model, split: Split, num_draft_tokens: int) -> Setup:
    cache = pd.CacheConfig(page_size=split.page_size, num_pages=split.num_pages, trust_domain="all")
    pools = [pd.PagePool(model, cache) for _ in range(1 if split.transport == "shared" else 2)]
    engine = pd.EngineConfig(
        chunked_prefill_size=split.chunk, num_draft_tokens=num_draft_tokens, max_attempts=split.max_attempts
    )
    return join(model, split.transport, prefill_pools=pools[:1], decode_pools=pools[-1:], engine=engine)


def ask(setup: Setup, asked: Sequence[pd.Request]) -> Streams:
    for request in asked:
        setup.pairing.submit(request)
    return by_request(collect(setup.pairing))


@pytest.fixture(scope="module")
def plain(model: pd.Model) -> Streams:
    """What comes without drafts."""
    with serve(model, Split(), 0) as setup:
        streams = ask(setup, requests())
        assert drafted(streams) == (0, 0)
        return streams


@pytest.mark.parametrize(
    ("num_draft_tokens", "split"),
    [
        (1, Split()),
        pytest.param(2, Split("loopback", page_size=4), marks=pytest.mark.full),
        (3, Split("unix", page_size=1, num_pages=4000, chunk=20)),
        pytest.param(3, Split("shared", page_size=64), marks=pytest.mark.full),
    ],
    ids=["1", "2-two-pools", "3-socket", "3-large-pages"],
)
def test_drafts_change_no_token(model: pd.Model, plain: Streams, num_draft_tokens: int, split: Split) -> None:
    asked = requests()
    with serve(model, split, num_draft_tokens) as setup:
        streams = ask(setup, asked)
        check_equal(model, asked, streams, plain)
        num_drafted, num_accepted = drafted(streams)
        load = setup.decodes[0].load()
        assert (load.num_draft_tokens, load.num_accepted_tokens) == (num_drafted, num_accepted)
        assert 0 < num_accepted <= num_drafted
        assert load.num_tokens < sum(map(len, streams.values()))  # those of the hand-offs are prefill's
        assert 1 <= load.accept_length <= 1 + num_draft_tokens
        again = ask(setup, asked)  # over pages that the first turn left
        check_equal(model, asked, again, plain)
        assert drafted(again)[1] >= 0.8 * num_accepted
        assert max(stream[-1].usage.cached_tokens for stream in again.values() if stream[-1].usage) >= split.page_size
        setup.check_idle()


def test_requests_that_lose_their_pages_keep_their_tokens(model: pd.Model, plain: Streams) -> None:
    asked = requests()
    longest = max(len(request.prompt) for request in asked) + COUNT
    with serve(model, Split(page_size=4, num_pages=longest // 2), 3) as setup:
        streams = ask(setup, asked)
        assert setup.pairing.stats.num_retries > 0
        check_equal(model, asked, streams, plain)
        assert drafted(streams)[1] > 0
        setup.check_idle()


def test_drafts_never_take_a_page_from_anybody(model: pd.Model, plain: Streams) -> None:
    """Each request may be tried once, so it has all its pages before it runs, and no other is free."""
    asked = requests(3)
    pages = sum(-(-(len(request.prompt) + COUNT) // 4) for request in asked)
    with serve(model, Split(page_size=4, num_pages=pages + 1, max_attempts=1), 3) as setup:
        streams = ask(setup, asked)
        assert setup.pairing.stats.num_retries == 0
        check_equal(model, asked, streams, {name: plain[name] for name in streams})
        setup.check_idle()


@pytest.mark.parametrize("sent", ["nothing", "of another version"])
def test_a_handoff_without_its_state_is_decoded_without_drafts(
    model: pd.Model, plain: Streams, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    if sent == "nothing":
        monkeypatch.setattr(ModelRunner, "states", lambda self, rows: [() for _ in rows])
    else:
        monkeypatch.setattr(speculation, "STATE_VERSION", 2)
        pack = speculation.pack_state
        monkeypatch.setattr("pdinfer.execution.runner.pack_state", lambda state: attrs.evolve(pack(state), version=1))
    asked = requests(4)
    with serve(model, Split("loopback", page_size=4), 2) as setup:
        for _ in range(2):
            streams = ask(setup, asked)
            check_equal(model, asked, streams, plain)
            assert drafted(streams) == (0, 0)
        setup.check_idle()


@pytest.mark.parametrize("family", ["v32", "glm"])
def test_drafts_over_an_indexer(family: str) -> None:
    """The MTP layer has its own index keys there. Weights are random: nearly every draft is rejected."""
    model = random_model(tiny_config(family, num_nextn_predict_layers=1), mtp=True)
    asked = [
        attrs.evolve(request, prompt=prompt_of(70 + number, seed=number), request_id=str(number))
        for number, request in enumerate(requests(4, only=4))
    ]
    with serve(model, Split(), 0) as setup:
        without = ask(setup, asked)
    with serve(model, Split("loopback", page_size=8), 2) as setup:
        streams = ask(setup, asked)
        check_equal(model, asked, streams, without)
        assert drafted(streams)[0] > 0
        setup.check_idle()


@pytest.mark.parametrize("transport", ["shared", "loopback"])
def test_known_pages_hold_what_their_tokens_give(transport: str) -> None:
    """In every layer, the drafting one too, whose entry of a page's last token depends on the token behind the page."""
    model = random_model(tiny_config("v3", num_hidden_layers=2, num_nextn_predict_layers=1), mtp=True)
    beginning = prompt_of(8)
    asked = [
        pd.Request(
            request_id=str(number),
            prompt=(*beginning, *more),
            sampling=pd.SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True),
        )
        for number, more in enumerate([(3,), (4, 5, 6), (), (3, 9), (4, 5, 6, 7)])
    ]
    with serve(model, Split(transport, page_size=4, chunk=5), 2) as setup:
        for request, cached in zip(asked, (0, 4, 4, 8, 8), strict=True):
            (stream,) = ask(setup, [request]).values()
            tokens = [*request.prompt, *(event.token for event in stream if event.token is not None)]
            for pool in {engine.channel.pool for engine in setup.engines}:
                chain = pool.key_scheme.chain(b"")
                chain.extend(tokens)
                pages = pool.find(chain.keys)
                assert pages
                whole = PageMemory(pool.layout, pool.layout.num_pages(len(tokens)), device=model.device)
                for _ in ModelRunner(model, whole).prefill([Row(tokens, 0, range(whole.num_pages))]):
                    pass
                for component in pool.layout.components:
                    for layer in component.layers:
                        known, true = (memory.pages(component.name, layer) for memory in (pool.memory, whole))
                        torch.testing.assert_close(known[[*pages]], true[: len(pages)], atol=1e-5, rtol=1e-5)
            assert stream[-1].usage is not None
            assert stream[-1].usage.cached_tokens == cached


# -- how good drafts are ----------------------------------------------------------------------------------------------


def answers(count: int) -> Iterator[pd.Request]:
    """Recall and copy prompts, greedy, as many tokens as the answer has."""
    rng = np.random.default_rng(11)
    for number in range(count):
        prompt, answer = copy_prompt(rng) if number % 2 else recall_prompt(rng, 200)
        sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=len(answer), ignore_eos=True)
        yield pd.Request(request_id=str(number), prompt=tuple(prompt), sampling=sampling)


def acceptance(model: pd.Model, split: Split, asked: Sequence[pd.Request]) -> float:
    with serve(model, split, 1) as setup:
        num_drafted, num_accepted = drafted(ask(setup, asked))
    return num_accepted / num_drafted


@pytest.mark.parametrize("transport", ["shared", "loopback"])
def test_first_drafts_of_answers_are_accepted(
    model: pd.Model, transport: str, record_property: pytest.RecordProperty
) -> None:
    share = acceptance(model, Split(transport), list(answers(12)))
    record_property("information", f"first drafts accepted on recall and copy, {transport}: {share:.3f}")
    assert share >= ACCEPTANCE_FLOOR


def test_a_lost_draft_cache_shows(model: pd.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure is one: without what prefill wrote for the MTP layer few drafts are right."""
    assert model.mtp is not None
    layer = model.mtp.layer
    adopt = pd.PagePool.adopt

    def adopt_without(self: pd.PagePool, pages: Sequence[int]) -> None:
        self.memory.pages("mtp.latent", layer).zero_()  # type: ignore[attr-defined]
        adopt(self, pages)

    monkeypatch.setattr(pd.PagePool, "adopt", adopt_without)
    assert acceptance(model, Split("loopback"), list(answers(12))) < 0.5
