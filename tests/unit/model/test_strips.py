"""On a CPU whose kernels multiply strips, matrices of bfloat16 lie in them from the moment they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checkpoint.schemes import StoredWeights
from pdinfer.kernels import OpSpec, explain_backends, resolve_ops
from pdinfer.kernels.native import build
from pdinfer.kernels.weight_formats import Strips, assign, empty, expert, from_bytes, part, to_bytes
from pdinfer.model.destinations import Destinations, lie_in_strips
from pdinfer.model.load import load_model
from pdinfer.testing import tiny_config_dict, write_checkpoint

CPU = torch.device("cpu")
BF16 = frozenset([Tensor])
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
    stack = empty(Strips, (3, parts, 64, 96), dtype=torch.bfloat16, device=CPU)
    assert isinstance(stack, Strips)
    assert (stack.shape, stack.parts) == ((parts * 64, 96), parts)
    values = torch.randn(3, parts * 64, 96).bfloat16()
    for index in range(3):
        for at in range(parts):
            assign(part(expert(stack, index), at, parts), values[index, at * 64 : (at + 1) * 64])
    assert torch.equal(stack.matrix(), values)
    assert sorted(stack.numbers.flatten().tolist()) == sorted(values.flatten().tolist())
    # row 17 of a matrix is the second of its second 16, and column 37 the second of a pair in the second step
    of_row = (0, 1, 0, 1) if parts == 1 else (1, 1, 0, 0)
    strip, step, *half = of_row
    assert stack.numbers[(2, strip, step, *half, 2, 3)] == values[2, 17, 37]


def test_an_expert_can_be_read_and_written_as_it_lies() -> None:
    here, there = (empty(Strips, (2, 2, 32, 64), dtype=torch.bfloat16, device=CPU) for _ in range(2))
    assert isinstance(here, Strips)
    assert isinstance(there, Strips)
    here.fill(torch.randn(2, 64, 64).bfloat16())
    from_bytes(expert(there, 0), to_bytes(expert(here, 1)))
    assert torch.equal(there.matrix()[0], here.matrix()[1])


@pytest.mark.parametrize(("parts", "rows", "columns"), [(1, 48, 64), (1, 64, 48), (2, 16, 64), (3, 64, 64)])
def test_what_is_no_whole_strips_stays_as_it_is(parts: int, rows: int, columns: int) -> None:
    into = Destinations(CPU, torch.bfloat16, strips=BF16)
    assert not Strips.fit(parts, rows, columns)
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
            values = place.matrix() if isinstance(place, Strips) else place
            assert torch.equal(values, files.read(files.tensors[name]).bfloat16())
        assert isinstance(stack, Strips)
        assert torch.equal(stack.matrix()[0, 32:], files.read(files.tensors[UP]).bfloat16())


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
    assert Tensor in lie_in_strips(resolve_ops(spec))
    for op in ("linear", "grouped_mlp", "linear_strips"):
        other = "composition" if op == "linear_strips" else "torch"
        assert Tensor not in lie_in_strips(resolve_ops(spec, forced={op: other}))
    assert not lie_in_strips(resolve_ops(OpSpec(device="cpu", dtype=torch.float32)))
    assert not lie_in_strips(resolve_ops(spec, forced="reference"))
