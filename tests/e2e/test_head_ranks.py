"""Ranks of other numbers on the two sides, over gloo: pages with heads arrive whole in every order of axes."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest
import torch.distributed as dist

from pdinfer.kv.channel import wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.shapes import AxisOrder
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.types import PeerAddress
from tests.ranks import Ranks
from tests.unit.kv.channel.channels import handoff, settled
from tests.unit.kv.channel.heads import NUM_HEADS, check_landed, compute, grant_to, pool_of
from tests.waiting import TIMEOUT_S

TOKENS = range(8, 27)


def hand_over(num_prefills: int, key: str) -> list[list[str]]:
    """Hand a room of synthetic pages from the first ranks to the others, once for each order of axes, and check every
    byte. Return the status of each room's hand-offs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_prefill = rank < num_prefills
    of = num_prefills if is_prefill else size - num_prefills
    at = rank if is_prefill else rank - num_prefills
    heads = range(at * NUM_HEADS // of, (at + 1) * NUM_HEADS // of)
    said: list[list[str]] = []
    for order, other in zip(AxisOrder, reversed(AxisOrder), strict=True):
        pool = pool_of(page_size=8 if is_prefill else 4, heads=heads, order=order if is_prefill else other)
        channel = KVChannel(pool, SocketTransport(), key=bytes.fromhex(key))
        try:
            said.append(_one_room(channel, num_prefills, is_prefill))
        finally:
            channel.close()
    return said


def _one_room(channel: KVChannel, num_prefills: int, is_prefill: bool) -> list[str]:
    addresses = [_decoded(data, PeerAddress) for data in _gathered(channel.address)]
    writers, decodes = addresses[:num_prefills], addresses[num_prefills:]
    grant = None if is_prefill else attrs.evolve(grant_to([channel], writers, TOKENS), destinations=tuple(decodes))
    if is_prefill:
        for decode in decodes:
            channel.connect(decode)
    dist.barrier()
    if grant is not None:
        channel.expect(grant)
    packed = [data for data in _gathered(None if grant is None else wire.PackedGrant.of(grant)) if data is not None]
    statuses: list[str] = []
    if is_prefill:
        grant = _decoded(packed[0], wire.PackedGrant).unpack()
        channel.accept(grant)
        pages = compute(channel, TOKENS.stop)
        channel.push(grant, layers=channel.pool.layout.layers, tokens=TOKENS, pages=pages)
        channel.finish(grant, handoff(grant, channel))
        assert channel.drain(TIMEOUT_S)
    elif grant is not None:
        statuses = [landed.status.value for landed in settled(channel, num_prefills)]
        check_landed(channel, grant)
    dist.barrier()
    return statuses


def _gathered(value: Any) -> list[bytes | None]:
    """Return the encoded value of every rank."""
    data = None if value is None else msgspec.msgpack.encode(value, enc_hook=wire.to_builtin)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, data)
    return gathered


def _decoded(data: bytes | None, kind: type) -> Any:
    assert data is not None
    return msgspec.msgpack.decode(data, type=kind, dec_hook=wire.from_builtin)


@pytest.mark.parametrize("num_prefills", [1, 2], ids=["1 to 2", "2 to 1"])
def test_every_byte_lands_when_ranks_hold_other_heads(ranks: Ranks, num_prefills: int) -> None:
    said = ranks.run("tests.e2e.test_head_ranks:hand_over", 3, num_prefills, "6b" * 32)
    landed = [["landed"] * num_prefills] * len(AxisOrder)
    assert said == [[[]] * len(AxisOrder)] * num_prefills + [landed] * (3 - num_prefills)
