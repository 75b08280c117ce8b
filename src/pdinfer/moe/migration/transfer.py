"""Experts in transit from one placement to another: in parts, next to the weights in use, then into place all at once.

plan    cut the moves into parts of limited size                       the same on every rank
pack    read the outgoing experts of a part, allocate for the rest     may fail, touches nothing in use
send    exchange the part                                              all ranks of the group
apply   write what came into its slots, and send tokens there          all ranks, between two steps"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdinfer.moe.layer import MoE
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.moe.placement.difference import ExpertMove, plan_migration
from pdinfer.moe.placement.placement import ExpertPlacement


class ExpertTransfer:
    """The transfer of one model's experts to `placement`, made alike on every rank.

    `layers` are the rows of the placement. A rank sends and receives at most `part_bytes` in a part, but at least one
    expert; None puts everything into one part."""

    def __init__(
        self, experts: ExpertParallel, layers: Sequence[MoE], placement: ExpertPlacement, part_bytes: int | None = None
    ) -> None:
        self.placement = placement
        self._experts = experts
        self._layers = layers
        self._parts = list(cut_into_parts(self._moves(), [layer.experts.slot_bytes for layer in layers], part_bytes))
        self._sends: list[tuple[int, Tensor]] = []
        self._receives: list[tuple[int, Tensor]] = []
        self._came: list[tuple[ExpertMove, Tensor]] = []

    def _moves(self) -> Sequence[ExpertMove]:
        """Plan the moves. Nothing moves where no replicas are looked up, because slots have no order there."""
        old = self._experts.placement
        if old is None or self._experts.replicas is None:
            return ()
        return plan_migration(old, self.placement, ranks_per_node=self._experts.replicas.ranks_per_node)

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    @property
    def num_moves(self) -> int:
        """How many experts are copied, on all ranks."""
        return sum(map(len, self._parts))

    def pack(self, part: int) -> None:
        """Get a part ready. Raises what reading weights and allocating memory raise, for example when there is no room
        for `part_bytes` more."""
        here = self._experts.group.rank
        sends, receives = [], []
        for move in self._parts[part]:
            experts = self._layers[move.layer].experts
            if move.source_rank == here:
                data = experts.read_slot(move.source_slot - self._first_slot)
                if move.destination_rank != here:
                    sends.append((move.destination_rank, data))
                    continue
            elif move.destination_rank == here:
                data = torch.empty(experts.slot_bytes, dtype=torch.uint8, device=experts.device)
                receives.append((move.source_rank, data))
            else:
                continue
            self._came.append((move, data))
        self._sends, self._receives = sends, receives

    def send(self) -> None:
        """Exchange the part that was packed last. Raises RankLost."""
        self._experts.group.exchange(self._sends, self._receives)
        self._sends, self._receives = [], []

    def apply(self) -> None:
        """Write everything in place, at the same addresses. From here on `placement` is in use."""
        for move, data in self._came:
            self._layers[move.layer].experts.write_slot(move.destination_slot - self._first_slot, data)
        self._came = []
        if self._experts.replicas is not None:
            self._experts.replicas.put(self.placement)
        self._experts.placement = self.placement

    @property
    def _first_slot(self) -> int:
        return self._experts.group.rank * self.placement.slots_per_rank


def cut_into_parts(
    moves: Sequence[ExpertMove], bytes_of_layer: Sequence[int], part_bytes: int | None
) -> Iterator[tuple[ExpertMove, ...]]:
    """Cut moves into parts of consecutive ones, in which no rank sends or receives more than `part_bytes`."""
    part: list[ExpertMove] = []
    busy: dict[tuple[str, int], int] = {}
    for move in moves:
        size = bytes_of_layer[move.layer]
        ends = ("sends", move.source_rank), ("receives", move.destination_rank)
        if part and part_bytes is not None and max(busy.get(end, 0) for end in ends) + size > part_bytes:
            yield tuple(part)
            part, busy = [], {}
        part.append(move)
        for end in ends:
            busy[end] = busy.get(end, 0) + size
    if part:
        yield tuple(part)
