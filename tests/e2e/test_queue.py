"""Which request waits for which: none waits for ports it does not need, and a stream waits for no backlog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.pairing.queue import LINK_WAIT_S
from pdinfer.testing import VirtualClock
from tests.e2e.setups import (
    PROMPT,
    Setup,
    by_request,
    collect,
    hang,
    join,
    local,
    model_of,
    pool_of,
    prompt_of,
    recover,
    reference,
    request,
    step_until,
    tokens_of,
    watch,
)

BIG = request("big", 5, prompt=prompt_of(60))


def uneven(**more: Any) -> Setup:
    """Return a pairing with a decode that can hold every request, and one that cannot hold BIG."""
    pools = [pool_of(model_of(), num_pages=count) for count in (64, 64, 8)]
    return join(model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:], **more)


def grants_of(setup: Setup) -> list[list[pd.types.Event]]:
    return [watch(decode) for decode in setup.decodes]


def ended(events: Sequence[pd.TokenEvent]) -> list[str]:
    return [event.request_id for event in events if event.finish_reason is not None]


def steps(setup: Setup, count: int) -> list[pd.TokenEvent]:
    return [event for _ in range(count) for event in setup.pairing.step()]


# -- behind one that cannot go ------------------------------------------------------------------------------------


def test_nobody_waits_behind_a_request_whose_only_decode_is_leaving() -> None:
    with uneven(config=pd.PairingConfig(port_wait_s=30.0), clock=VirtualClock()) as setup:
        setup.pairing.submit(request("keeps it here", 50))  # too long for the other decode
        steps(setup, 2)
        setup.pairing.submit(attrs.evolve(BIG, priority=1))
        setup.pairing.submit(request("small"))
        setup.pairing.remove(setup.decodes[0], drain_s=30.0)
        assert ended(setup.pairing.step()) == ["small", "keeps it here"]
        assert setup.pairing.num_unfinished == 1


def test_nobody_waits_behind_a_request_whose_only_link_is_down() -> None:
    clock = VirtualClock()
    with uneven(clock=clock) as setup:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        prefill.disconnect(decode.address)
        setup.pairing.submit(attrs.evolve(BIG, priority=1))
        setup.pairing.submit(request("small"))
        assert ended(steps(setup, 12)) == ["small"]
        stats = setup.pairing.stats
        assert (stats.num_queued_requests, stats.links_down) == (1, ((prefill.address, decode.address),))
        prefill.connect(decode.address)
        clock.advance(LINK_WAIT_S / 2)
        assert ended(collect(setup.pairing)) == ["big"]


def test_a_full_decode_idles_no_other_and_who_waits_for_it_gets_its_first_place() -> None:
    """No later request is sent where the big one has to go."""
    engine = pd.EngineConfig(max_running_requests=1)
    with uneven(engine=engine, config=pd.PairingConfig(max_queued_per_decode=1)) as setup:
        large, small = grants_of(setup)
        for name in ("running", "queued"):
            setup.pairing.submit(attrs.evolve(BIG, request_id=name))
            steps(setup, 1)
        setup.pairing.submit(BIG)
        for number in range(8):
            setup.pairing.submit(request(str(number), 2))
        streams = by_request(collect(setup.pairing))
        assert len(streams) == 11
        granted = [
            [event.request.request_id for event in seen if isinstance(event, pd.Granted)] for seen in (large, small)
        ]
        assert granted[0][:3] == ["running", "queued", "big"]
        assert len(granted[1]) >= 2
        assert granted[1][:2] == ["0", "1"]


def test_of_requests_for_the_same_ports_none_is_overtaken() -> None:
    """When a policy lets a request wait, all behind it wait that need the same ports, without being asked about."""
    asked: list[int] = []

    def never(shape: pd.types.RequestShape, prefills: Sequence[Any], decodes: Sequence[Any]) -> None:
        asked.append(len(decodes))

    with uneven(policy=never) as setup:
        for number in range(50):
            setup.pairing.submit(request(str(number)))
        for number in range(3):
            setup.pairing.submit(attrs.evolve(BIG, request_id=f"big {number}", priority=1))
        assert setup.pairing.step() == []
        assert asked == [1, 2]  # once for the big ones, once for all others


# -- priorities ---------------------------------------------------------------------------------------------------


def full_of_low(**more: Any) -> Setup:
    """Return a pairing with a queue of three requests of priorities 0, -1 and -1, for ports that do nothing."""
    setup = local(config=pd.PairingConfig(max_queued_requests=3), clock=VirtualClock(), **more)
    for name, priority in {"a": 0, "b": -1, "c": -1}.items():
        setup.pairing.submit(request(name, priority=priority))
    return setup


@pytest.mark.parametrize("seen", [False, True])
def test_a_high_priority_takes_the_place_of_the_youngest_of_the_lowest(seen: bool) -> None:
    def patient(shape: Any, prefills: Sequence[Any], decodes: Sequence[Any]) -> pd.types.Choice | None:
        return pd.policy.least_tokens(shape, prefills, decodes) if go else None

    go = False
    with full_of_low(policy=patient) as setup:
        events = setup.pairing.step() if seen else []
        for name in "xyz":
            setup.pairing.submit(request(name, priority=5))
        with pytest.raises(pd.Overloaded, match="already holds 3"):
            setup.pairing.submit(request("late", priority=5))
        with pytest.raises(pd.Overloaded):
            setup.pairing.submit(request("low", priority=-9))
        assert setup.pairing.stats.refused == (("the queue is full", 2),)
        events += setup.pairing.step()
        # in the order in which they gave way, or in which they came when none had a place yet
        assert ended(events) == (["c", "b", "a"] if seen else ["a", "b", "c"])
        for event in events:
            assert (event.finish_reason, event.token) == (pd.FinishReason.FAILED, None)
            assert isinstance(event.error, pd.Overloaded)
            assert "one of priority 5 took the place of this one" in str(event.error)
        go = True
        assert sorted(ended(collect(setup.pairing))) == ["x", "y", "z"]
        assert dict(setup.pairing.stats.ended) == {pd.FinishReason.FAILED: 3, pd.FinishReason.LENGTH: 3}


def test_who_has_left_the_queue_meanwhile_is_not_displaced() -> None:
    late_ids: list[str] = []

    def late(*loads: Any) -> pd.types.Choice | None:
        """Submit after the step has taken its inbox."""
        while late_ids:
            setup.pairing.submit(request(late_ids.pop(), priority=5))
        return pd.policy.least_tokens(*loads)

    with full_of_low(policy=late) as setup:
        late_ids.append("x")
        assert sorted(ended(collect(setup.pairing))) == ["a", "b", "c", "x"]
        assert dict(setup.pairing.stats.ended) == {pd.FinishReason.LENGTH: 4}


def test_a_stream_and_an_equal_priority_displace_nobody_and_are_not_displaced() -> None:
    config = pd.PairingConfig(max_queued_requests=2)
    with local(config=config, policy=lambda *_: None) as setup:
        output = reference("v3", PROMPT, 3).tokens
        setup.pairing.submit(request("stream", 12, output=output, priority=-5))
        setup.pairing.submit(request("a"))
        with pytest.raises(pd.Overloaded):
            setup.pairing.submit(request("b"))
        setup.pairing.submit(request("c", priority=1))
        assert ended(setup.pairing.step()) == ["a"]


def test_a_displaced_request_that_was_cancelled_ends_once() -> None:
    with full_of_low(policy=lambda *_: None) as setup:
        setup.pairing.cancel("c")
        setup.pairing.submit(request("x", priority=5))
        setup.pairing.cancel("c")
        assert ended(setup.pairing.step()) == ["c"]
        assert setup.pairing.num_unfinished == 3


def test_one_that_is_cancelled_has_one_place_until_it_ends() -> None:
    config = pd.PairingConfig(max_queued_requests=2)
    with local(config=config, clock=VirtualClock(), policy=lambda *_: None) as setup:
        setup.pairing.submit(request("a"))
        setup.pairing.step()
        setup.pairing.cancel("a")
        setup.pairing.submit(request("b"))
        with pytest.raises(pd.Overloaded):
            setup.pairing.submit(request("c"))


def test_a_low_priority_runs_though_high_ones_never_end() -> None:
    """It waits at most OLDEST_EVERY turns after PATIENCE_S at each engine."""
    clock = VirtualClock()
    engine = pd.EngineConfig(max_running_requests=1, chunked_prefill_size=4)
    config = pd.PairingConfig(max_queued_per_decode=2)
    with local(engine=engine, config=config, clock=clock) as setup:
        setup.pairing.submit(request("low", 2, priority=-3))
        events: list[pd.TokenEvent] = []
        for number in range(120):
            while setup.pairing.num_unfinished < 6:
                setup.pairing.submit(request(f"high {number} {setup.pairing.num_unfinished}", 2, priority=9))
            events += setup.pairing.step()
            clock.advance(1.0)
            if "low" in ended(events):
                break
        assert "low" in ended(events)
        assert len(ended(events)) > 20


# -- fair shares --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fair", [False, True])
def test_with_fair_shares_a_tenant_does_not_wait_for_all_of_another(fair: bool) -> None:
    engine = pd.EngineConfig(max_running_requests=1)
    config = pd.PairingConfig(fair_share=fair, max_queued_per_decode=1)
    with local(engine=engine, config=config) as setup:
        for number in range(8):
            setup.pairing.submit(request(f"many {number}", 1, cache_salt=b"many"))
        for number in range(2):
            setup.pairing.submit(request(f"few {number}", 1, cache_salt=b"few"))
        order = ended(collect(setup.pairing))
        assert order.index("few 1") == (3 if fair else 9)


# -- streams that were retracted ----------------------------------------------------------------------------------


def test_a_retracted_stream_does_not_wait_behind_a_backlog_of_its_prefill() -> None:
    """Its largest gap, in steps, is close to the gap without a backlog."""
    gaps = {}
    for backlog in (0, 12):
        pools = [pool_of(model_of(), num_pages=count) for count in (256, 20, 256)]
        engine = pd.EngineConfig(chunked_prefill_size=8)
        place = 0

        def placed(shape: Any, prefills: Sequence[Any], decodes: Sequence[Any]) -> pd.types.Choice | None:
            here = [load for load in decodes if load.address == setup.decodes[place].address]  # noqa: B023 - asked at once
            return pd.policy.least_tokens(shape, prefills, here)

        more: dict[str, Any] = {"engine": engine, "policy": placed}
        with join(model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:], **more) as setup:
            for name in "ab":  # they do not fit together: one is retracted
                setup.pairing.submit(request(name, 50, cache_salt=name.encode()))
            events = step_until(setup.pairing, lambda events: len(by_request(events)) == 2)
            place = 1
            for number in range(backlog):
                setup.pairing.submit(request(f"new {number}", 2, prompt=prompt_of(80, seed=number)))
            last, widest, step = dict.fromkeys("ab", 0), 0, 0
            while len({"a", "b"} & {*ended(events)}) < 2:
                step += 1
                for event in setup.pairing.step():
                    if event.request_id in last:
                        widest = max(widest, step - last[event.request_id])
                        last[event.request_id] = step
                        events.append(event)
            roomy = setup.decodes[1].snapshot()
            assert sum(one.attempts for one in (*roomy.waiting, *roomy.granted, *roomy.running)) <= backlog
            for name in "ab":
                expected = list(reference("v3", PROMPT, 50).tokens)
                assert tokens_of(by_request(events)[name]) == expected
            gaps[backlog] = widest
    assert gaps[0] > 3  # one was retracted
    assert gaps[12] <= gaps[0] + 3


def test_a_hung_prefill_is_no_reason_to_lose_a_place() -> None:
    with local() as setup:
        hang(setup.prefills[0])
        for name in "ab":
            setup.pairing.submit(request(name))
        assert steps(setup, 3) == []
        recover(setup.prefills[0])
        assert sorted(ended(collect(setup.pairing))) == ["a", "b"]
