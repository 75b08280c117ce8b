"""Quantized files as others write them: scales in every dtype, static INT8, norms with a bias, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.errors import CheckpointError
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.model.load import load_model
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.rounding import error_of_products, gamma

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SIZES = {"hidden_size": 150, "intermediate_size": 170, "moe_intermediate_size": 136, "kv_lora_rank": 130}
QUERY = "model.layers.1.self_attn.q_a_proj"
EXPERT = "model.layers.2.mlp.experts.5.down_proj"
MLP = "model.layers.0.mlp"
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make folders "floats", "fp8" and "w8a8_dynamic" of one model."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "floats", tiny_config_dict(**SIZES))
    for scheme in ("fp8", "w8a8_dynamic"):
        quantize_checkpoint(folder / "floats", folder / scheme, scheme=scheme)
    return folder


def changed(source: Path, folder: Path, change: Change, described: dict[str, str | None] | None = None) -> Path:
    """A copy of a quantized folder with other tensors, and schemes, in two files: weights in the first, the tensors
    that belong to them in the second."""
    folder.mkdir()
    (file,) = source.glob("*.safetensors")
    tensors = load(file.read_bytes())
    change(tensors)
    parts: list[dict[str, Tensor]] = [{}, {}]
    for name, tensor in tensors.items():
        parts[not name.endswith((".weight", ".bias"))][name] = tensor
    for at, part in enumerate(parts):
        save_file(part, folder / f"part-{at}.safetensors")
    weight_map = {name: f"part-{at}.safetensors" for at, part in enumerate(parts) for name in part}
    (folder / "any.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    for path in source.glob("quant_model_description.json"):
        schemes = json.loads(path.read_text()) | (described or {})
        schemes = {name: scheme for name, scheme in schemes.items() if scheme is not None}
        (folder / "quant_model_description_w8a8.json").write_text(json.dumps(schemes))
    return folder


def refusal(folder: Path, **arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **arguments)
    return str(caught.value)


# Scales


def power_of_two_scales(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = torch.exp2(tensors[name].log2().ceil())


@pytest.mark.parametrize("how", ["bfloat16", "e8m0", "uint8"])
def test_scales_of_every_dtype_are_the_same_scales(made: Path, tmp_path: Path, how: str) -> None:
    casts = {
        "bfloat16": lambda scale: scale.to(torch.bfloat16),
        "e8m0": lambda scale: scale.to(torch.float8_e8m0fnu),
        "uint8": lambda scale: (scale.log2() + 127).to(torch.uint8),
    }

    def stored_so(tensors: dict[str, Tensor]) -> None:
        power_of_two_scales(tensors)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = casts[how](tensors[name])

    expected = load_model(changed(made / "fp8", tmp_path / "float32", power_of_two_scales), weights="float")
    got = load_model(changed(made / "fp8", tmp_path / how, stored_so), weights="float")
    assert torch.equal(got.logits(TOKENS), expected.logits(TOKENS))


def test_weights_and_their_scales_may_lie_in_different_files(made: Path, tmp_path: Path) -> None:
    for scheme in ("fp8", "w8a8_dynamic"):
        folder = changed(made / scheme, tmp_path / scheme, lambda tensors: None)
        for word in ("float", "stored"):
            expected = load_model(made / scheme, weights=word).logits(TOKENS)
            assert torch.equal(load_model(folder, weights=word).logits(TOKENS), expected)


def test_what_is_fp8_is_decided_by_the_scale_beside_it(made: Path, tmp_path: Path) -> None:
    """Some matrices are floats, and an embedding is FP8, whatever recipes say."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    floats = load(next((made / "floats").glob("*-00001-*.safetensors")).read_bytes())
    floats |= load(next((made / "floats").glob("*-00002-*.safetensors")).read_bytes())

    def mixed(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{QUERY}.weight_scale_inv"]
        tensors[f"{QUERY}.weight"] = floats[f"{QUERY}.weight"]
        tensors[embed] = torch.full((97, 150), 2.0).to(torch.float8_e4m3fn)
        tensors[f"{embed}_scale_inv"] = torch.tensor([[0.5, 0.25]])

    model = load_model(changed(made / "fp8", tmp_path / "mixed", mixed), weights="stored")
    assert torch.equal(model.embed_VD[:, :128], torch.ones(97, 128))
    assert torch.equal(model.embed_VD[:, 128:], torch.full((97, 22), 0.5))
    assert torch.equal(model.lm_head_VD, floats[head])
    attention = model.blocks[1].attention
    assert attention.q_a is not None
    assert torch.equal(attention.q_a.weight, floats[f"{QUERY}.weight"])  # type: ignore[arg-type]
    assert isinstance(attention.q_b.weight, FP8Blocks)


# Static INT8


def as_static(tensors: dict[str, Tensor], base: str, scale: float, offset: int, bias: Tensor | None = None) -> None:
    """Return the dynamic INT8 matrix `base` as a static one."""
    numbers, weight_scale = tensors[f"{base}.weight"], tensors[f"{base}.weight_scale"]
    tensors[f"{base}.input_scale"] = torch.tensor([scale])
    tensors[f"{base}.input_offset"] = torch.tensor([offset], dtype=torch.int8)
    tensors[f"{base}.deq_scale"] = scale * weight_scale.view(-1)
    undo = -offset * numbers.int().sum(1)
    if bias is not None:
        undo = undo + (bias / tensors[f"{base}.deq_scale"]).round()
    tensors[f"{base}.quant_bias"] = undo.to(torch.int32)


def test_static_int8_is_computed_as_its_formula_says(made: Path, tmp_path: Path) -> None:
    """This covers attention, and an MLP whose gate and up have inputs of different scales."""
    parts = {QUERY: (0.03, 7), f"{MLP}.gate_proj": (0.02, -3), f"{MLP}.up_proj": (0.05, 11)}
    held: dict[str, Tensor] = {}

    def static(tensors: dict[str, Tensor]) -> None:
        for base, (scale, offset) in parts.items():
            as_static(tensors, base, scale, offset)
        held.update(tensors)

    schemes: dict[str, str | None] = {f"{base}.weight": "W8A8" for base in parts}
    folder = changed(made / "w8a8_dynamic", tmp_path / "static", static, schemes)
    model = load_model(folder, weights="stored")
    x = torch.randn(4, 150, generator=torch.Generator().manual_seed(0))

    def by_hand(base: str) -> Tensor:
        scale, offset = parts[base]
        numbers = ((x / torch.tensor(scale)).round() + offset).clamp(-128, 127).long()
        sums = (numbers[:, None] * held[f"{base}.weight"].long()).sum(-1) + held[f"{base}.quant_bias"]
        return sums * held[f"{base}.deq_scale"]

    attention, mlp = model.blocks[1].attention, model.blocks[0].mlp
    assert attention.q_a is not None
    assert isinstance(attention.q_a.weight, Int8Static)
    torch.testing.assert_close(attention.q_a(x), by_hand(QUERY))
    both = torch.cat((by_hand(f"{MLP}.gate_proj"), by_hand(f"{MLP}.up_proj")), -1)
    torch.testing.assert_close(mlp.gate_up(x), both)  # type: ignore[union-attr]
    assert isinstance(mlp.down.weight, Int8Dynamic)  # type: ignore[union-attr]

    float_model = load_model(folder, weights="float")
    assert torch.equal(float_model.logits(TOKENS), load_model(made / "w8a8_dynamic", weights="float").logits(TOKENS))


def test_a_float32_scale_may_come_as_the_bits_of_an_int64(made: Path, tmp_path: Path) -> None:
    schemes: dict[str, str | None] = {f"{QUERY}.weight": "W8A8"}

    def as_bits(tensors: dict[str, Tensor]) -> None:
        as_static(tensors, QUERY, 0.03, 7)
        tensors[f"{QUERY}.deq_scale"] = tensors[f"{QUERY}.deq_scale"].view(torch.int32).long()

    plain = changed(made / "w8a8_dynamic", tmp_path / "plain", lambda held: as_static(held, QUERY, 0.03, 7), schemes)
    bits = changed(made / "w8a8_dynamic", tmp_path / "bits", as_bits, schemes)
    expected = load_model(plain, weights="stored").logits(TOKENS)
    assert torch.equal(load_model(bits, weights="stored").logits(TOKENS), expected)


def test_a_bias_that_quant_bias_holds_survives_as_floats(made: Path, tmp_path: Path) -> None:
    bias = torch.linspace(-2, 2, 24)
    schemes: dict[str, str | None] = {f"{QUERY}.weight": "W8A8", f"{EXPERT}.weight": "W8A8"}

    def static(tensors: dict[str, Tensor]) -> None:
        as_static(tensors, QUERY, 0.03, 7, bias)
        as_static(tensors, EXPERT, 0.03, 7)

    folder = changed(made / "w8a8_dynamic", tmp_path / "static", static, schemes)
    model = load_model(folder, weights="float")
    plain = load_model(made / "w8a8_dynamic", weights="float")
    x = torch.randn(4, 150, generator=torch.Generator().manual_seed(0))
    with_bias, without = model.blocks[1].attention.q_a, plain.blocks[1].attention.q_a
    assert with_bias is not None
    assert without is not None
    worth = without.weight
    assert isinstance(worth, Tensor)
    # the bias is a whole number of `deq_scale`, 0.03 times the scale of a row, whose largest number is 127
    half_a_step = 0.03 * worth.abs().amax(-1) / 127 / 2
    error = 2 * error_of_products(x.double(), worth.double()) + gamma(4) * bias.abs() + 1.01 * half_a_step
    assert ((with_bias(x) - without(x) - bias).abs() <= error).all()
    assert torch.equal(model.blocks[2].mlp.experts.down, plain.blocks[2].mlp.experts.down)  # type: ignore[union-attr]


def test_a_bias_of_an_expert_is_refused(made: Path, tmp_path: Path) -> None:
    """The op that runs experts adds no bias."""
    folder = changed(
        made / "w8a8_dynamic",
        tmp_path / "biased",
        lambda tensors: as_static(tensors, EXPERT, 0.03, 7, torch.ones(150)),
        {f"{EXPERT}.weight": "W8A8"},
    )
    assert f"part-0.safetensors: quant_bias of {EXPERT}.weight holds a bias" in refusal(folder, weights="float")
    assert 'load with weights="float"' in refusal(folder, weights="stored")


def test_a_norm_may_have_a_bias(made: Path, tmp_path: Path) -> None:
    bias = torch.linspace(-1, 1, 150)
    name = "model.layers.1.input_layernorm.bias"
    folder = changed(made / "w8a8_dynamic", tmp_path / "bias", lambda tensors: tensors.update({name: bias}))
    model, plain = (load_model(path, weights="float") for path in (folder, made / "w8a8_dynamic"))
    x = torch.randn(4, 150, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.blocks[1].attention_norm(x)[0], plain.blocks[1].attention_norm(x)[0] + bias)
    assert torch.equal(model.blocks[1].mlp_norm(x)[0], plain.blocks[1].mlp_norm(x)[0])


def test_the_description_may_be_silent_about_floats(made: Path, tmp_path: Path) -> None:
    """The description often omits the layers for drafting. They then hold floats, as does every tensor that it
    omits."""
    described: dict[str, str | None] = {"model.norm.weight": None, "lm_head.weight": None}
    folder = changed(made / "w8a8_dynamic", tmp_path / "silent", lambda tensors: None, described)
    expected = load_model(made / "w8a8_dynamic").logits(TOKENS)
    assert torch.equal(load_model(folder).logits(TOKENS), expected)


# What is refused


def put(name: str, index: int, value: float) -> Change:
    return lambda tensors: tensors[name].view(-1).__setitem__(index, value)


def swap(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            drop(f"{QUERY}.weight_scale_inv"),
            "{q}.weight is torch.float8_e4m3fn in {0}, and {q}.weight_scale_inv is missing",
        ),
        (swap(f"{QUERY}.weight_scale_inv", torch.ones(2, 1)), "{q}.weight_scale_inv is [2, 1] in {1}, expected [1, 2]"),
        (
            swap(f"{EXPERT}.weight_scale_inv", torch.ones(1, 1)),
            "{e}.weight_scale_inv is [1, 1] in {1}, expected [2, 2]",
        ),
        (
            swap(f"{QUERY}.weight_scale_inv", torch.ones(1, 2, dtype=torch.int32)),
            "{q}.weight_scale_inv is torch.int32 in {1}, supported are float32",
        ),
        (
            swap(f"{QUERY}.weight", torch.ones(24, 150)),
            "{q}.weight is torch.float32 in {0}, supported for FP8 are float8_e4m3fn",
        ),
        (swap(f"{QUERY}.bias", torch.ones(24)), "{q}.bias is in {0}, and a linear map with a bias is not supported"),
        (put(f"{QUERY}.weight_scale_inv", 0, torch.nan), "{1}: tensor {q}.weight_scale_inv holds 1 NaN or infinite"),
        (put(f"{QUERY}.weight_scale_inv", 1, torch.inf), "{1}: tensor {q}.weight_scale_inv holds 1 NaN or infinite"),
        (put(f"{EXPERT}.weight_scale_inv", 1, 0), "{1}: tensor {e}.weight_scale_inv holds values that are zero or neg"),
        (
            put(f"{EXPERT}.weight_scale_inv", 3, -1),
            "{1}: tensor {e}.weight_scale_inv holds values that are zero or neg",
        ),
        (put(f"{EXPERT}.weight_scale_inv", 3, 1e38), "{1}: tensor {e}.weight_scale_inv holds values that are so large"),
        (put(f"{EXPERT}.weight", 7, torch.nan), "{0}: tensor {e}.weight holds NaN"),
        (
            swap(f"{QUERY}.weight_scale_inv", torch.full((1, 2), 255, dtype=torch.uint8)),
            "{1}: tensor {q}.weight_scale_inv holds 2 NaN or infinite",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_bad_fp8_is_named_with_its_file(made: Path, tmp_path: Path, change: Change, sentence: str) -> None:
    message = refusal(changed(made / "fp8", tmp_path / "bad", change), weights="stored")
    assert sentence.format("part-0.safetensors", "part-1.safetensors", q=QUERY, e=EXPERT) in message


STATIC = {f"{QUERY}.weight": "W8A8"}


def static_but(change: Change) -> Change:
    def static(tensors: dict[str, Tensor]) -> None:
        as_static(tensors, QUERY, 0.03, 7)
        change(tensors)

    return static


@pytest.mark.parametrize(
    ("change", "described", "sentence"),
    [
        (
            drop(f"{QUERY}.weight_scale"),
            {},
            "{q}.weight_scale is missing, though {q}.weight in {0} is stored as W8A8_DYNAMIC",
        ),
        (drop(f"{QUERY}.weight_offset"), {}, "{q}.weight_offset is missing"),
        (swap(f"{QUERY}.weight_scale", torch.ones(1, 24)), {}, "{q}.weight_scale is [1, 24] in {1}, expected [24, 1]"),
        (put(f"{QUERY}.weight_scale", 3, torch.nan), {}, "{1}: tensor {q}.weight_scale holds 1 NaN"),
        (
            put(f"{QUERY}.weight_scale", 3, -1),
            {},
            "{1}: tensor {q}.weight_scale holds values that are zero or negative",
        ),
        (put(f"{QUERY}.weight_offset", 3, 1), {}, "{1}: tensor {q}.weight_offset holds values that are not 0"),
        (drop(""), {f"{QUERY}.weight": "W4A8_DYNAMIC"}, "w8a8.json: scheme 'W4A8_DYNAMIC' of '{q}.weight' is not supp"),
        (drop(""), {f"{QUERY}.weight": 8}, "w8a8.json: scheme 8 of '{q}.weight' is not supported"),
        (
            drop(""),
            {f"{QUERY}.weight": "FLOAT"},
            "{q}.weight is torch.int8 in {0}, and quant_model_description_w8a8.json",
        ),
        (drop(""), {f"{QUERY}.weight": None}, "{q}.weight is torch.int8 in {0}, and quant_model_description_w8a8.json"),
        (drop(""), {"lm_head.weight": "W8A8"}, "lm_head.weight is torch.float32 in {0}, supported for W8A8 are int8"),
        (static_but(drop(f"{QUERY}.quant_bias")), STATIC, "{q}.quant_bias is missing"),
        (static_but(drop(f"{QUERY}.input_scale")), STATIC, "{q}.input_scale is missing"),
        (
            static_but(swap(f"{QUERY}.deq_scale", torch.ones(23))),
            STATIC,
            "{q}.deq_scale is [23] in {1}, expected [24, 1]",
        ),
        (
            static_but(swap(f"{QUERY}.input_scale", torch.zeros(1))),
            STATIC,
            "{q}.input_scale holds values that are zero",
        ),
        (
            static_but(swap(f"{QUERY}.deq_scale", torch.full((24,), 1 << 40))),
            STATIC,
            "{1}: tensor {q}.deq_scale holds integers that are not the bits of a float32",
        ),
        (
            swap("model.norm.weight", torch.ones(150, dtype=torch.int8)),
            {"model.norm.weight": "W8A8_DYNAMIC"},
            "model.norm.weight is [150] in {0}, and W8A8_DYNAMIC is for matrices",
        ),
        (static_but(put(f"{QUERY}.deq_scale", 2, torch.inf)), STATIC, "{q}.deq_scale holds 1 NaN or infinite"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_bad_int8_is_named_with_its_file(
    made: Path, tmp_path: Path, change: Change, described: dict[str, str | None], sentence: str
) -> None:
    def tolerant(tensors: dict[str, Tensor]) -> None:
        tensors[""] = torch.ones(1)
        change(tensors)
        tensors.pop("", None)

    message = refusal(changed(made / "w8a8_dynamic", tmp_path / "bad", tolerant, described), weights="stored")
    assert sentence.format("part-0.safetensors", "part-1.safetensors", q=QUERY) in message


def test_int8_without_a_description_is_refused(made: Path, tmp_path: Path) -> None:
    folder = changed(made / "w8a8_dynamic", tmp_path / "bare", lambda tensors: None)
    (folder / "quant_model_description_w8a8.json").unlink()
    message = refusal(folder)
    assert "is torch.int8 in part-0.safetensors, and quant_model_description*.json is missing" in message


def test_two_descriptions_are_refused(made: Path, tmp_path: Path) -> None:
    folder = changed(made / "w8a8_dynamic", tmp_path / "two", lambda tensors: None)
    (folder / "quant_model_description.json").write_text("{}")
    assert "holds 2 quant_model_description*.json; keep the one that is meant" in refusal(folder)


@pytest.mark.parametrize("content", ["[]", '{"a": NaN}', '{"a": "FLOAT"', '{"a": "FLOAT", "a": "W8A8"}'])
def test_a_broken_description_is_named(made: Path, tmp_path: Path, content: str) -> None:
    folder = changed(made / "w8a8_dynamic", tmp_path / "broken", lambda tensors: None)
    (folder / "quant_model_description_w8a8.json").write_text(content)
    assert "quant_model_description_w8a8.json" in refusal(folder)


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
def test_experts_of_several_formats_load_as_floats_only(made: Path, tmp_path: Path, part: str) -> None:
    """`stored` cannot stack them, and does not convert."""
    floats = load(next((made / "floats").glob("*-00001-*.safetensors")).read_bytes())
    floats |= load(next((made / "floats").glob("*-00002-*.safetensors")).read_bytes())
    names = [f"model.layers.2.mlp.experts.{expert}.{part}.weight" for expert in range(8)]

    def mixed(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = floats[name]
            del tensors[f"{name}_scale_inv"]

    folder = changed(made / "fp8", tmp_path / "mixed", mixed)
    assert 'load with weights="float"' in refusal(folder, weights="stored")
    assert load_model(folder, weights="float").logits(TOKENS).isfinite().all()


@pytest.mark.parametrize("weights", ["float", "stored"])
@pytest.mark.parametrize("name", [f"{QUERY}.weight_scale_inv", f"{QUERY}.weight"])
def test_bad_values_pass_where_they_are_not_looked_for(made: Path, tmp_path: Path, name: str, weights: str) -> None:
    """They then stay as they are, even the e4m3 byte that is not a number."""
    folder = changed(made / "fp8", tmp_path / "bad", put(name, 0, torch.nan))
    assert load_model(folder, check_finite=False, weights=weights).logits(TOKENS).isnan().all()
