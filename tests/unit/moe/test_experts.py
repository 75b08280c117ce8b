"""The experts of a rank: results do not depend on the form in which rows come, and a slot can be read and written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.config import ExpertConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import Format, Shape, Weight
from pdinfer.kernels.formats.four_bits import MXFP4, Int4, quantize_int4, quantize_mxfp4
from pdinfer.kernels.formats.fp8 import FP8Blocks, quantize_fp8
from pdinfer.kernels.formats.int8 import Int8Dynamic, quantize_int8
from pdinfer.kernels.formats.weights import assign, expert, part, tensors_of
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.model.batch import Step
from pdinfer.model.block import Block
from pdinfer.model.load import load_model
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher
from pdinfer.moe.dispatchers.base import Contiguous, LocalDispatcher, Masked
from pdinfer.moe.layer import Experts, MoE
from pdinfer.moe.placement.recorder import ExpertLoadRecorder
from pdinfer.parallel.groups import Group
from pdinfer.parallel.topology import Topology
from pdinfer.testing import random_model, tiny_config, tiny_config_dict, write_checkpoint
from pdinfer.testing.models import RandomWeights
from tests.rounding import difference_of_models

CPU = torch.device("cpu")
OPS = resolve_ops(OpSpec(device=CPU, dtype=torch.float32)).ops
SLOTS, WIDTH, INNER = 3, 160, 32  # two blocks of columns, one of them narrow, and whole groups of four bits
QUANTIZE = {Int8Dynamic: quantize_int8, Int4: quantize_int4, MXFP4: quantize_mxfp4}
FORMATS = (Plain, FP8Blocks, *QUANTIZE)
every_format = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.__name__)


def stored(kind: type[Format], matrix_OI: Tensor) -> Weight:
    if kind is FP8Blocks:
        numbers, scale = quantize_fp8(matrix_OI, ue8m0=False)
        return FP8Blocks(numbers=numbers, scale=scale)
    if kind in QUANTIZE:
        numbers, scale = QUANTIZE[kind](matrix_OI)
        return kind(numbers=numbers, scale=scale)
    return matrix_OI


def experts_of(kind: type[Format], seed: int) -> Experts:
    generator = torch.Generator().manual_seed(seed)
    stacks = []
    for parts, rows, columns in ((2, INNER, WIDTH), (1, WIDTH, INNER)):
        stack = kind.empty(Shape(SLOTS, parts, rows, columns), dtype=torch.float32, device=CPU)
        for slot in range(SLOTS):
            for index in range(parts):
                matrix = torch.randn(rows, columns, generator=generator) / 5
                assign(part(expert(stack, slot), index, parts), stored(kind, matrix))
        stacks.append(stack)
    return Experts(stacks[0], stacks[1], OPS.grouped_mlp.of(stacks[0]))


@every_format
@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0, 0), (0, 4, 0)])
@pytest.mark.parametrize("weigh", [False, True])
def test_every_form_of_rows_gives_the_same_results(kind: type, counts: tuple[int, ...], weigh: bool) -> None:
    experts, total = experts_of(kind, 0), sum(counts)
    generator = torch.Generator().manual_seed(1)
    x_SD, weights_S = torch.randn(total, WIDTH, generator=generator), torch.rand(total, generator=generator)
    counts_E = torch.tensor(counts)
    expected_SD = experts(Contiguous(x_SD=x_SD, counts_E=counts_E))
    if weigh:
        expected_SD = expected_SD * weights_S[:, None]
    plain = Contiguous(x_SD=x_SD, counts_E=counts_E, weights_S=weights_S if weigh else None)
    assert torch.equal(experts(plain), expected_SD)

    garbage_SD = torch.full((2, WIDTH), float("nan"))
    with_more = Contiguous(
        x_SD=torch.cat((x_SD, garbage_SD)),
        counts_E=counts_E.int(),
        weights_S=torch.cat((weights_S, torch.full((2,), float("nan")))) if weigh else None,
    )
    y_SD = experts(with_more)
    assert y_SD.shape == (total + 2, WIDTH)
    assert torch.equal(y_SD[:total], expected_SD)

    masked = Masked(
        x_END=torch.full((SLOTS, 5, WIDTH), float("nan")),
        counts_E=counts_E.int(),
        weights_EN=torch.full((SLOTS, 5), float("nan")) if weigh else None,
    )
    split = zip(x_SD.split(list(counts)), weights_S.split(list(counts)), strict=True)
    for slot, (rows, weights) in enumerate(split):
        masked.x_END[slot, : len(rows)] = rows
        if masked.weights_EN is not None:
            masked.weights_EN[slot, : len(rows)] = weights
    y_END = experts(masked)
    assert y_END.shape == masked.x_END.shape
    assert torch.equal(torch.cat([y_END[slot, :count] for slot, count in enumerate(counts)]), expected_SD)


@every_format
def test_a_slot_is_written_in_place_with_what_was_read_elsewhere(kind: type) -> None:
    ours, theirs = experts_of(kind, 0), experts_of(kind, 1)
    before = [ours.read_slot(slot) for slot in range(SLOTS)]
    addresses = [tensor.data_ptr() for stack in (ours.gate_up, ours.down) for tensor in tensors_of(stack)]
    data = theirs.read_slot(2)
    assert (data.dtype, data.shape) == (torch.uint8, (ours.slot_bytes,))
    ours.write_slot(1, data)
    assert torch.equal(ours.read_slot(1), data)
    assert not torch.equal(data, before[1])
    assert [torch.equal(ours.read_slot(slot), before[slot]) for slot in (0, 2)] == [True, True]
    assert [tensor.data_ptr() for stack in (ours.gate_up, ours.down) for tensor in tensors_of(stack)] == addresses
    x_SD = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    assert torch.equal(
        ours(Contiguous(x_SD=x_SD, counts_E=torch.tensor([0, 4, 0]))),
        theirs(Contiguous(x_SD=x_SD, counts_E=torch.tensor([0, 0, 4]))),
    )
    ours.write_slot(1, before[1])
    assert [torch.equal(ours.read_slot(slot), before[slot]) for slot in range(SLOTS)] == [True] * SLOTS


def test_bytes_of_another_format_are_refused() -> None:
    floats, quantized = experts_of(Plain, 0), experts_of(Int8Dynamic, 0)
    told = f"an expert takes {floats.slot_bytes} bytes here, got torch.uint8 of shape \\[{quantized.slot_bytes}\\]"
    with pytest.raises(ConfigError, match=told):
        floats.write_slot(0, quantized.read_slot(0))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("ranks", [False, True])
def test_two_batches_under_way_give_what_one_does(num_tokens: int, ranks: bool) -> None:
    config = tiny_config()
    layer: MoE = random_model(config).moe_layers()[0]
    dispatcher = layer.dispatcher
    assert isinstance(dispatcher, LocalDispatcher)
    if ranks:
        layer = attrs.evolve(layer, dispatcher=AllToAllDispatcher(Group("ep"), config.n_routed_experts, OPS))
    x_TD, residual_TD = torch.randn(2, num_tokens, config.hidden_size, generator=torch.Generator().manual_seed(0))
    halved = attrs.evolve(layer, two_batch_overlap=True)
    for added_TD in (None, residual_TD):
        expected = layer(x_TD, residual_TD=added_TD)
        size = float(expected.abs().max()) if num_tokens else 0.0
        got = halved(x_TD, residual_TD=added_TD)
        torch.testing.assert_close(got, expected, rtol=0, atol=difference_of_models(config, 0, size))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [False, True])
def test_padding_reaches_no_expert_and_is_not_recorded(overlap: bool, ranks: bool) -> None:
    """Whatever padding holds, the other tokens get what they would get without it."""
    config = tiny_config()
    layer: MoE = random_model(config).moe_layers()[0]
    recorder = ExpertLoadRecorder(1, config.n_routed_experts, device=CPU, mode="stat")
    noted = NotedOp(layer.experts.op)
    dispatcher = AllToAllDispatcher(Group("ep"), config.n_routed_experts, OPS) if ranks else layer.dispatcher
    layer = attrs.evolve(
        layer,
        dispatcher=dispatcher,
        experts=attrs.evolve(layer.experts, op=noted),
        record=partial(recorder.record, 0),
        two_batch_overlap=overlap,
    )
    x_TD = torch.randn(6, config.hidden_size, generator=torch.Generator().manual_seed(0))
    live_T = torch.tensor([True, False, True, True, False, False])
    x_TD[~live_T] = torch.nan
    got = layer(x_TD, None, live_T)
    recorder.end_step()
    assert recorder.counts().sum() == noted.rows == 3 * config.num_experts_per_tok
    expected = attrs.evolve(layer, two_batch_overlap=False)(x_TD[live_T])
    tolerance = difference_of_models(config, 0, float(expected.abs().max()))
    torch.testing.assert_close(got[live_T], expected, rtol=0, atol=tolerance)


@attrs.define
class SecondOfTwo:
    """The group of a rank that has the second half of the tokens for its MLPs. Results of the first half are lost."""

    size: int = 2

    def part(self, x: Tensor, together: int = 1) -> Tensor:
        return x[len(x) // 2 :]

    def join(self, x: Tensor, total: int, together: int = 1) -> Tensor:
        return torch.cat((x.new_zeros(total - len(x), *x.shape[1:]), x))


def test_a_rank_knows_which_of_its_tokens_are_padding() -> None:
    config = tiny_config()
    model = random_model(config)
    batch, view = model._whole(range(4))
    layer = next(layer for layer, block in enumerate(model.blocks) if isinstance(block.mlp, MoE))
    block, recorder = model.blocks[layer], ExpertLoadRecorder(1, config.n_routed_experts, device=CPU, mode="stat")
    mlp: Any = attrs.evolve(block.mlp, record=partial(recorder.record, 0))
    group: Any = SecondOfTwo()
    live_T = torch.tensor([True, True, False, True])
    step = Step(batch, view, model.rotary(batch.positions_T), live_T=live_T)
    several = attrs.evolve(Topology().apart(), tp=Group("tp", (0, 1)))
    kind = type(Block.build(RandomWeights(), layer, config, OPS, model.experts, several))
    fields = {field.name: getattr(block, field.name) for field in attrs.fields(Block)}
    kind(**fields | {"mlp": mlp, "tp": group})(torch.ones(4, config.hidden_size), step)
    recorder.end_step()
    assert recorder.counts().sum() == config.num_experts_per_tok


@attrs.define
class NotedOp:
    """The op of experts, which counts the rows it is asked for."""

    inner: Any
    rows: int = 0

    def __call__(self, x: Tensor, counts_E: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        self.rows += int(counts_E.sum())
        return self.inner(x, counts_E, gate_up, down)


@attrs.define
class NotedDispatcher:
    """A dispatcher whose calls are noted."""

    inner: LocalDispatcher
    calls: list[str] = attrs.field(factory=list)

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            return getattr(self.inner, name)(*arguments)

        return called


@pytest.mark.parametrize("overlap", [False, True])
def test_two_batches_are_under_way_where_that_is_asked_for(tmp_path: Path, overlap: bool) -> None:
    """The second half leaves before the first is computed, and is computed while the results of the first return."""
    write_checkpoint(tmp_path, tiny_config_dict("v3"))
    options = ExpertConfig(two_batch_overlap=overlap)
    layers = load_model(tmp_path, dtype=torch.float32, experts=options).moe_layers()
    x_TD = torch.randn(5, tiny_config().hidden_size, generator=torch.Generator().manual_seed(0))
    order = ["dispatch_begin", "dispatch_end", "combine_begin", "combine_end"]
    if overlap:
        begin, arrive, give_back, end = order
        order = [begin, begin, arrive, give_back, arrive, give_back, end, end]
    for layer in layers:
        assert isinstance(layer.dispatcher, LocalDispatcher)
        dispatcher: Any = NotedDispatcher(layer.dispatcher)
        attrs.evolve(layer, dispatcher=dispatcher)(x_TD)
        assert dispatcher.calls == order


def test_rows_in_int8_are_for_experts_in_int8(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict())
    told = r'"all_to_all_int8" brings rows in INT8 to experts in w8a8_dynamic, and .*\.experts are held as float'
    with pytest.raises(ConfigError, match=told):
        load_model(tmp_path, experts=ExpertConfig(moe_a2a_backend="all_to_all_int8"))
