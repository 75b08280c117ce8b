"""Experts in four bits as compressed-tensors packs them: the numbers of a twin in floats, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checkpoint.schemes import MXFP4_OF_V4, StoredWeights
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.kernels.formats.four_bits import MXFP4, quantize_int4, quantize_mxfp4
from pdinfer.kernels.formats.weights import dequantize
from pdinfer.model.load import load_model
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.setups import greedy, join, pool_of
from tests.packed import SCHEMES, Change, changed, ignoring, prefixed, tensors_of, twin_of, unpack, with_twin
from tests.slices import one_in

SIZES = {"hidden_size": 96, "moe_intermediate_size": 64}
EXPERT = "model.layers.2.mlp.experts.5.down_proj"
TOKENS = list(range(3, 30))
IS_IGNORED = r"layers\.2\.mlp\.experts\.\d\.\w+\.weight_packed is packed, and config.json says that it is not"

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make folders "int4" and "mxfp4" of one model, and a twin of each that holds the same numbers in float32."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "floats", tiny_config_dict(**SIZES))
    for scheme in SCHEMES:
        quantize_checkpoint(folder / "floats", folder / scheme, scheme=scheme)
        twin_of(folder / scheme)
    return folder


@every_scheme
@pytest.mark.parametrize(("weights", "providers"), [("auto", None), ("float", None), ("stored", "reference")])
def test_packed_weights_are_those_of_the_twin(made: Path, scheme: str, weights: str, providers: str | None) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "providers": providers}
    twin = load_model(made / f"{scheme}-twin", **options).logits(TOKENS)
    model = load_model(made / scheme, weights=weights, **options)
    assert torch.allclose(model.logits(TOKENS), twin, atol=1e-5)
    kept = 'became float32 (weights="float")' if weights == "float" else "held as they are stored"
    assert any(f"{scheme.upper()} weights" in line and kept in line for line in model.resolved.weights)


def kimi(**more: Any) -> dict[str, Any]:
    """Return the config.json of a small model that routes as Kimi-K2 does: without groups of experts."""
    return tiny_config_dict("v3-ungrouped", model_type="kimi_k2", **{"num_hidden_layers": 2, **SIZES, **more})


ATTENTION = {"q_lora_rank": 32, "kv_lora_rank": 64, "v_head_dim": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "Kimi-K2": kimi(**ATTENTION, n_routed_experts=24, num_experts_per_tok=8),
    "V3": tiny_config_dict("v3", **SIZES, **ATTENTION),
    "V2 without a query latent": tiny_config_dict("v2-lite", hidden_size=64, moe_intermediate_size=32),
    "a group wide": kimi(hidden_size=32, moe_intermediate_size=32, intermediate_size=32),
    "five groups and three": kimi(hidden_size=160, moe_intermediate_size=96, intermediate_size=224),
    "many experts": kimi(n_routed_experts=130, hidden_size=32, moe_intermediate_size=32),
    "one expert": kimi(n_routed_experts=1, num_experts_per_tok=1),
}


@every_scheme
@pytest.mark.parametrize("shape", one_in(2, SHAPES))
def test_models_of_any_shape_are_their_twins(tmp_path: Path, scheme: str, shape: str) -> None:
    """Every linear map is packed that has whole groups. The prompt runs in one piece, and in chunks."""
    write_checkpoint(tmp_path / "floats", SHAPES[shape], seed=len(shape))
    folders = with_twin(tmp_path / "floats", scheme, every_linear=True)
    model, twin = (load_model(folder, dtype=torch.float32) for folder in folders)
    assert torch.allclose(model.logits(TOKENS), twin.logits(TOKENS), atol=1e-5)
    last = model.config.num_hidden_layers - 1
    mine, other = (each.activations(TOKENS, layers=(0, last), routing=True, chunk_size=7) for each in (model, twin))
    assert torch.allclose(mine.hidden_LTD, other.hidden_LTD, atol=1e-5)
    assert torch.equal(mine.routing[last].experts_TK, other.routing[last].experts_TK)


@every_scheme
def test_a_prompt_becomes_the_twins_tokens_in_one_process_and_over_tcp(tmp_path: Path, scheme: str) -> None:
    def told(folder: Path, transport: str) -> list[tuple[int | None, float | None]]:
        model, engine = load_model(folder, dtype=torch.float32), pd.EngineConfig(chunked_prefill_size=7)
        pools = [pool_of(model, num_pages=32) for _ in range(2)]
        with join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
            request = pd.Request(prompt=tuple(TOKENS), sampling=greedy(8, ignore_eos=True))
            return [(event.token, event.logprob) for event in setup.pairing.generate([request])]

    write_checkpoint(tmp_path / "floats", kimi())
    packed, twin = with_twin(tmp_path / "floats", scheme)
    expected = told(twin, "shared")
    assert len(expected) == 8
    for transport in ("shared", "tcp"):
        for mine, other in zip(told(packed, transport), expected, strict=True):
            assert mine == (other[0], pytest.approx(other[1], abs=1e-5))


@every_scheme
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_moved_expert_brings_its_scales(made: Path, scheme: str, dtype: torch.dtype, within: float) -> None:
    """In bfloat16 it lies in strips where kernels read them."""
    model = load_model(made / scheme, dtype=dtype)
    layer = model.moe_layers()[0]
    before, first, second = model.logits(TOKENS), layer.experts.read_slot(0), layer.experts.read_slot(1)
    assert len(first) < 0.6 * 3 * 96 * 64
    layer.experts.write_slot(0, second)
    layer.experts.write_slot(1, first)
    assert (model.logits(TOKENS) - before).norm() > 2 * within * before.norm()
    swapped = {0: 1, 1: 0}
    order = [swapped.get(expert, expert) for expert in range(layer.router.weight_ED.shape[0])]
    layer.router.weight_ED.copy_(layer.router.weight_ED[order])
    if layer.router.bias_E is not None:
        layer.router.bias_E.copy_(layer.router.bias_E[order])
    assert (model.logits(TOKENS) - before).norm() < within * before.norm()


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
        assert stored.quantized_formats == {MXFP4}
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
@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_is_within_half_a_step(scheme: str, seed: int) -> None:
    random = torch.randn(3, 96, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 9 - 4)
    values = {0: torch.zeros(1, 32), 1: torch.full((2, 64), 1e-38)}.get(seed, random)
    codes, scale = (quantize_int4 if scheme == "int4" else quantize_mxfp4)(values)
    tensors = {"weight_packed": codes.view(torch.int32) if scheme == "int4" else codes, "weight_scale": scale}
    unpack(tensors)
    largest = values.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    half = (0.5 + 7 / 256) / 7.5 if scheme == "int4" else 0.25  # INT4's scale is rounded to bfloat16, MXFP4's is not
    assert ((tensors["weight"] - values).abs() <= largest * half * (1 + 1e-6) + 1e-37).all()


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
    "infinite products": ("int4", put("weight_scale", first_is(2.0**126)), "so large that weights are infinite"),
    "infinite products of 2^127": ("mxfp4", put("weight_scale", first_is(254)), "so large that weights are infinite"),
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
    "one word": ("int4", put("weight_packed", lambda words: words[0, 0]), r"is \[\] in .*the config says \[96, 64\]"),
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


def as_kimi_k25(where: str, *ignore: str) -> Callable[[dict[str, Any]], None]:
    """Return a change of config.json to that of a model with a text model inside. What it says of packed weights stands
    `where`: "outside", "inside" or in both places."""

    def change(config: dict[str, Any]) -> None:
        ignoring(config, *ignore)
        said = {"quantization_config": config.pop("quantization_config")}
        text = config | (said if where != "outside" else {})
        config.clear()
        config |= {"model_type": "kimi_k25", "text_config": text} | (said if where != "inside" else {})

    return change


PUBLISHED = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")


OF_FILES = ("language_model.lm_head", "re:vision_tower.*", r"re:language_model\.model\.layers\.0.*")


@pytest.mark.parametrize(
    ("where", "ignore"), [("outside", ()), ("outside", OF_FILES), ("inside", PUBLISHED), ("both", OF_FILES)]
)
def test_a_text_model_may_be_packed(made: Path, tmp_path: Path, where: str, ignore: tuple[str, ...]) -> None:
    folder = changed(made / "int4", tmp_path / "k25", prefixed, as_kimi_k25(where, *ignore))
    twin = load_model(made / "int4-twin", dtype=torch.float32)
    assert torch.allclose(load_model(folder, dtype=torch.float32).logits(TOKENS), twin.logits(TOKENS), atol=1e-5)


IGNORED = (
    EXPERT,
    r"re:.*layers\.2\.mlp\.experts\.5\.down.*",
    r"re:model\.layers\.2\.",
    r"re:.*experts\.[0-9]+\.down_proj$",
    r"re:^model\.layers\.(0|2)\.mlp\.(gate|experts)\.(4|5)\.(?:up|down)_proj$",
)


@pytest.mark.parametrize("name", IGNORED)
def test_a_name_that_is_ignored_and_packed_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    folder = changed(made / "int4", tmp_path / "ignored", len, lambda config: ignoring(config, *PUBLISHED, name))
    with pytest.raises(CheckpointError, match=IS_IGNORED):
        load_model(folder)


@pytest.mark.parametrize("name", [*IGNORED, f"language_model.{EXPERT}", r"re:language_model\.model\.layers\.2.*"])
def test_a_name_in_a_text_model_that_is_ignored_and_packed_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    """As the files name it, or as the text model does."""
    folder = changed(made / "int4", tmp_path / "ignored", prefixed, as_kimi_k25("inside", *PUBLISHED, name))
    with pytest.raises(CheckpointError, match=IS_IGNORED):
        load_model(folder)


@pytest.mark.parametrize(
    ("ignored", "weights", "is_read"),
    [
        (r"model\.layers\.1\.mlp\.experts", "auto", True),
        (EXPERT, "auto", False),
        (EXPERT, "float", True),
        (r"model\.layers\.2\.mlp\.experts\.(2|5)\.", "auto", False),
    ],
)
def test_experts_of_a_layer_are_packed_or_not(
    made: Path, tmp_path: Path, ignored: str, weights: str, is_read: bool
) -> None:
    """Ignored ones, which are in floats: all of a layer or none, unless all become floats."""

    def unpack_those(tensors: dict[str, Tensor]) -> None:
        those = {name: tensors.pop(name) for name in list(tensors) if re.match(ignored, name)}
        unpack(those)
        tensors |= those

    def config(config: dict[str, Any]) -> None:
        ignoring(config, *PUBLISHED, f"re:{ignored}")

    folder = changed(made / "int4", tmp_path / "some", unpack_those, config)
    if is_read:
        twin = load_model(made / "int4-twin", dtype=torch.float32).logits(TOKENS)
        assert torch.allclose(load_model(folder, dtype=torch.float32, weights=weights).logits(TOKENS), twin, atol=1e-5)
    else:
        with pytest.raises(CheckpointError, match='stored differently and cannot be one matrix: load with weights="fl'):
            load_model(folder, weights=weights)


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
    "choices of nothing": (lambda config: config.update(ignore=["re:(||)(||)(||)(||)x"]), "regular expression"),
    "a name twice": (lambda config: config.update(ignore=["re:(?:m|m)odel"]), "regular expression"),
    "many ways": (lambda config: config.update(ignore=[r"re:.*(m|mo)(d|de)(l|l\.).*"]), "regular expression"),
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
def test_a_group_that_is_cut_short_is_not_read(made: Path, tmp_path: Path, scheme: str) -> None:
    """Of 40 columns, 8 would be a tail without a scale of their own."""
    per = 8 if scheme == "int4" else 2

    def cut(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("down_proj.weight_packed"):
                tensors[name] = tensor[:, : 40 // per]
            elif name.endswith("down_proj.weight_scale"):
                tensors[name] = tensor[:, :1]
            elif name.endswith("down_proj.weight_shape"):
                tensors[name] = torch.tensor([96, 40])
            elif ".experts." in name and not name.endswith("_shape"):
                tensors[name] = tensor[:40]
            elif ".experts." in name:
                tensors[name] = torch.tensor([40, 96])

    folder = changed(made / scheme, tmp_path / "cut", cut, lambda config: config.update(moe_intermediate_size=40))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has 40 columns, not a multiple of the 32"):
        load_model(folder)


@every_scheme
def test_a_model_without_experts_is_not_packed(tmp_path: Path, scheme: str) -> None:
    write_checkpoint(tmp_path / "floats", tiny_config_dict(first_k_dense_replace=3, **SIZES))
    with pytest.raises(CheckpointError, match=f"holds no weight that scheme {scheme} quantizes"):
        quantize_checkpoint(tmp_path / "floats", tmp_path / "packed", scheme=scheme)
    assert not (tmp_path / "packed").exists()


@every_scheme
def test_they_are_not_quantized_again(made: Path, tmp_path: Path, scheme: str) -> None:
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(made / scheme, tmp_path / "again")


@pytest.mark.needs("compressed_tensors")
@every_scheme
def test_compressed_tensors_reads_what_is_written(made: Path, scheme: str) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = json.loads((made / scheme / "config.json").read_text())["quantization_config"]
    theirs = QuantizationConfig.model_validate(stored)
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    tensors = tensors_of(made / scheme)
    parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(EXPERT)}
    back = compressor.decompress(parts, theirs.config_groups["group_0"])["weight"]
    unpack(tensors)
    assert torch.equal(back.float(), tensors[f"{EXPERT}.weight"].to(back.dtype).float())
