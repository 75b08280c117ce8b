"""Ports that are lost under requests: which losses count, what a request that breaks engines costs, and who goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import RankLost
from pdinfer.execution.runner import ModelRunner
from pdinfer.pairing.losses import MAX_COMPUTING, MAX_LINKS, NAMED
from pdinfer.pairing.ports import BACK_S, LOOK_S, PORT_WAIT_S
from pdinfer.pairing.relinking import STRANDED_S
from pdinfer.testing import VirtualClock
from tests.e2e import setups
from tests.e2e.setups import (
    PROMPT,
    Setup,
    broken,
    by_request,
    check_wakes_in,
    collect,
    greedy,
    hang,
    prompt_of,
    recover,
    reference,
    remote,
    request,
    step_until,
    tokens_of,
)
from tests.waiting import started, wait_until

POISON = prompt_of(7, seed=3)
EXPECTED = list(reference("v3", PROMPT, 5).tokens)


class Fragile(ModelRunner):
    """A runner of one of several ranks, another of which dies when it computes POISON in the role of `fragile`. `died`
    has, for each death, how many rows were in the step."""

    fragile = ""
    died: list[int] = []  # noqa: RUF012 - of the test that sets it

    def prefill(self, rows: Sequence[Any]) -> Iterator[Any]:
        self._break("prefill", [tuple(row.tokens) for row in rows])
        yield from super().prefill(rows)

    def decode(self, rows: Sequence[Any], draws: Sequence[Any], *more: Any, **named: Any) -> Any:
        self._break("decode", [tuple(draw.prompt) for draw in draws])
        return super().decode(rows, draws, *more, **named)

    def _break(self, role: str, prompts: list[tuple[int, ...]]) -> None:
        if self.fragile == role and any(prompt[: len(POISON)] == POISON for prompt in prompts):
            self.died.append(len(prompts))
            raise RankLost("rank 1 died in a step")


@pytest.fixture(autouse=True)
def fragile(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fragile]]:
    monkeypatch.setattr(PrefillEngine, "_make_runner", lambda self: Fragile(self.model, self.pool.memory))
    monkeypatch.setattr(DecodeEngine, "_make_runner", lambda self: Fragile(self.model, self.pool.memory))
    Fragile.died = []
    yield Fragile
    Fragile.fragile = ""


def several(num_prefill: int, num_decode: int, transport: str = "loopback", **more: Any) -> Setup:
    more = {"policy": pd.policy.round_robin, **more}
    return setups.several(num_prefill, num_decode, transport, **more)


def break_off(engine: Any) -> None:
    engine.step = broken


def poison(**more: Any) -> pd.Request:
    return pd.Request(request_id="poison", prompt=POISON, sampling=greedy(5), **more)


# -- a rank that dies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_that_dies_in_a_step_fails_no_request_that_another_engine_can_take(role: str) -> None:
    with several(2, 2) as setup:
        for number in range(8):
            setup.pairing.submit(request(str(number)))
        engine: Any = (setup.prefills if role == "prefill" else setup.decodes)[0]
        compute = getattr(engine._runner, role)
        dead: list[int] = []

        def die(*arguments: Any, **named: Any) -> Any:
            dead.append(1)
            raise RankLost("rank 1 died in a step")

        setattr(engine._runner, role, die)
        events = collect(setup.pairing)
        assert dead
        assert {name: tokens_of(stream) for name, stream in by_request(events).items()} == {
            str(number): EXPECTED for number in range(8)
        }
        assert setup.pairing.stats.num_ports_lost == 1
        setattr(engine._runner, role, compute)


@pytest.mark.parametrize("after", [0, 4])
def test_what_a_decode_ends_unasked_since_it_was_closed_goes_on_elsewhere(after: int) -> None:
    """Its host closed it, or another of its ranks: nobody cancelled its requests."""
    with several(1, 2) as setup:
        for number in range(4):
            setup.pairing.submit(request(f"r{number}"))
        events = []
        while len(events) < after or not all(engine.num_unfinished for engine in setup.decodes):
            events += setup.pairing.step()
        setup.decodes[0].close()
        events += collect(setup.pairing)
        ends = [event.finish_reason for event in events if event.finish_reason is not None]
        assert ends == [pd.FinishReason.LENGTH] * 4
        assert all(tokens_of(stream) == EXPECTED for stream in by_request(events).values())
        assert setup.pairing.ports == (setup.decodes[1], setup.prefills[0])
        assert setup.pairing.stats.num_moved > 0


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_prefill_that_lets_go_of_a_request_fails_it_nowhere(transport: str) -> None:
    """A served prefill does that when its front end had lost sight of it. Decode may hear so before it hears of another
    prefill."""
    with several(1, 1, transport) as setup:
        prefill: Any = setup.prefills[0]
        submit = prefill.submit

        def submit_and_let_go(*arguments: Any) -> None:
            prefill.submit = submit
            submit(*arguments)
            prefill.cancel("a")

        prefill.submit = submit_and_let_go
        setup.pairing.submit(request())
        events = collect(setup.pairing)
        assert prefill.submit is submit
        assert tokens_of(events) == EXPECTED
        assert [event.finish_reason for event in events if event.finish_reason] == [pd.FinishReason.LENGTH]
        setup.check_idle()


# -- a request that breaks engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_breaks_every_engine_takes_four_and_its_companions_none(
    fragile: type[Fragile], role: str
) -> None:
    fragile.fragile = role
    counts = (7, 1) if role == "prefill" else (1, 7)
    with several(*counts) as setup:
        setup.pairing.submit(poison())
        for number in range(21):
            setup.pairing.submit(request(str(number), cache_salt=b"%d" % number))
        events = step_until(setup.pairing, lambda _: len(fragile.died) == 3)
        for number in range(21, 42):
            setup.pairing.submit(request(str(number), cache_salt=b"%d" % number))
        streams = by_request(events + collect(setup.pairing))
        end = streams.pop("poison")[-1]
        assert end.finish_reason is pd.FinishReason.FAILED
        assert {name: tokens_of(stream) for name, stream in streams.items()} == {
            str(number): EXPECTED for number in range(42)
        }
        lost = setup.pairing.stats.ports_lost
        assert len(lost) == len(fragile.died) == MAX_COMPUTING + 1 == 4
        assert max(fragile.died[:3]) > 1, "it has broken engines in the company of others"
        assert fragile.died[3] == 1, "and at last alone"
        said = str(end.error)
        assert "lost while they computed it, the last one alone, and may have been broken by it: 4" in said
        assert all(str(port.address) in said for port in lost)
        assert "its prefill is lost" in said if role == "prefill" else "its decode is lost" in said


def test_a_request_that_must_run_alone_takes_turns_with_the_others() -> None:
    with several(1, 1) as setup:
        rows: list[int] = []
        for role, engine in (("prefill", setup.prefills[0]), ("decode", setup.decodes[0])):
            engine_: Any = engine
            run = getattr(engine_._runner, role)

            def watched(batch: Sequence[Any], *more: Any, run: Any = run, **named: Any) -> Any:
                rows.append(len(batch))
                return run(batch, *more, **named)

            setattr(engine_._runner, role, watched)
        for name in "abc":
            setup.pairing.submit(request(name, 12, alone=name == "b"))
        streams = by_request(collect(setup.pairing))
        expected = list(reference("v3", PROMPT, 12).tokens)
        assert {name: tokens_of(stream) for name, stream in streams.items()} == dict.fromkeys("abc", expected)
        assert max(rows) == 2
        assert rows.count(1) >= 12
        assert rows.count(2) >= 11


def test_whether_it_runs_alone_is_true_or_false() -> None:
    with several(1, 1) as setup, pytest.raises(pd.RequestError, match="alone must be True or False"):
        setup.pairing.submit(request(alone=1))  # type: ignore[arg-type]


# -- losses that do not count -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ports_that_are_lost_while_a_request_waits_never_count(role: str) -> None:
    """Granted pages, in the queue of its prefill: it can have broken nothing."""
    num_lost = 3 * MAX_COMPUTING
    counts = (num_lost + 1, 1) if role == "prefill" else (1, num_lost + 1)
    with several(*counts) as setup:
        for prefill in setup.prefills:
            hang(prefill)
        setup.pairing.submit(request())
        for _ in range(num_lost):
            events = [event for _ in range(3) for event in setup.pairing.step()]
            assert events == []
            if role == "decode":
                (busy,) = (one for one in setup.decodes if one.load().num_granted_requests)
                setup.decodes.remove(busy)
            else:
                (busy,) = (one for one in setup.prefills if one.load().num_queued_requests)  # type: ignore[assignment]
                setup.prefills.remove(busy)  # type: ignore[arg-type]
            break_off(busy)
        setup.pairing.step()
        for prefill in setup.prefills:
            recover(prefill)
        events = collect(setup.pairing)
        assert tokens_of(events) == EXPECTED
        assert setup.pairing.stats.num_ports_lost == num_lost
        setup.check_idle()


def test_an_end_says_how_many_ports_were_lost_and_which() -> None:
    with several(NAMED + 2, 1) as setup:
        for prefill in setup.prefills:
            hang(prefill)
        setup.pairing.submit(request())
        lost = []
        while setup.prefills:
            setup.pairing.step()
            setup.pairing.step()
            (busy,) = (one for one in setup.prefills if one.load().num_queued_requests)
            break_off(busy)
            setup.prefills.remove(busy)
            lost.append(str(busy.address))
        (end,) = collect(setup.pairing)
        said = str(end.error)
        assert "no prefill port is left" in said
        assert f"lost while it only waited there: {NAMED + 2} (" in said
        assert [name in said.split("only waited there")[1] for name in lost] == [False] * 2 + [True] * NAMED


def test_a_link_that_breaks_under_every_attempt_is_a_failure() -> None:
    """Its ports live: so it is not they that are lost, and not every attempt is free."""
    with several(4, 1, clock=VirtualClock()) as setup:
        clock: Any = setup.decodes[0]._clock
        for prefill in setup.prefills:
            hang(prefill)
        setup.pairing.submit(request())
        events: list[pd.TokenEvent] = []
        for _ in range(MAX_LINKS):
            events += setup.pairing.step() + setup.pairing.step()
            if not setup.pairing.num_unfinished:
                break
            (busy,) = (one for one in setup.prefills if one.load().num_queued_requests and one.step)
            busy.disconnect(setup.decodes[0].address)
            busy._drop(pd.PDInferError("its queue is empty again"))
            clock.advance(1.0)
        events += [event for _ in range(4) for event in setup.pairing.step()]
        assert events[-1].finish_reason is pd.FinishReason.FAILED
        assert f"whose link broke under it: {MAX_LINKS}" in str(events[-1].error)


# -- what decode counts -------------------------------------------------------------------------------------------


def test_an_attempt_that_another_prefill_takes_over_is_not_counted() -> None:
    with several(2, 1) as setup:
        decode, writers = setup.decodes[0], [one.address for one in setup.prefills]
        decode.submit(request(), writers=writers[:1])
        for turn in range(3 * decode.config.max_attempts):
            (granted,) = decode.step()
            assert isinstance(granted, pd.Granted)
            assert granted.grant.writers == (writers[turn % 2],)
            decode.change_writers("a", writers=[writers[(turn + 1) % 2]])
        (sequence,) = decode._sequences.values()
        assert (sequence.attempts, sequence.num_failed) == (9, 1)  # the one that is under way


@pytest.mark.parametrize("comes", ["another", "back"])
def test_a_last_attempt_has_failed_once_the_writer_turns_out_to_live(comes: str) -> None:
    """A link ends before it is known whether the port did."""
    engine = pd.EngineConfig(max_attempts=1)
    with several(2, 1, engine=engine) as setup:
        decode, (first, second) = setup.decodes[0], setup.prefills
        decode.submit(request(), writers=[first.address])
        decode.step()
        first.disconnect(decode.address)
        assert [decode.step() for _ in range(3)] == [[], [], []]
        if comes == "another":
            decode.change_writers("a", writers=[second.address])
            (event,) = decode.step()
            assert isinstance(event, pd.Granted)
        else:
            first.connect(decode.address)
            (event,) = decode.step()
            assert isinstance(event, pd.TokenEvent)
            assert event.finish_reason is pd.FinishReason.FAILED


# -- engines in other processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_knows_what_is_computed_before_the_step_that_may_end_its_process(role: str) -> None:
    with several(1, 1, "tcp") as setup:
        served: Any = setup.prefills[0] if role == "prefill" else setup.decodes[0]
        with remote(served) as client:
            ports = ([client], setup.decodes) if role == "prefill" else (setup.prefills, [client])
            setup.pairing.remove(served, drain_s=0.0)
            seen: list[frozenset[str]] = []
            compute = getattr(served._runner, role)

            def watched(*arguments: Any, **named: Any) -> Any:
                wait_until(lambda: client.computing)
                seen.append(client.computing)
                return compute(*arguments, **named)

            setattr(served._runner, role, watched)
            for port in setup.engines:
                if port is not served:
                    setup.pairing.remove(port, drain_s=0.0)
            with pd.Pairing(*ports) as pairing:
                pairing.submit(request("a"))
                assert tokens_of(step_until(pairing, lambda events: not pairing.num_unfinished)) == EXPECTED
            assert seen[0] == {"a"}


def test_requests_wait_for_a_process_that_is_lost_and_not_for_an_engine_that_is_here() -> None:
    clock = VirtualClock()
    with several(1, 1, "tcp", clock=clock) as setup:
        decode = setup.decodes[0]
        ours, theirs = Pipe()
        started(pd.remote.serve, decode, theirs)
        setup.pairing.remove(decode, drain_s=0.0)
        client: Any = pd.remote.DecodeClient(ours)
        setup.pairing.add(client)
        theirs.close()
        client.step = broken
        client.recover = broken
        setup.pairing.submit(request("waits"))
        assert setup.pairing.step() + setup.pairing.step() == []
        clock.advance(PORT_WAIT_S - 0.5)
        assert setup.pairing.step() == []
        clock.advance(0.5)
        (end,) = setup.pairing.step()
        assert "no decode port is left" in str(end.error)
        break_off(setup.prefills[0])
        setup.pairing.submit(request("fails"))
        setup.pairing.step()
        (end,) = setup.pairing.step()
        assert "no prefill port is left" in str(end.error)
        client.close()


def test_a_port_that_fails_in_every_step_comes_back_now_and_then() -> None:
    """Not in every step, and the host is woken when it may."""
    clock = VirtualClock()
    with several(1, 1, clock=clock) as setup:
        prefill: Any = setup.prefills[0]
        prefill.recover, prefill.step = lambda: True, broken
        for _ in range(5):
            setup.pairing.step()
        assert setup.pairing.stats.num_ports_lost == 2
        check_wakes_in(setup.pairing, BACK_S)
        clock.advance(BACK_S)
        setup.pairing.step()
        assert setup.pairing.stats.num_ports_lost == 3
        del prefill.step
        clock.advance(BACK_S)
        setup.pairing.submit(request())
        assert tokens_of(collect(setup.pairing)) == EXPECTED


# -- requests that wait beside ports that live --------------------------------------------------------------------


def test_ports_find_each_other_though_their_channels_have_given_up() -> None:
    """A channel does not dial a peer for ever that it cannot reach. Two ports of a pairing are asked to, again."""
    clock = VirtualClock()
    with several(1, 1, "tcp", clock=clock) as setup:
        prefill, decode = setup.prefills[0], setup.decodes[0]
        prefill.disconnect(decode.address)  # as its channel does after a minute
        wait_until(lambda: not decode.channel.connected(prefill.address))
        clock.advance(LOOK_S)
        setup.pairing.submit(request())
        links = (prefill.channel, decode.address), (decode.channel, prefill.address)
        events = step_until(setup.pairing, lambda _: all(channel.connected(peer) for channel, peer in links))
        clock.advance(LOOK_S)  # not before: a request waits for a link in this time, and links are dialled in real time
        events += collect(setup.pairing)
        assert tokens_of(events) == EXPECTED


def test_a_request_leaves_a_decode_that_no_prefill_reaches_if_another_pair_can_serve_it() -> None:
    clock = VirtualClock()
    with several(2, 2, "tcp", clock=clock) as setup:
        (first, second), near = setup.prefills, setup.decodes[0]
        for prefill in setup.prefills:
            hang(prefill)
            prefill.channel.connect = lambda *_, **__: None  # type: ignore[method-assign]
        setup.pairing.submit(request())
        step_until(setup.pairing, lambda _: near.load().num_granted_requests)
        for prefill in (first, second):
            prefill.disconnect(near.address)
        wait_until(lambda: not any(near.channel.connected(prefill.address) for prefill in setup.prefills))
        clock.advance(LOOK_S)
        assert setup.pairing.step() == []
        for prefill in setup.prefills:
            recover(prefill)
        assert setup.pairing.step() == []
        assert setup.pairing.stats.num_moved == 0
        clock.advance(STRANDED_S + 0.1)
        assert tokens_of(collect(setup.pairing)) == EXPECTED
        assert setup.pairing.stats.num_moved == 1
