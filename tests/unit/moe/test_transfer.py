"""Experts travel in parts of limited size, each once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.moe.migration.transfer import ExpertTransfer, cut_into_parts
from pdinfer.moe.placement.difference import ExpertMove

RANKS = 3
ENDS = ("source_rank", "destination_rank")
SIZES = (3, 5)
"""The bytes of an expert, by layer."""


def move(layer: int, source: int, destination: int) -> ExpertMove:
    return ExpertMove(
        layer=layer,
        expert=0,
        source_rank=source,
        source_slot=source,
        destination_rank=destination,
        destination_slot=destination,
    )


moves = st.builds(move, st.integers(0, 1), st.integers(0, RANKS - 1), st.integers(0, RANKS - 1))


def sizes_at(part: Sequence[ExpertMove], end: str, rank: int) -> list[int]:
    """Return the bytes of each expert that a rank sends or receives."""
    return [SIZES[each.layer] for each in part if getattr(each, end) == rank]


@given(st.lists(moves, max_size=12), st.integers(1, 20))
def test_a_part_is_as_long_as_it_may_be(all_moves: list[ExpertMove], part_bytes: int) -> None:
    parts = [*cut_into_parts(all_moves, SIZES, part_bytes)]
    assert [each for part in parts for each in part] == all_moves
    for part, end, rank in itertools.product(parts, ENDS, range(RANKS)):
        sizes = sizes_at(part, end, rank)
        assert sum(sizes) <= part_bytes or len(sizes) == 1
    for part, (first, *_) in itertools.pairwise(parts):
        assert any(sum(sizes_at([*part, first], end, getattr(first, end))) > part_bytes for end in ENDS)


@given(st.lists(moves, max_size=12))
def test_without_a_size_all_is_one_part(all_moves: list[ExpertMove]) -> None:
    assert [*cut_into_parts(all_moves, SIZES, None)] == [tuple(all_moves)] * bool(all_moves)


def test_what_was_sent_is_not_sent_again() -> None:
    old = pd.ExpertPlacement.trivial(1, 4, 2)
    new = pd.ExpertPlacement(physical_to_logical_map=[[2, 1, 0, 3]], num_logical_experts=4, num_ranks=2)
    exchanged: list[tuple[list[int], list[int]]] = []

    def exchange(sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        exchanged.append(([to for to, _ in sends], [source for source, _ in receives]))

    group = SimpleNamespace(rank=0, size=2, exchange=exchange)
    slots = SimpleNamespace(slot_bytes=8, device="cpu", read_slot=lambda slot: torch.full((8,), slot))
    experts: Any = SimpleNamespace(placement=old, group=group, replicas=SimpleNamespace(ranks_per_node=None))
    layers: Any = [SimpleNamespace(experts=slots)]
    transfer = ExpertTransfer(experts, layers, new)
    assert (transfer.num_parts, transfer.num_moves) == (1, 2)
    transfer.pack(0)
    transfer.send()
    transfer.send()
    assert exchanged == [([1], [1]), ([], [])]
