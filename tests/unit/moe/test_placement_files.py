"""Files of expert locations: what is written can be read, and bad files are refused with the values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import pdinfer as pd
from pdinfer.moe import read_expert_location, solve_placement, write_counts, write_placement

MAP = [[0, 1, 2, 0], [2, 1, 0, 1]]


def placement(seed: int) -> pd.ExpertPlacement:
    load = np.random.default_rng(seed).lognormal(0, 1, (2, 8))
    return solve_placement(load, num_ranks=4, num_redundant=4)


def written(folder: Path, value: Any) -> Path:
    path = folder / "location.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@given(st.integers(0, 2**32), st.integers(0, 2), st.sampled_from(["json", "safetensors"]))
def test_a_placement_comes_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_dense_layers: int, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"placement.{suffix}"
    ours = placement(seed)
    if suffix == "json":
        ours = attrs.evolve(ours, slot_shares=None)
    write_placement(path, ours, num_dense_layers=num_dense_layers)
    location = read_expert_location(path, num_dense_layers=num_dense_layers)
    assert location.logical_count is None
    assert ours == pd.ExpertPlacement(
        physical_to_logical_map=location.physical_to_logical_map,
        num_logical_experts=8,
        num_ranks=4,
        slot_shares=location.slot_shares,
    )
    every_layer = read_expert_location(path).physical_to_logical_map
    assert every_layer is not None
    assert len(every_layer) == num_dense_layers + 2


EP_SIZES = (16, 18, 24, 32, 36, 48, 72)
"""How many ranks share 58 layers of 256 + 32 experts in deployments of DeepSeek-V3."""


def loads() -> dict[str, Any]:
    random = np.random.default_rng(0)
    zipf = 1e6 / np.arange(1, 257)
    return {
        "lognormal": random.lognormal(0, 1, (58, 256)),
        "zipf": random.permuted(np.tile(zipf, (58, 1)), axis=1),
        "even": random.integers(900, 1100, (58, 256)),
    }


@pytest.mark.parametrize("num_ranks", EP_SIZES)
def test_what_deepseeks_balancer_makes_is_a_placement_and_comes_back(tmp_path: Path, num_ranks: int) -> None:
    num_nodes = num_ranks // 8 if num_ranks % 8 == 0 else 1
    for name, load in loads().items():
        slot_to_expert, _, counts = pd.rebalance_experts(load, 288, 8, num_nodes, num_ranks)
        ours = pd.ExpertPlacement(physical_to_logical_map=slot_to_expert, num_logical_experts=256, num_ranks=num_ranks)
        assert ours.twins.any() or name != "lognormal"
        assert (ours.logical_replica_counts == counts).all()
        for suffix in ("json", "safetensors"):
            write_placement(tmp_path / f"map.{suffix}", ours, num_dense_layers=3)
            found = read_expert_location(tmp_path / f"map.{suffix}", num_dense_layers=3)
            again = attrs.evolve(ours, physical_to_logical_map=found.physical_to_logical_map)
            assert again == ours


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_counts_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"counts.{suffix}"
    write_counts(path, [[1, 2, 3], [4, 5, 6]], num_dense_layers=1)
    location = read_expert_location(path, num_dense_layers=1)
    assert location.physical_to_logical_map is None
    assert location.logical_count is not None
    assert location.logical_count.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert read_expert_location(path).logical_count.tolist()[0] == [0, 0, 0]  # type: ignore[union-attr]


def test_steps_are_summed(tmp_path: Path) -> None:
    steps = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    save_file({"logical_count": steps, "rank": np.zeros((1, 1), np.int32)}, tmp_path / "counts.safetensors")
    for path in (tmp_path / "counts.safetensors", written(tmp_path, {"logical_count": steps.tolist(), "rank": 0})):
        assert read_expert_location(path).logical_count.tolist() == [[6, 8, 10], [12, 14, 16]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"physical_to_logical_map": MAP, "num_ranks": 2}, "holds more than physical_to_logical_map: 'num_ranks'"),
        ({"physical_to_logical_map": MAP, "logical_count": MAP}, "and not both"),
        ({"logical_counts": MAP}, "must hold physical_to_logical_map or logical_count.*holds 'logical_counts'"),
        ({}, "it holds 'nothing'"),
        ({"physical_to_logical_map": [[0, 1], [0]]}, "rows of one length"),
        ({"physical_to_logical_map": [[0, 1.5]]}, r"Expected `int`, got `float`"),
        ({"physical_to_logical_map": [[0, True]]}, "Expected `int`, got `bool`"),
        ({"physical_to_logical_map": [[0, "1"]]}, "Expected `int`, got `str`"),
        ({"physical_to_logical_map": [[0, None]]}, "Expected `int`, got `null`"),
        ({"physical_to_logical_map": [[[0]]]}, "Expected `int`, got `array`"),
        ({"physical_to_logical_map": {"0": [0]}}, "Expected `array`, got `object`"),
        ({"physical_to_logical_map": [[0, -1]]}, "must hold ints from 0 to .* got -1 to 0"),
        ({"physical_to_logical_map": [[0, 2**62]]}, "must hold ints from 0"),
        ({"physical_to_logical_map": [[0, 2**64 - 1]]}, "must hold ints|table of ints"),
        ({"physical_to_logical_map": []}, "table of ints"),
        ({"physical_to_logical_map": [[], []]}, r"table of ints|shape \(2, 0\)"),
        ({"logical_count": [[[1, 2]], [[1]]]}, "rows of one length"),
        ({"logical_count": 3}, "Expected `array`, got `int`"),
        ('{"logical_count": [[NaN]]}', "not strict JSON"),
        ('{"logical_count": [[1]], "logical_count": [[2]]}', "appears twice"),
        ("[[1]]", "must hold one JSON object"),
        ('{"logical_count": ' + "[" * 100 + "]" * 100 + "}", "nested too deep"),
        ('{"logical_count": [' + "[1]," * 10_001 + "[1]]}", "more than 10000"),
        ('{"logical_count": [[1' + "0" * 400 + "]]}", "more than 20 digits"),
    ],
)
def test_odd_json_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(pd.ConfigError, match=says):
        read_expert_location(written(tmp_path, content))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"physical_to_logical_map": np.ones((1, 2), np.float32)}, r"is torch.float32 of shape \(1, 2\)"),
        ({"physical_to_logical_map": np.ones((1, 2), np.int8)}, "is torch.int8"),
        ({"physical_to_logical_map": np.ones(2, np.int64)}, r"of shape \(2,\)"),
        ({"physical_to_logical_map": np.ones((1, 1, 2), np.int64)}, r"table of ints, got int64 of shape \(1, 1, 2\)"),
        ({"physical_to_logical_map": np.full((1, 2), -1)}, "got -1 to -1"),
        (
            {"physical_to_logical_map": np.ones((1, 2), np.int64), "slot_shares": np.ones((1, 2), np.int64)},
            "slot_shares is",
        ),
        ({"other": np.ones((1, 2), np.int64)}, "must hold physical_to_logical_map or logical_count"),
    ],
)
def test_odd_safetensors_are_refused(tmp_path: Path, tensors: dict[str, Any], says: str) -> None:
    save_file(tensors, tmp_path / "odd.safetensors")
    with pytest.raises(pd.ConfigError, match=says):
        read_expert_location(tmp_path / "odd.safetensors")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"logical_count": np.ones((2, 3), np.int64)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(pd.ConfigError, match=r"within the 40 bytes"):
        read_expert_location(path)
    for name in ("missing.json", "missing.safetensors"):
        with pytest.raises(pd.ConfigError, match="cannot open"):
            read_expert_location(tmp_path / name)
    with pytest.raises(pd.ConfigError, match=r"must be a \.json or a \.safetensors file"):
        read_expert_location(tmp_path / "location.yaml")


def test_more_dense_layers_than_there_are_layers_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"physical_to_logical_map": MAP})
    with pytest.raises(pd.ConfigError, match=r"shape \(2, 4\); nothing is left of it after 2 dense layers"):
        read_expert_location(path, num_dense_layers=2)
    with pytest.raises(pd.ConfigError, match="num_dense_layers must be an int of at least 0, got -1"):
        read_expert_location(path, num_dense_layers=-1)


def test_a_pt_file_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"rank": 0, "logical_count": torch.ones(2, 3, dtype=torch.int32)}, tmp_path / "load.pt")
    with pytest.raises(pd.ConfigError, match=r"load\.pt was not opened.*python -c") as refused:
        read_expert_location(tmp_path / "load.pt")
    command = str(refused.value).split('python -c "')[1].split('" load.pt')[0]
    assert str(refused.value).endswith("load.pt > load.json")
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "load.pt")])
    exec(command, {})
    (tmp_path / "load.json").write_text(capsys.readouterr().out)
    assert read_expert_location(tmp_path / "load.json").logical_count.tolist() == [[1] * 3] * 2  # type: ignore[union-attr]


def test_shares_are_not_dropped_unasked(tmp_path: Path) -> None:
    ours = pd.ExpertPlacement(
        physical_to_logical_map=[[0, 0]], num_logical_experts=1, num_ranks=2, slot_shares=[[0.25, 0.75]]
    )
    with pytest.raises(pd.ConfigError, match="JSON has no place for slot_shares"):
        write_placement(tmp_path / "placement.json", ours)
    with pytest.raises(pd.ConfigError, match="counts: logical_count must be a table of ints"):
        write_counts(tmp_path / "counts.json", [[0.5]])


@pytest.mark.parametrize("name", ["gone/placement", "zero\0byte"])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str, suffix: str) -> None:
    path = str(tmp_path / name) + suffix
    with pytest.raises(pd.ConfigError, match=r"cannot write to .*; make room, or choose another folder"):
        write_placement(path, pd.ExpertPlacement.trivial(1, 4, 2, 0))
    with pytest.raises(pd.ConfigError, match=r"cannot write to .*; make room, or choose another folder"):
        write_counts(path, [[1, 2]])
