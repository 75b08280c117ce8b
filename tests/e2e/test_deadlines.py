"""`deadline_s` counts from `Pairing.submit`, wherever the request is when it passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.pairing.request import DEADLINE_GRACE_S
from pdinfer.testing import VirtualClock
from tests.e2e.setups import (
    PROMPT,
    by_request,
    check_wakes_in,
    collect,
    hang,
    local,
    prompt_of,
    recover,
    reference,
    request,
    tokens_of,
    watch,
)
from tests.waiting import TIMEOUT_S


def check_deadline(events: list[pd.TokenEvent], name: str = "a") -> None:
    """Check that there is one final event, without a token or an error."""
    last = by_request(events)[name][-1]
    assert (last.token, last.finish_reason, last.error) == (None, pd.FinishReason.DEADLINE, None)
    assert last.usage is not None


def nobody(shape: pd.types.RequestShape, prefills: Sequence[object], decodes: Sequence[object]) -> None:
    """Let every request wait."""


def test_in_the_queue() -> None:
    clock = VirtualClock()
    with local(clock=clock, policy=nobody) as setup:
        setup.pairing.submit(request("a", deadline_s=5.0))
        setup.pairing.submit(request("patient"))
        clock.advance(4.9)
        assert setup.pairing.step() == []
        clock.advance(0.2)
        events = setup.pairing.step()
        check_deadline(events)
        assert len(events) == 1
        assert events[0].usage is not None
        assert events[0].usage.queue_s == pytest.approx(5.1)
        assert setup.pairing.num_unfinished == 1


def test_in_the_queue_behind_one_that_cannot_go() -> None:
    clock = VirtualClock()
    with local(clock=clock, policy=nobody) as setup:
        setup.pairing.submit(request("patient", priority=1))
        setup.pairing.submit(request("a", deadline_s=5.0))
        setup.pairing.step()
        clock.advance(5.0)
        check_deadline(setup.pairing.step())


def test_a_deadline_of_zero_ends_at_the_first_step() -> None:
    with local(clock=VirtualClock()) as setup:
        seen = watch(setup.decodes[0])
        setup.pairing.submit(request(deadline_s=0))
        check_deadline(setup.pairing.step())
        assert (seen, setup.decodes[0].num_unfinished) == ([], 0)  # no port ever heard of it
        setup.check_idle()


def test_while_waiting_for_pages() -> None:
    clock = VirtualClock()
    with local(clock=clock, num_pages=8) as setup:
        setup.pairing.submit(request("large", 20))
        events = setup.pairing.step() + setup.pairing.step()
        setup.pairing.submit(request("a", prompt=PROMPT[::-1] + PROMPT[:8], deadline_s=5.0))
        clock.advance(1.0)
        events += setup.pairing.step()
        assert setup.decodes[0].load().num_waiting_requests == 1
        clock.advance(4.0)
        events += setup.pairing.step()
        check_deadline(events)
        events += collect(setup.pairing)
        assert tokens_of(by_request(events)["large"]) == list(reference("v3", PROMPT, 20).tokens)
        setup.check_idle()


def test_while_granted_and_the_pages_wait_for_the_writer() -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request(deadline_s=5.0))
        setup.pairing.step()
        clock.advance(4.9)
        assert setup.pairing.step() == []
        clock.advance(0.1)
        check_deadline(setup.pairing.step())
        setup.pairing.step()
        assert setup.pools[0].num_granted == 3
        recover(setup.prefills[0])
        setup.check_idle()


def test_while_running() -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        setup.pairing.submit(request(count=50, deadline_s=5.0))
        setup.pairing.submit(request("patient", 12))
        events = setup.pairing.step() + setup.pairing.step() + setup.pairing.step()
        clock.advance(5.0)
        events += setup.pairing.step()
        check_deadline(events)
        stream = by_request(events)["a"]
        assert tokens_of(stream) == list(reference("v3", PROMPT, 50).tokens[: len(stream) - 1])
        assert len(stream) > 2
        events += collect(setup.pairing)
        assert tokens_of(by_request(events)["patient"]) == list(reference("v3", PROMPT, 12).tokens)
        setup.check_idle()


def test_it_counts_from_submit_and_not_from_decode() -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request(deadline_s=5.0))
        clock.advance(3.0)
        setup.pairing.step()
        clock.advance(2.0)
        check_deadline(setup.pairing.step())


def test_requests_without_one_get_the_default() -> None:
    clock = VirtualClock()
    with local(clock=clock, config=pd.PairingConfig(default_deadline_s=5.0)) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request())
        setup.pairing.submit(request("patient", deadline_s=50.0))
        setup.pairing.step()
        clock.advance(5.0)
        events = setup.pairing.step()
        check_deadline(events)
        assert len(events) == 1


@pytest.mark.parametrize("where", ["queue", "granted"])
def test_wait_wakes_up_for_a_deadline(where: str) -> None:
    with local(policy=nobody if where == "queue" else pd.policy.least_tokens) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request(deadline_s=0.3))
        events = setup.pairing.step()
        started = time.monotonic()
        while not events:
            setup.pairing.wait(TIMEOUT_S)
            events = setup.pairing.step()
        assert time.monotonic() - started < TIMEOUT_S
        check_deadline(events)


def test_wait_looks_again_when_decode_is_later_than_the_pairing() -> None:
    """Decode counts the remaining time from when it gets the request, a moment after the pairing looked."""
    clock = VirtualClock()
    with local(clock=clock) as setup:
        hang(setup.prefills[0])
        decode = setup.decodes[0]
        submit = decode.submit

        def submit_later(one: pd.Request, **more: Any) -> None:
            submit(attrs.evolve(one, deadline_s=(one.deadline_s or 0.0) + 0.001), **more)

        decode.submit = submit_later  # type: ignore[method-assign]
        setup.pairing.submit(request(deadline_s=5.0))
        setup.pairing.step()
        clock.advance(5.0)
        assert setup.pairing.step() == []
        started = time.monotonic()
        setup.pairing.wait(TIMEOUT_S)
        assert time.monotonic() - started < TIMEOUT_S
        clock.advance(0.001)
        check_deadline(setup.pairing.step())


# -- a decode that does not answer --------------------------------------------------------------------------------


@pytest.mark.parametrize("takes", [True, False])
def test_a_frozen_decode_keeps_nobody_beyond_a_quarter_of_a_second(takes: bool) -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        hang(setup.decodes[0], takes=takes)
        setup.pairing.submit(request(deadline_s=5.0))
        setup.pairing.submit(request("patient"))
        setup.pairing.step()
        clock.advance(5.0 + DEADLINE_GRACE_S / 2)
        assert setup.pairing.step() == []
        check_wakes_in(setup.pairing, DEADLINE_GRACE_S / 2)
        clock.advance(DEADLINE_GRACE_S / 2)
        events = setup.pairing.step()
        check_deadline(events)
        assert len(events) == 1
        assert DEADLINE_GRACE_S <= 0.25
        recover(setup.decodes[0])
        events = collect(setup.pairing)
        assert {event.request_id for event in events} == {"patient"}  # its late events are dropped
        setup.check_idle()
        setup.pairing.submit(request())  # whose id is free again
        assert tokens_of(collect(setup.pairing)) == list(reference("v3", PROMPT, 5).tokens)


def test_a_decode_in_time_tells_the_deadline_itself() -> None:
    """Decode knows more, such as what was cached and when the first token came."""
    clock = VirtualClock()
    with local(clock=clock) as setup:
        seen = watch(setup.decodes[0])
        setup.pairing.submit(request(count=50, deadline_s=5.0))
        setup.pairing.step()
        clock.advance(5.0 + DEADLINE_GRACE_S)
        check_deadline(setup.pairing.step())
        assert [event.finish_reason for event in seen if isinstance(event, pd.TokenEvent)] == [pd.FinishReason.DEADLINE]


def test_the_id_of_a_request_that_decode_still_has_can_be_used_again() -> None:
    """The new request waits until decode has released the old one, and does not get its answer."""
    clock = VirtualClock()
    with local(clock=clock) as setup:
        setup.pairing.submit(request(count=50, deadline_s=5.0))
        setup.pairing.step()
        hang(setup.decodes[0], takes=False)
        clock.advance(5.0 + DEADLINE_GRACE_S)
        check_deadline(setup.pairing.step())
        other = prompt_of(9, seed=1)
        setup.pairing.submit(request(prompt=other))
        setup.pairing.submit(request("b"))
        setup.pairing.step()
        assert setup.pairing.stats.num_queued_requests == 1  # and delays no other request
        recover(setup.decodes[0])
        streams = by_request(collect(setup.pairing))
        assert tokens_of(streams["a"]) == list(reference("v3", other, 5).tokens)
        assert tokens_of(streams["b"]) == list(reference("v3", PROMPT, 5).tokens)
        setup.check_idle()
