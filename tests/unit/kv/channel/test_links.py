"""Heartbeats, dialling and relinking, second by second."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.errors import PDInferError
from pdinfer.kv.channel import book
from pdinfer.kv.channel.book import REDIAL_S
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.links import HANDSHAKE_S, RELINK_S, Handshake
from pdinfer.kv.channel.peer import Peer
from pdinfer.kv.transports.base import TICK_S
from pdinfer.process.silence import LINKS
from pdinfer.types import HandoffStatus, peer_key
from tests.slices import examples
from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.by_hand import are_linked, linked
from tests.unit.kv.channel.channels import Case, handoff, links, record
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until


@examples(300)
@given(data=st.data())
def test_of_two_crossing_links_exactly_one_stays(data: st.DataObject) -> None:
    """This holds for every order in which the messages of both can be delivered, also while an end is dialling."""
    net = HandNet()
    ends = net.end(), net.end()
    to_dial = [(ends[0], ends[1]), (ends[1], ends[0])]

    def do_something() -> None:
        waiting = net.waiting()
        pick = data.draw(st.integers(0, len(waiting) + len(to_dial) - 1))
        if pick < len(waiting):
            waiting[pick].deliver()
        else:
            one, other = to_dial.pop(pick - len(waiting))
            one.connect(other.address, timeout_s=0)

    def meanwhile() -> None:
        for _ in range(data.draw(st.integers(0, 12))):
            if to_dial or net.waiting():
                do_something()

    net.while_dialling = meanwhile
    while to_dial or net.waiting():
        do_something()
    net.pass_time(2 * TICK_S, *ends)
    assert are_linked(*ends)
    assert len(net.dials) <= 2, "somebody had to dial again"
    assert len([side for side in net.sides if side.open]) == 2
    assert all(len(end.snapshot().links) == 1 for end in ends)
    with pytest.MonkeyPatch.context() as patch:  # the ticks of a whole minute would take most of the time
        patch.setattr("pdinfer.kv.channel.links.RELINK_S", REDIAL_S[1])
        net.pass_time(2 * REDIAL_S[1], *ends)
    assert are_linked(*ends)
    assert len(net.dials) <= 2


@pytest.mark.parametrize("lesser_dials_first", [True, False])
def test_a_dial_that_finds_a_link_adds_none(net: HandNet, lesser_dials_first: bool) -> None:
    """The peer's link is admitted between a look for one and the dialling; its Welcome is still on the way."""
    ends = sorted((net.end(), net.end()), key=lambda end: peer_key(end.address), reverse=not lesser_dials_first)

    def other_dials() -> None:
        net.while_dialling = lambda: None
        ends[1].connect(ends[0].address, timeout_s=0)
        while not ends[0].connected(ends[1].address):
            next(side for side in net.sides[2:] if side.inbox).deliver()

    net.while_dialling = other_dials
    ends[0].connect(ends[1].address, timeout_s=0)
    net.settle()
    assert are_linked(*ends)
    net.pass_time(2 * TICK_S, *ends)
    assert are_linked(*ends)
    assert all(len(end.snapshot().links) == 1 for end in ends)


def test_both_calls_end_well_when_two_ends_dial_each_other(two_pools: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, both_dial, problems = (two_pools.end(), two_pools.end()), threading.Barrier(2), list[PDInferError]()
    lesser = min(ends, key=lambda end: peer_key(end.address))
    introduce = Handshake.introduce

    def introduce_together(handshake: Handshake, peer: Peer) -> None:
        if not both_dial.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                both_dial.wait(1.0)
            both_dial.abort()
            if handshake is links(lesser).handshake:
                time.sleep(0.1)  # so that the other end is refused before it knows of this link
        introduce(handshake, peer)

    monkeypatch.setattr(Handshake, "introduce", introduce_together)

    def dial(one: KVChannel, other: KVChannel) -> None:
        try:
            one.connect(other.address)
        except PDInferError as error:
            problems.append(error)

    check_ends(*[started(dial, *pair) for pair in (ends, ends[::-1])])
    assert not problems
    wait_until(lambda: all(len(end.snapshot().links) == 1 for end in ends))
    assert are_linked(*ends)


def test_a_dropped_peer_can_be_dialled_at_once(two_pools: Case) -> None:
    """This holds also when the peer has not yet read that the link is closed."""
    prefill, decode = two_pools.pair()
    for _ in range(5):
        prefill.drop_peer(decode.address)
        prefill.connect(decode.address)
    late = threading.Timer(0.3, record(decode, prefill).fence)  # a beat of decode's may be sooner to find it out
    links(prefill).book.close(record(prefill, decode).link, None)  # as if this end alone knew that the link is broken
    late.start()
    prefill.connect(decode.address, timeout_s=TIMEOUT_S)
    late.join()
    assert prefill.connected(decode.address)


@given(every_s=st.floats(0.3, 0.5), offset_s=st.floats(0.0, 0.5))
def test_a_silent_link_is_given_up_within_three_seconds(every_s: float, offset_s: float) -> None:
    net = HandNet()
    prefill, decode = linked(net)
    net.pass_time(20.0, prefill, decode, every_s=every_s)
    assert are_linked(prefill, decode)
    net.side(decode).inbox.clear()
    last_heard = net.clock()
    net.pass_time(offset_s, decode, every_s=every_s)
    while decode.connected(prefill.address):
        net.pass_time(every_s, decode, every_s=every_s)
    assert net.clock() - last_heard + every_s >= LINKS.silent_s
    assert net.clock() - last_heard <= 3.0
    net.pass_time(TICK_S, prefill)
    assert not prefill.connected(decode.address), "the other end learns of it"


@given(st.floats(1.0, 600.0))
def test_an_end_that_slept_reads_before_it_judges(slept_s: float) -> None:
    net = HandNet()
    prefill, decode = linked(net)
    net.pass_time(2.0, prefill, decode)
    net.pass_time(0.4, prefill)  # a beat that waits to be read
    net.clock.advance(slept_s)
    decode.arrivals.tick()  # the first thing it does when it wakes, at worst
    assert decode.connected(prefill.address)
    net.pass_time(2.0, prefill, decode)
    assert are_linked(prefill, decode)


@given(st.floats(1.11, 5.0))
def test_ticks_that_come_late_still_find_a_dead_peer(every_s: float) -> None:
    net = HandNet()
    prefill, decode = linked(net)
    net.pass_time(3 * every_s, decode, every_s=every_s)
    assert not decode.connected(prefill.address)


def test_beats_say_how_long_ago_the_engine_looked(net: HandNet) -> None:
    prefill, decode = linked(net)
    (before,) = decode.stats.peers
    assert before.step_age_s is None
    net.pass_time(10.0, prefill, decode)
    prefill.poll_stops()
    net.pass_time(2.0, prefill, decode)
    (stats,) = decode.stats.peers
    assert stats.step_age_s == pytest.approx(2.0)
    net.pass_time(1.0, prefill, decode)
    prefill.poll()
    net.pass_time(0.4, prefill, decode)
    assert decode.stats.peers[0].step_age_s == pytest.approx(0.4)


def test_a_broken_link_is_dialled_again_by_who_dialled_it(net: HandNet) -> None:
    prefill, decode = linked(net)
    net.cut(net.side(prefill))
    assert not are_linked(prefill, decode)
    net.pass_time(1.0, prefill, decode)
    assert are_linked(prefill, decode)
    assert decode.stats.peers[0].retries == prefill.stats.peers[0].retries == 1
    prefill.drop_peer(decode.address)
    net.settle()
    net.pass_time(RELINK_S, prefill, decode)
    assert not are_linked(prefill, decode)
    assert len(net.dials) == 2


def test_dialling_backs_off_and_ends_after_a_minute(net: HandNet, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = linked(net)
    net.down.update(decode.address.endpoints)
    net.cut(net.side(prefill))
    start = net.clock()
    net.dials.clear()
    net.pass_time(RELINK_S + 10.0, prefill, every_s=0.01)
    waits = [later - earlier for earlier, later in itertools.pairwise([start, *net.dials])]
    low, high = REDIAL_S
    assert waits == pytest.approx([low, *(min(high, low * 2**n) for n in range(1, len(waits)))], abs=0.03)
    assert RELINK_S - high <= net.dials[-1] - start <= RELINK_S
    assert "is not dialled again" in caplog.text
    net.down.clear()
    net.pass_time(20.0, prefill, decode)
    assert not are_linked(prefill, decode)
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    assert are_linked(prefill, decode)


def test_a_peer_that_was_away_for_hours_is_found_when_it_is_back(net: HandNet) -> None:
    """A host that wants it keeps asking."""
    prefill, decode = linked(net)
    net.down.update(decode.address.endpoints)
    net.cut(net.side(prefill))
    for _ in range(1100):
        prefill.connect(decode.address, timeout_s=0)
        net.pass_time(REDIAL_S[1], prefill, every_s=REDIAL_S[1])
    net.down.clear()
    net.pass_time(20.0, prefill, decode)
    assert are_linked(prefill, decode)


def test_a_peer_that_is_not_there_yet_is_found_when_it_is(net: HandNet) -> None:
    prefill, decode = net.end(), net.end()
    net.down.update(decode.address.endpoints)
    prefill.connect(decode.address, timeout_s=0)
    prefill.connect(decode.address, timeout_s=0)
    net.pass_time(30.0, prefill, decode)
    assert not prefill.connected(decode.address)
    net.down.clear()
    net.pass_time(REDIAL_S[1] + TICK_S, prefill, decode)
    assert are_linked(prefill, decode)
    assert len(prefill.snapshot().links) == 1


def test_a_peer_that_takes_its_time_is_dialled_once(net: HandNet) -> None:
    """A frozen process still accepts connections: they must not pile up."""
    prefill, decode = net.end(), net.end()
    prefill.connect(decode.address, timeout_s=0)
    net.pass_time(HANDSHAKE_S - 1.0, prefill)
    assert len(net.dials) == 1
    net.pass_time(RELINK_S, prefill)
    assert not prefill.snapshot().links
    assert len(net.dials) <= 1 + RELINK_S / HANDSHAKE_S


@pytest.mark.parametrize("when", ["not reached", "in the handshake", "broken"])
def test_drop_peer_ends_the_dialling(net: HandNet, when: str) -> None:
    prefill, decode = net.end(), net.end()
    if when == "not reached":
        net.down.update(decode.address.endpoints)
    prefill.connect(decode.address, timeout_s=0)
    if when == "broken":
        net.settle()
        net.cut(net.side(prefill))
    prefill.drop_peer(decode.address)
    num_dials = len(net.dials)
    net.down.clear()
    net.pass_time(10.0, prefill, decode)
    assert not are_linked(prefill, decode)
    assert len(net.dials) == num_dials
    assert not prefill.snapshot().wanted
    assert not prefill.snapshot().links


def test_other_layouts_are_not_asked_twice(net: HandNet) -> None:
    prefill, decode = net.end(), net.end(weights_id=b"others")
    prefill.connect(decode.address, timeout_s=0)
    net.pass_time(20.0, prefill, decode)
    assert len(net.dials) == 1
    assert not prefill.snapshot().wanted
    assert not any(end.snapshot().links for end in (prefill, decode))


def test_rooms_do_not_outlive_their_link(net: HandNet) -> None:
    """A link is replaced while rooms are open: both ends settle them, and nothing of the old reaches the new."""
    case = Case("hand")
    prefill, decode = linked(net)
    old, new = case.grant(decode, prefill), None
    pages = case.accept(prefill, old)
    case.push_all(prefill, old, pages)
    net.cut(net.side(prefill))
    assert [aborted.room for aborted in decode.poll()] == [old.room]
    net.pass_time(1.0, prefill, decode)
    assert are_linked(prefill, decode)
    case.push_all(prefill, old, pages)  # prefill has not looked yet
    prefill.finish(old, handoff(old, prefill))
    net.settle()
    assert not decode.poll()
    assert decode.stats.frames_dropped == 2
    assert not any(case.arrived(decode, old))
    new = case.grant(decode, prefill)
    pages = case.accept(prefill, new)
    case.push_all(prefill, new, pages)
    prefill.finish(new, handoff(new, prefill))
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.LANDED
    assert case.arrived(decode, new) == case.sent(prefill, new.tokens, pages)


@pytest.mark.parametrize("by", ["count", "time"])
def test_peers_that_come_and_go_are_forgotten(net: HandNet, by: str) -> None:
    decode, stays = net.end(), net.end()
    stays.connect(decode.address, timeout_s=0)
    net.settle()
    for _ in range(2 * book.MAX_PAST if by == "count" else 3):
        prefill = net.end()
        prefill.connect(decode.address, timeout_s=0)
        net.settle()
        prefill.close()
        net.settle()
    assert len(decode.stats.peers) == 1 + (book.MAX_PAST if by == "count" else 3)
    net.pass_time(book.PAST_S + 1.0, decode, stays)
    assert [stats.address for stats in decode.stats.peers] == [stays.address]
    assert len(decode.snapshot().links) == 1


def test_a_peer_that_is_dialled_is_not_past(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "PAST_S", 1.0)
    prefill, decode = linked(net)
    net.down.add(*decode.address.endpoints)
    net.cut(net.side(prefill))
    net.pass_time(RELINK_S / 2, prefill, decode)
    assert [stats.connected for stats in prefill.stats.peers] == [False]
    assert not decode.stats.peers
