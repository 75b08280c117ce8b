"""Ranks on devices give the tokens of one rank on the CPU, and say what they lost.

On "cards", of which every rank of an engine has one, NCCL carries their tensors. Elsewhere gloo does: on the simulated
devices its collectives are queued as those of NCCL are, and on one card, which NCCL refuses to share, ranks meet on the
host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e import rank_jobs
from tests.e2e.rank_worlds import Sizes, World, serving, size_of
from tests.e2e.setups import collect, greedy, prompt_of
from tests.e2e.test_rank_engines import check_ended, serve_all
from tests.e2e.test_rebalancing import rebalance_under_load
from tests.ranks import Ranks
from tests.simulated.device import why_not

PROMPTS = [prompt_of(length, seed=length) for length in (9, 1, 23, 40, 5, 14, 3, 30)]
LOGITS_CLOSE = 1e-3


@attrs.frozen
class Place:
    """Where ranks run: the jobs that serve, rebalance and move experts there, and what these are told."""

    serve: str = "tests.e2e.rank_worlds:serve_rank"
    rebalance: str = "tests.e2e.rebalance_jobs:serve_rank"
    move: str = "tests.e2e.rebalance_jobs:logits_after_moves"
    config: Mapping[str, Any] = attrs.field(factory=dict)

    def check(self, world: World, *, captured: bool) -> None:
        """Check how ranks ended, and whether steps of decode were captured."""
        check_ended(world)
        assert not any(value.get("faults") for value in world.values)
        graphs = [value["graphs"] for value in world.values if value["role"] == "decode"]
        assert [bool(each.get("")) for each in graphs] == [captured] * len(graphs), graphs


ALL_TO_ALL = {"moe_a2a_backend": "all_to_all"}
"""Experts as collectives reach them, which is what cards without DeepEP have."""
JOBS = "tests.device.rank_jobs:"
SIMULATED = Place(f"{JOBS}serve_rank", f"{JOBS}rebalance", f"{JOBS}logits_after_moves")
CARDS = Place(config={"device": "cuda:*", "backend": "cpu:gloo,cuda:nccl", "warm_up": True})
ONE_CARD = Place(config={"device": "cuda", "warm_up": True})
ON_CARDS = pytest.param(CARDS, id="cards", marks=pytest.mark.gpu)
OF_THEIR_OWN = [pytest.param(SIMULATED, id="simulated"), ON_CARDS]
PLACES = [*OF_THEIR_OWN, pytest.param(ONE_CARD, id="one card", marks=pytest.mark.gpu)]

WORLDS: list[tuple[Sizes, Sizes, int]] = [
    ({"dp_size": 2, "ep_size": 2}, {"dp_size": 2, "ep_size": 2}, 2),
    ({"tp_size": 2}, {}, 0),
    ({"cp_size": 2}, {"tp_size": 2}, 2),
]
"""The sizes of prefill and of decode, and how many tokens are drafted."""
LARGER: list[tuple[Sizes, Sizes, int]] = [
    ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, {"dp_size": 4, "ep_size": 4}, 2),
    ({"dp_size": 8, "ep_size": 8}, {"dp_size": 4, "tp_size": 2, "ep_size": 8}, 2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_config_dict("v3", num_nextn_predict_layers=1), mtp=True)
    return folder


def need(place: Place, num_ranks: int) -> None:
    """Skip the test where there are no such devices."""
    if place is SIMULATED and (reason := why_not()):
        pytest.skip(reason)
    if place is CARDS and (count := torch.cuda.device_count()) < num_ranks:
        pytest.skip(f"{num_ranks} ranks over NCCL need as many cards, and there are {count}")


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2, "ep_size": 1}, {"ep_size": 2}], ids=str)
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_of_two_ranks(ranks: Ranks, folder: Path, place: str, sizes: Sizes) -> None:
    prompts = [list(prompt) for prompt in PROMPTS[:3]]
    (alone,) = rank_jobs.logits([str(folder)], {}, prompts, mtp=True)
    for (told,) in ranks.run(
        "tests.e2e.rank_jobs:logits", 2, [str(folder)], dict(sizes), prompts, mtp=True, device=place
    ):
        for ours, wanted in zip([*told["logits"], told["mtp"]], [*alone["logits"], alone["mtp"]], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(wanted), rtol=LOGITS_CLOSE, atol=LOGITS_CLOSE)


@pytest.mark.parametrize(("prefill", "decode", "num_draft_tokens"), WORLDS, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_engines_of_two_ranks(
    ranks: Ranks, folder: Path, place: Place, prefill: Sizes, decode: Sizes, num_draft_tokens: int
) -> None:
    num_ranks = max(size_of(prefill), size_of(decode))
    need(place, num_ranks)
    with serving(
        ranks,
        prefill,
        decode,
        checkpoint=str(folder),
        job=place.serve,
        chunked_prefill_size=16,
        max_running_requests=8,
        graph_batch_sizes=[1, 4],
        mtp=num_draft_tokens > 0,
        num_draft_tokens=num_draft_tokens,
        **place.config,
        **({"experts": ALL_TO_ALL} if place is SIMULATED else {}),
    ) as world:
        serve_all(world.pairing, pd.load_model(folder, dtype=torch.float32), PROMPTS[: max(3, num_ranks)])
        drafted = sum(port.load().num_draft_tokens for port in world.decodes)
    assert (drafted > 0) is (num_draft_tokens > 0)
    # gloo meets on the host, and so do ranks that send rows to experts without DeepEP
    place.check(world, captured="ep_size" not in decode and (place is not ONE_CARD or not decode))


@pytest.mark.parametrize(("prefill", "decode", "num_draft_tokens"), LARGER, ids=str)
@pytest.mark.parametrize("place", [pytest.param(SIMULATED, id="simulated", marks=pytest.mark.full), ON_CARDS])
def test_engines_of_more_ranks(
    ranks: Ranks, folder: Path, place: Place, prefill: Sizes, decode: Sizes, num_draft_tokens: int
) -> None:
    test_engines_of_two_ranks(ranks, folder, place, prefill, decode, num_draft_tokens)


@pytest.mark.parametrize("place", OF_THEIR_OWN)
def test_experts_that_moved_give_the_same_logits(ranks: Ranks, folder: Path, place: Place, tmp_path: Path) -> None:
    need(place, 2)
    prompt = list(PROMPTS[2])
    wanted = pd.load_model(folder, dtype=torch.float32).logits(prompt)
    limits = {"max_running_requests": 8, "graph_batch_sizes": []}
    for logits in ranks.run(place.move, 2, str(folder), str(tmp_path), prompt, **place.config, **limits):
        torch.testing.assert_close(torch.tensor(logits), wanted, rtol=LOGITS_CLOSE, atol=LOGITS_CLOSE)


@pytest.mark.parametrize(
    ("place", "size"),
    [
        *(pytest.param(SIMULATED, size, id=f"simulated-{size}", marks=pytest.mark.full) for size in (2, 4)),
        *(pytest.param(CARDS, size, id=f"cards-{size}", marks=pytest.mark.gpu) for size in (2, 4, 8)),
    ],
)
def test_experts_move_while_ranks_serve(ranks: Ranks, folder: Path, place: Place, size: int) -> None:
    """The simulated devices replay captured steps meanwhile: weights and tables change in place."""
    need(place, size)
    told = rebalance_under_load(
        ranks,
        str(folder),
        size,
        redundant=size,
        count=3,
        job=place.rebalance,
        chunked_prefill_size=16,
        max_running_requests=8,
        graph_batch_sizes=[1, 4],
        **place.config,
    )
    assert not any(value.get("faults") for value in told)
    if place is SIMULATED:
        assert all(value["graphs"].keys() == {""} for value in told if value["role"] == "decode")


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"dp_size": 2, "ep_size": 2}], ids=str)
@pytest.mark.parametrize("place", OF_THEIR_OWN)
def test_a_rank_that_is_killed_is_missed(ranks: Ranks, folder: Path, place: Place, sizes: Sizes) -> None:
    """At once, by the end of its connections, where the host waits for it. torch's watchdog ends who waits for it in a
    kernel of NCCL."""
    need(place, 2)
    with serving(
        ranks,
        {},
        sizes,
        checkpoint=str(folder),
        job=place.serve,
        fault=("decode", 1, "kill"),
        max_running_requests=8,
        graph_batch_sizes=[],
        **place.config,
    ) as world:
        names = {world.pairing.submit(pd.Request(prompt=prompt, sampling=greedy(20))) for prompt in PROMPTS[:3]}
        ends = {event.request_id: event for event in collect(world.pairing) if event.finish_reason is not None}
    assert ends.keys() == names
    assert pd.FinishReason.FAILED in {event.finish_reason for event in ends.values()}
    prefill, other, killed = world.outcomes
    assert (prefill.error, killed.error, killed.message) == ("", "Died", "exit code -9")
    if place is CARDS and "ep_size" in sizes and other.error == "Died":
        assert other.message == "exit code -6"
        return
    assert other.error == "RankLost"
    assert "start all ranks anew" in other.message
    assert "imed out" not in other.message
