"""The handshake, heartbeats and relinking of a channel's peers, message by message and second by second."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdinfer.bounds import escaped
from pdinfer.errors import ConfigError, LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel import complaints, tombstones, wire
from pdinfer.kv.channel import counters as traffic
from pdinfer.kv.channel import links as peers
from pdinfer.kv.channel import rooms as protocol
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.frame_mac import Seal
from pdinfer.kv.channel.links import HANDSHAKE_S, REDIAL_S, RELINK_S, SILENT_S, Peers
from pdinfer.kv.channel.peer import Peer
from pdinfer.kv.transports.base import MAX_UNTRUSTED_FRAME_BYTES, TICK_S
from pdinfer.kv.transports.stream import connection
from pdinfer.kv.transports.stream import transport as stream
from pdinfer.types import Handoff, HandoffStatus, PageGrant, peer_key
from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.channels import LAYERS, TIMEOUT_S, Case, pool_of, record, say, settled, until, word

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@pytest.fixture
def net() -> HandNet:
    return HandNet()


@pytest.fixture(params=["loopback", "tcp"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    try:
        yield made
    finally:
        made.close()


def linked(net: HandNet, **more: object) -> tuple[KVChannel, KVChannel]:
    """A prefill that has dialled a decode."""
    prefill, decode = net.end(**more), net.end(**more)  # type: ignore[arg-type]
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    assert are_linked(prefill, decode)
    return prefill, decode


def are_linked(one: KVChannel, other: KVChannel) -> bool:
    both = (one.connected(other.address), other.connected(one.address))
    assert both[0] == both[1], "one end thinks that it is connected"
    return all(both)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "at_ours", "at_theirs"),
    [
        (KEY, None, "this end has a key and the peer has none", "the peer has a key and this end has none"),
        (None, KEY, "the peer has a key and this end has none", "this end has a key and the peer has none"),
        (KEY, OTHER_KEY, "did not verify: the peer's key differs", "did not verify: the peer's key differs"),
    ],
)
def test_ends_that_do_not_share_a_key_both_say_so(
    case: Case,
    caplog: pytest.LogCaptureFixture,
    ours: bytes | None,
    theirs: bytes | None,
    at_ours: str,
    at_theirs: str,
) -> None:
    prefill, decode = case.end(key=ours), case.end(key=theirs)
    with caplog.at_level(logging.WARNING, "pdinfer"), pytest.raises(TransferError, match=at_ours):
        prefill.connect(decode.address)
    until(lambda: not decode._peers._by_link)
    there = next(iter(decode.address.endpoints))
    said = [text.getMessage() for text in caplog.records if there not in text.getMessage()]
    assert [text for text in said if at_theirs in text], said
    assert all(repr(key)[2:-1] not in caplog.text for key in (ours, theirs) if key)


def test_ends_that_share_a_key_hand_rooms_over(case: Case) -> None:
    prefill, decode = case.end(key=KEY), case.end(key=KEY)
    assert prefill.authenticates
    prefill.connect(decode.address)
    grant = case.grant(decode, prefill)
    pages = case.source(prefill, grant)
    prefill.accept(grant)
    case.push_all(prefill, grant, pages)
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is HandoffStatus.LANDED
    assert case.arrived(decode, grant) == case.sent(prefill, grant.tokens, pages)


def test_a_short_key_is_refused_before_anything_listens(net: HandNet) -> None:
    with pytest.raises(ConfigError, match=r"os\.urandom\(32\) makes one"):
        net.end(key=b"secret")
    assert not net.transports


# -- a handshake that somebody tampers with ----------------------------------------------------------------------------


class Deaf:
    """A Receiver that answers nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


class Stranger:
    """An end that says what we make it say, at either side of a new link to `peer`."""

    def __init__(self, net: HandNet, peer: KVChannel, *, dials: bool = True) -> None:
        self.net, self.peer = net, peer
        self.channel = net.end()
        self.channel.transport.receiver = Deaf()  # type: ignore[attr-defined]
        if dials:
            self.channel.transport.connect(peer.address.endpoints, timeout_s=0)
            self.side = net.sides[-2]
        else:
            peer.connect(self.channel.address, timeout_s=0)
            self.side = net.sides[-1]
        net.settle()
        theirs = wire.decode(self.side.other.sent[0])
        assert isinstance(theirs, wire.Open)
        nonce = b"n" * 16
        self.seal = Seal(nonce + theirs.nonce if dials else theirs.nonce + nonce, dials, None)
        self.open = wire.encode(wire.Open((wire.MAJOR, wire.MINOR), nonce, keyed=False))

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.side.owner.send(self.side.link, frame)
        self.net.settle()

    def say(self, message: wire.Message) -> None:
        self.send(self.seal.seal(wire.encode(message)))

    def hello(self) -> wire.Hello:
        return wire.Hello(self.channel.address, self.peer.pool.layout)

    def welcome(self) -> wire.Welcome:
        return wire.Welcome(self.channel.address, self.peer.pool.layout)

    @property
    def is_welcome(self) -> bool:
        return self.peer.connected(self.channel.address)


@pytest.mark.parametrize("key", [None, KEY])
def test_yesterdays_session_cannot_be_replayed(net: HandNet, key: bytes | None) -> None:
    """H29: the accepting end's nonce is new, so no recorded tag fits."""
    prefill, decode = linked(net, key=key)
    recorded = list(net.side(prefill).sent)
    assert len(recorded) == 2, "Open and Hello"
    prefill.drop_peer(decode.address)
    net.settle()
    stranger = Stranger(net, decode)
    stranger.send(*recorded)
    assert not decode.connected(prefill.address)
    stranger.send(recorded[1])
    assert not stranger.side.open, "who goes on after a refusal loses the link"
    assert not decode._peers._by_link


@pytest.mark.parametrize("key", [None, KEY])
def test_what_an_end_says_cannot_be_sent_back_to_it(net: HandNet, key: bytes | None) -> None:
    decode = net.end(key=key)
    mirror = Stranger(net, decode)
    for _ in range(3):
        mirror.send(*mirror.side.other.sent)
    assert not mirror.side.open
    assert not decode._peers._by_link
    assert not decode._peers._links


@pytest.mark.parametrize("dials", [True, False])
def test_only_who_dialled_says_hello_and_only_the_other_welcome(net: HandNet, dials: bool) -> None:
    for wrong in (True, False):
        stranger = Stranger(net, net.end(), dials=dials)
        stranger.send(stranger.open)
        assert not stranger.is_welcome
        stranger.say(stranger.hello() if dials != wrong else stranger.welcome())
        assert stranger.is_welcome == (not wrong)


def test_a_second_hello_closes_the_link(net: HandNet) -> None:
    stranger = Stranger(net, net.end())
    stranger.send(stranger.open)
    stranger.say(stranger.hello())
    assert stranger.is_welcome
    stranger.say(stranger.hello())
    assert not stranger.is_welcome
    assert not stranger.side.open


def test_who_answers_must_be_who_was_asked_for(net: HandNet) -> None:
    stranger = Stranger(net, net.end(), dials=False)
    stranger.send(stranger.open)
    address = attrs.evolve(stranger.channel.address, epoch=7)
    stranger.say(wire.Welcome(address, pool_of().layout))
    assert not stranger.is_welcome
    assert not stranger.peer.connected(address)


@pytest.mark.parametrize("dials", [True, False])
def test_who_says_that_he_is_this_very_end_is_refused(net: HandNet, dials: bool) -> None:
    victim, friend = linked(net)
    stranger = Stranger(net, victim, dials=dials)
    stranger.send(stranger.open)
    said = wire.Hello if dials else wire.Welcome
    stranger.say(said(victim.address, victim.pool.layout))
    assert not victim.connected(victim.address)
    assert [peer.address for peer in victim.stats.peers] == [friend.address]
    assert are_linked(victim, friend)
    if dials:
        answer = wire.decode(stranger.side.other.sent[-1][:-8])
        assert isinstance(answer, wire.Reject)
        assert "this very end" in str(answer.error)


def test_a_stranger_gets_no_further_than_one_frame_beyond_the_limit(net: HandNet) -> None:
    stranger = Stranger(net, net.end())
    stranger.send(b"x" * (MAX_UNTRUSTED_FRAME_BYTES + 1))
    assert not stranger.side.open
    assert not stranger.peer._peers._by_link


@example(layers=1, names=1, reason="𝄞" * 500)
@given(layers=st.integers(1, 80), names=st.integers(1, 6), reason=st.text(max_size=2000))
def test_a_refusal_fits_an_untrusted_link_whatever_it_says(layers: int, names: int, reason: str) -> None:
    fields = tuple((f"components.{'n' * name}.layers", "1," * layers, "2," * layers) for name in range(names))
    plain = escaped("the two ends' KV layouts differ")
    for error in (LayoutMismatch(reason, fields=fields), TransferError(reason)):
        for key in (None, KEY):
            sealed = Seal(bytes(32), False, key).seal(wire.rejection(error, again=False))
            assert len(sealed) <= MAX_UNTRUSTED_FRAME_BYTES
            decoded = wire.decode(wire.rejection(error, again=True))
            assert isinstance(decoded, wire.Reject)
            assert type(decoded.error) is type(error)
            said = str(decoded.error).removesuffix(" …")
            assert (plain if decoded.fields or isinstance(error, LayoutMismatch) else escaped(reason)).startswith(said)


def test_nothing_that_another_thread_says_overtakes_the_welcome(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as a peer is admitted the stepping thread may push to it; a frame before Welcome closes the link."""
    prefill, decode = net.end(), net.end()
    admit = decode._peers._admit

    def admit_and_push(peer: object, message: object) -> None:
        admit(peer, message)  # type: ignore[arg-type]
        say(decode, prefill, wire.Beat(0.0))

    monkeypatch.setattr(decode._peers, "_admit", admit_and_push)
    prefill.connect(decode.address, timeout_s=0)
    net.settle()
    assert are_linked(prefill, decode)


def test_an_end_does_not_dial_itself(net: HandNet) -> None:
    end = net.end()
    with pytest.raises(TransferError, match="the end's own address"):
        end.connect(end.address, timeout_s=0)
    assert not net.dials


# -- two ends that dial each other -------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(data=st.data())
def test_of_two_crossing_links_exactly_one_stays(data: st.DataObject) -> None:
    """In every order in which the messages of both can be delivered, also while an end is dialling."""
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
    assert all(len(end._peers._by_link) == 1 for end in ends)
    net.pass_time(RELINK_S, *ends)
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
    assert all(len(end._peers._by_link) == 1 for end in ends)


def test_both_calls_end_well_when_two_ends_dial_each_other(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, both_dial, problems = (case.end(), case.end()), threading.Barrier(2), list[PDInferError]()
    lesser = min(ends, key=lambda end: peer_key(end.address))
    introduce = Peers._introduce

    def introduce_together(peers: Peers, peer: Peer) -> None:
        if not both_dial.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                both_dial.wait(1.0)
            both_dial.abort()
            if peers is lesser._peers:
                time.sleep(0.1)  # so that the other end is refused before it knows of this link
        introduce(peers, peer)

    monkeypatch.setattr(Peers, "_introduce", introduce_together)

    def dial(one: KVChannel, other: KVChannel) -> None:
        try:
            one.connect(other.address)
        except PDInferError as error:
            problems.append(error)

    dialling = [threading.Thread(target=dial, args=pair) for pair in (ends, ends[::-1])]
    for thread in dialling:
        thread.start()
    for thread in dialling:
        thread.join(TIMEOUT_S)
    assert not problems
    until(lambda: all(len(end._peers._by_link) == 1 for end in ends))
    assert are_linked(*ends)


def test_a_dropped_peer_can_be_dialled_at_once(case: Case) -> None:
    """Also when it has not yet read that the link is closed."""
    prefill, decode = case.pair()
    for _ in range(5):
        prefill.drop_peer(decode.address)
        prefill.connect(decode.address)
    late = threading.Timer(0.3, decode.drop_peer, (prefill.address,))
    prefill._peers._links.clear()  # as if this end alone knew that the link is broken
    late.start()
    prefill.connect(decode.address)
    late.join()
    assert prefill.connected(decode.address)


# -- heartbeats --------------------------------------------------------------------------------------------------------


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
    assert net.clock() - last_heard + every_s >= SILENT_S
    assert net.clock() - last_heard <= 3.0
    net.pass_time(TICK_S, prefill)
    assert not prefill.connected(decode.address), "the other end learns of it"


def test_the_room_of_a_silent_writer_is_told_why(net: HandNet) -> None:
    prefill, decode = linked(net)
    grant = Case("hand").grant(decode, prefill)
    net.pass_time(4.0, decode)
    (aborted,) = decode.poll()
    assert (aborted.room, aborted.status) == (grant.room, HandoffStatus.ABORTED)
    assert "it hangs, is frozen or cannot be reached" in str(aborted.error)


@given(st.floats(1.0, 600.0))
def test_an_end_that_slept_reads_before_it_judges(slept_s: float) -> None:
    net = HandNet()
    prefill, decode = linked(net)
    net.pass_time(2.0, prefill, decode)
    net.pass_time(0.4, prefill)  # a beat that waits to be read
    net.clock.advance(slept_s)
    decode.tick()  # the first thing it does when it wakes, at worst
    assert decode.connected(prefill.address)
    net.pass_time(2.0, prefill, decode)
    assert are_linked(prefill, decode)


@given(st.floats(1.11, 5.0))
def test_ticks_that_come_late_still_find_a_dead_peer(every_s: float) -> None:
    net = HandNet()
    prefill, decode = linked(net)
    net.pass_time(3 * every_s, decode, every_s=every_s)
    assert not decode.connected(prefill.address)


def test_a_handshake_that_stands_still_is_given_up(net: HandNet) -> None:
    stranger = Stranger(net, net.end())
    net.pass_time(HANDSHAKE_S - 1.0, stranger.peer)
    assert stranger.side.open
    net.pass_time(2.0, stranger.peer)
    net.settle()
    assert not stranger.side.open
    assert not stranger.peer._peers._by_link


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


# -- relinking ---------------------------------------------------------------------------------------------------------


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
    assert len(prefill._peers._by_link) == 1


def test_a_peer_that_takes_its_time_is_dialled_once(net: HandNet) -> None:
    """A frozen process still accepts connections: they must not pile up."""
    prefill, decode = net.end(), net.end()
    prefill.connect(decode.address, timeout_s=0)
    net.pass_time(HANDSHAKE_S - 1.0, prefill)
    assert len(net.dials) == 1
    net.pass_time(RELINK_S, prefill)
    assert not prefill._peers._by_link
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
    assert not prefill._peers._wanted
    assert not prefill._peers._by_link


def test_other_layouts_are_not_asked_twice(net: HandNet) -> None:
    prefill, decode = net.end(), net.end(weights_id=b"others")
    prefill.connect(decode.address, timeout_s=0)
    net.pass_time(20.0, prefill, decode)
    assert len(net.dials) == 1
    assert not prefill._peers._wanted
    assert not any(end._peers._by_link for end in (prefill, decode))


def test_rooms_do_not_outlive_their_link(net: HandNet) -> None:
    """The link is replaced while rooms are open: both ends settle them, and nothing of the old link reaches the new."""
    case = Case("hand")
    prefill, decode = linked(net)
    old, new = case.grant(decode, prefill), None
    pages = case.source(prefill, old)
    prefill.accept(old)
    case.push_all(prefill, old, pages)
    net.cut(net.side(prefill))
    assert [aborted.room for aborted in decode.poll()] == [old.room]
    net.pass_time(1.0, prefill, decode)
    assert are_linked(prefill, decode)
    case.push_all(prefill, old, pages)  # prefill has not looked yet
    prefill.finish(old, word(old, prefill))
    net.settle()
    assert not decode.poll()
    assert decode.stats.frames_dropped == 2
    assert not any(case.arrived(decode, old))
    new = case.grant(decode, prefill)
    pages = case.source(prefill, new)
    prefill.accept(new)
    case.push_all(prefill, new, pages)
    prefill.finish(new, word(new, prefill))
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.LANDED
    assert case.arrived(decode, new) == case.sent(prefill, new.tokens, pages)


def test_a_link_that_breaks_while_a_grant_is_accepted_stops_it(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = linked(net)
    grant = Case("hand").grant(decode, prefill)
    accept, breaking = protocol.Accepted.accept, list[threading.Thread]()

    def accept_late(accepted: protocol.Accepted, grant: PageGrant) -> None:
        thread = threading.Thread(target=lambda: net.cut(net.side(prefill)))
        thread.start()
        thread.join(0.2)
        breaking.append(thread)
        accept(accepted, grant)

    monkeypatch.setattr(protocol.Accepted, "accept", accept_late)
    prefill.accept(grant)
    breaking[0].join(TIMEOUT_S)
    assert [room for room, _ in prefill.poll_stops()] == [grant.room]


# -- welcome, and hostile ----------------------------------------------------------------------------------------------


def footprint(end: KVChannel) -> int:
    """Everything that a peer's frames could make longer."""
    peers, expected, accepted = end._peers, end._expected, end._accepted
    return (
        sum(len(part) for part in (peers._by_link, peers._links, peers._wanted, peers._ledger))
        + sum(len(peer.placing) + len(peer._outbox) for peer in peers._by_link.values())
        + len(expected._rooms)
        + len(expected._settled)
        + sum(len(ranges) for room in expected._rooms.values() for ranges in room.coverage._announced.values())
        + len(accepted._rooms)
        + len(accepted._stops)
        + len(accepted.tombstones)
        + len(end._pushes._open)
    )


@pytest.mark.parametrize("flood", ["aborts", "data", "finishes", "beats"])
def test_floods_of_a_welcome_peer_leave_no_more_than_bounded_tombstones(
    net: HandNet, monkeypatch: pytest.MonkeyPatch, flood: str
) -> None:
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 50)
    hostile, victim = linked(net)
    before = footprint(victim)

    def send(number: int) -> None:
        room = number.to_bytes(16, "big")
        if flood == "aborts":
            say(hostile, victim, wire.Abort(room, TransferError("no")))
        elif flood == "data":
            say(hostile, victim, wire.Data(room, LAYERS, range(1)), [(0, 12)])
        elif flood == "finishes":
            landed = Handoff(room=room, writer=hostile.address, status=HandoffStatus.LANDED)
            say(hostile, victim, wire.Finish(landed))
        else:
            say(hostile, victim, wire.Beat(float(number)))

    for number in range(500):
        send(number)
        net.settle()
    assert are_linked(hostile, victim)
    assert footprint(victim) <= before + 50
    dropped = victim.stats.frames_dropped
    assert dropped == (500 if flood in ("data", "finishes") else 0)
    hostile.drop_peer(victim.address)
    net.settle()
    buried = 50 if flood == "aborts" else 0  # those outlive the link, since the peer may come back over another one
    assert footprint(victim) <= before + buried


def test_a_peer_that_lives_and_does_not_read_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else everything that it makes us answer would wait for it."""
    monkeypatch.setattr(stream, "MAX_WAITING_BYTES", 100_000)
    monkeypatch.setattr(peers, "SILENT_S", 60.0)  # nothing is sent here, and silence is not what this is about
    case = Case("tcp")
    deaf, victim = case.pair()
    grant = case.grant(victim, deaf)
    monkeypatch.setattr(deaf, "_aborted", lambda *_: None)
    monkeypatch.setattr(connection.StreamConnection, "transmit", lambda _: False)
    monkeypatch.setattr(connection.StreamConnection, "_leaves", lambda *_: False)
    reason, num_sent = TransferError("no" * 1000), 0
    there, words = record(victim, deaf), list[Handoff]()
    while not words:
        there.post(victim.transport, wire.encode(wire.Abort(num_sent.to_bytes(16, "big"), reason)))
        num_sent += 1
        assert num_sent < 100_000
        words = victim.poll()
    (aborted,) = words
    assert aborted.room == grant.room
    assert "does not read" in str(aborted.error)
    monkeypatch.undo()
    case.close()


def test_what_is_read_no_longer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_WAITING_BYTES", 100_000)
    case = Case("tcp")
    prefill, decode = case.pair()
    big = TransferError("no" * 40_000)
    monkeypatch.setattr(wire, "MAX_TEXT_CHARACTERS", 80_000)
    for number in range(40):
        say(decode, prefill, wire.Abort(number.to_bytes(16, "big"), big))
        until(lambda: decode.stats.frames_dropped > number)  # noqa: B023 - asked at once; each answer is as long
    assert are_linked(prefill, decode)
    case.close()


@pytest.mark.parametrize("by", ["count", "time"])
def test_peers_that_come_and_go_are_forgotten(net: HandNet, by: str) -> None:
    decode, stays = net.end(), net.end()
    stays.connect(decode.address, timeout_s=0)
    net.settle()
    for _ in range(2 * traffic.MAX_PAST if by == "count" else 3):
        prefill = net.end()
        prefill.connect(decode.address, timeout_s=0)
        net.settle()
        prefill.close()
        net.settle()
    assert len(decode.stats.peers) == 1 + (traffic.MAX_PAST if by == "count" else 3)
    net.pass_time(traffic.PAST_S + 1.0, decode, stays)
    assert [stats.address for stats in decode.stats.peers] == [stays.address]
    assert len(decode._peers._by_link) == 1


def test_a_peer_that_is_dialled_is_not_past(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PAST_S", 1.0)
    prefill, decode = linked(net)
    net.down.add(*decode.address.endpoints)
    net.cut(net.side(prefill))
    net.pass_time(RELINK_S / 2, prefill, decode)
    assert [stats.connected for stats in prefill.stats.peers] == [False]
    assert not decode.stats.peers


def test_guests_are_few_and_who_has_something_to_do_is_none(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Welcome peers that this host neither dialled nor gave anything to do make room for each other."""
    monkeypatch.setattr(peers, "MAX_GUESTS", 4)
    decode, dialled, writer = net.end(), net.end(), net.end()
    decode.connect(dialled.address, timeout_s=0)
    writer.connect(decode.address, timeout_s=0)
    net.settle()
    Case("hand").grant(decode, writer)
    guests = [net.end() for _ in range(20)]
    for guest in guests:
        guest.connect(decode.address, timeout_s=0)
        net.settle()
    assert are_linked(decode, dialled)
    assert are_linked(decode, writer)
    assert [guest for guest in guests if decode.connected(guest.address)] == guests[-4:]
    assert len(decode._peers._by_link) == 6


def test_an_answer_does_not_carry_what_the_peer_said(net: HandNet) -> None:
    hostile, victim = linked(net)
    side = next(side for side in net.sides if side.owner.receiver is victim)
    before = len(side.sent)
    say(hostile, victim, wire.Abort(b"r" * 16, TransferError("poem " * 800)))
    net.settle()
    (answer,) = side.sent[before:]
    assert b"poem" not in answer
    assert len(answer) < 400


def test_warnings_that_a_stranger_causes_are_few(net: HandNet, caplog: pytest.LogCaptureFixture) -> None:
    victim = net.end()
    with caplog.at_level(logging.WARNING, "pdinfer"):
        for _ in range(3 * complaints.MAX_WARNINGS):
            Stranger(net, victim).send(wire.encode(wire.Open((wire.MAJOR + 1, 0), b"n" * 16, keyed=False)))
            net.settle()
        assert len(caplog.records) == complaints.MAX_WARNINGS
        net.clock.advance(complaints.WINDOW_S)
        Stranger(net, victim).send(wire.encode(wire.Open((wire.MAJOR + 1, 0), b"n" * 16, keyed=False)))
        net.settle()
    unsaid, last = caplog.records[complaints.MAX_WARNINGS :]
    assert unsaid.getMessage() == f"{2 * complaints.MAX_WARNINGS} more warnings about peers were not logged"
    assert "speaks protocol" in last.getMessage()
