"""Handlers of signals are called at once, and what they raise waits for the end of the context."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pdinfer.process import locks
from pdinfer.process.locks import HeldBack
from tests.waiting import TIMEOUT_S

rung: list[int] = []


def ring(number: int, _: object) -> None:
    rung.append(number)
    raise ArithmeticError(len(rung))


@pytest.fixture(autouse=True)
def _rings() -> Iterator[None]:
    rung.clear()
    numbers = signal.SIGALRM, signal.SIGTERM
    before = [signal.signal(number, ring) for number in numbers]
    yield
    assert [signal.signal(number, old) for number, old in zip(numbers, before, strict=True)] == [ring, ring]


def alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


def held(*calls: Callable[[], object]) -> None:
    with HeldBack():
        for call in calls:
            call()


def test_what_a_handler_raises_waits_for_the_end() -> None:
    seen: list[int] = []
    with pytest.raises(ArithmeticError) as raised:
        held(alarm, lambda: seen.extend(rung))
    assert seen == [signal.SIGALRM]
    assert raised.value.__context__ is None
    with pytest.raises(ArithmeticError):
        alarm()


def test_it_goes_before_what_the_context_itself_raises() -> None:
    with pytest.raises(ArithmeticError) as raised:
        held(alarm, lambda: {}["key"])
    assert isinstance(raised.value.__context__, KeyError)


def test_a_second_error_is_raised_at_once() -> None:
    seen: list[str] = []
    with pytest.raises(ArithmeticError, match="2"):
        held(
            alarm,
            lambda: seen.append("behind the first"),
            lambda: signal.raise_signal(signal.SIGTERM),
            lambda: seen.append("behind the second"),
        )
    assert seen == ["behind the first"]


def test_the_outermost_context_holds_back() -> None:
    seen: list[str] = []
    with pytest.raises(ArithmeticError):
        held(lambda: held(alarm), lambda: seen.append("behind the inner one"))
    assert seen


def test_other_threads_hold_nothing_back() -> None:
    seen: list[object] = []

    def look() -> None:
        with HeldBack():
            seen.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [ring]


def test_a_handler_that_a_callback_has_put_away_and_sets_again_is_the_hosts() -> None:
    with HeldBack():
        kept = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, kept)
    with pytest.raises(ArithmeticError):
        alarm()
    seen: list[str] = []
    with pytest.raises(ArithmeticError):
        held(alarm, lambda: seen.append("the line behind"))
    assert seen
    signal.signal(signal.SIGALRM, ring)


@pytest.mark.parametrize("held_s", [0.0, 0.001, 0.003])
def test_what_has_waited_too_long_comes_once_more_and_never_for_the_host(
    monkeypatch: pytest.MonkeyPatch, held_s: float
) -> None:
    """Also where the context ends at that moment."""
    monkeypatch.setattr(locks, "HELD_S", held_s)
    for number in range(100):
        with pytest.raises(ArithmeticError):
            held(alarm, partial(time.sleep, held_s * (number % 3) / 2))
        assert len(rung) == number + 1


def test_a_reminder_that_comes_while_its_thread_is_started_is_not_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    start, send = locks._thread.start_new_thread, signal.pthread_kill
    sent = threading.Event()

    def send_and_tell(thread: int, number: int) -> None:
        send(thread, number)
        sent.set()

    def start_and_wait(run: Callable[[], None], args: tuple[()]) -> None:
        start(run, args)
        assert sent.wait(TIMEOUT_S)

    monkeypatch.setattr(locks, "HELD_S", 0.0)
    monkeypatch.setattr(locks._signal, "pthread_kill", send_and_tell)
    monkeypatch.setattr(locks._thread, "start_new_thread", start_and_wait)
    with pytest.raises(ArithmeticError):
        held(alarm)
    assert len(rung) == 1


def test_a_reminder_that_is_under_way_when_the_context_ends_is_not_for_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = signal.pthread_kill

    def late(thread: int, number: int) -> None:
        time.sleep(0.05)
        send(thread, number)

    monkeypatch.setattr(locks, "HELD_S", 0.0)
    monkeypatch.setattr(locks._signal, "pthread_kill", late)
    with pytest.raises(ArithmeticError):
        held(alarm, partial(time.sleep, 0.01))
    time.sleep(0.1)
    assert len(rung) == 1


def test_a_handler_that_raises_while_others_are_put_back_leaves_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours stand in for both until the end, where the first one is back already."""
    set_one = locks._signal.signal

    def rings(number: int, handler: object) -> None:
        set_one(number, handler)
        if handler is ring and not rung:
            signal.raise_signal(number)

    monkeypatch.setattr(locks._signal, "signal", rings)
    with pytest.raises(ArithmeticError):
        held()
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM)] == [ring, ring]


def test_without_a_thread_to_remind_an_error_waits_and_a_second_is_raised_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(locks._thread, "start_new_thread", refuse)
    seen: list[str] = []
    with pytest.raises(ArithmeticError, match="1"):
        held(alarm, lambda: seen.append("went on"))
    with pytest.raises(ArithmeticError, match="3"):
        held(alarm, alarm, lambda: seen.append("went on"))
    assert seen == ["went on"]


def test_what_was_raised_in_time_does_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HELD_S", 0.02)
    with pytest.raises(ArithmeticError):
        held(alarm)
    time.sleep(0.1)
    assert len(rung) == 1


def test_a_host_that_waits_for_ever_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HELD_S", 0.05)
    seen: list[str] = []
    with pytest.raises(ArithmeticError, match="1"):
        held(alarm, *[partial(time.sleep, 0.001)] * 5_000, lambda: seen.append("the end of it"))
    assert not seen
