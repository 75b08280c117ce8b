"""Batching changes nothing: under load, with retractions and cancellations, tokens are those a request gets alone."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

import pdinfer as pd
from tests.e2e.setups import Setup, by_request, join, model_of, pool_of, tokens_of, watch
from tests.waiting import TIMEOUT_S

CHUNK = pd.EngineConfig(chunked_prefill_size=16)


def make_request(number: int, rng: random.Random) -> pd.Request:
    sampling = pd.SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        seed=number,
        max_new_tokens=rng.choice([1, 2, 5, 16, 40]),
    )
    length = rng.choice([1, 2, 5, 17, 40, 80])
    prompt = tuple(rng.randrange(97) for _ in range(length))
    return pd.Request(request_id=str(number), prompt=prompt, sampling=sampling, priority=rng.choice([0, 0, 1]))


@pytest.fixture(scope="module", params=[24, pytest.param(300, marks=pytest.mark.full)])
def requests(request: pytest.FixtureRequest) -> list[pd.Request]:
    rng = random.Random(7)
    return [make_request(number, rng) for number in range(request.param)]


@pytest.fixture(scope="module")
def alone(requests: list[pd.Request]) -> dict[str, list[int]]:
    """The tokens of each request when nothing else runs."""
    with pd.Pairing.local(model_of(), cache=pd.CacheConfig(page_size=4, num_pages=64)) as pairing:
        return {str(request.request_id): tokens_of(pairing.generate([request])) for request in requests}


def serve(setup: Setup, requests: list[pd.Request], rng: random.Random) -> list[pd.TokenEvent]:
    """Submits at random steps, cancels at random, and checks the pools after every step."""
    events: list[pd.TokenEvent] = []
    waiting = list(reversed(requests))
    end = time.monotonic() + TIMEOUT_S
    while waiting or setup.pairing.num_unfinished:
        assert time.monotonic() < end, f"{setup.pairing.num_unfinished} requests did not end"
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
            setup.pairing.submit(waiting.pop())
        if rng.random() < 0.1:
            setup.pairing.cancel(str(rng.randrange(len(requests))))
        events += setup.pairing.step()
        setup.check_pools()
    return events


def check_load(setup: Setup, requests: list[pd.Request], alone: dict[str, list[int]]) -> None:
    with setup:
        seen = [watch(decode) for decode in setup.decodes]
        streams = by_request(serve(setup, requests, random.Random(11)))
        setup.check_idle()
    assert set(streams) == set(alone)
    reasons = Counter(stream[-1].finish_reason for stream in streams.values())
    assert reasons[pd.FinishReason.CANCELLED] > 0
    assert set(reasons) <= {pd.FinishReason.LENGTH, pd.FinishReason.STOP, pd.FinishReason.CANCELLED}
    for name, stream in streams.items():
        tokens = tokens_of(stream)
        assert stream[0].index == 0
        if stream[-1].finish_reason is pd.FinishReason.CANCELLED:
            assert tokens == alone[name][: len(tokens)], name
        else:
            assert tokens == alone[name], name
    granted = Counter(event.grant.request_id for events in seen for event in events if isinstance(event, pd.Granted))
    retractions = sum(count - 1 for count in granted.values())
    assert retractions > 0, "the pools were not too small"
    assert max(granted.values()) <= pd.EngineConfig().max_attempts


@pytest.mark.full
def test_one_prefill_and_one_decode_over_a_shared_pool(requests: list[pd.Request], alone: dict[str, list[int]]) -> None:
    pool = pool_of(model_of(), num_pages=48)
    check_load(join(model_of(), "shared", decode_pools=[pool], engine=CHUNK), requests, alone)


def test_two_prefills_and_two_decodes_over_loopback(requests: list[pd.Request], alone: dict[str, list[int]]) -> None:
    pools = [pool_of(model_of(), num_pages=count) for count in (48, 40, 48, 40)]
    setup = join(model_of(), "loopback", prefill_pools=pools[:2], decode_pools=pools[2:], engine=CHUNK)
    check_load(setup, requests, alone)


@pytest.mark.full
def test_one_prefill_and_one_decode_over_sockets(requests: list[pd.Request], alone: dict[str, list[int]]) -> None:
    pools = [pool_of(model_of(), num_pages=48) for _ in range(2)]
    setup = join(model_of(), "tcp", prefill_pools=pools[:1], decode_pools=pools[1:], engine=CHUNK)
    check_load(setup, requests, alone)


def test_greedy_tokens_alone_are_the_best_of_the_model_in_one_piece(
    requests: list[pd.Request], alone: dict[str, list[int]]
) -> None:
    """So that the other tests do not compare an engine only with itself."""
    for request in requests:
        tokens = alone[str(request.request_id)]
        if request.sampling.temperature == 0:
            logits = model_of().logits([*request.prompt, *tokens])
            assert logits[len(request.prompt) - 1 : -1].argmax(-1).tolist() == tokens
