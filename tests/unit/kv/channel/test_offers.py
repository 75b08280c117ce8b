"""Grants that decode sends over the link: who may send them, what becomes of them, and peers that know no such frame;
and links to whoever listens at an endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import attrs
import pytest

from pdinfer.errors import LayoutMismatch, TransferError
from pdinfer.kv.channel import offers, wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.transports.loopback import LoopbackTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.types import PageGrant
from tests.unit.kv.channel.channels import ABORTED, Case, handoff, links, pool_of, refusal, say, settled
from tests.waiting import wait_until

KEY = b"k" * 32


@pytest.fixture
def tcp() -> Iterator[Case]:
    """Make ends on sockets, whose hosts have several names."""
    with closing(Case("tcp")) as case:
        yield case


def other_name(end: KVChannel) -> str:
    """Return where an end listens by a name that it does not give itself."""
    (endpoint,) = end.address.endpoints
    assert "127.0.0.1" in endpoint
    return endpoint.replace("127.0.0.1", "localhost")


def taking(case: Case, key: bytes | None = None, page_size: int = 4) -> KVChannel:
    """Make an end that takes grants over its links."""
    transport = SocketTransport() if case.kind == "tcp" else LoopbackTransport(case.hub)
    case.open.append(KVChannel(pool_of(page_size), transport, key=key, takes_offers=True))
    return case.open[-1]


def offered(case: Case, key: bytes | None = None) -> tuple[KVChannel, KVChannel, PageGrant]:
    """Make a prefill and a decode, which dialled it without knowing who it is and offered it a grant."""
    prefill, decode = taking(case, key, page_size=8), case.end(key=key)
    assert decode.links.dial(prefill.address.endpoints[0]) == prefill.address
    grant = case.grant(decode, prefill)
    decode.receiver.offer(grant)
    return prefill, decode, grant


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_a_grant_travels_over_the_link_and_lands(two_pools: Case, key: bytes | None) -> None:
    prefill, decode, grant = offered(two_pools, key)
    wait_until(lambda: prefill.has_news)
    assert prefill.poll_offers() == [grant]
    assert prefill.poll_offers() == []
    assert not prefill.has_news
    pages = two_pools.accept(prefill, grant)
    two_pools.hand_over(prefill, decode, grant, pages)
    assert two_pools.arrived(decode, grant) == two_pools.sent(prefill, grant.tokens, pages)


def test_an_end_that_takes_no_offers_answers_aborted(two_pools: Case) -> None:
    prefill, decode = two_pools.pair()
    decode.receiver.offer(two_pools.grant(decode, prefill))
    (answer,) = settled(decode)
    assert answer.status is ABORTED
    assert prefill.connected(decode.address)
    assert prefill.poll_offers() == []


def test_an_offer_that_decode_gives_up_is_never_heard_of(two_pools: Case) -> None:
    prefill, decode, grant = offered(two_pools)
    wait_until(lambda: prefill.has_news)
    decode.abort(grant, TransferError("not wanted"))
    assert settled(decode)[0].status is ABORTED
    assert prefill.poll_offers() == []
    assert not prefill.snapshot().accepted  # and no tombstone: nobody can come with this grant later


def test_an_offer_that_was_taken_is_stopped_as_any_other_room(two_pools: Case) -> None:
    prefill, decode, grant = offered(two_pools)
    wait_until(lambda: prefill.poll_offers() == [grant])
    prefill.accept(grant)
    decode.abort(grant, TransferError("not wanted"))
    wait_until(lambda: [room for room, _ in prefill.poll_stops()] == [grant.room])
    prefill.finish(grant, handoff(grant, prefill, ABORTED))
    assert settled(decode)[0].status is ABORTED


@pytest.mark.parametrize("is_here", [True, False], ids=["its grant is here", "its grant comes later"])
def test_a_declined_room_is_answered_without_a_step(two_pools: Case, is_here: bool) -> None:
    prefill, decode, grant = offered(two_pools)
    wait_until(lambda: prefill.has_news)
    if not is_here:
        assert prefill.poll_offers() == [grant]
        grant = two_pools.grant(decode, prefill)
    prefill.sender.decline(grant.room)
    if not is_here:
        decode.receiver.offer(grant)
    (answer,) = settled(decode)
    assert (answer.room, answer.status) == (grant.room, ABORTED)
    assert "its request has ended" in str(answer.error)
    assert not prefill.has_news
    decode.receiver.offer(other := two_pools.grant(decode, prefill))  # other rooms are as welcome as before
    wait_until(lambda: prefill.poll_offers() == [other])


def test_declined_rooms_are_bounded(two_pools: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "MAX_DECLINED", 2)
    prefill, decode, _ = offered(two_pools)
    wait_until(prefill.poll_offers)
    grants = [two_pools.grant(decode, prefill) for _ in range(3)]
    for grant in grants:
        prefill.sender.decline(grant.room)
    for grant in grants:
        decode.receiver.offer(grant)
    assert {answer.room for answer in settled(decode, 2)} == {grants[1].room, grants[2].room}
    assert prefill.poll_offers() == [grants[0]]  # forgotten: it waits as any other


def test_offers_of_a_lost_peer_are_forgotten(two_pools: Case) -> None:
    prefill, decode, _ = offered(two_pools)
    wait_until(lambda: prefill.has_news)
    decode.close()
    wait_until(lambda: not prefill.has_news)
    assert prefill.poll_offers() == []


def test_offers_that_nobody_takes_are_bounded(two_pools: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "MAX_OFFERS_BYTES", offers.OFFER_BYTES + 100)
    prefill, decode, first = offered(two_pools)
    wait_until(lambda: prefill.has_news)
    decode.receiver.offer(second := two_pools.grant(decode, prefill))
    (answer,) = settled(decode)
    assert (answer.room, answer.status) == (second.room, ABORTED)
    assert prefill.poll_offers() == [first]
    decode.receiver.offer(third := two_pools.grant(decode, prefill))  # there is room again
    wait_until(lambda: prefill.poll_offers() == [third])
    decode.receiver.offer(fourth := two_pools.grant(decode, prefill))
    wait_until(lambda: prefill.has_news)
    decode.abort(fourth, TransferError("not wanted"))
    assert settled(decode)[0].room == fourth.room
    decode.receiver.offer(fifth := two_pools.grant(decode, prefill))  # what was withdrawn does not count
    wait_until(lambda: prefill.poll_offers() == [fifth])


@pytest.mark.parametrize("what", ["a foreign destination", "a foreign writer", "twice", "after it was accepted"])
def test_an_offer_that_is_not_the_peers_to_make_costs_its_link(two_pools: Case, what: str) -> None:
    prefill, decode, grant = offered(two_pools)
    wait_until(lambda: prefill.has_news)
    if what == "after it was accepted":
        prefill.accept(*prefill.poll_offers())
    stranger = attrs.evolve(decode.address, engine_id=b"x" * 16)
    room = b"another room" if what.startswith("a foreign") else grant.room
    more = {"a foreign destination": {"destinations": (stranger,)}, "a foreign writer": {"writers": (stranger,)}}
    bad = attrs.evolve(grant, room=room, **more.get(what, {}))  # type: ignore[arg-type]
    say(decode, prefill, wire.Offer(wire.PackedGrant.of(bad)))
    assert settled(decode)[0].status is ABORTED
    wait_until(lambda: not prefill.connected(decode.address))


def test_dialling_an_endpoint_twice_makes_one_link_and_a_restart_is_noticed(case: Case) -> None:
    prefill, decode = case.end(), case.end(pool_of())
    endpoint = prefill.address.endpoints[0]
    assert decode.links.dial(endpoint) == decode.links.dial(endpoint) == prefill.address
    assert len(decode.snapshot().links) == 1
    assert decode.snapshot().wanted == (prefill.address,)  # it is dialled again when the link breaks
    links(decode).book.want(attrs.evolve(prefill.address, engine_id=b"before"), 1.0)
    decode.drop_peer(prefill.address)
    wait_until(lambda: not prefill.connected(decode.address))
    assert decode.links.dial(endpoint) == prefill.address
    assert decode.snapshot().wanted == (prefill.address,)  # what listened there before is given up


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
def test_a_peer_is_found_under_another_name_too(tcp: Case, key: bytes | None) -> None:
    decode, other, prefill = tcp.end(key=key), tcp.end(key=key), taking(tcp, key)
    peers = tuple(end.address for end in (other, prefill))
    assert tuple(decode.links.dial(*peer.endpoints) for peer in peers) == peers
    decode.receiver.offer(grant := tcp.grant(decode, prefill))
    assert decode.links.dial(other_name(prefill)) == prefill.address
    assert decode.snapshot().wanted == peers
    wait_until(lambda: (len(prefill.snapshot().links), len(decode.snapshot().links)) == (1, 2))
    wait_until(lambda: prefill.poll_offers() == [grant])
    tcp.hand_over(prefill, decode, grant, tcp.accept(prefill, grant))  # the link is the one from before


def test_two_names_of_a_peer_that_are_dialled_at_once_make_one_link(tcp: Case) -> None:
    prefill, decode = tcp.end(), tcp.end()
    names = [*prefill.address.endpoints, other_name(prefill)] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        assert set(pool.map(decode.links.dial, names)) == {prefill.address}
    wait_until(lambda: len(prefill.snapshot().links) == len(decode.snapshot().links) == 1)


def test_a_peer_that_does_not_say_who_it_is_is_not_found_under_another_name(
    tcp: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejection = wire.rejection
    monkeypatch.setattr(wire, "rejection", lambda error, again, refuser: rejection(error, again=again))
    prefill, decode = tcp.end(), tcp.end()
    assert decode.links.dial(*prefill.address.endpoints) == prefill.address
    assert "has an open link already" in refusal(partial(decode.links.dial, other_name(prefill)))
    assert decode.connected(prefill.address)


def test_dialling_an_endpoint_compares_layouts_and_keys(two_pools: Case) -> None:
    other = two_pools.end(pool_of(weights_id=b"others"))  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match="weights_id"):
        two_pools.end().links.dial(other.address.endpoints[0])
    with pytest.raises(TransferError, match="has a key"):
        two_pools.end(key=KEY).links.dial(other.address.endpoints[0])
    with pytest.raises(TransferError):
        two_pools.end().links.dial("tcp://127.0.0.1:1", timeout_s=0.2)


def test_two_ends_that_dial_each_other_without_knowing_whom_have_one_link(two_pools: Case) -> None:
    one, other = two_pools.end(), two_pools.end()
    assert one.links.dial(other.address.endpoints[0]) == other.address
    assert other.links.dial(one.address.endpoints[0]) == one.address
    assert len(one.snapshot().links) == len(other.snapshot().links) == 1
    grant = two_pools.grant(other, one)
    two_pools.hand_over(one, other, grant, two_pools.accept(one, grant))
