"""Ranks on a CUDA device give the tokens of one rank on the CPU.

All of them share one card here, which NCCL refuses, so gloo carries their tensors: what is seen is that ranks run on a
device at all, where their tensors lie, and that they agree; not NCCL's order of calls, and no speed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pdinfer as pd
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e import rank_jobs
from tests.e2e.rank_worlds import Sizes, serving
from tests.e2e.setups import prompt_of
from tests.e2e.test_rank_engines import check_ended, serve_all
from tests.ranks import Ranks

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [prompt_of(length, seed=length) for length in (9, 1, 23)]
LOGITS_CLOSE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_config_dict("v3", num_nextn_predict_layers=1), mtp=True)
    return folder


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2, "ep_size": 1}, {"ep_size": 2}], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_logits_of_two_ranks(ranks: Ranks, folder: Path, place: str, sizes: Sizes) -> None:
    prompts = [list(prompt) for prompt in PROMPTS]
    (alone,) = rank_jobs.logits([str(folder)], {}, prompts, mtp=True)
    for (told,) in ranks.run(
        "tests.e2e.rank_jobs:logits", 2, [str(folder)], dict(sizes), prompts, mtp=True, device=place
    ):
        for ours, wanted in zip([*told["logits"], told["mtp"]], [*alone["logits"], alone["mtp"]], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(wanted), rtol=LOGITS_CLOSE, atol=LOGITS_CLOSE)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_draft_tokens"),
    [
        ({"dp_size": 2, "ep_size": 2}, {"dp_size": 2, "ep_size": 2}, 2),
        ({"tp_size": 2}, {}, 0),
        ({"cp_size": 2}, {"tp_size": 2}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", PLACES)
def test_engines_of_two_ranks(
    ranks: Ranks, folder: Path, place: str, prefill: Sizes, decode: Sizes, num_draft_tokens: int
) -> None:
    with serving(
        ranks,
        prefill,
        decode,
        checkpoint=str(folder),
        device=place,
        chunked_prefill_size=16,
        mtp=num_draft_tokens > 0,
        num_draft_tokens=num_draft_tokens,
    ) as world:
        serve_all(world.pairing, pd.load_model(folder, dtype=torch.float32), PROMPTS)
    check_ended(world)
