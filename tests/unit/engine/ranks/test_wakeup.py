"""Ranks wake each other: who can reach a rank that sleeps, and whose notifications count."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pdinfer.engine.ranks import wakeup
from pdinfer.engine.ranks.wakeup import BEAT, DATAGRAM, LEAVES, SECRET_BYTES, Beats, Wakeup
from pdinfer.errors import RankLost
from pdinfer.parallel.groups import LOOK_S, Groups
from pdinfer.process.silence import RANKS
from pdinfer.testing import VirtualClock
from tests.forks import FAR_S
from tests.unit.parallel.thread_groups import groups_of, on_ranks
from tests.waiting import check_ends, started

TIMEOUT_S = FAR_S


@contextmanager
def wakeups(
    groups: list[Groups], random_bytes: Callable[[int], bytes] = os.urandom
) -> Iterator[tuple[list[Wakeup], list[queue.Queue[int]]]]:
    """Yield a wakeup per rank, and what each of them heard."""
    heard: list[queue.Queue[int]] = [queue.Queue() for _ in groups]
    made = on_ranks(groups, lambda one: Wakeup(one.world, heard[one.world.rank].put, random_bytes=random_bytes))
    with ExitStack() as stack:
        for one in made:
            stack.callback(one.close)
        yield made, heard


def test_a_ring_is_heard_by_all_others() -> None:
    with wakeups(groups_of(dp_size=3)) as (made, heard):
        made[1].notify(2**40)
        assert [heard[rank].get(timeout=TIMEOUT_S) for rank in (0, 2)] == [2**40, 2**40]
        made[0].notify(3)
        assert heard[1].get(timeout=TIMEOUT_S) == 3  # nothing of its own before


def test_on_one_host_it_listens_on_the_loopback_interface_alone() -> None:
    with wakeups(groups_of(dp_size=2), bytes) as (made, heard):
        for rank, one in enumerate(made):
            assert one.address[0] == "127.0.0.1"
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
                for host, number in (("127.0.0.2", 1), ("127.0.0.1", 2)):
                    anybody.sendto(DATAGRAM.pack(bytes(SECRET_BYTES), number, 0), (host, one.address[1]))
            assert heard[rank].get(timeout=TIMEOUT_S) == 2


def test_between_hosts_it_listens_on_the_address_that_the_others_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loopback addresses stand for two hosts."""
    addresses = iter(["127.0.0.2", "127.0.0.3"])
    monkeypatch.setattr(wakeup, "_own_address", lambda: next(addresses))
    with wakeups(groups_of(dp_size=2)) as (made, heard):
        assert sorted(one.address[0] for one in made) == ["127.0.0.2", "127.0.0.3"]
        made[0].notify(5)
        assert heard[1].get(timeout=TIMEOUT_S) == 5


@pytest.mark.parametrize(
    "data", [b"", b"x", bytes(8), DATAGRAM.pack(bytes(8), 7, 0), DATAGRAM.pack(b"\xff" * 8, 7, 0), bytes(64)]
)
def test_what_does_not_carry_the_secret_is_not_heard(data: bytes) -> None:
    with wakeups(groups_of(dp_size=2)) as (made, heard):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
            anybody.sendto(data, made[1].address)
        made[0].notify(8)
        assert heard[1].get(timeout=TIMEOUT_S) == 8


def test_every_rank_has_a_secret_of_its_own() -> None:
    secrets: list[bytes] = []

    def noted(count: int) -> bytes:
        secret = os.urandom(count)
        secrets.append(secret)
        return secret

    with wakeups(groups_of(dp_size=3), noted) as (made, heard):
        assert len(secrets) == len({*secrets}) == 3
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
            for number, secret in enumerate(secrets):
                anybody.sendto(DATAGRAM.pack(secret, number, 0), made[1].address)
        made[2].notify(8)
        assert heard[1].get(timeout=TIMEOUT_S) < 3  # its own, and no other
        assert heard[1].get(timeout=TIMEOUT_S) == 8


def beats_of(clock: VirtualClock, *heard: int) -> Beats:
    beats = Beats({1, 2}, clock)
    for rank in heard:
        beats.heard(rank, BEAT)
    return beats


def pass_time(beats: Beats, clock: VirtualClock, seconds: float, *, beating: int | None = None) -> None:
    """Let time pass as the thread lives through it."""
    for _ in range(round(seconds / RANKS.look_s)):
        clock.advance(RANKS.look_s)
        if beating is not None:
            beats.heard(beating, BEAT)
        beats.look()


def test_a_silent_rank_is_lost_within_three_seconds_and_one_that_beats_is_not() -> None:
    clock = VirtualClock()
    beats = beats_of(clock, 1, 2)
    pass_time(beats, clock, 1.8, beating=2)
    beats.check()
    pass_time(beats, clock, 0.6, beating=2)
    with pytest.raises(RankLost, match=r"rank 1 has been silent for 2\.4 s.*start all ranks anew"):
        beats.check()
    assert 2.4 + LOOK_S < 3.0
    beats.heard(1, 7)  # it was stopped for a while; whatever it says counts
    beats.look()
    beats.check()


def test_a_rank_that_was_stopped_itself_has_missed_nobody() -> None:
    clock = VirtualClock()
    beats = beats_of(clock, 1, 2)
    clock.advance(60.0)
    beats.look()
    beats.check()


def test_a_rank_that_was_never_heard_or_has_left_is_not_missed() -> None:
    clock = VirtualClock()
    beats = beats_of(clock, 2)
    beats.heard(2, LEAVES)
    beats.heard(2, BEAT)  # it was overtaken
    beats.heard(0, BEAT)  # no other rank
    beats.heard(99, BEAT)
    pass_time(beats, clock, 6.0)
    beats.check()


def until_heard(wakeup: Wakeup, rank: int) -> None:
    end = time.monotonic() + FAR_S
    while rank not in wakeup._beats._watches:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("as_agreed", [True, False])
def test_ranks_beat_until_they_leave_and_are_missed_unless_that_was_agreed(as_agreed: bool) -> None:
    clock = VirtualClock()
    groups = groups_of(dp_size=2)
    heard: queue.Queue[int] = queue.Queue()
    one, other = on_ranks(groups, lambda each: Wakeup(each.world, heard.put, clock=clock))
    with contextlib.closing(one):
        with contextlib.closing(other):
            for _ in range(3):  # one beat at each tick
                clock.advance(RANKS.look_s)
                until_heard(one, 1)
                until_heard(other, 0)
            other.close(as_agreed=as_agreed)
        end = time.monotonic() + FAR_S
        with contextlib.nullcontext() if as_agreed else pytest.raises(RankLost, match="rank 1 has been silent"):
            while 1 in one._beats._watches:
                assert time.monotonic() < end
                clock.advance(0.1)
                time.sleep(0.005)
                one.check()
        assert heard.empty()  # beats wake nobody


@pytest.mark.parametrize("error", [None, OSError(errno.ENOBUFS, "no memory")])
def test_it_closes_where_the_datagram_that_says_so_is_lost(
    error: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lossy(socket.socket):
        def sendto(self, data: bytes, *_: object) -> int:  # type: ignore[override]
            if error is not None:
                raise error
            return len(data)

    monkeypatch.setattr(socket, "socket", Lossy)
    with wakeups(groups_of(dp_size=2)) as (made, _):
        check_ends(started(made[0].close))
