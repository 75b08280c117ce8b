"""Prefill's side of a channel: what it accepts, how pushes travel, and when its pages are no longer read."""

from __future__ import annotations

import itertools
import threading

import attrs
import pytest

from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.kv.channel import sender, wire
from pdinfer.kv.channel.rooms import SenderRooms
from pdinfer.kv.transports.base import Transfer
from pdinfer.types import Handoff, HandoffStatus, PageGrant
from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.by_hand import linked
from tests.unit.kv.channel.channels import ABORTED, LANDED, LAYERS, Case, handoff, record, say, settled
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until


def test_small_layers_travel_together(case: Case) -> None:
    prefill, _, grant, pages = case.room()
    first, second, third = case.push_all(prefill, grant, pages)
    assert first is second is third
    assert prefill.stats.writes_sent == 1
    assert first.num_bytes == prefill.stats.bytes_sent == len(grant.tokens) * 4 * len(LAYERS)


def test_large_layers_travel_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "GROUP_BYTES", 1)
    prefill, _, grant, pages = case.room()
    assert len({id(transfer) for transfer in case.push_all(prefill, grant, pages)}) == len(LAYERS)
    assert prefill.stats.writes_sent == len(LAYERS)


def test_the_last_layer_keeps_no_long_ones_waiting(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers together are long enough to leave before the last one, and not to leave anyway."""
    prefill, _, grant, pages = case.room()
    layer_bytes = len(grant.tokens) * 4
    monkeypatch.setattr(sender, "GROUP_BYTES", 8 * layer_bytes)
    first, second, third = case.push_all(prefill, grant, pages)
    assert first is second is not third
    assert (first.num_bytes, third.num_bytes) == (2 * layer_bytes, layer_bytes)


FRONT, BACK = range(4, 6), range(6, 8)


@pytest.mark.parametrize(
    ("steps", "num_writes"),
    [
        pytest.param(((0, FRONT), (2, FRONT), (1, FRONT), (0, BACK), (1, BACK), (2, BACK)), 4, id="gap"),
        pytest.param(((0, FRONT), (1, BACK), (0, BACK), (1, FRONT), (2, FRONT), (2, BACK)), 5, id="other_tokens"),
    ],
)
def test_other_tokens_or_a_gap_start_a_new_group(
    case: Case, steps: tuple[tuple[int, range], ...], num_writes: int
) -> None:
    prefill, decode, grant, pages = case.room(tokens=range(4, 8))
    for layer, tokens in steps:
        prefill.push(grant, layers=range(layer, layer + 1), tokens=tokens, pages=pages)
    prefill.finish(grant, handoff(grant, prefill))
    assert prefill.stats.writes_sent == num_writes
    assert settled(decode)[0].status is LANDED
    assert case.arrived(decode, grant) == case.sent(prefill, grant.tokens, pages)


def test_pushes_out_of_other_pages_travel_alone(two_pools: Case) -> None:
    """Each layer is sent out of the pages that its own push named."""
    prefill, decode = two_pools.pair()
    grant = two_pools.grant(decode, prefill, tokens=range(4))
    prefill.accept(grant)
    first, second = (two_pools.source(prefill, grant) for _ in range(2))
    chosen = (first, second, first)
    for layer, pages in zip(LAYERS, chosen, strict=True):
        prefill.push(grant, layers=range(layer, layer + 1), tokens=grant.tokens, pages=pages)
    prefill.finish(grant, handoff(grant, prefill))
    assert settled(decode)[0].status is LANDED
    num_bytes = len(grant.tokens) * 4
    parts = [two_pools.sent(prefill, grant.tokens, pages)[layer * num_bytes :] for layer, pages in enumerate(chosen)]
    assert two_pools.arrived(decode, grant) == b"".join(part[:num_bytes] for part in parts)


def test_tokens_beyond_their_pages_are_refused(case: Case) -> None:
    prefill, _, grant, pages = case.room(tokens=range(4, 14))
    with pytest.raises(ConfigError, match="tokens up to 14 were pushed out of 3 pages"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages[:3])
    assert prefill.sender.pushes.unsent_bytes == prefill.stats.writes_sent == 0


@pytest.mark.parametrize("slow", [0, 1])
def test_a_transfer_is_done_when_the_last_destination_has_it(two_pools: Case, slow: int) -> None:
    prefill, decode = two_pools.pair()
    other = two_pools.end()
    prefill.connect(other.address)
    grant = two_pools.grant(decode, prefill)
    other.pool.grant(other.pool.num_free)
    other.expect(grant)
    both = attrs.evolve(grant, destinations=(decode.address, other.address))
    pages = two_pools.source(prefill, grant)
    prefill.accept(both)
    go, calls, pushed = threading.Event(), itertools.count(), list[Transfer]()

    def wait() -> None:
        if next(calls) == slow:
            assert go.wait(TIMEOUT_S)

    pushing = started(
        lambda: pushed.append(prefill.push(both, layers=LAYERS, tokens=grant.tokens, pages=pages, ready=wait))
    )
    wait_until(lambda: prefill.sender.pushes.unsent_bytes)
    if slow == 1:
        wait_until(lambda: decode.stats.writes_received)
    assert prefill.sender.pushes.unsent_bytes == len(grant.tokens) * 4 * len(LAYERS)
    assert not prefill.drain(0.02)
    assert not any(transfer.done for transfer in pushed)
    go.set()
    check_ends(pushing)
    wait_until(lambda: pushed[0].done)
    assert prefill.sender.pushes.unsent_bytes == 0


def test_finish_sends_what_is_still_joined(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    transfer = prefill.push(grant, layers=range(2), tokens=grant.tokens, pages=pages)
    assert not transfer.done
    assert prefill.stats.writes_sent == 0
    assert prefill.sender.pushes.unsent_bytes == transfer.num_bytes > 0
    prefill.finish(grant, handoff(grant, prefill))
    wait_until(lambda: transfer.done)
    assert transfer.error is None
    assert prefill.sender.pushes.unsent_bytes == 0
    assert settled(decode)[0].status is ABORTED, "the third layer never came"


def test_drain_sends_what_is_still_joined(case: Case) -> None:
    prefill, _, grant, pages = case.room()
    transfer = prefill.push(grant, layers=range(1), tokens=grant.tokens, pages=pages)
    assert prefill.drain(TIMEOUT_S)
    assert transfer.done
    assert prefill.sender.pushes.unsent_bytes == 0


def test_pages_are_read_behind_ready_and_before_done(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    seen: list[bool] = []

    def fill() -> None:
        seen.append(transfers[0].done)
        for offset, length in case.at(prefill, grant.tokens, pages, 0):
            prefill.pool.memory.buffer[offset : offset + length] = 77

    transfers = [prefill.push(grant, layers=range(2), tokens=grant.tokens, pages=pages, ready=fill)]
    transfers.append(prefill.push(grant, layers=range(2, 3), tokens=grant.tokens, pages=pages, ready=fill))
    wait_until(lambda: transfers[1].done)
    if case.kind != "shared":
        for offset, length in case.at(prefill, grant.tokens, pages, 0):
            prefill.pool.memory.buffer[offset : offset + length] = 0  # done: the pages may be used again
    prefill.finish(grant, handoff(grant, prefill))
    assert settled(decode)[0].status is LANDED
    assert set(case.arrived(decode, grant)) == {77}
    assert seen == [False, False]


def test_unsent_bytes_count_until_the_transport_has_read(case: Case) -> None:
    prefill, _, grant, pages = case.room()
    go = threading.Event()
    during: list[int] = []

    def wait() -> None:
        during.append(prefill.sender.pushes.unsent_bytes)
        assert go.wait(TIMEOUT_S)

    pushing = started(prefill.push, grant, layers=LAYERS, tokens=grant.tokens, pages=pages, ready=wait)
    wait_until(lambda: during)
    assert prefill.sender.pushes.unsent_bytes == during[0] == len(grant.tokens) * 4 * len(LAYERS)
    assert not prefill.drain(0.01)
    go.set()
    check_ends(pushing)
    assert prefill.drain(TIMEOUT_S)
    assert prefill.sender.pushes.unsent_bytes == 0


@pytest.mark.parametrize("status", HandoffStatus)
def test_finish_tells_when_nothing_reads_the_pages_any_more(
    two_pools: Case, status: HandoffStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "GROUP_BYTES", 1)
    prefill, decode = two_pools.pair()
    grant = two_pools.grant(decode, prefill)
    pages = two_pools.source(prefill, grant)
    expected = two_pools.sent(prefill, grant.tokens, pages)
    prefill.accept(grant)
    reading, go = threading.Event(), threading.Event()
    finished: list[Transfer] = []

    def wait() -> None:
        reading.set()
        assert go.wait(TIMEOUT_S)

    def write_all() -> None:
        for layer in LAYERS:
            prefill.push(grant, layers=range(layer, layer + 1), tokens=grant.tokens, pages=pages, ready=wait)
        finished.append(prefill.finish(grant, handoff(grant, prefill, status)))

    writing = started(write_all)
    assert reading.wait(TIMEOUT_S)
    if two_pools.kind == "tcp":
        wait_until(lambda: finished)
    assert not any(transfer.done for transfer in finished)
    go.set()
    check_ends(writing)
    wait_until(lambda: finished[0].done)
    assert finished[0].error is None
    assert prefill.sender.pushes.unsent_bytes == 0
    prefill.pool.memory.buffer.zero_()
    assert settled(decode)[0].status is status
    assert two_pools.arrived(decode, grant) == expected


def test_finish_without_a_push_is_done(case: Case) -> None:
    prefill, decode = case.pair()
    for _ in range(2):
        grant = case.grant(decode, prefill)
        prefill.accept(grant)
        assert prefill.finish(grant, handoff(grant, prefill, ABORTED)).done
        assert settled(decode)[0].status is ABORTED


def test_a_lost_destination_shows_in_the_transfer(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    other = two_pools.end()
    prefill.connect(other.address)
    for order in ((decode, other), (other, decode)):
        mine = two_pools.grant(decode, prefill)
        grant = attrs.evolve(mine, destinations=tuple(end.address for end in order))
        pages = two_pools.accept(prefill, grant)
        prefill.drop_peer(other.address)
        transfer = prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
        wait_until(lambda: transfer.done)  # noqa: B023  # asked at once
        assert "not connected" in str(transfer.error)
        prefill.finish(grant, handoff(grant, prefill, ABORTED))
        settled(decode)
        prefill.pool.release(pages)
        prefill.connect(other.address)


def test_a_grant_of_a_decode_that_is_not_connected_is_refused(case: Case) -> None:
    prefill, decode = case.end(), case.end()
    with pytest.raises(TransferError, match="decode is not connected"):
        prefill.accept(case.grant(decode, prefill))


@pytest.mark.parametrize("why", ["not connected", "aborted before"])
def test_every_destination_of_a_refused_grant_is_told(two_pools: Case, why: str) -> None:
    """A rank of decode that is told nothing would wait for a hand-off, and its pages with it."""
    prefill, decode = two_pools.pair()
    other = two_pools.end()
    if why == "aborted before":
        prefill.connect(other.address)
    grant = two_pools.grant(decode, prefill)
    other.pool.grant(other.pool.num_free)
    other.expect(grant)
    other.abort(grant, TransferError("a link of this rank broke"))
    assert settled(other)[0].status is ABORTED
    with pytest.raises(TransferError, match=why):
        prefill.accept(attrs.evolve(grant, destinations=(decode.address, other.address)))
    (told,) = settled(decode)
    assert told.status is ABORTED
    assert "turned its request away" in str(told.error)
    with pytest.raises(TransferError, match="not open"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=grant.pages)


def test_a_grant_without_a_destination_is_refused(case: Case) -> None:
    prefill, decode = case.pair()
    grant = attrs.evolve(case.grant(decode, prefill), destinations=())
    with pytest.raises(TransferError, match="not connected"):
        prefill.accept(grant)


def test_a_grant_for_another_layout_is_refused(case: Case) -> None:
    """Page sizes may differ, but not between the grant and the handshake."""
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    other = attrs.evolve(decode.pool.layout, page_size=64).layout_id
    with pytest.raises(TransferError, match=f"{grant.room.hex()} was made for another layout"):
        prefill.accept(attrs.evolve(grant, layout_id=other))
    prefill.accept(grant)


def test_an_abort_before_accept_is_answered_and_remembered(case: Case) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    decode.abort(grant, PDInferError("cancelled"))
    (aborted,) = settled(decode)
    assert (aborted.status, str(aborted.error)) == (ABORTED, "cancelled")  # the reason of the host that gave it up
    with pytest.raises(TransferError, match="was aborted before its request arrived"):
        prefill.accept(grant)
    with pytest.raises(TransferError, match="not open for writing"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=grant.pages)
    decode.pool.release(grant.pages)


def test_a_reason_as_long_as_a_frame_may_be_does_not_stop_the_writer(case: Case) -> None:
    prefill, decode, grant, _ = case.room()
    packed = wire.encode(wire.Abort(grant.room, TransferError("R")))
    long = packed.replace(b"\xa1R", b"\xdb" + (1_048_500).to_bytes(4, "big") + b"R" * 1_048_500)
    record(decode, prefill).post(long)
    wait_until(lambda: prefill.has_news)
    ((_, error),) = prefill.poll_stops()
    prefill.finish(grant, Handoff(room=grant.room, writer=prefill.address, status=ABORTED, error=error))
    assert settled(decode)[0].status is ABORTED


def test_a_room_that_is_none_is_not_remembered(case: Case) -> None:
    prefill, decode = case.pair()
    say(decode, prefill, wire.Abort(b"r" * 100_000, TransferError("no")))
    wait_until(lambda: not prefill.connected(decode.address))
    assert not prefill.snapshot().accepted


def test_a_push_that_was_refused_leaves_no_trace(case: Case) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    with pytest.raises(TransferError, match="not open for writing"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=grant.pages)
    assert prefill.sender.pushes.unsent_bytes == prefill.stats.writes_sent == 0


def test_a_link_that_breaks_while_a_grant_is_accepted_stops_it(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = linked(net)
    grant = Case("hand").grant(decode, prefill)
    accept, breaking = SenderRooms.accept, list[threading.Thread]()

    def accept_late(accepted: SenderRooms, grant: PageGrant) -> None:
        thread = started(lambda: net.cut(net.side(prefill)))
        thread.join(0.2)
        breaking.append(thread)
        accept(accepted, grant)

    monkeypatch.setattr(SenderRooms, "accept", accept_late)
    prefill.accept(grant)
    breaking[0].join(TIMEOUT_S)
    assert [room for room, _ in prefill.poll_stops()] == [grant.room]


def test_the_window_is_each_peers_own(net: HandNet) -> None:
    case = Case("hand")
    prefill, full, free = net.end(), net.end(), net.end()
    prefill.window_bytes = 100
    grants = []
    for decode in (full, free):
        prefill.connect(decode.address, timeout_s=0)
        net.settle()
        grants.append(case.grant(decode, prefill))
        prefill.accept(grants[-1])
    both = attrs.evolve(grants[0], destinations=(free.address, full.address))
    pages = case.source(prefill, grants[0])
    prefill.push(grants[0], layers=range(2), tokens=range(4, 14), pages=pages)
    assert [prefill.is_full(grant) for grant in (*grants, both)] == [False, False, False]
    prefill.window_bytes = 79
    assert [prefill.is_full(grant) for grant in (*grants, both)] == [True, False, True]
    assert [stats.inflight_bytes for stats in prefill.stats.peers] == [80, 0]
    assert prefill.drain(0.0)
    assert not prefill.is_full(grants[0])


@pytest.mark.parametrize("when", ["first", "behind others"])
@pytest.mark.parametrize("error", [ConfigError("outside the memory"), TransferError("another process"), OSError("bug")])
def test_a_write_that_cannot_be_posted_completes_and_closes_the_link(
    net: HandNet, monkeypatch: pytest.MonkeyPatch, when: str, error: Exception
) -> None:
    """No frame behind a missing one verifies, so the room could never land, and its engine must be told."""
    case = Case("hand")
    prefill, decode = linked(net)
    grant = case.grant(decode, prefill)
    pages = case.accept(prefill, grant)
    transfers = []

    def push() -> None:
        for layer in LAYERS:
            transfers.append(prefill.push(grant, layers=range(layer, layer + 1), tokens=grant.tokens, pages=pages))
            prefill.drain(0.0)

    def fail(*_: object, **__: object) -> Transfer:
        if when == "behind others" and len(transfers) < 2:
            push()  # another thread posts, and leaves its writes to the one that is sending
        raise error

    monkeypatch.setattr(prefill.transport, "write", fail)
    push()
    assert all(transfer.done and isinstance(transfer.error, TransferError) for transfer in transfers)
    assert repr(error) in str(transfers[0].error) or "not connected" in str(transfers[0].error)
    assert prefill.sender.pushes.unsent_bytes == 0
    assert [room for room, _ in prefill.poll_stops()] == [grant.room]
    end = prefill.finish(grant, handoff(grant, prefill, HandoffStatus.ABORTED))
    assert end.done
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.ABORTED


def test_an_interrupt_while_sending_leaves_no_transfer_open(net: HandNet, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("hand")
    prefill, decode = linked(net)
    grant = case.grant(decode, prefill)
    pages = case.accept(prefill, grant)

    def interrupt(*_: object, **__: object) -> Transfer:
        raise KeyboardInterrupt

    monkeypatch.setattr(prefill.transport, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    assert prefill.transport.in_doubt
    assert prefill.sender.pushes.unsent_bytes == 0
    assert prefill.finish(grant, handoff(grant, prefill, HandoffStatus.ABORTED)).done


def test_pages_of_another_pool_fail_their_push_and_nothing_else(net: HandNet) -> None:
    case = Case("hand")
    prefill, decode = linked(net)
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    with pytest.raises(ConfigError, match="not in a pool"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=(0, 1, 999, 2))
    assert prefill.sender.pushes.unsent_bytes == 0
    pages = case.source(prefill, grant)
    case.push_all(prefill, grant, pages)
    prefill.finish(grant, handoff(grant, prefill))
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.LANDED


def test_a_hand_off_too_long_to_travel_leaves_its_room_open(net: HandNet) -> None:
    """The engine can still end it."""
    case = Case("hand")
    prefill, decode = linked(net)
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    too_long = handoff(grant, prefill, top_logprobs=((1, 0.5),) * 200_000)
    with pytest.raises(ConfigError, match="too long to travel"):
        prefill.finish(grant, too_long)
    decode.abort(grant, TransferError("not wanted"))
    net.settle()
    assert [room for room, _ in prefill.poll_stops()] == [grant.room]
    assert prefill.finish(grant, handoff(grant, prefill, HandoffStatus.ABORTED)).done
    net.settle()
    assert decode.poll()[0].status is HandoffStatus.ABORTED
