"""Engines that run as ranks: the same tokens as one rank, whatever the sizes, and a loss that everybody learns of."""

from __future__ import annotations

import pytest

import pdinfer as pd
from tests.e2e.rank_worlds import Sizes, serving
from tests.e2e.setups import Tally, by_request, collect, greedy, prompt_of, reference
from tests.ranks import Ranks

PROMPTS = [prompt_of(length, seed=length) for length in (9, 1, 23, 40, 5)]


def serve_all(pairing: pd.Pairing, count: int = 6) -> None:
    """Some at once, then one alone, so that ranks idle; tokens are those of the whole model."""
    for group in (PROMPTS, PROMPTS[:1]):
        for number, prompt in enumerate(group):
            pairing.submit(pd.Request(request_id=f"r{number}", prompt=prompt, sampling=greedy(count, ignore_eos=True)))
        streams = by_request(collect(pairing))
        tally = Tally()
        for number, prompt in enumerate(group):
            stream = streams[f"r{number}"]
            assert stream[-1].finish_reason is pd.FinishReason.LENGTH, stream[-1]
            tally.compare(f"r{number}", stream, reference("v3", prompt, count))
        tally.check()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"dp_size": 2}, {"dp_size": 2}),
        ({"tp_size": 2}, {}),
        ({}, {"tp_size": 2}),
        ({"cp_size": 2}, {"dp_size": 2}),
    ],
    ids=str,
)
def test_ranks_give_the_tokens_of_one_rank(ranks: Ranks, prefill: Sizes, decode: Sizes) -> None:
    with serving(ranks, prefill, decode, engine={"chunked_prefill_size": 16}) as world:
        serve_all(world.pairing)
    calls = {
        role: [value["calls"] for value in world.values if value["role"] == role] for role in ("prefill", "decode")
    }
    for traces in calls.values():
        assert all(trace == traces[0] for trace in traces)
