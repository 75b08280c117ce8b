"""Decode's side of a channel: how rooms settle, whatever their writers do."""

from __future__ import annotations

import contextlib
import socket
import threading

import attrs
import pytest

from pdinfer.errors import PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.receiver import ANSWER_S, MUTE_S
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.transports.stream.framing import DIGEST_BYTES, HEADER, Header, MessageKind
from pdinfer.testing import VirtualClock
from pdinfer.types import HandoffStatus
from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.by_hand import linked
from tests.unit.kv.channel.channels import ABORTED, LANDED, LAYERS, Case, handoff, pool_of, record, say, settled
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until


@pytest.mark.parametrize("layers", [range(0), range(1), range(2)])
def test_landed_without_its_bytes_is_aborted(case: Case, layers: range) -> None:
    prefill, decode, grant, pages = case.room()
    if layers:
        prefill.push(grant, layers=layers, tokens=grant.tokens, pages=pages)
    prefill.finish(grant, handoff(grant, prefill))
    (aborted,) = settled(decode)
    assert aborted.status is ABORTED
    assert "not every granted token had arrived" in str(aborted.error)


def test_the_writers_own_reason_arrives(case: Case) -> None:
    prefill, decode, grant, _ = case.room()
    prefill.finish(grant, handoff(grant, prefill, ABORTED))
    (aborted,) = settled(decode)
    assert (aborted.status, type(aborted.error), str(aborted.error)) == (ABORTED, TransferError, "gave up")


def test_two_writers_share_a_room(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    second = two_pools.end()
    second.connect(decode.address)
    grant = two_pools.grant(decode, prefill, second, tokens=range(4, 12))
    for writer, tokens in ((prefill, range(4, 7)), (second, range(7, 12))):
        pages = two_pools.accept(writer, grant)
        writer.push(grant, layers=LAYERS, tokens=tokens, pages=pages)
        assert not decode.poll(), "the other writer has not finished"
        writer.finish(grant, handoff(grant, writer))
    assert [(w.writer, w.status) for w in settled(decode, 2)] == [
        (prefill.address, LANDED),
        (second.address, LANDED),
    ]


def test_one_writers_abort_stops_the_other(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    second = two_pools.end()
    second.connect(decode.address)
    grant = two_pools.grant(decode, prefill, second)
    for writer in (prefill, second):
        writer.accept(grant)
    prefill.finish(grant, handoff(grant, prefill, ABORTED))
    wait_until(lambda: second.has_news)
    assert [room for room, _ in second.poll_stops()] == [grant.room]
    assert not decode.poll()
    second.finish(grant, handoff(grant, second, ABORTED))
    assert [w.status for w in settled(decode, 2)] == [ABORTED, ABORTED]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_writer_stops_the_other(two_pools: Case, when: str) -> None:
    """Otherwise a writer that never hears of the room would never finish it, and the pages would stay granted."""
    prefill, decode = two_pools.pair()
    second = two_pools.end()
    if when == "after":
        second.connect(decode.address)
    grant = two_pools.grant(decode, prefill, second)
    second.close()
    assert [w.status for w in settled(decode, 2)] == [ABORTED, ABORTED]
    with pytest.raises(TransferError, match="was aborted before its request arrived"):
        prefill.accept(grant)


def test_a_writer_that_is_not_connected_is_lost_at_once(case: Case) -> None:
    _, decode = case.pair()
    stranger = case.end()
    heard = threading.Event()
    decode.notify(heard.set)
    case.grant(decode, stranger)
    assert decode.has_news
    assert heard.is_set()
    (aborted,) = decode.poll()
    assert aborted.status is ABORTED
    assert "not connected" in str(aborted.error)


def test_an_abort_in_the_middle_asks_the_writer_to_stop(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    prefill.push(grant, layers=range(1), tokens=grant.tokens, pages=pages)
    for _ in range(2):
        decode.abort(grant, PDInferError("cancelled"))
    wait_until(lambda: prefill.has_news)
    ((room, error),) = prefill.poll_stops()
    assert (room, type(error), str(error)) == (grant.room, TransferError, "cancelled")
    assert not decode.poll(), "the writer has not stopped yet"
    prefill.finish(grant, handoff(grant, prefill, ABORTED))
    assert settled(decode)[0].status is ABORTED
    assert not prefill.poll_stops()


def test_a_landed_room_that_crossed_the_abort_lands(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    case.push_all(prefill, grant, pages)
    decode.abort(grant, PDInferError("cancelled"))
    prefill.finish(grant, handoff(grant, prefill))
    assert settled(decode)[0].status is LANDED


def test_a_foreign_write_and_handoff_are_dropped_and_counted(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    thief = two_pools.end()
    thief.connect(decode.address)
    grant = two_pools.grant(decode, prefill)
    pages = two_pools.accept(thief, grant)
    thief.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    thief.finish(grant, handoff(grant, prefill))
    wait_until(lambda: decode.stats.frames_dropped == 2)
    assert not decode.poll()
    assert decode.stats.bytes_received == 0
    assert not any(two_pools.arrived(decode, grant))
    case_pages = two_pools.accept(prefill, grant)
    two_pools.hand_over(prefill, decode, grant, case_pages)


def test_a_write_after_finish_is_dropped_and_counted(two_pools: Case) -> None:
    prefill, decode, grant, pages = two_pools.room()
    two_pools.hand_over(prefill, decode, grant, pages)
    expected = two_pools.arrived(decode, grant)
    with pytest.raises(TransferError, match="not open for writing"):
        two_pools.push_all(prefill, grant, pages)
    prefill.pool.memory.buffer.zero_()
    say(prefill, decode, wire.Data(grant.room, LAYERS, grant.tokens), two_pools.at(prefill, grant.tokens, pages, 0))
    prefill.finish(grant, handoff(grant, prefill))
    wait_until(lambda: decode.stats.frames_dropped == 2)
    assert two_pools.arrived(decode, grant) == expected
    assert not decode.poll()
    assert decode.connected(prefill.address)


def test_bytes_that_did_not_verify_abort_the_room(two_pools: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = two_pools.pair()
    placed = decode.arrivals.placed
    monkeypatch.setattr(
        decode.arrivals, "placed", lambda link, frame, error: placed(link, frame, TransferError("digest"))
    )
    grant = two_pools.grant(decode, prefill)
    pages = two_pools.accept(prefill, grant)
    two_pools.push_all(prefill, grant, pages)
    wait_until(lambda: prefill.has_news)
    assert prefill.poll_stops()[0][0] == grant.room
    prefill.finish(grant, handoff(grant, prefill))
    (aborted,) = settled(decode)
    assert (aborted.status, str(aborted.error)) == (ABORTED, "digest")
    assert decode.stats.writes_damaged == 1


def damaging_proxy(endpoint: str) -> tuple[socket.socket, threading.Thread]:
    """Stand in front of a TCP endpoint, pass messages on, and flip a bit in the payload of every write to it."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(TIMEOUT_S)

    def take(sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := sock.recv(count - len(data))):
                raise ConnectionResetError
            data += part
        return data

    def answers(theirs: socket.socket, ours: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := theirs.recv(4096):
                ours.sendall(data)

    def serve() -> None:
        ours, _ = listener.accept()
        theirs = socket.create_connection((host, int(port)), TIMEOUT_S)
        back = threading.Thread(target=answers, args=(theirs, ours))
        with ours, theirs, contextlib.suppress(OSError):
            back.start()
            while True:
                head = take(ours, HEADER.size)
                header = Header.parse(head)
                rest = bytearray(take(ours, header.frame_bytes))
                if header.kind is MessageKind.WRITE:
                    rest += take(ours, header.payload_bytes + DIGEST_BYTES)
                    rest[header.frame_bytes] ^= 1
                theirs.sendall(head + rest)
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)
        back.join(TIMEOUT_S)

    serving = started(serve)
    return listener, serving


def test_a_bit_that_flips_on_the_way_aborts_the_room_and_no_other() -> None:
    case = Case("tcp")
    prefill, decode = case.end(), case.end()
    listener, serving = damaging_proxy(decode.address.endpoints[0])
    with listener, prefill, decode:
        port = listener.getsockname()[1]
        prefill.connect(attrs.evolve(decode.address, endpoints=(f"tcp://127.0.0.1:{port}",)))
        damaged, empty = case.grant(decode, prefill), case.grant(decode, prefill)
        pages = case.source(prefill, damaged)
        for grant in (damaged, empty):
            prefill.accept(grant)
        case.push_all(prefill, damaged, pages)
        prefill.finish(damaged, handoff(damaged, prefill))
        (aborted,) = settled(decode)
        assert (aborted.room, aborted.status) == (damaged.room, ABORTED)
        assert "did not verify" in str(aborted.error)
        assert decode.stats.writes_damaged == 1
        prefill.finish(empty, handoff(empty, prefill, ABORTED))
        (gave_up,) = settled(decode)
        assert (gave_up.room, str(gave_up.error)) == (empty.room, "gave up"), "the link goes on"
    check_ends(serving)


def test_a_writer_that_does_not_answer_an_abort_loses_its_link() -> None:
    clock = VirtualClock()
    prefill, decode = (
        KVChannel(pool_of(), LoopbackTransport(hub), clock=clock) for hub in [LoopbackHub()] for _ in "pd"
    )
    prefill.connect(decode.address)
    grant = Case("loopback").grant(decode, prefill)
    prefill.accept(grant)
    decode.arrivals.tick()
    clock.advance(2.0)
    decode.abort(grant, TransferError("cancelled"))
    decode.arrivals.tick()
    clock.advance(ANSWER_S - 0.1)
    for link in [record(decode, prefill).link, record(prefill, decode).link]:
        link.heard_at = clock()
    decode.arrivals.tick()
    assert not decode.poll()
    clock.advance(0.2)
    decode.arrivals.tick()
    (aborted,) = decode.poll()
    assert aborted.status is ABORTED
    assert "did not stop writing" in str(aborted.error)
    assert not decode.connected(prefill.address)


@pytest.mark.parametrize("beats", [True, False])
def test_a_writer_that_is_silent_as_well_is_not_waited_for_as_long(beats: bool) -> None:
    clock = VirtualClock()
    hub = LoopbackHub()
    prefill, decode = (KVChannel(pool_of(), LoopbackTransport(hub), clock=clock) for _ in "pd")
    prefill.connect(decode.address)
    grant = Case("loopback").grant(decode, prefill)
    prefill.accept(grant)
    decode.arrivals.tick()
    decode.abort(grant, TransferError("cancelled"))
    for _ in range(5):
        clock.advance(0.4)
        if beats:
            prefill.arrivals.tick()
            for one, other in ((prefill, decode), (decode, prefill)):
                record(one, other).link.heard_at = clock()
        decode.arrivals.tick()
        assert decode.connected(prefill.address) is (beats or clock() < MUTE_S + 0.4)
    assert [handoff.status for handoff in decode.poll()] == ([] if beats else [ABORTED])


def test_the_room_of_a_silent_writer_is_told_why(net: HandNet) -> None:
    prefill, decode = linked(net)
    grant = Case("hand").grant(decode, prefill)
    net.pass_time(4.0, decode)
    (aborted,) = decode.poll()
    assert (aborted.room, aborted.status) == (grant.room, HandoffStatus.ABORTED)
    assert "it hangs, is frozen or cannot be reached" in str(aborted.error)
