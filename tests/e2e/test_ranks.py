"""A model on several ranks says what it says on one: tensor, context, data and expert parallel, and together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e import rank_jobs
from tests.e2e.setups import prompt_of
from tests.packed import SCHEMES, with_twin
from tests.ranks import COLLECTIVE_S, Ranks
from tests.slices import one_in

FAMILIES = ("v2-lite", "v3", "v32", "glm", "axk1")
PROMPTS = [list(prompt_of(length)) for length in (1, 6, 23)]
LOGITS, PREFILL = "tests.e2e.rank_jobs:logits", "tests.e2e.rank_jobs:prefill"


@attrs.frozen
class Shape:
    tp: int = 1
    cp: int = 1
    dp: int = 1
    dense: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def attention_size(self) -> int:
        return self.tp * self.cp

    @property
    def sizes(self) -> dict[str, int]:
        return {"tp_size": self.tp, "cp_size": self.cp, "moe_dense_tp_size": self.dense, "ep_size": self.ep}


SHAPES = [
    shape
    for tp, cp, dp, dense, ep in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    if (shape := Shape(tp, cp, dp, dense, ep)).world_size in (2, 4) and tp % dense == 0 and ep in (1, shape.world_size)
]


def slice_of(shapes: list[Shape]) -> list[tuple[Shape, list[str]]]:
    """A few of all shapes with families, in which any two sizes that may meet, and any size and family, do."""

    def pairs(shape: Shape, family: str) -> set[Any]:
        return set(itertools.combinations([*attrs.asdict(shape).items(), ("family", family)], 2))

    cases = list(itertools.product(shapes, FAMILIES))
    missing = set().union(*itertools.starmap(pairs, cases))
    chosen: dict[Shape, list[str]] = {}
    while missing:
        shape, family = max(cases, key=lambda case: (len(missing & pairs(*case)), case[0] in chosen))
        missing -= pairs(shape, family)
        chosen.setdefault(shape, []).append(family)
    return list(chosen.items())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of each family, with an MTP layer."""
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        like_v3 = {"model_type": "axk1", "architectures": ["AXK1ForCausalLM"]}  # and a norm of what experts return
        config = tiny_config_dict(**like_v3) if family == "axk1" else tiny_config_dict(family)
        write_checkpoint(folder / family, config | {"num_nextn_predict_layers": 1}, mtp=True)
    return {family: str(folder / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    told = rank_jobs.logits(list(folders.values()), {}, PROMPTS, mtp=True)
    return dict(zip(folders, told, strict=True))


def close(got: Any, expected: Any, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=tolerance, rtol=1e-5)


def compare(ranks: Ranks, shape: Shape, folders: dict[str, str], alone: dict[str, dict[str, Any]]) -> None:
    """Of these families, every rank's logits with those of one rank, and what ranks of one group called."""
    results = ranks.run(LOGITS, shape.world_size, list(folders.values()), shape.sizes, PROMPTS, mtp=True)
    for rank, of_rank in enumerate(results):
        for at, (family, got) in enumerate(zip(folders, of_rank, strict=True)):
            expected = alone[family]
            for mine, other in zip([*got["logits"], got["mtp"]], [*expected["logits"], expected["mtp"]], strict=True):
                close(mine, other)
            close(got["hidden"], expected["hidden"])
            assert got["experts"] == expected["experts"]
            assert (got["weights_id"], got["page_bytes"]) == (expected["weights_id"], expected["page_bytes"])
            first = rank - rank % shape.attention_size
            assert got["calls"] == results[first][at]["calls"]
            assert bool(got["calls"]) is (shape.attention_size * shape.ep > 1)


@pytest.mark.parametrize(("shape", "families"), one_in(2, slice_of(SHAPES)), ids=str)
def test_ranks_say_what_one_says(
    ranks: Ranks, shape: Shape, families: list[str], folders: dict[str, str], alone: dict[str, dict[str, Any]]
) -> None:
    compare(ranks, shape, {family: folders[family] for family in families}, alone)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_of_every_shape_say_what_one_says(
    ranks: Ranks, shape: Shape, folders: dict[str, str], alone: dict[str, dict[str, Any]]
) -> None:
    compare(ranks, shape, folders, alone)


@pytest.mark.parametrize(("shape", "family"), [(Shape(cp=4), "v32"), (Shape(tp=2, cp=2, dense=2, ep=4), "v3")], ids=str)
def test_every_rank_has_the_whole_cache_of_several_prompts_in_chunks(
    ranks: Ranks, shape: Shape, family: str, folders: dict[str, str]
) -> None:
    """Chunks of which some rank gets nothing, prompts that end in different steps, and steps without any."""
    prompts = [list(prompt_of(length)) for length in (3, 18, 11)]
    expected = rank_jobs.prefill(folders[family], {}, prompts, 7)
    for got in ranks.run(PREFILL, shape.world_size, folders[family], shape.sizes, prompts, 7):
        for mine, other in zip(got["logits"], expected["logits"], strict=True):
            close(mine, other)
        close(got["cache"], expected["cache"])


def test_ranks_wait_for_each_other_to_load(ranks: Ranks, folders: dict[str, str]) -> None:
    (rounds, tensors), *others = ranks.run("tests.e2e.rank_jobs:load_at_own_pace", 2, folders["v3"], Shape(tp=2).sizes)
    assert [[rounds, tensors]] == others
    assert rounds == tensors + 1


def test_pools_of_a_fraction_are_alike_on_all_ranks(ranks: Ranks, folders: dict[str, str]) -> None:
    """Ranks 0 and 1 share a machine, on which 10 pages' worth is in use, and 12 when the other one looks."""
    assert ranks.run("tests.e2e.rank_jobs:sized_pool", 2, folders["v3"], [10, 12], 0.8) == [34, 34]
    outcomes = ranks.outcomes("tests.e2e.rank_jobs:sized_pool", 2, folders["v3"], [10, 85], 0.8)
    assert [outcome.error for outcome in outcomes] == ["ConfigError", "ConfigError"]


def test_bfloat16_travels(ranks: Ranks, folders: dict[str, str]) -> None:
    (expected,) = rank_jobs.logits([folders["v3"]], {}, PROMPTS[-1:], dtype="bfloat16")
    for (got,) in ranks.run(LOGITS, 4, [folders["v3"]], Shape(2, 2, dense=2).sizes, PROMPTS[-1:], dtype="bfloat16"):
        assert distance(got, expected) < 0.2


# ---- quantized weights ---------------------------------------------------------------------------------------------

BLOCKS = {
    "hidden_size": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
}
"""Of which two ranks get whole blocks of FP8 and four do not. All but the query latent is whole groups of four bits."""


def distance(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of logits, relative, root mean square. A rounding that falls the other way may change an expert."""
    mine, other = torch.tensor(got["logits"]), torch.tensor(expected["logits"])
    return float((mine - other).norm() / other.norm())


def stored_in(folder: Path, scheme: str, **sizes: int) -> tuple[str, str]:
    """Write a checkpoint whose linear maps are quantized. Return its folder, and the one with whose numbers those of
    ranks are compared: the twin of four bits."""
    write_checkpoint(folder / "floats", tiny_config_dict("v3", **{**BLOCKS, **sizes}))
    if scheme in SCHEMES:
        packed, twin = with_twin(folder / "floats", scheme, every_linear=True)
        return str(packed), str(twin)
    quantize_checkpoint(folder / "floats", folder / scheme, scheme=scheme)
    return str(folder / scheme), str(folder / scheme)


@pytest.mark.parametrize("scheme", ["fp8", "w8a8_dynamic", *SCHEMES])
def test_quantized_weights_are_divided_as_they_are_stored(ranks: Ranks, scheme: str, tmp_path: Path) -> None:
    (folder, compared), sizes = stored_in(tmp_path, scheme), Shape(tp=2, dense=2, ep=2).sizes
    for weights, dtype, tolerance, whole in (
        ("float", "float32", 1e-5, compared),
        ("stored", "float32", 1e-5 if scheme in SCHEMES else 0.03, compared),
        ("auto", "bfloat16", 0.4, folder),  # in strips where kernels read them; other numbers are 1 and more away
    ):
        (expected,) = rank_jobs.logits([whole], {}, PROMPTS[-1:], weights=weights, dtype=dtype)
        for (got,) in ranks.run(LOGITS, 2, [folder], sizes, PROMPTS[-1:], weights=weights, dtype=dtype):
            assert distance(got, expected) < tolerance


def test_ranks_hold_experts_alike(ranks: Ranks, tmp_path: Path) -> None:
    """They give each other experts as they lie."""
    write_checkpoint(tmp_path, tiny_config_dict("v3", hidden_size=64, moe_intermediate_size=32))
    for found in ranks.run("tests.e2e.rank_jobs:load_in_strips_on_rank_0", 2, str(tmp_path), Shape(tp=2).sizes):
        assert set(found) == {"Tensor"}


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "name", "columns", "unit"),
    [("fp8", "self_attn.o_proj", 256, 128), *((scheme, "mlp.down_proj", 192, 32) for scheme in SCHEMES)],
)
def test_parts_of_blocks_are_refused_with_the_sizes(
    ranks: Ranks, tmp_path: Path, scheme: str, name: str, columns: int, unit: int
) -> None:
    folder, _ = stored_in(tmp_path, scheme, intermediate_size=192)
    for outcome in ranks.outcomes(LOGITS, 4, [folder], Shape(tp=4, dense=4).sizes, PROMPTS, weights="stored"):
        assert outcome.error == "ConfigError"
        told = (
            f"model.layers.0.{name}.weight [128, {columns}] cannot be divided between 4 ranks in whole blocks of {unit}"
        )
        assert outcome.message.startswith(told), outcome.message
        assert f"{columns} columns are not a multiple of {4 * unit}; use a smaller tp_size" in outcome.message


def test_ranks_that_read_different_weights_are_refused(ranks: Ranks, folders: dict[str, str], tmp_path: Path) -> None:
    config = tiny_config_dict("v3", num_nextn_predict_layers=1)
    write_checkpoint(tmp_path, config, mtp=True, seed=1)
    outcomes = ranks.outcomes("tests.e2e.rank_jobs:load_own", 2, [folders["v3"], str(tmp_path)], Shape(tp=2).sizes)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert "rank 0 reads other weights than ranks 1" in outcomes[0].message
    assert "rank 1 reads other weights than ranks 0" in outcomes[1].message


def test_ranks_that_were_started_with_different_sizes_are_refused(ranks: Ranks) -> None:
    outcomes = ranks.outcomes("tests.e2e.rank_jobs:connect_own", 2, [Shape(tp=2).sizes, Shape(dp=2).sizes])
    assert [outcome.error for outcome in outcomes] == ["ConfigError"] * 2
    assert "tp_size is 2 on rank 0 and 1 on rank 1" in outcomes[0].message
    assert "tp_size is 1 on rank 1 and 2 on rank 0" in outcomes[1].message


def test_no_group_waits_longer_than_the_world(ranks: Ranks) -> None:
    """A rank that stands still is missed by those it shares tokens with as soon as by all others."""
    shape = Shape(tp=2, dp=2, dense=2, ep=4)
    names = {"world", "attention", "tp", "dense_tp", "ep"}
    assert ranks.run("tests.e2e.rank_jobs:timeouts", 4, shape.sizes) == [dict.fromkeys(names, COLLECTIVE_S)] * 4


def test_groups_are_our_own_beside_those_of_the_host(ranks: Ranks) -> None:
    found = ranks.run("tests.e2e.rank_jobs:beside_the_host", 4, Shape(tp=2, dp=2).sizes)
    assert found == [[16, 20, 1600]] * 4


def test_groups_carry_what_those_of_the_host_cannot(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run("tests.e2e.rank_jobs:beside_a_host_of_devices_alone", 4, str(tmp_path)) == [2] * 4


def test_a_host_with_other_ranks_than_the_engine_is_told(ranks: Ranks) -> None:
    for outcome in ranks.outcomes("tests.e2e.rank_jobs:beside_a_larger_host", 3):
        assert outcome.error == "ConfigError"
        assert "processes of its own (pdinfer.remote), where nothing is initialized" in outcome.message


@pytest.mark.full
def test_a_rank_that_stands_still_is_missed_by_its_silence(ranks: Ranks, tmp_path: Path) -> None:
    *told, still = ranks.outcomes("tests.e2e.rank_jobs:stand_still", 3, str(tmp_path))
    assert still.error == "Died"
    for outcome in told:
        assert str(outcome.value).startswith("rank 2 has been silent for 2."), outcome


def test_ranks_may_meet_in_a_store_that_outlives_them(ranks: Ranks) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dead, *others = ranks.outcomes("tests.e2e.rank_jobs:meet_elsewhere", 3, store.port)
    assert dead.error == "Died", dead
    assert [outcome.value for outcome in others] == [2, 2], others
