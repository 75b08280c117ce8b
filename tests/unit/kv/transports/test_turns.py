"""Which link an I/O thread serves next."""

from __future__ import annotations

from typing import cast

import pytest

from pdinfer.kv.transports.stream.connection import StreamConnection
from pdinfer.kv.transports.stream.io_thread import Turns
from pdinfer.testing import VirtualClock


class Link:
    """Stands in for a connection."""


@pytest.fixture
def links() -> list[StreamConnection]:
    return [cast("StreamConnection", Link()) for _ in range(4)]


def spend(turns: Turns, clock: VirtualClock, links: list[StreamConnection], seconds: float) -> None:
    """Give each of them a turn that takes so long."""
    for _ in turns.of(links, round_s=10.0):
        clock.advance(seconds)


def test_who_used_least_comes_first_and_the_rest_wait_for_the_next_round(links: list[StreamConnection]) -> None:
    clock = VirtualClock()
    turns = Turns(clock)
    quiet, *busy = links
    for link in links:
        turns.enter(link)
    for _ in range(3):
        spend(turns, clock, busy, 0.5)
    served = []
    for link in turns.of([*busy, quiet], round_s=0.4):
        served.append(link)
        clock.advance(0.5)
    assert served == [quiet]


def test_all_get_their_turns(links: list[StreamConnection]) -> None:
    clock = VirtualClock()
    turns = Turns(clock)
    for link in links:
        turns.enter(link)
    served = []
    for _ in range(len(links)):
        for link in turns.of(links, round_s=0.0):
            served.append(link)
            clock.advance(1.0)
    assert set(served) == set(links)


def test_a_newcomer_is_not_ahead_of_those_who_are_there(links: list[StreamConnection]) -> None:
    clock = VirtualClock()
    turns = Turns(clock)
    quiet, busy, *newcomers = links
    turns.enter(quiet)
    turns.enter(busy)
    spend(turns, clock, [busy], 1.0)
    for newcomer in newcomers:
        turns.enter(newcomer)
    assert next(turns.of([*newcomers, busy, quiet])) is quiet


def test_what_was_long_ago_counts_for_little(links: list[StreamConnection]) -> None:
    clock = VirtualClock()
    turns = Turns(clock)
    once, now, *_ = links
    turns.enter(once)
    turns.enter(now)
    spend(turns, clock, [once], 1.0)
    for _ in range(5):
        turns.fade()
    spend(turns, clock, [now], 0.1)
    assert next(turns.of([now, once])) is once
    turns.leave(once)
    turns.fade()
    assert next(turns.of([now])) is now
