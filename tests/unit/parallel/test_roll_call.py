"""Ranks that wait for others name those that have not come."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

import pdinfer as pd
from pdinfer.parallel import topology
from pdinfer.parallel.topology import RollCall
from tests.forks import apart
from tests.waiting import wait_until


def test_who_has_not_come_is_named() -> None:
    store = dist.HashStore()
    first = RollCall(store, 0, 4)
    assert first.missing() == "of 4 ranks 3 have not come: 1, 2, 3"
    RollCall(store, 2, 4)
    assert first.missing() == "of 4 ranks 2 have not come: 1, 3"
    RollCall(store, 1, 4)
    RollCall(store, 3, 4)
    assert first.missing() == ""
    assert RollCall(dist.HashStore(), 0, 30).missing().endswith(", 15, 16 and 13 more")


def test_the_log_says_so_while_a_rank_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(topology, "MISSING_S", 0.01)
    with RollCall(dist.HashStore(), 1, 3).taken():
        wait_until(lambda: caplog.records)
    assert caplog.records[0].getMessage() == "rank 1 still waits after 0.01 s: of 3 ranks 2 have not come: 0, 2"


def test_nothing_is_said_of_ranks_that_meet_in_time(caplog: pytest.LogCaptureFixture) -> None:
    with RollCall(dist.HashStore(), 1, 3).taken():
        pass
    wait_until(lambda: "pdinfer-roll-call" not in {thread.name for thread in threading.enumerate()})
    assert not caplog.records


def meet_alone() -> str:
    """Be rank 1 of 3, of which no other comes. The store is kept here, as by a host that is no rank."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("start 1", dist.TCPStore("127.0.0.1", kept.port, is_master=False))
    try:
        pd.Topology(rank=1, world_size=3, dp_size=3).connect(timeout_s=1.0, store=store)
    except pd.RankLost as error:
        return str(error)
    return "it met somebody"


def test_the_error_of_a_rank_that_waits_in_vain_names_the_others() -> None:
    assert apart(meet_alone) == "rank 1 of 3 could not meet the others: of 3 ranks 2 have not come: 0, 2"
