"""Experts change places while engines run: tokens stay the same, and what goes wrong leaves the old placement."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.rank_worlds import serving
from tests.e2e.setups import Tally, by_request, collect, greedy, prompt_of
from tests.packed import SCHEMES, with_twin
from tests.ranks import Ranks
from tests.waiting import TIMEOUT_S

JOBS = "tests.e2e.rebalance_jobs:"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_config_dict("v3"))
    return str(folder)


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """A model that routes as Kimi-K2 does, packed by each scheme, and the twins."""
    floats = tmp_path_factory.mktemp("packed") / "k2"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 24}
    write_checkpoint(floats, tiny_config_dict("v3-ungrouped", model_type="kimi_k2", **sizes))
    return {scheme: (str(packed), str(twin)) for scheme in SCHEMES for packed, twin in [with_twin(floats, scheme)]}


def rebalance_under_load(
    ranks: Ranks,
    checkpoint: str,
    size: int,
    redundant: int,
    count: int,
    twin: str = "",
    job: str = f"{JOBS}serve_rank",
    **config: Any,
) -> list[dict[str, Any]]:
    """Give placements to decode's ranks, while prefill's ask a solver that is killed at the first request. Tokens are
    those of `twin`, if there is one. Return what ranks tell."""
    sizes = {"dp_size": size, "ep_size": size}
    config |= {"count": count, "redundant": redundant, "rebalance_bytes_per_step": 80_000}
    requests, events = [], []
    with serving(ranks, sizes, sizes, checkpoint=checkpoint, job=job, **config) as world:
        numbers = itertools.count()

        def submit() -> None:
            number = next(numbers)
            prompt = prompt_of((9, 1, 23, 40, 5)[number % 5], seed=number)
            request = pd.Request(
                request_id=str(number), prompt=prompt, sampling=greedy(3 + number % 9, ignore_eos=True)
            )
            requests.append(request)
            world.pairing.submit(request)

        def epoch(ports: Sequence[Any]) -> int:
            return min(port.load().placement_epoch for port in ports)

        end = time.monotonic() + TIMEOUT_S
        while epoch(world.decodes) < count or epoch(world.prefills) < 1:
            assert time.monotonic() < end, f"{len(requests)} requests, and placements are still missing"
            most = 6 if epoch(world.decodes) < count else 1  # and the rest of a small machine for the solver
            while world.pairing.num_unfinished < most:
                submit()
            events += world.pairing.step()
            world.pairing.wait(0.05)
        events += collect(world.pairing, timeout_s=TIMEOUT_S)
    for role, least in (("prefill", 1), ("decode", count)):
        ended = [value for value in world.values if value["role"] == role]
        assert all(value["alike"] == ended[0]["alike"] for value in ended)
        epochs, error, _ = ended[0]["alike"]
        assert epochs >= least
        assert error == ""
        assert sum(value["killed"] for value in ended) == (role == "prefill")
        print(f"{role}: {epochs} placements in {len(requests)} requests")
    model = pd.load_model(twin or checkpoint, dtype=torch.float32)
    tally = Tally()
    tally.compare_all(model, requests, by_request(events))
    tally.check()
    return world.values


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.full)])
def test_tokens_stay_the_same_while_experts_move(ranks: Ranks, checkpoint: str, count: int) -> None:
    rebalance_under_load(ranks, checkpoint, size=2, redundant=2, count=count)


@pytest.mark.full
def test_tokens_stay_the_same_while_experts_move_between_four_ranks(ranks: Ranks, checkpoint: str) -> None:
    rebalance_under_load(ranks, checkpoint, size=4, redundant=4, count=50)


@pytest.mark.full
def test_tokens_stay_the_same_while_experts_in_four_bits_move(
    ranks: Ranks, four_bits: dict[str, tuple[str, str]]
) -> None:
    packed, twin = four_bits["int4"]
    rebalance_under_load(ranks, packed, size=2, redundant=4, count=12, twin=twin)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_stay_the_same_after_experts_in_four_bits_moved(
    ranks: Ranks, four_bits: dict[str, tuple[str, str]], scheme: str, tmp_path: Path
) -> None:
    (packed, twin), prompt = four_bits[scheme], list(prompt_of(23))
    expected = pd.load_model(twin, dtype=torch.float32).logits(prompt)
    for logits in ranks.run(f"{JOBS}logits_after_moves", 2, packed, str(tmp_path), prompt):
        torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-4)


def test_ranks_that_disagree_wait_and_can_cancel(ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    for told in ranks.run(f"{JOBS}stage_and_cancel", 2, checkpoint, str(tmp_path)):
        alone, different, cancelled, together = told["seen"]
        assert alone in ([0, True, False], [0, False, False])
        assert different == [0, True, False]
        assert cancelled == [0, False, False]
        assert together == [1, False, False]
        assert told["same"]
        assert told["agreements"] > 4  # an expert per step


def test_an_error_in_the_middle_leaves_the_old_placement(ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    first, second = ranks.run(f"{JOBS}fail_in_the_middle", 2, checkpoint, str(tmp_path))
    for told in (first, second):
        assert told["untouched"]
        assert told["epochs"] == [0, 1]
        assert told["error_after"] == ""
        assert told["parts"][:2] == [0, 1]
    assert first["error"] == "rank 1 could not go on with it; its log says why"
    assert second["error"].startswith("MemoryError: ")


def test_counts_are_added_up_when_a_rank_asks(ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    for told in ranks.run(f"{JOBS}add_up", 2, checkpoint, str(tmp_path)):
        assert told == {"load": [[3] * 8] * 2, "staged": False}
