"""Products by DeepGEMM are those of the reference: through a stand-in that checks what the library checks, or through
the library on a card that has it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import OpSpec, compositions, reference, resolve_ops
from pdinfer.kernels import deep_gemm as adapter
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.weights import map_tensors
from pdinfer.kernels.resolve import explain_backends
from pdinfer.kernels.torch import experts as torch_experts
from pdinfer.kernels.torch import products as torch_products
from tests.conformance import fake_deep_gemm
from tests.conformance import test_quantized_ops as quantized
from tests.conformance.libraries import installed
from tests.conformance.op_suite import ROWS, Rows, draw, for_tma, fp8_weight

BF16 = OpSpec(device="cpu")
OPS = ("linear[fp8]", "grouped_mlp[fp8]")


@pytest.fixture(params=["mainline", "sgl", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device on which a build of the library is."""
    if request.param == "real":
        yield "cuda"
        return
    with installed(adapter, fake_deep_gemm.build(request.param)):
        yield "cpu"


@pytest.mark.parametrize("ue8m0", [False, True], ids=["any-scale", "ue8m0"])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("size", "parts"), [((64, 128), 1), ((576, 256), 1), ((128, 384), 2)], ids=str)
def test_linear_fp8(device: str, ue8m0: bool, rows: int, size: tuple[int, int], parts: int) -> None:
    x = quantized.outliers(rows, size[1]).to(torch.bfloat16)
    quantized.check_linear_fp8("deep_gemm", device, x, fp8_weight(*size, parts=parts, ue8m0=ue8m0))


def experts(count: int, device: str) -> tuple[FP8Blocks, FP8Blocks]:
    """Return the stacks of experts whose hidden size is 256 and whose width is 128."""
    return fp8_weight(count, 128, 256, parts=2, device=device), fp8_weight(count, 256, 128, device=device)


def op_of(device: str) -> Any:
    """Return the op with the reference around its products, so that it can be compared bit by bit."""
    forced = {"grouped_mlp[fp8]": "deep_gemm", "gated_silu": "reference", "quantize_fp8": "reference"}
    return resolve_ops(OpSpec(device=device), forced=forced).ops["grouped_mlp[fp8]"]


@pytest.mark.parametrize("form", [*ROWS[:2], pytest.param(Rows(room=adapter.ROOM_STEP, dtype=torch.int32), id="room")])
@pytest.mark.parametrize("counts", [(0,), (3,), (3, 0, 1, 5), (0, 2, 0), (128, 0, 129, 1)], ids=str)
def test_grouped_mlp_fp8(device: str, form: Rows, counts: tuple[int, ...]) -> None:
    x_SD = draw(sum(counts), 256).to(torch.bfloat16).to(device)
    gate_up, down = experts(len(counts), device)
    expected = reference.grouped_mlp(x_SD, torch.tensor(counts), gate_up, down)

    op = op_of(device)

    def run(x: Tensor, counts_E: Tensor) -> Tensor:
        return op(x, counts_E, gate_up, down)

    def run_rounded(x: Tensor, counts_E: Tensor) -> Tensor:
        return run(reference.quantize_fp8(x, ue8m0=False), counts_E)

    def run_laid_out(x: Tensor, counts_E: Tensor) -> Tensor:
        rounded = reference.quantize_fp8(x, ue8m0=False)
        return run(scales_together(rounded) if x.ndim == 3 else for_tma(rounded), counts_E)

    got = form.run(run, x_SD, counts)
    for once in (run_rounded, run_laid_out):
        assert torch.equal(form.run(once, x_SD, counts), got)
    if device == "cpu":
        assert torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()) if len(got) else 0)


def scales_together(rows: FP8Rows) -> FP8Rows:
    """Return the same room with the scales of a group of channels side by side, as DeepEP delivers them."""
    return attrs.evolve(rows, scales_TN=rows.scales_TN.mT.contiguous().mT)


def test_shapes_follow_from_shapes_alone() -> None:
    """No kernel runs, and nothing looks at a number."""
    library = ModuleType("deep_gemm")
    for names in (adapter.DENSE, adapter.CONTIGUOUS, adapter.MASKED):
        setattr(library, names[0], lambda *_: None)
    setattr(library, adapter.ALIGNMENT[0], lambda: 128)
    meta = [map_tensors(stack, lambda tensor: tensor.to("meta")) for stack in experts(3, "cpu")]
    with installed(adapter, library):
        op = resolve_ops(OpSpec(device="meta"), forced=dict.fromkeys(OPS, "deep_gemm")).ops["grouped_mlp[fp8]"]
        for shape in ((7, 256), (3, 128, 256)):
            x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            assert op(x, torch.empty(3, dtype=torch.int32, device="meta"), *meta).shape == shape


@pytest.mark.parametrize(
    ("weight", "dtype", "told"),
    [
        (fp8_weight(64, 136), torch.bfloat16, "columns in steps of 128, this one is 64 x 136"),
        (fp8_weight(72, 128), torch.bfloat16, "rows in steps of 64 .* this one is 72 x 128"),
        (fp8_weight(64, 128, parts=2), torch.bfloat16, "a part of 64 rows ends within a block"),
        (map_tensors(fp8_weight(128, 256), lambda tensor: tensor[:, ::1][:, :128]), torch.bfloat16, "dense in memory"),
        (fp8_weight(64, 128), torch.float16, "writes bfloat16, these rows are of torch.float16"),
    ],
)
def test_what_the_kernels_do_not_take_goes_to_the_next_provider(
    weight: FP8Blocks, dtype: torch.dtype, told: str
) -> None:
    x = draw(3, weight.numbers.shape[1]).to(dtype)
    with installed(adapter, fake_deep_gemm.build("mainline")):
        resolved = resolve_ops(BF16)
        assert torch.equal(resolved.ops.linear(x, weight), torch_products.linear_fp8(x, weight))
        (choice,) = (choice for choice in resolved.choices if choice.op == "linear[fp8]")
        assert (choice.provider, choice.others) == ("deep_gemm", ("torch",))
        with pytest.raises(BackendUnavailable, match=rf"op linear\[fp8\]: .*{told}"):
            resolve_ops(BF16, forced={"linear[fp8]": "deep_gemm"}).ops.linear(x, weight)


@pytest.mark.parametrize("room", [5, 64, 192])
def test_a_room_whose_last_tile_reaches_into_the_next_goes_to_the_next_provider(room: int) -> None:
    """Through the library, the rows of the next expert would be lost."""
    gate_up, down = experts(3, "cpu")
    x, counts_E = draw(3, room, 256).to(torch.bfloat16), torch.tensor([2, 5, 1], dtype=torch.int32)
    expected = torch_experts.grouped_mlp_fp8(x, counts_E, gate_up, down)
    with installed(adapter, fake_deep_gemm.build("mainline")):
        got = resolve_ops(BF16).ops.grouped_mlp(x, counts_E, gate_up, down)
        forced = resolve_ops(BF16, forced={"grouped_mlp[fp8]": "deep_gemm"}).ops["grouped_mlp[fp8]"]
        with pytest.raises(BackendUnavailable, match=f"room for a multiple of 128, not {room}"):
            forced(x, counts_E, gate_up, down)
    for expert, count in enumerate(counts_E.tolist()):
        assert torch.equal(got[expert, :count], expected[expert, :count])


def routed(num_tokens: int) -> tuple[FP8Rows, Tensor, Tensor]:
    """Return tokens, their choices of 3 experts, some of which are none, and weights."""
    generator = torch.Generator().manual_seed(5)
    ids_TK = torch.rand(num_tokens, 3, generator=generator).argsort(-1)[:, :2]
    ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < 0.2, -1)
    rows = reference.quantize_fp8(draw(num_tokens, 256).to(torch.bfloat16), ue8m0=False)
    return rows, ids_TK, torch.rand(ids_TK.shape, generator=generator)


def test_sorted_rows_go_straight_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is moved once before the experts, and no result is before the sum. Any provider multiplies such rows."""
    monkeypatch.setattr(fake_deep_gemm, "TILE", 4)
    moved, select = [], torch.Tensor.index_select

    def noted(x: Tensor, axis: int, index: Tensor) -> Tensor:
        moved.extend([len(index)] if x.ndim == 2 and x.shape[1] == 256 else [])  # a row, not its scales
        return select(x, axis, index)

    rows, ids_TK, weights_TK = routed(40)
    stacks, num_rows = experts(3, "cpu"), int((ids_TK >= 0).sum())
    with installed(adapter, fake_deep_gemm.build("mainline")):
        ops = resolve_ops(BF16).ops
        with monkeypatch.context() as counting:
            counting.setattr(torch.Tensor, "index_select", noted)
            x_SD, counts_E, row_TK = ops.sort_rows_fp8(rows, ids_TK, 3, num_rows)
            y_SD = ops.grouped_mlp(x_SD, counts_E, *stacks)
        assert moved == [len(x_SD)]
        assert len(x_SD) <= num_rows + 3 * 3
        assert [count % 4 for count in counts_E.tolist()] == [0] * 3
    plain = compositions.sort_rows_fp8(ops, rows, ids_TK, 3, num_rows)
    expected = reference.combine_rows(reference.grouped_mlp(plain[0], plain[1], *stacks), plain[2], weights_TK)
    for y in (y_SD, reference.grouped_mlp(x_SD, counts_E, *stacks)):
        assert torch.equal(reference.combine_rows(y, row_TK, weights_TK), expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_few_rows_are_sorted_without_tiles(num_tokens: int) -> None:
    rows, ids_TK, _ = routed(num_tokens)
    with installed(adapter, fake_deep_gemm.build("mainline")):
        sort = resolve_ops(BF16).ops.sort_rows_fp8
        x_SD, counts_E, row_TK = sort(rows, ids_TK, 3, ids_TK.numel())
    expected = reference.group_rows(ids_TK, 3)
    assert x_SD.expert_S is None
    assert torch.equal(x_SD.numbers_TI.float(), rows.numbers_TI[expected[1]].float())
    assert torch.equal(counts_E, expected[0])
    assert torch.equal(row_TK, expected[2])


def test_only_rows_that_are_there_are_activated() -> None:
    """With room for 8192 rows the rest is a gigabyte in each layer."""
    counts_E, asked = torch.tensor([2, 5, 1], dtype=torch.int32), []
    with installed(adapter, fake_deep_gemm.build("mainline")):
        ops = resolve_ops(BF16, forced={"grouped_mlp[fp8]": "deep_gemm"}).ops

        def activate(x: Tensor, **options: Any) -> FP8Rows:
            asked.append(options.get("counts_E"))
            return ops.gated_silu_fp8(x, **options)

        x = draw(3, adapter.ROOM_STEP, 256).to(torch.bfloat16)
        ops.replace(gated_silu_fp8=activate)["grouped_mlp[fp8]"](x, counts_E, *experts(3, "cpu"))
    (given,) = asked
    assert given is not None
    assert given.tolist() == counts_E.tolist()


@pytest.mark.parametrize(("expected", "told"), [(4, 4), (1, 1), (0, 1), (None, 4), (113, 113)])
def test_the_library_knows_how_many_rows_are_expected(expected: int | None, told: int) -> None:
    """By which it chooses its tiles: room for 8192 rows of which a step fills 4 needs none of 128."""
    library, asked = fake_deep_gemm.build("mainline"), []
    multiply = getattr(library, adapter.MASKED[0])

    def counted(*of: Any) -> None:
        asked.append(of[-1])
        multiply(*of)

    setattr(library, adapter.MASKED[0], counted)
    rows = reference.quantize_fp8(draw(3, adapter.ROOM_STEP, 256).to(torch.bfloat16), ue8m0=False)
    with installed(adapter, library):
        op = op_of("cpu")
        op(attrs.evolve(rows, expected=expected), torch.tensor([2, 5, 1]), *experts(3, "cpu"))
    assert asked == [told, told]


def test_it_is_told_what_the_library_serves() -> None:
    with installed(adapter, fake_deep_gemm.build("sgl")):
        lines = [line.split() for line in explain_backends(BF16).splitlines()]
        assert ["grouped_mlp[fp8]", "deep_gemm,", "else", "torch"] in lines
        refused = explain_backends(attrs.evolve(BF16, dtype=torch.float32))
    assert "not deep_gemm: writes bfloat16, the model runs in torch.float32" in refused


@pytest.mark.parametrize("name", ["cpu", "A100", "B200"])
def test_other_devices_are_refused(name: str) -> None:
    assert adapter.unavailable(OpSpec(device=name)) == f"is used on Hopper cards, not on {name}"


def test_without_the_library() -> None:
    with installed(adapter, None):
        assert "cannot be imported (" in str(adapter.unavailable(BF16))
    other = ModuleType("deep_gemm")
    other.gemm_fp8_fp8_bf16_nt = print  # type: ignore[attr-defined]
    with installed(adapter, other):
        assert adapter.unavailable(BF16) == "this deep_gemm has no fp8_gemm_nt"
