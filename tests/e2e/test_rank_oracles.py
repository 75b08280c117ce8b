"""Every kind of model through engines that run as ranks: 32 greedy tokens behind prompts of any length are those that
`Model.logits` gives in float32, and that is compared with transformers in tests/unit/model/test_model.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.rank_worlds import Sizes, serving
from tests.e2e.setups import Tally, by_request, collect, greedy, prompt_of
from tests.packed import SCHEMES, with_twin
from tests.ranks import Ranks

PROMPTS = [prompt_of(length, seed=length) for length in (1, 7, 64, 257)]
COUNT = 32
WORLDS: list[tuple[Sizes, Sizes]] = [
    ({"dp_size": 2, "ep_size": 2}, {"dp_size": 4, "ep_size": 4}),
    ({"cp_size": 2}, {"dp_size": 2}),
    ({"tp_size": 2}, {}),
    ({}, {"tp_size": 2, "ep_size": 2}),
    ({"cp_size": 2, "tp_size": 2, "ep_size": 4}, {"dp_size": 2, "ep_size": 2}),
]


@attrs.frozen(kw_only=True)
class Kind:
    """What a checkpoint is made of, and how it is loaded. Weights of a `scheme` are read as floats, and kept where that
    is in four bits."""

    family: str
    more: Mapping[str, Any] = attrs.field(factory=dict)
    scheme: str = ""
    num_draft_tokens: int = 0

    @property
    def mtp(self) -> bool:
        return self.num_draft_tokens > 0


EDGES = {"hidden_size": 200, "intermediate_size": 304, "moe_intermediate_size": 136, "q_lora_rank": 136}
"""No multiple of a block of 128: ranks divide matrices inside blocks, and blocks at the edge are partial."""
GROUPS = {"hidden_size": 64, "moe_intermediate_size": 96, "n_routed_experts": 24}
KINDS = {
    "V3": Kind(family="v3"),
    "V3, odd sizes": Kind(family="v3-ungrouped", more={"n_routed_experts": 12, "vocab_size": 333, "v_head_dim": 14}),
    "V2 without a query latent": Kind(family="v2-lite"),
    "V2 limited to groups": Kind(family="v2"),
    "YaRN": Kind(family="v3-yarn"),
    "sparse attention": Kind(family="v32"),
    "sparse attention, shared indexers": Kind(family="glm"),
    "MTP": Kind(family="v3", num_draft_tokens=3),
    "FP8 as floats": Kind(family="v3", more=EDGES, scheme="fp8"),
    "Kimi-K2 in INT4": Kind(family="v3-ungrouped", more=GROUPS, scheme="int4"),
    "sparse attention, experts in MXFP4, MTP": Kind(family="v32", more=GROUPS, scheme="mxfp4", num_draft_tokens=2),
    "all at once": Kind(
        family="v32",
        more={"rope_scaling": tiny_config_dict("v3-yarn")["rope_scaling"]},
        scheme="fp8",
        num_draft_tokens=2,
    ),
}


@attrs.frozen
class Oracle:
    """A checkpoint, and the model of the same numbers in floats as one rank has it."""

    folder: str
    model: pd.Model


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Of a kind; kept as long as the next tests are of the same."""
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp("oracle")
    more = {"num_nextn_predict_layers": 1} if kind.mtp else {}
    write_checkpoint(folder / "floats", tiny_config_dict(kind.family, **more, **kind.more), mtp=kind.mtp)
    chosen = twin = folder / "floats"
    if kind.scheme in SCHEMES:
        chosen, twin = with_twin(folder / "floats", kind.scheme)
    elif kind.scheme:
        chosen = twin = folder / kind.scheme
        quantize_checkpoint(folder / "floats", chosen, scheme=kind.scheme)
    return Oracle(str(chosen), pd.load_model(twin, dtype=torch.float32, weights="float"))


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]} -> {world[1]}")
@pytest.mark.parametrize(
    ("kind", "oracle"), [(kind, kind) for kind in KINDS.values()], ids=list(KINDS), indirect=["oracle"]
)
def test_ranks_give_what_the_whole_model_gives(
    ranks: Ranks, kind: Kind, oracle: Oracle, world: tuple[Sizes, Sizes]
) -> None:
    prefill, decode = world
    asked = [
        pd.Request(request_id=f"{len(prompt)} tokens", prompt=prompt, sampling=greedy(COUNT, ignore_eos=True))
        for prompt in PROMPTS
    ]
    with serving(
        ranks,
        prefill,
        decode,
        checkpoint=oracle.folder,
        chunked_prefill_size=96,
        num_pages=256,
        weights="stored" if kind.scheme in SCHEMES else "float",
        mtp=kind.mtp,
        num_draft_tokens=kind.num_draft_tokens,
    ) as serves:
        for request in asked:
            serves.pairing.submit(request)
        streams = by_request(collect(serves.pairing))
        drafted = sum(port.load().num_draft_tokens for port in serves.decodes)
    tally = Tally()
    tally.compare_all(oracle.model, asked, streams)
    assert len(tally.near_ties) <= 1, tally.near_ties
    assert tally.near_ties or tally.num_tokens == COUNT * len(PROMPTS)
    assert (drafted > 0) is kind.mtp
