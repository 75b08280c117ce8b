"""Messages between processes when the other end stands still, does not read, or is gone: no call waits, and it is
noticed. The time in which an end is silent passes when the test says so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.process.silence import SESSIONS
from pdinfer.remote import messages, session
from pdinfer.remote.messages import BeatMessage, CancelMessage, Close, Command, Report
from pdinfer.remote.session import Session
from tests.forks import FAR_S
from tests.waiting import check_ends, check_returns, started, wait_until

BEAT = messages.encode(BeatMessage())


class Sleep(threading.Event):
    """An event of sessions, which is waited for in the test's time."""

    def __init__(self, passing: Passing) -> None:
        super().__init__()
        self.passing = passing
        self.thread: threading.Thread | None = None
        self.due_s: float | None = None

    def set(self) -> None:
        super().set()
        with self.passing.changed:
            self.passing.changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        with self.passing.changed:
            self.thread, due_s = threading.current_thread(), self.passing.now_s + timeout
            self.due_s = due_s
            self.passing.changed.notify_all()
            self.passing.changed.wait_for(lambda: self.is_set() or self.passing.now_s >= due_s)
            self.due_s = None
            return self.is_set()

    @property
    def is_waited_for(self) -> bool:
        """Whether its session has done what there was to do by now."""
        is_over = self.thread is not None and not self.thread.is_alive()
        return self.due_s is not None or is_over or self.is_set()


class Passing:
    """Time that passes for sessions, in place of the modules `time` and `threading`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.changed = threading.Condition()
        self.sleeps: list[Sleep] = []

    def monotonic(self) -> float:
        return self.now_s

    def event(self) -> Sleep:
        self.sleeps.append(Sleep(self))
        return self.sleeps[-1]

    def settle(self) -> None:
        """Wait until every session has looked at this time."""
        end = time.monotonic() + FAR_S
        while not all(sleep.is_waited_for for sleep in self.sleeps):
            assert time.monotonic() < end, "a session does not look at the time any more"
            self.changed.wait(0.01)

    def go_on(self, seconds: float, *, looks: bool = True) -> None:
        """Let so many seconds pass, with every look that is due meanwhile, or as for a process that was stopped."""
        with self.changed:
            self.settle()
            end_s = self.now_s + seconds
            while looks and (due := [sleep.due_s for sleep in self.sleeps if (sleep.due_s or end_s) < end_s]):
                self._set(min(due))
            self._set(end_s)

    def _set(self, now_s: float) -> None:
        self.now_s = now_s
        for sleep in self.sleeps:
            if sleep.due_s is not None and sleep.due_s <= now_s:
                sleep.due_s = None
        self.changed.notify_all()
        self.settle()


class OneEnd:
    """A session at one end of a pipe. The test holds the other end."""

    def __init__(self) -> None:
        self.ours, theirs = Pipe()
        self.delivered: list[Report | None] = []
        self.lost = threading.Event()
        self.delay_s = 0.0
        self.session: Session[Report] = Session(theirs, messages.decode_report, self._take)

    def beat(self) -> None:
        """Give a sign of life, and wait until it is heard."""
        count = len(self.delivered)
        self.ours.send_bytes(BEAT)
        wait_until(lambda: len(self.delivered) > count)

    def _take(self, message: Report | None) -> None:
        time.sleep(self.delay_s)
        self.delivered.append(message)
        if message is None:
            self.lost.set()

    def hear(self) -> Command:
        """Return the next message other than a beat."""
        while isinstance(message := messages.decode_command(self.ours.recv_bytes()), BeatMessage):
            pass
        return message


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    made = Passing()
    monkeypatch.setattr(session, "time", made)
    threads = SimpleNamespace(Condition=threading.Condition, Thread=threading.Thread, Event=made.event)
    monkeypatch.setattr(session, "threading", threads)
    return made


@pytest.fixture
def end(passing: Passing) -> Iterator[OneEnd]:
    made = OneEnd()
    yield made
    made.session.close()
    wait_until(lambda: not any(thread.name == "pdinfer-remote" for thread in threading.enumerate()))


def check_lost_within_three_seconds(end: OneEnd, passing: Passing) -> None:
    silent_since_s = passing.now_s
    while not end.lost.is_set():
        passing.go_on(SESSIONS.look_s)
    assert SESSIONS.silent_s <= passing.now_s - silent_since_s < 3.0


def check_is_closed(connection: Connection) -> None:
    """Check that the other process sees the end of the connection after what was sent."""
    messages_left = 1000
    try:
        while messages_left:
            connection.recv_bytes()
            messages_left -= 1
    except (EOFError, OSError):
        return
    raise AssertionError("the connection goes on")


def test_messages_arrive_in_order_and_beats_between_them(end: OneEnd, passing: Passing) -> None:
    for number in range(100):
        end.session.post(CancelMessage(str(number)))
    assert [end.hear() for _ in range(100)] == [CancelMessage(str(number)) for number in range(100)]
    for _ in range(3):
        passing.go_on(session.BEAT_S + SESSIONS.look_s)
        assert end.ours.poll(FAR_S)
        assert isinstance(messages.decode_command(end.ours.recv_bytes()), BeatMessage)


def test_an_end_that_was_heard_and_falls_silent_is_lost_within_three_seconds(end: OneEnd, passing: Passing) -> None:
    end.beat()
    check_lost_within_three_seconds(end, passing)
    assert end.delivered == [BeatMessage(), None]
    assert end.session.loss == "was silent for 2.4 s"
    check_is_closed(end.ours)  # it finds itself given up when it wakes


def test_an_end_that_never_spoke_may_be_loading_its_model(end: OneEnd, passing: Passing) -> None:
    passing.go_on(10 * SESSIONS.silent_s)
    assert end.session.loss is None


def test_an_end_that_goes_on_speaking_is_not_lost(end: OneEnd, passing: Passing) -> None:
    for _ in range(10):
        end.beat()
        passing.go_on(SESSIONS.silent_s - SESSIONS.look_s)
        assert end.session.loss is None


def test_who_was_stopped_himself_does_not_judge_by_the_time_that_passed(end: OneEnd, passing: Passing) -> None:
    """Move the clock on by minutes before a tick, as SIGSTOP and SIGCONT would."""
    end.beat()
    passing.go_on(SESSIONS.look_s)
    for _ in range(2):
        passing.go_on(600.0, looks=False)
        passing.go_on(SESSIONS.silent_s / 2)
        assert end.session.loss is None
        end.beat()
        passing.go_on(SESSIONS.look_s)
    check_lost_within_three_seconds(end, passing)


@pytest.mark.parametrize("word", ["message", "half a message", "nothing"])
def test_what_died_is_lost_at_once_and_its_last_words_are_heard(end: OneEnd, word: str) -> None:
    if word == "message":
        end.ours.send_bytes(BEAT)
    elif word == "half a message":
        with open(end.ours.fileno(), "wb", closefd=False) as pipe:
            pipe.write((100).to_bytes(4, "big") + bytes(50))
    end.ours.close()
    assert end.lost.wait(FAR_S)
    assert end.delivered == ([BeatMessage(), None] if word == "message" else [None])
    assert end.session.loss == "is gone"


def test_last_words_are_heard_though_sending_finds_out_first(end: OneEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BEAT_S", FAR_S)  # for which the sender waits for the reader
    end.delay_s = 0.002
    for _ in range(20):
        end.ours.send_bytes(BEAT)
    end.ours.close()
    end.session.post(CancelMessage("nobody reads this"))
    assert end.lost.wait(FAR_S)
    assert end.delivered == [BeatMessage()] * 20 + [None]


def test_an_end_that_freezes_in_the_middle_of_a_message_while_nobody_reads_ours(end: OneEnd, passing: Passing) -> None:
    """Both reading and sending are stuck then."""
    end.beat()
    with open(end.ours.fileno(), "wb", closefd=False) as pipe:
        pipe.write((100).to_bytes(4, "big") + bytes(50))
    for _ in range(64):
        end.session.post(CancelMessage("x" * (1 << 16)))
    check_lost_within_three_seconds(end, passing)


def test_posting_to_an_end_that_does_not_read_never_waits(end: OneEnd) -> None:
    end.beat()

    def post() -> None:
        for _ in range(200):
            end.session.post(CancelMessage("x" * (1 << 16)))

    check_returns(post)
    assert not end.lost.is_set()


def test_more_than_the_bound_waiting_means_lost(end: OneEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_UNSENT_BYTES", 4 << 20)
    for _ in range(60):
        end.session.post(CancelMessage("x" * (1 << 16)))
    assert not end.lost.is_set()
    for _ in range(10):
        end.session.post(CancelMessage("x" * (1 << 16)))
    assert end.lost.is_set()
    assert end.delivered == [None]
    assert "does not read" in str(end.session.loss)
    assert not end.session.is_behind


def test_closing_says_the_last_word_and_twice_is_once(end: OneEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FLUSH_S", FAR_S)
    end.session.close(Close())
    end.session.close(Close())
    assert end.hear() == Close()
    with pytest.raises(EOFError):
        end.ours.recv_bytes()
    end.session.post(CancelMessage("late"))
    assert end.delivered == [None]  # for a thread that waits for an answer


@pytest.mark.parametrize("stuck", ["sending", "reading", "both", "neither"])
def test_closing_does_not_wait_for_the_other_end(end: OneEnd, stuck: str) -> None:
    if stuck in ("reading", "both"):
        with open(end.ours.fileno(), "wb", closefd=False) as pipe:
            pipe.write((100).to_bytes(4, "big") + bytes(50))
    if stuck in ("sending", "both"):
        for _ in range(64):
            end.session.post(CancelMessage("x" * (1 << 16)))
        time.sleep(0.1)
    check_ends(*[started(end.session.close, Close()) for _ in range(2)])
    check_is_closed(end.ours)


def test_the_beat_tells_what_it_is_asked_to() -> None:
    ours, theirs = Pipe()
    made = Session(theirs, messages.decode_report, lambda _: None, lambda: BeatMessage(1.5))
    assert messages.decode_report(ours.recv_bytes()) == BeatMessage(1.5)
    made.close()


def test_what_has_left_does_not_count_as_waiting(end: OneEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every connection would end after that many bytes, however fast they are read."""
    monkeypatch.setattr(session, "MAX_UNSENT_BYTES", 1 << 20)
    for number in range(64):
        end.session.post(CancelMessage(str(number).ljust(256)))
        end.session.post(CancelMessage("x" * (1 << 16)))
        assert end.hear() == CancelMessage(str(number).ljust(256))
        end.ours.recv_bytes()
    assert not end.lost.is_set()
    assert end.session.loss is None


class Slow:
    """A connection whose messages leave one by one, when the test lets them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.may_leave = threading.Semaphore(0)

    def send_bytes(self, buf: bytes, /) -> None:
        self.may_leave.acquire()
        self._connection.send_bytes(buf)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_what_is_told_has_left_when_the_call_returns(end: OneEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the other end does not read, for which nobody waits long."""
    line = Slow(end.session.connection)  # type: ignore[arg-type]
    end.session.connection = line
    monkeypatch.setattr(session, "TOLD_S", FAR_S)
    telling = started(end.session.tell, CancelMessage("a"))
    telling.join(0.1)
    assert telling.is_alive()
    line.may_leave.release(9)
    check_ends(telling)
    assert end.hear() == CancelMessage("a")
    monkeypatch.setattr(session, "TOLD_S", 0.0)
    line.may_leave = threading.Semaphore(0)
    check_returns(lambda: end.session.tell(CancelMessage("b")))
    line.may_leave.release(9)


def test_a_message_that_takes_longer_than_the_silence_is_none(passing: Passing) -> None:
    """Its pieces are signs of life, although no beat can come before its end."""
    ours, theirs = Pipe()
    line = Slow(ours)
    heard: list[Command | None] = []
    long = pd.Request(prompt=tuple(range(3 << 18)), sampling=pd.SamplingParams(max_new_tokens=1))
    packed = messages.PackedRequest.of(long)
    sender = Session(line, messages.decode_report, lambda message: None)
    receiver = Session(theirs, messages.decode_command, heard.append)
    line.may_leave.release()
    wait_until(lambda: heard == [BeatMessage()])
    sender.post(messages.SubmitDecodeMessage(packed, ()))
    sender.post(CancelMessage("end"))
    while CancelMessage("end") not in heard:
        num_heard = sender._num_heard, receiver._num_heard
        line.may_leave.release()
        wait_until(lambda num_heard=num_heard: receiver._num_heard > num_heard[1])  # type: ignore[misc]
        passing.go_on(SESSIONS.silent_s / 2)
        wait_until(lambda num_heard=num_heard: sender._num_heard > num_heard[0])  # type: ignore[misc] # a beat
        assert receiver.loss is sender.loss is None
    assert passing.now_s > 2 * SESSIONS.silent_s
    assert [type(message) for message in heard if not isinstance(message, BeatMessage)] == [
        messages.SubmitDecodeMessage,
        CancelMessage,
    ]
    line.may_leave.release(1 << 20)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("size", [0, 1, messages.PIECE_BYTES, messages.PIECE_BYTES + 1, 5 * messages.PIECE_BYTES])
def test_pieces_are_joined_to_what_they_were_cut_from(size: int) -> None:
    data = os.urandom(1) * size
    joiner = messages.Joiner()
    cut = list(messages.pieces(data))
    assert max(map(len, cut)) <= messages.PIECE_BYTES + 2
    assert [joiner.add(piece) for piece in cut] == [None] * (len(cut) - 1) + [data]
    assert joiner.add(b"next") == b"next"


def test_pieces_that_make_no_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    joiner = messages.Joiner()
    joiner.add(messages.MORE + b"x")
    with pytest.raises(pd.TransferError, match="in the middle"):
        joiner.add(b"x")
    monkeypatch.setattr(messages, "MAX_BYTES", 100)
    joiner = messages.Joiner()
    for _ in range(100):
        joiner.add(messages.MORE + b"x")
    with pytest.raises(pd.TransferError, match="more than 100 bytes"):
        joiner.add(messages.MORE + b"x")
