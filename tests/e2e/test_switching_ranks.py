"""Engines that run as ranks change their role together: the tokens are those of one rank that never changed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.rank_worlds import Sizes, serving
from tests.e2e.test_rank_engines import PROMPTS, Checkpoint, serve_all
from tests.each_time import others_in_full
from tests.ranks import Ranks

WORLDS: dict[str, tuple[Sizes, Sizes, int]] = {
    "batch": ({"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, 0),
    "batch-drafts": ({"tp_size": 2}, {"tp_size": 2}, 2),
    "one-side": ({}, {"tp_size": 2, "ep_size": 2}, 0),
    "context": ({"cp_size": 2}, {}, 0),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_config_dict("v3", num_hidden_layers=2, num_nextn_predict_layers=1), mtp=True)
    return Checkpoint(str(folder), pd.load_model(folder, dtype=torch.float32))


def switch(pairing: pd.Pairing, port: Any, role: str) -> Any:
    return pairing.switch(port, role, drain_s=30.0, leaves_none=True)


@pytest.mark.parametrize("name", others_in_full(WORLDS, ["batch"]))
def test_ranks_change_their_role_and_back(ranks: Ranks, checkpoint: Checkpoint, name: str) -> None:
    prefill, decode, num_drafts = WORLDS[name]
    with serving(
        ranks,
        prefill,
        decode,
        checkpoint=checkpoint.folder,
        mtp=num_drafts > 0,
        num_draft_tokens=num_drafts,
    ) as world:
        for number in range(3):
            serve_all(world.pairing, checkpoint.model, PROMPTS)
            if number < 2:  # all change places
                for port, role in zip(world.pairing.ports, ("prefill", "decode"), strict=True):
                    switch(world.pairing, port, role)
        for port in world.pairing.ports:
            assert port.load().prefix_hit_tokens, "what ranks computed in either role is found"
        assert world.pairing.stats.num_switches == 4
        assert world.pairing.stats.num_ports_lost == 0
    assert not any(value["left"] for value in world.values)


def test_a_rank_that_dies_before_the_change_is_a_loss_that_all_learn_of(ranks: Ranks, checkpoint: Checkpoint) -> None:
    with serving(ranks, {"tp_size": 2}, {}, checkpoint=checkpoint.folder) as world:
        follower = ranks.workers[1].process
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGKILL)
        with pytest.raises(pd.TransferError):
            switch(world.pairing, world.prefills[0], "decode")
        assert [port.role for port in world.pairing.ports] == ["decode"]
    assert [outcome.error for outcome in world.outcomes] == ["RankLost", "Died", ""]


def test_one_of_several_leaders_keeps_its_role(ranks: Ranks, checkpoint: Checkpoint) -> None:
    with serving(ranks, {}, {"dp_size": 2}, checkpoint=checkpoint.folder) as world:
        with pytest.raises(pd.ConfigError, match="cannot become 'prefill'; it can become nothing"):
            switch(world.pairing, world.decodes[0], "prefill")
        serve_all(world.pairing, checkpoint.model, PROMPTS)
