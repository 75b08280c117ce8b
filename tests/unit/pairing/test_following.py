"""A directory adds ports and removes none. Time is virtual, and dials end when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.pairing.following import MAX_DIALS, Followed, Following
from pdinfer.testing import VirtualClock
from pdinfer.types import PeerAddress
from tests.waiting import TIMEOUT_S, wait_until


@attrs.frozen
class Named:
    """An entry of a directory."""

    name: str
    identity: bytes | None = None
    is_taken: bool = False


@attrs.define(eq=False)
class FakePort:
    """A port that does nothing."""

    name: str
    is_draining: bool = False
    num_closed: int = 0

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.name.encode(), 1, 0)

    def close(self) -> None:
        self.num_closed += 1


class World:
    """A directory, the engines that it may name, and a pairing. Entries in `dead` cannot be dialled, `refused` ports
    cannot be added, and `slow` dials end in `settle`."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.entries: list[Named] = []
        self.is_lost = False
        self.dead: set[str] = set()
        self.refused: dict[str, pd.PDInferError] = {}
        self.is_slow = False
        self.under_way: list[Callable[[], None]] = []
        self.dials: list[tuple[float, str]] = []
        self.ports: dict[str, FakePort] = {}
        self.made: list[FakePort] = []
        self.removals: list[FakePort] = []
        self.steps_to_drain = 3
        self.num_wakes = 0
        followed = Followed(self.add, self.removal, lambda port: port in self.ports.values(), self.wake)
        self.following = Following(self, followed, 30.0, self.clock, self.beside)

    def watch(self) -> list[Named]:
        if self.is_lost:
            raise pd.TransferError("the folder is gone")
        return list(self.entries)

    def dial(self, entry: Named) -> Any:
        self.dials.append((self.clock(), entry.name))
        if entry.name in self.dead:
            raise pd.TransferError("nobody answers")
        self.made.append(FakePort(entry.name))
        return self.made[-1]

    def beside(self, work: Callable[[], None]) -> None:
        self.under_way.append(work)

    def add(self, port: FakePort) -> None:
        if port.name in self.refused:
            raise self.refused[port.name]
        self.ports[port.name] = port

    def removal(self, port: FakePort, *, drain_s: float) -> Iterator[float]:
        self.removals.append(port)
        for _ in range(self.steps_to_drain):
            yield drain_s
        self.following.act()  # the end of a removal is a step
        del self.ports[port.name]

    def wake(self) -> None:
        self.num_wakes += 1

    def look(self, seconds: float = 0.0) -> None:
        """Let time pass, look at the directory and the ports, and end the dials unless they are slow."""
        self.clock.advance(seconds)
        self.following.look()
        self.following.let_go()
        if not self.is_slow:
            self.settle()

    def settle(self) -> None:
        while self.under_way:
            self.under_way.pop(0)()


@pytest.fixture
def world() -> World:
    return World()


def test_what_is_named_becomes_a_port_once(world: World) -> None:
    world.entries = [Named("a"), Named("b")]
    world.look()
    world.look(100.0)
    assert world.dials == [(0.0, "a"), (0.0, "b")]
    assert set(world.ports) == {"a", "b"}
    world.entries.append(Named("c"))
    world.look(1.0)
    assert set(world.ports) == {"a", "b", "c"}


def dial_times(world: World, name: str, until_s: float) -> list[float]:
    """Look every half second, and return when an entry was dialled."""
    while world.clock() < until_s:
        world.look(0.5)
    return [at for at, dialled in world.dials if dialled == name]


def test_a_stale_entry_is_dialled_ever_more_rarely(world: World) -> None:
    world.entries, world.dead = [Named("stale"), Named("good")], {"stale"}
    assert dial_times(world, "stale", 300.0) == [0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 63.5, 123.5, 183.5, 243.5]
    assert dial_times(world, "good", 300.0) == [0.5]


def test_an_entry_that_flickers_is_dialled_no_more_often(world: World) -> None:
    """As where two views of a directory take turns."""
    world.dead = {"stale"}
    for turn in range(600):
        world.entries = [Named("stale")] if turn % 2 else []
        world.look(0.5)
    assert len(world.dials) <= 11


def test_an_entry_that_answers_again_begins_anew(world: World) -> None:
    world.entries, world.dead = [Named("a")], {"a"}
    dial_times(world, "a", 20.0)
    world.dead = set()
    dial_times(world, "a", 40.0)
    assert set(world.ports) == {"a"}
    world.ports.clear()  # the pairing has lost it
    world.dials.clear()
    world.dead = {"a"}
    assert dial_times(world, "a", 44.0) == [40.5, 41.5, 43.5]


def test_a_directory_that_fails_midway_is_lost_and_comes_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def midway() -> Iterator[Named]:
        yield Named("a")
        raise OSError("the file server is gone")

    with monkeypatch.context() as patch:
        patch.setattr(world, "watch", midway)
        world.look()
    world.entries = [Named("a")]
    world.look(0.5)
    assert set(world.ports) == {"a"}


def test_an_engine_that_drains_is_let_go_of_while_the_directory_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.entries = [Named("a")]
    world.look()
    asked, go = threading.Event(), threading.Event()
    monkeypatch.setattr(world, "watch", lambda: (asked.set(), go.wait(), [])[-1])
    world.following.start()
    try:
        assert asked.wait(TIMEOUT_S)
        world.ports["a"].is_draining = True
        wait_until(lambda: (world.following.act(), not world.ports)[-1])
    finally:
        world.following.close()
        go.set()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_directory_that_is_lost_or_empty_removes_nobody(world: World, is_lost: bool) -> None:
    world.entries = [Named("a"), Named("b")]
    world.look()
    world.is_lost, world.entries = is_lost, []
    for _ in range(1000):
        world.look(0.5)
        world.following.act()
    assert set(world.ports) == {"a", "b"}
    assert world.removals == []
    world.is_lost, world.entries = False, [Named("b"), Named("c")]
    world.look(0.5)
    assert set(world.ports) == {"a", "b", "c"}
    assert [port.num_closed for port in world.made] == [0, 0, 0]


def test_loss_and_return_of_a_directory_are_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.is_lost = True
    for _ in range(5):
        world.look(0.5)
    world.is_lost = False
    world.look(0.5)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "the ports that it led to stay" in said[0]


def test_dials_that_do_not_end_delay_no_look_and_are_bounded(world: World) -> None:
    world.is_slow = True
    world.entries = [Named(f"{number:03}") for number in range(3 * MAX_DIALS)]
    for _ in range(10):
        world.look(0.5)
    assert len(world.under_way) == MAX_DIALS
    world.under_way.pop(0)()
    world.look(0.5)
    assert len(world.under_way) == MAX_DIALS
    assert set(world.ports) == {"000"}
    for _ in range(5):
        world.settle()
        world.look(0.5)
    world.settle()
    assert len(world.ports) == len(world.entries)


def test_stale_entries_that_do_not_answer_starve_no_other(world: World) -> None:
    """Each of their dials takes its 10 s, and there are more of them than are dialled at a time."""
    world.is_slow = True
    world.entries = [Named(f"{number:03}") for number in range(10 * MAX_DIALS)] + [Named("good")]
    world.dead = {entry.name for entry in world.entries[:-1]}
    ends: list[tuple[float, Callable[[], None]]] = []
    while "good" not in world.ports:
        world.look(1.0)
        ends += [(world.clock() + 10.0, dial) for dial in world.under_way]
        world.under_way.clear()
        for end in [end for end in ends if end[0] <= world.clock()]:
            ends.remove(end)
            end[1]()
        assert world.clock() <= 130.0  # eleven dials of 10 s, one after the other, and the looks between


def test_a_dial_for_which_there_is_no_thread_is_made_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(work: Callable[[], None]) -> None:
        raise pd.Overloaded("no thread can be started")

    world.entries = [Named("a")]
    with monkeypatch.context() as patch:
        patch.setattr(world.following, "_beside", no_thread)
        world.look()
    world.look(0.5)
    assert world.ports == {}
    world.look(0.5)
    assert set(world.ports) == {"a"}


def test_an_engine_with_a_client_is_left_alone_until_it_is_free(world: World) -> None:
    world.entries = [Named("a", is_taken=True)]
    for _ in range(100):
        world.look(0.5)
    assert world.dials == []
    world.entries = [Named("a")]
    world.look(0.5)
    assert set(world.ports) == {"a"}


def test_engines_of_other_weights_are_left_alone(world: World) -> None:
    world.is_slow = True
    world.entries = [Named("a", b"one"), Named("b", b"two"), Named("c", b"one"), Named("d")]
    world.look(0.5)
    world.settle()
    world.look(0.5)
    world.settle()
    assert set(world.ports) == {"a", "c", "d"}
    world.ports.clear()  # when all are lost the others may have it
    world.entries = [Named("b", b"two")]
    world.look(0.5)
    world.settle()
    assert set(world.ports) == {"b"}


def test_a_port_that_cannot_join_is_let_go_and_tried_more_rarely(world: World) -> None:
    world.entries = [Named("a"), Named("b")]
    world.refused = {"a": pd.TransferError("no decode reaches it"), "b": pd.LayoutMismatch("they differ")}
    assert dial_times(world, "a", 100.0) == [0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 63.5]
    assert dial_times(world, "b", 100.0) == [0.5, 60.5]  # it will not be another one so soon
    assert world.ports == {}
    assert {port.num_closed for port in world.made} == {1}


def test_an_engine_that_drains_is_let_go_of_between_steps(world: World) -> None:
    world.entries = [Named("a"), Named("b")]
    world.look()
    world.ports["a"].is_draining = True
    world.entries = [Named("b")]
    for _ in range(3):
        world.look(0.5)
    assert set(world.ports) == {"a", "b"}  # only a step removes
    assert world.num_wakes == 3
    for _ in range(world.steps_to_drain):
        world.following.act()
        assert (set(world.ports), world.made[0].num_closed) == ({"a", "b"}, 0)
        world.look(0.5)
    world.following.act()
    world.following.act()
    world.look(0.5)
    assert (set(world.ports), world.made[0].num_closed) == ({"b"}, 1)
    assert world.removals == [world.made[0]]


def test_engines_that_drain_at_once_are_all_let_go_of(world: World) -> None:
    world.entries = [Named("a"), Named("b"), Named("c"), Named("d")]
    world.look()
    world.entries = []
    for name in "abc":
        world.ports[name].is_draining = True
    world.look(0.5)
    for _ in range(world.steps_to_drain + 1):
        world.following.act()
    assert set(world.ports) == {"d"}
    assert [port.num_closed for port in world.made] == [1, 1, 1, 0]


def test_a_removal_that_fails_is_begun_anew(world: World) -> None:
    world.entries = [Named("a")]
    world.look()
    world.ports["a"].is_draining = True
    world.entries = []
    removal = world.removal

    def broken(port: FakePort, *, drain_s: float) -> Iterator[float]:
        raise RuntimeError("the policy is broken")
        yield

    object.__setattr__(world.following._followed, "removal", broken)
    world.look(0.5)
    with pytest.raises(RuntimeError):
        world.following.act()
    object.__setattr__(world.following._followed, "removal", removal)
    world.look(0.5)
    for _ in range(world.steps_to_drain + 1):
        world.following.act()
    assert world.ports == {}


def test_a_port_that_has_changed_its_role_is_let_go_of_when_it_drains(world: World) -> None:
    world.entries = [Named("a")]
    world.look()
    changed = FakePort("a")
    world.following.replace(world.ports["a"], changed)  # type: ignore[arg-type]
    world.ports["a"] = changed
    world.look(100.0)
    assert len(world.dials) == 1
    changed.is_draining = True
    world.look(1.0)
    world.following.act()
    assert world.removals == [changed]
