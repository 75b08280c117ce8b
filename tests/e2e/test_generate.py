"""`Pairing.generate`: lazy, patient, hard to upset, and gone without a trace when closed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import pdinfer as pd
from tests.e2e.setups import (
    PROMPT,
    by_request,
    collect,
    greedy,
    hang,
    join,
    local,
    model_of,
    pool_of,
    recover,
    reference,
    request,
    tokens_of,
)
from tests.waiting import check_returns

EXPECTED = list(reference("v3", PROMPT, 5).tokens)
NARROW = {
    "config": pd.PairingConfig(max_queued_requests=2, max_queued_per_decode=1),
    "engine": pd.EngineConfig(max_running_requests=1),
}


def sampling(**more: Any) -> dict[str, Any]:
    return {"sampling": attrs.evolve(greedy(5, ignore_eos=True), **more)}


HUGE = 10**400
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "H30 prompt empty": ({"prompt": ()}, "prompt"),
    "H30 max_new_tokens 0": (sampling(max_new_tokens=0), "max_new_tokens"),
    "H30 max_new_tokens -1": (sampling(max_new_tokens=-1), "max_new_tokens"),
    "H31 max_new_tokens 2**63": (sampling(max_new_tokens=2**63), "max_new_tokens"),
    "H31 max_new_tokens float": (sampling(max_new_tokens=5.0), "max_new_tokens"),
    "H31 max_new_tokens bool": (sampling(max_new_tokens=True), "max_new_tokens"),
    "H31 max_new_tokens string": (sampling(max_new_tokens="5"), "max_new_tokens"),
    "H32 longer than the context": (sampling(max_new_tokens=504), "max_new_tokens 504 makes 513"),
    "H32 longer than the pool": ({"prompt": PROMPT * 30}, "holds 256"),
    "H33 temperature nan": (sampling(temperature=float("nan")), "temperature"),
    "H33 temperature inf": (sampling(temperature=float("inf")), "temperature"),
    "H33 temperature -0.1": (sampling(temperature=-0.1), "temperature"),
    "H33 temperature 1e9": (sampling(temperature=1e9), "temperature"),
    "H33 temperature 10**400": (sampling(temperature=HUGE), "temperature"),
    "H33 temperature string": (sampling(temperature="1"), "temperature"),
    "H33 top_p 0": (sampling(top_p=0.0), "top_p"),
    "H33 top_p 1.1": (sampling(top_p=1.1), "top_p"),
    "H33 top_p nan": (sampling(top_p=float("nan")), "top_p"),
    "H33 top_k -5": (sampling(top_k=-5), "top_k"),
    "H33 top_k 2**31": (sampling(top_k=2**31), "top_k"),
    "H33 top_k 1.5": (sampling(top_k=1.5), "top_k"),
    "H33 min_p 2": (sampling(min_p=2.0), "min_p"),
    "H34 seed -1": (sampling(seed=-1), "seed"),
    "H34 seed 2**200": (sampling(seed=2**200), "seed"),
    "H34 seed float": (sampling(seed=1.5), "seed"),
    "H38 token = vocab": ({"prompt": (97,)}, r"prompt[0] is 97"),
    "H39 stop id -1": (sampling(stop_token_ids=(3, -1)), "stop_token_ids[1]"),
    "H39 stop id = vocab": (sampling(stop_token_ids=(97,)), "stop_token_ids[0]"),
    "H39 stop ids None": (sampling(stop_token_ids=None), "stop_token_ids"),
    "H39 logit_bias": (sampling(logit_bias=((97, 1.0),)), "logit_bias"),
    "H40 min_new_tokens over max": (sampling(min_new_tokens=6), "min_new_tokens"),
    "H41 deadline negative": ({"deadline_s": -1.0}, "deadline_s"),
    "H41 deadline nan": ({"deadline_s": float("nan")}, "deadline_s"),
    "H41 deadline 1e9": ({"deadline_s": 1e9}, "deadline_s"),
    "H41 deadline 10**400": ({"deadline_s": HUGE}, "deadline_s"),
    "H41 deadline string": ({"deadline_s": "1"}, "deadline_s"),
    "H44 id with newline": ({"request_id": "a\nb"}, "request_id"),
    "H44 id empty": ({"request_id": ""}, "request_id"),
    "H44 id of 1 MiB": ({"request_id": "x" * 2**20}, "request_id"),
    "H44 id of bytes": ({"request_id": b"x"}, "request_id"),
    "sampling None": ({"sampling": None}, "sampling"),
    "priority 2**40": ({"priority": 2**40}, "priority"),
    "salt string": ({"cache_salt": "x"}, "cache_salt"),
    "nothing left to generate": ({"output": (1, 2, 3, 4, 5)}, "max_new_tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_yields_its_failure_and_the_others_go_on(name: str) -> None:
    changes, field = BAD[name]
    bad = attrs.evolve(request("bad"), **changes)
    with local() as setup:
        events = list(setup.pairing.generate([request("before"), bad, request("after")]))
        setup.check_idle()
    failed = [event for event in events if event.finish_reason is pd.FinishReason.FAILED]
    assert len(failed) == 1
    assert isinstance(failed[0].error, pd.RequestError)
    assert failed[0].error.code == "REQUEST"
    assert failed[0].token is None
    assert field in str(failed[0].error)
    assert len(str(failed[0].error)) < 500
    if isinstance(bad.request_id, str):
        assert failed[0].request_id == bad.request_id
    rest = by_request(event for event in events if event not in failed)
    assert {key: tokens_of(stream) for key, stream in rest.items()} == {"before": EXPECTED, "after": EXPECTED}


def test_the_same_id_twice_fails_the_second_and_the_first_goes_on() -> None:
    with local() as setup:
        events = list(setup.pairing.generate([request("a"), request("a"), request("b")]))
    failed = [event for event in events if event.finish_reason is pd.FinishReason.FAILED]
    assert [event.request_id for event in failed] == ["a"]
    assert "in use" in str(failed[0].error)
    rest = by_request(event for event in events if event not in failed)
    assert {key: tokens_of(stream) for key, stream in rest.items()} == {"a": EXPECTED, "b": EXPECTED}


def test_a_bad_request_alone_does_not_wait() -> None:
    with local() as setup:
        assert len(list(setup.pairing.generate([request("bad", prompt=())]))) == 1
        assert list(setup.pairing.generate([])) == []


def test_requests_are_pulled_as_there_is_room() -> None:
    pulled: list[int] = []

    def source() -> Iterator[pd.Request]:
        for number in itertools.count():
            pulled.append(number)
            yield request(str(number))

    with local(**NARROW) as setup:
        stream = setup.pairing.generate(source())
        assert pulled == []
        ended = 0
        for event in stream:
            ended += event.finish_reason is not None
            # two in the queue, one waiting at decode, one running, and those that ended in the step being reported
            assert len(pulled) <= ended + 5
            if ended == 12:
                break
        stream.close()
        setup.check_idle()


def test_generate_waits_where_submit_would_raise_overloaded() -> None:
    with local(**NARROW) as setup:
        streams = by_request(setup.pairing.generate(request(str(number)) for number in range(20)))
        setup.check_idle()
    assert {key: tokens_of(stream) for key, stream in streams.items()} == dict.fromkeys(map(str, range(20)), EXPECTED)


def test_a_line_filled_by_others_at_the_last_moment_makes_generate_wait() -> None:
    with local(**NARROW) as setup:
        pairing = setup.pairing

        def source() -> Iterator[pd.Request]:
            pairing.submit(request("other 1"))
            pairing.submit(request("other 2"))
            yield request("mine")

        assert tokens_of(pairing.generate(source())) == EXPECTED
        others = by_request(collect(pairing))
    assert {key: tokens_of(stream) for key, stream in others.items()} == {"other 1": EXPECTED, "other 2": EXPECTED}


def test_events_of_other_requests_stay_for_step() -> None:
    with local() as setup:
        setup.pairing.submit(request("other"))
        mine = list(setup.pairing.generate([request("mine")]))
        assert {event.request_id for event in mine} == {"mine"}
        assert tokens_of(by_request(collect(setup.pairing))["other"]) == EXPECTED
        assert tokens_of(mine) == EXPECTED


def test_two_generators_take_turns() -> None:
    with local() as setup:
        left = setup.pairing.generate([request("left", 9)])
        right = setup.pairing.generate([request("right", 7)])
        pairs = list(itertools.zip_longest(left, right))
        assert setup.pairing.step() == []
    whole = list(reference("v3", PROMPT, 9).tokens)
    assert tokens_of(event for event, _ in pairs if event) == whole
    assert tokens_of(event for _, event in pairs if event) == whole[:7]


@pytest.mark.parametrize("num_events", [1, 3, 7])
def test_closing_the_iterator_cancels_and_leaves_the_pairing_usable(num_events: int) -> None:
    with local() as setup:
        setup.pairing.submit(request("other", 20))
        stream = setup.pairing.generate([request("mine", 40), request("mine too", 40)])
        assert len(list(itertools.islice(stream, num_events))) == num_events
        stream.close()
        assert setup.pairing.num_unfinished == 1
        others = by_request(collect(setup.pairing))
        assert set(others) == {"other"}
        assert tokens_of(others["other"]) == list(reference("v3", PROMPT, 20).tokens)
        setup.check_idle()
        assert tokens_of(setup.pairing.generate([request("mine")])) == EXPECTED


def test_a_closed_iterator_leaves_no_events_that_another_step_had_collected() -> None:
    with local() as setup:
        abandoned = setup.pairing.generate([request("abandoned", 6)])
        next(abandoned)
        assert tokens_of(setup.pairing.generate([request("mine", 5)])) == EXPECTED
        abandoned.close()
        assert collect(setup.pairing) == []


def test_events_that_a_step_took_away_do_not_keep_the_iterator_waiting() -> None:
    with local() as setup:
        stream = setup.pairing.generate([request()])
        first = next(stream)
        events = [first, *collect(setup.pairing), *stream]
        assert tokens_of(sorted(events, key=lambda event: event.index)) == EXPECTED


def test_a_step_inside_the_loop_takes_the_events_that_the_iterator_then_does_not_yield() -> None:
    with local() as setup:
        taken: list[pd.TokenEvent] = []
        yielded = []
        for event in setup.pairing.generate(request()):
            yielded.append(event)
            taken += setup.pairing.step()
        assert taken
        both = sorted([*yielded, *taken], key=lambda event: event.index)
        assert [event.token for event in both] == EXPECTED
        setup.check_idle()


def test_one_request_needs_no_list() -> None:
    with local() as setup:
        assert tokens_of(setup.pairing.generate(request())) == EXPECTED


@pytest.mark.parametrize("what", ["hello", b"hello", None, 5, ["hello"], [(1, 2, 3)], (request(), None)], ids=repr)
def test_what_is_no_request_is_refused_by_the_call(what: Any) -> None:
    with local() as setup:
        with pytest.raises(pd.ConfigError, match=r"^Pairing.generate: requests must be Request"):
            setup.pairing.generate(what)
        assert setup.pairing.num_unfinished == 0


def test_what_a_source_gives_that_is_no_request_ends_the_iterator() -> None:
    with local() as setup:
        with pytest.raises(pd.ConfigError, match=r"^Pairing.submit: request must be Request, got 'hello'"):
            list(setup.pairing.generate(each for each in (request("a", 40), "hello")))
        assert collect(setup.pairing) == []
        setup.check_idle()


def test_an_iterator_that_was_never_started_took_nothing() -> None:
    with local() as setup:
        setup.pairing.generate([request()]).close()
        assert setup.pairing.num_unfinished == 0
        assert setup.pairing.step() == []


def test_an_error_of_the_source_cancels_what_came_before() -> None:
    def source() -> Iterator[pd.Request]:
        yield request("mine", 40)
        raise OSError("the file ended")

    with local() as setup:
        with pytest.raises(OSError, match="the file ended"):
            list(setup.pairing.generate(source()))
        assert collect(setup.pairing) == []
        setup.check_idle()


def test_a_none_of_the_source_is_no_end() -> None:
    with local() as setup:
        with pytest.raises(pd.ConfigError, match=r"^Pairing.submit: request must be Request, got None"):
            list(setup.pairing.generate(iter([request("a"), None, request("b")])))  # type: ignore[list-item]
        assert collect(setup.pairing) == []


@pytest.mark.parametrize(
    "close", [check_returns, lambda close: close()], ids=["another thread", "the thread of the step"]
)
def test_an_iterator_that_is_dropped_inside_a_step_waits_for_nothing(close: Callable[..., object]) -> None:
    """Garbage collection closes it in any thread, also in one that has a lock for which the step waits."""
    dropped: list[Iterator[pd.TokenEvent]] = []

    def policy(*given: Any) -> pd.types.Choice | None:
        if dropped:
            close(dropped.pop().close)
        return pd.policy.least_tokens(*given)

    with local(policy=policy) as setup:
        stream = setup.pairing.generate([request("dropped", 40)])
        next(stream)
        dropped.append(stream)
        assert tokens_of(setup.pairing.generate([request("mine")])) == EXPECTED
        assert collect(setup.pairing) == []
        setup.check_idle()


def test_an_id_that_a_dropped_iterator_had_is_free_once_its_request_has_ended() -> None:
    with local() as setup:
        stream = setup.pairing.generate([request("a")])
        next(stream)
        assert tokens_of(setup.pairing.generate([request("b", 9)]))  # the events of a wait meanwhile
        check_returns(stream.close)
        setup.pairing.submit(request("a"))
        assert tokens_of(collect(setup.pairing)) == EXPECTED
        setup.check_idle()


def test_closing_while_a_decode_is_slow_to_answer_stays_silent() -> None:
    pools = [pool_of(model_of()) for _ in range(2)]
    with join(model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:]) as setup:
        stream = setup.pairing.generate([request("mine", 40)])
        next(stream)
        hang(setup.decodes[0])
        stream.close()
        assert setup.pairing.step() == []
        assert setup.pairing.num_unfinished == 1
        recover(setup.decodes[0])
        assert collect(setup.pairing) == []
        setup.check_idle()


def test_closing_the_pairing_says_nothing_of_what_a_closed_iterator_left() -> None:
    with local() as setup:
        stream = setup.pairing.generate([request("mine", 40)])
        next(stream)
        hang(setup.decodes[0])
        stream.close()
        setup.pairing.close()
        assert setup.pairing.step() == []


def test_generate_ends_when_the_pairing_is_closed_under_it() -> None:
    with local() as setup:
        stream = setup.pairing.generate([request("a", 40), request("b", 40)])
        first = next(stream)
        setup.pairing.close()
        streams = by_request([first, *stream])
    assert [stream[-1].finish_reason for stream in streams.values()] == [pd.FinishReason.CANCELLED] * 2
