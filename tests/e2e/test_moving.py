"""A request whose decode is lost goes on at another one. Its stream has each token of a run without the loss, once."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.testing import VirtualClock
from tests.e2e import setups
from tests.e2e.setups import (
    PROMPT,
    Setup,
    broken,
    by_request,
    collect,
    hang,
    prompt_of,
    reference,
    request,
    step_until,
    tokens_of,
)
from tests.waiting import wait_until

SAMPLED = pd.SamplingParams(temperature=1.3, top_p=0.95, frequency_penalty=0.4, max_new_tokens=12, seed=7)
COUNT = 12


def several(num_decode: int, transport: str = "loopback", **more: Any) -> Setup:
    more = {"policy": pd.policy.round_robin, **more}
    return setups.several(1, num_decode, transport, **more)


def kinds() -> list[pd.Request]:
    """Return a greedy request, a sampled one, and one that comes with output."""
    sampled = attrs.evolve(request("sampled"), sampling=SAMPLED, prompt=prompt_of(11))
    resumed = attrs.evolve(request("resumed", COUNT), output=reference("v3", PROMPT, 3).tokens)
    return [request("greedy", COUNT), sampled, resumed]


def unharmed() -> dict[str, list[int]]:
    with several(1) as setup:
        return {name: tokens_of(stream) for name, stream in by_request(setup.pairing.generate(kinds())).items()}


UNHARMED = unharmed()


def until_tokens(setup: Setup, count: int) -> list[pd.TokenEvent]:
    """Step until this many tokens have come, and no further."""
    return step_until(setup.pairing, lambda events: sum(event.token is not None for event in events) >= count)


@pytest.mark.parametrize(
    ("transport", "after"),
    [
        *(("loopback", count) for count in (0, 1, COUNT - 4)),
        *(pytest.param("tcp", count, marks=pytest.mark.full) for count in (0, 1)),
        ("tcp", COUNT - 4),
    ],
)
def test_streams_go_on_as_if_nothing_had_happened(transport: str, after: int) -> None:
    for one in kinds():
        with several(2, transport) as setup:
            setup.pairing.submit(one)
            events = until_tokens(setup, after) if after else setup.pairing.step()
            setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
            events += collect(setup.pairing)
            assert {name: tokens_of(stream) for name, stream in by_request(events).items()} == {
                one.request_id: UNHARMED[str(one.request_id)]
            }
            assert (setup.pairing.stats.num_moved, setup.pairing.stats.num_ports_lost) == (1, 1)
            usage = events[-1].usage
            assert usage is not None
            assert (usage.output_tokens, usage.prompt_tokens) == (COUNT, len(one.prompt))
            setup.decodes.pop(0)
            setup.check_idle()


def test_times_of_a_stream_that_went_on_are_those_of_the_whole() -> None:
    clock = VirtualClock()
    with several(2, clock=clock) as setup:
        setup.pairing.submit(request("a", COUNT))
        clock.advance(1.0)
        until_tokens(setup, 2)
        clock.advance(5.0)
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        usage = collect(setup.pairing)[-1].usage
        assert usage is not None
        assert usage.timeline is not None
        assert (usage.ttft_s, usage.timeline.first_token_s) == (1.0, 1.0)
        assert usage.queue_s == pytest.approx(1.0)
        assert usage.timeline.committed_s == pytest.approx(6.0)


def test_times_of_a_stream_that_went_on_twice_leave_out_what_both_lost_decodes_ran() -> None:
    clock = VirtualClock()
    with several(3, clock=clock) as setup:
        setup.pairing.submit(request("a", COUNT))
        clock.advance(1.0)  # it waits
        for waits_s in (2.0, 0.0):
            until_tokens(setup, 1)
            clock.advance(5.0)  # it runs
            (busy,) = (one for one in setup.decodes if one.num_unfinished)
            busy.step = broken  # type: ignore[method-assign,assignment]
            setup.pairing.step()
            clock.advance(waits_s)
        usage = collect(setup.pairing)[-1].usage
        assert usage is not None
        assert usage.queue_s == pytest.approx(3.0)
        assert usage.ttft_s == 1.0


def test_a_decode_that_lives_on_behind_a_cut_is_not_heard() -> None:
    """The pairing takes it for dead and cannot close it, and it goes on with its copy of the request."""
    with several(2) as setup:
        lost, port = setup.decodes[0], setup.decodes[0]
        step, close = lost.step, lost.close
        setup.pairing.submit(request("a", COUNT))
        events = until_tokens(setup, 3)
        port.step = broken  # type: ignore[method-assign,assignment]
        port.close = lambda: None  # type: ignore[method-assign]
        events += setup.pairing.step()
        said = []
        for _ in range(COUNT):
            said += step()
            events += setup.pairing.step()
        events += collect(setup.pairing)
        assert said[-1].finish_reason is pd.FinishReason.LENGTH  # type: ignore[union-attr]
        (stream,) = by_request(events).values()
        assert tokens_of(stream) == UNHARMED["greedy"]
        port.close = close  # type: ignore[method-assign]


def delay(port: Any, held: list[pd.types.Event]) -> None:
    """Make `port` keep its engine's events in `held`, as a slow pipe would."""
    step = port.step

    def delayed() -> list[pd.types.Event]:
        held.extend(step())
        return []

    port.step = delayed


@pytest.mark.parametrize("num_decode", [1, 2])
def test_a_decode_that_is_removed_and_added_again_says_nothing_of_what_was_taken_from_it(num_decode: int) -> None:
    """Events from before it released the request arrive when the request may be there again."""
    config = pd.PairingConfig(port_wait_s=30.0)
    with several(num_decode, config=config) as setup:
        decode = setup.decodes[0]
        setup.pairing.submit(request("a", COUNT))
        events = until_tokens(setup, 2)
        held: list[pd.types.Event] = []
        step = decode.step
        delay(decode, held)
        setup.pairing.remove(decode, drain_s=0.0)
        assert any(isinstance(event, pd.TokenEvent) and event.finish_reason for event in held)

        def late() -> list[pd.types.Event]:
            decode.step = step  # type: ignore[method-assign]
            return [*held, *step()]

        decode.step = late  # type: ignore[method-assign]
        setup.pairing.add(decode)
        events += collect(setup.pairing)
        (stream,) = by_request(events).values()
        assert tokens_of(stream) == UNHARMED["greedy"]
        assert stream[-1].finish_reason is pd.FinishReason.LENGTH
        setup.check_idle()


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_request_that_nobody_wants_any_more_does_not_move(tokens: int) -> None:
    with several(2) as setup:
        setup.pairing.submit(request("a", COUNT))
        events = until_tokens(setup, tokens) if tokens else setup.pairing.step()
        hang(setup.decodes[0], takes=False)
        setup.pairing.cancel("a")
        events += setup.pairing.step()
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        events += collect(setup.pairing)
        assert events[-1].finish_reason is pd.FinishReason.CANCELLED
        assert setup.pairing.stats.num_moved == 0


def test_a_deadline_holds_on_the_way_to_another_decode() -> None:
    clock = VirtualClock()
    with several(2, clock=clock) as setup:
        setup.pairing.submit(request("a", COUNT, deadline_s=2.0))
        events = until_tokens(setup, 2)
        hang(setup.decodes[1])
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        events += setup.pairing.step()
        clock.advance(2.2)
        events += setup.pairing.step()
        assert events[-1].finish_reason is pd.FinishReason.DEADLINE


def test_with_no_other_decode_the_end_says_both_why_and_what_is_missing() -> None:
    with several(1) as setup:
        setup.pairing.submit(request("a", COUNT))
        until_tokens(setup, 2)
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        (end,) = collect(setup.pairing)
        assert end.finish_reason is pd.FinishReason.FAILED
        assert "no decode port is left" in str(end.error)
        assert "the device fell off" in str(end.error)


def test_who_goes_on_is_ahead_of_who_is_new() -> None:
    engine = pd.EngineConfig(max_running_requests=1)
    with several(2, engine=engine) as setup:
        setup.pairing.submit(request("stream", COUNT))
        events = until_tokens(setup, 2)
        for number in range(6):
            setup.pairing.submit(request(str(number)))
        events += setup.pairing.step()
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        events += collect(setup.pairing)
        ends = [event.request_id for event in events if event.finish_reason is not None]
        assert ends.index("stream") <= 2  # after what the other decode was running
        assert tokens_of(by_request(events)["stream"]) == UNHARMED["greedy"]
        wait_until(lambda: not setup.pairing.step())
