"""Messages between processes when the other end stands still, does not read, or is gone: no call waits, and it is
noticed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

import pdinfer as pd
from pdinfer.process.silence import Times
from pdinfer.remote import messages, session
from pdinfer.remote.messages import Beat, Cancel, Close, Command, Report
from pdinfer.remote.session import Session

SOON_S = 1.0
"""A call that does not wait for the other end takes less time than this, even on a busy machine."""
BEAT = messages.encode(Beat())


class OneEnd:
    """A session at one end of a pipe. The test holds the other end."""

    def __init__(self) -> None:
        self.ours, theirs = Pipe()
        self.delivered: list[Report | None] = []
        self.lost = threading.Event()
        self.delay_s = 0.0
        self.session: Session[Report] = Session(theirs, messages.decode_report, self._take)

    def _take(self, message: Report | None) -> None:
        time.sleep(self.delay_s)
        self.delivered.append(message)
        if message is None:
            self.lost.set()

    def hear(self) -> Command:
        """Return the next message other than a beat."""
        while isinstance(message := messages.decode_command(self.ours.recv_bytes()), Beat):
            pass
        return message


@pytest.fixture
def end() -> Iterator[OneEnd]:
    made = OneEnd()
    yield made
    made.session.close()
    assert not any(thread.name == "pdinfer-remote" for thread in threading.enumerate())


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make beats and silences a sixth as long."""
    times = session.SESSIONS
    quick = Times(look_s=times.look_s / 6, max_look_s=times.max_look_s / 6, silent_s=times.silent_s / 6)
    monkeypatch.setattr(session, "SESSIONS", quick)
    monkeypatch.setattr(session, "BEAT_S", session.BEAT_S / 6)


def check_ends(connection: Connection) -> None:
    """Check that the other process sees the end of the connection after what was sent."""
    messages_left = 1000
    try:
        while messages_left:
            connection.recv_bytes()
            messages_left -= 1
    except (EOFError, OSError):
        return
    raise AssertionError("the connection goes on")


def test_messages_arrive_in_order_and_beats_between_them(end: OneEnd) -> None:
    for number in range(100):
        end.session.post(Cancel(str(number)))
    assert [end.hear() for _ in range(100)] == [Cancel(str(number)) for number in range(100)]
    started = time.monotonic()
    for _ in range(3):
        assert isinstance(messages.decode_command(end.ours.recv_bytes()), Beat)
    assert time.monotonic() - started < 3 * session.BEAT_S + SOON_S


def test_an_end_that_was_heard_and_falls_silent_is_lost_within_three_seconds(end: OneEnd) -> None:
    end.ours.send_bytes(BEAT)
    started = time.monotonic()
    assert end.lost.wait(10.0)
    assert session.SESSIONS.silent_s - 0.01 < time.monotonic() - started < 3.0
    assert end.delivered == [Beat(), None]
    assert end.session.loss == "was silent for 2.4 s"
    check_ends(end.ours)  # it finds itself given up when it wakes


@pytest.mark.usefixtures("_quick")
def test_an_end_that_never_spoke_may_be_loading_its_model(end: OneEnd) -> None:
    assert not end.lost.wait(2 * session.SESSIONS.silent_s)
    assert end.session.loss is None


@pytest.mark.usefixtures("_quick")
def test_an_end_that_goes_on_speaking_is_not_lost(end: OneEnd) -> None:
    for _ in range(10):
        end.ours.send_bytes(BEAT)
        assert not end.lost.wait(session.SESSIONS.silent_s / 6)


@pytest.mark.usefixtures("_quick")
def test_who_was_stopped_himself_does_not_judge_by_the_time_that_passed(
    end: OneEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Move the clock on by minutes before a tick, as SIGSTOP and SIGCONT would."""
    end.ours.send_bytes(BEAT)
    time.sleep(0.1)
    real = time.monotonic
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: real() + 600.0))
    assert not end.lost.wait(session.SESSIONS.silent_s / 2)
    end.ours.send_bytes(BEAT)
    assert not end.lost.wait(session.SESSIONS.silent_s / 2)
    assert end.lost.wait(10.0)


@pytest.mark.parametrize("word", ["message", "half a message", "nothing"])
def test_what_died_is_lost_at_once_and_its_last_words_are_heard(end: OneEnd, word: str) -> None:
    if word == "message":
        end.ours.send_bytes(BEAT)
    elif word == "half a message":
        with open(end.ours.fileno(), "wb", closefd=False) as pipe:
            pipe.write((100).to_bytes(4, "big") + bytes(50))
    end.ours.close()
    assert end.lost.wait(SOON_S)
    assert end.delivered == ([Beat(), None] if word == "message" else [None])
    assert end.session.loss == "is gone"


def test_last_words_are_heard_though_sending_finds_out_first(end: OneEnd) -> None:
    end.delay_s = 0.002
    for _ in range(20):
        end.ours.send_bytes(BEAT)
    end.ours.close()
    end.session.post(Cancel("nobody reads this"))
    assert end.lost.wait(SOON_S)
    assert end.delivered == [Beat()] * 20 + [None]


@pytest.mark.usefixtures("_quick")
def test_an_end_that_freezes_in_the_middle_of_a_message_while_nobody_reads_ours(end: OneEnd) -> None:
    """Both reading and sending are stuck then."""
    end.ours.send_bytes(BEAT)
    with open(end.ours.fileno(), "wb", closefd=False) as pipe:
        pipe.write((100).to_bytes(4, "big") + bytes(50))
    for _ in range(64):
        end.session.post(Cancel("x" * (1 << 16)))
    started = time.monotonic()
    assert end.lost.wait(10.0)
    assert time.monotonic() - started < SOON_S


def test_posting_to_an_end_that_does_not_read_never_waits(end: OneEnd) -> None:
    end.ours.send_bytes(BEAT)
    started = time.monotonic()
    for _ in range(200):
        end.session.post(Cancel("x" * (1 << 16)))
    assert time.monotonic() - started < SOON_S
    assert not end.lost.is_set()


def test_more_than_the_bound_waiting_means_lost(end: OneEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_UNSENT_BYTES", 4 << 20)
    for _ in range(60):
        end.session.post(Cancel("x" * (1 << 16)))
    assert not end.lost.is_set()
    for _ in range(10):
        end.session.post(Cancel("x" * (1 << 16)))
    assert end.lost.is_set()
    assert end.delivered == [None]
    assert "does not read" in str(end.session.loss)
    assert not end.session.is_behind


def test_closing_says_the_last_word_and_twice_is_once(end: OneEnd) -> None:
    end.session.close(Close())
    end.session.close(Close())
    assert end.hear() == Close()
    with pytest.raises(EOFError):
        end.ours.recv_bytes()
    end.session.post(Cancel("late"))
    assert end.delivered == [None]  # for a thread that waits for an answer


@pytest.mark.parametrize("stuck", ["sending", "reading", "both", "neither"])
def test_closing_takes_no_longer_than_a_second(end: OneEnd, stuck: str) -> None:
    if stuck in ("reading", "both"):
        with open(end.ours.fileno(), "wb", closefd=False) as pipe:
            pipe.write((100).to_bytes(4, "big") + bytes(50))
    if stuck in ("sending", "both"):
        for _ in range(64):
            end.session.post(Cancel("x" * (1 << 16)))
        time.sleep(0.1)
    started = time.monotonic()
    closers = [threading.Thread(target=end.session.close, args=(Close(),)) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    assert time.monotonic() - started < SOON_S
    check_ends(end.ours)


def test_the_beat_tells_what_it_is_asked_to() -> None:
    ours, theirs = Pipe()
    made = Session(theirs, messages.decode_report, lambda _: None, lambda: Beat(1.5))
    assert messages.decode_report(ours.recv_bytes()) == Beat(1.5)
    made.close()


def test_what_has_left_does_not_count_as_waiting(end: OneEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every connection would end after that many bytes, however fast they are read."""
    monkeypatch.setattr(session, "MAX_UNSENT_BYTES", 1 << 20)
    for number in range(64):
        end.session.post(Cancel(str(number).ljust(256)))
        end.session.post(Cancel("x" * (1 << 16)))
        assert end.hear() == Cancel(str(number).ljust(256))
        end.ours.recv_bytes()
    assert not end.lost.is_set()
    assert end.session.loss is None


class Throttled:
    """Two connections joined at a limited number of bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self.ours, far = Pipe()
        near, self.theirs = Pipe()
        self._pair, self._bytes_per_s = (far, near), bytes_per_s
        for source, target in ((far, near), (near, far)):
            threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: Connection, target: Connection) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(source.fileno(), 1 << 14):
                time.sleep(len(data) / self._bytes_per_s)
                os.write(target.fileno(), data)
            target.close()


def test_a_message_that_takes_longer_than_the_silence_is_none() -> None:
    """Its pieces are signs of life, although no beat can come before its end."""
    line = Throttled(2.0e6)
    heard: list[Report | Command | None] = []
    lost = threading.Event()
    sender = Session(line.ours, messages.decode_report, lambda message: lost.set(), silent_s=0.6)
    receiver = Session(line.theirs, messages.decode_command, heard.append, silent_s=0.6)
    long = pd.Request(prompt=tuple(range(3 << 18)), sampling=pd.SamplingParams(max_new_tokens=1))
    packed = messages.PackedRequest.of(long)
    assert len(packed.prompt) > 2 << 20
    sender.post(messages.SubmitDecode(packed, ()))
    sender.post(Cancel("end"))
    end = time.monotonic() + 30.0
    while Cancel("end") not in heard and None not in heard and time.monotonic() < end:
        time.sleep(0.05)
    assert None not in heard
    assert heard.count(Cancel("end")) == 1
    assert receiver.loss is sender.loss is None
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
