"""DecodeEngine when a step goes wrong: which requests end, which go on, and that every page returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.testing import VirtualClock, random_model
from pdinfer.types import Handoff, HandoffStatus

MODEL = random_model()


@pytest.fixture
def pairing() -> Iterator[pd.Pairing]:
    with pd.Pairing.local(MODEL, cache=pd.CacheConfig(page_size=4, num_pages=64)) as made:
        yield made
        (decode,) = (port for port in made.ports if port.role == "decode")
        assert isinstance(decode, pd.DecodeEngine)
        decode.channel.pool.check()
        assert decode.channel.pool.num_available == 64


def requests(count: int = 3) -> list[pd.Request]:
    sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    return [pd.Request(request_id=str(n), prompt=(n + 2, 9, 40), sampling=sampling) for n in range(count)]


def last_events(pairing: pd.Pairing) -> dict[str, pd.TokenEvent]:
    return {event.request_id: event for event in pairing.generate(requests()) if event.finish_reason is not None}


def test_a_grant_is_told_when_every_rank_expects_its_room(pairing: pd.Pairing, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def third_time(channel: KVChannel, room: bytes) -> bool:
        asked.append(room)
        return len(asked) > 2

    monkeypatch.setattr(KVChannel, "expects", third_time)
    (decode,) = (port for port in pairing.ports if port.role == "decode")
    assert isinstance(decode, pd.DecodeEngine)
    writers = tuple(port.address for port in pairing.ports if port.role == "prefill")
    (first, second) = requests(2)
    decode.submit(first, writers=writers)
    assert [decode.step(), decode.step()] == [[], []]
    decode.submit(second, writers=writers)
    decode.cancel("0")
    told = decode.step()
    assert [type(event) for event in told] == [pd.TokenEvent, pd.Granted]
    assert isinstance(told[1], pd.Granted)
    assert told[1].grant.request_id == "1"  # the other one was given up meanwhile
    decode.cancel("1")
    for _ in range(3):
        for port in pairing.ports:
            port.step()


def test_logits_that_are_not_finite_end_their_request_alone(
    pairing: pd.Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = pd.Model.head
    calls = []

    def damaged(model: pd.Model, state: torch.Tensor) -> torch.Tensor:
        logits = head(model, state)
        calls.append(len(state))
        if len(calls) == 4:
            logits[1, 5] = torch.nan
        return logits

    monkeypatch.setattr(pd.Model, "head", damaged)
    ends = last_events(pairing)
    assert [ends[n].finish_reason for n in "012"] == [
        pd.FinishReason.LENGTH,
        pd.FinishReason.FAILED,
        pd.FinishReason.LENGTH,
    ]
    assert "not finite" in str(ends["1"].error)


def test_a_step_that_fails_ends_its_batch_and_the_engine_goes_on(
    pairing: pd.Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pd.DecodeEngine, "_forward", lambda *_: 1 / 0)
        ends = last_events(pairing)
    assert {event.finish_reason for event in ends.values()} == {pd.FinishReason.FAILED}
    assert all("ZeroDivisionError" in str(event.error) for event in ends.values())
    assert {event.finish_reason for event in last_events(pairing).values()} == {pd.FinishReason.LENGTH}


# -- with prefill's end of the channel in our hands ------------------------------------------------------------------


@attrs.frozen
class Bench:
    """A decode engine, and the channel end that writes to it."""

    decode: pd.DecodeEngine
    prefill: KVChannel
    clock: VirtualClock

    def submit(self, request: pd.Request) -> list[pd.types.Event]:
        """Submit a request, and return the events of the next step."""
        self.decode.submit(request, writers=(self.prefill.address,))
        return self.decode.step()

    def hand_off(self, grant: pd.PageGrant, **more: Any) -> list[pd.types.Event]:
        """Send some bytes and a hand-off, and return what decode says to it."""
        handoff = Handoff(room=grant.room, writer=self.prefill.address, status=HandoffStatus.LANDED, **more)
        pool = self.prefill.pool
        pages = pool.own(pool.layout.num_pages(grant.tokens.stop))
        self.prefill.accept(grant)
        self.prefill.push(grant, layers=pool.layout.layers, tokens=grant.tokens, pages=pages)
        self.prefill.finish(grant, handoff)
        pool.release(pages)
        return self.decode.step()


@contextmanager
def bench(**config: Any) -> Iterator[Bench]:
    clock = VirtualClock(100.0)
    ours, theirs = KVChannel.loopback(
        *(pd.PagePool(MODEL, pd.CacheConfig(page_size=4, num_pages=16)) for _ in range(2))
    )
    decode = pd.DecodeEngine(MODEL, ours, pd.EngineConfig(**config), clock=clock)
    decode.connect(theirs.address)
    yield Bench(decode, theirs, clock)
    decode.close()
    assert ours.pool.num_available == ours.pool.num_pages
    ours.pool.check()
    theirs.close()


def request(name: str = "a", **more: Any) -> pd.Request:
    return attrs.evolve(requests(1)[0], request_id=name, **more)


@pytest.mark.parametrize(
    ("token", "logprob", "lands"),
    [
        (0, -0.5, True),
        (MODEL.config.vocab_size - 1, -0.5, True),
        (MODEL.config.vocab_size, -0.5, False),
        (None, None, False),
        (3, None, True),
    ],
)
def test_a_hand_off_must_hold_a_token_of_the_vocabulary(token: Any, logprob: Any, lands: bool) -> None:
    with bench() as made:
        (granted,) = made.submit(request())
        assert isinstance(granted, pd.Granted)
        event, *_ = made.hand_off(granted.grant, token=token, logprob=logprob)
        assert isinstance(event, pd.TokenEvent)
        if lands:
            assert (event.token, event.logprob) == (token, logprob)
            return
        assert (event.token, event.finish_reason) == (None, pd.FinishReason.FAILED)
        assert "no token of this vocabulary" in str(event.error)
        assert made.decode.num_unfinished == 0


def test_what_decode_cannot_take_is_refused_at_once() -> None:
    with bench(max_queued_requests=1, max_running_requests=1) as made:
        (granted,) = made.submit(request("a"))
        assert isinstance(granted, pd.Granted)
        assert made.submit(request("b")) == []  # waits for the place of the first
        for more, told in (
            (request("a"), "in use by a request that has not ended"),
            (request("c"), "decode already has 1 requests waiting"),
            (attrs.evolve(request(), request_id=None), "request_id is missing"),
        ):
            (refused,) = made.submit(more)
            assert isinstance(refused, pd.Refused)
            assert told in str(refused.error)
        made.decode.cancel("b")
        made.decode.step()
        made.decode.submit(request("d"), writers=())
        (refused,) = made.decode.step()
        assert isinstance(refused, pd.Refused)
        assert "writers is empty" in str(refused.error)


def test_a_grant_passes_on_the_time_that_is_left() -> None:
    with bench(max_running_requests=1) as made:
        (first,) = made.submit(request("a"))
        made.submit(request("b", deadline_s=10.0))
        made.clock.advance(4.0)
        assert isinstance(first, pd.Granted)
        assert first.request.deadline_s is None
        made.decode.cancel("a")
        events = [event for event in made.decode.step() if isinstance(event, pd.Granted)]
        assert [event.request.deadline_s for event in events] == [6.0]


def test_other_writers_get_another_room_and_the_first_one_is_asked_to_stop() -> None:
    with bench() as made:
        (granted,) = made.submit(request())
        assert isinstance(granted, pd.Granted)
        made.prefill.accept(granted.grant)
        made.decode.change_writers("a", writers=(made.prefill.address,))
        (again,) = made.decode.step()
        assert isinstance(again, pd.Granted)
        assert again.grant.room != granted.grant.room
        assert [room for room, _ in made.prefill.poll_stops()] == [granted.grant.room]
        handoff = Handoff(room=granted.grant.room, writer=made.prefill.address, status=HandoffStatus.ABORTED)
        assert made.decode.num_unfinished == 2  # the request, and the room whose writer may still write
        made.prefill.finish(granted.grant, handoff)
        made.decode.step()
        assert made.decode.num_unfinished == 1


@pytest.mark.parametrize(
    ("error", "num_grants"), [(pd.TransferError("lost"), 3), (pd.RequestError("bad"), 1), (pd.PDInferError("odd"), 1)]
)
def test_only_what_transfers_lose_is_tried_again(error: pd.PDInferError, num_grants: int) -> None:
    with bench(max_attempts=3) as made:
        events = made.submit(request())
        rooms = []
        for _ in range(4):
            if not isinstance(events[-1], pd.Granted):
                break
            grant = events[-1].grant
            rooms.append(grant.room)
            made.prefill.accept(grant)
            made.prefill.finish(
                grant,
                Handoff(room=grant.room, writer=made.prefill.address, status=HandoffStatus.ABORTED, error=error),
            )
            events = made.decode.step()
        assert len(set(rooms)) == num_grants
        (end,) = events
        assert isinstance(end, pd.TokenEvent)
        assert end.finish_reason is pd.FinishReason.FAILED
        assert str(error) in str(end.error)


def test_a_retracted_request_is_granted_again_with_its_tokens_so_far() -> None:
    with bench() as made:
        (granted,) = made.submit(request())
        assert isinstance(granted, pd.Granted)
        pool = made.decode.channel.pool
        rest = pool.own(pool.num_free)
        events = made.hand_off(granted.grant, token=5, logprob=-0.5)
        for _ in range(3):
            events += made.decode.step()
        tokens = [event.token for event in events if isinstance(event, pd.TokenEvent)]
        assert tokens[0] == 5
        pool.release(rest)
        (again,) = made.decode.step()
        assert isinstance(again, pd.Granted)
        assert again.request.output == tuple(tokens)
        assert again.grant.tokens.stop == len(again.request.prompt) + len(tokens)
