"""A silence is only as long as this process was awake to hear it."""

from __future__ import annotations

from pdinfer.process.silence import LINKS, SESSIONS, SilenceWatch, Times

TIMES = Times(look_s=1.0, max_look_s=2.0, silent_s=5.0)


def test_silence_adds_up_from_look_to_look() -> None:
    watch = SilenceWatch(TIMES, 10.0)
    assert [watch.look(now) for now in (11.0, 12.5, 14.0)] == [1.0, 2.5, 4.0]


def test_a_process_that_was_stopped_blames_nobody() -> None:
    watch = SilenceWatch(TIMES, 10.0)
    assert watch.look(11.0) == 1.0
    assert watch.look(1000.0) == 3.0


def test_it_is_no_longer_than_the_time_since_the_peer_was_heard() -> None:
    watch = SilenceWatch(TIMES, 10.0)
    watch.look(12.0)
    assert watch.look(13.0, heard_ago_s=0.5) == 0.5
    assert watch.look(14.0, heard_ago_s=0.0) == watch.silent_s == 0.0
    assert watch.look(15.0) == 1.0


def test_a_late_look_alone_is_never_a_loss() -> None:
    for times in (LINKS, SESSIONS):
        assert times.look_s < times.max_look_s < times.silent_s
        assert times.silent_s + times.look_s <= 3.0
