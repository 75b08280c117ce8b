"""Model folders and their links: snapshots of a hub cache, links that the host trusts, and folders that only look like
one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import pdinfer as pd
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.testing import tiny_config_dict, write_checkpoint

REVISION = "5d1e2f"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without links: two shards, an index and a generation config."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    write_checkpoint(folder, tiny_config_dict())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def cached(plain: Path, parent: Path, *, absolute: bool = False, inside: str = "") -> Path:
    """`plain` as huggingface_hub keeps it: files in blobs, and links to them in a snapshot."""
    cache = parent / "hub" / "models--example--tiny"
    snapshot = cache / "snapshots" / REVISION / inside
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        blob = cache / "blobs" / f"{number:064x}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob if absolute else os.path.relpath(blob, snapshot))
    return snapshot


def linked(folder: Path, at: Path) -> Path:
    at.symlink_to(folder)
    return at


def moved(snapshot: Path, to: Path) -> Path:
    cache = snapshot.parent.parent
    cache.rename(to / cache.name)
    return to / cache.name / "snapshots" / REVISION


@pytest.mark.parametrize(
    "reached",
    [
        pytest.param(cached, id="as-it-lies"),
        pytest.param(lambda plain, tmp: cached(plain, tmp, absolute=True), id="absolute-links"),
        pytest.param(lambda plain, tmp: cached(plain, tmp, inside="sub"), id="a-folder-in-it"),
        pytest.param(lambda plain, tmp: linked(cached(plain, tmp), tmp / "model"), id="by-a-link"),
        pytest.param(
            lambda plain, tmp: (
                linked(cached(plain, tmp).parents[2], tmp / "cache") / f"models--example--tiny/snapshots/{REVISION}"
            ),
            id="through-a-link",
        ),
        pytest.param(lambda plain, tmp: moved(cached(plain, tmp), tmp), id="moved"),
    ],
)
def test_a_snapshot_of_a_hub_cache_is_loaded(plain: Path, tmp_path: Path, reached: Callable[..., Path]) -> None:
    folder = reached(plain, tmp_path)
    assert ModelConfig.from_checkpoint(folder).eos_token_ids == (1,)
    assert pd.load_model(folder).logits([1, 2]).equal(pd.load_model(plain).logits([1, 2]))


def test_a_relative_path_is_no_other(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cached(plain, tmp_path))
    ModelConfig.from_checkpoint(".")


def refused(folder: Path, name: str) -> None:
    """Assert that every reader refuses it, and tells the way out."""
    with pytest.raises((ConfigError, CheckpointError), match=r"outside the model folder.*trusted_roots") as caught:
        pd.load_model(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model-00002-of-00002.safetensors"])
def test_any_other_link_out_is_refused(plain: Path, tmp_path: Path, name: str) -> None:
    """This holds also where the folder is a snapshot: for links to another model's blobs, to another snapshot, or
    through a blob."""
    snapshot = cached(plain, tmp_path)
    target = (snapshot / name).resolve()
    others = tmp_path / "hub" / "models--example--other" / "blobs"
    others.mkdir(parents=True)
    other = snapshot.parent / "other"
    other.mkdir()
    for elsewhere in (others / "0", other / name, tmp_path / "models--example--tiny", snapshot.parent.parent / "ref"):
        shutil.copy(target, elsewhere)
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(elsewhere)
        refused(snapshot, name)
    target.unlink()
    target.symlink_to(others / "0")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(target)
    refused(snapshot, name)


@pytest.mark.parametrize(
    "rename",
    [
        pytest.param({"models--example--tiny": "example--tiny"}, id="no-model"),
        pytest.param({"snapshots": "revisions"}, id="no-snapshot"),
        pytest.param({"blobs": "files"}, id="no-blobs"),
    ],
)
def test_what_only_looks_like_a_hub_cache_is_none(plain: Path, tmp_path: Path, rename: dict[str, str]) -> None:
    snapshot = cached(plain, tmp_path, absolute=True)
    links = {path.name: path.resolve() for path in snapshot.iterdir()}
    ((old, new),) = rename.items()

    def there(path: Path) -> Path:
        return Path(*(new if part == old else part for part in path.parts))

    found = next(path for path in (snapshot, *snapshot.parents, snapshot.parent.parent / "blobs") if path.name == old)
    found.rename(found.with_name(new))
    snapshot = there(snapshot)
    for name, target in links.items():
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(there(target))
    refused(snapshot, "config.json")


def test_blobs_that_are_a_link_are_not_the_caches_own(plain: Path, tmp_path: Path) -> None:
    """Otherwise the one who packs a folder could have it read any other. A host that keeps its blobs so says so
    itself."""
    snapshot = cached(plain, tmp_path)
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "disk")
    blobs.symlink_to(tmp_path / "disk")
    refused(snapshot, "config.json")
    pd.load_model(snapshot, trusted_roots=[tmp_path / "disk"])


def test_a_link_to_a_trusted_root_is_followed(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).symlink_to(path)
    refused(folder, "config.json")
    refused_too = [tmp_path, tmp_path / "absent", plain / "config.json" / "x"]
    with pytest.raises(ConfigError, match="outside the model folder"):
        pd.load_model(folder, trusted_roots=refused_too)
    (tmp_path / "root").symlink_to(plain.parent)
    model = pd.load_model(folder, trusted_roots=[str(tmp_path / "root")])
    assert model.logits([1, 2]).equal(pd.load_model(plain).logits([1, 2]))
    pd.Pairing.local(folder, trusted_roots=[plain]).close()
    with Checkpoint.open(folder, trusted_roots=[plain]) as files:
        assert files.tensors
    pd.quantize_checkpoint(folder, tmp_path / "quantized", trusted_roots=[plain])
    assert (tmp_path / "quantized" / "generation_config.json").is_file()


OPENERS = [pd.load_model, ModelConfig.from_checkpoint, Checkpoint.open, pd.Pairing.local]


@pytest.mark.parametrize("opens", OPENERS, ids=lambda opens: opens.__qualname__)
@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("deepseek-ai/DeepSeek-V3", "hf download deepseek-ai/DeepSeek-V3 --local-dir"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "hf download deepseek-ai/DeepSeek-V2-Lite-Chat --local-dir"),
        ("DeepSeek-V3", "hf download ORGANIZATION/MODEL --local-dir"),
        ("/models/absent", "hf download ORGANIZATION/MODEL --local-dir"),
        ("a/b; rm -rf c", "hf download ORGANIZATION/MODEL --local-dir"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_a_folder_that_is_not_there_is_not_downloaded(
    opens: Callable[[str], object], folder: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        opens(folder)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400
    if "hf download" in words:
        assert "pdinfer does not download" in str(caught.value)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a folder: give the one that holds"):
        pd.load_model(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot open model folder"):
        pd.load_model(tmp_path / "model.safetensors" / "below")
