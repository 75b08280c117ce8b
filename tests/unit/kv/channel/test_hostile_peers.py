"""Peers that break the rules, flood, or do not read: each loses only its own link and rooms, and nothing grows."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Callable

import attrs
import pytest
import xxhash

from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel import book, peer, rooms, wire
from pdinfer.kv.channel import links as linking
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.sender import HandoffSender
from pdinfer.kv.channel.wire import FrameMac
from pdinfer.kv.transports.stream import connection
from pdinfer.kv.transports.stream import transport as stream
from pdinfer.kv.transports.stream.framing import HEADER, Header, MessageKind, digest_bytes, framed
from pdinfer.process.silence import LINKS
from pdinfer.types import Handoff, HandoffStatus, PageGrant
from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.by_hand import Stranger, are_linked, linked
from tests.unit.kv.channel.channels import ABORTED, LANDED, LAYERS, Case, handoff, link_to, record, say, settled
from tests.waiting import TIMEOUT_S, wait_until


@attrs.frozen
class Hand:
    """An accepted connection whose bytes the test makes."""

    sock: socket.socket
    mac: FrameMac

    @classmethod
    def dial(cls, decode: KVChannel, identity: KVChannel) -> Hand:
        """Says that it is `identity`."""
        host, _, port = decode.address.endpoints[0].removeprefix("tcp://").rpartition(":")
        sock = socket.create_connection((host, int(port)), TIMEOUT_S)
        ours, theirs = b"n" * 16, cls.read(sock)
        assert isinstance(theirs, wire.Open)
        hand = cls(sock, FrameMac(ours + theirs.nonce, from_dialler=True, key=None))
        sock.sendall(framed(MessageKind.FRAME, wire.encode(wire.Open((wire.MAJOR, 0), ours, keyed=False))))
        hand.say(wire.Hello(identity.address, decode.pool.layout))
        return hand

    @staticmethod
    def read(sock: socket.socket, tag_bytes: int = 0) -> wire.Message:
        header = Header.parse(sock.recv(HEADER.size, socket.MSG_WAITALL))
        return wire.decode(sock.recv(header.frame_bytes, socket.MSG_WAITALL)[: header.frame_bytes - tag_bytes])

    def say(self, message: wire.Message) -> None:
        self.sock.sendall(framed(MessageKind.FRAME, self.mac.sign(wire.encode(message))))

    def hears(self) -> wire.Message:
        return self.read(self.sock, self.mac.tag_bytes)


def test_a_second_link_that_comes_and_goes_settles_nothing() -> None:
    """Page rule 1: the first link is in the middle of a write, and pages that settle may be reused at once."""
    case = Case("tcp")
    with case.end() as decode, case.end() as writer:
        first = Hand.dial(decode, writer)
        assert isinstance(first.hears(), wire.Welcome)
        grant = case.grant(decode, writer)
        num_bytes = decode.pool.layout.payload_bytes(LAYERS, grant.tokens)
        frame = first.mac.sign(wire.encode(wire.Data(grant.room, LAYERS, grant.tokens)))
        head = Header(MessageKind.WRITE, len(frame), num_bytes, digested=True).packed() + frame
        payload = b"\x55" * num_bytes
        first.sock.sendall(head + payload[: num_bytes // 2])
        wait_until(lambda: 0x55 in decode.pool.memory.buffer)
        second = Hand.dial(decode, writer)
        assert isinstance(second.hears(), wire.Reject)
        second.sock.close()
        wait_until(lambda: len(decode.snapshot().links) == 1)
        first.sock.sendall(payload[num_bytes // 2 :] + digest_bytes(xxhash.xxh3_64(head + payload)))
        first.say(wire.Finish(handoff(grant, writer)))
        assert settled(decode)[0].status is LANDED
        assert case.arrived(decode, grant) == payload
        first.sock.close()


Breach = Callable[[Case, KVChannel, KVChannel, PageGrant], None]


def says(make: Callable[[KVChannel, KVChannel], wire.Message]) -> Breach:
    return lambda case, prefill, decode, grant: say(prefill, decode, make(prefill, decode))


def garbage(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    record(prefill, decode).post(b"\x00garbage")


def a_frame_without_a_tag(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.transport.send(link_to(prefill, decode.address), wire.encode(wire.Finish(handoff(grant, prefill))))


def write(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant, layers: range, tokens: range) -> None:
    num_bytes = prefill.pool.layout.payload_bytes(LAYERS, grant.tokens)
    say(prefill, decode, wire.Data(grant.room, layers, tokens), [(0, num_bytes)])


def layers_out_of_range(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    write(case, prefill, decode, grant, range(1, 4), grant.tokens)


def tokens_out_of_range(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    write(case, prefill, decode, grant, LAYERS, range(grant.tokens.start - 1, grant.tokens.stop - 1))


def the_same_twice(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    for _ in range(2):
        write(case, prefill, decode, grant, LAYERS, grant.tokens)


def too_many_bytes(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    write(case, prefill, decode, grant, range(2), grant.tokens)


def pages_that_changed_hands(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    decode.pool.release(grant.pages)
    write(case, prefill, decode, grant, LAYERS, grant.tokens)


def a_write_announced_by_something_else(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    say(prefill, decode, wire.Abort(grant.room, PDInferError("x")), [(0, 4)])


@pytest.mark.parametrize(
    ("breach", "reason"),
    [
        (garbage, "not a message"),
        (a_frame_without_a_tag, "did not verify"),
        pytest.param(says(lambda *_: wire.Data(b"r" * 16, LAYERS, LAYERS)), "a Data frame", id="data_without_payload"),
        pytest.param(says(lambda *_: wire.Reject(PDInferError("no"))), "a Reject frame", id="reject_on_an_open_link"),
        pytest.param(says(lambda p, d: wire.Hello(p.address, p.pool.layout)), "a Hello frame", id="hello_again"),
        pytest.param(says(lambda p, d: wire.Welcome(p.address, p.pool.layout)), "a Welcome frame", id="welcome_again"),
        pytest.param(says(lambda p, d: wire.Open((2, 0), b"n" * 16, keyed=False)), "an? Open frame", id="open_again"),
        (layers_out_of_range, "outside the grant"),
        (tokens_out_of_range, "outside the grant"),
        (the_same_twice, "announced twice"),
        (too_many_bytes, "does not hold the tokens"),
        (pages_that_changed_hands, "changed hands"),
        (a_write_announced_by_something_else, "announced by a Abort"),
    ],
)
def test_a_breach_closes_the_link_and_aborts_the_room(two_pools: Case, breach: Breach, reason: str) -> None:
    prefill, decode, grant, _ = two_pools.room()
    with contextlib.suppress(TransferError):
        breach(two_pools, prefill, decode, grant)
    (aborted,) = settled(decode)
    assert aborted.status is ABORTED
    assert re.search(reason, str(aborted.error))
    assert not decode.connected(prefill.address)
    wait_until(lambda: prefill.has_news)
    assert prefill.poll_stops()[0][0] == grant.room


def footprint(end: KVChannel) -> int:
    """Count everything that the frames of a peer could make longer."""
    held = end.snapshot()
    return (
        len(held.links)
        + len(held.wanted)
        + len(end.stats.peers)
        + sum(link.num_frames_waiting + link.num_writes_arriving for link in held.links)
        + len(held.expected)
        + sum(room.num_pieces for room in held.expected.values())
        + len(held.accepted)
        + len(held.pushing)
        + held.num_settled
        + held.num_stops
    )


@pytest.mark.parametrize("flood", ["aborts", "data", "finishes", "beats"])
def test_floods_of_a_welcome_peer_leave_no_more_than_bounded_tombstones(
    net: HandNet, monkeypatch: pytest.MonkeyPatch, flood: str
) -> None:
    monkeypatch.setattr(rooms, "MAX_TOMBSTONES", 50)
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
    """Otherwise every answer that it provokes would wait for it."""
    monkeypatch.setattr(stream, "MAX_WAITING_BYTES", 100_000)
    # nothing is sent here, and this test is not about silence
    monkeypatch.setattr(linking, "LINKS", attrs.evolve(LINKS, silent_s=60.0))
    case = Case("tcp")
    deaf, victim = case.pair()
    grant = case.grant(victim, deaf)
    monkeypatch.setattr(HandoffSender, "stop", lambda *_: None)
    monkeypatch.setattr(connection.StreamConnection, "transmit", lambda _: False)
    monkeypatch.setattr(connection.StreamConnection, "_leaves", lambda *_: False)
    reason, num_sent = TransferError("no" * 1000), 0
    there, handoffs = record(victim, deaf), list[Handoff]()
    while not handoffs:
        there.post(wire.encode(wire.Abort(num_sent.to_bytes(16, "big"), reason)))
        num_sent += 1
        assert num_sent < 100_000
        handoffs = victim.poll()
    (aborted,) = handoffs
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
        wait_until(lambda: decode.stats.frames_dropped > number)  # noqa: B023 - asked at once; each answer is as long
    assert are_linked(prefill, decode)
    case.close()


def test_guests_are_few_and_who_has_something_to_do_is_none(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linked peers that this host neither dialled nor gave anything to do make room for each other."""
    monkeypatch.setattr(book, "MAX_GUESTS", 4)
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
    assert len(decode.snapshot().links) == 6


def test_an_answer_does_not_carry_what_the_peer_said(net: HandNet) -> None:
    hostile, victim = linked(net)
    side = next(side for side in net.sides if side.owner.receiver is victim.arrivals)
    before = len(side.sent)
    say(hostile, victim, wire.Abort(b"r" * 16, TransferError("poem " * 800)))
    net.settle()
    (answer,) = side.sent[before:]
    assert b"poem" not in answer
    assert len(answer) < 400


def test_warnings_that_a_stranger_causes_are_few(net: HandNet, caplog: pytest.LogCaptureFixture) -> None:
    victim = net.end()
    with caplog.at_level(logging.WARNING, "pdinfer"):
        for _ in range(3 * peer.MAX_WARNINGS):
            Stranger(net, victim).send(wire.encode(wire.Open((wire.MAJOR + 1, 0), b"n" * 16, keyed=False)))
            net.settle()
        assert len(caplog.records) == peer.MAX_WARNINGS
        net.clock.advance(peer.WINDOW_S)
        Stranger(net, victim).send(wire.encode(wire.Open((wire.MAJOR + 1, 0), b"n" * 16, keyed=False)))
        net.settle()
    unsaid, last = caplog.records[peer.MAX_WARNINGS :]
    assert unsaid.getMessage() == f"{2 * peer.MAX_WARNINGS} more warnings about peers were not logged"
    assert "speaks protocol" in last.getMessage()
