"""What a host and the process of a solver say to each other. That process imports this, and no torch."""

from __future__ import annotations

import msgspec

from pdinfer.moe.placement.placement import ExpertPlacement


class PackedPlacement(msgspec.Struct):
    """An `ExpertPlacement` as lists."""

    physical_to_logical_map: list[list[int]]
    num_logical_experts: int
    num_ranks: int
    slot_shares: list[list[float]] | None = None

    @classmethod
    def of(cls, placement: ExpertPlacement) -> PackedPlacement:
        shares = placement.slot_shares
        return cls(
            placement.physical_to_logical_map.tolist(),
            placement.num_logical_experts,
            placement.num_ranks,
            None if shares is None else shares.tolist(),
        )

    def unpack(self) -> ExpertPlacement:
        """Return the placement. Raises ConfigError when the lists are not one."""
        return ExpertPlacement(**msgspec.structs.asdict(self))


class SolveRequest(msgspec.Struct):
    """A request: the load [layers][experts] that was recorded under `previous`."""

    load: list[list[int]]
    previous: PackedPlacement
    max_moves: int | None = None


class SolveAnswer(msgspec.Struct):
    """An answer: a placement, or the reason why there is none."""

    placement: PackedPlacement | None = None
    error: str = ""
