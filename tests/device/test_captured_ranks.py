"""Ranks that draft and ranks that share a batch replay captured steps, those without rows too, and give the tokens of
one rank on the CPU."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.device.test_tokens import WAYS
from tests.e2e.drafts import Streams, check_equal
from tests.e2e.rank_worlds import Sizes, serving
from tests.e2e.setups import by_request, collect, join, pool_of, prompt_of
from tests.e2e.test_rank_engines import check_ended
from tests.each_time import others_in_full
from tests.ranks import Ranks

Step = tuple[int, int]
"""How many rows a step had, and how many launches it took."""

WORLDS: dict[str, tuple[Sizes, int]] = {
    "experts": ({"dp_size": 2, "ep_size": 2}, 0),
    "experts-drafts": ({"dp_size": 2, "ep_size": 2}, 2),
    "batch": ({"tp_size": 2}, 0),
    "batch-experts-drafts": ({"tp_size": 2, "ep_size": 2}, 2),
    "batch-one-draft": ({"tp_size": 2}, 1),
    "experts-one-draft": ({"dp_size": 2, "ep_size": 2}, 1),
    "experts-batch-drafts": ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, 2),
}


@functools.cache
def checkpoint() -> tuple[tempfile.TemporaryDirectory[str], pd.Model]:
    """Return a folder, and its model as one rank on the CPU has it."""
    folder = tempfile.TemporaryDirectory(prefix="pd")
    write_checkpoint(folder.name, tiny_config_dict("v3", num_hidden_layers=2, num_nextn_predict_layers=1), mtp=True)
    return folder, pd.load_model(folder.name, dtype=torch.float32, mtp=True)


def requests(ways: Sequence[int]) -> list[pd.Request]:
    """Return requests of different lengths, so that the batch grows and shrinks, each of one of WAYS."""
    return [
        pd.Request(
            request_id=f"{index} {way}",
            prompt=prompt_of(5 + 7 * index, seed=index),
            sampling=pd.SamplingParams(
                **{"max_new_tokens": 5 + 3 * index % 7, "seed": index, "ignore_eos": True, **WAYS[way], "logprobs": 0}
            ),
        )
        for index, way in enumerate(ways)
    ]


def submitted(pairing: pd.Pairing, asked: Sequence[pd.Request]) -> Streams:
    for request in asked:
        pairing.submit(request)
    return by_request(collect(pairing))


def check(
    ranks: Ranks, sizes: Sizes, asked: Sequence[pd.Request], num_drafts: int, captured: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Compare what ranks give with what one rank on the CPU gives. Return what each rank of decode tells."""
    folder, model = checkpoint()
    with serving(
        ranks,
        {},
        sizes,
        checkpoint=folder.name,
        job="tests.device.rank_jobs:serve_rank",
        mtp=num_drafts > 0,
        num_draft_tokens=num_drafts,
        max_running_requests=8,
        graph_batch_sizes=list(captured),
    ) as world:
        ours = submitted(world.pairing, asked)
    check_ended(world)
    assert [value["faults"] for value in world.values] == [[] for _ in world.values]
    engine = pd.EngineConfig(num_draft_tokens=num_drafts)
    with join(model, "shared", decode_pools=[pool_of(model)], engine=engine) as setup:
        check_equal(model, asked, ours, submitted(setup.pairing, asked))
    told = [value for value in world.values if value["role"] == "decode"]
    if num_drafts and "tp_size" in sizes:  # ranks that share a batch go on with the tokens of the first one
        assert [value["tokens"] for value in told[::2]] == [value["tokens"] for value in told[1::2]]
    return told


@pytest.mark.parametrize("name", others_in_full(WORLDS, ["batch-experts-drafts"]))
def test_every_step_of_every_rank_is_captured(ranks: Ranks, name: str) -> None:
    """A step is one launch, two more where words of its rows are sent, and one for the states of each that joins; ranks
    without rows replay the smallest size."""
    sizes, num_drafts = WORLDS[name]
    asked = requests((0, 1, 0))
    told = check(ranks, sizes, asked, num_drafts, (1, 4))
    for value in told:
        assert value["graphs"].keys() == {""}
        steps: list[Step] = value["steps"]
        assert len(steps) == value["graphs"][""] > 5
        assert max(launches for _, launches in steps) <= 3 + 2 * num_drafts + len(asked)
    assert any(not num_rows for value in told for num_rows, _ in value["steps"]) == ("dp_size" in sizes)


@pytest.mark.parametrize(
    "sizes", [{"dp_size": 2, "ep_size": 2}, pytest.param({"tp_size": 2}, marks=pytest.mark.full)], ids=str
)
def test_ranks_whose_steps_are_not_captured_run_beside_those_whose_are(ranks: Ranks, sizes: Sizes) -> None:
    """More rows than were captured, and draws on the host: all ranks run the layer that drafts equally often."""
    told = check(ranks, sizes, requests((0, 2, 1, 0, 1, 0)), 2, (2,))
    reasons = {reason for value in told for reason in value["graphs"]}
    sure = {"", "the host draws, and drafts follow what it has drawn"}
    assert sure <= reasons <= {*sure, "the largest captured number of sequences is 2"}
    most = max(launches for value in told for _, launches in value["steps"])
    assert most > 300
    if "tp_size" in sizes:
        assert told[0]["graphs"] == told[1]["graphs"]
    else:
        assert sum(told[0]["graphs"].values()) == sum(told[1]["graphs"].values())


def test_ranks_that_meet_on_the_host_capture_nothing(ranks: Ranks) -> None:
    assert ranks.run("tests.device.rank_jobs:graph_safe", 2) == [[False, False, True, True]] * 2


def test_a_rank_that_is_killed_is_missed_by_who_has_begun_the_next_agreement(ranks: Ranks) -> None:
    folder, _ = checkpoint()
    with serving(
        ranks,
        {},
        {"dp_size": 2},
        checkpoint=folder.name,
        job="tests.device.rank_jobs:serve_rank",
        fault=("decode", 1, "kill"),
        max_running_requests=4,
        graph_batch_sizes=[],
    ) as world:
        for request in requests((0, 0)):
            world.pairing.submit(request)
        collect(world.pairing)
    assert [outcome.error for outcome in world.outcomes] == ["", "RankLost", "Died"]
    assert "all_gather of group world" in world.outcomes[1].message
