"""Two ends of a channel over every transport of one machine: what lands, what a loss settles, which end wakes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from pdinfer.errors import PDInferError, TransferError
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.transports.base import Transport
from pdinfer.kv.transports.loopback import LoopbackHub, LoopbackTransport
from pdinfer.kv.view import PageMemory
from pdinfer.types import PageGrant
from tests.unit.kv.channel.channels import ABORTED, LANDED, LAYERS, Case, handoff, pool_of, settled
from tests.waiting import TIMEOUT_S, wait_until


@pytest.mark.parametrize("tokens", [range(4), range(4, 14), range(16, 17)])
def test_a_room_lands_byte_for_byte(case: Case, tokens: range) -> None:
    prefill, decode, grant, pages = case.room(tokens=tokens)
    case.push_all(prefill, grant, pages)
    expected = case.sent(prefill, tokens, pages)
    prefill.finish(grant, handoff(grant, prefill, token=7, num_cached_tokens=3))
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
    prefill.finish(grant, handoff(grant, prefill))
    assert settled(decode)[0].status is LANDED
    assert two_pools.arrived(decode, grant) == two_pools.sent(prefill, grant.tokens, pages)
    for offset, length in two_pools.at(decode, grant.tokens, grant.pages, grant.tokens.start):
        decode.pool.memory.buffer[offset : offset + length] = 0
    assert bytes(decode.pool.memory.buffer.numpy()) == before, "something beside the grant was written"


def test_pages_on_a_device_go_through_host_copies(two_pools: Case) -> None:
    prefill, decode = two_pools.pair(4, 3)
    for end in (prefill, decode):
        memory = end.pool.memory
        assert isinstance(memory, PageMemory)
        memory.copies = memory._on_device(torch_attention)
    grant = two_pools.grant(decode, prefill, tokens=range(6, 17))
    pages = two_pools.accept(prefill, grant)
    two_pools.hand_over(prefill, decode, grant, pages)
    assert two_pools.arrived(decode, grant) == two_pools.sent(prefill, grant.tokens, pages)


def test_ends_that_share_a_pool_know_it(case: Case) -> None:
    prefill, decode = case.pair()
    grant = case.grant(decode, prefill)
    assert prefill.shares_pool(grant.destinations) == (case.kind == "shared")
    assert not case.end(prefill.pool).shares_pool(grant.destinations), "not connected"


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
    handoffs = settled(decode, 2)
    assert {w.room for w in handoffs} == {grant.room for grant in grants}
    assert all(w.status is ABORTED and isinstance(w.error, TransferError) for w in handoffs)
    wait_until(lambda: prefill.has_news)
    assert {room for room, _ in prefill.poll_stops()} == {grant.room for grant in grants}
    for grant in grants:
        prefill.finish(grant, handoff(grant, prefill, ABORTED))
    decode.drop_peer(prefill.address)
    assert not decode.poll()


def test_closing_decode_settles_its_own_rooms_and_tells_the_writer(case: Case) -> None:
    prefill, decode, grant, pages = case.room()
    for _ in range(2):
        decode.close()
    assert settled(decode)[0].status is ABORTED
    wait_until(lambda: prefill.has_news)
    transfer = prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    assert transfer.done
    assert transfer.error is not None
    assert prefill.sender.pushes.unsent_bytes == 0
    prefill.finish(grant, handoff(grant, prefill, ABORTED))


def test_a_dropped_peer_may_come_back(case: Case) -> None:
    prefill, decode = case.pair()
    prefill.drop_peer(decode.address)
    wait_until(lambda: not decode.connected(prefill.address))
    prefill.connect(decode.address)
    grant = case.grant(decode, prefill)
    pages = case.accept(prefill, grant)
    case.hand_over(prefill, decode, grant, pages)


def test_wait_ends_with_news_or_with_time(case: Case) -> None:
    prefill, decode = case.pair()
    assert not decode.wait(0.0)
    grant = case.grant(decode, prefill)
    prefill.accept(grant)
    speaking = threading.Timer(0.02, lambda: prefill.finish(grant, handoff(grant, prefill, ABORTED)))
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
    pages = case.accept(prefill, grant)
    prefill.push(grant, layers=LAYERS, tokens=grant.tokens, pages=pages)
    assert heard[prefill].wait(TIMEOUT_S)
    prefill.finish(grant, handoff(grant, prefill))
    assert heard[decode].wait(TIMEOUT_S)
    assert settled(decode)


def drops(prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.drop_peer(decode.address)


def closes(prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.close()


def says_landed(prefill: KVChannel, decode: KVChannel, grant: PageGrant) -> None:
    prefill.finish(grant, handoff(grant, prefill))


@pytest.mark.parametrize("what", [drops, closes, says_landed])
def test_a_decode_that_sleeps_hears_at_once(
    case: Case, what: Callable[[KVChannel, KVChannel, PageGrant], None]
) -> None:
    prefill, decode, grant, _ = case.room()
    check_hears(decode, lambda: what(prefill, decode, grant))
    assert settled(decode)


def check_hears(sleeper: KVChannel, act: Callable[[], None]) -> None:
    """Check that a channel which waits hears at once of what is done meanwhile."""
    heard = threading.Event()
    sleeper.notify(heard.set)
    later = threading.Timer(0.02, act)
    start = time.monotonic()
    later.start()
    assert sleeper.wait(TIMEOUT_S)
    assert heard.wait(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S / 2
    later.join()


@pytest.mark.parametrize("what", ["abort", "drop", "close"])
def test_a_prefill_that_sleeps_hears_at_once(case: Case, what: str) -> None:
    prefill, decode, grant, _ = case.room()
    does = {
        "abort": lambda: decode.abort(grant, PDInferError("cancelled")),
        "drop": lambda: decode.drop_peer(prefill.address),
        "close": decode.close,
    }
    check_hears(prefill, does[what])
    assert prefill.poll_stops()[0][0] == grant.room


def test_leaving_the_context_closes_and_ends_a_sleep(case: Case) -> None:
    prefill, decode = case.pair()
    with decode as entered:
        assert entered is decode
    wait_until(lambda: not prefill.connected(decode.address))
    start = time.monotonic()
    decode.wait(TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S / 2


class Ticking(LoopbackTransport):
    """A transport that has a thread to dial lost peers."""

    ticks = Transport.ticks
    num_cut = 0

    def cut(self) -> None:
        self.num_cut += 1


def test_who_dials_lost_peers_and_cuts_is_asked_of_the_transport() -> None:
    hub = LoopbackHub()
    quiet, ticking, other = (
        KVChannel(pool_of(), made(hub)) for made in (LoopbackTransport, Ticking, LoopbackTransport)
    )
    for end in (quiet, ticking):
        end.connect(other.address)
    for transport in (quiet.transport, ticking.transport, other.transport):
        LoopbackTransport.cut(transport)  # type: ignore[arg-type]
    assert (quiet.redial_in_s() < math.inf, ticking.redial_in_s()) == (True, math.inf)
    ticking.recover()
    assert ticking.transport.num_cut == 1  # type: ignore[attr-defined]
