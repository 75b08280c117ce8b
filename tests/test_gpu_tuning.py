"""Tuning: what is tried, what is dropped before it runs, and files that vLLM and SGLang read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends import ROOT, child_environment

pytest.importorskip("triton")
sys.path.append(str(ROOT / "benchmarks" / "gpu"))

import config_files
import product_cases
import row_cases
import tune
import tuning

from pdinfer.kernels.formats.four_bits import Int4
from pdinfer.kernels.triton import configs
from pdinfer.kernels.triton.configs import Config

H200 = "NVIDIA H200"
EXPERTS = "E=32,N=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
MATRIX = "N=2112,K=7168,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128,128].json"
PRODUCT = Config({"ROWS": 64, "CHANNELS": 128, "DEPTH": 128, "NEAR": 8, "WEIGHTS_FIRST": 1}, 4, 3)


def test_files_have_the_names_that_vllm_and_sglang_look_for() -> None:
    experts, matrix = (
        product_cases.MaskedExperts(experts=32, rows=16),
        product_cases.Dense(rows=4096, outputs=2112, channels=7168),
    )
    for case, card, name, num_tokens in (
        (experts, "NVIDIA H200", EXPERTS, 64),
        (experts, "NVIDIA H200 NVL", EXPERTS, 64),
        (matrix, "NVIDIA H100 80GB HBM3", MATRIX, 4096),
    ):
        place = tune.file_of(case, card)
        assert place is not None
        assert (place[0].file_name, place[1]) == (name, num_tokens)
    assert tune.file_of(row_cases.Norm(), H200) is None
    assert tune.file_of(product_cases.PackedExperts(kind=Int4, experts=12, rows=4), H200) is None  # names are for FP8


def test_entries_have_their_keys_and_come_back(tmp_path: Path) -> None:
    entry = config_files.to_entry(tuning.values_of(PRODUCT))
    assert entry == {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": 8,
        "WEIGHTS_FIRST": 1,
        "num_warps": 4,
        "num_stages": 3,
    }
    path = tmp_path / "folder" / EXPERTS
    config_files.write(path, {64: entry})
    config_files.write(path, {8: {**entry, "num_stages": 5}})
    assert list(json.loads(path.read_text())) == ["8", "64"]
    entries = config_files.read(path)
    assert config_files.nearest(entries, 1)["num_stages"] == 5
    assert config_files.of_entry(config_files.nearest(entries, 100)) == tuning.values_of(PRODUCT)


def test_files_of_others_are_found_and_read(tmp_path: Path) -> None:
    """SGLang writes a space between the sizes of a block, and has files for the second product; vLLM may add the
    version of Triton. Keys that the kernel does not have are left out."""
    theirs = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32, "USE_TMA": 1}
    folder = tmp_path / "configs" / "triton_3_4_0"
    folder.mkdir(parents=True)
    told = {"triton_version": "3.4.0", "64": {**theirs, "num_warps": 8, "num_stages": 2}}
    name = EXPERTS.replace("[128,128]", "[128, 128]")
    (folder / name).write_text(json.dumps(told))
    (folder / name.replace(".json", "_down.json")).write_text(json.dumps({"8": {"num_stages": 5}}))
    (folder / MATRIX).write_text("{}")
    case = product_cases.MaskedExperts(experts=32, rows=32)
    (config,) = tune.from_files(tune.file_of(case, H200), tmp_path, PRODUCT)
    assert (config.num_warps, config.num_stages) == (8, 2)
    assert dict(config.tiles) == {"ROWS": 16, "CHANNELS": 256, "DEPTH": 128, "NEAR": 32, "WEIGHTS_FIRST": 1}
    (down,) = tune.from_files(tune.file_of(case, H200, down=True), tmp_path, PRODUCT)
    assert tuning.values_of(down) == {**tuning.values_of(PRODUCT), "num_stages": 5}


def test_files_for_other_sizes_or_cards_are_named(tmp_path: Path) -> None:
    """The first is the file of the H800 study, whose ranks have a slice of every expert."""
    study = "E=257,N=256,device_name=NVIDIA_H800,block_shape=[128,128].json"
    for name in (study, EXPERTS, MATRIX, "notes.json"):
        (tmp_path / name).write_text("{}")
    cases = [product_cases.MaskedExperts(experts=32, rows=rows) for rows in (1, 4)]
    told = {line["file"]: line["missing"] for line in tune.left_out(cases, H200, tmp_path)}
    assert told == {
        study: f"is for E=257,N=256 on NVIDIA_H800; this family reads {EXPERTS}",
        MATRIX: f"is for N=2112,K=7168 on NVIDIA_H100_80GB_HBM3; this family reads {EXPERTS}",
        "notes.json": f"is for notes on a card that it does not name; this family reads {EXPERTS}",
    }


@pytest.mark.parametrize("text", ["[]", '{"x": {}}', '{"8": {"num_warps": "4"}}', '{"8": 3}', '{"0": {}}'])
def test_what_is_no_file_of_configs_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / EXPERTS
    path.write_text(text)
    with pytest.raises(ValueError, match="E=32"):
        config_files.read(path)


def test_candidates_differ_in_one_or_two_values() -> None:
    found = [tuning.values_of(each) for each in tuning.candidates(PRODUCT)]
    mine = tuning.values_of(PRODUCT)
    assert len(found) == len({tuple(each.items()) for each in found})
    for each in found:
        assert each.keys() == mine.keys()
        assert 1 <= sum(each[name] != mine[name] for name in mine) <= 2
        assert (each["NEAR"], each["WEIGHTS_FIRST"]) == (8, 1)
    assert {each["ROWS"] for each in found} == {32, 64, 128}
    assert {each["num_stages"] for each in found} == {2, 3, 4, 5}


def test_a_choice_holds_while_it_is_made_and_no_longer() -> None:
    case = row_cases.Norm(tokens=8)
    ((key, in_use),) = tuning.asked_by(case).items()
    assert key[0] == "of_width"
    instead = Config(dict(in_use.tiles), 1, in_use.num_stages)
    started: list[Any] = []
    call = tuning.call_without_memory(case)
    with tuning.chosen(tuning.Choices({key: instead})):
        started += tuning.aot().launches(call)
    started += tuning.aot().launches(call)
    assert [constants["num_warps"] for _, _, constants in started] == [1, in_use.num_warps]


def test_constants_are_chosen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "SOME", PRODUCT, raising=False)
    monkeypatch.setattr(configs, "of_cut", lambda rows: PRODUCT if rows else None, raising=False)
    monkeypatch.setattr(configs.of_cut, "__name__", "of_cut")
    other = tuning.with_values(PRODUCT, {"ROWS": 32})
    choices = tuning.Choices({("SOME", ""): other, ("of_cut", "((3,), [])"): other})
    with tuning.chosen(choices):
        assert configs.SOME is other
        assert configs.of_cut(3) is other
        assert configs.of_cut(4) is PRODUCT
        assert configs.of_cut(0) is None
    assert configs.SOME is configs.of_cut(3) is PRODUCT
    assert list(choices.asked) == [("of_cut", "((3,), [])"), ("of_cut", "((4,), [])")]


@pytest.mark.full
def test_configs_that_spill_are_dropped_before_they_run() -> None:
    """One warp cannot hold a row of 7168."""
    case = row_cases.Norm(tokens=8)
    ((key, in_use),) = tuning.asked_by(case).items()
    bad = Config(dict(in_use.tiles), 1, 2)
    assert tuning._judge(case, key, tuning.values_of(in_use)) == []
    assert "spill" in tuning._judge(case, key, tuning.values_of(bad))[0]


@pytest.mark.full
def test_a_small_kernel_is_tuned_from_beginning_to_end(tmp_path: Path) -> None:
    """In a process that interprets kernels. What they take there means nothing."""
    script = tmp_path / "small.py"
    script.write_text(
        "import sys; sys.path.append(sys.argv[1]); import row_cases, tune\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(tune.main(['rows', '--tiny', '--most', '1'], [row_cases.Norm()]))"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(ROOT / "benchmarks" / "gpu")],
        env=child_environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["timed"] + line["dropped"] == 1
    assert line["ratio"] >= 1
