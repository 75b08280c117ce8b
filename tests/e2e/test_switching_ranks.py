"""Engines that run as ranks change their role together: the tokens are those of one rank that never changed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.rank_worlds import Sizes, serving
from tests.e2e.setups import Tally, by_request, collect, greedy, pool_of, prompt_of
from tests.e2e.test_rank_engines import PROMPTS, Checkpoint, serve_all
from tests.each_time import others_in_full
from tests.ranks import Ranks

WORLDS: dict[str, tuple[Sizes, Sizes, int]] = {
    "batch": ({"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, 0),
    "batch-drafts": ({"tp_size": 2}, {"tp_size": 2}, 2),
    "one-side": ({}, {"tp_size": 2, "ep_size": 2}, 0),
    "context": ({"cp_size": 2}, {}, 0),
    "leaders": ({"dp_size": 2}, {}, 0),
    "leaders-drafts": ({"dp_size": 2, "ep_size": 2}, {"dp_size": 2, "tp_size": 2}, 2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_config_dict("v3", num_hidden_layers=2, num_nextn_predict_layers=1), mtp=True)
    return Checkpoint(str(folder), pd.load_model(folder, dtype=torch.float32))


def switch(pairing: pd.Pairing, port: Any, role: str) -> Any:
    return pairing.switch(port, role, drain_s=30.0, leaves_none=True)


@pytest.mark.parametrize("name", others_in_full(WORLDS, ["batch", "leaders"]))
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
                firsts = {port.role: port for port in world.pairing.ports}
                for role, port in (("prefill", firsts["decode"]), ("decode", firsts["prefill"])):
                    assert switch(world.pairing, port, role).address == port.address
        for port in world.pairing.ports if len(world.pairing.ports) == 2 else ():  # otherwise others may have it
            assert port.load().prefix_hit_tokens, "what ranks computed in either role is found"
        assert world.pairing.stats.num_switches == 2 * len(world.pairing.ports)
        assert world.pairing.stats.num_ports_lost == 0
    assert not any(value["left"] for value in world.values)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_drafts", "sizes"), [(0, {"tp_size": 2}), (2, {"tp_size": 2}), (0, {"dp_size": 2}), (2, {"dp_size": 2})]
)
def test_ranks_change_their_role_under_requests(
    ranks: Ranks, checkpoint: Checkpoint, tmp_path: Path, num_drafts: int, sizes: Sizes
) -> None:
    """Engines of one rank serve beside them, and take what is not drained in time."""
    rng = random.Random(num_drafts)
    model = pd.load_model(checkpoint.folder, dtype=torch.float32, mtp=num_drafts > 0)
    more: Any = {"checkpoint": checkpoint.folder, "mtp": num_drafts > 0, "num_draft_tokens": num_drafts}
    with serving(ranks, sizes, {**sizes, "ep_size": 2}, **more) as world:
        pairing, stay = world.pairing, []
        for kind in (pd.PrefillEngine, pd.DecodeEngine):
            end = pd.KVChannel(pool_of(model, num_pages=128), pd.kv.SocketTransport(path=tmp_path / kind.role))
            stay.append(kind(model, end, pd.EngineConfig(num_draft_tokens=num_drafts)))
            pairing.add(stay[-1])
        for at in range(16):
            asked = [
                pd.Request(
                    request_id=f"{at} {number}",
                    prompt=prompt_of(rng.randint(1, 30), seed=rng.randint(0, 5)),
                    sampling=greedy(rng.randint(3, 12), ignore_eos=True),
                )
                for number in range(8)
            ]
            for request in asked:
                pairing.submit(request)
            events = [event for _ in range(rng.randint(0, 12)) for event in pairing.step()]
            port = rng.choice([port for port in pairing.ports if port not in stay])
            role = {"prefill": "decode", "decode": "prefill"}[port.role]
            for _ in pairing.switching(port, role, drain_s=rng.choice([0.0, 0.0, 0.3, 30.0])):
                events += pairing.step()
                pairing.wait(0.02)
            tally = Tally()
            tally.compare_all(model, asked, by_request(events + collect(pairing)))
            tally.check()
        assert (pairing.stats.num_switches, pairing.stats.num_ports_lost) == (16 * sizes.get("dp_size", 1), 0)
    assert not any(value["left"] for value in world.values)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2}], ids=str)
def test_a_rank_that_dies_before_the_change_is_a_loss_that_all_learn_of(
    ranks: Ranks, checkpoint: Checkpoint, sizes: Sizes
) -> None:
    with serving(ranks, sizes, {}, checkpoint=checkpoint.folder) as world:
        follower = ranks.workers[1].process
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGKILL)
        with pytest.raises(pd.TransferError):
            switch(world.pairing, world.prefills[0], "decode")
        assert [port.role for port in world.pairing.ports] == ["decode"]
    assert [outcome.error for outcome in world.outcomes] == ["RankLost", "Died", ""]


def test_leaders_change_together_or_not_at_all(ranks: Ranks, checkpoint: Checkpoint) -> None:
    with serving(ranks, {}, {"dp_size": 2}, checkpoint=checkpoint.folder) as world:
        pairing, (one, other) = world.pairing, world.decodes
        assert [{*group} for group in pairing.stats.together] == [{one.address, other.address}]
        given_up = pairing.switching(one, "prefill", drain_s=30.0, leaves_none=True)
        pairing.submit(pd.Request(prompt=(1, 2, 3), sampling=greedy(4, ignore_eos=True)))
        pairing.step()
        next(given_up)
        with pytest.raises(pd.ConfigError, match="leaves already"):
            switch(pairing, other, "prefill")
        given_up.close()
        with pytest.raises(pd.ConfigError, match="there is no decode port, and no request is served"):
            pairing.switch(one, "prefill", drain_s=0.0)
        serve_all(pairing, checkpoint.model, PROMPTS)
        pairing.remove(other, drain_s=30.0)
        with pytest.raises(pd.ConfigError, match="together with the other leaders of its ranks"):
            switch(pairing, one, "prefill")
        pairing.add(other)
        serve_all(pairing, checkpoint.model, PROMPTS)
        assert pairing.stats.num_switches == pairing.stats.num_ports_lost == 0
    assert not any(value["left"] for value in world.values)
