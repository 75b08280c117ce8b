"""Whatever a request asks of its tokens, the split gives what plain loops draw from the model in one piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.execution.sampling import LogitsProcessor
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.scheduling.admission import MAX_STOP_TOKENS
from pdinfer.testing import random_model, tiny_config
from tests.e2e.setups import (
    PROMPT,
    Tally,
    by_request,
    greedy,
    model_of,
    plain_reference,
    pool_of,
    prompt_of,
    request,
    tokens_of,
    watch,
)
from tests.e2e.worker import left_of_five, one_in_five

EOS = 1
ASKED: dict[str, dict[str, Any]] = {
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": ((EOS, 4.0), (7, 2.5), (9, -100.0)),
        "min_new_tokens": 9,
        "stop_token_ids": (7,),
        "logprobs": 5,
    },
    "repetition": {"repetition_penalty": 1.7, "ignore_eos": True},
    "less-repetition": {"repetition_penalty": 0.6, "frequency_penalty": 0.9, "logprobs": 1},
    "bias": {"logit_bias": ((EOS, 9.0),), "min_new_tokens": 6, "logprobs": 0},
    "processor": {"logits_processor": "one_in_five", "logits_processor_argument": "2", "presence_penalty": 1.0},
    "plain": {"logprobs": 20},
}
PROCESSORS = {"one_in_five": one_in_five}


def requests_of(max_new_tokens: int) -> dict[str, pd.Request]:
    """Each of ASKED, greedy and drawn, behind prompts of several lengths."""
    made = {}
    for number, (name, asked) in enumerate(ASKED.items()):
        for temperature in (0.0, 1.0):
            sampling = pd.SamplingParams(temperature=temperature, seed=number, max_new_tokens=max_new_tokens, **asked)
            key, prompt = f"{name}/{temperature:g}", prompt_of(5 + 7 * number, seed=number)
            made[key] = pd.Request(request_id=key, prompt=prompt, sampling=sampling)
    return made


def engines(
    *pools: pd.PagePool, chunk_size: int = -1, sockets: bool = False, **more: Any
) -> tuple[pd.PrefillEngine, pd.DecodeEngine]:
    """One of each, over a pool each or one for both."""
    both = (*pools, *pools)[:2]
    ends = [KVChannel(p, pd.kv.SocketTransport()) for p in both] if sockets else KVChannel.loopback(*both)
    config, more = pd.EngineConfig(chunked_prefill_size=chunk_size), {"logits_processors": PROCESSORS, **more}
    return pd.PrefillEngine(model_of(), ends[0], config, **more), pd.DecodeEngine(model_of(), ends[1], config, **more)


def check(requests: dict[str, pd.Request], events: list[pd.TokenEvent]) -> None:
    """Tokens, log-probabilities and ends of every stream."""
    tally, streams = Tally(), by_request(events)
    assert set(streams) == set(requests)
    for name, asked in requests.items():
        stream, sampling = streams[name], asked.sampling
        tokens = tokens_of(stream)
        allowed = partial(left_of_five, 2) if sampling.logits_processor else None
        expected = plain_reference(model_of(), asked, tokens, allowed)
        tally.compare(name, stream, expected)
        for event, tops in zip(stream, expected.top_logprobs, strict=True):
            assert len(event.top_logprobs) == (sampling.logprobs or 0)
            assert [value for _, value in event.top_logprobs] == pytest.approx([value for _, value in tops], abs=1e-4)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        stopped = tokens[-1] in ends
        assert stream[-1].finish_reason is (pd.FinishReason.STOP if stopped else pd.FinishReason.LENGTH)
        assert ends.isdisjoint(tokens[:-1])
        assert sampling.min_new_tokens <= len(tokens)
        assert stopped or len(tokens) == sampling.max_new_tokens


@pytest.mark.parametrize(
    ("setup", "chunk_size"),
    [("shared", 4), pytest.param("loopback", 7, marks=pytest.mark.full), ("loopback", -1), ("sockets", 16)],
)
def test_tokens_are_what_plain_loops_draw_from_the_model_in_one_piece(setup: str, chunk_size: int) -> None:
    requests = requests_of(16)
    pools = [pool_of(model_of(), page_size=size) for size in ((4,) if setup == "shared" else (4, 8))]
    with pd.Pairing(*engines(*pools, chunk_size=chunk_size, sockets=setup == "sockets")) as pairing:
        events = list(pairing.generate(requests.values()))
    check(requests, events)
    stopped = {event.request_id for event in events if event.finish_reason is pd.FinishReason.STOP}
    assert {"all/1", "bias/0", "bias/1"} <= stopped, "nothing had to be held back by min_new_tokens"


def test_prefilling_again_changes_nothing() -> None:
    """In a pool that is too small requests lose their pages and come back with the tokens they have."""
    requests = requests_of(24)
    prefill, decode = engines(pool_of(model_of(), num_pages=20), chunk_size=16)
    seen = watch(decode)
    with pd.Pairing(prefill, decode) as pairing:
        check(requests, list(pairing.generate(requests.values())))
    granted = Counter(event.grant.request_id for event in seen if isinstance(event, pd.Granted))
    again = {name.split("/")[0] for name, count in granted.items() if count > 1}
    assert len(again) >= 3, f"only {again} were prefilled again"


def test_a_resumed_request_counts_the_output_it_brings() -> None:
    """Which is how a request goes on when its decode was lost: the tokens are those it would have had."""
    sampling = pd.SamplingParams(seed=3, max_new_tokens=16, **ASKED["all"])
    whole = request("whole", sampling=sampling)
    with pd.Pairing.local(model_of(), cache=pd.CacheConfig(page_size=4, num_pages=64)) as pairing:
        tokens = tokens_of(pairing.generate([whole]))
        resumed = request("resumed", sampling=sampling, output=tuple(tokens[:8]))
        rest = list(pairing.generate([resumed]))
    Tally().compare("resumed", rest, plain_reference(model_of(), resumed, tokens_of(rest)))
    assert rest[0].index == 8
    assert len(tokens) > 9, "it must not end before there is anything to resume"


@pytest.mark.parametrize("stops", [(), tuple(range(100, 100 + MAX_STOP_TOKENS))], ids=len)
def test_what_must_not_end_an_answer_yet_is_said_by_decode(stops: tuple[int, ...]) -> None:
    """Prefill draws the first token, and its folder may name another eos. As many stop tokens as a request may have
    leave no room to say it, and are served all the same."""
    own, other = (random_model(tiny_config(num_hidden_layers=2, vocab_size=1200, eos_token_id=eos)) for eos in (EOS, 5))
    channels = KVChannel.loopback(pool_of(other, num_pages=16), pool_of(own, num_pages=16))
    sampling = greedy(4, min_new_tokens=3, logit_bias=((EOS, 100.0), (5, 90.0)), stop_token_ids=stops)
    with pd.Pairing(pd.PrefillEngine(other, channels[0]), pd.DecodeEngine(own, channels[1])) as pairing:
        stream = list(pairing.generate(request(sampling=sampling)))
    assert stream[-1].finish_reason is pd.FinishReason.STOP
    assert stops or tokens_of(stream) == [5, 5, 5, EOS]


# Processors that fail


def failing_after(argument: str) -> LogitsProcessor:
    """Raises, or allows nothing, behind that many tokens."""
    kind, count = argument.split("/")

    def processor(prompt: tuple[int, ...], output: tuple[int, ...], logits_V: torch.Tensor) -> torch.Tensor:
        if len(output) < int(count):
            return logits_V
        if kind == "raise":
            raise KeyError(prompt)
        return logits_V.fill_(-torch.inf)

    return processor


@pytest.fixture
def pairing() -> Iterator[pd.Pairing]:
    factories = {"failing": failing_after, "none": lambda argument: None}
    cache = pd.CacheConfig(page_size=4, num_pages=64)
    with pd.Pairing.local(model_of(), cache=cache, logits_processors=factories) as made:  # type: ignore[arg-type]
        yield made


@pytest.mark.parametrize(("kind", "message"), [("raise", "'failing' failed: KeyError"), ("mask", "no token is left")])
@pytest.mark.parametrize("count", [0, 3])
def test_a_processor_that_fails_ends_its_request_alone(
    pairing: pd.Pairing, kind: str, message: str, count: int
) -> None:
    """At the first token, which prefill draws, and later, and what was computed stays known."""
    asked = greedy(6, ignore_eos=True, logits_processor="failing", logits_processor_argument=f"{kind}/{count}")
    bad, good = request("bad", sampling=asked), request("good", count=6)
    streams = by_request(pairing.generate([bad, good]))
    assert len(tokens_of(streams["bad"])) == count
    assert streams["bad"][-1].finish_reason is pd.FinishReason.FAILED
    assert isinstance(streams["bad"][-1].error, pd.RequestError)
    assert message in str(streams["bad"][-1].error)
    Tally().compare("good", streams["good"], plain_reference(model_of(), good, tokens_of(streams["good"])))
    (*_, last) = pairing.generate([request("later")])
    assert last.usage is not None
    assert last.usage.cached_tokens == 8, f"the pages of {len(PROMPT)} tokens were forgotten"


def test_what_makes_no_processor_is_refused(pairing: pd.Pairing) -> None:
    sampling = {"nothing": greedy(5, logits_processor="none"), "unreadable": greedy(5, logits_processor="failing")}
    streams = by_request(pairing.generate(request(name, sampling=asked) for name, asked in sampling.items()))
    assert {name: type(stream[0].error) for name, stream in streams.items()} == dict.fromkeys(sampling, pd.RequestError)
    assert "'none' does not take its argument: TypeError: its factory made no function" in str(
        streams["nothing"][0].error
    )
    assert "'failing' does not take its argument: ValueError" in str(streams["unreadable"][0].error)
    with pytest.raises(pd.RequestError, match=r"'json'; the prefill engine was given: failing, none"):
        pairing.submit(request("unknown", sampling=greedy(5, logits_processor="json")))


@pytest.mark.parametrize("lacking", ["prefill", "decode"])
def test_the_engine_that_lacks_the_processor_says_so(lacking: str) -> None:
    """Where several serve, another may have it."""
    pools = [pool_of(model_of(), num_pages=64) for _ in range(4)]
    ends = KVChannel.loopback(*pools)
    given = [{} if lacking == role else PROCESSORS for role in ("prefill", "decode")]
    prefills = [pd.PrefillEngine(model_of(), ends[0], logits_processors=given[0])]
    decodes = [pd.DecodeEngine(model_of(), ends[1], logits_processors=given[1])]
    asked = request("a", sampling=greedy(5, logits_processor="one_in_five", logits_processor_argument="1"))
    with pd.Pairing(prefills, decodes, policy=pd.policy.round_robin) as pairing:
        message = f"'one_in_five'; the {lacking} engine was given: none"
        with pytest.raises(pd.RequestError, match=message):
            pairing.submit(asked)
        if lacking == "prefill":
            pairing.add(pd.PrefillEngine(model_of(), ends[2], logits_processors=PROCESSORS))
        else:
            pairing.add(pd.DecodeEngine(model_of(), ends[3], logits_processors=PROCESSORS))
        streams = by_request(pairing.generate(request(name, sampling=asked.sampling) for name in "ab"))
    ended = {stream[-1].finish_reason for stream in streams.values()}
    assert ended == {pd.FinishReason.FAILED, pd.FinishReason.LENGTH}
    (error,) = (stream[-1].error for stream in streams.values() if stream[-1].error is not None)
    assert message in str(error)
