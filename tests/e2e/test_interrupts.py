"""Ctrl-C and the like at any line: what was hit ends by name, the next request is answered, no page is lost."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.engine.engine import Engine
from pdinfer.inbox import Inbox
from pdinfer.kv.channel.book import LinkBook
from pdinfer.kv.channel.channel import ChannelArrivals
from pdinfer.kv.channel.sender import HandoffSender
from pdinfer.kv.transports.loopback import _Delivery, _End
from pdinfer.pairing import broker, ports, queue
from pdinfer.pairing.choosing import OfPolicy
from pdinfer.process import locks
from pdinfer.scheduling import decode as scheduling
from tests.e2e.interrupts import FACTORY, Alarm, Interrupter, Signaller, alarming, check_goes_on, interrupted, serve
from tests.e2e.setups import (
    PROMPT,
    Setup,
    by_request,
    collect,
    join,
    local,
    model_of,
    pool_of,
    prompt_of,
    reference,
    request,
    tokens_of,
)
from tests.waiting import check_ends, started, wait_until


@pytest.fixture(autouse=True)
def _endless_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request waits for nothing of those before it: that would take longer than a test may."""
    monkeypatch.setattr(scheduling, "WRITER_GRACE_S", 3600.0)
    monkeypatch.setattr(queue, "LINK_WAIT_S", 3600.0)


KINDS = ("shared", "loopback", "tcp")
POOL = "own grant adopt release generations find num_unused share is_kept keep forget rebuild"
CHANNEL = "connected shares_pool expect abort poll accept push finish poll_stops is_full notify redial_in_s recover"
ARRIVALS = "received place placed closed"
OWNERS = (pd.PagePool, POOL), (pd.KVChannel, CHANNEL), (ChannelArrivals, ARRIVALS)
CALLS = [(owner, name) for owner, names in OWNERS for name in names.split()]


def over(kind: str) -> Setup:
    if kind == "shared":
        return local()
    pools = [pool_of(model_of(), num_pages=64) for _ in range(2)]
    return join(model_of(), kind, prefill_pools=pools[:1], decode_pools=pools[1:])


def at_random_lines(kind: str, error: str, count: int, seed: int) -> None:
    """Each a run that was hit at a line drawn from those of a whole run."""
    rng = random.Random(f"{kind}/{error}/{seed}")
    with over(kind) as setup:
        whole = Interrupter(-1)
        interrupted(setup, "whole", whole)
        for number in range(count):
            hit = Interrupter(rng.randrange(whole.num_lines), FACTORY[error])
            events = interrupted(setup, f"{number}", hit)
            try:
                check_goes_on(setup, f"{number}", events)
            except AssertionError as failed:
                failed.add_note(f"hit by {error} in line {hit.at}, {hit.where}")
                raise


@pytest.mark.parametrize(("kind", "error"), [("shared", "KeyboardInterrupt"), ("tcp", "SystemExit")])
def test_a_slice_of_random_lines(kind: str, error: str) -> None:
    at_random_lines(kind, error, 6, 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("kind", "error", "count"),
    [
        ("shared", "KeyboardInterrupt", 30),
        ("loopback", "KeyboardInterrupt", 20),
        ("tcp", "KeyboardInterrupt", 20),
        ("unix", "KeyboardInterrupt", 10),
        ("shared", "MemoryError", 10),
        ("loopback", "SystemExit", 10),
    ],
)
def test_a_thousand_random_lines(kind: str, error: str, count: int, seed: int) -> None:
    at_random_lines(kind, error, count, seed + 1)


def alarms_at_random_lines(kind: str, count: int, seed: int) -> None:
    """Each a run in which a handler of the host raises at a line drawn from those of a whole run: it reaches the host,
    and nothing ends that the host did not end."""
    rng = random.Random(f"{kind}/{seed}")
    with over(kind) as setup, alarming():
        whole = Signaller(-1)
        interrupted(setup, "whole", whole)
        for number in range(count):
            hit = Signaller(rng.randrange(whole.num_lines), Alarm)
            events: list[pd.TokenEvent] = []
            try:
                with contextlib.suppress(Alarm), hit.active():
                    serve(setup, f"{number}", events)
                    assert not hit.where, "it has not reached the host"
                check_goes_on(setup, f"{number}", events)
                stats = setup.pairing.stats
                assert (stats.num_ports_lost, stats.num_retries, dict(stats.ended).get("failed", 0)) == (0, 0, 0)
            except BaseException as failed:
                failed.add_note(f"hit in line {hit.at}, {hit.where}")
                raise


@pytest.mark.parametrize("kind", ["shared", "loopback"])
def test_what_a_handler_raises_at_any_line_costs_nothing(kind: str) -> None:
    alarms_at_random_lines(kind, 8, 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["shared", "loopback", "tcp"])
def test_what_a_handler_raises_at_three_hundred_lines_of_each_kind_costs_nothing(kind: str, seed: int) -> None:
    alarms_at_random_lines(kind, 30, seed + 1)


@contextmanager
def hit_in(setup: Setup, owner: type, name: str, *, call: int, before: bool) -> Iterator[list[int]]:
    """KeyboardInterrupt in that call of a method by this thread, before or behind what it does. Gives how many calls
    there were."""
    method, thread, calls = getattr(owner, name), threading.get_ident(), [0]

    def hit(*args: Any, **kwargs: Any) -> Any:
        ours = threading.get_ident() == thread
        calls[0] += ours
        now = ours and calls[0] == call + 1
        if now and before:
            raise KeyboardInterrupt
        result = method(*args, **kwargs)
        if now:
            raise KeyboardInterrupt
        return result

    setattr(owner, name, hit)
    try:
        yield calls
    finally:
        setattr(owner, name, method)


def at_calls(setup: Setup, owner: type, name: str, num_calls: int | None) -> None:
    """Each of the first `num_calls` calls of a method, before and behind."""
    call, calls = 0, [1]
    while call < calls[0] and (num_calls is None or call < num_calls):
        for before in (True, False):
            hit = Interrupter(-1)
            hit.where = f"call {call} of {name}"
            with hit_in(setup, owner, name, call=call, before=before) as calls:
                events = interrupted(setup, f"{name}/{call}/{before}", hit)
            try:
                check_goes_on(setup, f"{name}/{call}/{before}", events)
            except AssertionError as failed:
                failed.add_note(f"hit in call {call} of {name}, before: {before}")
                raise
        call += 1


def test_the_first_call_of_every_method() -> None:
    with over("loopback") as setup:
        for owner, name in CALLS:
            at_calls(setup, owner, name, 1)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("owner", "name"), CALLS)
def test_every_call_of_every_method(kind: str, owner: type, name: str) -> None:
    with over(kind) as setup:
        at_calls(setup, owner, name, None)


def test_ctrl_c_itself() -> None:
    """A real signal, at a moment of its own."""
    rng = random.Random(0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with over("loopback") as setup:
            for number in range(10):
                hit = Interrupter(-1)
                hit.where = "wherever the signal came"
                timer = threading.Timer(rng.uniform(0.001, 0.06), signal.raise_signal, (signal.SIGINT,))
                events: list[pd.TokenEvent] = []
                try:
                    timer.start()
                    events = interrupted(setup, str(number), hit)
                    timer.join()
                    time.sleep(0.01)
                except KeyboardInterrupt:  # behind the end of it
                    pass
                timer.join()
                check_goes_on(setup, str(number), events)
    finally:
        signal.signal(signal.SIGINT, before)


class Stand:
    """A policy that can be another one from now on."""

    def __init__(self, policy: Any) -> None:
        self.now = policy

    def __call__(self, *given: Any) -> Any:
        return self.now(*given)


@contextmanager
def handler_of_sigint(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is handler, "a step left its own handler behind"
    finally:
        signal.signal(signal.SIGINT, before)


def signals_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, times: int = 1) -> list[str]:
    """Let the next call of a method begin with so many Ctrl-C, and return a list that names it if it went on."""
    plain = getattr(owner, name)
    went_on: list[str] = []

    def call(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, plain)
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        went_on.append(name)
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return went_on


@pytest.mark.parametrize(
    ("owner", "name"), [(broker.Broker, "_tell"), (HandoffSender, "_write_to"), (Engine, "_begin")]
)
@pytest.mark.parametrize("kind", ["shared", "loopback"])
def test_ctrl_c_waits_for_the_end_of_a_step_and_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, kind: str, owner: Any, name: str
) -> None:
    if (kind, owner) == ("shared", HandoffSender):
        return  # where pages are shared nothing is sent
    with over(kind) as setup, handler_of_sigint(signal.default_int_handler):
        setup.pairing.submit(request("a"))
        signals_once(monkeypatch, owner, name)
        events: list[pd.TokenEvent] = []
        with pytest.raises(KeyboardInterrupt):
            events.extend(itertools.chain.from_iterable(setup.pairing.step() for _ in range(1000)))
        events += collect(setup.pairing)
        assert tokens_of(by_request(events)["a"]) == list(reference("v3", PROMPT, 5).tokens)
        assert setup.pairing.stats.num_retries == 0
        setup.check_idle()


def test_ctrl_c_in_a_step_of_an_engine_that_a_host_steps_keeps_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    with local() as setup, handler_of_sigint(signal.default_int_handler):
        decode = setup.decodes[0]
        decode.submit(request("a"), writers=(setup.prefills[0].address,))
        signals_once(monkeypatch, pd.KVChannel, "poll")
        with pytest.raises(KeyboardInterrupt):
            decode.step()
        (granted,) = decode.step()
        assert isinstance(granted, pd.Granted)
        decode.cancel("a")
        wait_until(lambda: not decode.step() and not decode.num_unfinished)


def test_a_second_ctrl_c_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with over("loopback") as setup, handler_of_sigint(signal.default_int_handler):
        setup.pairing.submit(request("hit"))
        went_on = signals_once(monkeypatch, HandoffSender, "_write_to", times=2)
        with pytest.raises(KeyboardInterrupt):
            collect(setup.pairing)
        assert not went_on
        setup.pairing.submit(request("next"))
        streams = by_request(collect(setup.pairing))
        assert streams["hit"][-1].finish_reason is not None
        assert tokens_of(streams["next"]) == list(reference("v3", PROMPT, 5).tokens)
        setup.check_idle()


def test_what_a_handler_raises_while_a_callback_hangs_is_raised_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the end of the step, but not for ever. The handler itself is called once."""
    rung: list[int] = []

    def ring(number: int, _: object) -> None:
        rung.append(number)
        raise Alarm

    def hangs(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: False)

    monkeypatch.setattr(locks, "HELD_S", 0.05)
    policy = Stand(pd.policy.least_tokens)
    with local(policy=policy) as setup, handler_of_sigint(ring):
        setup.pairing.submit(request("hit"))
        policy.now = hangs
        with pytest.raises(Alarm):
            setup.pairing.step()
        policy.now = pd.policy.least_tokens
        assert rung == [signal.SIGINT]
        streams = by_request(collect(setup.pairing))
        assert tokens_of(streams["hit"]) == list(reference("v3", PROMPT, 5).tokens)
        setup.check_idle()


class Rings:
    """A matcher in which the host's alarm rings."""

    def begin(self, prompt: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return lambda token: False


@pytest.mark.parametrize("where", ["matcher", "inbox"])
def test_a_submit_in_which_a_handler_raises_has_taken_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with local() as setup, alarming():
        plain = Inbox.wake
        if where == "inbox":
            monkeypatch.setattr(Inbox, "wake", lambda inbox: (plain(inbox), signal.raise_signal(signal.SIGUSR1)))
        with pytest.raises(Alarm):
            setup.pairing.submit(request("a", stop=Rings() if where == "matcher" else ()))
        monkeypatch.setattr(Inbox, "wake", plain)
        assert setup.pairing.num_unfinished == 0
        setup.pairing.submit(request("a"))
        assert tokens_of(by_request(collect(setup.pairing))["a"]) == list(reference("v3", PROMPT, 5).tokens)


def test_a_handler_of_the_host_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    with over("loopback") as setup, handler_of_sigint(lambda number, _: came.append(number)):
        setup.pairing.submit(request("a"))
        signals_once(monkeypatch, broker.Broker, "_tell", times=3)
        events = collect(setup.pairing)
        assert came == [signal.SIGINT] * 3
        assert tokens_of(by_request(events)["a"]) == list(reference("v3", PROMPT, 5).tokens)


def test_a_handler_that_is_set_in_a_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with local() as setup:
            monkeypatch.setattr(setup.decodes[0], "_step", lambda: signal.signal(signal.SIGINT, mine))
            setup.decodes[0].step()
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_id_whose_submit_was_interrupted_is_free() -> None:
    put = Inbox.put

    def hit(inbox: Inbox[Any], item: Any) -> None:
        put(inbox, item)
        raise KeyboardInterrupt

    with local() as setup:
        pairing = setup.pairing
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inbox, "put", hit)
            with pytest.raises(KeyboardInterrupt):
                pairing.submit(request("a"))
        pairing.submit(request("a"))
        assert tokens_of(by_request(collect(pairing))["a"]) == list(reference("v3", PROMPT, 5).tokens)


def test_no_thread_waits_for_a_lock_of_an_interrupted_one() -> None:
    """A line of the trace is also where a `with` gives its lock back: there the interrupt leaves it closed."""
    with local() as setup:
        code = Inbox.put.__code__
        for at in range(4):
            hit = Interrupter(at, counts=lambda called: called is code)
            try:
                with hit.active():
                    setup.pairing.submit(request(f"hit/{at}"))
            except KeyboardInterrupt:
                pass
            check_ends(started(setup.pairing.submit, request(f"other/{at}")))
            streams = by_request(collect(setup.pairing))
            assert tokens_of(streams[f"other/{at}"]) == list(reference("v3", PROMPT, 5).tokens)


@pytest.mark.parametrize("name", ["place", "placed", "received"])
def test_a_loopback_link_is_dialled_again_after_an_exception_in_a_delivery(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports.Ports, "dial", lambda _: None)  # the engines' own steps have to
    with over("loopback") as setup:
        arrivals = setup.decodes[0].channel.arrivals
        method = getattr(arrivals, name)

        def fails(*_: Any) -> None:
            setattr(arrivals, name, method)
            raise ValueError("a bug")

        setattr(arrivals, name, fails)
        right = list(reference("v3", PROMPT, 5).tokens)
        for request_id in ("hit", "next"):
            setup.pairing.submit(request(request_id))
            assert tokens_of(by_request(collect(setup.pairing))[request_id]) == right
        setup.check_idle()


def test_an_interrupt_between_deliveries_costs_no_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill's thread delivers to the decode, which recovers before it begins another request."""
    with over("loopback") as setup:
        complete = _Delivery.complete

        def interrupts(delivery: _Delivery, error: pd.TransferError | None) -> None:
            if setup.prefills[0]._unfinished_call:
                monkeypatch.undo()
                raise KeyboardInterrupt
            complete(delivery, error)

        monkeypatch.setattr(_Delivery, "complete", interrupts)
        setup.pairing.submit(request("interrupted", 4))
        with pytest.raises(KeyboardInterrupt):
            collect(setup.pairing)
        check_goes_on(setup, "0", [])


def test_an_interrupt_of_who_has_just_begun_to_deliver_costs_no_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with over("loopback") as setup:
        leave = threading.Condition.__exit__

        def interrupts(changed: threading.Condition, *raised: Any) -> None:
            leave(changed, *raised)
            caller = sys._getframe(1)
            if caller.f_code is _End.deliver.__code__ and setup.prefills[0]._unfinished_call:
                assert caller.f_locals["self"].deliverer == threading.get_ident()
                monkeypatch.undo()
                raise KeyboardInterrupt

        monkeypatch.setattr(threading.Condition, "__exit__", interrupts)
        setup.pairing.submit(request("interrupted", 4))
        with pytest.raises(KeyboardInterrupt):
            collect(setup.pairing)
        check_goes_on(setup, "0", [])


def raises_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    """Let the next call raise, as where a signal's handler does."""
    plain = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, plain)
        raise error

    monkeypatch.setattr(owner, name, call)


def test_an_alarm_in_a_step_reaches_the_host_and_costs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with over("shared") as setup:
        setup.pairing.submit(request("hit"))
        setup.pairing.step()
        raises_once(monkeypatch, broker.Broker, "_tell", TimeoutError("an alarm's handler"))
        with pytest.raises(TimeoutError, match="an alarm's handler"):
            collect(setup.pairing)
        setup.pairing.submit(request("next"))
        assert tokens_of(by_request(collect(setup.pairing))["next"]) == list(reference("v3", PROMPT, 5).tokens)
        assert setup.pairing.stats.num_ports_lost == 0
        setup.check_idle()


def test_an_alarm_while_bytes_are_sent_leaves_no_prompt_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with over("loopback") as setup:
        raises_once(monkeypatch, HandoffSender, "_write_to", TimeoutError("an alarm's handler"))
        for name in ("hit", "next"):
            setup.pairing.submit(request(name))
            last = by_request(collect(setup.pairing))[name][-1]
        assert last.finish_reason is pd.FinishReason.LENGTH
        setup.check_idle()


def test_what_a_policy_raises_about_one_request_costs_no_event_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with over("shared") as setup:
        setup.pairing.submit(request("runs", 12))
        events: list[pd.TokenEvent] = []
        while not events:
            events += setup.pairing.step()
        setup.pairing.submit(request("told"))
        step = setup.decodes[0].step
        grants_first = lambda: sorted(step(), key=lambda event: not isinstance(event, pd.Granted))  # noqa: E731
        monkeypatch.setattr(setup.decodes[0], "step", grants_first)
        raises_once(monkeypatch, broker.Broker, "_forward", OfPolicy(ZeroDivisionError("no port is any good")))
        with pytest.raises(ZeroDivisionError, match="no port is any good"):
            events += itertools.chain.from_iterable(iter(setup.pairing.step, None))
        setup.pairing.cancel("told")
        tokens = tokens_of(by_request(events + collect(setup.pairing))["runs"])
        assert tokens == list(reference("v3", PROMPT, 12).tokens)
        setup.check_idle()


def test_a_grant_that_an_interrupt_took_back_is_not_computed() -> None:
    """In a pool that both engines share prefill writes decode's pages itself: a grant that comes late is known by the
    generation of its pages."""
    with local() as setup:
        decode, prefill = setup.decodes[0], setup.prefills[0]
        decode.submit(request("a"), writers=(prefill.address,))
        (granted,) = decode.step()
        assert isinstance(granted, pd.Granted)
        with pytest.raises(KeyboardInterrupt), hit_in(setup, pd.KVChannel, "poll", call=0, before=True):
            decode.step()
        (ended,) = decode.step()
        assert isinstance(ended, pd.TokenEvent)
        assert ended.finish_reason is pd.FinishReason.FAILED
        assert "interrupted" in str(ended.error)
        prefill.step()  # dials
        prefill.submit(granted.request, granted.grant)
        prefill.step()
        assert prefill.load().num_tokens == 0
        setup.check_idle()


def test_pages_that_have_changed_hands_since_their_grant_are_not_written() -> None:
    with local() as setup:
        decode, prefill = setup.decodes[0], setup.prefills[0]
        decode.submit(request("a"), writers=(prefill.address,))
        (granted,) = decode.step()
        assert isinstance(granted, pd.Granted)
        of_before = tuple(generation - 1 for generation in granted.grant.generations)
        prefill.submit(granted.request, attrs.evolve(granted.grant, generations=of_before))
        wait_until(lambda: not prefill.step() and not prefill.num_unfinished)
        assert prefill.load().num_tokens == 0
        decode.cancel("a")
        wait_until(lambda: not decode.step() and not decode.num_unfinished)
        setup.check_idle()


def test_requests_that_wait_in_the_queue_wait_on() -> None:
    """An interrupt ends what was under way, and nothing else."""
    with local(num_pages=8, config=pd.PairingConfig(max_queued_per_decode=1)) as setup:
        names = [f"{number}" for number in range(6)]
        for name in names:
            setup.pairing.submit(request(name))
        setup.pairing.step()
        with pytest.raises(KeyboardInterrupt), hit_in(setup, pd.KVChannel, "poll", call=0, before=True):
            setup.pairing.step()
        in_line = setup.pairing.stats.num_queued_requests
        assert 0 < in_line < 6
        setup.pairing.submit(request("later"))
        streams = by_request(collect(setup.pairing))
        right = [name for name, stream in streams.items() if stream[-1].finish_reason is pd.FinishReason.LENGTH]
        assert right == [*names[-in_line:], "later"]
        setup.check_idle()


def depth() -> int:
    frame, num_frames = sys._getframe(), 0
    while frame is not None:
        frame, num_frames = frame.f_back, num_frames + 1
    return num_frames


@pytest.mark.parametrize(
    ("kind", "every"), [("loopback", 4), *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in KINDS)]
)
def test_a_host_that_calls_from_too_deep_loses_no_engine(kind: str, every: int) -> None:
    """Wherever its stack ends, and again where what recovers from that needs more of it."""
    ends = Counter[str]()
    limit = sys.getrecursionlimit()
    with over(kind) as setup:
        for room in range(10, 80, every):
            events: list[pd.TokenEvent] = []
            try:
                sys.setrecursionlimit(depth() + room)
                setup.pairing.submit(request(f"{room}/0", 4, prompt=prompt_of(7, seed=0)))
                for _ in range(40):  # not to its end, which does not come where each step fails
                    events += setup.pairing.step()
                ends["served"] += 1
            except RecursionError:
                ends["raised"] += 1
            finally:
                sys.setrecursionlimit(limit)
            check_goes_on(setup, f"{room}", events)
        assert setup.pairing.stats.num_ports_lost == 0
    assert ends["raised"] > 1 < ends["served"]  # how many depends on the version of Python


@pytest.mark.parametrize("error", [MemoryError, ValueError])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_a_loss_that_an_end_could_not_note_is_made_up_for(
    transport: str, role: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transport says twice that a link is closed."""
    close, failed = LinkBook.close, []
    with over(transport) as setup:
        (book,) = [engine.channel.links.book for engine in setup.engines if engine.role == role]

        def fails_once(self: LinkBook, *lost: Any) -> Any:
            if self is book and not failed:
                failed.append(lost)
                raise error
            return close(self, *lost)

        monkeypatch.setattr(LinkBook, "close", fails_once)
        for peer in book.peers():
            peer.fence()
        wait_until(lambda: failed)
        check_goes_on(setup, role, [])
