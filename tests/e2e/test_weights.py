"""Engines whose checkpoints look equal and are not do not pair, and the error names a tensor that differs."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pdinfer as pd
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.setups import collect, request
from tests.each_time import others_in_full
from tests.ranks import Ranks

EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"
MTP = "model.layers.2.eh_proj.weight"
CACHE = pd.CacheConfig(page_size=16, num_pages=8)


def flip(folder: Path, name: str, *, at_start: bool = False) -> Path:
    """Change one bit in the middle of a tensor, or in its first byte, of which samples tell."""
    with Checkpoint.open(folder) as files:
        info = files.tensors[name]
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset + (0 if at_start else info.num_bytes // 2))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return folder


Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Writes a checkpoint, with one other bit in the tensor `flipped`."""

    @functools.cache
    def written(scheme: str, mtp: bool) -> Path:
        folder = tmp_path_factory.mktemp("written")
        if scheme:
            quantize_checkpoint(written("", mtp), folder, scheme=scheme)
            return folder
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
        config = tiny_config_dict(torch_dtype="bfloat16", num_nextn_predict_layers=int(mtp), **sizes)
        write_checkpoint(folder, config, mtp=mtp)
        return folder

    def made(folder: Path, flipped: str = "", scheme: str = "", *, mtp: bool = True) -> Path:
        shutil.copytree(written(scheme, mtp), folder, dirs_exist_ok=True)
        return flip(folder, flipped) if flipped else folder

    return made


def pair(prefill: Path, decode: Path, *, tcp: bool = False, **options: object) -> list[pd.TokenEvent]:
    """Return what a pair of two checkpoints says to one request."""
    models = [pd.load_model(folder, **options) for folder in (prefill, decode)]  # type: ignore[arg-type]
    pools = [pd.PagePool(model, CACHE) for model in models]
    ends = [pd.KVChannel(pool, pd.kv.SocketTransport()) for pool in pools] if tcp else pd.KVChannel.loopback(*pools)
    with (
        pd.PrefillEngine(models[0], ends[0]) as one,
        pd.DecodeEngine(models[1], ends[1]) as other,
        pd.Pairing(one, other) as pairing,
    ):
        pairing.submit(request())
        return collect(pairing)


def refused(prefill: Path, decode: Path, *, tcp: bool = False, **options: object) -> list[str]:
    """Return the names of the fields in which two checkpoints differ."""
    with pytest.raises(pd.LayoutMismatch) as caught:
        pair(prefill, decode, tcp=tcp, **options)
    return [name for name, _, _ in caught.value.fields]


@pytest.mark.parametrize("tcp", [False, True], ids=["loopback", "tcp"])
@pytest.mark.parametrize("name", [EXPERT, "model.layers.0.self_attn.kv_b_proj.weight", "lm_head.weight"])
def test_one_bit_of_one_tensor_is_found(made: Made, tmp_path: Path, name: str, tcp: bool) -> None:
    folders = made(tmp_path / "one"), made(tmp_path / "other", name)
    assert refused(*folders, tcp=tcp) == ["weights_id", f"weights.{name}"]


@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [
        ("fp8", "_scale_inv"),
        ("w8a8_dynamic", "_scale"),
        ("int4", "_scale"),
        ("int4", "_packed"),
        ("mxfp4", "_scale"),
        ("mxfp4", "_packed"),
    ],
)
@pytest.mark.parametrize("weights", others_in_full(["stored", "float"], ["stored"]))
def test_one_bit_of_a_quantized_weight_is_found(
    made: Made, tmp_path: Path, scheme: str, suffix: str, weights: str
) -> None:
    name = f"{EXPERT}{suffix}"
    folders = made(tmp_path / "one", scheme=scheme), made(tmp_path / "other", name, scheme)
    assert refused(*folders, weights=weights) == ["weights_id", f"weights.{name}"]


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_weights_as_stored_and_as_floats_are_one_model(made: Made, tmp_path: Path, scheme: str) -> None:
    folder = made(tmp_path, scheme=scheme)
    ids = {pd.load_model(folder, weights=weights).weights_id for weights in ("stored", "float")}
    assert len(ids) == 1


def test_an_mtp_layer_that_neither_reads_is_not_compared(made: Made, tmp_path: Path) -> None:
    one, other = made(tmp_path / "one"), flip(made(tmp_path / "other"), MTP, at_start=True)
    assert pair(one, other)[-1].finish_reason is pd.FinishReason.LENGTH
    assert refused(one, other, mtp=True) == ["mtp_weights_id", f"weights.{MTP}"]


def test_an_mtp_layer_that_one_end_reads_is_no_difference_of_weights(made: Made, tmp_path: Path) -> None:
    folder = made(tmp_path)
    layouts = [pd.load_model(folder, mtp=mtp).kv_layout(CACHE) for mtp in (False, True)]
    with pytest.raises(pd.LayoutMismatch) as caught:
        layouts[0].compatible_with(layouts[1])
    names = [name for name, _, _ in caught.value.fields]
    assert "components" in names, "the layer has pages of its own"
    assert not [name for name in names if "weights" in name]


def test_a_prefill_that_drafts_nothing_pairs_with_a_decode_that_does(made: Made, tmp_path: Path) -> None:
    one, other = pd.load_model(made(tmp_path), mtp=True), pd.load_model(tmp_path, mtp=True)
    ends = pd.KVChannel.loopback(pd.PagePool(one, CACHE), pd.PagePool(other, CACHE))
    with (
        pd.PrefillEngine(one, ends[0]) as prefill,
        pd.DecodeEngine(other, ends[1], pd.EngineConfig(num_draft_tokens=1)) as decode,
        pd.Pairing(prefill, decode) as pairing,
    ):
        pairing.submit(request())
        assert collect(pairing)[-1].finish_reason is pd.FinishReason.LENGTH


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"ep_size": 2}], ids=str)
def test_ranks_that_read_parts_find_the_bit(ranks: Ranks, made: Made, tmp_path: Path, sizes: dict[str, int]) -> None:
    """They read rows of the one tensor, and half of the experts."""
    names = ("model.layers.1.self_attn.q_b_proj.weight", EXPERT)
    folders = [made(tmp_path / "none"), *(made(tmp_path / str(place), name) for place, name in enumerate(names))]
    told = ranks.run("tests.e2e.rank_jobs:identities", 2, list(map(str, folders)), sizes)
    alone = [pd.load_model(folder).weights_id.hex() for folder in folders]
    assert told == [alone, alone]
    assert len(set(alone)) == 3


def test_the_samples_are_equal(made: Made, tmp_path: Path) -> None:
    """So that all of this tests what samples do not show."""
    for name in (EXPERT, "lm_head.weight"):
        folders = made(tmp_path / f"one {name}"), made(tmp_path / f"other {name}", name)
        layouts = [pd.load_model(folder, dtype=torch.bfloat16).kv_layout(CACHE) for folder in folders]
        assert layouts[0].sampled_weights_id == layouts[1].sampled_weights_id
        assert layouts[0].layout_id != layouts[1].layout_id
