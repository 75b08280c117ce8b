"""Engines that run as ranks: the same tokens as one rank, whatever the sizes, and a loss that everybody learns of."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.rank_worlds import Sizes, World, serving, size_of
from tests.e2e.setups import Tally, by_request, collect, greedy, prompt_of
from tests.ranks import Ranks

PROMPTS = [prompt_of(length, seed=length) for length in (9, 1, 23, 40, 5)]


PREFILLS: list[Sizes] = [
    {},
    {"dp_size": 2, "ep_size": 2},
    {"tp_size": 2},
    {"cp_size": 2, "ep_size": 2},
    {"cp_size": 2, "tp_size": 2, "ep_size": 4},
]
DECODES: list[Sizes] = [{}, {"dp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"dp_size": 2, "tp_size": 2, "ep_size": 4}]


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
    """All at once, each of another length so that any may be the first to leave; the tokens are those of the whole
    model."""
    requests = [
        pd.Request(request_id=f"r{number}", prompt=prompt, sampling=greedy(count + 5 * number % 7, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        pairing.submit(request)
    tally = Tally()
    tally.compare_all(model, requests, by_request(collect(pairing)))
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
        ({"dp_size": 2, "ep_size": 2}, {"dp_size": 2, "ep_size": 2}, 2),
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
        loads = [port.load() for port in world.decodes]
        assert all((load.num_draft_tokens > 0) is mtp for load in loads)
    check_ended(world)


def test_ranks_are_made_alike_warm_up_together_and_close_together(
    ranks: Ranks, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")
    first, second = ranks.run("tests.e2e.rank_worlds:meet_alone", 2, checkpoint.folder, str(folder))
    assert first == {**second, "num_idle": first["num_idle"]}
    pages, chunk, layout = first["told"]
    assert pages == "num_pages must be the same on all ranks of an engine; it is 64 on rank 0, 65 on rank 1"
    assert chunk == "chunked_prefill_size must be the same on all ranks of an engine; it is 8 on rank 0, 9 on rank 1"
    assert layout.startswith("layout_id must be the same on all ranks")
    assert {"decode", "draft"} == set(first["steps"])
    assert first["num_idle"] < 50  # ranks that wait do not spin
    assert first["free"] == 32


@pytest.mark.full
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("decode", DECODES, ids=str)
@pytest.mark.parametrize("prefill", PREFILLS, ids=str)
def test_every_size_meets_every_other(
    ranks: Ranks, checkpoint: Checkpoint, prefill: Sizes, decode: Sizes, num_draft_tokens: int
) -> None:
    test_ranks_give_the_tokens_of_one_rank(ranks, checkpoint, prefill, decode, num_draft_tokens)


@pytest.mark.parametrize(
    ("prefill", "decode", "fault"),
    [
        ({}, {"dp_size": 3}, ("decode", 1, "kill")),
        pytest.param({"tp_size": 2}, {}, ("prefill", 1, "stop"), marks=pytest.mark.full),
        ({}, {"dp_size": 2, "ep_size": 2}, ("decode", 0, "raise")),
    ],
    ids=str,
)
def test_a_rank_that_breaks_down_is_reported_on_all_others(
    ranks: Ranks, checkpoint: Checkpoint, prefill: Sizes, decode: Sizes, fault: tuple[str, int, str]
) -> None:
    with serving(
        ranks,
        prefill,
        decode,
        checkpoint=checkpoint.folder,
        fault=fault,
        chunked_prefill_size=16,
    ) as world:
        names = [
            world.pairing.submit(pd.Request(prompt=prompt, sampling=greedy(20, ignore_eos=True))) for prompt in PROMPTS
        ]
        ends = {name: stream[-1] for name, stream in by_request(collect(world.pairing)).items()}
    assert set(ends) == set(names)
    assert pd.FinishReason.FAILED in {end.finish_reason for end in ends.values()}
    role, rank, _ = fault
    size = size_of(prefill if role == "prefill" else decode)
    mine = world.outcomes[: size_of(prefill)] if role == "prefill" else world.outcomes[size_of(prefill) :]
    told = ["Died" if at == rank else "RankLost" for at in range(size)]
    assert [outcome.error for outcome in mine] == told
    assert all("start all ranks anew" in outcome.message for outcome in mine if outcome.error == "RankLost")
