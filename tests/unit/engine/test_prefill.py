"""PrefillEngine driven by hand: what a failing step, a wrong grant, a cancel and a full window do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import pytest

import pdinfer as pd
from pdinfer.execution.sampling import Draw, Drawn
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.transports.base import Transfer
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.testing import VirtualClock, random_model
from pdinfer.types import Handoff, HandoffStatus, NamedState
from tests.unit.kv.channel.channels import granted

MODEL = random_model()
PROMPT = tuple(range(5, 25))
SMALL = pd.CacheConfig(page_size=4, num_pages=16)


@attrs.frozen
class Bench:
    """A prefill engine, and decode's end of its channel, which the test holds."""

    prefill: pd.PrefillEngine
    decode: KVChannel
    hub: LoopbackHub

    def grant(self, num_tokens: int = len(PROMPT), room: bytes = b"r" * 16) -> pd.PageGrant:
        """Grant pages for that many tokens, which decode's end expects."""
        return granted(self.decode, self.prefill.address, tokens=range(num_tokens), room=room, request_id="a")

    def run(self, steps: int = 8) -> list[Handoff]:
        """Run some steps, and return what decode's end heard."""
        for _ in range(steps):
            assert self.prefill.step() == []
        return self.decode.poll()


@contextlib.contextmanager
def made(clock: Callable[[], float] = time.monotonic) -> Iterator[Bench]:
    """Yield a bench, and check afterwards that the engine holds no page."""
    hub = LoopbackHub()
    ours, theirs = (KVChannel(pd.PagePool(MODEL, SMALL), LoopbackTransport(hub)) for _ in range(2))
    prefill = pd.PrefillEngine(MODEL, ours, pd.EngineConfig(chunked_prefill_size=8, send_window_bytes=1), clock=clock)
    prefill.connect(theirs.address)
    yield Bench(prefill, theirs, hub)
    prefill.close()
    assert ours.pool.num_available == ours.pool.num_pages
    ours.pool.check()
    theirs.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with made() as bench:
        yield bench


def request(**more: object) -> pd.Request:
    return pd.Request(
        request_id="a", prompt=PROMPT, sampling=pd.SamplingParams(temperature=0.0, max_new_tokens=8), **more
    )  # type: ignore[arg-type]


def test_a_prompt_lands_with_the_best_token(bench: Bench) -> None:
    bench.prefill.submit(request(), bench.grant())
    (handoff,) = bench.run()
    assert (handoff.status, handoff.token) == (HandoffStatus.LANDED, int(MODEL.logits(PROMPT)[-1].argmax()))
    assert bench.prefill.num_unfinished == 0
    assert bench.prefill.load().num_tokens == len(PROMPT)


def test_a_step_that_fails_ends_its_prompts_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds when it fails after one of them was handed off."""
    bench.prefill.submit(request(), bench.grant())
    runner = bench.prefill.ranks.runner

    def one_and_fail(rows: Sequence[int]) -> Iterator[tuple[NamedState, ...]]:
        yield ()
        raise ValueError("broken")

    monkeypatch.setattr(runner, "first_tokens", lambda rows, draws: [Drawn(token=3, logprob=-1.0)])
    monkeypatch.setattr(runner, "states", one_and_fail)
    (handoff,) = bench.run()
    assert (handoff.status, handoff.token) == (HandoffStatus.LANDED, 3)


def test_a_model_that_fails_aborts_and_the_engine_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pd.Model, "head", lambda *_: 1 / 0)
        bench.prefill.submit(request(), bench.grant())
        (handoff,) = bench.run()
    assert handoff.status is HandoffStatus.ABORTED
    assert "ZeroDivisionError" in str(handoff.error)
    bench.prefill.submit(request(), bench.grant(room=b"s" * 16))
    (handoff,) = bench.run()
    assert handoff.status is HandoffStatus.LANDED


def test_a_grant_for_another_number_of_tokens_is_aborted(bench: Bench) -> None:
    bench.prefill.submit(request(), bench.grant(num_tokens=12))
    (handoff,) = bench.run()
    assert isinstance(handoff.error, pd.RequestError)
    assert "tokens 0 to 12 and the request has 20" in str(handoff.error)


def test_a_salt_that_is_no_salt_is_aborted(bench: Bench) -> None:
    bench.prefill.submit(request(cache_salt="tenant"), bench.grant())
    (handoff,) = bench.run()
    assert isinstance(handoff.error, pd.RequestError)
    assert "cache_salt must be a bytes object of at most" in str(handoff.error)


def test_a_grant_of_no_tokens_is_aborted(bench: Bench) -> None:
    grant = bench.grant()
    bench.prefill.submit(request(), attrs.evolve(grant, tokens=range(len(PROMPT), len(PROMPT))))
    (handoff,) = bench.run()
    assert "tokens 20 to 20 and the request has 20" in str(handoff.error)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_cancel_is_an_aborted_hand_off(bench: Bench, num_steps: int) -> None:
    bench.prefill.submit(request(), bench.grant())
    for _ in range(num_steps):
        bench.prefill.step()
    bench.prefill.cancel("a")
    bench.prefill.cancel("nobody")
    (handoff,) = bench.run()
    assert handoff.status is HandoffStatus.ABORTED
    assert isinstance(handoff.error, pd.TransferError)  # after which decode tries once more


def test_a_full_decode_holds_its_own_prompts_and_no_others(bench: Bench) -> None:
    """They go on as soon as the bytes have left."""
    prefill, ours = bench.prefill, bench.prefill.channel
    full, held, free = bench.grant(room=b"f" * 16), bench.grant(room=b"h" * 16), pd.PagePool(MODEL, SMALL)
    pages = ours.pool.own(5)
    ours.accept(full)
    ours.push(full, layers=range(1), tokens=full.tokens, pages=pages)  # waits for the next layer, and fills the window
    prefill.submit(request(), held)
    assert bench.run() == []
    assert not prefill.wait(0.0)
    with KVChannel(free, LoopbackTransport(bench.hub)) as other:
        prefill.connect(other.address)
        prefill.submit(request(), Bench(prefill, other, bench.hub).grant(room=b"o" * 16))
        assert prefill.wait(0.0)
        assert bench.run() == []
        assert [handoff.status for handoff in other.poll()] == [HandoffStatus.LANDED]
    assert bench.run() == []
    ours.finish(full, Handoff(room=full.room, writer=prefill.address, status=HandoffStatus.ABORTED))
    ours.pool.release(pages)
    assert prefill.wait(0.0)
    assert {handoff.room: handoff.status for handoff in bench.run()} == {
        full.room: HandoffStatus.ABORTED,
        held.room: HandoffStatus.LANDED,
    }


def test_a_prompt_that_waits_for_pages_is_not_overtaken(bench: Bench) -> None:
    pool = bench.prefill.channel.pool
    taken = pool.own(pool.num_free - 3)
    for room, num_tokens in ((b"l" * 16, len(PROMPT)), (b"s" * 16, 4)):
        bench.prefill.submit(
            attrs.evolve(request(), request_id=room.hex(), prompt=PROMPT[:num_tokens]), bench.grant(num_tokens, room)
        )
    assert bench.run() == []
    assert not bench.prefill.wait(0.0)
    pool.release(taken)
    assert {handoff.room for handoff in bench.run()} == {b"l" * 16, b"s" * 16}


def submit(bench: Bench, name: str, num_tokens: int, **more: object) -> None:
    """Submit a prompt of that many tokens, with its name as its room."""
    asked = attrs.evolve(request(**more), request_id=name, prompt=PROMPT[:num_tokens])
    bench.prefill.submit(asked, bench.grant(num_tokens, name.encode() * 16))


def order_of_landing(bench: Bench) -> str:
    return "".join(handoff.room[:1].decode() for _ in range(12) for handoff in bench.run(1))


def test_a_short_prompt_does_not_wait_for_a_long_one(bench: Bench) -> None:
    """A chunk has eight tokens."""
    submit(bench, "l", 20)
    submit(bench, "m", 12)
    submit(bench, "s", 4)
    assert order_of_landing(bench) == "sml"


def test_a_priority_comes_before_what_is_short_or_old(bench: Bench) -> None:
    submit(bench, "l", 20)
    submit(bench, "p", 16, priority=1)
    submit(bench, "s", 4)
    assert order_of_landing(bench) == "psl"


def test_an_earlier_deadline_comes_first(bench: Bench) -> None:
    for name, deadline_s in {"a": None, "b": 20.0, "c": 10.0}.items():
        submit(bench, name, 16, deadline_s=deadline_s)
    assert order_of_landing(bench) == "cba"


def test_who_cannot_meet_its_deadline_takes_nothing_from_others(bench: Bench) -> None:
    submit(bench, "l", 4, deadline_s=0.0, priority=1)
    submit(bench, "a", 20)
    assert order_of_landing(bench) == "al"


def test_no_more_tokens_are_held_than_allowed() -> None:
    hub = LoopbackHub()
    ours, theirs = (KVChannel(pd.PagePool(MODEL, SMALL), LoopbackTransport(hub)) for _ in range(2))
    config = pd.EngineConfig(chunked_prefill_size=8, max_total_tokens=27)
    with theirs, pd.PrefillEngine(MODEL, ours, config) as prefill:
        assert prefill.limits.max_tokens == 24
        prefill.connect(theirs.address)
        bench = Bench(prefill, theirs, hub)
        for name in "ab":
            submit(bench, name, 16)
        most = 0
        while prefill.num_unfinished:
            prefill.step()
            most = max(most, ours.pool.num_owned)
        assert most == 4, "both were in six pages, or none"


def test_pages_are_held_until_they_are_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = bench.prefill.channel
    sending = Transfer(0)
    monkeypatch.setattr(ours, "finish", lambda grant, handoff: sending)
    bench.prefill.submit(request(), bench.grant())
    bench.run()
    assert (ours.pool.num_owned, bench.prefill.num_unfinished) == (5, 1)
    sending.complete()
    bench.run(1)
    assert (ours.pool.num_owned, bench.prefill.num_unfinished) == (0, 0)


def test_a_stop_ends_its_own_room_and_no_other(bench: Bench) -> None:
    stopped = bench.grant(room=b"s" * 16)
    bench.prefill.submit(request(), stopped)
    bench.prefill.submit(attrs.evolve(request(), request_id="b"), bench.grant(room=b"o" * 16))
    assert bench.run(1) == []
    bench.decode.abort(stopped, pd.TransferError("enough"))
    assert {handoff.room[:1]: handoff.status for handoff in bench.run()} == {
        b"s": HandoffStatus.ABORTED,
        b"o": HandoffStatus.LANDED,
    }


def test_a_token_that_a_request_makes_impossible_aborts_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    error = pd.RequestError("nothing may come")
    with monkeypatch.context() as patched:
        patched.setattr(
            bench.prefill.ranks.runner, "first_tokens", lambda *_: [Drawn(token=0, logprob=0.0, error=error)]
        )
        bench.prefill.submit(request(), bench.grant())
        (handoff,) = bench.run()
    assert (handoff.status, str(handoff.error)) == (HandoffStatus.ABORTED, "nothing may come")


def test_a_hand_off_tells_how_long_it_waited_and_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(100.0)
    with made(clock) as bench:
        pool, runner = bench.prefill.pool, bench.prefill.ranks.runner
        first_tokens = runner.first_tokens

        def slow(rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
            clock.advance(2.0)
            return first_tokens(rows, draws)

        monkeypatch.setattr(runner, "first_tokens", slow)
        taken = pool.own(pool.num_free)
        bench.prefill.submit(request(), bench.grant())
        assert bench.run(1) == []
        clock.advance(5.0)
        pool.release(taken)
        (handoff,) = bench.run()
        assert (handoff.queue_s, handoff.compute_s) == (5.0, 2.0)
