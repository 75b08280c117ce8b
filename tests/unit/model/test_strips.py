"""On a CPU whose kernels multiply strips, matrices of bfloat16 lie in them from the moment they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checkpoint.schemes import StoredWeights
from pdinfer.kernels import OpSpec, resolve_ops
from pdinfer.kernels.formats import IN_STRIPS
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import Shape
from pdinfer.kernels.formats.four_bits import MXFP4, FourBits, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.strips import FourBitStrips, FP8Strips, Strips, fit
from pdinfer.kernels.formats.weights import assign, dequantize, expert, from_bytes, num_bytes, part, to_bytes
from pdinfer.kernels.native import build
from pdinfer.kernels.resolve import explain_backends
from pdinfer.model.destinations import Destinations, lie_in_strips
from pdinfer.model.load import load_model
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.conformance.op_suite import four_bit_weight, four_bits_in_strips

CPU = torch.device("cpu")
BF16 = frozenset([Plain])
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
}
"""The first product for the latent has 48 rows: half a strip too many."""
NARROW = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
WIDE = "model.layers.0.mlp.down_proj.weight"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strips")
    write_checkpoint(folder, tiny_config_dict("v3", **SIZES))
    return folder


@pytest.mark.parametrize("parts", [1, 2])
def test_they_hold_the_same_values_in_another_order(parts: int) -> None:
    stack = Strips.empty(Shape(3, parts, 64, 96), dtype=torch.bfloat16, device=CPU)
    assert isinstance(stack, Strips)
    assert (stack.shape, stack.parts) == ((parts * 64, 96), parts)
    values = torch.randn(3, parts * 64, 96).bfloat16()
    for index in range(3):
        for at in range(parts):
            assign(part(expert(stack, index), at, parts), values[index, at * 64 : (at + 1) * 64])
    assert torch.equal(stack.ordered(), values)
    assert sorted(stack.numbers.flatten().tolist()) == sorted(values.flatten().tolist())
    # row 17 of a matrix is the second of its second 16, and column 37 the second of a pair in the second step
    of_row = (0, 1, 0, 1) if parts == 1 else (1, 1, 0, 0)
    strip, step, *half = of_row
    assert stack.numbers[(2, strip, step, *half, 2, 3)] == values[2, 17, 37]


def test_an_expert_can_be_read_and_written_as_it_lies() -> None:
    here, there = (Strips.empty(Shape(2, 2, 32, 64), dtype=torch.bfloat16, device=CPU) for _ in range(2))
    assert isinstance(here, Strips)
    assert isinstance(there, Strips)
    assign(here, torch.randn(2, 64, 64).bfloat16())
    from_bytes(expert(there, 0), to_bytes(expert(here, 1)))
    assert torch.equal(there.ordered()[0], here.ordered()[1])


@pytest.mark.parametrize(("parts", "rows", "columns"), [(1, 48, 64), (1, 64, 48), (2, 16, 64), (3, 64, 64)])
def test_what_is_no_whole_strips_stays_as_it_is(parts: int, rows: int, columns: int) -> None:
    into = Destinations(CPU, torch.bfloat16, strips=BF16)
    assert not fit(Shape(1, parts, rows, columns))
    assert isinstance(into.weight([str(at) for at in range(parts)], rows, columns), Tensor)
    assert isinstance(into.weight(["whole"], 64, 64), Strips)


def needs_strips() -> None:
    reason = build.library_or_reason()
    if isinstance(reason, str):
        pytest.skip(reason)
    if not reason.strips_are_served():
        pytest.skip("the kernels of this CPU multiply plain matrices")


def test_a_model_is_loaded_into_them(folder: Path) -> None:
    needs_strips()
    told = explain_backends(load_model(folder, dtype="bfloat16")).splitlines()
    assert any(
        line.endswith("matrices lie in the order in which the kernels of this CPU multiply them") for line in told
    )
    with Checkpoint.open(folder) as files:
        into = Destinations(CPU, torch.bfloat16, StoredWeights.survey(files), strips=BF16)
        stack = into.stack([(UP.replace("up_", "gate_"), UP)], 32, 64)
        for name in (WIDE, UP, NARROW):
            shape = files.tensors[name].shape
            place = into.places[name][0].weight if name == UP else into.weight([name], *shape)
            assert isinstance(place, Tensor if name == NARROW else Strips)
            assign(place, files.read(files.tensors[name]))
            values = place.ordered() if isinstance(place, Strips) else place
            assert torch.equal(values, files.read(files.tensors[name]).bfloat16())
        assert isinstance(stack, Strips)
        assert torch.equal(stack.ordered()[0, 32:], files.read(files.tensors[UP]).bfloat16())


def test_the_model_computes_what_it_computes_without_them(folder: Path) -> None:
    needs_strips()
    prompt = list(range(3, 40))
    expected = load_model(folder, dtype="float32").logits(prompt)
    plain = load_model(folder, dtype="bfloat16", providers={"linear": "torch"}).logits(prompt)
    strips = load_model(folder, dtype="bfloat16").logits(prompt)
    off = float((plain.float() - expected).norm() / expected.norm())
    assert float((strips.float() - expected).norm() / expected.norm()) < 1.3 * off < 0.1


def test_they_are_for_models_whose_products_are_all_of_the_provider_that_reads_them() -> None:
    needs_strips()
    spec = OpSpec(device="cpu", dtype=torch.bfloat16)
    assert Plain in lie_in_strips(resolve_ops(spec))
    for op in ("linear", "grouped_mlp", "linear[strips]"):
        other = "composition" if op == "linear[strips]" else "torch"
        assert Plain not in lie_in_strips(resolve_ops(spec, forced={op: other}))
    assert not lie_in_strips(resolve_ops(OpSpec(device="cpu", dtype=torch.float32)))
    assert not lie_in_strips(resolve_ops(spec, forced="reference"))


@pytest.mark.parametrize("parts", [1, 2])
def test_fp8_numbers_lie_in_the_same_order(parts: int) -> None:
    stack = FP8Strips.empty(Shape(3, parts, 160, 288), dtype=torch.bfloat16, device=CPU)
    assert isinstance(stack, FP8Strips)
    assert (stack.shape, stack.parts) == ((parts * 160, 288), parts)
    codes = torch.randint(0, 256, (3, parts * 160, 288), dtype=torch.uint8)
    scale = torch.rand(3, parts * 2, 3)
    for index in range(3):
        for at in range(parts):
            numbers = codes[index, at * 160 : (at + 1) * 160].view(torch.float8_e4m3fn)
            one = FP8Blocks(numbers=numbers, scale=scale[index, at * 2 : at * 2 + 2])
            assign(part(expert(stack, index), at, parts), one)
    assert torch.equal(stack.ordered().numbers.view(torch.uint8), codes)
    assert torch.equal(stack.ordered().scale, scale)
    assert stack.ordered().parts == parts
    assert num_bytes(stack) == codes.nbytes + scale.nbytes
    as_bf16 = Strips.empty(Shape(3, parts, 160, 288), dtype=torch.bfloat16, device=CPU)
    assert isinstance(as_bf16, Strips)
    assign(as_bf16, codes.bfloat16())
    assert torch.equal(as_bf16.numbers.to(torch.uint8), stack.numbers.view(torch.uint8))


def test_an_fp8_expert_can_be_read_and_written_as_it_lies() -> None:
    here, there = (FP8Strips.empty(Shape(2, 2, 160, 64), dtype=torch.bfloat16, device=CPU) for _ in range(2))
    assert isinstance(here, FP8Strips)
    assert isinstance(there, FP8Strips)
    codes = torch.randint(0, 127, (2, 320, 64), dtype=torch.uint8).view(torch.float8_e4m3fn)
    here.fill(FP8Blocks(numbers=codes, scale=torch.rand(2, 4, 1), parts=2))
    from_bytes(expert(there, 0), to_bytes(expert(here, 1)))
    assert torch.equal(there.ordered().numbers[0].float(), here.ordered().numbers[1].float())
    assert torch.equal(there.scale[0], here.scale[1])
    values = torch.empty(2, 320, 64)
    dequantize(here, values)
    assert torch.equal(values[1, 200:], here.ordered().numbers[1, 200:].float() * here.ordered().scale_of_row[1, 200:])


KINDS = pytest.mark.parametrize("kind", [Int4, MXFP4], ids=lambda kind: kind.name)


@KINDS
@pytest.mark.parametrize("parts", [1, 2])
def test_four_bits_lie_in_the_same_order(kind: type[FourBits], parts: int) -> None:
    weight = four_bit_weight(kind, 3, parts * 64, 96)
    stack = IN_STRIPS[kind].empty(Shape(3, parts, 64, 96), dtype=torch.bfloat16, device=CPU)
    for index in range(3):
        for at in range(parts):
            assign(part(expert(stack, index), at, parts), part(expert(weight, index), at, parts))
    assert isinstance(stack, FourBitStrips)
    assert (stack.shape, stack.parts, num_bytes(stack)) == ((parts * 64, 96), parts, num_bytes(weight))
    ordered = stack.ordered()
    assert torch.equal(ordered.numbers, weight.numbers)
    assert torch.equal(ordered.scale, weight.scale)
    # row 17 of a matrix is the second of its second 16, and column 37 in the first word of the second step
    of_row = (0, 1, 0, 1) if parts == 1 else (1, 1, 0, 0)
    strip, step, *half = of_row
    assert stack.numbers[(2, strip, step, *half, 0, 4 * 1 + 2)] == weight.numbers[2, 17, 18]
    assert stack.scale[(2, strip, step, *half, 0, 1)] == weight.scale[2, 17, 1]
    values, expected = torch.empty(3, parts * 64, 96), torch.empty(3, parts * 64, 96)
    dequantize(stack, values)
    dequantize(weight, expected)
    assert torch.equal(values, expected)


@KINDS
def test_an_expert_of_four_bits_can_be_read_and_written_as_it_lies(kind: type[FourBits]) -> None:
    weight = four_bit_weight(kind, 2, 64, 64)
    here = four_bits_in_strips(weight, 2)
    there = four_bits_in_strips(weight.map(torch.zeros_like), 2)
    from_bytes(expert(there, 0), to_bytes(expert(here, 1)))
    assert torch.equal(there.ordered().numbers[0], weight.numbers[1])
    assert torch.equal(there.ordered().scale[0], weight.scale[1])


@pytest.mark.parametrize("scheme", ["int4", "mxfp4"])
def test_a_model_of_four_bits_is_kept_in_them(folder: Path, tmp_path: Path, scheme: str) -> None:
    if "four_bits" in build.lost_kernels():
        pytest.skip("no kernel of four bits is compiled")
    quantize_checkpoint(folder, tmp_path / scheme, scheme=scheme)
    prompt = list(range(3, 40))
    model = load_model(tmp_path / scheme, dtype="bfloat16")
    told = explain_backends(model)
    assert f"{scheme.upper()} weights are held as they are stored" in told
    assert "matrices lie in the order" in told
    expected = load_model(tmp_path / scheme, dtype="float32", weights="stored").logits(prompt)
    plain = load_model(tmp_path / scheme, dtype="bfloat16", providers={f"linear[{scheme}]": "torch"})
    off = float((plain.logits(prompt).float() - expected).norm() / expected.norm())
    assert float((model.logits(prompt).float() - expected).norm() / expected.norm()) < 1.3 * off < 0.4


def test_an_fp8_model_is_kept_in_them(folder: Path, tmp_path: Path) -> None:
    needs_strips()
    if not build.library().fp8_strips_are_served():
        pytest.skip("this CPU multiplies bfloat16 faster")
    quantize_checkpoint(folder, tmp_path / "fp8")
    prompt = list(range(3, 40))
    model = load_model(tmp_path / "fp8", dtype="bfloat16")
    told = explain_backends(model)
    assert "FP8 weights are held as they are stored" in told
    assert "matrices lie in the order" in told
    expected = load_model(tmp_path / "fp8", dtype="float32", weights="stored").logits(prompt)
    plain = load_model(tmp_path / "fp8", dtype="bfloat16", weights="stored", providers={"linear[fp8]": "torch"})
    off = float((plain.logits(prompt).float() - expected).norm() / expected.norm())
    assert float((model.logits(prompt).float() - expected).norm() / expected.norm()) < 1.3 * off < 0.4
