"""A topology that does not fit is refused with the equation that failed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from pdinfer.errors import ConfigError
from pdinfer.parallel.topology import Topology

SIZES = ("world_size", "tp_size", "dp_size", "cp_size", "ep_size")


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as info:
        Topology(**values)
    return str(info.value)


def test_a_single_rank_holds_everything() -> None:
    assert set(attrs.astuple(Topology())) == {0, 1}


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_ranks_on_gpus_do_not_wait_for_ever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=f"{name}=0 lets ranks wait for ever for one that is lost; unset it"):
        Topology(world_size=2, dp_size=2).connect("cuda", store=HashStore())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_sizes_that_multiply_to_the_world_pass(dp: int, cp: int, tp: int, data: st.DataObject) -> None:
    world = dp * cp * tp
    ep = data.draw(st.sampled_from([size for size in range(1, world + 1) if world % size == 0]))
    rank = data.draw(st.integers(0, world - 1))
    topology = Topology(rank=rank, world_size=world, dp_size=dp, cp_size=cp, tp_size=tp, ep_size=ep)
    assert (topology.rank, topology.world_size) == (rank, world)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        pytest.param(
            {"world_size": 8, "tp_size": 2, "dp_size": 3},
            "dp_size * cp_size * tp_size = 3 * 1 * 2 = 6, but world_size is 8",
            id="H20-product-below",
        ),
        pytest.param(
            {"world_size": 4, "tp_size": 2, "dp_size": 2, "cp_size": 2},
            "= 2 * 2 * 2 = 8, but world_size is 4",
            id="H20-product-above",
        ),
        pytest.param(
            {"world_size": 6, "dp_size": 6, "ep_size": 4}, "ep_size 4 does not divide world_size 6", id="H20-ep"
        ),
        pytest.param({"rank": 1}, "rank 1 is outside 0..0 (world_size=1)", id="H20-rank-above"),
        pytest.param({"rank": -1, "world_size": 2, "dp_size": 2}, "rank -1 is outside 0..1", id="H20-rank-below"),
        pytest.param({"rank": True, "world_size": 2, "dp_size": 2}, "rank True is outside 0..1", id="H20-rank-bool"),
        pytest.param({"rank": 0.0}, "rank 0.0 is outside 0..0", id="H20-rank-float"),
        pytest.param({"rank": 1 << 20_000}, "rank an int of 20001 bits is outside 0..0", id="H20-rank-huge"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_values(values: dict[str, Any], shown: str) -> None:
    assert shown in refusal(**values)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "value", [0, -1, 65537, 2**63, 1 << 20_000, 1.0, True, "2", None, float("nan")], ids=lambda v: str(type(v).__name__)
)
def test_sizes_are_ints_in_range(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert f"{name} must be an int from 1 to 65536, got " in message
    assert len(message) < 200


def test_torchrun_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Topology.from_env() == Topology(rank=3, world_size=8, dp_size=8, ep_size=8)


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Topology.from_env() == Topology()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "-1", "1.0", "one", " 1", "1\n", "٣", "1_0", "0x1", "+1", "9" * 10, "9" * 5000])
def test_a_rank_that_is_no_number_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"environment variable {name} must be a plain number, got ") as info:
        Topology.from_env()
    assert len(str(info.value)) < 200


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("0", "0"), ("0", "70000")])
def test_a_rank_outside_the_world_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match="world_size"):
        Topology.from_env()


def test_groups_of_a_plan_are_those_that_would_meet() -> None:
    groups = Topology(rank=5, world_size=8, dp_size=1, cp_size=2, tp_size=4, ep_size=2, moe_dense_tp_size=2).apart()
    assert {
        name: (group.ranks, group.rank) for name, group in attrs.asdict(groups, recurse=False).items() if group
    } == {
        "world": (tuple(range(8)), 5),
        "attention": (tuple(range(8)), 5),
        "tp": ((4, 5, 6, 7), 1),
        "cp": ((1, 5), 1),
        "dense_tp": ((4, 5), 1),
        "ep": ((4, 5), 1),
    }
