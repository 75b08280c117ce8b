"""Quantizing a checkpoint: the result follows the published formats, loads, and stays close to the original."""

from __future__ import annotations

import functools
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pdinfer import explain_backends
from pdinfer.checkpoint.quantize import PACKED_CONFIGS, quantize_checkpoint
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.kernels import DeviceSpec, OpSpec, ResolvedOps, resolve_ops
from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.formats.format import Rounding
from pdinfer.kernels.native import build
from pdinfer.kernels.ops import function_of
from pdinfer.kernels.torch import provider as torch_provider
from pdinfer.model import load as loading
from pdinfer.model.load import load_model
from pdinfer.model.model import Model
from pdinfer.moe.dispatchers.base import LocalDispatcher
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.packed import changed, prefixed

# No size is a multiple of 128, and several are larger, so blocks are cut at every edge.
SIZES = {"hidden_size": 150, "intermediate_size": 170, "moe_intermediate_size": 140, "kv_lora_rank": 136}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SCHEMES: list[dict[str, Any]] = [{"scheme": "fp8"}, {"scheme": "fp8", "scale_fmt": "ue8m0"}, {"scheme": "w8a8_dynamic"}]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: "-".join(scheme.values()))
Quantize = Callable[..., Path]
LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    write_checkpoint(folder, tiny_config_dict(torch_dtype="bfloat16", **SIZES))
    return folder


@pytest.fixture(scope="module")
def quantized(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """Quantize the floats, once in each way, for tests that change no file."""

    @functools.cache
    def quantize(**options: Any) -> Path:
        folder = tmp_path_factory.mktemp("quantized")
        quantize_checkpoint(floats, folder, **options)
        return folder

    return quantize


def tensors_in(folder: Path) -> dict[str, Tensor]:
    with Checkpoint.open(folder) as files:
        return {name: files.read(info) for name, info in files.tensors.items()}


def worth(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return the matrix in float64, element by element."""
    numbers = tensors[name].double()
    if f"{name}_scale_inv" in tensors:
        scale = tensors[f"{name}_scale_inv"].double()
        for row in range(len(numbers)):
            for block in range(scale.shape[1]):
                numbers[row, block * 128 : (block + 1) * 128] *= scale[row // 128, block]
    elif f"{name}_scale" in tensors:
        numbers *= tensors[f"{name}_scale"].double()
    return numbers


@every_scheme
def test_linear_maps_are_quantized_and_everything_else_is_copied(
    scheme: dict[str, Any], floats: Path, quantized: Quantize
) -> None:
    folder = quantized(**scheme)
    before, after = tensors_in(floats), tensors_in(folder)
    int8 = scheme["scheme"] == "w8a8_dynamic"
    chosen = {name for name in before if name.split(".")[-2] in LINEARS and not (int8 and "kv_b_proj" in name)}
    companions = ("_scale", "_offset") if int8 else ("_scale_inv",)
    assert after.keys() == before.keys() | {f"{name}{end}" for name in chosen for end in companions}
    for name, tensor in before.items():
        if name not in chosen:
            assert torch.equal(after[name], tensor)
            continue
        error = (worth(after, name) - tensor.double()).abs()
        if int8:
            assert after[name].dtype == torch.int8
            assert bool((error <= tensor.double().abs().amax(-1, keepdim=True) / 127 * 0.501).all())
        else:
            assert after[name].dtype == torch.float8_e4m3fn
            scale = after[f"{name}_scale_inv"]
            assert torch.equal(torch.frexp(scale)[0] == 0.5, torch.ones_like(scale) > 0) is ("scale_fmt" in scheme)
            # half a unit in the last of three places; below the normal numbers, of the smallest step
            assert bool((error <= tensor.double().abs() / 16 * 1.001 + float(scale.max()) * 2**-10).all())


@every_scheme
def test_stored_and_float_weights_are_one_model(scheme: dict[str, Any], floats: Path, quantized: Quantize) -> None:
    """`stored` differs from `float` only by the rounding of activations, which these bounds allow."""
    folder = quantized(**scheme)
    tensors = tensors_in(folder)
    held = load_model(folder, dtype=torch.float32, weights="float")
    for layer, name in ((0, "model.layers.0.self_attn.o_proj.weight"), (2, "model.layers.2.self_attn.q_b_proj.weight")):
        attention = held.blocks[layer].attention
        matrix = (attention.o if "o_proj" in name else attention.q_b).weight
        assert torch.equal(matrix, worth(tensors, name).float())
    experts = held.blocks[1].mlp.experts  # type: ignore[union-attr]
    gate = worth(tensors, "model.layers.1.mlp.experts.7.gate_proj.weight").float()
    up = worth(tensors, "model.layers.1.mlp.experts.7.up_proj.weight").float()
    assert torch.equal(experts.gate_up[7], torch.cat((gate, up)))  # type: ignore[index]

    stored = load_model(folder, dtype=torch.float32, weights="stored")
    original = load_model(floats, dtype=torch.float32)
    drift = 0.1 if scheme["scheme"] == "fp8" else 0.03
    assert distance(held, original) < drift
    assert 1e-4 < distance(stored, held) < drift


@pytest.mark.parametrize("scheme", ["fp8", "w8a8_dynamic", "int4", "mxfp4"])
def test_a_text_model_keeps_the_names_of_its_files(scheme: str, tmp_path: Path) -> None:
    config = tiny_config_dict("v3-ungrouped", hidden_size=64, moe_intermediate_size=32)
    write_checkpoint(tmp_path / "floats", config)

    def wrapped(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config |= {"model_type": "kimi_k25", "text_config": text}

    changed(tmp_path / "floats", tmp_path / "k25", prefixed, wrapped)
    folders = {name: tmp_path / f"{name}-q" for name in ("floats", "k25")}
    for name, folder in folders.items():
        quantize_checkpoint(tmp_path / name, folder, scheme=scheme)
    plain, named = (tensors_in(folder).keys() for folder in folders.values())
    assert named == {f"language_model.{name}" for name in plain}
    one, other = (load_model(folder, dtype=torch.float32).logits(TOKENS) for folder in folders.values())
    assert torch.equal(one, other)


def distance(one: Model, other: Model) -> float:
    """Return the relative distance of a layer's outputs, as a root mean square. Those of a whole model may differ in
    which experts are chosen."""
    x = torch.randn(9, 150, generator=torch.Generator().manual_seed(1))
    mine, others = (model.blocks[0].mlp(x) for model in (one, other))
    return float((mine - others).norm() / others.norm())


@every_scheme
def test_two_providers_agree_on_a_quantized_model(scheme: dict[str, Any], quantized: Quantize) -> None:
    folder = quantized(**scheme)
    fast, plain = (
        load_model(folder, dtype=torch.float32, weights="stored", providers=provider)
        for provider in ("torch", "reference")
    )
    # An activation on the border of two numbers may fall to either side.
    assert distance(fast, plain) < 0.01
    assert fast.logits(TOKENS).isfinite().all()


def test_the_cache_holds_latents_as_kv_b_proj_would_round_them(quantized: Quantize) -> None:
    """This keeps expanded and absorbed attention one function."""
    folder = quantized()
    model = load_model(folder, dtype=torch.float32, weights="stored")
    attention = model.blocks[0].attention
    latent, _ = attention.latent(torch.randn(5, 150), model.rotary(torch.arange(5)))
    assert torch.equal(model.resolved.ops.round_fp8(latent, ue8m0=False), latent)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_products_behind_a_norm_share_one_rounding(
    scale_fmt: str | None, quantized: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only o_proj, whose input nobody else reads, rounds it by itself."""
    folder = quantized(scale_fmt=scale_fmt)
    calls: list[tuple[str, str]] = []

    def noted(name: str) -> Any:
        run = function_of(torch_provider, name)

        def note(x_TI: Any, *rest: Any, **more: Any) -> Any:
            calls.append((name, type(x_TI).__name__))
            assert more in ({}, {"ue8m0": scale_fmt is not None})
            return run(x_TI, *rest, **more)

        return note

    watched = SimpleNamespace(quantize_fp8=noted("quantize_fp8"), linear_fp8=noted("linear[fp8]"))
    monkeypatch.setattr(torch_provider, "MODULES", (watched, *torch_provider.MODULES))
    model = load_model(folder, dtype=torch.float32, weights="stored", providers="torch")
    model.logits(TOKENS)
    rounding, product = ("quantize_fp8", "Tensor"), ("linear[fp8]", "FP8Rows")
    attention = [rounding, product, rounding, product, product, ("linear[fp8]", "Tensor")]
    mlp = [rounding, product, rounding, product]
    assert calls[:10] == attention + mlp
    of_latents = model.blocks[0].attention.rounding  # type: ignore[attr-defined]
    assert of_latents is (Rounding.FP8 if scale_fmt is None else Rounding.FP8_UE8M0)


@every_scheme
def test_experts_in_fp8_are_sent_rounded_rows(scheme: dict[str, Any], quantized: Quantize) -> None:
    folder = quantized(**scheme)
    sent: list[type] = []

    @attrs.frozen
    class Noted(LocalDispatcher):
        def dispatch_begin(self, x_TD: Any, ids_TK: Tensor, weights_TK: Tensor) -> Any:
            sent.append(type(x_TD))
            return super().dispatch_begin(x_TD, ids_TK, weights_TK)

    model = load_model(folder, dtype=torch.float32, weights="stored")
    ops, x = model.resolved.ops, torch.randn(4, 150, generator=torch.Generator().manual_seed(0))
    layer = attrs.evolve(model.moe_layers()[0], dispatcher=Noted(model.config.n_routed_experts, ops))
    both = Rounded(x, ops.quantize_fp8(x, ue8m0=model.config.scale_fmt == "ue8m0"))
    assert torch.equal(layer(both), layer(x))
    assert sent == [Rounded if scheme["scheme"] == "fp8" else Tensor, Tensor]


@every_scheme
def test_stored_weights_take_the_bytes_of_the_files(scheme: dict[str, Any], quantized: Quantize) -> None:
    folder = quantized(**scheme)
    model = load_model(folder, weights="stored")
    held = sum(tensor.nbytes for tensor in tensors_of_model(model))
    with Checkpoint.open(folder) as files:
        assert held <= 1.1 * files.total_bytes


def tensors_of_model(value: object) -> list[Tensor]:
    """Yield every tensor that an attrs value or a tuple of them holds, each once."""
    found: dict[int, Tensor] = {}

    def visit(item: object) -> None:
        if isinstance(item, Tensor):
            found[item.data_ptr()] = item
        elif isinstance(item, tuple):
            for part in item:
                visit(part)
        elif hasattr(type(item), "__attrs_attrs__"):
            for field in type(item).__attrs_attrs__:  # type: ignore[attr-defined]
                visit(getattr(item, field.name))

    visit(value)
    return list(found.values())


@pytest.mark.parametrize("scheme", [None, "fp8", "w8a8_dynamic"])
def test_ops_are_chosen_for_the_formats_in_the_files(
    monkeypatch: pytest.MonkeyPatch, floats: Path, quantized: Quantize, scheme: str | None
) -> None:
    specs: list[OpSpec] = []

    def resolve(spec: OpSpec, **more: Any) -> ResolvedOps:
        specs.append(spec)
        return resolve_ops(spec, **more)

    monkeypatch.setattr(loading, "resolve_ops", resolve)
    config = load_model(floats if scheme is None else quantized(scheme=scheme), dtype="float32").config
    (spec,) = specs
    assert spec.weight_formats == ({scheme} if scheme else set())
    assert (spec.device, spec.dtype, spec.num_heads) == (DeviceSpec("cpu"), torch.float32, config.num_attention_heads)
    assert (spec.kv_lora_rank, spec.qk_rope_head_dim) == (config.kv_lora_rank, config.qk_rope_head_dim)
    assert spec.page_size is spec.kv_format is None


def test_auto_says_what_it_made_of_the_weights(floats: Path, quantized: Quantize) -> None:
    folder = quantized()
    told = {word: explain_backends(load_model(folder, weights=word)) for word in ("auto", "stored", "float")}
    count = sum(name.endswith("_scale_inv") for name in tensors_in(folder))
    said = rf'{count} FP8 weights became bfloat16 \(weights="auto"\): linear\[fp8\] of '
    said += "(torch makes floats|native takes longer)"
    library = build.library_or_reason()
    kept = not isinstance(library, str) and library.fp8_strips_are_served()
    assert re.search(f"{count - 3} FP8 weights are held as they are stored" if kept else said, told["auto"])
    assert f"{count - 3} FP8 weights are held as they are stored" in told["stored"]
    assert '3 FP8 weights became bfloat16 (weights="stored")' in told["stored"]
    assert told["float"].endswith(f'{count} FP8 weights became bfloat16 (weights="float")')
    assert "weights" not in explain_backends(load_model(floats)).splitlines()[-1]


# Folders


def test_config_and_small_files_come_along(floats: Path, tmp_path: Path) -> None:
    (floats / "tokenizer.json").write_text("{}")
    (floats / "generation_config.json").write_text('{"eos_token_id": 5}')
    quantize_checkpoint(floats, tmp_path / "q", scheme="fp8", scale_fmt="ue8m0")
    quantize_checkpoint(floats, tmp_path / "i", scheme="w8a8_dynamic")
    config, before = (ModelConfig.from_checkpoint(folder) for folder in (tmp_path / "q", floats))
    assert config.scale_fmt == "ue8m0"
    assert config.fingerprint == before.fingerprint
    assert config.eos_token_ids == (5,)
    assert {path.name for path in (tmp_path / "i").iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "quant_model_description.json",
        "quant_model_weights-00001-of-00001.safetensors",
        "quant_model_weights.safetensors.index.json",
    }
    description = json.loads((tmp_path / "i" / "quant_model_description.json").read_text())
    assert description.keys() - tensors_in(tmp_path / "i").keys() == {"model_quant_type", "version", "group_size"}
    assert description["model.layers.0.mlp.up_proj.weight"] == "W8A8_DYNAMIC"
    assert description["model.layers.0.mlp.up_proj.weight_scale"] == "W8A8_DYNAMIC"
    assert description["model.layers.0.self_attn.kv_b_proj.weight"] == description["lm_head.weight"] == "FLOAT"


def test_int8_leaves_the_layers_behind_the_last_alone(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.o_proj.weight"
    folder = tmp_path / "floats"
    write_checkpoint(folder, tiny_config_dict(num_nextn_predict_layers=1), num_shards=1)
    file = folder / "model-00001-of-00001.safetensors"
    save_file(load(file.read_bytes()) | {name: torch.ones(48, 40)}, file)
    (folder / "model.safetensors.index.json").unlink()
    quantize_checkpoint(folder, tmp_path / "i", scheme="w8a8_dynamic")
    quantize_checkpoint(folder, tmp_path / "q", scheme="fp8")
    assert tensors_in(tmp_path / "i")[name].dtype == torch.float32
    assert tensors_in(tmp_path / "q")[name].dtype == torch.float8_e4m3fn


def test_shards_are_no_larger_than_asked_and_one_model(floats: Path, tmp_path: Path) -> None:
    quantize_checkpoint(floats, tmp_path / "one")
    calls: list[tuple[int, int]] = []
    quantize_checkpoint(
        floats, tmp_path / "many", max_shard_bytes=300_000, progress=lambda done, total: calls.append((done, total))
    )
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    assert max(shard.stat().st_size for shard in shards) < 300_000
    one, many = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name].view(torch.uint8), many[name].view(torch.uint8)) for name in one)
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_a_folder_with_anything_in_it_is_left_alone(floats: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = {path.name: path.stat().st_mtime_ns for path in floats.iterdir()}
    for folder in (tmp_path, floats):
        with pytest.raises(ConfigError, match=r"is not empty, it holds .*; choose a new folder"):
            quantize_checkpoint(floats, folder)
    with pytest.raises(ConfigError, match=r"cannot write to .*notes\.txt"):
        quantize_checkpoint(floats, tmp_path / "notes.txt")
    assert {path.name: path.stat().st_mtime_ns for path in floats.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_quantized_checkpoint_is_not_quantized_again(quantized: Quantize, tmp_path: Path) -> None:
    folder = quantized()
    with pytest.raises(CheckpointError, match=r"is torch\.float8_e4m3fn in model-.* is quantized already"):
        quantize_checkpoint(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.fixture(scope="module", params=["fp8", "w8a8_dynamic", "int4", "mxfp4"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tensor]:
    """A scheme, floats, and the logits of the model that it makes of them."""
    folder = tmp_path_factory.mktemp("asked")
    write_checkpoint(folder / "floats", tiny_config_dict(hidden_size=64, moe_intermediate_size=32))
    quantize_checkpoint(folder / "floats", folder / "q", scheme=request.param)
    return request.param, folder / "floats", load_model(folder / "q", weights="stored").logits(TOKENS)


@pytest.mark.parametrize(
    ("left", "is_inside"),
    [
        ({"quantize": "w8a8"}, False),
        ({"quantization_config": PACKED_CONFIGS["int4"]}, True),
        pytest.param({"quantize": "w8a8"}, True, marks=pytest.mark.full),
        pytest.param({"quantization_config": PACKED_CONFIGS["int4"]}, False, marks=pytest.mark.full),
    ],
)
def test_what_floats_say_of_another_quantization_stays_behind(
    tmp_path: Path, asked: tuple[str, Path, Tensor], left: dict[str, Any], is_inside: bool
) -> None:
    """A checkpoint that was quantized once, in the config of a text model as in its own."""

    def leave(config: dict[str, Any]) -> None:
        config |= left
        if is_inside:
            text = dict(config)
            config.clear()
            config |= {"model_type": "kimi_k25", "text_config": text}

    scheme, floats, expected = asked
    left_behind = changed(floats, tmp_path / "left", prefixed if is_inside else len, leave)
    (left_behind / "quant_model_description_old.json").write_text('{"model.norm.weight": "W8A8"}')
    quantize_checkpoint(left_behind, tmp_path / "q", scheme=scheme)
    assert torch.equal(load_model(tmp_path / "q", weights="stored").logits(TOKENS), expected)


@pytest.mark.parametrize(("room", "file"), [(15_000, r"model-.*\.safetensors"), (150_000, r"tokenizer\.json")])
def test_a_full_disk_is_named(tmp_path: Path, room: int, file: str) -> None:
    write_checkpoint(tmp_path / "floats", tiny_config_dict())
    (tmp_path / "floats" / "tokenizer.json").write_text(" " * 200_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(ConfigError, match=rf"cannot write to .*{file}: .*File too large.*; make room"):
            quantize_checkpoint(tmp_path / "floats", tmp_path / "q", max_shard_bytes=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_of_no_name_is_refused(floats: Path) -> None:
    of_a_nul = "embedded null (byte|character in path)"  # up to Python 3.12, and since
    with pytest.raises(ConfigError, match=rf"cannot write to q\x00: (mkdir: )?{of_a_nul}; make room"):
        quantize_checkpoint(floats, "q\0")
    with pytest.raises(ConfigError, match=of_a_nul):
        load_model(floats, trusted_roots=["root\0"])


@pytest.mark.parametrize("arguments", [{"scheme": "int3"}, {"scheme": "fp8", "scale_fmt": "e8"}, {"scale_fmt": "e8"}])
def test_an_unknown_scheme_is_refused(floats: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'choose "fp8" with scale_fmt None or "ue8m0", or "w8a8_dynamic"'):
        quantize_checkpoint(floats, tmp_path / "q", **arguments)


def test_a_folder_that_was_not_finished_cannot_be_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "floats"
    tensors = write_checkpoint(folder, tiny_config_dict(), num_shards=1)
    tensors["model.layers.2.self_attn.o_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.o_proj\.weight holds NaN"):
        quantize_checkpoint(folder, tmp_path / "q", max_shard_bytes=10_000)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path / "q")
