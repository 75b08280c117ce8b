"""A prefill and a decode of two ranks each, as threads of this process: what leaders decide, followers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.engine.roles import become
from pdinfer.kv.pool import PageState
from pdinfer.kv.view import KVView
from tests.e2e.setups import by_request, collect, greedy, model_of, pool_of, prompt_of, reference, step_until, tokens_of
from tests.unit.parallel.thread_groups import abandon, groups_of, on_ranks
from tests.waiting import check_ends, started, wait_until

PROMPT = prompt_of(9)


@attrs.frozen
class Sides:
    """The engines of both sides, their leaders first, and a Pairing of the leaders."""

    pairing: pd.Pairing
    prefills: list[pd.PrefillEngine]
    decodes: list[pd.DecodeEngine]
    failures: list[BaseException]


@contextmanager
def sides(*, num_pages: int = 64, size: int = 2, **config: Any) -> Iterator[Sides]:
    """Every rank has the whole model: to its engine that is one whose parts are added up."""
    groups = [*groups_of(tp_size=size), *groups_of(tp_size=size)]
    pools = [pool_of(model_of(), num_pages=num_pages) for _ in groups]
    ends = pd.KVChannel.loopback(*pools)
    kinds = [pd.PrefillEngine] * size + [pd.DecodeEngine] * size
    made: dict[int, Any] = {}

    def make(at: int) -> None:
        made[at] = kinds[at](attrs.evolve(model_of(), groups=groups[at]), ends[at], pd.EngineConfig(**config))

    for side in (range(size), range(size, 2 * size)):
        on_ranks(groups[side.start : side.stop], lambda one, side=side: make(side[one.world.rank]))
    engines = [made[at] for at in range(2 * size)]
    failures: list[BaseException] = []

    def follow(engine: Any) -> None:
        try:
            pd.remote.serve(engine, None)
        except pd.RankLost as error:
            failures.append(error)

    threads = [started(follow, engine) for at, engine in enumerate(engines) if at % size]
    pairing = pd.Pairing(engines[0], engines[size])
    try:
        yield Sides(pairing, engines[:size], engines[size:], failures)
    finally:
        pairing.close()
        check_ends(*threads)
        assert all(engine.closed for engine in engines)


def request(name: str, count: int = 5, prompt: tuple[int, ...] = PROMPT) -> pd.Request:
    return pd.Request(request_id=name, prompt=prompt, sampling=greedy(count, ignore_eos=True))


def idle(made: Sides) -> None:
    """Every page of the leaders is free or cached."""
    for engine in (made.prefills[0], made.decodes[0]):
        wait_until(lambda engine=engine: not (made.pairing.step() or engine.num_unfinished))
        engine.channel.pool.check()
        assert engine.channel.pool.num_available == engine.channel.pool.num_pages


def test_a_leader_that_is_closed_refuses_what_comes_later() -> None:
    with sides() as made:
        (prefill, _), (decode, _) = made.prefills, made.decodes
    decode.submit(request("late"), writers=[prefill.address])
    (refused,) = decode.step()
    assert isinstance(refused, pd.Refused)
    assert decode.num_unfinished == 0


def test_both_sides_change_their_role_and_followers_with_them() -> None:
    with sides() as made:
        pairing, prefill, decode = made.pairing, made.prefills[0], made.decodes[0]
        list(pairing.generate(request("a")))
        new_decode = pairing.switch(prefill, "decode", drain_s=0.0, leaves_none=True)
        assert isinstance(new_decode, pd.DecodeEngine)
        new_prefill = pairing.switch(decode, "prefill", drain_s=0.0, leaves_none=True)
        assert all(engine.closed for engine in (*made.prefills, *made.decodes)), "followers have changed, too"
        events = list(pairing.generate(request("b")))
        assert tokens_of(events) == list(reference("v3", PROMPT, 5).tokens)
        assert new_decode.addresses == tuple(engine.address for engine in made.prefills)
        assert new_decode.load().prefix_hit_tokens > 0
        assert prefill.step() == []
        new_prefill.close()
        new_decode.close()
    assert not made.failures


def test_a_switch_that_its_host_gives_up_leaves_the_ranks_in_their_role() -> None:
    with sides() as made:
        pairing, prefill = made.pairing, made.prefills[0]
        switching = pairing.switching(prefill, "decode", drain_s=0.0, leaves_none=True)
        next(switching)
        assert prefill.ranks._lockstep.may_change  # type: ignore[attr-defined]
        switching.close()
        pairing.add(prefill)
        events = list(pairing.generate(request("a")))
        assert tokens_of(events) == list(reference("v3", PROMPT, 5).tokens)
        assert not prefill.closed


def agreed_to_change(made: Sides) -> pd.PrefillEngine:
    """Have the ranks of prefill agree to become decodes. Return their leader, which the follower waits for."""
    leader = made.prefills[0]
    made.pairing.remove(leader, drain_s=0.0)
    assert become(leader, "decode") is None
    wait_until(lambda: leader.step() or leader.ranks.are_changing)
    return leader


def check_missed(made: Sides) -> None:
    """End the wait for a leader that has not come, and check that the follower says so."""
    abandon([engine.model.groups for engine in made.prefills])
    wait_until(lambda: made.failures)


def test_a_rank_that_steps_on_once_all_have_agreed_to_change_is_lost() -> None:
    with sides() as made:
        prefill = agreed_to_change(made)
        with pytest.raises(pd.RankLost, match=r"stepped its old engine once all had agreed .* start all ranks anew"):
            prefill.step()
        check_missed(made)
        prefill.close()


def test_a_leader_that_closes_once_all_have_agreed_to_change_meets_nobody() -> None:
    with sides() as made:
        prefill = agreed_to_change(made)
        prefill.close()
        check_missed(made)


def test_followers_hold_the_same_pages_and_send_their_share() -> None:
    with sides(chunked_prefill_size=8) as made:
        for prompt in (PROMPT, prompt_of(30), PROMPT):  # the last one finds pages of the first
            made.pairing.submit(request("a", prompt=prompt))
            assert tokens_of(by_request(collect(made.pairing))["a"]) == list(reference("v3", prompt, 5).tokens)
        idle(made)
        sent = [engine.channel.stats.bytes_sent for engine in made.prefills]
        assert max(sent) < 1.2 * min(sent)
        for leader, follower in (made.prefills, made.decodes):
            pool = leader.channel.pool
            states = pool.states(range(pool.num_pages))
            cached = [page for page, state in enumerate(states) if state is PageState.CACHED]
            assert len(cached) >= 9
            ours, theirs = (KVView.of(engine.channel.pool.memory).latents for engine in (leader, follower))
            assert all(torch.equal(ours[layer][cached], theirs[layer][cached]) for layer in ours)
            assert follower.channel.pool.num_free == pool.num_pages  # who decides does the accounts


def test_a_prompt_of_which_decode_knows_more_than_prefill_lands() -> None:
    """The first chunks lie before what decode lacks: they are run, and nothing of them is pushed."""
    with sides(chunked_prefill_size=8) as made:
        prompt = prompt_of(30)
        for _ in range(2):
            made.pairing.submit(request("a", prompt=prompt))
            assert tokens_of(by_request(collect(made.pairing))["a"]) == list(reference("v3", prompt, 5).tokens)
            made.prefills[0].channel.pool.find = lambda keys: ()  # as if others had pushed it out meanwhile
        assert made.decodes[0].load().prefix_hit_tokens > 8
        assert made.pairing.stats.num_ports_lost == 0
        idle(made)


def test_an_engine_that_closes_waits_for_no_follower_to_send() -> None:
    with sides() as made:
        made.pairing.submit(request("a", prompt=prompt_of(30)))
        collect(made.pairing)
        leader = made.prefills[0]
        channel: Any = leader.ranks.channel
        channel.hear = lambda rank, message: None  # its followers' last reports do not come any more
        made.pairing.submit(request("b", prompt=prompt_of(31, seed=1)))
        collect(made.pairing)
        assert leader.num_unfinished
    assert not leader.num_unfinished
    assert leader.channel.pool.num_available == leader.channel.pool.num_pages


def test_cancelled_and_retracted_requests_leave_nothing_behind() -> None:
    with sides(num_pages=16, max_attempts=5) as made:
        for number in range(6):
            made.pairing.submit(request(f"r{number}", 20, prompt_of(9, seed=number)))
        made.pairing.submit(request("unwanted", 40))
        events = step_until(
            made.pairing,
            lambda events: any(event.request_id == "unwanted" and event.token is not None for event in events),
        )
        made.pairing.cancel("unwanted")
        streams = by_request([*events, *collect(made.pairing)])
        assert streams.pop("unwanted")[-1].finish_reason is pd.FinishReason.CANCELLED
        for number in range(6):
            expected = reference("v3", prompt_of(9, seed=number), 20)
            assert tokens_of(streams[f"r{number}"]) == list(expected.tokens)
        assert made.pairing.stats.num_retries > 0
        idle(made)


def test_a_follower_takes_no_requests() -> None:
    with sides() as made:
        for refused in (
            lambda: made.decodes[1].submit(request("a"), writers=made.prefills[0].addresses),
            lambda: made.prefills[1].cancel("a"),
        ):
            with pytest.raises(
                pd.RequestError, match="rank 1 does what rank 0 does: give requests to the engine of rank 0"
            ):
                refused()
        assert made.decodes[0].addresses == tuple(engine.address for engine in made.decodes)


def test_a_link_that_a_follower_lost_aborts_the_attempt() -> None:
    with sides() as made:
        made.pairing.submit(request("a", 3))
        collect(made.pairing)
        made.prefills[1].channel.drop_peer(made.decodes[1].address)
        wait_until(
            lambda: made.pairing.step() == [] and not made.decodes[0].ranks.channel.connected(made.prefills[1].address)
        )
        made.pairing.submit(request("b", 3, prompt_of(12)))
        made.pairing.step()
        assert made.decodes[0].load().num_waiting_requests == 1  # it is not granted without all its writers
        made.prefills[1].channel.connect(made.decodes[1].address)
        assert tokens_of(by_request(collect(made.pairing))["b"]) == list(reference("v3", prompt_of(12), 3).tokens)
        idle(made)


def test_a_step_that_fails_on_a_follower_ends_the_port() -> None:
    with sides() as made:
        runner: Any = made.decodes[1]._model_runner

        def broken(rows: object) -> None:
            made.decodes[1].model.groups.world.meeting.barrier.abort()
            raise ZeroDivisionError("a test's fault")

        runner.forward = broken
        made.pairing.submit(request("a"))
        (stream,) = by_request(collect(made.pairing)).values()
        assert stream[-1].finish_reason is pd.FinishReason.FAILED
        assert made.pairing.stats.num_ports_lost == 1
    assert "rank 1 left a step that all ranks run together (ZeroDivisionError" in str(made.failures[0])
