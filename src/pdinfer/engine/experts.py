"""What both engines offer of their experts: new placements while they run, and how much each was used."""

from __future__ import annotations

from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.moe.placement.placement import ExpertPlacement, Ints


class Rebalanced:
    """Part of an engine; `_rebalancing` does the work."""

    _rebalancing: Rebalancing

    def stage_placement(self, placement: ExpertPlacement, *, epoch: int | None = None) -> None:
        """Has experts placed so as soon as every rank has staged the same. Any thread; returns at once.

        Steps then bring the weights, `rebalance_bytes_per_step` at a time, and all ranks change over in the same one;
        `load().placement_epoch` is `epoch` from there on (by default one more than before). Until then the old
        placement is used, and it stays when a rank cannot go on: `load().placement_error` tells why. Raises ConfigError
        for a placement of other sizes, for a stale one (its epoch not above the one in use, or nothing changed), and
        while another one is staged.
        """
        self._rebalancing.stage(placement, epoch=epoch)

    def cancel_placement(self) -> None:
        """Drops what is staged, on all ranks, at their next step. Any thread."""
        self._rebalancing.cancel()

    def rebalance(self) -> None:
        """Has a placement solved for the load that all ranks recorded, in a process of its own, and staged on all
        ranks; nothing while one is under way. Ask on one rank, from any thread. Raises ConfigError when nothing is
        recorded, or all experts are on one rank."""
        self._rebalancing.ask_rebalance()

    def sum_expert_load(self) -> None:
        """Has all ranks add up, at their next step, what they recorded: see `expert_load`. Ask on one rank, from any
        thread. Raises ConfigError when nothing is recorded."""
        self._rebalancing.ask_sum()

    @property
    def expert_load(self) -> Ints | None:
        """How many tokens chose each expert, int64 [layers, experts], over all ranks when they last added it up, for a
        rebalance or for `sum_expert_load`; None before. `moe.write_counts` writes it to a file."""
        return self._rebalancing.load
