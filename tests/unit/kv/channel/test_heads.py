"""Pages with heads between ranks that hold other heads of them: every byte lands where it belongs, no head is missed,
and packed pages move whole or not at all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.kv.channel import sender, wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.shapes import AxisOrder
from pdinfer.kv.transports.loopback import LoopbackTransport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.types import PageGrant
from tests.slices import examples
from tests.unit.kv.channel import channels
from tests.unit.kv.channel.channels import ABORTED, LANDED, Case, handoff, say, settled
from tests.unit.kv.channel.heads import LAYERS, NUM_HEADS, check_landed, compute, grant_to, pool_of
from tests.waiting import wait_until

KEY = b"k" * 32
RANKS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)]


def slices(num_ranks: int) -> list[range]:
    size = NUM_HEADS // num_ranks
    return [range(rank * size, (rank + 1) * size) for rank in range(num_ranks)]


def end_of(case: Case, key: bytes | None = None, page_size: int = 4, **model: Any) -> KVChannel:
    transport = SocketTransport() if case.kind == "tcp" else LoopbackTransport(case.hub)
    case.open.append(KVChannel(pool_of(page_size, **model), transport, key=key))
    return case.open[-1]


def ends_of(case: Case, num_ranks: int, **more: Any) -> list[KVChannel]:
    return [end_of(case, heads=heads, **more) for heads in slices(num_ranks)]


def open_room(prefills: list[KVChannel], decodes: list[KVChannel], tokens: range) -> PageGrant:
    """Link every prefill to every decode, and make a room that all of them know."""
    for prefill, decode in itertools.product(prefills, decodes):
        prefill.connect(decode.address)
    grant = grant_to(decodes, [end.address for end in prefills], tokens)
    for decode in decodes:
        decode.expect(grant)
    for prefill in prefills:
        prefill.accept(grant)
    return grant


def send(prefill: KVChannel, grant: PageGrant, **more: Any) -> None:
    """Push a prompt in two chunks, layer by layer, and say that it landed."""
    pages, half = compute(prefill, grant.tokens.stop), grant.tokens.start + len(grant.tokens) // 2
    for tokens in filter(None, (range(grant.tokens.start, half), range(half, grant.tokens.stop))):
        for layer in range(LAYERS[-1] + 1):
            prefill.push(grant, layers=range(layer, layer + 1), tokens=tokens, pages=pages, **more)
    prefill.finish(grant, handoff(grant, prefill))


@pytest.mark.parametrize(("kind", "key"), [("loopback", None), ("tcp", None), ("tcp", KEY)])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_every_byte_lands_between_ranks_with_other_heads(kind: str, key: bytes | None, ranks: tuple[int, int]) -> None:
    case = Case(kind)
    try:
        prefills = ends_of(case, ranks[0], key=key, order=AxisOrder.LBHNC, page_size=8)
        decodes = ends_of(case, ranks[1], key=key, order=AxisOrder.LBNHC)
        grant = open_room(prefills, decodes, range(8, 27))
        for prefill in prefills:
            send(prefill, grant)
        for decode in decodes:
            assert {landed.status for landed in settled(decode, len(prefills))} == {LANDED}
            check_landed(decode, grant)
        wait_until(lambda: not any(prefill.sender.pushes.unsent_bytes for prefill in prefills))
        assert all(not peer.inflight_bytes for prefill in prefills for peer in prefill.stats.peers)
        landed = sum(decode.stats.bytes_received for decode in decodes)
        assert landed == decodes[0].pool.layout.payload_bytes(range(9), grant.tokens, range(NUM_HEADS))
        assert landed == sum(peer.bytes_sent for prefill in prefills for peer in prefill.stats.peers)
    finally:
        case.close()


@examples(60)
@given(
    ranks=st.sampled_from(RANKS),
    ours=st.sampled_from(AxisOrder),
    theirs=st.sampled_from(AxisOrder),
    sizes=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    start=st.integers(0, 2),
    count=st.integers(1, 20),
    joins=st.booleans(),
)
def test_every_byte_lands_in_any_order(
    ranks: tuple[int, int],
    ours: AxisOrder,
    theirs: AxisOrder,
    sizes: tuple[int, int],
    start: int,
    count: int,
    joins: bool,
) -> None:
    case, before = Case("loopback"), sender.GROUP_BYTES
    sender.GROUP_BYTES = before if joins else 1
    try:
        prefills = ends_of(case, ranks[0], order=ours, page_size=sizes[0])
        decodes = ends_of(case, ranks[1], order=theirs, page_size=sizes[1])
        grant = open_room(prefills, decodes, range(start * sizes[1], start * sizes[1] + count))
        for prefill in prefills:
            send(prefill, grant)
        for decode in decodes:
            assert {landed.status for landed in settled(decode, len(prefills))} == {LANDED}
            check_landed(decode, grant)
    finally:
        sender.GROUP_BYTES = before
        case.close()


def test_a_head_that_nobody_sent_is_missed(two_pools: Case) -> None:
    (prefill,), decodes = ends_of(two_pools, 1), ends_of(two_pools, 2)
    grant = open_room([prefill], decodes, range(10))
    send(prefill, grant, heads=range(NUM_HEADS - 1))
    assert settled(decodes[0])[0].status is LANDED
    (missed,) = settled(decodes[1])
    assert missed.status is ABORTED
    assert "not every granted token had arrived" in str(missed.error)


def test_a_head_may_come_in_two_parts_and_from_two_writers(two_pools: Case) -> None:
    """Ranks that hold the same heads, as when there are more ranks than heads, share them out themselves."""
    prefills, (decode,) = [end_of(two_pools), end_of(two_pools)], ends_of(two_pools, 1)
    grant = open_room(prefills, [decode], range(10))
    for prefill, heads in zip(prefills, (range(3), range(3, NUM_HEADS)), strict=True):
        send(prefill, grant, heads=heads)
    assert {landed.status for landed in settled(decode, 2)} == {LANDED}
    check_landed(decode, grant)


def test_a_head_that_two_writers_send_costs_the_second_its_link(two_pools: Case) -> None:
    prefills, (decode,) = [end_of(two_pools), end_of(two_pools)], ends_of(two_pools, 1)
    grant = open_room(prefills, [decode], range(10))
    for prefill, heads in zip(prefills, (range(4), range(3, NUM_HEADS)), strict=True):
        send(prefill, grant, heads=heads)
    (word,) = [word for word in settled(decode, 2) if word.status is ABORTED]
    assert word.writer in {prefill.address for prefill in prefills}  # whichever of two links was read second
    assert "tokens [0, 5) of head 3 of layer 0 were announced twice" in str(word.error)


@pytest.mark.parametrize(
    ("heads", "problem"),
    [
        (None, "a payload names no heads, and these pages have some"),
        (range(3, 5), "layers [0, 1) x tokens [0, 10) x heads [3, 5) is outside the grant's"),
        (range(4, 4), "is outside the grant's"),
    ],
    ids=["none", "others", "empty"],
)
def test_heads_that_are_not_the_peers_to_name_cost_its_link(two_pools: Case, heads: range | None, problem: str) -> None:
    prefill, decode = end_of(two_pools), end_of(two_pools, heads=range(4, 8))
    grant = open_room([prefill], [decode], range(10))
    num_bytes = decode.pool.layout.payload_bytes(range(1), range(10), heads)
    say(prefill, decode, wire.Data(grant.room, range(1), range(10), heads), [(0, num_bytes)])
    (lost,) = settled(decode)
    assert lost.status is ABORTED
    assert problem in str(lost.error)


def test_pages_without_heads_take_no_payload_that_names_some(two_pools: Case) -> None:
    prefill, decode, grant, _ = two_pools.room()
    say(prefill, decode, wire.Data(grant.room, range(1), grant.tokens, range(1)), [(0, 40)])
    (lost,) = settled(decode)
    assert "a payload names heads, and these pages have none" in str(lost.error)
    with pytest.raises(ConfigError, match=r"heads \[0, 1\) are asked for, and these pages have no heads"):
        prefill.push(grant, layers=range(1), tokens=range(4, 6), pages=(0, 1), heads=range(1))


def packed_pair(case: Case) -> tuple[KVChannel, KVChannel]:
    return end_of(case, packed=True), end_of(case, packed=True)


def test_packed_pages_land_whole(two_pools: Case) -> None:
    prefill, decode = packed_pair(two_pools)
    grant = open_room([prefill], [decode], range(4, 20))
    pages = compute(prefill, 20)
    prefill.push(grant, layers=range(4), tokens=range(4, 12), pages=pages)
    for tokens in (range(12, 18), range(13, 20)):
        with pytest.raises(ConfigError, match="are not whole pages of 4 tokens, and packed pages move whole"):
            prefill.push(grant, layers=range(4), tokens=tokens, pages=pages)
    with pytest.raises(ConfigError, match=r"heads \[0, 4\) are asked for, and packed pages hold \[0, 8\) as a whole"):
        prefill.push(grant, layers=range(4), tokens=range(12, 20), pages=pages, heads=range(4))
    prefill.push(grant, layers=range(4), tokens=range(12, 20), pages=pages)
    prefill.finish(grant, handoff(grant, prefill))
    assert settled(decode)[0].status is LANDED
    check_landed(decode, grant)


def test_parts_of_packed_pages_are_neither_granted_nor_taken(two_pools: Case) -> None:
    prefill, decode = packed_pair(two_pools)
    prefill.connect(decode.address)
    with pytest.raises(ConfigError, match=r"tokens \[0, 10\) are not whole pages of 4 tokens"):
        decode.expect(grant_to([decode], [prefill.address], range(10)))
    for tokens, heads in ((range(6), range(8)), (range(8), range(4))):
        grant = grant_to([decode], [prefill.address], range(8))
        prefill.connect(decode.address)
        decode.expect(grant)
        num_bytes = decode.pool.layout.payload_bytes(range(1), tokens, heads)
        say(prefill, decode, wire.Data(grant.room, range(1), tokens, heads), [(0, num_bytes)])
        (lost,) = settled(decode)
        assert "a payload cannot be placed" in str(lost.error)
        wait_until(lambda: not prefill.connected(decode.address))


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"page_size": 8}, "page_size: ours 4, theirs 8"),
        ({"heads": range(4)}, r"heads: ours \[0, 8\), theirs \[0, 4\)"),
        ({"order": AxisOrder.BLHNC}, "components.kv.order: ours LBHNC, theirs BLHNC"),
        ({"packed": False}, "components.kv.packed: ours True, theirs False"),
    ],
)
def test_packed_pages_need_the_same_pages_at_both_ends(two_pools: Case, other: dict[str, Any], problem: str) -> None:
    ours, theirs = end_of(two_pools, packed=True), end_of(two_pools, **{"packed": True, **other})
    with pytest.raises(LayoutMismatch, match=problem):
        ours.connect(theirs.address)


def test_pages_with_heads_and_without_do_not_meet(two_pools: Case) -> None:
    ours, theirs = end_of(two_pools), two_pools.end(channels.pool_of())
    with pytest.raises(LayoutMismatch, match="components"):
        theirs.connect(ours.address)
