"""Engines that run as ranks: the same tokens as one rank, whatever the sizes, and a loss that everybody learns of."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.rank_worlds import Sizes, World, serving
from tests.e2e.setups import Tally, by_request, collect, greedy, plain_reference, prompt_of, tokens_of
from tests.ranks import Ranks

PROMPTS = [prompt_of(length, seed=length) for length in (9, 1, 23, 40, 5)]


@attrs.frozen
class Checkpoint:
    """A folder, and its model as one rank has it."""

    folder: str
    model: pd.Model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_config_dict("v3", num_nextn_predict_layers=1), mtp=True)
    return Checkpoint(str(folder), pd.load_model(folder, dtype=torch.float32))


def serve_all(pairing: pd.Pairing, model: pd.Model, prompts: Sequence[tuple[int, ...]], count: int = 6) -> None:
    """All at once; the tokens are those of the whole model."""
    requests = [
        pd.Request(request_id=f"r{number}", prompt=prompt, sampling=greedy(count, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        pairing.submit(request)
    streams = by_request(collect(pairing))
    tally = Tally()
    for request in requests:
        stream = streams[request.request_id or ""]
        assert stream[-1].finish_reason is pd.FinishReason.LENGTH, stream[-1]
        tally.compare(str(request.request_id), stream, plain_reference(model, request, tokens_of(stream)))
    tally.check()


def check_ended(world: World) -> None:
    """All ranks of a world made the same collective calls, every prefill rank has sent something, no page is held."""
    for role in ("prefill", "decode"):
        ended = [value for value in world.values if value["role"] == role]
        groups = {tuple(call for call in value["calls"] or () if call.startswith("world.")) for value in ended}
        assert len(groups) == 1
        assert all(value["bytes"] for value in ended) is (role == "prefill")
        assert not any(value["left"] for value in ended)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_draft_tokens"),
    [
        ({"dp_size": 2}, {"dp_size": 2}, 0),
        ({"tp_size": 2}, {}, 0),
        ({}, {"tp_size": 2}, 0),
        ({"cp_size": 2}, {"dp_size": 2}, 2),
        ({"cp_size": 2}, {"tp_size": 2}, 2),
    ],
    ids=str,
)
def test_ranks_give_the_tokens_of_one_rank(
    ranks: Ranks, checkpoint: Checkpoint, prefill: Sizes, decode: Sizes, num_draft_tokens: int
) -> None:
    mtp = num_draft_tokens > 0
    with serving(
        ranks,
        prefill,
        decode,
        checkpoint=checkpoint.folder,
        chunked_prefill_size=16,
        mtp=mtp,
        num_draft_tokens=num_draft_tokens,
    ) as world:
        serve_all(world.pairing, checkpoint.model, PROMPTS)
        serve_all(world.pairing, checkpoint.model, PROMPTS[:1])  # known pages; other ranks have nothing to do
    check_ended(world)
