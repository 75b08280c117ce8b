"""A prefill and a decode that live and have lost each other: others take over, and they serve again when they meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.pairing.ports import LOOK_S
from pdinfer.pairing.queue import LINK_WAIT_S
from pdinfer.scheduling import decode as scheduling
from pdinfer.testing import VirtualClock
from tests.e2e import setups
from tests.e2e.setups import (
    PROMPT,
    Setup,
    by_request,
    check_wakes_in,
    collect,
    hang,
    recover,
    reference,
    request,
    step_until,
    tokens_of,
    watch,
)
from tests.unit.kv.channel.channels import link_to
from tests.waiting import wait_until

EXPECTED = list(reference("v3", PROMPT, 5).tokens)


def several(num_prefill: int, num_decode: int, **more: Any) -> Setup:
    return setups.several(num_prefill, num_decode, "unix", **more)


def cut(prefill: pd.PrefillEngine, decode: pd.DecodeEngine) -> Callable[[], None]:
    """Breaks the link and keeps it broken until the returned function is called."""
    transport = prefill.channel.transport
    dial = transport.connect

    def refuse(endpoints: Sequence[str], *, timeout_s: float) -> object:
        if tuple(endpoints) == decode.address.endpoints:
            raise pd.TransferError("the cable is unplugged")
        return dial(endpoints, timeout_s=timeout_s)

    transport.connect = refuse  # type: ignore[method-assign,assignment]
    link = link_to(prefill.channel, decode.address)
    transport.fence(link)
    wait_until(lambda: not decode.channel.connected(prefill.address))
    time.sleep(LOOK_S)

    def mend() -> None:
        transport.connect = dial  # type: ignore[method-assign]
        wait_until(lambda: decode.channel.connected(prefill.address) and prefill.channel.connected(decode.address))
        time.sleep(LOOK_S)

    return mend


# -- what is chosen -----------------------------------------------------------------------------------------------


def test_a_pair_without_a_link_is_not_chosen_until_it_is_back() -> None:
    with several(2, 2, policy=pd.policy.round_robin) as setup:
        mend = cut(setup.prefills[0], setup.decodes[0])
        pair = setup.prefills[0].address, setup.decodes[0].address
        seen = [watch(decode) for decode in setup.decodes]

        def serve(round_name: str) -> set[tuple[pd.PeerAddress, pd.PeerAddress]]:
            """The pairs that some requests were given to."""
            for events in seen:
                events.clear()
            for number in range(8):
                setup.pairing.submit(request(f"{round_name}/{number}"))
            streams = by_request(collect(setup.pairing))
            assert [tokens_of(stream) for stream in streams.values()] == [EXPECTED] * 8
            grants = [event.grant for events in seen for event in events if isinstance(event, pd.Granted)]
            return {(grant.writers[0], grant.destinations[0]) for grant in grants}

        assert pair not in serve("down")
        assert setup.pairing.stats.links_down == (pair,)
        mend()
        assert pair in serve("up")
        assert setup.pairing.stats.links_down == ()
        assert setup.pairing.stats.num_reroutes == 0
        setup.check_idle()


# -- what was under way -------------------------------------------------------------------------------------------


def test_a_request_whose_prefill_lost_its_decode_goes_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "WRITER_GRACE_S", 3600.0)  # so that nothing waits for the one that was lost
    with several(2, 1, policy=pd.policy.round_robin) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request("a", 12))
        setup.pairing.step()
        mend = cut(setup.prefills[0], setup.decodes[0])
        events = collect(setup.pairing)
        assert tokens_of(events) == list(reference("v3", PROMPT, 12).tokens)
        assert (setup.pairing.stats.num_reroutes, setup.pairing.stats.num_retries) == (1, 1)
        recover(setup.prefills[0])
        mend()
        setup.check_idle()


def test_a_running_request_is_given_another_prefill_before_it_needs_one() -> None:
    with several(2, 1, policy=pd.policy.round_robin) as setup:
        setup.pairing.submit(request("a", 50))
        events = step_until(setup.pairing, len)
        mend = cut(setup.prefills[0], setup.decodes[0])
        events += setup.pairing.step() + setup.pairing.step()
        (sequence,) = setup.decodes[0].snapshot().running
        assert sequence.writers == (setup.prefills[1].address,)
        events += collect(setup.pairing)
        assert tokens_of(events) == list(reference("v3", PROMPT, 50).tokens)
        mend()


def test_with_a_single_prefill_requests_wait_for_the_link() -> None:
    with several(1, 1) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request("under way"))
        setup.pairing.step()
        mend = cut(setup.prefills[0], setup.decodes[0])
        setup.pairing.submit(request("in the line"))
        recover(setup.prefills[0])
        events = [event for _ in range(10) for event in setup.pairing.step()]
        assert (events, setup.pairing.stats.num_queued_requests) == ([], 1)
        mend()
        streams = by_request(collect(setup.pairing))
        assert {name: tokens_of(stream) for name, stream in streams.items()} == dict.fromkeys(
            ("under way", "in the line"), EXPECTED
        )
        setup.check_idle()


def test_nothing_waits_longer_for_a_link_than_its_deadline_or_a_while() -> None:
    clock = VirtualClock()
    with several(1, 1, clock=clock) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request("under way"))
        setup.pairing.submit(request("under way, in a hurry", deadline_s=2.0))
        setup.pairing.step()
        cut(setup.prefills[0], setup.decodes[0])
        recover(setup.prefills[0])
        setup.pairing.submit(request("in the line"))
        setup.pairing.submit(request("in the line, in a hurry", deadline_s=2.0))
        clock.advance(LOOK_S)
        events = [event for _ in range(5) for event in setup.pairing.step()]
        assert events == []
        clock.advance(2.0)
        streams = by_request(setup.pairing.step())
        assert {name: stream[-1].finish_reason for name, stream in streams.items()} == dict.fromkeys(
            ("under way, in a hurry", "in the line, in a hurry"), pd.FinishReason.DEADLINE
        )
        clock.advance(LINK_WAIT_S - 2.5)
        assert setup.pairing.step() == []
        check_wakes_in(setup.pairing, 0.5)
        clock.advance(0.5)
        streams = by_request(setup.pairing.step())
        assert set(streams) == {"under way", "in the line"}
        for stream in streams.values():
            assert stream[-1].finish_reason is pd.FinishReason.FAILED
            assert "connected" in str(stream[-1].error)
        setup.check_idle()
