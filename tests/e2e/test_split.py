"""Greedy tokens that went through prefill, channel and decode are those of the model in one piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import pdinfer as pd
from pdinfer.testing import FAMILIES
from tests.e2e.setups import (
    TRANSPORTS,
    Tally,
    by_request,
    greedy,
    join,
    judged,
    model_of,
    pairwise,
    pool_of,
    prompt_of,
    tokens_of,
)
from tests.slices import one_in

PAGE_SIZES = (1, 16, 64)
CHUNK_SIZES = (7, 64, -1)
LENGTHS = (1, 7, 16, 33, 65, 90)
NUM_NEW = 12

FULL = list(itertools.product(FAMILIES, PAGE_SIZES, CHUNK_SIZES, TRANSPORTS))
SLICE = pairwise(FAMILIES, PAGE_SIZES, CHUNK_SIZES, TRANSPORTS)
OTHER_PAGES = [
    (*sizes, transport)
    for sizes in ((1, 16), (16, 1), (16, 64), (64, 16), (5, 7))
    for transport in TRANSPORTS
    if transport != "shared"
]


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """One count for the whole file: near ties are rare over all its tokens."""
    whole = Tally()
    yield whole
    whole.check()


def check_split(
    tally: Tally, family: str, chunk_size: int, transport: str, prefill_page_size: int, decode_page_size: int
) -> None:
    model = model_of(family)
    prompts = {str(length): prompt_of(length) for length in LENGTHS}
    pools = [pool_of(model, page_size=size, num_pages=2048 // size) for size in (prefill_page_size, decode_page_size)]
    engine = pd.EngineConfig(chunked_prefill_size=chunk_size)
    with join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
        requests = [
            pd.Request(request_id=name, prompt=prompt, sampling=greedy(NUM_NEW, ignore_eos=True))
            for name, prompt in prompts.items()
        ]
        streams = by_request(setup.pairing.generate(requests))
        setup.check_idle()
    for name, prompt in prompts.items():
        tokens = tokens_of(streams[name])
        assert len(tokens) == NUM_NEW
        tally.compare(name, streams[name], judged(family, prompt, tokens))
        assert streams[name][-1].finish_reason is pd.FinishReason.LENGTH


@pytest.mark.parametrize(("family", "page_size", "chunk_size", "transport"), one_in(2, SLICE))
def test_tokens_are_those_of_the_model_in_one_piece(
    tally: Tally, family: str, page_size: int, chunk_size: int, transport: str
) -> None:
    check_split(tally, family, chunk_size, transport, page_size, page_size)


@pytest.mark.full
@pytest.mark.parametrize(("family", "page_size", "chunk_size", "transport"), FULL)
def test_tokens_are_those_of_the_model_in_one_piece_everywhere(
    tally: Tally, family: str, page_size: int, chunk_size: int, transport: str
) -> None:
    check_split(tally, family, chunk_size, transport, page_size, page_size)


@pytest.mark.parametrize(("prefill_page_size", "decode_page_size", "transport"), one_in(4, OTHER_PAGES))
def test_the_two_sides_may_have_pages_of_different_sizes(
    tally: Tally, prefill_page_size: int, decode_page_size: int, transport: str
) -> None:
    check_split(tally, "v3", 7, transport, prefill_page_size, decode_page_size)


def test_the_slice_holds_every_pair_of_values() -> None:
    for row in FULL:
        for i, j in itertools.combinations(range(len(row)), 2):
            assert any((other[i], other[j]) == (row[i], row[j]) for other in SLICE)
    assert len(SLICE) < len(FULL) / 4
