"""Ports are chosen by a policy, join and leave during a run, and may break without taking others along."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.pairing import ports
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.testing import VirtualClock
from pdinfer.types import Choice, RequestShape
from tests.e2e.setups import (
    PROMPT,
    Setup,
    broken,
    by_request,
    check_wakes_in,
    collect,
    greedy,
    hang,
    join,
    local,
    model_of,
    pool_of,
    prompt_of,
    recover,
    reference,
    request,
    several,
    step_until,
    tokens_of,
    watch,
)
from tests.waiting import wait_until

EXPECTED = list(reference("v3", PROMPT, 5).tokens)


def spread(setup: Setup, requests: Sequence[pd.Request]) -> tuple[list[int], list[int]]:
    """Submit all requests before the first step, and return how many each prefill and each decode got."""
    seen = [watch(decode) for decode in setup.decodes]
    for one in requests:
        setup.pairing.submit(one)
    collect(setup.pairing)
    grants = [[event.grant for event in events if isinstance(event, pd.Granted)] for events in seen]
    writers = Counter(grant.writers[0] for some in grants for grant in some)
    return [writers[prefill.address] for prefill in setup.prefills], [len(some) for some in grants]


def check_streams(events: Sequence[pd.TokenEvent], *names: str, count: int = 5) -> None:
    """Check that those requests got the right tokens."""
    streams = by_request(events)
    expected = list(reference("v3", PROMPT, count).tokens)
    assert {name: tokens_of(streams[name]) for name in names} == dict.fromkeys(names, expected)


def check_failed(events: Sequence[pd.TokenEvent], *names: str) -> None:
    streams = by_request(events)
    for name in names:
        last = streams[name][-1]
        assert (last.finish_reason, last.token) == (pd.FinishReason.FAILED, None)
        assert isinstance(last.error, pd.TransferError)


# -- choosing -----------------------------------------------------------------------------------------------------


def test_round_robin_takes_every_port_in_turn() -> None:
    with several(2, 3, policy=pd.policy.round_robin) as setup:
        assert spread(setup, [request(str(number)) for number in range(12)]) == ([6, 6], [4, 4, 4])
        setup.check_idle()


def test_least_tokens_keeps_away_from_long_prompts() -> None:
    long = request("long", prompt=prompt_of(80))
    with several(2, 2) as setup:
        prefills, decodes = spread(setup, [long, *(request(str(number), prompt=prompt_of(10)) for number in range(8))])
    # the long prompt weighs as much as all eight others
    assert prefills == [1, 8]
    assert decodes == [1, 8]


def test_least_tokens_counts_what_a_pool_can_hold() -> None:
    pools = [pool_of(model_of(), num_pages=count) for count in (64, 20, 60)]
    with join(model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:]) as setup:
        _, decodes = spread(setup, [request(str(number)) for number in range(8)])
    assert decodes == [2, 6]


def test_a_policy_of_ones_own_sees_loads_and_may_say_wait() -> None:
    seen: list[tuple[RequestShape, Sequence[PrefillLoad], Sequence[DecodeLoad]]] = []

    def stubborn(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
        seen.append((shape, prefills, decodes))
        return None if len(seen) < 3 else Choice(prefill=prefills[1].address, decode=decodes[0].address)

    with several(2, 2, policy=stubborn) as setup:
        setup.pairing.submit(request(priority=3))
        events = setup.pairing.step() + setup.pairing.step()
        assert (events, setup.pairing.num_unfinished) == ([], 1)
        check_streams(collect(setup.pairing), "a")
        shape, prefills, decodes = seen[0]
        assert (shape.num_prompt_tokens, shape.max_new_tokens, shape.priority) == (len(PROMPT), 5, 3)
        assert [load.address for load in prefills] == [prefill.address for prefill in setup.prefills]
        assert [load.num_total_pages for load in decodes] == [64, 64]
        pairs = {(prefill.address, decode.address) for prefill in setup.prefills for decode in setup.decodes}
        assert {(link.prefill, link.decode) for link in shape.links} == pairs


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_a_policy_sees_how_fast_a_link_was(transport: str) -> None:
    speeds: list[float | None] = []

    def watching(shape: RequestShape, *loads: Any) -> Choice | None:
        speeds.extend(link.bytes_per_s for link in shape.links)
        return pd.policy.least_tokens(shape, *loads)

    with several(1, 1, transport, policy=watching) as setup:
        for number in range(2):
            setup.pairing.submit(request(str(number)))
            check_streams(collect(setup.pairing), str(number))
            time.sleep(ports.LOOK_S)
    assert speeds[0] is None
    assert speeds[-1] is not None
    assert speeds[-1] > 0


def test_a_request_goes_where_it_fits() -> None:
    pools = [pool_of(model_of(), num_pages=count) for count in (64, 8, 64)]
    with join(
        model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:], policy=pd.policy.round_robin
    ) as setup:
        large = [request(str(number), prompt=prompt_of(40)) for number in range(4)]
        assert spread(setup, large) == ([4], [0, 4])


# -- joining and leaving ------------------------------------------------------------------------------------------


def test_ports_join_during_a_run() -> None:
    with several(2, 2) as setup:
        pairing = setup.paired_anew(policy=pd.policy.round_robin)
        late_prefill, late_decode = setup.prefills.pop(), setup.decodes.pop()
        for late in (late_prefill, late_decode):
            pairing.remove(late, drain_s=0.0)
        seen = watch(late_decode)
        pairing.submit(request("early", 12))
        events = pairing.step() + pairing.step()
        pairing.add(late_prefill)
        pairing.add(late_decode)
        for number in range(4):
            pairing.submit(request(str(number)))
        events += collect(pairing)
        pairing.close()
    check_streams(events, "early", count=12)
    check_streams(events, *"0123")
    grants = [event.grant for event in seen if isinstance(event, pd.Granted)]
    assert len(grants) == 2
    assert {grant.writers[0] for grant in grants} <= {late_prefill.address, setup.prefills[0].address}


def test_a_port_of_another_model_does_not_join_and_the_others_go_on() -> None:
    other = model_of(seed=5)
    with several(1, 1, "tcp") as setup:
        setup.pairing.submit(request())
        stranger = pd.DecodeEngine(other, pd.KVChannel(pool_of(other), pd.kv.SocketTransport()))
        with stranger, pytest.raises(pd.LayoutMismatch) as caught:
            setup.pairing.add(stranger)
        assert [name for name, _, _ in caught.value.fields] == ["weights_id"]
        check_streams(collect(setup.pairing), "a")


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_a_prefill_removed_before_its_hand_off_hands_its_requests_to_another(transport: str) -> None:
    with several(2, 1, transport, policy=pd.policy.round_robin) as setup:
        leaving = setup.prefills[0]
        hang(leaving)
        for number in range(4):
            setup.pairing.submit(request(str(number)))
        events = setup.pairing.step()
        assert leaving.load().num_queued_requests == 2
        setup.pairing.remove(leaving, drain_s=0.0)
        events += collect(setup.pairing)
        check_streams(events, *"0123")
        # the pages that it might still write are not free before it says that it stopped
        pool = setup.decodes[0].channel.pool
        assert pool.num_granted == 6
        recover(leaving)
        leaving.step()
        setup.check_idle()


def test_a_prefill_removed_while_its_requests_wait_for_pages_is_replaced() -> None:
    with several(2, 1, engine=pd.EngineConfig(max_running_requests=1), policy=pd.policy.round_robin) as setup:
        for number in range(4):
            setup.pairing.submit(request(str(number)))
        events = setup.pairing.step() + setup.pairing.step()
        setup.pairing.remove(setup.prefills[0], drain_s=0.0)
        setup.prefills[0].close()
        check_streams(events + collect(setup.pairing), *"0123")


def test_a_prefill_that_left_is_replaced_when_its_request_is_retracted() -> None:
    pools = [pool_of(model_of(), num_pages=count) for count in (64, 64, 20)]
    with join(
        model_of(), "loopback", prefill_pools=pools[:2], decode_pools=pools[2:], policy=pd.policy.round_robin
    ) as setup:
        seen = watch(setup.decodes[0])
        for name in "ab":  # with one salt they would share pages, and both would fit
            setup.pairing.submit(request(name, 50, cache_salt=name.encode()))
        events = [event for _ in range(4) for event in setup.pairing.step()]
        assert {event.request_id for event in events} == {"a", "b"}
        setup.pairing.remove(setup.prefills[1], drain_s=0.0)
        setup.prefills[1].close()
        check_streams(events + collect(setup.pairing), *"ab", count=50)
        assert sum(isinstance(event, pd.Granted) for event in seen) > 2


def test_a_removed_prefill_may_finish_what_it_has() -> None:
    with several(2, 1, engine=pd.EngineConfig(chunked_prefill_size=2), policy=pd.policy.round_robin) as setup:
        seen = watch(setup.decodes[0])
        setup.pairing.submit(request("a"))
        setup.pairing.step()
        setup.pairing.remove(setup.prefills[0], drain_s=30.0)
        assert (setup.prefills[0].num_unfinished, setup.pairing.stats.num_retries) == (0, 0)
        for name in "bc":
            setup.pairing.submit(request(name))
        check_streams(collect(setup.pairing), *"abc")
        writers = [event.grant.writers[0] for event in seen if isinstance(event, pd.Granted)]
        assert writers == [prefill.address for prefill in (setup.prefills[0], setup.prefills[1], setup.prefills[1])]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_requests_of_a_removed_decode_go_on_at_another(num_steps: int) -> None:
    with several(1, 2, policy=pd.policy.round_robin) as setup:
        for number in range(4):
            setup.pairing.submit(request(str(number), 12))
        events = [event for _ in range(num_steps) for event in setup.pairing.step()]
        setup.pairing.remove(setup.decodes[0], drain_s=0.0)
        events += collect(setup.pairing)
        check_streams(events, *"0123", count=12)
        assert setup.pairing.stats.num_moved == 2
        setup.pairing.submit(request("after"))
        check_streams(collect(setup.pairing), "after")
        setup.check_idle()


def test_a_removed_decode_may_finish_what_it_has() -> None:
    with several(1, 2, policy=pd.policy.round_robin) as setup:
        for number in range(4):
            setup.pairing.submit(request(str(number)))
        setup.pairing.remove(setup.decodes[0], drain_s=30.0)
        check_streams(collect(setup.pairing), *"0123")
        setup.check_idle()


def test_without_a_prefill_what_runs_goes_on_and_the_rest_fails() -> None:
    with several(1, 1) as setup:
        setup.pairing.submit(request("running", 12))
        events = setup.pairing.step() + setup.pairing.step()
        setup.pairing.remove(setup.prefills[0], drain_s=0.0)
        setup.pairing.submit(request("late"))
        events += collect(setup.pairing)
        check_streams(events, "running", count=12)
        check_failed(events, "late")
        assert "no prefill port is left" in str(by_request(events)["late"][-1].error)
        setup.pairing.add(setup.prefills[0])
        setup.pairing.submit(request("again"))
        check_streams(collect(setup.pairing), "again")


def test_a_request_that_fits_no_port_any_more_fails_and_holds_nobody_up() -> None:
    pools = [pool_of(model_of(), num_pages=count) for count in (64, 8, 64)]
    with join(model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:]) as setup:
        setup.pairing.submit(request("large", prompt=prompt_of(60), priority=1))
        setup.pairing.submit(request("small"))
        setup.pairing.remove(setup.decodes[1], drain_s=0.0)
        events = collect(setup.pairing)
    check_streams(events, "small")
    check_failed(events, "large")


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("where", ["queue", "decode"])
def test_with_a_side_gone_requests_fail_at_once_unless_they_may_wait_for_a_port(side: str, where: str) -> None:
    for port_wait_s in (0.0, 30.0):
        clock = VirtualClock()
        more = {"config": pd.PairingConfig(port_wait_s=port_wait_s), "clock": clock}
        with several(2, 2, **more) as setup:
            setup.pairing.remove(setup.prefills[1], drain_s=0.0)
            setup.pairing.remove(setup.decodes[1], drain_s=0.0)
            hang(setup.prefills[0])
            if where == "decode":
                setup.pairing.submit(request())
                setup.pairing.step()
            (leaving, joining) = setup.prefills if side == "prefill" else setup.decodes
            setup.pairing.remove(leaving, drain_s=0.0)
            if where == "queue":
                setup.pairing.submit(request())
            events = setup.pairing.step() + setup.pairing.step()
            if port_wait_s == 0.0:
                check_failed(events, "a")
                assert f"no {side} port is left" in str(events[-1].error)
                continue
            assert events == []
            clock.advance(port_wait_s - 0.125)
            assert setup.pairing.step() == []
            check_wakes_in(setup.pairing, 0.125)
            recover(setup.prefills[0])
            setup.pairing.add(joining)
            check_streams(collect(setup.pairing), "a")
            setup.pairing.remove(joining, drain_s=0.0)
            setup.pairing.submit(request("late"))
            assert setup.pairing.step() == []
            clock.advance(30.0)
            check_failed(setup.pairing.step(), "late")


def test_a_port_joins_though_another_is_found_to_be_lost_while_it_does() -> None:
    with several(1, 2, "tcp") as setup:
        dead, joining = setup.decodes
        setup.pairing.remove(joining, drain_s=0.0)
        dead.close()
        dead.step = broken  # type: ignore[method-assign,assignment]
        newcomer = pd.PrefillEngine(model_of(), pd.KVChannel(pool_of(model_of()), pd.kv.SocketTransport()))
        with newcomer:
            setup.pairing.add(newcomer)
            assert setup.pairing.stats.num_ports_lost == 1
            setup.pairing.add(joining)
            setup.pairing.submit(request())
            check_streams(collect(setup.pairing), "a")


def test_a_port_that_cannot_be_reached_by_a_living_one_does_not_join() -> None:
    with several(1, 1, "tcp") as setup:
        with pd.DecodeEngine(model_of(), pd.KVChannel(pool_of(model_of()), pd.kv.SocketTransport())) as unreachable:
            unreachable.channel.close()
            with pytest.raises(pd.TransferError):
                setup.pairing.add(unreachable)
        assert setup.pairing.stats.num_ports_lost == 0
        setup.pairing.submit(request())
        check_streams(collect(setup.pairing), "a")


def test_lost_ports_are_named_and_the_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MAX_PORTS_LOST", 3)
    clock = VirtualClock()
    with several(4, 2, clock=clock) as setup:
        dying = [*setup.prefills[1:], setup.decodes[1]]
        for number, engine in enumerate(dying):

            def fail(number: int = number) -> list[object]:
                raise RuntimeError(f"device {number}\nfell \x1b[31moff")

            engine.step = fail  # type: ignore[method-assign,assignment]
            setup.pairing.step()
            clock.advance(10.0)
        stats = setup.pairing.stats
        assert stats.num_ports_lost == 4
        assert [lost.address for lost in stats.ports_lost] == [engine.address for engine in dying[1:]]
        assert [lost.role for lost in stats.ports_lost] == ["prefill", "prefill", "decode"]
        assert [lost.age_s for lost in stats.ports_lost] == [30.0, 20.0, 10.0]
        assert stats.ports_lost[0].reason == r"device 1\nfell \x1b[31moff"
        assert not any(lost.is_back for lost in stats.ports_lost)


# -- breaking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_a_prefill_that_breaks_is_closed_and_its_requests_go_to_another(transport: str) -> None:
    with several(2, 1, transport, policy=pd.policy.round_robin) as setup:
        hang(setup.prefills[0])
        for number in range(4):
            setup.pairing.submit(request(str(number)))
        events = setup.pairing.step()
        setup.prefills[0].step = broken  # type: ignore[method-assign,assignment]
        check_streams(events + collect(setup.pairing), *"0123")
        stats = setup.pairing.stats
        assert (stats.num_ports_lost, stats.num_reroutes, stats.num_retries) == (1, 2, 2)
        setup.prefills.pop(0)
        setup.check_idle()


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_when_the_only_prefill_breaks_its_requests_fail(transport: str) -> None:
    with several(1, 1, transport) as setup:
        setup.pairing.submit(request("running", 12))
        events = step_until(setup.pairing, len)
        hang(setup.prefills[0])
        setup.pairing.submit(request("waiting"))
        events += setup.pairing.step()
        setup.prefills[0].step = broken  # type: ignore[method-assign,assignment]
        events += collect(setup.pairing)
        check_streams(events, "running", count=12)
        check_failed(events, "waiting")
        setup.prefills.clear()
        setup.check_idle()


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_a_decode_that_breaks_fails_streams_that_may_not_go_on_and_no_others(transport: str) -> None:
    config = pd.PairingConfig(continue_elsewhere=False)
    with several(1, 2, transport, policy=pd.policy.round_robin, config=config) as setup:
        for number in range(4):
            setup.pairing.submit(request(str(number), 12))
        events = step_until(setup.pairing, lambda events: "0" in {event.request_id for event in events})
        begun = sorted({"0", "2"} & {event.request_id for event in events})  # "2" may land later
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        events += collect(setup.pairing)
        check_failed(events, *begun)
        errors = [str(by_request(events)[name][-1].error) for name in begun]
        assert all("the device fell off" in error and str(setup.decodes[0].address) in error for error in errors)
        ended = {pd.FinishReason.FAILED: len(begun), pd.FinishReason.LENGTH: 4 - len(begun)}
        assert dict(setup.pairing.stats.ended) == ended
        assert setup.pairing.stats.num_ports_lost == 1
        check_streams(events, *(set("0123") - {*begun}), count=12)
        setup.decodes.pop(0)
        setup.check_idle()


def test_when_the_only_decode_breaks_what_waits_in_the_queue_fails_too() -> None:
    config = pd.PairingConfig(max_queued_per_decode=1)
    with local(engine=pd.EngineConfig(max_running_requests=1), config=config) as setup:
        for number in range(4):
            setup.pairing.submit(request(str(number), 12, sampling=greedy(12)))
        events = setup.pairing.step()
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        check_failed(events + collect(setup.pairing), *"0123")
        assert setup.pairing.num_unfinished == 0


def test_an_id_is_free_again_only_when_decode_is_done_with_its_last_request() -> None:
    with several(2, 1) as setup:
        spare = setup.prefills[1]
        setup.pairing.remove(spare, drain_s=0.0)
        hang(setup.prefills[0])
        setup.pairing.submit(request())
        events = setup.pairing.step()
        setup.prefills[0].step = broken  # type: ignore[method-assign,assignment]
        events += step_until(setup.pairing, len)
        check_failed(events, "a")
        setup.pairing.add(spare)
        setup.pairing.submit(request())
        check_streams(collect(setup.pairing), "a")
        setup.prefills.pop(0)
        setup.check_idle()


def test_a_decode_that_breaks_while_it_is_removed_is_gone_all_the_same() -> None:
    with several(1, 2, policy=pd.policy.round_robin) as setup:
        for name in "ab":
            setup.pairing.submit(request(name))
        events = setup.pairing.step()
        setup.decodes[0].step = broken  # type: ignore[method-assign,assignment]
        setup.pairing.remove(setup.decodes[0], drain_s=0.0)
        events += collect(setup.pairing)
        check_streams(events, *"ab")


def test_a_port_that_is_lost_while_it_is_removed_does_not_come_back() -> None:
    with several(1, 2) as setup:
        leaving = setup.decodes[1]
        leaving.recover = lambda: True  # type: ignore[attr-defined]
        leaving.step = broken  # type: ignore[method-assign,assignment]
        setup.pairing.remove(leaving, drain_s=0.0)
        assert setup.pairing.stats.ports_away == ()
        setup.pairing.step()
        assert leaving not in setup.pairing.ports


def test_a_port_that_was_lost_before_it_is_removed_counts_once() -> None:
    with several(1, 2) as setup:
        lost = setup.decodes[1]
        lost.recover = lambda: False  # type: ignore[attr-defined]
        lost.step = broken  # type: ignore[method-assign,assignment]
        setup.pairing.step()
        assert setup.pairing.stats.ports_away == (lost.address,)
        setup.pairing.remove(lost, drain_s=0.0)
        assert (setup.pairing.stats.ports_away, setup.pairing.stats.num_ports_lost) == ((), 1)


def test_a_port_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    with several(1, 2) as setup:
        close = setup.decodes[0].close
        setup.decodes[0].close = broken  # type: ignore[method-assign,assignment]
        setup.pairing.submit(request())
        with pytest.raises(RuntimeError, match="fell off"):
            setup.pairing.close()
        assert [event.finish_reason for event in setup.pairing.step()] == [pd.FinishReason.CANCELLED]
        for engine in (setup.prefills[0], setup.decodes[1]):
            with pytest.raises(pd.TransferError):
                engine.connect(setup.decodes[0].address)
        setup.decodes[0].close = close  # type: ignore[method-assign]


# -- events that come late, as they do from another process -------------------------------------------------------


def delay(decode: pd.DecodeEngine) -> None:
    """Make each step return the events of the step before."""
    step, late = decode.step, []

    def delayed() -> list[pd.types.Event]:
        events = late[:]
        late[:] = step()
        return events

    decode.step = delayed  # type: ignore[method-assign]


def test_a_request_that_had_ended_when_its_prefill_broke_is_not_run_again() -> None:
    with several(2, 1, policy=pd.policy.round_robin) as setup:
        delay(setup.decodes[0])
        setup.pairing.submit(request(count=1))
        assert setup.pairing.step() == []
        assert setup.pairing.step() == []  # handed off, with the final event on its way to the pairing
        setup.prefills[0].step = broken  # type: ignore[method-assign,assignment]
        events = [event for _ in range(6) for event in setup.pairing.step()]
        check_streams(events, "a", count=1)
        setup.prefills.pop(0)
        wait_until(lambda: not setup.pairing.step() and not setup.decodes[0].num_unfinished)
        setup.check_idle()


def test_an_id_used_again_after_a_late_end_gets_its_own_answer() -> None:
    """Decode must not take the new request for the old one with another prefill."""
    with several(2, 1, policy=pd.policy.round_robin) as setup:
        delay(setup.decodes[0])
        setup.pairing.submit(request(count=1))
        assert setup.pairing.step() == []
        assert setup.pairing.step() == []
        setup.prefills[0].step = broken  # type: ignore[method-assign,assignment]
        step_until(setup.pairing, len)
        again = attrs.evolve(request(count=5), prompt=prompt_of(9, seed=1))
        setup.pairing.submit(again)
        expected = list(reference("v3", again.prompt, 5).tokens)
        assert tokens_of(collect(setup.pairing)) == expected
        setup.prefills.pop(0)
        wait_until(lambda: not setup.pairing.step() and not setup.decodes[0].num_unfinished)
        setup.check_idle()


def test_a_decode_takes_an_id_once() -> None:
    with several(1, 1) as setup:
        decode, prefill = setup.decodes[0], setup.prefills[0]
        for _ in range(2):
            decode.submit(request(), writers=[prefill.address])
        refused, granted = sorted(decode.step(), key=lambda event: isinstance(event, pd.Granted))
        assert isinstance(granted, pd.Granted)
        assert isinstance(refused, pd.Refused)
        assert "'a' is in use" in str(refused.error)
        decode.change_writers("nobody", writers=[prefill.address])
        decode.cancel("a")
        (ended,) = decode.step()
        assert isinstance(ended, pd.TokenEvent)


def test_a_request_that_waited_long_for_pages_outlives_its_prefill() -> None:
    """Decode notices the loss before its host does, and its wait for another prefill starts then."""
    clock = VirtualClock()
    with several(2, 1, "tcp", engine=pd.EngineConfig(max_running_requests=1), clock=clock) as setup:
        decode, (first, second) = setup.decodes[0], setup.prefills
        decode.submit(request("runs", 50), writers=[second.address])
        decode.submit(request("waits"), writers=[first.address])
        granted = decode.step()
        assert [event.request.request_id for event in granted] == ["runs"]
        clock.advance(3600.0)
        first.close()
        wait_until(lambda: not decode.channel.connected(first.address))
        assert decode.step() == []
        clock.advance(1.0)
        decode.change_writers("waits", writers=[second.address])
        assert decode.step() == []
        clock.advance(3600.0)
        assert decode.step() == []
        decode.cancel("runs")
        events = [event for _ in range(2) for event in decode.step()]
        assert [event.request.request_id for event in events if isinstance(event, pd.Granted)] == ["waits"]
