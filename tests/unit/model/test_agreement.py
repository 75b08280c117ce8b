"""Ranks that read different rows and experts have the identity of one that reads everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from msgspec import UNSET
from safetensors.torch import save_file
from torch import Tensor

from pdinfer.checkpoint import reader
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.errors import CheckpointError
from pdinfer.identity import WeightsIdentity
from pdinfer.model.load_plan import agreed_identity
from pdinfer.parallel.groups import Group, Groups
from pdinfer.testing import tiny_config
from tests.unit.parallel.thread_groups import ThreadGroup, groups_of, on_ranks

CPU = torch.device("cpu")
CONFIG = tiny_config()
MTP = f"model.layers.{CONFIG.num_hidden_layers}.eh_proj.weight"
TENSORS = {
    "model.norm.weight": torch.arange(50, dtype=torch.int32),
    "q_b_proj.weight": torch.arange(24 * 37, dtype=torch.int32).view(24, 37),
    "experts.0.weight": torch.arange(8, dtype=torch.int64),
    "experts.1.weight": torch.arange(8, 16, dtype=torch.int64),
}
Read = Callable[[Checkpoint, int], set[str]]


class MeetingGroup(ThreadGroup):
    def largest(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.meeting.of(self.rank, x)).max(0).values)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 1000)


def written(folder: Path, tensors: dict[str, Tensor] = TENSORS) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "a.safetensors")
    return folder


def with_another_byte(folder: Path, name: str, byte: int) -> Path:
    written(folder)
    with Checkpoint.open(folder) as files:
        info = files.tensors[name]
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset + byte)
        file.write(b"\xff")
    return folder


def identity(folder: Path, read: Read, world: Group, sampled: bytes = b"s") -> WeightsIdentity:
    with Checkpoint.open(folder) as files:
        return agreed_identity(files, read(files, world.rank), world, CPU, CONFIG, sampled)


def everything(files: Checkpoint, rank: int) -> set[str]:
    for info in files.tensors.values():
        files.read(info)
    return set(files.tensors)


def a_part(num_ranks: int) -> Read:
    """Return what reads the norm, a part of the rows of a matrix, and one expert of two."""

    def read(files: Checkpoint, rank: int) -> set[str]:
        names = ["model.norm.weight", f"experts.{rank % 2}.weight"]
        for name in names:
            files.read(files.tensors[name])
        files.read(files.tensors["q_b_proj.weight"], range(24 * rank // num_ranks, 24 * (rank + 1) // num_ranks))
        return {*names, "q_b_proj.weight"}

    return read


def of_ranks(folders: list[Path], read: Read) -> list[WeightsIdentity | str]:
    """Return what each rank, with a folder of its own, makes of it: an identity, or why there is none."""

    def of_rank(groups: Groups) -> WeightsIdentity | str:
        fields = {field.name: getattr(groups.world, field.name) for field in attrs.fields(ThreadGroup)}
        world = MeetingGroup(**fields)
        try:
            return identity(folders[world.rank], read, world)
        except CheckpointError as error:
            return str(error)

    return on_ranks(groups_of(tp_size=len(folders)), of_rank)


ALONE = Group("world")


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_ranks_that_read_parts_have_the_identity_of_one_that_reads_all(tmp_path: Path, num_ranks: int) -> None:
    folder = written(tmp_path / "a")
    alone = identity(folder, everything, ALONE)
    for one in of_ranks([folder] * num_ranks, a_part(num_ranks)):
        assert isinstance(one, WeightsIdentity)
        assert (one.weights_id, one.tensors.of("")) == (alone.weights_id, alone.tensors.of(""))
    assert len(alone.weights_id) == 32


@pytest.mark.parametrize("byte", [0, 999, 2000, 24 * 37 * 4 - 1])
def test_a_byte_that_one_rank_alone_reads_is_another_identity(tmp_path: Path, byte: int) -> None:
    folder, other = written(tmp_path / "a"), with_another_byte(tmp_path / "b", "q_b_proj.weight", byte)
    alone, changed = identity(folder, everything, ALONE), identity(other, everything, ALONE)
    assert changed.weights_id != alone.weights_id
    reads_it = byte // (12 * 37 * 4)
    for one in of_ranks([other if rank == reads_it else folder for rank in range(2)], a_part(2)):
        assert isinstance(one, WeightsIdentity)
        assert one.weights_id == changed.weights_id, "the others' copies of this byte are used by nobody"


@pytest.mark.parametrize(
    ("name", "byte"), [("model.norm.weight", 133), ("q_b_proj.weight", 1000), ("q_b_proj.weight", 1999)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_read_other_bytes_of_one_block_all_say_of_what_tensor(
    tmp_path: Path, name: str, byte: int, rank: int
) -> None:
    """The rows of two ranks meet in the second block of the matrix."""
    folders = [written(tmp_path / "a"), written(tmp_path / "b")]
    folders[rank] = with_another_byte(tmp_path / "c", name, byte)
    said = of_ranks(folders, a_part(2))
    assert all(f"other bytes of tensor '{name}' than another rank" in str(text) for text in said), said


def test_only_what_was_read_counts(tmp_path: Path) -> None:
    """Not what was only looked at, such as a head that is the embedding."""
    folder = written(tmp_path / "a")
    part = {"model.norm.weight", "experts.0.weight"}

    def some(files: Checkpoint, rank: int) -> set[str]:
        return everything(files, rank) & part

    found = identity(folder, some, ALONE)
    assert {tensor.name for tensor in found.tensors.of("")} == part
    assert found.weights_id != identity(folder, everything, ALONE).weights_id
    assert found.mtp_weights_id is UNSET


def test_an_mtp_layer_has_an_id_of_its_own(tmp_path: Path) -> None:
    folders = [written(tmp_path / str(value), TENSORS | {MTP: torch.full((3, 3), value)}) for value in (0.0, 1.0)]
    one, other = (identity(folder, everything, ALONE) for folder in folders)
    without = identity(folders[0], lambda files, rank: everything(files, rank) - {MTP}, ALONE)
    assert one.weights_id == other.weights_id == without.weights_id
    assert one.mtp_weights_id != other.mtp_weights_id
    assert without.mtp_weights_id is UNSET


def test_names_dtypes_and_shapes_count(tmp_path: Path) -> None:
    norm = TENSORS["model.norm.weight"]
    others = [{}, {"model.norm.weight": norm.view(torch.float32)}, {"model.norm.weight": norm.view(5, 10)}]
    sets = [*(TENSORS | other for other in others), {f"{name}s": tensor for name, tensor in TENSORS.items()}]
    folders = [written(tmp_path / str(place), tensors) for place, tensors in enumerate(sets)]
    assert len({identity(folder, everything, ALONE).weights_id for folder in folders}) == 4
