"""Who may wait at a door, who gives way, and who is turned away. The links here are nothing but names."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.kv.transports.base import Link
from pdinfer.kv.transports.stream.transport import LOOPBACK, Door, Strangers, source_of


class Stranger:
    """What a door sees of a connection."""

    def __init__(self, name: str = "") -> None:
        self.link, self.closed, self.num_messages, self.idle_since = Link(name), False, 0, 0.0


def door_of(**limits: Any) -> Door:
    return Door(Strangers(**limits))


def enter(door: Door, source: object, now: float = 0.0) -> tuple[Stranger, Stranger | None]:
    stranger = Stranger()
    return stranger, door.enter(stranger, source, now)  # type: ignore[arg-type,return-value]


def test_of_a_full_source_the_oldest_gives_way_and_others_stay() -> None:
    door = door_of(max_links=10, max_links_per_source=3)
    honest, _ = enter(door, "honest")
    hostile = [enter(door, "hostile") for _ in range(8)]
    assert [leaves for _, leaves in hostile] == [None] * 3 + [stranger for stranger, _ in hostile[:5]]
    assert len(door) == 4
    honest.link.trusted = True
    door.look()
    assert len(door) == 3


def test_of_a_full_door_the_source_with_most_gives_way() -> None:
    door = door_of(max_links=5, max_links_per_source=4)
    few, _ = enter(door, "few")
    many = [enter(door, "many")[0] for _ in range(4)]
    assert enter(door, "new")[1] is many[0]
    assert enter(door, "newer")[1] is many[1]
    assert not few.closed


def test_who_has_just_come_has_time() -> None:
    door = door_of(max_links=2, max_links_per_source=2, grace_s=0.5)
    assert door.room_in_s(1.0) == 0.0
    first, _ = enter(door, LOOPBACK, 1.0)
    enter(door, LOOPBACK, 1.2)
    assert door.room_in_s(1.2) == pytest.approx(0.3)
    assert door.room_in_s(1.5) == 0.0
    first.link.trusted = True
    assert door.room_in_s(1.2) == 0.0


def test_a_source_that_comes_too_often_is_turned_away_alone() -> None:
    door = door_of(max_links=10, max_links_per_source=2, grace_s=0.5)
    first, _ = enter(door, "hostile", 1.0)
    enter(door, "hostile", 1.0)
    assert door.turns_away("hostile", 1.4)
    assert not door.turns_away("hostile", 1.5)
    assert not door.turns_away("honest", 1.4)
    first.closed = True
    assert not door.turns_away("hostile", 1.4)


def test_this_host_has_no_limit_of_its_own() -> None:
    door = door_of(max_links=6, max_links_per_source=2)
    assert [enter(door, LOOPBACK)[1] for _ in range(6)] == [None] * 6


def test_the_first_message_is_due_sooner_than_later_ones() -> None:
    door = door_of(first_message_s=1.0, message_s=3.0)
    silent, _ = enter(door, "a")
    speaks, _ = enter(door, "b")
    speaks.num_messages = 1
    assert door.late(1.0) == []
    assert door.late(1.1) == [(silent, 1.0)]
    assert door.late(3.1) == [(silent, 1.0), (speaks, 3.0)]


def test_a_process_with_few_descriptors_lets_fewer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    door = door_of()
    strangers = [enter(door, LOOPBACK) for _ in range(7)]
    assert len(door) == 5
    assert strangers[5][1] is strangers[0][0]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3, 3))
    door = door_of()
    assert enter(door, LOOPBACK)[1] is None, "one may always wait"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_never_more_than_there_may_be(comes: list[tuple[int, bool]]) -> None:
    door, there = door_of(max_links=5, max_links_per_source=2), dict[Stranger, int]()
    for number, (source, becomes_trusted) in enumerate(comes):
        door.look()
        stranger, leaves = enter(door, source, float(number))
        there[stranger] = source
        if leaves is not None:
            del there[leaves]
        counts = [list(there.values()).count(each) for each in range(4)]
        assert max(counts) <= 2
        assert len(there) == len(door) <= 5
        if becomes_trusted:
            stranger.link.trusted = True
            del there[stranger]


def test_sources() -> None:
    tcp = SimpleNamespace(family=socket.AF_INET)
    seen = {host: source_of(tcp, (host, 1)) for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")}  # type: ignore[arg-type]
    assert set(seen.values()) == {LOOPBACK}
    one, other, mapped, six, near, far = (
        source_of(tcp, (host, 1))  # type: ignore[arg-type]
        for host in ("10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1", "fd00::1%eth0", "fd00::2", "fd00:0:0:1::1")
    )
    assert one == mapped != other
    assert six == near != far


def test_a_process_at_a_unix_socket_is_a_source(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    with listener, socket.socket(socket.AF_UNIX) as dials:
        dials.connect(str(tmp_path / "s"))
        accepted, address = listener.accept()
        with accepted:
            assert source_of(accepted, address) == (os.getuid(), os.getpid())
