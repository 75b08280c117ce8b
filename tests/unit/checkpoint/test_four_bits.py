"""Experts in four bits as compressed-tensors packs them: the numbers of a twin in floats, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

import pdinfer as pd
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checkpoint.schemes import MXFP4_OF_V4, StoredWeights
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.kernels.formats.format import Format, Shard
from pdinfer.kernels.formats.four_bits import MXFP4, Int4, quantize_int4, quantize_mxfp4
from pdinfer.kernels.formats.weights import columns_of, dequantize
from pdinfer.model.destinations import Destinations
from pdinfer.model.load import load_model
from pdinfer.testing import tiny_config_dict, write_checkpoint

SCHEMES = ("int4", "mxfp4")
SIZES = {"hidden_size": 96, "moe_intermediate_size": 64}
EXPERT = "model.layers.2.mlp.experts.5.down_proj"
TOKENS = list(range(3, 30))
Change = Callable[[dict[str, Tensor]], object]

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make folders "int4" and "mxfp4" of one model, and a twin of each that holds the same numbers in float32."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "floats", tiny_config_dict(**SIZES))
    for scheme in SCHEMES:
        quantize_checkpoint(folder / "floats", folder / scheme, scheme=scheme)
        changed(folder / scheme, folder / f"{scheme}-twin", unpack, lambda config: config.pop("quantization_config"))
    return folder


def changed(source: Path, folder: Path, change: Change, config: Callable[[dict[str, Any]], object] = len) -> Path:
    """Write a copy of a folder with other tensors and another config."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load(file.read_bytes())
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    stored = json.loads((source / "config.json").read_text())
    config(stored)
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


def number(code: int, scheme: str) -> float:
    """Return what a code stands for, by the words of the formats."""
    if scheme == "int4":
        return code - 8
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def unpack(tensors: dict[str, Tensor]) -> None:
    """Put floats in the place of what is packed, code by code."""
    for name in [name for name in tensors if name.endswith("_packed")]:
        base, words = name.removesuffix("_packed"), tensors.pop(name)
        tensors.pop(f"{base}_shape", None)
        scale = tensors.pop(f"{base}_scale")
        scheme, per = ("int4", 8) if words.dtype == torch.int32 else ("mxfp4", 2)
        codes = torch.stack([words.long() >> 4 * at & 15 for at in range(per)], -1).flatten(-2)
        values = torch.tensor([number(code, scheme) for code in range(16)])[codes]
        scales = scale.float() if scheme == "int4" else torch.exp2(scale.float() - 127)
        tensors[base] = values * scales.repeat_interleave(32, -1)


@every_scheme
@pytest.mark.parametrize(("weights", "providers"), [("auto", None), ("float", None), ("stored", "reference")])
def test_packed_weights_are_those_of_the_twin(made: Path, scheme: str, weights: str, providers: str | None) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "providers": providers}
    twin = load_model(made / f"{scheme}-twin", **options).logits(TOKENS)
    model = load_model(made / scheme, weights=weights, **options)
    assert torch.allclose(model.logits(TOKENS), twin, atol=1e-5)
    kept = 'became float32 (weights="float")' if weights == "float" else "held as they are stored"
    assert any(f"{scheme.upper()} weights" in line and kept in line for line in model.resolved.weights)


@every_scheme
def test_they_cross_from_prefill_to_decode(made: Path, scheme: str) -> None:
    def tokens(folder: Path) -> list[int | None]:
        with pd.Pairing.local(folder, dtype=torch.float32) as pairing:
            request = pd.Request(prompt=tuple(TOKENS), sampling=pd.SamplingParams(max_new_tokens=8, temperature=0.0))
            return [event.token for event in pairing.generate([request])]

    assert tokens(made / scheme) == tokens(made / f"{scheme}-twin")


@every_scheme
def test_a_moved_expert_brings_its_scales(made: Path, scheme: str) -> None:
    model = load_model(made / scheme, dtype=torch.float32)
    layer = model.moe_layers()[0]
    before, first, second = model.logits(TOKENS), layer.experts.read_slot(0), layer.experts.read_slot(1)
    assert len(first) < 0.6 * 3 * 96 * 64
    layer.experts.write_slot(0, second)
    layer.experts.write_slot(1, first)
    assert not torch.equal(model.logits(TOKENS), before)
    swapped = {0: 1, 1: 0}
    order = [swapped.get(expert, expert) for expert in range(layer.router.weight_ED.shape[0])]
    layer.router.weight_ED.copy_(layer.router.weight_ED[order])
    if layer.router.bias_E is not None:
        layer.router.bias_E.copy_(layer.router.bias_E[order])
    assert torch.allclose(model.logits(TOKENS), before, atol=1e-4)


@every_scheme
def test_a_part_of_the_columns_has_whole_groups(made: Path, scheme: str) -> None:
    with Checkpoint.open(made / scheme) as files:
        stored = StoredWeights.survey(files, pd.ModelConfig.from_checkpoint(made / scheme))
        whole, whole_floats = stored.read(f"{EXPERT}.weight"), torch.empty(96, 64)
        dequantize(whole, whole_floats)
        for index in range(2):
            part, floats = columns_of(whole, Shard(index, 2, axis=1)), torch.empty(96, 32)
            dequantize(part, floats)
            assert torch.equal(floats, whole_floats[:, 32 * index : 32 * index + 32])
            rows, floats = stored.read(f"{EXPERT}.weight", Shard(index, 2)), torch.empty(48, 64)
            dequantize(rows, floats)
            assert torch.equal(floats, whole_floats[48 * index : 48 * index + 48])


@every_scheme
def test_ranks_have_whole_groups(made: Path, scheme: str) -> None:
    """64 columns are two groups, which four ranks cannot divide."""
    with Checkpoint.open(made / scheme) as files:
        stored = StoredWeights.survey(files, pd.ModelConfig.from_checkpoint(made / scheme))
        kept: frozenset[type[Format]] = frozenset({Int4, MXFP4})
        places = Destinations(torch.device("meta"), torch.float32, stored, kept)
        with pytest.raises(ConfigError, match=r"between 4 ranks in whole blocks of 32 that share a scale: 64 columns"):
            places.weight((f"{EXPERT}.weight",), 96, 64, Shard(0, 4, axis=1))
        places.weight((f"{EXPERT}.weight",), 96, 64, Shard(0, 4))


def test_the_entry_of_deepseek_v4_is_the_same_numbers(made: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_packed")]:
            base = name.removesuffix("_packed")
            tensors[base] = tensors.pop(name).view(torch.int8)
            scale = tensors.pop(f"{base}_scale").view(torch.float8_e8m0fnu)
            tensors[f"{base.removesuffix('weight')}scale"] = scale

    folder = changed(made / "mxfp4", tmp_path / "v4", rename)
    with Checkpoint.open(folder) as files, Checkpoint.open(made / "mxfp4-twin") as twin:
        stored = StoredWeights.survey(files, pd.ModelConfig.from_checkpoint(made / "mxfp4-twin"))
        assert stored.form(f"{EXPERT}.weight") is MXFP4_OF_V4
        assert not [*stored.complaints(f"{EXPERT}.weight", (96, 64))]
        weight, floats = stored.read(f"{EXPERT}.weight"), torch.empty(96, 64)
        assert isinstance(weight, MXFP4)
        dequantize(weight, floats)
        assert torch.equal(floats, twin.read(twin.tensors[f"{EXPERT}.weight"]).float())


def test_codes_are_the_nearest_and_a_tie_goes_to_the_even_one() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1, -0.1, 6.0]).repeat(1, 4)[:, :32]
    codes, exponents = quantize_mxfp4(values)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten()[:10].tolist()
    assert nibbles == [0, 2, 2, 4, 4, 6, 6, 15, 8, 7]
    assert exponents.tolist() == [[127]]
    codes, scale = quantize_int4(torch.tensor([7.5, -7.5, 0.5, 1.5] * 8)[None])
    assert scale.tolist() == [[1.0]]
    assert torch.stack((codes & 15, codes >> 4), -1).flatten()[:4].tolist() == [15, 0, 8, 10]


@every_scheme
@pytest.mark.parametrize("values", [torch.zeros(1, 32), torch.full((2, 64), 1e-38), torch.randn(3, 96) * 1e4])
def test_what_is_written_is_within_half_a_step(scheme: str, values: Tensor) -> None:
    codes, scale = (quantize_int4 if scheme == "int4" else quantize_mxfp4)(values)
    tensors = {"weight_packed": codes.view(torch.int32) if scheme == "int4" else codes, "weight_scale": scale}
    unpack(tensors)
    largest = values.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    assert ((tensors["weight"] - values).abs() <= largest * (0.07 if scheme == "int4" else 0.26) + 1e-37).all()


# ---- what is refused -------------------------------------------------------------------------------------------------


def without(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{EXPERT}.{suffix}")


def put(suffix: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.{suffix}"] = make(tensors[f"{EXPERT}.{suffix}"])

    return change


def first_is(value: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        tensor[0, 0] = value
        return tensor

    return make


def add(suffix: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{EXPERT}.{suffix}": tensor})


WRONG: dict[str, tuple[str, Change, str]] = {
    "no scale": ("int4", without("weight_scale"), "weight_scale is missing"),
    "no shape": ("int4", without("weight_shape"), "weight_shape is missing"),
    "NaN": ("int4", put("weight_scale", first_is(torch.nan)), "NaN or infinite"),
    "infinite": ("int4", put("weight_scale", first_is(torch.inf)), "NaN or infinite"),
    "zero": ("int4", put("weight_scale", first_is(0)), "zero or negative"),
    "exponent of NaN": ("mxfp4", put("weight_scale", first_is(255)), "NaN or infinite"),
    "another shape": (
        "int4",
        put("weight_shape", lambda shape: shape.flip(0)),
        r"says \[64, 96\], and .* is \[96, 64\]",
    ),
    "shape in floats": ("int4", put("weight_shape", Tensor.float), "weight_shape is torch.float32"),
    "shape of three": ("int4", put("weight_shape", lambda shape: shape.repeat(2)[:3]), r"weight_shape is \[3\]"),
    "cut": (
        "int4",
        put("weight_packed", lambda words: words[:, :-1]),
        r"is \[96, 56\] in .*the config says \[96, 64\]",
    ),
    "too few scales": ("mxfp4", put("weight_scale", lambda scale: scale[:, :1]), r"weight_scale is \[96, 1\]"),
    "scales in float32": ("int4", put("weight_scale", Tensor.float), "weight_scale is torch.float32"),
    "words of 64 bits": ("int4", put("weight_packed", Tensor.long), "weight_packed is torch.int64|is torch.int64"),
    "zero points": ("int4", add("weight_zero_point", torch.zeros(12, 2, dtype=torch.int32)), "another kind"),
    "actorder": ("int4", add("weight_g_idx", torch.zeros(64, dtype=torch.int32)), "another kind"),
    "plain too": ("int4", add("weight", torch.zeros(96, 64)), "and packed in"),
    "mixed": (
        "int4",
        lambda tensors: (
            [tensors.pop(f"{EXPERT}.weight_{part}") for part in ("packed", "scale", "shape")],
            tensors.update({f"{EXPERT}.weight": torch.zeros(96, 64)}),
        ),
        "stored differently",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_mean_something_else_are_refused_by_name(made: Path, tmp_path: Path, name: str) -> None:
    scheme, change, told = WRONG[name]
    with pytest.raises(CheckpointError, match=told) as caught:
        load_model(changed(made / scheme, tmp_path / "wrong", change))
    assert EXPERT in str(caught.value)


def test_a_name_that_is_ignored_and_packed_is_refused(made: Path, tmp_path: Path) -> None:
    def ignore(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"].append(r"re:.*layers\.2\.mlp\.experts\.5\.down.*")

    with pytest.raises(
        CheckpointError, match=rf"{EXPERT}.weight_packed is packed, and config.json says that it is not"
    ):
        load_model(changed(made / "int4", tmp_path / "ignored", len, ignore))


def test_packed_files_need_a_config_that_says_so(made: Path, tmp_path: Path) -> None:
    folder = changed(made / "int4", tmp_path / "silent", len, lambda config: config.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"is packed, and config.json has no quantization_config"):
        load_model(folder)


def in_group(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["config_groups"]["group_0"].update(fields)


def in_weights(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "8 bits": (in_weights(num_bits=8), "num_bits 8"),
    "groups of 128": (in_weights(group_size=128), "group_size 128"),
    "asymmetric": (in_weights(symmetric=False), "symmetric False"),
    "actorder": (in_weights(actorder="group"), "actorder"),
    "channels": (in_weights(strategy="channel"), "strategy 'channel'"),
    "floats": (in_weights(type="float"), "type 'float'"),
    "activations": (in_group(input_activations={"num_bits": 8}), "input_activations"),
    "other targets": (in_group(targets=["re:.*gate.*"]), "targets"),
    "another format": (lambda config: config.update(format="naive-quantized"), "naive-quantized"),
    "two groups": (lambda config: config["config_groups"].update(more={}), "must be one group"),
    "a new field": (lambda config: config.update(rotation="hadamard"), "rotation"),
    "a cache": (lambda config: config.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "a slow expression": (lambda config: config.update(ignore=["re:(a+)+b"]), "regular expression"),
    "many wildcards": (lambda config: config.update(ignore=["re:.*a.*b.*c.*"]), "regular expression"),
    "names of numbers": (lambda config: config.update(ignore=[3]), "must be a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_means_something_else_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    change, told = REFUSED[name]
    with pytest.raises(ConfigError, match=told):
        load_model(
            changed(made / "int4", tmp_path / "wrong", len, lambda config: change(config["quantization_config"]))
        )


@every_scheme
def test_widths_without_whole_groups_are_not_packed(tmp_path: Path, scheme: str) -> None:
    write_checkpoint(tmp_path / "floats", tiny_config_dict(moe_intermediate_size=40))
    with pytest.raises(ConfigError, match="moe_intermediate_size = 40"):
        quantize_checkpoint(tmp_path / "floats", tmp_path / "packed", scheme=scheme)


@every_scheme
def test_they_are_not_quantized_again(made: Path, tmp_path: Path, scheme: str) -> None:
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(made / scheme, tmp_path / "again")


@every_scheme
def test_compressed_tensors_reads_what_is_written(made: Path, scheme: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = json.loads((made / scheme / "config.json").read_text())["quantization_config"]
    theirs = QuantizationConfig.model_validate(stored)
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    tensors: dict[str, Tensor] = {}
    for file in (made / scheme).glob("*.safetensors"):
        tensors |= load(file.read_bytes())
    parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(EXPERT)}
    back = compressor.decompress(parts, theirs.config_groups["group_0"])["weight"]
    unpack(tensors)
    assert torch.equal(back.float(), tensors[f"{EXPERT}.weight"].to(back.dtype).float())
