"""Loading: what a folder lacks is named before memory is taken, and what it holds arrives as it was stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.kv.pool import PagePool
from pdinfer.model import load_plan
from pdinfer.model.destinations import Destinations
from pdinfer.model.load import load_model
from pdinfer.parallel.topology import Topology
from pdinfer.planning import EnginePlan
from pdinfer.testing import FAMILIES, random_model, tiny_config, tiny_config_dict, write_checkpoint

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"
GATE, BIAS = "model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.e_score_correction_bias"
INDEX = "model.safetensors.index.json"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def change(folder: Path, tensors: Mapping[str, Tensor | None]) -> None:
    """Replace tensors in their files, remove those that are None, and put new ones in the first file."""
    files = weight_map(folder)
    first = min(files.values())
    for file in sorted(set(files.values())):
        held: dict[str, Tensor | None] = {**load((folder / file).read_bytes())}
        held |= {name: tensor for name, tensor in tensors.items() if files.get(name, first) == file}
        kept = {name: tensor for name, tensor in held.items() if tensor is not None}
        save_file(kept, folder / file, metadata={"format": "pt"})
    files = {name: files.get(name, first) for name in files | tensors if tensors.get(name, 0) is not None}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config_dict())
    return tmp_path


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config_dict(tie_word_embeddings=True))
    return tmp_path


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when a weight takes memory. Weights may be listed on the meta device."""

    def listing(device: torch.device, *arguments: Any) -> Destinations:
        assert device.type == "meta", "memory was taken"
        return Destinations(device, *arguments)

    monkeypatch.setattr(load_plan, "Destinations", listing)


def refusal(folder: Path, **arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **arguments)
    return str(caught.value)


# What does not fit the config


@pytest.mark.usefixtures("no_memory")
def test_the_guard_of_memory_guards(folder: Path) -> None:
    with pytest.raises(AssertionError, match="memory was taken"):
        load_model(folder)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param((EMBED,), id="H56-embedding"),
        pytest.param((HEAD,), id="H56-head-not-tied"),
        pytest.param((EXPERT, BIAS), id="H56-part-of-a-stack-and-a-bias"),
    ],
)
def test_missing_tensors_are_named(folder: Path, names: tuple[str, ...]) -> None:
    change(folder, dict.fromkeys(names))
    message = refusal(folder)
    assert f"{folder}: {len(names)} tensors that the config asks for are missing" in message
    assert all(name in message for name in names)


@pytest.mark.usefixtures("no_memory")
def test_of_many_missing_tensors_ten_are_named(folder: Path) -> None:
    gone = [name for name in weight_map(folder) if ".experts." in name]
    change(folder, dict.fromkeys(gone))
    message = refusal(folder)
    assert sum(name in message for name in gone) == 10
    assert message.endswith(f"and {len(gone) - 10} more")


@pytest.mark.usefixtures("no_memory")
def test_a_tensor_that_its_file_lacks_is_named(folder: Path) -> None:
    """H55: the index promises it."""
    files = weight_map(folder)
    change(folder, {EXPERT: None})
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    assert f"lacks tensors in the files where its index puts them, 1: '{EXPERT}'" in refusal(folder)


@pytest.mark.usefixtures("no_memory")
def test_a_missing_file_is_named(folder: Path) -> None:
    """H55: one shard was not downloaded."""
    file = weight_map(folder)[EXPERT]
    (folder / file).unlink()
    assert file in refusal(folder)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        pytest.param(EMBED, [98, 48], [97, 48], id="H06-embedding-rows"),
        pytest.param(HEAD, [96, 48], [97, 48], id="H06-head-rows"),
        pytest.param(EXPERT, [24, 48], [48, 24], id="H56-transposed"),
        pytest.param(NORM, [48, 1], [48], id="H56-rank"),
        pytest.param(BIAS, [1], [8], id="H56-would-broadcast"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_its_file(
    folder: Path, name: str, shape: list[int], expected: list[int]
) -> None:
    change(folder, {name: torch.ones(shape)})
    message = refusal(folder)
    assert f"{folder}: 1 tensors do not fit the config" in message
    assert f"{name} is {shape} in {weight_map(folder)[name]}, the config says {expected}" in message


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(BIAS, torch.int64, id="H52-int64"),
        pytest.param(NORM, torch.uint8, id="H52-uint8"),
    ],
)
def test_a_tensor_of_another_kind_is_named_with_its_file(folder: Path, name: str, dtype: torch.dtype) -> None:
    files = weight_map(folder)
    shape = load((folder / files[name]).read_bytes())[name].shape
    change(folder, {name: torch.ones(shape).to(dtype)})
    message = refusal(folder)
    assert f"{name} is {dtype} in {files[name]}, supported for FLOAT are float32, bfloat16, float16" in message


@pytest.mark.usefixtures("no_memory")
def test_float64_is_refused_with_its_file(folder: Path) -> None:
    """H52."""
    change(folder, {NORM: torch.ones(48, dtype=torch.float64)})
    message = refusal(folder)
    assert all(word in message for word in (NORM, "F64", weight_map(folder)[NORM]))


# Bad values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(EMBED, "nan", id="H57-nan"),
        pytest.param(EXPERT, "inf", id="H57-inf"),
        pytest.param(BIAS, "-inf", id="H57-minus-inf"),
    ],
)
def test_values_that_are_not_finite_are_refused_unless_allowed(folder: Path, name: str, value: str) -> None:
    tensor = load((folder / weight_map(folder)[name]).read_bytes())[name]
    tensor.view(-1)[[0, -1]] = float(value)
    change(folder, {name: tensor})
    assert refusal(folder) == f"{weight_map(folder)[name]}: tensor {name} holds 2 NaN or infinite values"
    model = load_model(folder, check_finite=False)
    held = {
        EMBED: model.embed_VD,
        EXPERT: model.blocks[1].mlp.experts.down,
        BIAS: model.blocks[2].mlp.router.bias_E,
    }
    assert int((~held[name].isfinite()).sum()) == 2


# The head


def test_a_tied_head_is_the_embedding(tied: Path) -> None:
    model = load_model(tied)
    assert HEAD not in weight_map(tied)
    assert model.lm_head_VD is model.embed_VD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_may_be_stored_twice(tied: Path, dtype: torch.dtype) -> None:
    change(tied, {HEAD: load((tied / weight_map(tied)[EMBED]).read_bytes())[EMBED]})
    model = load_model(tied, dtype=dtype)
    assert model.lm_head_VD is model.embed_VD


@pytest.mark.parametrize(
    "head", [pytest.param(torch.ones(97, 48), id="H56-values"), pytest.param(torch.ones(96, 48), id="H56-shape")]
)
def test_a_tied_head_must_not_differ_from_the_embedding(tied: Path, head: Tensor) -> None:
    change(tied, {HEAD: head})
    message = refusal(tied)
    assert f"{weight_map(tied)[HEAD]}: tie_word_embeddings is true but {HEAD} differs from {EMBED}" in message


# What arrives


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives_in_its_place(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict(family), seed=4, num_shards=3)
    loaded, made = load_model(tmp_path), random_model(tiny_config(family), seed=4)
    assert loaded.config == made.config
    assert torch.equal(loaded.logits(TOKENS), made.logits(TOKENS))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_stored_dtype_is_the_default(tmp_path: Path, stored: str) -> None:
    write_checkpoint(tmp_path, tiny_config_dict(torch_dtype=stored))
    model = load_model(tmp_path)
    assert str(model.dtype) == str(model.embed_VD.dtype) == f"torch.{stored}"


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_and_routers_stay_exact(tmp_path: Path, stored: str, dtype: torch.dtype) -> None:
    tensors = write_checkpoint(tmp_path, tiny_config_dict(torch_dtype=stored))
    model = load_model(tmp_path, dtype=dtype)
    for held, name in (
        (model.embed_VD, EMBED),
        (model.lm_head_VD, HEAD),
        (model.norm.weight_D, NORM),
        (model.blocks[1].mlp.experts.down[7], EXPERT),
    ):
        assert held.dtype == dtype
        assert torch.equal(held, tensors[name].to(dtype))
    for held, name in ((model.blocks[2].mlp.router.weight_ED, GATE), (model.blocks[2].mlp.router.bias_E, BIAS)):
        assert held.dtype == torch.float32
        assert torch.equal(held, tensors[name].float())


def test_the_weights_have_an_identity(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        write_checkpoint(tmp_path / name, tiny_config_dict(), seed=seed)
    one, same, other = (load_model(tmp_path / name).identity for name in ("one", "same", "other"))
    assert one.weights_id == same.weights_id != other.weights_id
    assert one.sampled_weights_id == same.sampled_weights_id != other.sampled_weights_id
    with Checkpoint.open(tmp_path / "one") as files:
        assert {tensor.name for tensor in one.tensors.of("")} == files.tensors.keys()


def test_a_head_that_is_the_embedding_is_no_other_identity(tied: Path) -> None:
    """Whether or not it is stored twice: it was looked at, and is not used."""
    alone = load_model(tied).weights_id
    change(tied, {HEAD: load_model(tied).embed_VD})
    assert load_model(tied).weights_id == alone


def test_progress_grows_to_the_total(folder: Path) -> None:
    change(folder, {"model.rotary_emb.inv_freq": torch.ones(48, 96)})
    calls: list[tuple[int, int]] = []
    load_model(folder, progress=lambda done, total: calls.append((done, total)))
    with Checkpoint.open(folder) as files:
        total = files.total_bytes - 48 * 96 * 4
        assert len(calls) == len(files.tensors) - 1
    done = [done for done, _ in calls]
    assert done == sorted(set(done))
    assert done[-1] == total
    assert {total for _, total in calls} == {total}


# What the caller asks for


def test_a_model_larger_than_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H14: it is too large by a single byte."""
    config = ModelConfig.from_checkpoint(folder)
    needed = EnginePlan(name="here", config=config, topology=Topology(), stored="float").weight_bytes
    monkeypatch.setattr(load_plan, "device_memory_bytes", lambda _: needed)
    load_model(folder)
    monkeypatch.setattr(load_plan, "device_memory_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError, match=rf"the weights of .* in torch\.float32 needs about .*\({needed} bytes\)"):
        load_model(folder)


@pytest.mark.usefixtures("no_memory")
def test_a_model_larger_than_memory_takes_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H14."""
    monkeypatch.setattr(load_plan, "device_memory_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match="nothing was allocated"):
        load_model(folder)


def test_an_unknown_device_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match="device 'gpu7' is not a torch device name"):
        load_model(folder, device="gpu7")
    with pytest.raises(BackendUnavailable, match="device 'gpu7' is not a torch device name"):
        random_model(device="gpu7")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda:0")], ids=str)
def test_cuda_is_refused_where_there_is_none(
    folder: Path, device: str | torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=f"device {device} was asked for and torch sees no CUDA device"):
        load_model(folder, device=device)


def test_a_device_of_another_vendor_needs_the_package_that_brings_it(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"'npu' is not a torch device name .* such as torch_npu for 'npu'"):
        load_model(folder, device="npu")


def test_a_device_without_a_module_is_refused(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match="device meta cannot hold a model here, since torch has no module"):
        load_model(folder, device="meta")


def test_a_device_may_be_a_name_or_an_object(folder: Path) -> None:
    assert load_model(folder, device="cpu").device == load_model(folder, device=torch.device("cpu")).device


def test_two_ranks_have_to_be_told_where_they_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"2 ranks have no rendezvous address: .* torchrun"):
        load_model(folder, topology=Topology(world_size=2, tp_size=2))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tp_size": 3}, "tp_size 3 does not divide num_attention_heads = 4"),
        ({"tp_size": 4, "moe_dense_tp_size": 4}, "moe_dense_tp_size 4 does not divide intermediate_size = 82"),
        ({"dp_size": 3, "ep_size": 3}, r"ep_size 3 does not divide n_routed_experts \+ num_redundant_experts = 8 \+ 0"),
    ],
)
def test_what_ranks_cannot_divide_is_refused_before_they_meet(tmp_path: Path, sizes: dict[str, int], told: str) -> None:
    write_checkpoint(tmp_path, tiny_config_dict(intermediate_size=82))
    with pytest.raises(ConfigError, match=told):
        load_model(tmp_path, topology=Topology(world_size=max(sizes.values()), **sizes))


def test_a_dtype_that_cannot_compute_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype torch\.int8 cannot be used; choose one of torch\.float32"):
        load_model(folder, dtype=torch.int8)
    for name in ("float64", "torch.float32", "", "x" * 100):
        with pytest.raises(ConfigError, match=r"dtype '.{0,60} cannot be used; .* or its name without torch"):
            load_model(folder, dtype=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_dtype_may_be_given_by_name(folder: Path, dtype: torch.dtype) -> None:
    assert load_model(folder, dtype=str(dtype).removeprefix("torch.")).dtype == dtype


def test_weights_takes_three_words(folder: Path) -> None:
    expected = load_model(folder).logits(TOKENS)
    for word in ("auto", "stored", "float"):
        assert torch.equal(load_model(folder, weights=word).logits(TOKENS), expected)
    with pytest.raises(ConfigError, match=r'"auto", "stored" or "float", got \'packed\''):
        load_model(folder, weights="packed")


def test_a_model_that_was_loaded_for_one_cache_refuses_others(folder: Path) -> None:
    cache = CacheConfig(page_size=16, num_pages=4)
    model = load_model(folder, dtype="float32", cache=cache)
    assert (model.resolved.spec.page_size, model.resolved.spec.kv_format) == (16, "float32")
    PagePool(model, cache)
    torch.testing.assert_close(model.logits(TOKENS), load_model(folder, dtype="float32").logits(TOKENS))
    with pytest.raises(ConfigError, match=r"page_size 64 and float32 latents .* chosen for page_size 16 and float32"):
        PagePool(model)
    anyhow = load_model(folder, dtype="float32")
    assert anyhow.resolved.spec.page_size is anyhow.resolved.spec.kv_format is None
    PagePool(anyhow, cache)


def test_providers_are_forced(folder: Path) -> None:
    choices = load_model(folder, providers={"linear": "reference"}).resolved.choices
    assert {choice.op for choice in choices if choice.provider == "reference"} == {"linear"}


# Memory

PEAK = """
import sys

from pdinfer.model.load import load_model


def status_bytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


before = status_bytes("VmRSS:")
model = load_model(sys.argv[1])
print(status_bytes("VmHWM:") - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured with /proc")
def test_loading_takes_the_model_and_one_tensor(tmp_path: Path) -> None:
    sizes = {"vocab_size": 12000, "hidden_size": 512, "intermediate_size": 4096, "moe_intermediate_size": 720}
    tensors = write_checkpoint(tmp_path, tiny_config_dict(**sizes), num_shards=4)
    total, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())
    assert 140e6 < total < 170e6
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path})
    grown = int(done.stdout)
    assert total < grown < 1.15 * total + largest + 40e6


@pytest.mark.parametrize("device", ["meta", "xpu", "mps", None, 3.5])
def test_a_device_that_cannot_hold_a_model_is_one_sentence(tmp_path: Path, device: object) -> None:
    """The result is neither a model without weights nor an error of torch's own."""
    write_checkpoint(tmp_path, tiny_config_dict())
    with pytest.raises((BackendUnavailable, ConfigError), match=r"device"):
        load_model(tmp_path, device=device)  # type: ignore[arg-type]


def test_a_value_too_large_for_the_chosen_dtype_is_refused(tmp_path: Path) -> None:
    """The value is finite as stored and infinite as loaded."""
    tensors = write_checkpoint(tmp_path, tiny_config_dict(), num_shards=1)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight overflows torch\.float16"):
        load_model(tmp_path, dtype=torch.float16)


def test_a_provider_for_an_op_that_does_not_exist_is_refused() -> None:
    """A misspelt name would otherwise force nothing."""
    with pytest.raises(BackendUnavailable, match="no op is called 'mla_prefil'"):
        resolve_ops(OpSpec(device="cpu", dtype=torch.float32), forced={"mla_prefil": "reference"})
