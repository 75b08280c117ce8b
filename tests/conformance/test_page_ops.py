"""The ops that copy parts of a pool, for every provider, as in test_ops."""

from __future__ import annotations

import torch

from tests.conformance.op_suite import every_place, op_of
from tests.joined import for_each

WORDS = [torch.uint8, torch.int32, torch.int64]


def numbers(rows: int, width: int, word: torch.dtype, device: str) -> torch.Tensor:
    return (torch.arange(rows * width) * 7919 % 251).to(word).view(rows, width).to(device)


@for_each("rows", [[], [4], [6, 0, 3, 1], list(range(7))])
@for_each("width", [1, 3, 9216])
@for_each("word", WORDS)
@every_place("gather_pages")
def test_rows_are_gathered_in_order(provider: str, device: str, word: torch.dtype, width: int, rows: list[int]) -> None:
    pool = numbers(7, width, word, device)
    whole = torch.full((len(rows) + 2, width), 77, dtype=word, device=device)
    before = pool.clone()
    op_of(provider, "gather_pages", device)(pool, torch.tensor(rows, dtype=torch.int64, device=device), whole[1:-1])
    assert [row.tolist() for row in whole[1:-1]] == [before[row].tolist() for row in rows]
    assert (whole[[0, -1]] == 77).all(), "nothing beside the copies was written"
    assert torch.equal(pool, before)


@for_each("rows", [[], [4], [6, 0, 3, 1], list(range(7))])
@for_each("width", [1, 3, 9216])
@for_each("word", WORDS)
@every_place("scatter_pages")
def test_rows_are_scattered_to_their_places(
    provider: str, device: str, word: torch.dtype, width: int, rows: list[int]
) -> None:
    data = numbers(len(rows), width, word, device)
    pool = torch.full((7, width), 77, dtype=word, device=device)
    op_of(provider, "scatter_pages", device)(pool, torch.tensor(rows, dtype=torch.int64, device=device), data)
    for row in range(7):
        expected = data[rows.index(row)].tolist() if row in rows else [77] * width
        assert pool[row].tolist() == expected


@every_place("gather_pages", "scatter_pages")
def test_rows_begin_at_any_byte(provider: str, device: str) -> None:
    pool, data, rows = numbers(8, 16, torch.uint8, device), numbers(3, 16, torch.uint8, device) + 1, [4, 0, 2]
    chosen = torch.tensor(rows, dtype=torch.int64, device=device)
    odd, expected = pool.flatten()[3:-13].view(7, 16), pool.clone()
    expected.flatten()[3:-13].view(7, 16)[rows] = data
    op_of(provider, "scatter_pages", device)(odd, chosen, data)
    assert torch.equal(pool, expected)
    into = torch.zeros_like(data)
    op_of(provider, "gather_pages", device)(odd, chosen, into)
    assert torch.equal(into, data)
