"""Experts on their way from one placement to another: in parts, beside the weights in use, then all at once in place.

plan    the moves, in parts of so many bytes          the same on every rank
pack    a part's outgoing experts are read, room is made for incoming ones      may fail, touches nothing in use
send    the part travels                                                        all ranks of the group
apply   all that came is written into its slots, and tokens are sent there      all ranks, between two steps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdinfer.moe.layer import MoE
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.moe.placement import ExpertMove, ExpertPlacement, plan_migration


class ExpertTransfer:
    """The way of one model's experts to `placement`, made alike on every rank. `layers` are the rows of the placement;
    a rank sends and receives at most `part_bytes` in a part (one expert at least; None puts all into one)."""

    def __init__(
        self,
        experts: ExpertParallel,
        layers: Sequence[MoE],
        placement: ExpertPlacement,
        part_bytes: int | None = None,
    ) -> None:
        self.placement = placement
        self._experts = experts
        self._layers = layers
        self._parts = list(cut_into_parts(self._moves(), [layer.experts.slot_bytes for layer in layers], part_bytes))
        self._sends: list[tuple[int, Tensor]] = []
        self._receives: list[tuple[int, Tensor]] = []
        self._came: list[tuple[ExpertMove, Tensor]] = []

    def _moves(self) -> Sequence[ExpertMove]:
        """On a rank that looks no replicas up slots have no order: nothing moves."""
        old = self._experts.placement
        if old is None or self._experts.replicas is None:
            return ()
        return plan_migration(
            old,
            self.placement,
            expert_bytes=self._layers[0].experts.slot_bytes,
            ranks_per_node=self._experts.replicas.ranks_per_node,
        ).moves

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    @property
    def num_moves(self) -> int:
        """Experts that are copied, on all ranks."""
        return sum(map(len, self._parts))

    def pack(self, part: int) -> None:
        """Gets a part ready. Raises whatever reading weights or allocating memory does, for example when there is no
        room for `part_bytes` more."""
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
        """Exchanges the part that was packed last. Raises RankLost."""
        self._experts.group.exchange(self._sends, self._receives)
        self._sends, self._receives = [], []

    def apply(self) -> None:
        """Puts everything in place; addresses stay. From here on `placement` is what runs."""
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
    """Consecutive moves, as many as no rank has more than `part_bytes` to send or to receive."""
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
