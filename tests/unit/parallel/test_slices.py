"""Slices for several ranks cover every token once, and what their writers send lands, whatever the page sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pdinfer.config import CacheConfig
from pdinfer.errors import ConfigError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.parallel.slices import Slices, context_parallel_slices, even_slices
from pdinfer.types import HandoffStatus
from tests.slices import examples
from tests.unit.kv.channel.channels import LAYERS, SmallModel, granted, handoff

spans = st.tuples(st.integers(0, 300), st.integers(0, 300)).map(lambda pair: range(pair[0], sum(pair)))
sizes = st.integers(1, 9)


@given(spans, sizes)
@example(range(5, 5), 3)
@example(range(7, 9), 8)
def test_slices_cover_each_token_once_in_rising_order(tokens: range, cp_size: int) -> None:
    slices = context_parallel_slices(tokens, cp_size)
    assert len(slices) == cp_size
    assert sorted(token for ranges in slices for span in ranges for token in span) == list(tokens)
    for ranges in slices:
        assert all(ranges)
        assert all(first.stop < second.start for first, second in itertools.pairwise(ranges))
        assert len(ranges) <= 2


@given(spans, sizes)
def test_no_rank_attends_to_much_more_than_another(tokens: range, cp_size: int) -> None:
    """A token costs as much as there are tokens before it. Each chunk is off by less than one token, so each rank by
    less than two, which cost at most as much as the last ones."""
    slices = context_parallel_slices(tokens, cp_size)
    costs = [sum(token - tokens.start + 1 for span in ranges for token in span) for ranges in slices]
    assert max(costs) - min(costs) <= 2 * len(tokens) + 2


@pytest.mark.parametrize(
    ("tokens", "cp_size", "slices"),
    [
        (range(8), 2, ((range(2), range(6, 8)), (range(2, 6),))),
        (range(4, 10), 1, ((range(4, 10),),)),
        (range(3), 2, ((range(2, 3),), (range(2),))),
        (range(0), 2, ((), ())),
    ],
)
def test_worked_examples(tokens: range, cp_size: int, slices: Slices) -> None:
    assert context_parallel_slices(tokens, cp_size) == slices


@given(spans, sizes)
def test_even_slices_differ_by_one_token_and_cover_each_once(tokens: range, size: int) -> None:
    slices = even_slices(tokens, size)
    counts = [sum(map(len, share)) for share in slices]
    assert len(slices) == size
    assert max(counts) - min(counts) <= 1
    assert [token for share in slices for span in share for token in span] == list(tokens)


@pytest.mark.parametrize("split", [context_parallel_slices, even_slices])
@pytest.mark.parametrize("size", [0, -2])
def test_no_rank_is_no_split(split: Callable[[range, int], Slices], size: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, got"):
        split(range(8), size)


# -- end to end --------------------------------------------------------------------------------------------------------


def pool_of(page_size: int) -> PagePool:
    return PagePool(SmallModel(), CacheConfig(page_size=page_size, num_pages=-(-160 // page_size) + 4))


@examples(60)
@given(
    page_sizes=st.tuples(st.sampled_from([1, 16, 64]), st.sampled_from([1, 16, 64])),
    num_tokens=st.integers(1, 150),
    num_cached_pages=st.integers(0, 3),
    cp_size=st.integers(1, 4),
    layers_at_once=st.integers(1, len(LAYERS)),
    seed=st.integers(0, 2**16),
)
def test_every_writer_pushes_its_slice_and_the_bytes_are_those_of_a_gather(
    page_sizes: tuple[int, int], num_tokens: int, num_cached_pages: int, cp_size: int, layers_at_once: int, seed: int
) -> None:
    torch.manual_seed(seed)
    ours, theirs = page_sizes
    decode, *writers = KVChannel.loopback(pool_of(theirs), *(pool_of(ours) for _ in range(cp_size)))
    for writer in writers:
        writer.connect(decode.address)

    tokens = range(min(num_cached_pages * theirs, (num_tokens - 1) // theirs * theirs), num_tokens)
    grant = granted(decode, *(writer.address for writer in writers), tokens=tokens)
    truth = torch.randint(0, 256, (len(LAYERS), num_tokens, 4), dtype=torch.uint8)
    for writer, slices in zip(writers, context_parallel_slices(range(num_tokens), cp_size), strict=True):
        # every rank has pages for the whole prompt, and in them what it computed
        layout, source = writer.pool.layout, writer.pool.own(writer.pool.layout.num_pages(num_tokens))[::-1]
        writer.accept(grant)
        for computed_tokens in slices:
            # decode lacks only a part of them
            share = range(max(computed_tokens.start, tokens.start), computed_tokens.stop)
            if not share:
                continue
            where = layout.spans(writer.pool.memory_pages, layers=LAYERS, tokens=share, pages=source, first_token=0)
            computed = truth[:, share.start : share.stop].flatten()
            for (offset, length), part in zip(where, computed.split([length for _, length in where]), strict=True):
                writer.pool.memory.buffer[offset : offset + length] = part
            for first in range(0, len(LAYERS), layers_at_once):
                some = LAYERS[first : first + layers_at_once]
                writer.push(grant, layers=some, tokens=share, pages=source)
        assert not decode.poll()
        writer.finish(grant, handoff(grant, writer))
    assert [settled.status for settled in decode.poll()] == [HandoffStatus.LANDED] * cp_size
    there = decode.pool.layout.spans(
        decode.pool.memory_pages, layers=LAYERS, tokens=tokens, pages=grant.pages, first_token=tokens.start
    )
    arrived = b"".join(decode.pool.memory.read(there))
    assert arrived == truth[:, tokens.start :].contiguous().numpy().tobytes()
    assert decode.stats.frames_dropped == 0
    for end in (decode, *writers):
        end.close()


def test_slices_with_a_hole_do_not_land() -> None:
    decode, *writers = KVChannel.loopback(*(pool_of(16) for _ in range(3)))
    for writer in writers:
        writer.connect(decode.address)
    grant = granted(decode, *(writer.address for writer in writers), tokens=range(30))
    whole, (*_, last) = context_parallel_slices(grant.tokens, 2)
    for writer, shares in zip(writers, (whole, (last[:-1],)), strict=True):
        source = writer.pool.own(2)
        writer.accept(grant)
        for share in shares:
            writer.push(grant, layers=LAYERS, tokens=share, pages=source)
        writer.finish(grant, handoff(grant, writer))
    assert {settled.status for settled in decode.poll()} == {HandoffStatus.ABORTED}
