"""A step that runs in two halves gives what it gives as a whole, and one half computes while the other travels."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.config import CacheConfig
from pdinfer.kv.view import KVView
from pdinfer.model import block as blocks
from pdinfer.model.batch import Batch, Row
from pdinfer.model.decode_rows import DecodeRows
from pdinfer.model.model import Model
from pdinfer.moe.layer import MoE
from pdinfer.parallel.groups import Group
from pdinfer.testing import random_model, tiny_config
from tests.rounding import difference_of_models

CPU = torch.device("cpu")
PAGE_SIZE = 4
CONTEXT = 30


def rows_of(lens: tuple[int, ...], starts: tuple[int, ...]) -> list[Row]:
    """Each row has pages of its own."""
    per_row = CONTEXT // PAGE_SIZE + 1
    return [
        Row([(7 * at + place) % 100 for place in range(count)], start, list(range(at * per_row, (at + 1) * per_row)))
        for at, (count, start) in enumerate(zip(lens, starts, strict=True))
    ]


def batch_of(rows: list[Row], *, decode: bool) -> Batch:
    """Return the batch of a prefill, or of a decode step whose rows have dead tokens behind their live ones."""
    if not decode:
        return Batch.build(rows, page_size=PAGE_SIZE, device=CPU, decode=False)
    resident = DecodeRows({}, lambda _: (), page_size=PAGE_SIZE, device=CPU, scratch_page=63)
    resident.place([Row(row.tokens[:1], row.start, row.pages) for row in rows], [None] * len(rows))
    num_live = [len(row.tokens) for row in rows]
    most = max(num_live, default=1)
    if most == 1:
        return resident.batch(len(rows))
    tokens = torch.tensor([[*row.tokens, *[0] * (most - len(row.tokens))] for row in rows])
    return resident.batch(len(rows), tokens, num_live_B=torch.tensor(num_live))


def run(model: Model, lens: tuple[int, ...], starts: tuple[int, ...], *, decode: bool) -> list[Tensor]:
    """Return the live states after each layer. What is before the rows was cached by a prefill in one piece."""
    layout = model.kv_layout(CacheConfig(page_size=PAGE_SIZE))
    view = KVView.of(model.allocate_pages(layout, 64))
    one_batch = attrs.evolve(model, experts=attrs.evolve(model.experts, two_batch_overlap=False))
    before = [row for row in rows_of(starts, (0,) * len(starts)) if row.tokens]
    one_batch.forward(batch_of(before, decode=False), view)
    batch = batch_of(rows_of(lens, starts), decode=decode)
    states = []
    for place, (layer, hidden_TD) in enumerate(model.stream_layers(batch, view)):
        assert layer == place
        written = view.latents[layer].flatten(0, 1)[batch.slots_A]
        assert written.any(-1).all()
        states.append(hidden_TD.clone() if batch.live_T is None else hidden_TD[batch.live_T])
    return states


def overlapping(model: Model) -> Model:
    return attrs.evolve(model, experts=attrs.evolve(model.experts, two_batch_overlap=True))


@pytest.mark.parametrize("family", ["v3", "v32"])
@pytest.mark.parametrize(
    ("lens", "starts", "decode"),
    [
        ((), (), False),
        ((1,), (0,), False),
        ((17,), (0,), False),
        ((9,), (13,), False),
        ((3, 9, 1), (5, 0, 2), False),
        ((4, 4), (0, 1), False),
        ((1, 12), (7, 0), False),
        ((), (), True),
        ((1,), (6,), True),
        ((1, 1, 1), (6, 11, 3), True),
        ((3, 1, 2), (6, 11, 3), True),
    ],
    ids=str,
)
def test_two_halves_give_what_the_whole_gives(
    family: str, lens: tuple[int, ...], starts: tuple[int, ...], decode: bool
) -> None:
    model = random_model(tiny_config(family))
    whole = run(model, lens, starts, decode=decode)
    halves = run(overlapping(model), lens, starts, decode=decode)
    assert len(halves) == len(whole) == model.config.num_hidden_layers
    for got, expected in zip(halves, whole, strict=True):
        assert got.shape == expected.shape
        size = float(expected.abs().max()) if len(expected) else 0.0
        tolerance = difference_of_models(model.config, CONTEXT, size)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def test_one_half_attends_while_the_other_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five tokens the first half has three. The first layer is dense."""
    model = overlapping(random_model(tiny_config(num_hidden_layers=4, first_k_dense_replace=1)))
    notes: list[tuple[str, int]] = []
    attend = blocks.Block._attend

    def noted(block: blocks.Block, hidden_TD: Tensor, step: Any) -> Any:
        notes.append(("attend", len(hidden_TD)))
        return attend(block, hidden_TD, step)

    def phases(layer: MoE, x_TD: Any, trace: Any, live_T: Any, residual_TD: Any) -> Any:
        notes.append(("dispatch", len(x_TD)))
        yield
        notes.append(("experts", len(x_TD)))
        yield
        notes.append(("end", len(x_TD)))
        return residual_TD

    monkeypatch.setattr(blocks.Block, "_attend", noted)
    monkeypatch.setattr(MoE, "phases", phases)
    run(model, (5,), (0,), decode=False)
    warm = next(at for at, note in enumerate(notes) if note == ("attend", 3))
    first, second = ([("attend", 3), ("dispatch", 3)], [("attend", 2), ("dispatch", 2)])
    expected = [("attend", 3), *first, ("attend", 2), *second]
    for last in (False, False, True):
        expected += [("experts", 3), ("experts", 2)]
        expected += [("end", 3), *([] if last else first), ("end", 2), *([] if last else second)]
    assert notes[warm:] == expected


def test_pieces_of_context_parallel_ranks_are_not_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first half would need what other ranks write in their second."""
    model = overlapping(random_model())
    batch, view = model._whole(range(8))
    monkeypatch.setattr(Batch, "halves", None)
    monkeypatch.setattr(Batch, "gather", lambda _batch, *parts: parts)
    two: Any = attrs.evolve(batch, cp=Group("cp", (0, 1)))
    assert model.forward(two, view).shape == (8, model.config.hidden_size)


@pytest.mark.parametrize("decode", [False, True])
def test_halves_know_their_sequences(decode: bool) -> None:
    lens, starts = ((2, 2, 2), (6, 11, 3)) if decode else ((3, 4, 1), (6, 11, 3))
    whole = batch_of(rows_of(lens, starts), decode=decode)
    first, second = whole.halves()
    assert torch.equal(torch.cat((first.slots_A, second.slots_A)), whole.slots_A)
    assert [len(half.tokens_T) for half in (first, second)] == ([4, 2] if decode else [4, 4])
    lens_on_host = ([(), ()], [(), ()]) if decode else ([(9, 12), (15, 4)], [(3, 1), (3, 1)])
    assert (
        [half.context_lens for half in (first, second)],
        [half.query_lens for half in (first, second)],
    ) == lens_on_host
    expected = [[8, 13], [5]] if decode else [[9, 12], [15, 4]]
    for half, context_lens in zip((first, second), expected, strict=True):
        assert half.context_lens_B.tolist() == context_lens
        query_lens = half.query_lens or (2,) * len(context_lens)
        assert half.sequence_T.tolist() == [at for at, count in enumerate(query_lens) for _ in range(count)]
    assert torch.equal(second.page_table_BM, whole.page_table_BM[2 if decode else 1 :])
