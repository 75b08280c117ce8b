"""Every tensor of a checkpoint is read, listed as needing no reading, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checkpoint.schemes import StoredWeights
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError
from pdinfer.model.load import load_model
from pdinfer.model.load_plan import refuse_unread
from pdinfer.testing import tiny_config_dict, write_checkpoint

TOKENS = [5, 3, 8, 1, 9, 2]
NAN = torch.full((2, 2), torch.nan)


def add(folder: Path, tensors: dict[str, torch.Tensor], *, listed: bool = True) -> None:
    """Put more tensors into the last shard, and into the index if `listed`."""
    path = max(folder.glob("*.safetensors"))
    save_file(load_file(path) | tensors, path)
    index = next(folder.glob("*.index.json"))
    content = json.loads(index.read_text())
    if listed:
        content["weight_map"] |= dict.fromkeys(tensors, path.name)
    index.write_text(json.dumps(content))


def refused(folder: Path, *names: str, **options: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **options)
    assert "check that config.json is the model's own" in str(caught.value)
    assert f": {len(names)} tensors are not those of a" in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in names), str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config_dict(hidden_size=64, moe_intermediate_size=32))
    return tmp_path


STRANGE = {
    "a norm of A.X-K1": "model.layers.1.post_mlp_layernorm.weight",
    "a norm of A.X-K1 where it has no use": "model.layers.0.post_mlp_layernorm.weight",
    "a norm of openPangu": "model.layers.0.pre_mlp_layernorm.weight",
    "a sink": "model.layers.1.self_attn.sinks",
    "a norm of heads": "model.layers.1.self_attn.q_norm.weight",
    "an output gate": "model.layers.1.self_attn.g_proj.weight",
    "a query without latent": "model.layers.1.self_attn.q_proj.weight",
    "an indexer": "model.layers.1.self_attn.indexer.wk.weight",
    "a scale of cached keys": "model.layers.1.self_attn.k_scale",
    "a table of a router": "model.layers.1.mlp.gate.tid2eid",
    "a bias": "model.layers.1.self_attn.kv_a_proj_with_mqa_bias",
    "an expert too many": "model.layers.1.mlp.experts.8.gate_proj.weight",
    "a matrix of an expert": "model.layers.1.mlp.experts.3.gate_up_proj.weight",
    "a shared expert in a dense layer": "model.layers.0.mlp.shared_experts.gate_proj.weight",
    "experts in a dense layer": "model.layers.0.mlp.experts.0.gate_proj.weight",
    "a scale of a float weight": "model.layers.1.mlp.experts.3.gate_proj.weight_scale",
    "a layer too many": "model.layers.3.input_layernorm.weight",
    "an MTP layer elsewhere": "mtp.0.eh_proj.weight",
    "an image": "vision_tower.encoder.blocks.0.wo.weight",
    "a part of the embedding": "model.ngram_embedding.weight",
    "residual streams": "model.hc_head.weight",
    "no name at all": "something.else",
}


@pytest.mark.parametrize("what", STRANGE)
def test_an_added_tensor_is_refused_by_name(folder: Path, what: str) -> None:
    add(folder, {STRANGE[what]: torch.ones(48)})
    refused(folder, STRANGE[what])


def test_a_tensor_that_only_a_shard_knows_is_refused_by_name(folder: Path) -> None:
    add(folder, {STRANGE["a norm of A.X-K1"]: torch.ones(48)}, listed=False)
    refused(folder, STRANGE["a norm of A.X-K1"])


def test_many_are_counted_and_ten_named(folder: Path) -> None:
    add(folder, {f"model.layers.{layer}.x": torch.ones(1) for layer in range(30)})
    with pytest.raises(
        CheckpointError, match=r"30 tensors are not those of .*: 'model\.layers\.\d+\.x'.* and 20 more; "
    ):
        load_model(folder)


def test_a_correction_of_a_router_that_has_none_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict("v2"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    add(tmp_path, {name: torch.ones(8)})
    refused(tmp_path, name)


def test_computed_angles_need_no_reading(folder: Path) -> None:
    expected = load_model(folder).logits(TOKENS)
    for name in ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"):
        add(folder, {name: NAN})
    assert torch.equal(load_model(folder).logits(TOKENS), expected)


def test_an_mtp_layer_is_not_asked_for_or_is_whole(tmp_path: Path) -> None:
    config = tiny_config_dict(num_nextn_predict_layers=1)
    write_checkpoint(tmp_path, config, mtp=True)
    strange = "model.layers.3.post_mlp_layernorm.weight"
    add(tmp_path, {strange: torch.ones(48)})
    expected = load_model(tmp_path).logits(TOKENS)
    refused(tmp_path, strange, mtp=True)
    without = tmp_path / "without"
    write_checkpoint(without, config)
    assert torch.equal(load_model(without).logits(TOKENS), expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers = 0.*'model\.layers\.3\."):
        load_model(tmp_path)


def test_of_several_mtp_layers_the_first_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict(num_nextn_predict_layers=2), mtp=True)
    add(tmp_path, {"model.layers.4.eh_proj.weight": NAN})
    load_model(tmp_path, mtp=True)
    add(tmp_path, {"model.layers.5.eh_proj.weight": NAN})
    refused(tmp_path, "model.layers.5.eh_proj.weight", mtp=True)


def test_copies_of_an_mtp_layer_need_no_reading_where_they_are_copies(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, tiny_config_dict(num_nextn_predict_layers=1), mtp=True)
    add(tmp_path, {"model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()})
    assert load_model(tmp_path, mtp=True).mtp is not None


def test_an_indexer_whose_choice_is_not_used_needs_no_reading(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict("glm"))
    expected = load_model(tmp_path).logits(TOKENS)
    add(tmp_path, {"model.layers.1.self_attn.indexer.wk.weight": NAN})
    assert torch.equal(load_model(tmp_path).logits(TOKENS), expected)
    add(tmp_path, {"model.layers.2.self_attn.indexer.gate.weight": NAN})
    refused(tmp_path, "model.layers.2.self_attn.indexer.gate.weight")


@pytest.mark.parametrize("scheme", ["fp8", "w8a8_dynamic", "int4", "mxfp4"])
def test_what_belongs_to_a_quantized_weight_is_read_and_no_more(folder: Path, tmp_path: Path, scheme: str) -> None:
    quantized = tmp_path / "quantized"
    quantize_checkpoint(folder, quantized, scheme=scheme)
    load_model(quantized)
    strange = "model.layers.1.mlp.experts.3.gate_proj.input_scale"
    add(quantized, {strange: torch.ones(1)})
    refused(quantized, strange)


@pytest.mark.parametrize("scheme", [None, "fp8", "w8a8_dynamic", "int4", "mxfp4"])
def test_experts_of_other_ranks_are_known(folder: Path, tmp_path: Path, scheme: str | None) -> None:
    """A rank reads its own experts. Those of other ranks belong to the model as well, and nothing else does."""
    if scheme is not None:
        quantize_checkpoint(folder, tmp_path / "quantized", scheme=scheme)
        folder = tmp_path / "quantized"
    config = ModelConfig.from_checkpoint(folder)
    add(folder, {"model.layers.1.mlp.experts.9.down_proj.weight": torch.ones(1)})
    with Checkpoint.open(folder) as files:
        stored = StoredWeights.survey(files, config)
        matrices = [stored.matrix(name) for name in files.tensors]
        companions = {part for name in matrices for part in stored.parts(name)[1:]}
        experts = {f".experts.{expert}." for expert in range(4, 10)}
        read = [n for n in matrices if n not in companions and not any(expert in n for expert in experts)]
        with pytest.raises(
            CheckpointError, match=r": 1 tensors are not .*'model\.layers\.1\.mlp\.experts\.9\.down_proj"
        ):
            refuse_unread(stored, read, config, mtp=False)
