"""Experts that are spread over ranks, with copies and without, give the logits of one rank that has them all."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.errors import ConfigError
from pdinfer.testing import tiny_config, tiny_config_dict, write_checkpoint
from tests.e2e import expert_jobs
from tests.packed import SCHEMES, changed, ignoring, unpack, with_twin
from tests.ranks import Ranks
from tests.slices import one_in

EXPERTS, MOE_LAYERS = 8, 2
# of different lengths: ranks have different numbers of tokens, and some have none for some others
PROMPTS = [[[7, 3, 90, 12, 55, 41, 3], [5]], [[1], [30, 20, 10]], [[17, 4], [61] * 9], [[88, 2, 9, 9, 14], [33, 33]]]
NEXT_TOKEN = 42


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in each format, and a model that routes as Kimi-K2 does in four bits, with its twins."""
    root = tmp_path_factory.mktemp("experts")
    write_checkpoint(root / "float", tiny_config_dict(num_nextn_predict_layers=1), mtp=True)
    for scheme in ("fp8", "w8a8_dynamic"):
        quantize_checkpoint(root / "float", root / scheme, scheme=scheme)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_nextn_predict_layers": 1}
    write_checkpoint(root / "v3", tiny_config_dict(**sizes), mtp=True)
    write_checkpoint(root / "k2", tiny_config_dict("v3-ungrouped", model_type="kimi_k2", n_routed_experts=24, **sizes))
    for scheme in SCHEMES:
        with_twin(root / "v3", scheme)
        with_twin(root / "k2", scheme)
    return {path.name: path for path in root.iterdir()}


def scattered(num_ranks: int, num_slots: int, *, layers: int = MOE_LAYERS) -> list[list[int]]:
    """Any placement in which no rank has an expert twice."""
    random = np.random.default_rng(7)
    rows = []
    while len(rows) < layers:
        more = random.integers(0, EXPERTS, num_slots - EXPERTS)
        row = random.permutation(np.concatenate([np.arange(EXPERTS), more]))
        if all(len(set(part)) == len(part) for part in row.reshape(num_ranks, -1).tolist()):
            rows.append(row.tolist())
    return rows


def doubled(num_ranks: int, num_slots: int, *, layers: int = MOE_LAYERS) -> list[list[int]]:
    """A placement whose slots beyond one per expert all hold the same expert: the last rank has it several times."""
    free = num_slots - EXPERTS
    rows = [np.concatenate([np.roll(np.arange(EXPERTS), layer), [layer] * free]) for layer in range(layers)]
    assert any(len(set(row[-(num_slots // num_ranks) :].tolist())) < num_slots // num_ranks for row in rows)
    return [row.tolist() for row in rows]


CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "2": (2, "float", {}, {}),
    "4, copies, dynamic": (
        4,
        "float",
        {},
        {"experts": {"num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic"}},
    ),
    "4, scattered, nearest, MTP": (
        4,
        "float",
        {},
        {
            "placement": scattered(4, 12, layers=MOE_LAYERS + 1),
            "experts": {"ep_dispatch_algorithm": "nearest", "ranks_per_node": 2},
            "next_token": NEXT_TOKEN,
        },
    ),
    "4, of two engines' worth": (4, "float", {"ep_size": 2}, {"placement": scattered(2, 10)}),
    "4, tensor parallel too, two batches": (
        4,
        "float",
        {"tp_size": 2},
        {"placement": scattered(4, 16), "experts": {"two_batch_overlap": True}},
    ),
    "2, context parallel": (2, "float", {"cp_size": 2}, {"placement": scattered(2, 10)}),
    "2, FP8": (2, "fp8", {}, {"placement": scattered(2, 10), "weights": "stored"}),
    "4, INT8": (4, "w8a8_dynamic", {}, {"placement": scattered(4, 12), "weights": "stored"}),
    "4, INT4": (4, "v3-int4", {}, {"placement": scattered(4, 12), "weights": "stored"}),
    "4, twice on a rank, two batches, MTP, MXFP4": (
        4,
        "v3-mxfp4",
        {"tp_size": 2},
        {
            "placement": doubled(4, 16, layers=MOE_LAYERS + 1),
            "weights": "auto",
            "experts": {"two_batch_overlap": True},
            "next_token": NEXT_TOKEN,
        },
    ),
    "4, Kimi-K2 in INT4, copies, dynamic": (
        4,
        "k2-int4",
        {},
        {"experts": {"num_redundant_experts": 8, "ep_dispatch_algorithm": "dynamic"}, "weights": "auto"},
    ),
    "2, context parallel, Kimi-K2 in MXFP4": (2, "k2-mxfp4", {"cp_size": 2}, {"weights": "float"}),
    "2, twice on a rank, dynamic, FP8": (
        2,
        "fp8",
        {},
        {"placement": doubled(2, 12), "weights": "stored", "experts": {"ep_dispatch_algorithm": "dynamic"}},
    ),
    "4, twice on a rank, nearest, MTP, two batches": (
        4,
        "float",
        {},
        {
            "placement": doubled(4, 16, layers=MOE_LAYERS + 1),
            "experts": {"ep_dispatch_algorithm": "nearest", "ranks_per_node": 2, "two_batch_overlap": True},
            "next_token": NEXT_TOKEN,
        },
    ),
    "4, INT8 rows, two batches": (
        4,
        "w8a8_dynamic",
        {},
        {"weights": "stored", "experts": {"moe_a2a_backend": "all_to_all_int8", "two_batch_overlap": True}},
    ),
}


@functools.cache
def whole(folder: Path, weights: str, mtp: bool) -> pd.Model:
    """The model on one rank."""
    return pd.load_model(folder, dtype=torch.float32, weights=weights, mtp=mtp)


@pytest.mark.parametrize("case", one_in(2, CASES))
def test_logits_are_those_of_one_rank(ranks: Ranks, folders: dict[str, Path], case: str) -> None:
    world_size, stored, topology, options = CASES[case]
    folder = folders[stored]
    got = ranks.run("tests.e2e.expert_jobs:expert_logits", world_size, str(folder), topology, PROMPTS, **options)
    weights, next_token = options.get("weights", "float"), options.get("next_token")
    twin = folders.get(f"{stored}-twin", folder)
    model = whole(twin, weights, next_token is not None)
    for rank, of_rank in enumerate(got):
        prompts = PROMPTS[rank // (topology.get("tp_size", 1) * topology.get("cp_size", 1))]
        expected = [model.logits(prompt) for prompt in prompts]
        if next_token is not None:
            expected += [model.mtp_logits(prompt, next_token) for prompt in prompts]
        for data, logits in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(floats(data).view_as(logits), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["auto", "float"])
def test_experts_that_ranks_would_hold_differently_become_floats_or_are_refused(
    ranks: Ranks, folders: dict[str, Path], tmp_path: Path, weights: str
) -> None:
    """Those of one rank are packed, and those of the other are not. Ranks give each other experts as they lie."""

    def unpack_those(tensors: dict[str, Tensor]) -> None:
        those = {name: tensors.pop(name) for name in list(tensors) if re.search(r"\.experts\.[4-7]\.", name)}
        unpack(those)
        tensors |= those

    ignored = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*experts\.(4|5|6|7)\..*")
    folder = changed(folders["v3-int4"], tmp_path / "mixed", unpack_those, lambda config: ignoring(config, *ignored))
    outcomes = ranks.outcomes("tests.e2e.expert_jobs:expert_logits", 2, str(folder), {}, PROMPTS, weights=weights)
    if weights == "float":
        twin = pd.load_model(folders["v3-int4-twin"], dtype=torch.float32)
        for outcome, prompts in zip(outcomes, PROMPTS, strict=False):
            for data, prompt in zip(outcome.value, prompts, strict=True):
                logits = twin.logits(prompt)
                torch.testing.assert_close(floats(data).view_as(logits), logits, rtol=1e-4, atol=1e-4)
    else:
        assert [outcome.error for outcome in outcomes] == ["CheckpointError", "CheckpointError"]
        for outcome in outcomes:
            assert re.search(r"experts\.[4-7]\.gate_proj\.weight as FLOAT", outcome.message)
            assert re.search(r"experts\.[0-3]\.gate_proj\.weight as INT4", outcome.message)
            assert 'load with weights="float"' in outcome.message


def floats(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


@pytest.mark.parametrize(
    ("tables", "num_redundant"),
    [([None, scattered(2, 8)], [0, 0]), ([None, None], [0, 2])],
    ids=["placements", "options"],
)
def test_ranks_that_place_experts_differently_are_refused(
    ranks: Ranks, folders: dict[str, Path], tables: list[Any], num_redundant: list[int]
) -> None:
    outcomes = ranks.outcomes("tests.e2e.expert_jobs:load_with", 2, str(folders["float"]), tables, num_redundant)
    assert [outcome.error for outcome in outcomes] == ["ConfigError", "ConfigError"]
    assert "rank 0 has another expert placement, or other options for experts, than ranks 1" in outcomes[0].message


@pytest.mark.parametrize(
    ("placement", "experts", "sizes", "told"),
    [
        (scattered(2, 10, layers=3), {}, 2, r"num_layers = 3, the model .* 2"),
        ([[0, 1, 2, 3]] * 2, {}, 2, r"num_logical_experts = 4, the model .* 8"),
        (scattered(4, 12), {}, 2, r"num_ranks = 4, the model .* 2"),
        (scattered(2, 10), {"num_redundant_experts": 4}, 2, "num_redundant_experts is 4 and the placement has 2"),
        (None, {"num_redundant_experts": 1}, 2, r"ep_size 2 does not divide .* = 8 \+ 1 = 9"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused_before_ranks_meet(
    folders: dict[str, Path], placement: Any, experts: dict[str, Any], sizes: int, told: str
) -> None:
    table = None
    if placement is not None:
        num_ranks = 4 if "num_ranks" in told else sizes
        table = pd.ExpertPlacement(
            physical_to_logical_map=placement, num_logical_experts=max(placement[0]) + 1, num_ranks=num_ranks
        )
    topology = pd.Topology(world_size=sizes, dp_size=sizes, ep_size=sizes)
    with pytest.raises(ConfigError, match=told):
        pd.load_model(folders["float"], topology=topology, experts=pd.moe.ExpertConfig(**experts), placement=table)


def test_a_model_without_experts_has_nothing_to_place(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict(first_k_dense_replace=3))
    assert pd.load_model(tmp_path).experts.placement is None
    with pytest.raises(ConfigError, match="the model has no experts; leave it out"):
        pd.load_model(tmp_path, placement=pd.ExpertPlacement.trivial(1, 8, 1))


@pytest.mark.parametrize("backend", ["auto", "local", "all_to_all"])
def test_one_rank_holds_each_expert_once_whatever_its_placement_says(backend: str) -> None:
    options = pd.moe.ExpertConfig(num_redundant_experts=3, moe_a2a_backend=backend)
    model = pd.testing.random_model(tiny_config(), experts=options)
    assert expert_jobs.num_experts(model.moe_layers()[0].experts.down) == EXPERTS
    dispatcher, no_ids_TK = model.experts.dispatcher, torch.zeros(0, 3, dtype=torch.int64)
    arrived = dispatcher.dispatch_end(dispatcher.dispatch_begin(torch.zeros(0, 48), no_ids_TK, torch.zeros(0, 3)))
    assert len(arrived.counts_E) == EXPERTS
    prompt = PROMPTS[0][0]
    assert torch.equal(model.logits(prompt), pd.testing.random_model(tiny_config()).logits(prompt))


def test_one_rank_looks_nothing_up() -> None:
    model = pd.testing.random_model(tiny_config())
    assert model.experts.replicas is None
    assert all(layer.replicas is None for layer in model.moe_layers())


@pytest.mark.parametrize("mode", ["window", "stat"])
def test_what_routers_choose_is_counted_by_logical_expert(ranks: Ranks, folders: dict[str, Path], mode: str) -> None:
    prompts = [first for first, _ in PROMPTS[:2]]
    counted = ranks.run("tests.e2e.expert_jobs:recorded", 2, str(folders["float"]), prompts, mode)
    alone = [expert_jobs.recorded(str(folders["float"]), [prompt], mode) for prompt in prompts]
    assert counted == alone
    top_k = tiny_config().num_experts_per_tok
    assert [[sum(row) for row in counts] for counts in counted] == [[len(prompt) * top_k] * 2 for prompt in prompts]


def test_engines_close_a_step_of_the_recorder_with_each_of_theirs() -> None:
    model = pd.testing.random_model(
        tiny_config(), experts=pd.moe.ExpertConfig(expert_distribution_recorder_mode="stat")
    )
    sampling = pd.SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    with pd.Pairing.local(model) as pairing:
        tokens = [event.token for event in pairing.generate([pd.Request(prompt=(3, 1, 4, 1, 5), sampling=sampling)])]
    assert model.experts.recorder is not None
    run = 5 + len(tokens) - 1  # the last token is drawn and not run
    assert model.experts.recorder.counts().sum(1).tolist() == [run * tiny_config().num_experts_per_tok] * MOE_LAYERS


def test_after_balancing_no_rank_gets_more_than_three_percent_above_the_mean(ranks: Ranks) -> None:
    """50,000 tokens, drawn from the load that was solved for, dispatched between four ranks."""
    num_experts, num_layers, top_k = 64, 3, 4
    load = np.random.default_rng(5).lognormal(sigma=0.9, size=(num_layers, num_experts))
    load = np.minimum(load / load.sum(1, keepdims=True), 0.9 / top_k)
    solved = pd.moe.solve_placement(load, num_ranks=4, num_redundant=8)
    trivial = pd.ExpertPlacement.trivial(num_layers, num_experts, 4, 8)
    tables = [
        (each.physical_to_logical_map.tolist(), None if each.slot_shares is None else each.slot_shares.tolist())
        for each in (trivial, solved)
    ]
    rows = ranks.run("tests.e2e.expert_jobs:received_rows", 4, load.tolist(), top_k, 50_000, tables)
    received = np.array(rows).transpose(1, 2, 0)  # placement, layer, rank
    assert (received.sum(2) == 50_000 * top_k).all()
    before, after = received.max(2) / received.mean(2)
    assert (before > 1.1).all()
    assert (after <= 1.03).all()
