"""The processes that stand for ranks in tests: worlds come and go, and a job that breaks one does not affect the
next."""

from __future__ import annotations

import os
import time

import pytest
import torch

from pdinfer.parallel.topology import Topology
from tests.ranks import Ranks

HERE = "tests.test_ranks_harness"


def gathered(text: str) -> list[str | list[int]]:
    groups = Topology.from_env().connect()
    return [text, groups.world.all_gather(torch.tensor([groups.world.rank])).tolist()]


def refuse(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError("not me")


def die(rank: int) -> None:
    groups = Topology.from_env().connect()
    if groups.world.rank == rank:
        os._exit(3)
    groups.world.all_gather(torch.zeros(1))


def sleep(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


@pytest.mark.parametrize("world_size", [4, 1, 2])
def test_a_job_runs_on_every_rank_of_a_world_of_its_own(ranks: Ranks, world_size: int) -> None:
    results = ranks.run(f"{HERE}:gathered", world_size, "hello")
    assert results == [["hello", list(range(world_size))]] * world_size


def test_what_a_rank_raises_is_told(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(f"{HERE}:refuse", 2, 1)
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [("", ""), ("ValueError", "not me")]
    with pytest.raises(AssertionError, match=r"rank 1 of 2: ValueError: not me"):
        ranks.run(f"{HERE}:refuse", 2, 1)


def test_a_rank_that_dies_or_hangs_is_named_and_replaced(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(f"{HERE}:die", 2, 1)
    assert [outcome.error for outcome in outcomes] == ["RankLost", "Died"]
    with pytest.raises(AssertionError, match=r"sleep did not end in 4.0 s on ranks 1\nrank 1:(.|\n)*in sleep"):
        ranks.outcomes(f"{HERE}:sleep", 2, 1, deadline_s=4.0)
    assert ranks.run(f"{HERE}:gathered", 2, "again") == [["again", [0, 1]]] * 2
