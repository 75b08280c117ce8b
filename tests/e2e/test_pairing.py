"""What a Pairing promises about requests: taking, cancelling, ending, resuming, stopping and counting them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.kv.transports.base import Transfer
from pdinfer.pairing.request import CANCEL_GRACE_S
from pdinfer.testing import VirtualClock, random_model, tiny_config, tiny_config_dict, write_checkpoint
from pdinfer.types import Handoff, HandoffStatus
from tests.e2e.setups import (
    PROMPT,
    by_request,
    collect,
    greedy,
    hang,
    local,
    model_of,
    prompt_of,
    recover,
    reference,
    request,
    tokens_of,
    watch,
)
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until


def only(events: list[pd.TokenEvent]) -> pd.TokenEvent:
    assert len(events) == 1, events
    return events[0]


# -- taking requests ----------------------------------------------------------------------------------------------


def test_a_checkpoint_becomes_a_working_pair_in_one_line(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict(num_hidden_layers=2))
    with pd.Pairing.local(tmp_path, dtype=torch.float32, cache=pd.CacheConfig(num_pages=8)) as pairing:
        assert tuple(tokens_of(pairing.generate([request()]))) == reference("v3", PROMPT, 5).tokens


def test_ids_and_seeds_are_made_up_when_missing() -> None:
    sampled = pd.SamplingParams(max_new_tokens=8)
    seeded = attrs.evolve(sampled, seed=int.from_bytes(b"\5" * 8, "little"))
    with local() as setup:
        pairing = setup.paired_anew(random_bytes=lambda count: b"\5" * count)
        assert pairing.submit(request(None, sampling=sampled)) == "05" * 8
        pairing.submit(request("seeded", sampling=seeded))
        streams = by_request(collect(pairing))
    assert tokens_of(streams["05" * 8]) == tokens_of(streams["seeded"])


def test_a_full_line_raises_overloaded_and_takes_nothing() -> None:
    with local(config=pd.PairingConfig(max_queued_requests=2)) as setup:
        setup.pairing.submit(request("a"))
        setup.pairing.submit(request("b"))
        with pytest.raises(pd.Overloaded) as caught:
            setup.pairing.submit(request("c"))
        assert caught.value.code == "OVERLOADED"
        assert caught.value.retry_after_s is None  # no step has shown how fast these engines are
        assert setup.pairing.num_unfinished == 2
        assert set(by_request(collect(setup.pairing))) == {"a", "b"}
        assert setup.pairing.submit(request("c")) == "c"
        setup.pairing.submit(request("d"))
        with pytest.raises(pd.Overloaded, match=r"holds 2 requests .*; try again in .* s$") as caught:
            setup.pairing.submit(request("e"))
        assert caught.value.retry_after_s > 0
        assert set(by_request(collect(setup.pairing))) == {"c", "d"}


def speed_of(engine: pd.PrefillEngine | pd.DecodeEngine, tokens_per_s: int) -> None:
    """What the engine's loads tell."""
    load: Any = engine._make_brief_load

    def made() -> Any:
        return attrs.evolve(load(), num_tokens=tokens_per_s, busy_s=1.0)

    engine._make_brief_load = made  # type: ignore[method-assign]
    engine._brief = None


def test_who_would_wait_beyond_its_deadline_is_turned_away() -> None:
    with local(clock=VirtualClock()) as setup:
        speed_of(setup.prefills[0], 10)
        for number in range(5):
            setup.pairing.submit(request(str(number), prompt=prompt_of(10)))
        setup.pairing.submit(request("patient", deadline_s=5.0))
        with pytest.raises(pd.Overloaded, match=r"wait about 5.9 s .* deadline is 4 s; try again in 1.9 s$") as caught:
            setup.pairing.submit(request("hasty", prompt=prompt_of(10), deadline_s=4.0))
        assert caught.value.retry_after_s == pytest.approx(len(PROMPT) / 10 + 5 - 4)
        setup.pairing.submit(request("urgent", deadline_s=0.1, priority=1))
        assert setup.pairing.num_unfinished == 7
        assert "hasty" not in by_request(collect(setup.pairing))
        setup.check_idle()


def test_generate_waits_until_a_deadline_can_be_met() -> None:
    with local(clock=VirtualClock()) as setup:
        speed_of(setup.prefills[0], 10)
        requests = [request(str(number), deadline_s=0.5) for number in range(3)]
        streams = by_request(list(setup.pairing.generate(requests)))
        assert [len(streams[name]) for name in "012"] == [5, 5, 5]
        setup.check_idle()


def test_a_decode_whose_line_is_full_lets_requests_wait_in_the_pairing() -> None:
    engine = pd.EngineConfig(max_running_requests=1, max_queued_requests=1)
    with local(engine=engine) as setup:
        for number in range(6):
            setup.pairing.submit(request(str(number)))
        streams = by_request(collect(setup.pairing))
    assert {tuple(tokens_of(stream)) for stream in streams.values()} == {reference("v3", PROMPT, 5).tokens}
    assert len(streams) == 6


def test_a_request_that_fits_no_pool_says_the_numbers() -> None:
    with local(num_pages=4) as setup:
        with pytest.raises(pd.RequestError, match=r"9 tokens plus max_new_tokens 8 makes 17; .* holds 16"):
            setup.pairing.submit(request(count=8))
        assert setup.pairing.num_unfinished == 0
        setup.pairing.submit(request(count=7))
        assert len(tokens_of(collect(setup.pairing))) == 7


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    with local() as setup:
        for _ in range(2):
            setup.pairing.submit(request())
            with pytest.raises(pd.RequestError, match="in use"):
                setup.pairing.submit(request())
            setup.pairing.step()
            with pytest.raises(pd.RequestError, match="in use"):
                setup.pairing.submit(request())
            assert tuple(tokens_of(collect(setup.pairing))) == reference("v3", PROMPT, 5).tokens


# -- cancelling ---------------------------------------------------------------------------------------------------


def test_cancel_of_unknown_and_finished_ids_does_nothing() -> None:
    with local() as setup:
        setup.pairing.cancel("never")
        setup.pairing.submit(request())
        events = collect(setup.pairing)
        for _ in range(2):
            setup.pairing.cancel("a")
            setup.pairing.cancel("never\n")
        assert setup.pairing.step() == []
        assert by_request(events)["a"][-1].finish_reason is pd.FinishReason.LENGTH
        setup.check_idle()


def test_a_cancel_that_comes_late_does_not_reach_the_next_request_of_that_id() -> None:
    with local() as setup:
        setup.pairing.submit(request())
        collect(setup.pairing)
        setup.pairing.cancel("a")
        setup.pairing.submit(request())
        assert tokens_of(collect(setup.pairing)) == list(reference("v3", PROMPT, 5).tokens)


@pytest.mark.parametrize("num_steps", range(6))
def test_cancel_ends_a_request_once_at_any_step(num_steps: int) -> None:
    with local() as setup:
        setup.pairing.submit(request(count=50))
        events = [event for _ in range(num_steps) for event in setup.pairing.step()]
        setup.pairing.cancel("a")
        setup.pairing.cancel("a")
        events += collect(setup.pairing)
        stream = by_request(events)["a"]
        setup.check_idle()
    assert stream[-1].finish_reason is pd.FinishReason.CANCELLED
    assert stream[-1].token is None
    assert stream[-1].error is None
    assert stream[-1].index == len(stream) - 1
    assert tuple(tokens_of(stream)) == reference("v3", PROMPT, 50).tokens[: len(stream) - 1]


def test_cancel_while_prefill_may_write_keeps_the_pages_until_it_stopped() -> None:
    with local() as setup:
        prefill, pool = setup.prefills[0], setup.pools[0]
        hang(prefill)
        setup.pairing.submit(request())
        setup.pairing.step()
        assert pool.num_granted == 3
        setup.pairing.cancel("a")
        assert only(setup.pairing.step()).finish_reason is pd.FinishReason.CANCELLED
        assert setup.pairing.num_unfinished == 0
        assert pool.num_granted == 3
        recover(prefill)
        setup.check_idle()


def test_cancel_before_prefill_heard_of_the_room_returns_the_pages_and_bars_the_room() -> None:
    with local() as setup:
        prefill, pool = setup.prefills[0], setup.pools[0]
        hang(prefill, takes=False)
        setup.pairing.submit(request())
        setup.pairing.step()
        setup.pairing.cancel("a")
        setup.pairing.step()
        setup.pairing.step()
        assert pool.num_available == pool.num_pages
        recover(prefill)
        setup.check_idle()
        assert prefill.channel.stats.writes_sent == 0


def test_cancel_of_a_request_that_decode_sends_back_is_not_forgotten() -> None:
    """Decode refuses for lack of room while the cancellation is on its way."""
    engine = pd.EngineConfig(max_running_requests=1, max_queued_requests=1)
    with local(engine=engine) as setup:
        decode = setup.decodes[0]
        setup.pairing.submit(request("first", 50))
        setup.pairing.step()
        setup.pairing.submit(request("second"))
        setup.pairing.step()
        hang(decode, takes=False)
        setup.pairing.submit(request("third"))
        setup.pairing.step()
        setup.pairing.cancel("third")
        setup.pairing.step()
        recover(decode)
        streams = by_request(collect(setup.pairing))
    assert [event.finish_reason for event in streams["third"]] == [pd.FinishReason.CANCELLED]


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_cancel_is_prompt_though_decode_does_not_answer(num_steps: int) -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        setup.pairing.submit(request(count=50))
        events = [event for _ in range(num_steps) for event in setup.pairing.step()]
        hang(setup.decodes[0], takes=False)
        setup.pairing.cancel("a")
        assert setup.pairing.step() == []
        clock.advance(CANCEL_GRACE_S)
        setup.pairing.cancel("a")
        last = only(setup.pairing.step())
        assert CANCEL_GRACE_S < 0.1
        assert (last.finish_reason, last.token, last.error) == (pd.FinishReason.CANCELLED, None, None)
        assert last.index == len(tokens_of(events))
        setup.pairing.cancel("a")
        assert setup.pairing.num_unfinished == 0
        recover(setup.decodes[0])
        assert setup.pairing.step() == []
        setup.check_idle()


def test_cancel_in_the_step_in_which_the_request_completes() -> None:
    """The final event and the cancellation cross each other, in either order, and one of them counts."""
    with local() as setup:
        decode = setup.decodes[0]
        setup.pairing.submit(request(count=2))
        events = setup.pairing.step() + setup.pairing.step()
        step = decode.step

        def cancelled_meanwhile() -> list[pd.types.Event]:
            said = step()
            setup.pairing.cancel("a")
            return said

        decode.step = cancelled_meanwhile  # type: ignore[method-assign]
        events += setup.pairing.step()
        decode.step = step  # type: ignore[method-assign]
        events += setup.pairing.step() + setup.pairing.step()
        assert tuple(tokens_of(by_request(events)["a"])) == reference("v3", PROMPT, 2).tokens
        assert [event.finish_reason for event in events] == [None, pd.FinishReason.LENGTH]
        setup.check_idle()


# -- waiting, draining, closing -----------------------------------------------------------------------------------


def test_wait_sleeps_when_idle_and_wakes_for_a_submit() -> None:
    with local() as setup:
        assert setup.pairing.wait(0.01) is False
        timer = threading.Timer(0.1, lambda: setup.pairing.submit(request()))
        began = time.monotonic()
        timer.start()
        assert setup.pairing.wait(TIMEOUT_S) is True
        assert time.monotonic() - began < TIMEOUT_S
        timer.join()
        assert len(tokens_of(collect(setup.pairing))) == 5
        assert setup.pairing.wait(0.01) is False


@pytest.mark.parametrize(
    "engine", [{"max_running_requests": 1}, {"max_running_requests": 1, "max_queued_requests": 1}, {}]
)
@pytest.mark.parametrize("max_queued_per_decode", [1, 100])
def test_wait_never_sleeps_while_engines_of_this_process_have_work(
    engine: dict[str, int], max_queued_per_decode: int
) -> None:
    config = pd.PairingConfig(max_queued_per_decode=max_queued_per_decode)
    with local(num_pages=12, engine=pd.EngineConfig(**engine), config=config) as setup:
        for number in range(8):
            setup.pairing.submit(request(str(number), 1 + 5 * number))
        while setup.pairing.num_unfinished:
            assert setup.pairing.wait(0.0)
            setup.pairing.step()
        setup.check_idle()


def test_drain_keeps_the_events_for_the_next_step() -> None:
    with local() as setup:
        setup.pairing.submit(request())
        assert setup.pairing.drain(0.0) is False
        assert setup.pairing.drain(TIMEOUT_S) is True
        assert setup.pairing.drain(0.0) is True
        assert tuple(tokens_of(setup.pairing.step())) == reference("v3", PROMPT, 5).tokens
        assert setup.pairing.step() == []


def test_close_ends_each_unfinished_request_with_one_event() -> None:
    with local(num_pages=16, engine=pd.EngineConfig(max_running_requests=2)) as setup:
        for number in range(5):
            setup.pairing.submit(request(str(number), 50))
        events = [event for _ in range(4) for event in setup.pairing.step()]
        setup.pairing.submit(request("unseen"))
        setup.pairing.close()
        setup.pairing.close()
        assert setup.pairing.num_unfinished == 0
        last = setup.pairing.step()
        streams = by_request(events + last)
        assert len(last) == 6
        assert set(streams) == {"0", "1", "2", "3", "4", "unseen"}
        assert {event.finish_reason for event in last} == {pd.FinishReason.CANCELLED}
        assert setup.pairing.step() == []
        assert setup.pairing.drain(1.0) is True
        assert setup.pairing.wait(1.0) is False
        with pytest.raises(pd.RequestError, match="closed"):
            setup.pairing.submit(request("late"))
        setup.pairing.cancel("0")
        assert setup.pools[0].num_available == 16


@pytest.mark.parametrize("num_steps", range(6))
def test_close_comes_from_another_thread_in_any_phase(num_steps: int) -> None:
    with local(engine=pd.EngineConfig(chunked_prefill_size=4)) as setup:
        pairing = setup.pairing
        for name in "ab":
            pairing.submit(request(name, 100))
        events = [event for _ in range(num_steps) for event in pairing.step()]
        closers = [started(pairing.close) for _ in range(3)]
        began = time.monotonic()
        while pairing.num_unfinished:  # this thread goes on stepping and sleeping meanwhile
            events += pairing.step()
            pairing.wait(TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S
        check_ends(*closers)
        streams = by_request(events + pairing.step())
        assert [stream[-1].finish_reason for stream in streams.values()] == [pd.FinishReason.CANCELLED] * 2
        assert setup.pools[0].num_available == setup.pools[0].num_pages


def test_close_waits_for_the_step_that_is_under_way() -> None:
    """Engines are stepped and closed by one thread at a time."""
    with local() as setup:
        decode, inside, go_on = setup.decodes[0], threading.Event(), threading.Event()
        step = decode.step

        def long_step() -> list[pd.types.Event]:
            inside.set()
            assert go_on.wait(TIMEOUT_S)
            assert not decode.closed
            return step()

        decode.step = long_step  # type: ignore[method-assign]
        setup.pairing.submit(request())
        stepper = started(setup.pairing.step)
        assert inside.wait(TIMEOUT_S)
        closer = started(setup.pairing.close)
        closer.join(0.2)
        assert closer.is_alive()
        assert setup.pairing.num_unfinished == 1
        go_on.set()
        check_ends(stepper, closer)
        assert decode.closed
        assert [event.finish_reason for event in setup.pairing.step()] == [pd.FinishReason.CANCELLED]


def test_close_ends_a_generate_in_another_thread() -> None:
    with local() as setup:
        events: list[pd.TokenEvent] = []
        reader = started(lambda: events.extend(setup.pairing.generate([request(count=200)])))
        wait_until(lambda: setup.pairing.num_unfinished == 1)
        setup.pairing.close()
        check_ends(reader)
    assert events[-1].finish_reason is pd.FinishReason.CANCELLED


def test_leaving_the_context_closes() -> None:
    with pd.Pairing.local(model_of(), cache=pd.CacheConfig(num_pages=8)) as pairing:
        pairing.submit(request())
    assert [event.finish_reason for event in pairing.step()] == [pd.FinishReason.CANCELLED]


def test_a_side_without_ports_is_refused() -> None:
    with local() as setup, pytest.raises(pd.ConfigError):
        pd.Pairing([], setup.decodes)


# -- how requests end ---------------------------------------------------------------------------------------------


def test_a_stop_token_is_the_last_event() -> None:
    tokens = reference("v3", PROMPT, 12).tokens
    stop = next(token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index])
    with local() as setup:
        stream = list(setup.pairing.generate([request(sampling=greedy(12, ignore_eos=True, stop_token_ids=(stop,)))]))
    assert tokens_of(stream) == list(tokens[: tokens.index(stop) + 1])
    assert (stream[-1].token, stream[-1].finish_reason) == (stop, pd.FinishReason.STOP)


@pytest.mark.parametrize("position", [0, 4])
def test_eos_stops_unless_it_is_ignored(position: int) -> None:
    tokens = reference("v3", PROMPT, 8).tokens
    eos = tokens[position]
    position = tokens.index(eos)
    model = random_model(tiny_config("v3", num_hidden_layers=2, eos_token_id=[90, eos]))
    with local(model=model) as setup:
        stopped = list(setup.pairing.generate([request(sampling=greedy(8))]))
        whole = list(setup.pairing.generate([request(sampling=greedy(8, ignore_eos=True))]))
        setup.check_idle()
    assert tokens_of(stopped) == list(tokens[: position + 1])
    assert stopped[-1].finish_reason is pd.FinishReason.STOP
    assert tokens_of(whole) == list(tokens)
    assert whole[-1].finish_reason is pd.FinishReason.LENGTH


def test_a_stop_token_at_the_full_length_is_a_stop() -> None:
    tokens = reference("v3", PROMPT, 1).tokens
    with local() as setup:
        event = only(list(setup.pairing.generate([request(sampling=greedy(1, stop_token_ids=tokens))])))
    assert (event.token, event.finish_reason) == (tokens[0], pd.FinishReason.STOP)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_done", [1, 4, 11])
def test_a_resumed_request_continues_exactly(num_done: int, temperature: float) -> None:
    sampling = pd.SamplingParams(temperature=temperature, max_new_tokens=12, seed=3, ignore_eos=True)
    with local() as setup:
        whole = list(setup.pairing.generate([request(sampling=sampling)]))
        tokens = tuple(tokens_of(whole))
        rest = list(setup.pairing.generate([request(sampling=sampling, output=tokens[:num_done])]))
    assert tuple(tokens_of(rest)) == tokens[num_done:]
    assert [event.index for event in rest] == list(range(num_done, 12))
    assert rest[-1].usage is not None
    assert (rest[-1].usage.prompt_tokens, rest[-1].usage.output_tokens) == (len(PROMPT), 12)


def test_only_the_last_event_has_usage_and_its_numbers_add_up() -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        setup.pairing.submit(request(count=3))
        clock.advance(2.0)  # in the queue
        assert setup.pairing.step() == []
        clock.advance(3.0)  # the hand-off is there
        events = setup.pairing.step()
        clock.advance(10.0)
        events += setup.pairing.step()
    assert [event.usage is not None for event in events] == [False, False, True]
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (len(PROMPT), 3, 0)
    assert usage.queue_s == pytest.approx(2.0)
    assert usage.ttft_s == pytest.approx(5.0)


def test_the_last_event_tells_when_the_request_reached_each_stage() -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        hang(setup.prefills[0])
        setup.pairing.submit(request(count=3))
        clock.advance(2.0)  # in the queue
        assert setup.pairing.step() == []
        clock.advance(4.0)  # prefill computes
        recover(setup.prefills[0])
        assert setup.pairing.step() == []
        clock.advance(3.0)  # the hand-off is there
        events = setup.pairing.step()
        clock.advance(10.0)
        events += setup.pairing.step()
    usage = events[-1].usage
    assert usage is not None
    timeline = usage.timeline
    assert timeline is not None
    assert (timeline.queued_s, timeline.granted_s) == (2.0, 2.0)
    assert (timeline.committed_s, timeline.first_token_s) == (9.0, 9.0)
    assert timeline.first_token_s == usage.ttft_s
    assert (timeline.prefill_began_s, timeline.prefill_ended_s) == (6.0, 6.0)
    assert [event.at_s for event in events] == [9.0, 9.0, 19.0]
    assert usage.choice is not None
    assert (usage.choice.prefill, usage.choice.decode) == (setup.prefills[0].address, setup.decodes[0].address)
    assert usage.num_retries == 0


@pytest.mark.parametrize("tokens", [0, 2])
def test_the_timeline_of_a_request_whose_decode_is_lost_is_what_was_seen_of_it(tokens: int) -> None:
    def broken() -> list[pd.types.Event]:
        raise RuntimeError("gone")

    clock = VirtualClock()
    with local(clock=clock) as setup:
        setup.pairing.submit(request(count=9))
        clock.advance(1.0)
        setup.pairing.step()
        clock.advance(2.0)
        events = [event for _ in range(tokens - 1) for event in setup.pairing.step()]
        setup.decodes[0].step = broken  # type: ignore[method-assign]
        usage = only(setup.pairing.step()).usage
        setup.decodes.clear()
    assert usage is not None
    assert usage.output_tokens == len(events)
    first = 3.0 if events else None
    assert usage.ttft_s == first
    assert usage.timeline == pd.types.Timeline(queued_s=1.0, granted_s=1.0, first_token_s=first)


def test_counts_of_what_became_of_requests() -> None:
    with local(engine=pd.EngineConfig(max_running_requests=1)) as setup:
        pairing = setup.pairing
        for name in "abc":
            pairing.submit(request(name))
        pairing.submit(request("late", deadline_s=0))
        pairing.cancel("b")
        stats = pairing.stats
        assert (stats.num_unfinished_requests, stats.ended) == (4, ())
        collect(pairing)
        stats = pairing.stats
    assert dict(stats.ended) == {
        pd.FinishReason.LENGTH: 2,
        pd.FinishReason.CANCELLED: 1,
        pd.FinishReason.DEADLINE: 1,
    }
    assert (stats.num_queued_requests, stats.num_unfinished_requests, stats.links_down) == (0, 0, ())
    assert (stats.num_retries, stats.num_reroutes, stats.num_ports_lost) == (0, 0, 0)


def test_usage_of_a_request_that_never_left_the_queue() -> None:
    clock = VirtualClock()
    with local(clock=clock) as setup:
        setup.pairing.submit(request())
        clock.advance(4.0)
        setup.pairing.cancel("a")
        usage = only(setup.pairing.step()).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens, usage.ttft_s) == (len(PROMPT), 0, None)
    assert usage.queue_s == pytest.approx(4.0)
    assert usage.timeline == pd.types.Timeline()


# -- order and attempts -------------------------------------------------------------------------------------------


def test_higher_priority_goes_first_in_the_queue_and_for_pages() -> None:
    with local(engine=pd.EngineConfig(max_running_requests=1)) as setup:
        setup.pairing.submit(request("first", 8))
        setup.pairing.step()
        for name, priority in (("low", -1), ("middle", 0), ("high", 5)):
            setup.pairing.submit(request(name, priority=priority))
            if name == "middle":
                setup.pairing.step()  # these two wait at decode, the next one in the queue
        events = collect(setup.pairing)
    assert list(by_request(events)) == ["first", "high", "middle", "low"]


def test_equal_priorities_keep_their_order() -> None:
    with local(engine=pd.EngineConfig(max_running_requests=1)) as setup:
        names = [str(number) for number in range(6)]
        for name in names:
            setup.pairing.submit(request(name, 2))
        assert list(by_request(collect(setup.pairing))) == names


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_transfers_are_tried_max_attempts_times(max_attempts: int) -> None:
    with local(engine=pd.EngineConfig(max_attempts=max_attempts)) as setup:
        channel = setup.prefills[0].channel
        finish = channel.finish

        def fail(grant: pd.PageGrant, handoff: Handoff) -> Transfer:
            lost = {"status": HandoffStatus.ABORTED, "error": pd.TransferError("the cable was cut")}
            return finish(grant, Handoff(room=grant.room, writer=handoff.writer, **lost))  # type: ignore[arg-type]

        channel.finish = fail  # type: ignore[method-assign]
        seen = watch(setup.decodes[0])
        setup.pairing.submit(request())
        last = only(collect(setup.pairing))
        grants = [event.grant for event in seen if isinstance(event, pd.Granted)]
        assert len(grants) == len({grant.room for grant in grants}) == max_attempts
        assert last.finish_reason is pd.FinishReason.FAILED
        assert isinstance(last.error, pd.TransferError)
        assert "the cable was cut" in str(last.error)
        channel.finish = finish  # type: ignore[method-assign]
        setup.pairing.submit(request())
        assert tuple(tokens_of(collect(setup.pairing))) == reference("v3", PROMPT, 5).tokens
        setup.check_idle()


def test_a_lost_attempt_is_made_good_by_the_next_one() -> None:
    with local(engine=pd.EngineConfig(chunked_prefill_size=4)) as setup:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        seen = watch(decode)
        setup.pairing.submit(request(count=12))
        setup.pairing.step()
        assert len(prefill.snapshot().active) == 1
        prefill.disconnect(decode.address)
        prefill.connect(decode.address)
        assert tuple(tokens_of(collect(setup.pairing))) == reference("v3", PROMPT, 12).tokens
        assert sum(isinstance(event, pd.Granted) for event in seen) == 2


def test_an_error_of_the_model_fails_its_requests_at_once_and_no_others() -> None:
    with local() as setup:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        at_prefill, at_decode = prefill.ranks.runner, decode.ranks.runner

        def broken(*_: object) -> None:
            raise ValueError("no such page\n" + 300 * "x")

        setup.pairing.submit(request("running", 12))
        events = setup.pairing.step() + setup.pairing.step()
        at_prefill.prefill = broken  # type: ignore[method-assign,assignment]
        setup.pairing.submit(request("in prefill"))
        events += setup.pairing.step() + setup.pairing.step()
        del at_prefill.prefill
        events += collect(setup.pairing)
        setup.pairing.submit(request("in decode"))
        events += setup.pairing.step()
        at_decode.decode = broken  # type: ignore[method-assign,assignment]
        events += setup.pairing.step()
        del at_decode.decode
        setup.pairing.submit(request("after"))
        streams = by_request(events + collect(setup.pairing))
        setup.check_idle()
    assert tuple(tokens_of(streams["running"])) == reference("v3", PROMPT, 12).tokens
    assert tuple(tokens_of(streams["after"])) == reference("v3", PROMPT, 5).tokens
    for name in ("in prefill", "in decode"):
        last = streams[name][-1]
        assert (last.finish_reason, type(last.error)) == (pd.FinishReason.FAILED, pd.PDInferError)
        assert f"the {name[3:]} step failed: ValueError: no such page\\nx" in str(last.error)
        assert len(str(last.error)) < 300


def test_logits_that_are_not_finite_fail_the_request() -> None:
    model = attrs.evolve(model_of(), lm_head_VD=torch.full_like(model_of().lm_head_VD, torch.nan))
    with local(model=model) as setup:
        setup.pairing.submit(request())
        last = only(collect(setup.pairing))
        setup.check_idle()
    assert last.finish_reason is pd.FinishReason.FAILED
    assert "not finite" in str(last.error)
