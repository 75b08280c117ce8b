"""An engine that several clients share: fair turns, and ids, cancels and news that are each one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import attrs

import pdinfer as pd
from pdinfer.remote import messages
from pdinfer.remote.line import MirroredPages
from pdinfer.remote.messages import LoadMessage, PackedRequest, Ready
from pdinfer.remote.served_client import MAX_UNGRANTED, ServedClient, Submitted
from pdinfer.remote.shared_engine import SharedEngine
from tests.e2e.setups import local, prompt_of, reference, request, tokens_of


@attrs.define(eq=False)
class Office:
    """A decode that clients share. Nothing happens but in its calls, and `told` has what each client was told."""

    shared: SharedEngine
    setup: Any
    told: dict[ServedClient, list[messages.Report]] = attrs.field(factory=dict)
    ends: list[tuple[ServedClient, Connection]] = attrs.field(factory=list)

    @property
    def engine(self) -> pd.DecodeEngine:
        engine = self.shared.engine
        assert isinstance(engine, pd.DecodeEngine)
        return engine

    def enter(self) -> ServedClient:
        ours, theirs = Pipe()
        client = ServedClient(theirs, pd.remote.RemoteConfig(), lambda *_: None, messages.BeatMessage)
        told = self.told[client] = []
        client.session.post = client.session.tell = told.append  # type: ignore[method-assign,assignment]
        self.shared.clients += (client,)
        client.begin(self.engine, Ready(self.engine.address, self.engine.limits, LoadMessage.of(self.engine)))
        self.ends.append((client, ours))
        return client

    def submit(self, client: ServedClient, *requests: pd.Request) -> None:
        client.has_asked, writers = True, (self.setup.prefills[0].address,)
        for one in requests:
            self.shared.act(client, messages.SubmitDecodeMessage(PackedRequest.of(one), writers))

    def cancel(self, client: ServedClient, *request_ids: str) -> None:
        for request_id in request_ids:
            self.shared.act(client, messages.CancelMessage(request_id))

    def step(self) -> list[tuple[ServedClient, pd.types.Event]]:
        """Step decode, and return what each client is to be told."""
        for client in self.shared.clients:
            self.shared.let_in(client)
        self.shared.route(self.engine.step())
        told = [(client, event) for client in self.shared.clients for event in client.events]
        for client in self.shared.clients:
            client.events = []
        return told

    def run(self) -> list[tuple[ServedClient, pd.types.Event]]:
        """Step decode and its prefill until all is done."""
        told = []
        for _ in range(200):
            if not self.engine.num_unfinished and not any(client.held for client in self.shared.clients):
                return told
            for _, event in (new := self.step()):
                if isinstance(event, pd.Granted):
                    self.setup.prefills[0].submit(event.request, event.grant)
            told += new
            self.setup.prefills[0].step()
        raise AssertionError(f"some did not end: {self.engine.request_ids}")


@contextmanager
def office(**more: Any) -> Iterator[Office]:
    with local(**more) as setup:
        setup.pairing.remove(setup.decodes[0], drain_s=0.0)
        made = Office(SharedEngine(setup.decodes[0]), setup)
        try:
            yield made
        finally:
            for client, ours in made.ends:
                client.close()
                ours.close()


def ids_of(told: Sequence[tuple[ServedClient, pd.types.Event]], kind: type) -> list[tuple[ServedClient, str]]:
    """Whose requests there are events of this kind of, and how their clients call them."""
    return [
        (client, event.grant.request_id if isinstance(event, pd.Granted) else event.request_id)
        for client, event in told
        if isinstance(event, kind)
    ]


def names(prefix: str, count: int) -> list[pd.Request]:
    return [request(f"{prefix}{number}") for number in range(count)]


def test_two_requests_of_one_id_get_each_their_own_tokens() -> None:
    with office() as desk:
        one, other = desk.enter(), desk.enter()
        prompts = {one: prompt_of(9, seed=1), other: prompt_of(13, seed=2)}
        for client, prompt in prompts.items():
            desk.submit(client, request("a", 6, prompt=prompt))
        told = desk.run()
        for client, prompt in prompts.items():
            stream = [event for of, event in told if of is client and isinstance(event, pd.TokenEvent)]
            assert {event.request_id for event in stream} == {"a"}
            assert tokens_of(stream) == list(reference("v3", prompt, 6).tokens)
        assert set(ids_of(told, pd.Granted)) == {(one, "a"), (other, "a")}
        assert desk.shared.names.of_client(one) == desk.shared.names.of_client(other) == []
        desk.setup.check_pools()


def test_one_may_not_use_an_id_twice_and_its_first_request_goes_on() -> None:
    with office() as desk:
        one, _ = desk.enter(), desk.enter()
        desk.submit(one, request("a"), request("a"))
        told = desk.run()
        (refused,) = (event for _, event in told if isinstance(event, pd.Refused))
        assert "in use by a request that has not ended" in str(refused.error)
        stream = [event for _, event in told if isinstance(event, pd.TokenEvent)]
        assert stream[-1].finish_reason is pd.FinishReason.LENGTH


def test_a_cancel_ends_the_request_of_who_asked() -> None:
    with office() as desk:
        one, other = desk.enter(), desk.enter()
        for client in (one, other):
            desk.submit(client, request("a", 6))
        desk.cancel(other, "a")
        ends = [(client, event) for client, event in desk.run() if getattr(event, "finish_reason", None)]
        assert {client: event.finish_reason for client, event in ends} == {  # type: ignore[union-attr]
            one: pd.FinishReason.LENGTH,
            other: pd.FinishReason.CANCELLED,
        }


def test_one_that_asks_for_much_delays_nobody_by_all_of_it() -> None:
    """A turn is a grant. Here one request runs at a time, and each ends as soon as it was granted."""
    with office(engine=pd.EngineConfig(max_running_requests=1)) as desk:
        many, few = desk.enter(), desk.enter()
        desk.submit(many, *names("m", 3 * MAX_UNGRANTED))
        granted: list[tuple[ServedClient, str]] = []
        for _ in range(10 * MAX_UNGRANTED):
            if len(granted) == 3 and not few.num_seen:
                desk.submit(few, *names("f", 2))
            for client, name in ids_of(desk.step(), pd.Granted):
                granted.append((client, name))
                desk.cancel(client, name)
            hang_up(desk)
        assert [name for client, name in granted if client is many] == [f"m{n}" for n in range(3 * MAX_UNGRANTED)]
        first = granted.index((few, "f0"))
        assert 3 <= first <= 3 + MAX_UNGRANTED + 1
        assert granted[first + 1] == (few, "f1") or granted[first + 2] == (few, "f1")


def hang_up(desk: Office) -> None:
    """Let prefill notice the rooms that were given up, so that their pages are free."""
    desk.setup.prefills[0].step()


def test_the_only_client_has_the_engines_own_line() -> None:
    with office(engine=pd.EngineConfig(max_running_requests=1)) as desk:
        one = desk.enter()
        desk.submit(one, *names("m", 3 * MAX_UNGRANTED))
        desk.step()
        assert desk.engine.load().num_waiting_requests == 3 * MAX_UNGRANTED - 1
        assert one.held == []


def test_of_those_that_are_held_the_most_urgent_is_next() -> None:
    with office(engine=pd.EngineConfig(max_running_requests=1)) as desk:
        one, _ = desk.enter(), desk.enter()
        desk.submit(one, *names("m", MAX_UNGRANTED + 2), request("urgent", priority=1), request("too", priority=1))
        assert [submitted.request.request_id for submitted in one.held] == ["urgent", "too", "m16", "m17"]


def test_a_request_that_is_held_can_be_cancelled_and_given_other_writers() -> None:
    with office(engine=pd.EngineConfig(max_running_requests=1)) as desk:
        one, _ = desk.enter(), desk.enter()
        desk.submit(one, *names("m", MAX_UNGRANTED + 3))
        held = [f"m{MAX_UNGRANTED + n}" for n in range(3)]
        other = attrs.evolve(desk.setup.prefills[0].address, rank=7)
        desk.shared.act(one, messages.ChangeWritersMessage(held[1], (other,)))
        assert [submitted.writers == (other,) for submitted in one.held] == [False, True, False]
        desk.cancel(one, held[0])
        ends = [event for _, event in desk.step() if isinstance(event, pd.TokenEvent)]
        assert [(event.request_id, event.finish_reason) for event in ends] == [(held[0], pd.FinishReason.CANCELLED)]
        assert [submitted.request.request_id for submitted in one.held] == held[1:]
        desk.shared.act(one, messages.ChangeWritersMessage("m1", (other,)))  # one that the engine has
        desk.step()
        assert desk.engine._sequences["m1"].writers == (other,)


def test_time_that_a_request_is_held_counts() -> None:
    submitted = Submitted(request=request(deadline_s=5.0), writers=(), at=100.0)
    assert submitted.request_at(103.0).deadline_s == 2.0
    assert submitted.request_at(106.0).deadline_s == 0.0
    assert Submitted(request=request(), writers=(), at=0.0).request_at(9.0) == request()


def test_a_request_that_is_held_ends_when_its_time_is_over() -> None:
    """Not when its turn comes."""
    with office(engine=pd.EngineConfig(max_running_requests=1)) as desk:
        one, _ = desk.enter(), desk.enter()
        desk.submit(one, *names("m", MAX_UNGRANTED), request("late", deadline_s=1e-9), *names("n", 2))
        ends = [event for _, event in desk.step() if isinstance(event, pd.TokenEvent)]
        assert [(event.request_id, event.finish_reason) for event in ends] == [("late", pd.FinishReason.DEADLINE)]
        assert [submitted.request.request_id for submitted in one.held] == ["n0", "n1"]


def test_who_has_too_many_waiting_is_refused_alone() -> None:
    with office(engine=pd.EngineConfig(max_running_requests=1, max_queued_requests=20)) as desk:
        many, few = desk.enter(), desk.enter()
        desk.submit(many, *names("m", MAX_UNGRANTED + 22))
        desk.submit(few, request("f"))
        told = desk.step()
        assert ids_of(told, pd.Refused) == [(many, f"m{MAX_UNGRANTED + 20}"), (many, f"m{MAX_UNGRANTED + 21}")]
        assert all(isinstance(event.error, pd.Overloaded) for _, event in told if isinstance(event, pd.Refused))


def test_a_load_tells_of_all_in_the_engine_and_of_ones_own_that_are_held() -> None:
    with office(engine=pd.EngineConfig(max_running_requests=1)) as desk:
        many, few = desk.enter(), desk.enter()
        desk.submit(many, *names("m", MAX_UNGRANTED + 5))
        desk.submit(few, request("f"))
        desk.step()
        desk.shared.report(busy=False)
        told: dict[ServedClient, Any] = {
            client: report.load.decode
            for client, reports in desk.told.items()
            for report in reports
            if isinstance(report, messages.Stepped)
        }
        in_line = MAX_UNGRANTED + 1 - 1  # one of them is granted
        assert told[few].num_waiting_requests == in_line
        assert told[many].num_waiting_requests == in_line + 5
        each = len(request().tokens)
        assert told[many].num_waiting_tokens == told[few].num_waiting_tokens + 5 * each
        assert {load.num_granted_requests for load in told.values()} == {1}


def test_each_is_told_of_its_own_requests_that_are_computed() -> None:
    with office() as desk:
        one, other = desk.enter(), desk.enter()
        desk.engine.tell_computing(desk.shared.tell_computing)
        for client, name in ((one, "a"), (other, "b"), (other, "a")):
            desk.submit(client, request(name))
        desk.run()
        said = {
            client: [report.request_ids for report in reports if isinstance(report, messages.Computing)]
            for client, reports in desk.told.items()
        }
        assert said == {one: [("a",)], other: [("a", "b")]}


def test_who_is_gone_leaves_nothing_and_the_others_go_on() -> None:
    with office() as desk:
        one, other = desk.enter(), desk.enter()
        for client in (one, other):
            desk.submit(client, *names("m", 3))
        desk.shared.clients = (other,)
        desk.shared.stop(one, 0)
        one.forget_pages()
        told = desk.run()
        assert {client for client, _ in told} == {other}
        ends = [event for _, event in told if getattr(event, "finish_reason", None)]
        assert [event.finish_reason for event in ends] == [pd.FinishReason.LENGTH] * 3  # type: ignore[union-attr]
        assert desk.shared.names.of_client(one) == []
        assert len(desk.engine.pool.watchers.all) == 1
        desk.setup.check_pools()


def test_pages_are_told_to_each_since_it_came() -> None:
    with office() as desk:
        one = desk.enter()
        desk.submit(one, request("a", 8))
        desk.run()
        other = desk.enter()
        desk.submit(other, request("b", 8, prompt=prompt_of(9, seed=5)))
        desk.run()
        desk.shared.report(busy=False)
        for reports in desk.told.values():
            mirror = MirroredPages()
            for report in reports:
                if isinstance(report, Ready | messages.Stepped):
                    mirror.take(report.pages, num_pages=64)
            assert len(mirror) == len(desk.engine.pool.keys)
            assert all(key in mirror for key in desk.engine.pool.keys)
