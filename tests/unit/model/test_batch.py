"""The index tensors of a step equal those of a plain loop over its tokens."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdinfer.model.batch import Batch, Row
from pdinfer.parallel.groups import ALONE, Group

CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn, *, longest: int = 50) -> tuple[int, list[Row]]:
    """Draw a page size, and rows that own their pages, in any order and with some to spare. Hypothesis draws no single
    token or page, of which there are hundreds: its bookkeeping took most of the time."""
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    page_size = draw(st.sampled_from([1, 2, 3, 16, 64]))
    spans = draw(st.lists(st.tuples(st.integers(0, 100), st.integers(1, longest)), max_size=6))
    counts = [-(-(start + length) // page_size) + draw(st.integers(0, 2)) for start, length in spans]
    pages = list(range(sum(counts)))
    chance.shuffle(pages)
    rows = []
    for (start, length), count in zip(spans, counts, strict=True):
        mine, pages = pages[:count], pages[count:]
        rows.append(Row([chance.randrange(97) for _ in range(length)], start, mine))
    return page_size, rows


def build(page_size: int, rows: list[Row], *, decode: bool = False) -> Batch:
    return Batch.build(rows, page_size=page_size, device=CPU, decode=decode)


@given(steps())
def test_each_token_has_its_position_and_slot(step: tuple[int, list[Row]]) -> None:
    page_size, rows = step
    batch = build(page_size, rows)
    expected = []
    for row in rows:
        for offset, token in enumerate(row.tokens):
            position = row.start + offset
            page = row.pages[position // page_size]
            expected.append((token, position, page * page_size + position % page_size))
    found = zip(batch.tokens_T.tolist(), batch.positions_T.tolist(), batch.slots_A.tolist(), strict=True)
    assert list(found) == expected


@given(steps())
def test_no_two_tokens_share_a_slot(step: tuple[int, list[Row]]) -> None:
    slots = build(*step).slots_A.tolist()
    assert len(set(slots)) == len(slots)


@given(steps())
def test_the_page_table_holds_the_pages_of_the_longest_context(step: tuple[int, list[Row]]) -> None:
    """Shorter rows are padded with pages of their own: with more of them where they have more, then with the first."""
    page_size, rows = step
    table = build(page_size, rows).page_table_BM
    width = max((-(-(row.start + len(row.tokens)) // page_size) for row in rows), default=0)
    assert table.shape == (len(rows), width)
    assert table.tolist() == [[*row.pages, *row.pages[:1] * width][:width] for row in rows]


@given(steps())
def test_lengths_are_the_same_on_host_and_device(step: tuple[int, list[Row]]) -> None:
    _, rows = step
    batch = build(*step)
    assert batch.query_lens == tuple(len(row.tokens) for row in rows)
    assert batch.context_lens == tuple(row.start + len(row.tokens) for row in rows)
    assert batch.context_lens_B.tolist() == list(batch.context_lens)


@given(steps())
def test_last_rows_are_those_of_last_tokens(step: tuple[int, list[Row]]) -> None:
    batch = build(*step)
    positions = batch.positions_T[torch.tensor(batch.last_rows, dtype=torch.int64)]
    assert (positions + 1).tolist() == list(batch.context_lens)
    assert len(batch.last_rows) == len(set(batch.last_rows)) == len(batch.query_lens)
    assert batch.last_rows[-1:] == [len(batch.tokens_T) - 1][: len(batch.query_lens)]


@given(steps(longest=1))
def test_one_token_each_makes_the_rows_the_sequences(step: tuple[int, list[Row]]) -> None:
    batch = build(*step, decode=True)
    assert batch.decode
    assert batch.last_rows == list(range(len(batch.query_lens)))
    assert torch.equal(batch.positions_T + 1, batch.context_lens_B)
    assert batch.live_T is None


@given(steps())
def test_index_tensors_are_int64_on_the_device(step: tuple[int, list[Row]]) -> None:
    fields = attrs.asdict(build(*step), recurse=False)
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 6
    assert tensors.pop("page_table_BM").dtype == torch.int32
    assert {(tensor.dtype, tensor.device) for tensor in tensors.values()} == {(torch.int64, CPU)}


@pytest.mark.parametrize("decode", [False, True])
def test_no_rows_are_an_empty_batch(decode: bool) -> None:
    batch = build(16, [], decode=decode)
    assert [t.shape for t in (batch.tokens_T, batch.positions_T, batch.sequence_T, batch.slots_A)] == [(0,)] * 4
    assert (batch.page_table_BM.shape, batch.context_lens_B.shape) == ((0, 0), (0,))
    assert (batch.query_lens, batch.context_lens, batch.last_rows) == ((), (), [])


def test_an_example() -> None:
    batch = build(4, [Row([7, 8, 9], 3, [5, 2]), Row([1], 0, [9])])
    assert batch.positions_T.tolist() == [3, 4, 5, 0]
    assert batch.sequence_T.tolist() == [0, 0, 0, 1]
    assert batch.slots_A.tolist() == [23, 8, 9, 36]
    assert batch.page_table_BM.tolist() == [[5, 2], [9, 9]]
    assert (batch.context_lens, batch.last_rows) == ((6, 1), [2, 3])


def test_a_token_beyond_its_pages_is_an_error() -> None:
    with pytest.raises(IndexError):
        build(4, [Row([1, 2], 3, [5])])


# ---- cut over context-parallel ranks -------------------------------------------------------------------------------


def cut(page_size: int, rows: list[Row], size: int) -> list[Batch]:
    """Return the batch of each rank."""
    return [
        Batch.build(rows, page_size=page_size, device=CPU, decode=False, cp=Group("cp", tuple(range(size)), rank))
        for rank in range(size)
    ]


@settings(max_examples=30)
@given(steps(), st.integers(2, 4))
def test_ranks_have_every_token_once_and_know_all_slots(step: tuple[int, list[Row]], size: int) -> None:
    whole, parts = build(*step), cut(*step, size)
    for batch in parts:
        assert batch.cp_counts == tuple(len(part.tokens_T) for part in parts)
        assert torch.equal(batch.slots_A, parts[0].slots_A)
    order = whole.slots_A.argsort(), parts[0].slots_A.argsort()
    for name in ("tokens_T", "positions_T"):
        gathered = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(gathered[order[1]], getattr(whole, name)[order[0]])


@settings(max_examples=30)
@given(steps(), st.integers(2, 4))
def test_a_piece_is_a_sequence_that_ends_where_it_ends(step: tuple[int, list[Row]], size: int) -> None:
    page_size, rows = step
    owner = {page: index for index, row in enumerate(rows) for page in row.pages}
    for batch in cut(*step, size):
        first = 0
        for index, (count, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            span = slice(first, first + count)
            assert batch.positions_T[span].tolist() == list(range(context - count, context))
            assert batch.sequence_T[span].tolist() == [index] * count
            pages = batch.page_table_BM[index, : -(-context // page_size)].tolist()
            assert pages == list(rows[owner[pages[0]]].pages[: len(pages)])
            first += count


@settings(max_examples=30)
@given(steps(), st.integers(2, 4))
def test_the_token_behind_a_piece_is_that_of_its_row(step: tuple[int, list[Row]], size: int) -> None:
    page_size, rows = step
    rows = [attrs.evolve(row, next_token=96 - at) for at, row in enumerate(rows)]
    parts = cut(page_size, rows, size)
    whole = build(page_size, rows).shifted()
    gathered = torch.cat([part.shifted().tokens_T for part in parts])
    assert torch.equal(gathered[parts[0].slots_A.argsort()], whole.tokens_T[whole.slots_A.argsort()])


@settings(max_examples=30)
@given(steps(), st.integers(2, 4))
def test_the_first_rank_has_every_last_token(step: tuple[int, list[Row]], size: int) -> None:
    page_size, rows = step
    first = attrs.evolve(cut(page_size, rows, size)[0], cp=ALONE)
    assert first.last_of(first.positions_T[:, None])[:, 0].tolist() == [row.stop - 1 for row in rows]


def test_decode_is_not_cut() -> None:
    row = Row([1, 2, 3], 4, [0, 1])
    group = Group("cp", (0, 1), 1)
    batch = Batch.build([row], page_size=4, device=CPU, decode=True, cp=group)
    assert batch.cp is ALONE
    assert torch.equal(batch.tokens_T, torch.tensor([1, 2, 3]))
