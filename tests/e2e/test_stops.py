"""A request ends with the token that its `stop` says: as STOP, with what decode says it used, and nothing behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.pairing.request import STOP_GRACE_S
from pdinfer.testing import VirtualClock
from tests.e2e import setups
from tests.e2e.setups import (
    PROMPT,
    Setup,
    broken,
    by_request,
    collect,
    hang,
    local,
    model_of,
    pool_of,
    reference,
    remote,
    request,
    step_until,
    tokens_of,
    watch,
)

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny"
COUNT = 12
TOKENS = reference("v3", PROMPT, COUNT).tokens
SEQUENCE = TOKENS[4:7]
"""Ends a request with its seventh token."""
STOP = pd.FinishReason.STOP
FAILED = pd.FinishReason.FAILED


class Broken:
    """What a matcher may return, an array of several truths say."""

    def __bool__(self) -> bool:
        raise ValueError("this matcher is broken")


class After:
    """Stops each request at a number of tokens, counted since it began."""

    def __init__(self, count: int, *, fails: Callable[[], Any] | None = None) -> None:
        self.count = count
        self.fails = fails
        self.began: list[tuple[int, ...]] = []
        self.seen: list[list[int]] = []

    def begin(self, prompt: Sequence[int]) -> Callable[[int], bool]:
        self.began.append(tuple(prompt))
        seen: list[int] = []
        self.seen.append(seen)

        def stops(token: int) -> bool:
            seen.append(token)
            if self.fails and len(seen) == self.count:
                return self.fails()  # type: ignore[no-any-return]
            return len(seen) >= self.count

        return stops


def several(num_decode: int, **more: Any) -> Setup:
    more = {"policy": pd.policy.round_robin, **more}
    return setups.several(1, num_decode, **more)


@contextmanager
def served() -> Iterator[pd.Pairing]:
    """Both engines behind connections, which carry several tokens while a cancellation is on its way."""
    pools = [pool_of(model_of(), num_pages=64) for _ in range(2)]
    ends = pd.KVChannel.loopback(*pools)
    engines = pd.PrefillEngine(model_of(), ends[0]), pd.DecodeEngine(model_of(), ends[1])
    prefill, decode = map(remote, engines)
    with prefill as to_prefill, decode as to_decode, pd.Pairing(to_prefill, to_decode) as pairing:
        yield pairing


def check_stopped(stream: Sequence[pd.TokenEvent], count: int = 7) -> pd.types.Usage:
    """The stream has so many of the tokens it would have had, the last of them with STOP, and the usage of those."""
    assert tokens_of(stream) == list(TOKENS[:count])
    last = stream[-1]
    assert (last.finish_reason, last.error, last.index) == (STOP, None, count - 1)
    assert last.usage is not None
    assert (last.usage.output_tokens, last.usage.prompt_tokens) == (count, len(PROMPT))
    return last.usage


@pytest.mark.parametrize("stop", [(SEQUENCE,), ((96, 95), SEQUENCE, TOKENS[:9]), After(7)], ids=["one", "some", "host"])
def test_a_request_ends_with_the_token_that_completes_its_stop(stop: Any) -> None:
    with local() as setup:
        seen = watch(setup.decodes[0])
        (stream,) = by_request(setup.pairing.generate([request("a", COUNT, stop=stop)])).values()
        usage = check_stopped(stream)
        assert sum(isinstance(event, pd.TokenEvent) for event in seen) == 8  # the last is decode's answer
        assert usage.timeline is not None
        assert usage.timeline.committed_s is not None  # decode's own, and not what the Pairing saw
        assert dict(setup.pairing.stats.ended) == {STOP: 1}
        setup.check_idle()


@pytest.mark.parametrize("count", [1, COUNT])
def test_the_first_token_and_the_last_may_stop(count: int) -> None:
    with local() as setup:
        (stream,) = by_request(setup.pairing.generate([request("a", COUNT, stop=(TOKENS[:count],))])).values()
        check_stopped(stream, count)
        setup.check_idle()


def test_what_decode_says_it_used_is_what_the_host_is_told() -> None:
    with local() as setup:
        for expected in (0, 8):  # both full pages of the prompt are known the second time
            (stream,) = by_request(setup.pairing.generate([request("a", COUNT, stop=(SEQUENCE,))])).values()
            assert check_stopped(stream).cached_tokens == expected


def test_tokens_on_their_way_when_a_request_stops_reach_nobody() -> None:
    with served() as pairing:
        asked = [request(str(number), COUNT, stop=(SEQUENCE,)) for number in range(4)]
        streams = by_request(pairing.generate(asked))
        assert len(streams) == 4
        for stream in streams.values():
            assert check_stopped(stream).timeline is not None


def test_what_decode_says_behind_a_stop_changes_nothing() -> None:
    """Here it does not hear that it should end the request, which then comes to its length."""
    matcher = After(7)
    with local() as setup:
        setup.decodes[0].cancel = lambda request_id: None  # type: ignore[method-assign]
        (stream,) = by_request(setup.pairing.generate([request("a", COUNT, stop=matcher)])).values()
        check_stopped(stream)
        setup.check_idle()
    assert matcher.seen == [list(TOKENS[:7])]


def test_requests_that_share_a_matcher_do_not_share_how_far_they_got() -> None:
    shared = After(5)
    with local() as setup:
        asked = [request(str(number), COUNT, stop=shared) for number in range(3)]
        for stream in by_request(setup.pairing.generate(asked)).values():
            check_stopped(stream, 5)
    assert shared.began == [PROMPT] * 3
    assert shared.seen == [list(TOKENS[:5])] * 3


@pytest.mark.parametrize("fails", [lambda: bool(Broken()), Broken], ids=["raises", "returns"])
def test_a_matcher_that_fails_ends_its_request_alone(fails: Callable[[], Any]) -> None:
    with local() as setup:
        asked = [request("bad", COUNT, stop=After(3, fails=fails)), request("good", COUNT, stop=After(5))]
        streams = by_request(setup.pairing.generate(asked))
        check_stopped(streams["good"], 5)
        last = streams["bad"][-1]
        assert tokens_of(streams["bad"]) == list(TOKENS[:2])
        assert (last.token, last.index, last.finish_reason) == (None, 2, FAILED)
        assert isinstance(last.error, pd.RequestError)
        assert "the matcher of its stop failed: ValueError: this matcher is broken" in str(last.error)
        assert last.usage is not None
        assert last.usage.output_tokens == 2
        assert dict(setup.pairing.stats.ended) == {FAILED: 1, STOP: 1}
        setup.check_idle()


def test_a_matcher_that_cannot_begin_is_refused() -> None:
    class Broken:
        def begin(self, prompt: Sequence[int]) -> Callable[[int], bool]:
            raise KeyError("no tokenizer")

    with local() as setup:
        with pytest.raises(pd.RequestError, match="the matcher of its stop failed: KeyError: 'no tokenizer'"):
            setup.pairing.submit(request(stop=Broken()))
        assert setup.pairing.num_unfinished == 0


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ("END", "stop must be a tuple of token sequences or a matcher"),
        ([[1]], "stop must be a tuple of token sequences or a matcher"),
        ((1, 2), r"stop\[0\] must be a tuple of token ids, got 'int'"),
        (((1,), ()), r"stop\[1\] has 0 tokens; a sequence has 1 to 256"),
        (((1,) * 257,), r"stop\[0\] has 257 tokens; a sequence has 1 to 256"),
        (((1,),) * 65, "stop has 65 sequences, at most 64"),
        (((1, 97),), r"stop\[0\]\[1\] is 97; token ids are ints from 0 to 96"),
    ],
)
def test_a_stop_that_is_none_is_refused(stop: Any, says: str) -> None:
    with local() as setup, pytest.raises(pd.RequestError, match=says):
        setup.pairing.submit(request(stop=stop))


def test_an_engine_takes_no_stop() -> None:
    with local() as setup:
        setup.decodes[0].submit(request(stop=(SEQUENCE,)), writers=setup.prefills[0].addresses)
        (refused,) = setup.decodes[0].step()
        assert isinstance(refused, pd.Refused)
        assert "stop is for Pairing.submit" in str(refused.error)


def test_no_stop_ends_a_request_before_min_new_tokens() -> None:
    with local() as setup:
        sampling = attrs.evolve(request("a", COUNT).sampling, min_new_tokens=9, ignore_eos=False)
        plain, stopped = (
            tokens_of(setup.pairing.generate([pd.Request(prompt=PROMPT, sampling=sampling, stop=stop)]))
            for stop in ((), After(1))
        )
        assert stopped == plain[:9]


def test_a_request_that_is_resumed_stops_where_it_would_have() -> None:
    """A part of the sequence is in the output that it came with."""
    with local() as setup:
        resumed = request("a", COUNT, output=TOKENS[:5], stop=(SEQUENCE,))
        events = list(setup.pairing.generate([resumed]))
        assert (tokens_of(events), events[-1].finish_reason) == (list(TOKENS[5:7]), STOP)
        with pytest.raises(pd.RequestError, match=r"output\[6\] already ends the request by its stop"):
            setup.pairing.submit(attrs.evolve(resumed, output=TOKENS[:8]))


# -- when ports are lost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 5, 6])
def test_a_request_that_goes_on_at_another_decode_stops_where_it_would_have(after: int) -> None:
    matcher = After(7)
    with several(2) as setup:
        for stop in ((SEQUENCE,), matcher):
            setup.pairing.submit(request("a", COUNT, stop=stop))
            events = setup.pairing.step()
            events += step_until(setup.pairing, lambda more: len(tokens_of(events + more)) >= after)  # noqa: B023 - now
            serving = next(decode for decode in setup.decodes if decode.request_ids)
            setup.pairing.remove(serving, drain_s=0)
            check_stopped(events + collect(setup.pairing))
            setup.pairing.add(serving)
    assert matcher.seen == [list(TOKENS[:7])]  # each token once


def until_it_waits(setup: Setup) -> list[pd.TokenEvent]:
    """Step until the stop was found and decode was asked to end the request, and no further."""
    requests = setup.pairing._broker.requests
    events = step_until(setup.pairing, lambda _: any(tracked.ending for tracked in requests.values()))
    assert len(events) == 6
    return events


@pytest.mark.parametrize("what", ["break", "remove", "cancel", "close"])
def test_whatever_happens_before_decode_answers_a_request_that_stopped_has_stopped(what: str) -> None:
    with several(2) as setup:
        setup.pairing.submit(request("a", COUNT, stop=(SEQUENCE,)))
        events = until_it_waits(setup)
        if what == "break":
            setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        elif what == "remove":
            setup.pairing.remove(setup.decodes[0], drain_s=0)
        elif what == "cancel":
            setup.pairing.cancel("a")
        else:
            setup.pairing.close()
        check_stopped(events + collect(setup.pairing))
        assert dict(setup.pairing.stats.ended) == {STOP: 1}


def test_a_decode_that_does_not_answer_holds_the_end_up_for_a_second() -> None:
    clock = VirtualClock()
    with several(1, clock=clock) as setup:
        setup.pairing.submit(request("a", COUNT, stop=(SEQUENCE,)))
        events = until_it_waits(setup)
        hang(setup.decodes[0], takes=False)
        assert setup.pairing.step() == []
        clock.advance(STOP_GRACE_S + 0.01)
        check_stopped(events + setup.pairing.step())


# -- text -------------------------------------------------------------------------------------------------------------

PROMPTS = ("copy k3v9 > ", "calc 47+38=", "set kqz=48213; get kqz=", "One day Mia found a red box in the garden. She ")
SAMPLING = pd.SamplingParams(temperature=0, max_new_tokens=40)


@pytest.fixture(scope="module")
def tokenizer() -> pd.text.Tokenizer:
    return pd.text.Tokenizer.load(CHECKPOINT)


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.full), 2], ids=["plain", "drafts"])
def tiny(request: pytest.FixtureRequest) -> Iterator[pd.Pairing]:
    model = pd.load_model(CHECKPOINT, dtype=torch.float32, mtp=True)
    engine = pd.EngineConfig(num_draft_tokens=request.param)
    with pd.Pairing.local(model, cache=pd.CacheConfig(page_size=16, num_pages=200), engine=engine) as made:
        yield made


def texts(
    pairing: pd.Pairing, tokenizer: pd.text.Tokenizer, strings: Sequence[str]
) -> list[tuple[str, str | None, list[pd.TokenEvent]]]:
    """What is shown of the answer to each prompt, the string that stopped it, and its events."""
    stop = pd.text.StopStrings(tokenizer, strings)
    asked = [
        pd.Request(
            request_id=str(number),
            prompt=tokenizer.chat([{"role": "user", "content": prompt}]),
            sampling=SAMPLING,
            stop=stop,
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    streams = [pd.text.TextStream(tokenizer, one) for one in asked]
    events: list[list[pd.TokenEvent]] = [[] for _ in asked]
    shown = ["" for _ in asked]
    for event in pairing.generate(asked):
        events[int(event.request_id)].append(event)
        shown[int(event.request_id)] += streams[int(event.request_id)].push(event)
    return [(text, stream.stop_string, came) for text, stream, came in zip(shown, streams, events, strict=True)]


def test_stop_strings_end_the_tiny_models_answers(tiny: pd.Pairing, tokenizer: pd.text.Tokenizer) -> None:
    """Streams are those without stops, up to the token that completes one; drafted tokens behind it reach nobody."""
    strings = ["; calc", "13; ", " Mia loved", "; set zle"]
    whole = texts(tiny, tokenizer, [])
    for (text, stop_string, events), (unstopped, none, all_events) in zip(
        texts(tiny, tokenizer, strings), whole, strict=True
    ):
        ends = {unstopped.index(string) + len(string): string for string in strings if string in unstopped}
        end = min(ends)
        assert none is None
        assert (text, stop_string) == (unstopped[: end - len(ends[end])], ends[end])
        assert [event.finish_reason for event in events] == [None] * (end - 1) + [STOP]  # a byte is a token
        assert tokens_of(events) == tokens_of(all_events)[:end]
        logprobs = [event.logprob for event in all_events[:end]]
        assert [event.logprob for event in events] == pytest.approx(logprobs, abs=1e-4)
        assert events[-1].usage is not None
        assert events[-1].usage.output_tokens == end
    assert tiny.num_unfinished == 0
