"""Two ends of a channel over every transport of one machine: what lands, what is refused, and how rooms end."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import msgspec
import pytest
import xxhash

from pdinfer.config import CacheConfig
from pdinfer.errors import ConfigError, LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel import pushes, wire
from pdinfer.kv.channel.channel import ANSWER_S, KVChannel
from pdinfer.kv.channel.frame_mac import Seal
from pdinfer.kv.channel.peer import Peer
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.pool import PagePool
from pdinfer.kv.transports.base import Link, Transfer
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.transports.stream.framing import DIGEST_BYTES, HEADER, Header, MessageKind, digest_bytes
from pdinfer.testing import VirtualClock
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress, peer_key
from tests.unit.kv.channel.channels import (
    ABORTED,
    LANDED,
    LAYERS,
    TIMEOUT_S,
    Case,
    SmallModel,
    pool_of,
    record,
    say,
    settled,
    until,
    word,
)


@pytest.fixture(params=["shared", "loopback", "tcp"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["loopback", "tcp"])
def two_pools(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    try:
        yield made
    finally:
        made.close()


def link_of(end: KVChannel, peer: KVChannel) -> Link:
    link = end._peers.link_to(peer_key(peer.address))
    assert link is not None
    return link


# -- the handshake -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "fields"),
    [
        ({"dtype": "bfloat16"}, [("components.latent.dtype", "float16", "bfloat16")]),
        ({"model_id": b"other"}, [("model_id", b"model".hex(), b"other".hex())]),
        ({"weights_id": b"others"}, [("weights_id", b"weights".hex(), b"others".hex())]),
        (
            {"dtype": "bfloat16", "weights_id": b"others"},
            [
                ("weights_id", b"weights".hex(), b"others".hex()),
                ("components.latent.dtype", "float16", "bfloat16"),
            ],
        ),
    ],
)
def test_the_connecting_end_learns_every_difference(
    two_pools: Case, difference: dict[str, object], fields: list[tuple[str, str, str]]
) -> None:
    ours, theirs = two_pools.end(), two_pools.end(pool_of(**difference))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(LayoutMismatch) as info:
            ours.connect(theirs.address)
        assert list(info.value.fields) == fields
        listed = str(info.value).partition("cannot exchange pages: ")[2].split("; ")
        assert listed == [f"{name}: ours {ours}, theirs {theirs}" for name, ours, theirs in fields]
    grant = two_pools.grant(theirs, ours)
    assert settled(theirs)[0].status is ABORTED
    with pytest.raises(TransferError, match="not connected"):
        ours.accept(grant)


def test_a_refused_link_is_closed_at_both_ends(two_pools: Case) -> None:
    ours, theirs = two_pools.end(), two_pools.end(pool_of(weights_id=b"others"))
    with pytest.raises(LayoutMismatch):
        ours.connect(theirs.address)
    with pytest.raises(TransferError, match="was restarted"):
        ours.connect(attrs.evolve(two_pools.end().address, epoch=1))
    until(lambda: not any(end._peers._by_link for end in two_pools.open))


EARLY = (
    wire.Abort(b"r" * 16, PDInferError("x")),
    wire.Beat(0.0),
    wire.Data(b"r" * 16, LAYERS, LAYERS),
    wire.Finish(Handoff(room=b"r" * 16, writer=PeerAddress(b"e", 1, 0), status=LANDED)),
)


@pytest.mark.parametrize(
    ("message", "sealed"),
    [*itertools.product(EARLY, [False, True]), (wire.Open((wire.MAJOR, 0), b"n" * 16, keyed=False), True)],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else f"sealed_{value}",
)
def test_what_comes_before_the_handshake_closes_the_link(
    two_pools: Case, monkeypatch: pytest.MonkeyPatch, message: wire.Message, sealed: bool
) -> None:
    stranger, decode = two_pools.end(), two_pools.end()
    if sealed:
        monkeypatch.setattr(stranger._peers, "_introduce", lambda peer: stranger._peers.post(peer, message))
    else:
        monkeypatch.setattr(stranger._peers, "open", lambda peer: peer.open(stranger.transport, wire.encode(message)))
    with pytest.raises(TransferError):
        stranger.connect(decode.address)
    until(lambda: not decode._peers._by_link)
    assert decode.stats.frames_dropped == 0
    assert not decode.has_news


def test_connecting_twice_makes_one_link(case: Case) -> None:
    prefill, decode = case.pair()
    prefill.connect(decode.address)
    decode.connect(prefill.address)
    assert len(prefill._peers._by_link) == len(decode._peers._by_link) == 1


def test_a_restarted_peer_at_the_same_endpoint_is_refused(case: Case) -> None:
    prefill, decode = case.end(), case.end()
    for restarted in (attrs.evolve(decode.address, epoch=1), attrs.evolve(decode.address, engine_id=b"x" * 16)):
        with pytest.raises(TransferError, match="was restarted"):
            prefill.connect(restarted)
        assert prefill._peers.link_to(peer_key(restarted)) is None
    prefill.connect(decode.address)


def test_a_second_link_of_the_same_peer_is_refused_and_the_first_stays(case: Case) -> None:
    """Were it welcome, closing it would settle rooms that the first link still writes."""
    prefill, decode, grant, pages = case.room()
    with pytest.raises(TransferError):
        # what it was before a restart, at the same endpoint
        prefill.connect(attrs.evolve(decode.address, epoch=1), timeout_s=0.2)
    impostor = case.end()
    impostor._peers.us = prefill.address
    with pytest.raises(TransferError, match="open link already"):
        impostor.connect(decode.address, timeout_s=0.3)
    impostor.close()
    until(lambda: len(decode._peers._by_link) == 1)
    assert prefill.connected(decode.address)
    assert decode.connected(prefill.address)
    assert decode.poll() == []
    case.push_all(prefill, grant, pages)
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED


def test_every_channel_is_a_new_peer(case: Case) -> None:
    pool = pool_of()
    first, second = case.end(pool), case.end(pool)
    assert peer_key(first.address) != peer_key(second.address)


def test_nobody_there(case: Case) -> None:
    prefill, decode = case.end(), case.end()
    decode.close()
    with pytest.raises(TransferError):
        prefill.connect(decode.address, timeout_s=1.0)


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch, two_pools: Case) -> None:
    prefill, decode = two_pools.end(), two_pools.end()
    monkeypatch.setattr(decode._peers, "read", lambda *_: None)
    with pytest.raises(TransferError, match=r"did not answer the handshake within 0\.05 s"):
        prefill.connect(decode.address, timeout_s=0.05)
    assert not prefill._peers._by_link


@attrs.frozen(kw_only=True)
class DeepModel(SmallModel):
    num_layers: int

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        layout = super().kv_layout(cache)
        (part,) = layout.components
        layers = tuple(range(self.num_layers))
        parts = tuple(attrs.evolve(part, name=name, layers=layers) for name in ("latent", "index"))
        return attrs.evolve(layout, components=parts)


def test_a_refusal_with_many_long_differences_still_arrives_as_one(two_pools: Case) -> None:
    ours = two_pools.end(PagePool(DeepModel(num_layers=61), CacheConfig(page_size=1)))
    other = DeepModel(num_layers=59, model_id=b"m" * 32, weights_id=b"w" * 32, dtype="bfloat16")
    theirs = two_pools.end(PagePool(other, CacheConfig(page_size=1)))
    with pytest.raises(LayoutMismatch) as info:
        ours.connect(theirs.address)
    assert [name for name, _, _ in info.value.fields][:2] == ["model_id", "weights_id"]
    listed = str(info.value).partition("cannot exchange pages: ")[2].split("; ")
    assert listed == [f"{name}: ours {ours}, theirs {theirs}" for name, ours, theirs in info.value.fields]
    layers = next((ours, theirs) for name, ours, theirs in info.value.fields if name.endswith(".layers"))
    whole = ",".join(map(str, range(61)))
    for value in layers:
        assert value.endswith(" …")
        assert whole.startswith(f"{value.removesuffix(' …')},"), "cut between numbers"


def opens_with(end: KVChannel, version: tuple[int, int]) -> Callable[[Peer], None]:
    """What `end` says first when it is of another version."""
    return lambda peer: peer.open(end.transport, wire.encode(wire.Open(version, peer.nonce, keyed=False)))


def test_another_major_version_is_refused_and_another_minor_is_not(
    two_pools: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = two_pools.end(), two_pools.end()
    monkeypatch.setattr(decode._peers, "open", opens_with(decode, (wire.MAJOR + 1, 0)))
    with pytest.raises(TransferError, match=f"speaks protocol {wire.MAJOR + 1}, this end speaks {wire.MAJOR}"):
        prefill.connect(decode.address)
    monkeypatch.setattr(decode._peers, "open", opens_with(decode, (wire.MAJOR, wire.MINOR + 1)))
    prefill.connect(decode.address)


def test_a_feature_that_is_required_and_unknown_is_refused(two_pools: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = two_pools.end(), two_pools.end()
    hello = wire.Hello(prefill.address, prefill.pool.layout, required=("telepathy",))
    monkeypatch.setattr(prefill._peers, "_introduce", lambda peer: prefill._peers.post(peer, hello))
    with pytest.raises(TransferError, match="requires features this end does not have: telepathy"):
        prefill.connect(decode.address)


# -- what lands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [range(4), range(4, 14), range(16, 17)])
def test_a_room_lands_byte_for_byte(case: Case, tokens: range) -> None:
    prefill, decode, grant, pages = case.room(tokens=tokens)
    case.push_all(prefill, grant, pages)
    expected = case.sent(prefill, tokens, pages)
    prefill.finish(grant, word(grant, prefill, token=7, num_cached_tokens=3))
    (landed,) = settled(decode)
    assert (landed.status, landed.token, landed.num_cached_tokens) == (LANDED, 7, 3)
    assert case.arrived(decode, grant) == expected
    assert decode.stats.frames_dropped == 0
    decode.pool.adopt(grant.pages)
    decode.pool.check()


@pytest.mark.parametrize(("prefill_pages", "decode_pages"), [(4, 1), (1, 4), (3, 8), (8, 3)])
def test_page_sizes_may_differ(two_pools: Case, prefill_pages: int, decode_pages: int) -> None:
    prefill, decode = two_pools.pair(prefill_pages, decode_pages)
    grant = two_pools.grant(decode, prefill, tokens=range(8, 21))
    pages = two_pools.source(prefill, grant)
    before = bytes(decode.pool.memory.buffer.numpy())
    prefill.accept(grant)
    for tokens in (range(8, 13), range(13, 20), range(20, 21)):
        for layer in LAYERS:
            prefill.push(grant, layers=range(layer, layer + 1), tokens=tokens, pages=pages)
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED
    assert two_pools.arrived(decode, grant) == two_pools.sent(prefill, grant.tokens, pages)
    for offset, length in two_pools.at(decode, grant.tokens, grant.pages, grant.tokens.start):
        decode.pool.memory.buffer[offset : offset + length] = 0
    assert bytes(decode.pool.memory.buffer.numpy()) == before, "something beside the grant was written"


def test_pages_on_a_device_go_through_host_copies(two_pools: Case) -> None:
    prefill, decode = two_pools.pair(4, 3)
    for end in (prefill, decode):
        end.pool.memory._host = None  # as it is where the pool is on a device
    grant = two_pools.grant(decode, prefill, tokens=range(6, 17))
    pages = two_pools.source(prefill, grant)
    prefill.accept(grant)
    two_pools.push_all(prefill, grant, pages)
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED
    assert two_pools.arrived(decode, grant) == two_pools.sent(prefill, grant.tokens, pages)


def test_ends_that_share_a_pool_know_it(case: Case) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    assert prefill.shares_pool(grant.destinations) == (case.kind == "shared")
    assert not case.end(prefill.pool).shares_pool(grant.destinations), "not connected"


def test_small_layers_travel_together(case: Case) -> None:
    prefill, _, grant, pages = case.room()
    first, second, third = case.push_all(prefill, grant, pages)
    assert first is second is third
    assert prefill.stats.writes_sent == 1
    assert first.num_bytes == prefill.stats.bytes_sent == len(grant.tokens) * 4 * len(LAYERS)


def test_large_layers_travel_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "GROUP_BYTES", 1)
    prefill, _, grant, pages = case.room()
    assert len({id(transfer) for transfer in case.push_all(prefill, grant, pages)}) == len(LAYERS)
    assert prefill.stats.writes_sent == len(LAYERS)


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
    prefill.finish(grant, word(grant, prefill))
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
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED
    num_bytes = len(grant.tokens) * 4
    parts = [two_pools.sent(prefill, grant.tokens, pages)[layer * num_bytes :] for layer, pages in enumerate(chosen)]
    assert two_pools.arrived(decode, grant) == b"".join(part[:num_bytes] for part in parts)


def test_tokens_beyond_their_pages_are_refused(case: Case) -> None:
    prefill, _, grant, pages = case.room(tokens=range(4, 14))
    with pytest.raises(ConfigError, match="tokens up to 14 were pushed out of 3 pages"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages[:3])
    assert prefill.unsent_bytes == prefill.stats.writes_sent == 0


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

    pushing = threading.Thread(
        target=lambda: pushed.append(prefill.push(both, layers=LAYERS, tokens=grant.tokens, pages=pages, ready=wait))
    )
    pushing.start()
    until(lambda: prefill.unsent_bytes)
    if slow == 1:
        until(lambda: decode.stats.writes_received)
    assert prefill.unsent_bytes == len(grant.tokens) * 4 * len(LAYERS)
    assert not prefill.drain(0.02)
    assert not any(transfer.done for transfer in pushed)
    go.set()
    pushing.join(TIMEOUT_S)
    until(lambda: pushed[0].done)
    assert prefill.unsent_bytes == 0


def test_finish_sends_what_is_still_joined(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    transfer = prefill.push(grant, layers=range(2), tokens=grant.tokens, pages=pages)
    assert not transfer.done
    assert prefill.stats.writes_sent == 0
    assert prefill.unsent_bytes == transfer.num_bytes > 0
    prefill.finish(grant, word(grant, prefill))
    until(lambda: transfer.done)
    assert transfer.error is None
    assert prefill.unsent_bytes == 0
    assert settled(decode)[0].status is ABORTED, "the third layer never came"


def test_drain_sends_what_is_still_joined(case: Case) -> None:
    prefill, _, grant, pages = case.room()
    transfer = prefill.push(grant, layers=range(1), tokens=grant.tokens, pages=pages)
    assert prefill.drain(TIMEOUT_S)
    assert transfer.done
    assert prefill.unsent_bytes == 0


def test_pages_are_read_behind_ready_and_before_done(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    seen: list[bool] = []

    def fill() -> None:
        seen.append(transfers[0].done)
        for offset, length in case.at(prefill, grant.tokens, pages, 0):
            prefill.pool.memory.buffer[offset : offset + length] = 77

    transfers = [prefill.push(grant, layers=range(2), tokens=grant.tokens, pages=pages, ready=fill)]
    transfers.append(prefill.push(grant, layers=range(2, 3), tokens=grant.tokens, pages=pages, ready=fill))
    until(lambda: transfers[1].done)
    if case.kind != "shared":
        for offset, length in case.at(prefill, grant.tokens, pages, 0):
            prefill.pool.memory.buffer[offset : offset + length] = 0  # done: the pages may be used again
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED
    assert set(case.arrived(decode, grant)) == {77}
    assert seen == [False, False]


def test_unsent_bytes_count_until_the_transport_has_read(case: Case) -> None:
    prefill, _, grant, pages = case.room()
    go = threading.Event()
    during: list[int] = []

    def wait() -> None:
        during.append(prefill.unsent_bytes)
        assert go.wait(TIMEOUT_S)

    pushing = threading.Thread(
        target=lambda: prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages, ready=wait)
    )
    pushing.start()
    until(lambda: during)
    assert prefill.unsent_bytes == during[0] == len(grant.tokens) * 4 * len(LAYERS)
    assert not prefill.drain(0.01)
    go.set()
    pushing.join(TIMEOUT_S)
    assert prefill.drain(TIMEOUT_S)
    assert prefill.unsent_bytes == 0


@pytest.mark.parametrize("status", HandoffStatus)
def test_finish_tells_when_nothing_reads_the_pages_any_more(
    two_pools: Case, status: HandoffStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "GROUP_BYTES", 1)
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
        finished.append(prefill.finish(grant, word(grant, prefill, status)))

    writing = threading.Thread(target=write_all)
    writing.start()
    assert reading.wait(TIMEOUT_S)
    if two_pools.kind == "tcp":
        until(lambda: finished)
    assert not any(transfer.done for transfer in finished)
    go.set()
    writing.join(TIMEOUT_S)
    until(lambda: finished[0].done)
    assert finished[0].error is None
    assert prefill.unsent_bytes == 0
    prefill.pool.memory.buffer.zero_()
    assert settled(decode)[0].status is status
    assert two_pools.arrived(decode, grant) == expected


def test_finish_without_a_push_is_done(case: Case) -> None:
    prefill, decode = case.pair()
    for _ in range(2):
        grant = case.grant(decode, prefill)
        prefill.accept(grant)
        assert prefill.finish(grant, word(grant, prefill, ABORTED)).done
        assert settled(decode)[0].status is ABORTED


def test_a_lost_destination_shows_in_the_transfer(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    other = two_pools.end()
    prefill.connect(other.address)
    for order in ((decode, other), (other, decode)):
        mine = two_pools.grant(decode, prefill)
        grant = attrs.evolve(mine, destinations=tuple(end.address for end in order))
        pages = two_pools.source(prefill, grant)
        prefill.accept(grant)
        prefill.drop_peer(other.address)
        transfer = prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
        until(lambda: transfer.done)  # noqa: B023  # asked at once
        assert "not connected" in str(transfer.error)
        prefill.finish(grant, word(grant, prefill, ABORTED))
        settled(decode)
        prefill.pool.release(pages)
        prefill.connect(other.address)


# -- how rooms end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [range(0), range(1), range(2)])
def test_landed_without_its_bytes_is_aborted(case: Case, layers: range) -> None:
    prefill, decode, grant, pages = case.room()
    if layers:
        prefill.push(grant, layers=layers, tokens=grant.tokens, pages=pages)
    prefill.finish(grant, word(grant, prefill))
    (aborted,) = settled(decode)
    assert aborted.status is ABORTED
    assert "not every granted token had arrived" in str(aborted.error)


def test_the_writers_own_reason_arrives(case: Case) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    prefill.finish(grant, word(grant, prefill, ABORTED))
    (aborted,) = settled(decode)
    assert (aborted.status, type(aborted.error), str(aborted.error)) == (ABORTED, TransferError, "gave up")


def test_two_writers_share_a_room(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    second = two_pools.end()
    second.connect(decode.address)
    grant = two_pools.grant(decode, prefill, second, tokens=range(4, 12))
    for writer, tokens in ((prefill, range(4, 7)), (second, range(7, 12))):
        pages = two_pools.source(writer, grant)
        writer.accept(grant)
        writer.push(grant, layers=LAYERS, tokens=tokens, pages=pages)
        assert not decode.poll(), "the other writer has not spoken"
        writer.finish(grant, word(grant, writer))
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
    prefill.finish(grant, word(grant, prefill, ABORTED))
    until(lambda: second.has_news)
    assert [room for room, _ in second.poll_stops()] == [grant.room]
    assert not decode.poll()
    second.finish(grant, word(grant, second, ABORTED))
    assert [w.status for w in settled(decode, 2)] == [ABORTED, ABORTED]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_writer_stops_the_other(two_pools: Case, when: str) -> None:
    """Else a writer that never hears of the room would never say its last word, and the pages would stay granted."""
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


def test_a_grant_of_a_decode_that_is_not_connected_is_refused(case: Case) -> None:
    prefill, decode = case.end(), case.end()
    with pytest.raises(TransferError, match="decode is not connected"):
        prefill.accept(case.grant(decode, prefill))


@pytest.mark.parametrize("why", ["not connected", "aborted before"])
def test_every_destination_of_a_refused_grant_is_told(two_pools: Case, why: str) -> None:
    """A rank of decode that knows of nothing would wait for a word, and its pages with it."""
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
    assert (aborted.status, str(aborted.error)) == (ABORTED, "the room was aborted before its request came")
    with pytest.raises(TransferError, match="was aborted before its request arrived"):
        prefill.accept(grant)
    with pytest.raises(TransferError, match="not open for writing"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=grant.pages)
    decode.pool.release(grant.pages)


def test_a_reason_as_long_as_a_frame_may_be_does_not_stop_the_writer(case: Case) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    packed = wire.encode(wire.Abort(grant.room, TransferError("R")))
    long = packed.replace(b"\xa1R", b"\xdb" + (1_048_500).to_bytes(4, "big") + b"R" * 1_048_500)
    record(decode, prefill).post(decode.transport, long)
    until(lambda: prefill.has_news)
    ((_, error),) = prefill.poll_stops()
    prefill.finish(grant, Handoff(room=grant.room, writer=prefill.address, status=ABORTED, error=error))
    assert settled(decode)[0].status is ABORTED


def test_a_room_that_is_none_is_not_remembered(case: Case) -> None:
    prefill, decode = case.pair()
    say(decode, prefill, wire.Abort(b"r" * 100_000, TransferError("no")))
    until(lambda: not prefill.connected(decode.address))
    assert not prefill._accepted.tombstones


def test_an_abort_in_the_middle_asks_the_writer_to_stop(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    prefill.push(grant, layers=range(1), tokens=grant.tokens, pages=pages)
    for _ in range(2):
        decode.abort(grant, PDInferError("cancelled"))
    until(lambda: prefill.has_news)
    ((room, error),) = prefill.poll_stops()
    assert (room, type(error), str(error)) == (grant.room, TransferError, "cancelled")
    assert not decode.poll(), "the writer has not stopped yet"
    prefill.finish(grant, word(grant, prefill, ABORTED))
    assert settled(decode)[0].status is ABORTED
    assert not prefill.poll_stops()


def test_a_landed_room_that_crossed_the_abort_lands(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    case.push_all(prefill, grant, pages)
    decode.abort(grant, PDInferError("cancelled"))
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED


def test_a_push_that_was_refused_leaves_no_trace(case: Case) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    with pytest.raises(TransferError, match="not open for writing"):
        prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=grant.pages)
    assert prefill.unsent_bytes == prefill.stats.writes_sent == 0


def test_a_foreign_write_and_word_are_dropped_and_counted(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    thief = two_pools.end()
    thief.connect(decode.address)
    grant = two_pools.grant(decode, prefill)
    pages = two_pools.source(thief, grant)
    thief.accept(grant)
    thief.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    thief.finish(grant, word(grant, prefill))
    until(lambda: decode.stats.frames_dropped == 2)
    assert not decode.poll()
    assert decode.stats.bytes_received == 0
    assert not any(two_pools.arrived(decode, grant))
    case_pages = two_pools.source(prefill, grant)
    prefill.accept(grant)
    two_pools.push_all(prefill, grant, case_pages)
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED


def test_a_write_after_finish_is_dropped_and_counted(two_pools: Case) -> None:
    prefill, decode, grant, pages = two_pools.room()
    two_pools.push_all(prefill, grant, pages)
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED
    expected = two_pools.arrived(decode, grant)
    with pytest.raises(TransferError, match="not open for writing"):
        two_pools.push_all(prefill, grant, pages)
    prefill.pool.memory.buffer.zero_()
    say(prefill, decode, wire.Data(grant.room, LAYERS, grant.tokens), two_pools.at(prefill, grant.tokens, pages, 0))
    prefill.finish(grant, word(grant, prefill))
    until(lambda: decode.stats.frames_dropped == 2)
    assert two_pools.arrived(decode, grant) == expected
    assert not decode.poll()
    assert link_of(decode, prefill)


@pytest.mark.parametrize("who", ["prefill drops", "decode drops", "prefill closes"])
def test_a_lost_peer_settles_its_rooms(case: Case, who: str) -> None:
    prefill, decode = case.pair()
    grants = [case.grant(decode, prefill) for _ in range(2)]
    for grant in grants:
        prefill.accept(grant)
    if who == "prefill closes":
        prefill.close()
    elif who == "prefill drops":
        prefill.drop_peer(decode.address)
    else:
        decode.drop_peer(prefill.address)
    words = settled(decode, 2)
    assert {w.room for w in words} == {grant.room for grant in grants}
    assert all(w.status is ABORTED and isinstance(w.error, TransferError) for w in words)
    until(lambda: prefill.has_news)
    assert {room for room, _ in prefill.poll_stops()} == {grant.room for grant in grants}
    for grant in grants:
        prefill.finish(grant, word(grant, prefill, ABORTED))
    decode.drop_peer(prefill.address)
    assert not decode.poll()


def test_closing_decode_settles_its_own_rooms_and_tells_the_writer(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    for _ in range(2):
        decode.close()
    assert settled(decode)[0].status is ABORTED
    until(lambda: prefill.has_news)
    transfer = prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    assert transfer.done
    assert transfer.error is not None
    assert prefill.unsent_bytes == 0
    prefill.finish(grant, word(grant, prefill, ABORTED))


def test_a_dropped_peer_may_come_back(case: Case) -> None:
    prefill, decode = case.pair()
    prefill.drop_peer(decode.address)
    until(lambda: decode._peers.link_to(peer_key(prefill.address)) is None)
    prefill.connect(decode.address)
    grant = case.grant(decode, prefill)
    pages = case.source(prefill, grant)
    prefill.accept(grant)
    case.push_all(prefill, grant, pages)
    prefill.finish(grant, word(grant, prefill))
    assert settled(decode)[0].status is LANDED


def test_bytes_that_did_not_verify_abort_the_room(two_pools: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = two_pools.pair()
    placed = decode.placed
    monkeypatch.setattr(decode, "placed", lambda link, frame, error: placed(link, frame, TransferError("digest")))
    grant = two_pools.grant(decode, prefill)
    pages = two_pools.source(prefill, grant)
    prefill.accept(grant)
    two_pools.push_all(prefill, grant, pages)
    until(lambda: prefill.has_news)
    assert prefill.poll_stops()[0][0] == grant.room
    prefill.finish(grant, word(grant, prefill))
    (aborted,) = settled(decode)
    assert (aborted.status, str(aborted.error)) == (ABORTED, "digest")
    assert decode.stats.writes_damaged == 1


def damaging_proxy(endpoint: str) -> tuple[socket.socket, threading.Thread]:
    """Stands before a TCP endpoint, passes messages on, and flips a bit in the payload of every write to it."""
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

    serving = threading.Thread(target=serve)
    serving.start()
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
        prefill.finish(damaged, word(damaged, prefill))
        (aborted,) = settled(decode)
        assert (aborted.room, aborted.status) == (damaged.room, ABORTED)
        assert "did not verify" in str(aborted.error)
        assert decode.stats.writes_damaged == 1
        prefill.finish(empty, word(empty, prefill, ABORTED))
        (gave_up,) = settled(decode)
        assert (gave_up.room, str(gave_up.error)) == (empty.room, "gave up"), "the link goes on"
    serving.join(TIMEOUT_S)
    assert not serving.is_alive()


# -- one peer, two links -----------------------------------------------------------------------------------------------


@attrs.frozen
class Hand:
    """A welcomed connection whose bytes are ours to make."""

    sock: socket.socket
    seal: Seal

    @classmethod
    def dial(cls, decode: KVChannel, identity: KVChannel) -> Hand:
        """Says that it is `identity`."""
        host, _, port = decode.address.endpoints[0].removeprefix("tcp://").rpartition(":")
        sock = socket.create_connection((host, int(port)), TIMEOUT_S)
        ours, theirs = b"n" * 16, cls.read(sock)
        assert isinstance(theirs, wire.Open)
        hand = cls(sock, Seal(ours + theirs.nonce, from_dialler=True, key=None))
        sock.sendall(hand.framed(wire.encode(wire.Open((wire.MAJOR, 0), ours, keyed=False))))
        hand.say(wire.Hello(identity.address, decode.pool.layout))
        return hand

    @staticmethod
    def read(sock: socket.socket, tag_bytes: int = 0) -> wire.Message:
        header = Header.parse(sock.recv(HEADER.size, socket.MSG_WAITALL))
        return wire.decode(sock.recv(header.frame_bytes, socket.MSG_WAITALL)[: header.frame_bytes - tag_bytes])

    @staticmethod
    def framed(frame: bytes) -> bytes:
        return Header(MessageKind.FRAME, len(frame), 0).packed() + frame

    def say(self, message: wire.Message) -> None:
        self.sock.sendall(self.framed(self.seal.seal(wire.encode(message))))

    def hears(self) -> wire.Message:
        return self.read(self.sock, self.seal.tag_bytes)


def test_a_second_link_that_comes_and_goes_settles_nothing() -> None:
    """Page rule 1: the first is in the middle of a write, and settled pages may be somebody else's at once."""
    case = Case("tcp")
    with case.end() as decode, case.end() as writer:
        first = Hand.dial(decode, writer)
        assert isinstance(first.hears(), wire.Welcome)
        grant = case.grant(decode, writer)
        num_bytes = decode.pool.layout.payload_bytes(LAYERS, grant.tokens)
        frame = first.seal.seal(wire.encode(wire.Data(grant.room, LAYERS, grant.tokens)))
        head = Header(MessageKind.WRITE, len(frame), num_bytes, digested=True).packed() + frame
        payload = b"\x55" * num_bytes
        first.sock.sendall(head + payload[: num_bytes // 2])
        until(lambda: 0x55 in decode.pool.memory.buffer)
        second = Hand.dial(decode, writer)
        assert isinstance(second.hears(), wire.Reject)
        second.sock.close()
        until(lambda: len(decode._peers._by_link) == 1)
        first.sock.sendall(payload[num_bytes // 2 :] + digest_bytes(xxhash.xxh3_64(head + payload)))
        first.say(wire.Finish(word(grant, writer)))
        assert settled(decode)[0].status is LANDED
        assert case.arrived(decode, grant) == payload
        first.sock.close()


# -- a peer that breaks the rules loses its link, and so its rooms -----------------------------------------------------


Breach = Callable[[Case, KVChannel, KVChannel, PageGrant], None]


def says(make: Callable[[KVChannel, KVChannel], wire.Message]) -> Breach:
    return lambda case, prefill, decode, grant: say(prefill, decode, make(prefill, decode))


def garbage(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    record(prefill, decode).post(prefill.transport, b"\x00garbage")


def an_unsealed_frame(case: Case, prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.transport.send(link_of(prefill, decode), wire.encode(wire.Finish(word(grant, prefill))))


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
        (an_unsealed_frame, "did not verify"),
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
    prefill, decode = two_pools.pair()
    grant = two_pools.grant(decode, prefill)
    prefill.accept(grant)
    with contextlib.suppress(TransferError):
        breach(two_pools, prefill, decode, grant)
    (aborted,) = settled(decode)
    assert aborted.status is ABORTED
    assert re.search(reason, str(aborted.error))
    assert decode._peers.link_to(peer_key(prefill.address)) is None
    until(lambda: prefill.has_news)
    assert prefill.poll_stops()[0][0] == grant.room


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_wait_ends_with_news_or_with_time(case: Case) -> None:
    prefill, decode = case.pair()
    assert not decode.wait(0.0)
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    speaking = threading.Timer(0.02, lambda: prefill.finish(grant, word(grant, prefill, ABORTED)))
    speaking.start()
    assert decode.wait(TIMEOUT_S)
    speaking.join()
    assert decode.poll()
    assert not decode.wait(0.0)


def test_listeners_hear_of_news_and_of_transfers(case: Case) -> None:
    prefill, decode = case.pair()
    heard = {prefill: threading.Event(), decode: threading.Event()}
    for end, event in heard.items():
        end.notify(event.set)
    grant = case.grant(decode, prefill)
    pages = case.source(prefill, grant)
    prefill.accept(grant)
    prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    assert heard[prefill].wait(TIMEOUT_S)
    prefill.finish(grant, word(grant, prefill))
    assert heard[decode].wait(TIMEOUT_S)
    assert settled(decode)


def drops(prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.drop_peer(decode.address)


def closes(prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.close()


def says_landed(prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.finish(grant, word(grant, prefill))


@pytest.mark.parametrize("what", [drops, closes, says_landed])
def test_a_decode_that_sleeps_hears_at_once(
    case: Case, what: Callable[[KVChannel, KVChannel, PageGrant], None]
) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    heard = threading.Event()
    decode.notify(heard.set)
    later = threading.Timer(0.02, what, (prefill, decode, grant))
    start = time.monotonic()
    later.start()
    assert decode.wait(TIMEOUT_S)
    assert heard.wait(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S / 2
    later.join()
    assert settled(decode)


@pytest.mark.parametrize("what", ["abort", "drop", "close"])
def test_a_prefill_that_sleeps_hears_at_once(case: Case, what: str) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    heard = threading.Event()
    prefill.notify(heard.set)
    does = {
        "abort": lambda: decode.abort(grant, PDInferError("cancelled")),
        "drop": lambda: decode.drop_peer(prefill.address),
        "close": decode.close,
    }
    later = threading.Timer(0.02, does[what])
    start = time.monotonic()
    later.start()
    assert prefill.wait(TIMEOUT_S)
    assert heard.wait(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S / 2
    later.join()
    assert prefill.poll_stops()[0][0] == grant.room


def test_leaving_the_context_closes_and_ends_a_sleep(case: Case) -> None:
    prefill, decode = case.pair()
    with decode as entered:
        assert entered is decode
    until(lambda: not prefill.connected(decode.address))
    start = time.monotonic()
    decode.wait(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S / 2


def test_a_writer_that_does_not_answer_an_abort_loses_its_link() -> None:
    clock = VirtualClock()
    prefill, decode = (
        KVChannel(pool_of(), LoopbackTransport(hub), clock=clock) for hub in [LoopbackHub()] for _ in "pd"
    )
    prefill.connect(decode.address)
    grant = Case("loopback").grant(decode, prefill)
    prefill.accept(grant)
    decode.tick()
    clock.advance(2.0)
    decode.abort(grant, TransferError("cancelled"))
    decode.tick()
    clock.advance(ANSWER_S - 0.1)
    for link in [record(decode, prefill).link, record(prefill, decode).link]:
        link.heard_at = clock()
    decode.tick()
    assert not decode.poll()
    clock.advance(0.2)
    decode.tick()
    (word,) = decode.poll()
    assert word.status is ABORTED
    assert "did not stop writing" in str(word.error)
    assert not decode.connected(prefill.address)
