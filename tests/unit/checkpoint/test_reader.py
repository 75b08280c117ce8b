"""Checkpoints: what is found, what is read, and that reading is exact and safe."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdinfer.checkpoint import reader
from pdinfer.checkpoint.header import DTYPES
from pdinfer.checkpoint.reader import Checkpoint, TensorInfo
from pdinfer.errors import CheckpointError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (24,), dtype=torch.uint8, generator=generator)
    tensors = {f"layer.{name}": raw.view(dtype).clone() for name, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["matrix"] = torch.randn(300, 50, generator=generator).to(torch.bfloat16)
    tensors["deep"] = torch.randn(1, 2, 1, 2, 1, 2, 1, 3, generator=generator)
    return tensors


def _save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    weight_map = {name: SHARDS[place % 2] for place, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_one_file_reads_back_every_dtype(tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "anything.safetensors", metadata={"format": "pt", "brace": '}"{'})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        assert checkpoint.files == ("anything.safetensors",)
        assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
        for name, expected in tensors.items():
            info = checkpoint.tensors[name]
            tensor = checkpoint.read(info)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape) == (info.dtype, info.shape)
            assert info.num_bytes == expected.nbytes
            assert tensor.is_contiguous()
            assert _same_bytes(tensor, expected)


def test_shards_and_index(tmp_path: Path) -> None:
    tensors = _tensors()
    weight_map = _save_sharded(tmp_path, tensors)
    with Checkpoint.open(str(tmp_path)) as checkpoint:
        assert checkpoint.files == SHARDS
        assert {name: info.file for name, info in checkpoint.tensors.items()} == weight_map
        assert all(_same_bytes(checkpoint.read(checkpoint.tensors[name]), tensors[name]) for name in tensors)
        with pytest.raises(TypeError):
            checkpoint.tensors["x"] = checkpoint.tensors["matrix"]  # type: ignore[index]


def test_other_index_names_and_files_beside_it_are_fine(tmp_path: Path) -> None:
    _save_sharded(tmp_path, _tensors())
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "quant_model_weights.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not opened")
    (tmp_path / "stray.safetensors").write_bytes(b"not opened")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.files == SHARDS


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors"]
)
def test_an_adapter_beside_the_weights_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """As transformers would apply it."""
    _save_sharded(tmp_path, _tensors())
    (tmp_path / name).write_bytes(b"not opened")
    with pytest.raises(CheckpointError, match=f"adapter.*1: '{name}', which would not be applied; merge it"):
        Checkpoint.open(tmp_path)


def test_a_read_tensor_is_fresh(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        first = checkpoint.read(checkpoint.tensors["a"])
        first.zero_()
        assert checkpoint.read(checkpoint.tensors["a"]).tolist() == [1.0] * 4
    assert first.tolist() == [0.0] * 4


def test_in_file_order(tmp_path: Path) -> None:
    _save_sharded(tmp_path, _tensors())
    with Checkpoint.open(tmp_path) as checkpoint:
        infos = list(checkpoint.in_file_order(checkpoint.tensors))
        assert [(info.file, info.offset) for info in infos] == sorted((info.file, info.offset) for info in infos)
        assert len(infos) == len(checkpoint.tensors)
        with pytest.raises(CheckpointError, match=r"lacks tensors, 12: 'no\.0'.* and 2 more"):
            checkpoint.in_file_order([f"no.{place}" for place in range(12)])


def test_symbolic_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"a": torch.ones(4)}, tmp_path / "blobs" / "1234")
    (tmp_path / "model.safetensors").symlink_to("blobs/1234")
    link = tmp_path / "elsewhere"
    link.symlink_to(tmp_path)
    with Checkpoint.open(link) as checkpoint:
        assert checkpoint.read(checkpoint.tensors["a"]).tolist() == [1.0] * 4


@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1001, 2999, 3000])
def test_every_byte_of_a_tensor_is_in_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 1000)

    def blocks(value: torch.Tensor, rows: range | None = None) -> list[list[int]]:
        save_file({"a": value}, tmp_path / "model.safetensors")
        with Checkpoint.open(tmp_path) as checkpoint:
            read = checkpoint.read(checkpoint.tensors["a"], rows)
            assert torch.equal(read, value if rows is None else value[rows.start : rows.stop])
            return checkpoint.blocks["a"].tolist()

    value = (torch.arange(num_bytes) % 251).to(torch.uint8)
    whole = blocks(value)
    assert len(whole) == -(-num_bytes // 1000)
    for byte in {0, num_bytes // 2, num_bytes - 1}:
        changed = value.clone()
        changed[byte] += 1
        different = [at for at, pair in enumerate(zip(whole, blocks(changed), strict=True)) if pair[0] != pair[1]]
        assert different == [byte // 1000]
        absent = [reader.ABSENT] * 2
        one = [absent] * len(whole)
        one[byte // 1000] = whole[byte // 1000]
        assert blocks(value, range(byte, byte + 1)) == one, "the block that a row is in, and no other"


def test_sample_digest_tells_weights_apart(tmp_path: Path) -> None:
    def digest(place: str, tensors: dict[str, torch.Tensor]) -> bytes:
        (tmp_path / place).mkdir()
        save_file(tensors, tmp_path / place / "model.safetensors")
        with Checkpoint.open(tmp_path / place) as checkpoint:
            return checkpoint.sample_digest()

    tensors = _tensors()
    original = digest("original", tensors)
    (tmp_path / "sharded").mkdir()
    _save_sharded(tmp_path / "sharded", tensors)
    with Checkpoint.open(tmp_path / "sharded") as checkpoint:
        assert checkpoint.sample_digest() == original
    changed = tensors["matrix"].clone()
    changed[0, 0] += 1
    others = [
        digest("value", tensors | {"matrix": changed}),
        digest("shape", tensors | {"matrix": tensors["matrix"].reshape(50, 300)}),
        digest("dtype", tensors | {"matrix": tensors["matrix"].view(torch.float16)}),
        digest("name", {name.replace("matrix", "matrix2"): tensor for name, tensor in tensors.items()}),
    ]
    assert len({original, *others}) == 5
    assert len(original) == 32


def test_closing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = Checkpoint.open(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    checkpoint.close()
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(CheckpointError, match=r"'a': .*is closed"):
        checkpoint.read(checkpoint.tensors["a"])
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.sample_digest()


def test_a_refused_folder_leaves_no_file_open(tmp_path: Path) -> None:
    _save_sharded(tmp_path, _tensors())
    (tmp_path / SHARDS[1]).write_bytes(b"short")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="5 bytes long"):
        Checkpoint.open(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_may_not_all_be_open_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    limits, next_one = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one + 1, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"b\.safetensors: Too many open files; let this process open more"):
            Checkpoint.open(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_info_of_another_folder_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    foreign = TensorInfo(name="b", dtype=torch.float32, shape=(4,), file="../b", offset=0, num_bytes=16)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="not part of it"):
        checkpoint.read(foreign)
