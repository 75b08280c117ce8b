"""Plans for several writers send every (layer, token) once, and it lands, whatever the page sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdinfer.config import CacheConfig
from pdinfer.errors import ConfigError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.layout import Fit
from pdinfer.kv.pool import PagePool
from pdinfer.parallel.slices import Plan, Push, Slices, context_parallel_slices, even_slices, plan_writers
from pdinfer.types import HandoffStatus
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
def test_even_slices_differ_by_one_token_and_make_a_plan(tokens: range, size: int) -> None:
    slices = even_slices(tokens, size)
    counts = [sum(map(len, share)) for share in slices]
    assert len(slices) == size
    assert max(counts) - min(counts) <= 1
    assert sum(len(push.tokens) for push in plan_writers(LAYERS, tokens, slices).pushes) == len(tokens)


@pytest.mark.parametrize("split", [context_parallel_slices, even_slices])
@pytest.mark.parametrize("size", [0, -2])
def test_no_rank_is_no_split(split: Callable[[range, int], Slices], size: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, got"):
        split(range(8), size)


@given(spans, st.integers(0, 300), sizes)
def test_a_plan_sends_what_decode_lacks_and_nothing_twice(prompt: range, num_cached: int, cp_size: int) -> None:
    tokens = range(min(prompt.start + num_cached, prompt.stop), prompt.stop)
    plan = plan_writers(LAYERS, tokens, context_parallel_slices(prompt, cp_size))
    cells = [(layer, token) for push in plan.pushes for layer in push.layers for token in push.tokens]
    assert sorted(cells) == [(layer, token) for layer in LAYERS for token in tokens]
    assert [push for writer in range(cp_size) for push in plan.of(writer)] == list(plan.pushes)


cuts = st.integers(0, 10)
rectangles = st.builds(
    lambda writer, layers, tokens: Push(writer, range(min(layers), max(layers)), range(min(tokens), max(tokens))),
    st.integers(0, 3),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.tuples(cuts, cuts),
)


@settings(max_examples=400)
@given(st.lists(rectangles, max_size=6))
@example([Push(0, range(3), range(2, 9))])
@example([Push(0, range(4), range(2, 9))])
@example([Push(0, range(2), range(2, 9)), Push(1, range(2, 3), range(2, 9))])
@example([Push(0, range(3), range(2, 5)), Push(1, range(3), range(5, 9)), Push(2, range(1, 2), range(8, 9))])
def test_only_exact_covers_are_plans(pushes: list[Push]) -> None:
    layers, tokens = range(3), range(2, 9)
    cells = [(layer, token) for push in pushes for layer in push.layers for token in push.tokens]
    is_exact = sorted(cells) == [(layer, token) for layer in layers for token in tokens]
    try:
        Plan(layers, tokens, tuple(pushes))
    except ConfigError:
        assert not is_exact
    else:
        assert is_exact


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        (((range(4),), (range(6, 9),)), r"layer 0: no writer sends tokens \[4, 6\)"),
        (((range(4),), (range(4, 8),)), r"layer 0: no writer sends tokens \[8, 9\)"),
        (((range(3, 9),),), r"layer 0: no writer sends tokens \[2, 3\)"),
        ((), r"no writer sends tokens \[2, 9\)"),
        (((range(5),), (range(4, 9),)), r"layer 0: writer 1's tokens \[4, 9\) overlap writer 0's tokens \[2, 5\)"),
    ],
)
def test_the_first_gap_or_overlap_is_named(slices: Slices, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_writers(range(3), range(2, 9), slices)


def test_a_push_beside_the_grant_is_named() -> None:
    with pytest.raises(ConfigError, match="leaves the grant's layers"):
        Plan(range(3), range(4), (Push(0, range(4), range(4)),))


# -- end to end --------------------------------------------------------------------------------------------------------


def pool_of(page_size: int) -> PagePool:
    return PagePool(SmallModel(), CacheConfig(page_size=page_size, num_pages=-(-160 // page_size) + 4))


@settings(max_examples=60)
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
    fit = writers[0].pool.layout.compatible_with(decode.pool.layout)
    assert fit is (Fit.IDENTICAL if ours == theirs else Fit.REPAGE)

    tokens = range(min(num_cached_pages * theirs, (num_tokens - 1) // theirs * theirs), num_tokens)
    grant = granted(decode, *(writer.address for writer in writers), tokens=tokens)
    truth = torch.randint(0, 256, (len(LAYERS), num_tokens, 4), dtype=torch.uint8)
    plan = plan_writers(LAYERS, tokens, context_parallel_slices(range(num_tokens), cp_size))
    for index, writer in enumerate(writers):
        # every rank has pages for the whole prompt, and in them what it computed
        layout, source = writer.pool.layout, writer.pool.own(writer.pool.layout.num_pages(num_tokens))[::-1]
        writer.accept(grant)
        for push in plan.of(index):
            where = layout.spans(
                writer.pool.memory_pages, layers=push.layers, tokens=push.tokens, pages=source, first_token=0
            )
            computed = truth[push.layers.start : push.layers.stop, push.tokens.start : push.tokens.stop].flatten()
            for (offset, length), part in zip(where, computed.split([length for _, length in where]), strict=True):
                writer.pool.memory.buffer[offset : offset + length] = part
            for first in range(0, len(LAYERS), layers_at_once):
                some = LAYERS[first : first + layers_at_once]
                writer.push(grant, layers=some, tokens=push.tokens, pages=source)
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


def test_a_plan_with_a_hole_does_not_land() -> None:
    decode, *writers = KVChannel.loopback(*(pool_of(16) for _ in range(3)))
    for writer in writers:
        writer.connect(decode.address)
    grant = granted(decode, *(writer.address for writer in writers), tokens=range(30))
    plan = plan_writers(LAYERS, grant.tokens, context_parallel_slices(grant.tokens, 2))
    short = attrs.evolve(plan.of(1)[-1], tokens=plan.of(1)[-1].tokens[:-1])
    for index, writer in enumerate(writers):
        source = writer.pool.own(2)
        writer.accept(grant)
        for push in (*plan.of(index)[:-1], plan.of(0)[-1] if index == 0 else short):
            writer.push(grant, layers=push.layers, tokens=push.tokens, pages=source)
        writer.finish(grant, handoff(grant, writer))
    assert {settled.status for settled in decode.poll()} == {HandoffStatus.ABORTED}
