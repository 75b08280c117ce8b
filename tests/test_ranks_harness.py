"""The processes that stand for ranks in tests: worlds come and go, and a job that breaks one does not affect the
next."""

from __future__ import annotations

import os
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

from pdinfer.parallel.topology import Topology
from tests import ranks as harness
from tests.forks import FAR_S
from tests.ranks import Ranks
from tests.waiting import wait_until

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


def sleep(rank: int, asleep: str) -> None:
    if int(os.environ["RANK"]) == rank:
        Path(asleep).touch()
        time.sleep(600)
    raise ValueError("not waited for")


@pytest.mark.parametrize("world_size", [4, 1, 2])
def test_a_job_runs_on_every_rank_of_a_world_of_its_own(ranks: Ranks, world_size: int) -> None:
    results = ranks.run(f"{HERE}:gathered", world_size, "hello")
    assert results == [["hello", list(range(world_size))]] * world_size


def test_what_a_rank_raises_is_told(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(f"{HERE}:refuse", 2, 1)
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [("", ""), ("ValueError", "not me")]
    with pytest.raises(AssertionError, match=r"rank 1 of 2: ValueError: not me"):
        ranks.run(f"{HERE}:refuse", 2, 1)


def test_a_rank_that_dies_or_hangs_is_named_and_replaced(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time is over when one rank has ended and the other hangs, however long both took."""
    asleep, limits_s = tmp_path / "asleep", list[float]()

    def wait(missing: list[Any], timeout: float) -> list[Any]:
        limits_s.append(timeout)
        if len(missing) > 1:
            return connection.wait(missing, FAR_S)
        wait_until(asleep.exists)
        return []

    outcomes = ranks.outcomes(f"{HERE}:die", 2, 1)
    assert [outcome.error for outcome in outcomes] == ["RankLost", "Died"]
    monkeypatch.setattr(harness, "wait", wait)
    named = r"sleep did not end in 4.0 s on ranks 1\nrank 1:(.|\n)*in sleep(.|\n)*rank 0 of 2 ended: ValueError"
    with pytest.raises(AssertionError, match=named):
        ranks.outcomes(f"{HERE}:sleep", 2, 1, str(asleep), deadline_s=4.0)
    assert max(limits_s) <= 4.0
    monkeypatch.undo()
    assert ranks.run(f"{HERE}:gathered", 2, "again") == [["again", [0, 1]]] * 2
