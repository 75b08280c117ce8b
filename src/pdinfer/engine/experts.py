"""What a host may do with the experts of an engine: place them anew while it runs, and learn how much each was used."""

from __future__ import annotations

from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.moe.placement.placement import ExpertPlacement, Ints
from pdinfer.process.forked import OfOneProcess


class EngineExperts(OfOneProcess):
    """The experts of one engine, as its attribute `experts`. Everything here may be used from any thread and returns at
    once; what it asks for happens in later steps, on all ranks."""

    def __init__(self, rebalancing: Rebalancing) -> None:
        self._rebalancing = rebalancing

    def stage(self, placement: ExpertPlacement, *, epoch: int | None = None) -> None:
        """Place the experts like this as soon as every rank has staged the same placement.

        The following steps bring the weights, `rebalance_bytes_per_step` at a time, and all ranks change over in the
        same step; from there on `load().placement_epoch` is `epoch` (by default one more than before). Until then the
        old placement is used, and it stays when a rank cannot go on: `load().placement_error` tells why. Raises
        ConfigError for a placement of other sizes, for a stale one (its epoch is not above the one in use, or nothing
        changes), and while another one is staged."""
        self._rebalancing.stage(placement, epoch=epoch)

    def cancel(self) -> None:
        """Drop what is staged, on all ranks, at their next step."""
        self._rebalancing.cancel()

    def rebalance(self) -> None:
        """Solve a placement for the load that all ranks recorded, in a process of its own, and stage it on all ranks.

        Does nothing while a rebalance is under way. Call it on one rank. Raises ConfigError when nothing is recorded,
        and when all experts are on one rank."""
        self._rebalancing.request_rebalance()

    def sum_load(self) -> None:
        """Add up what all ranks recorded, at their next step, into `load`. Call it on one rank.

        Raises ConfigError when nothing is recorded."""
        self._rebalancing.request_sum()

    @property
    def load(self) -> Ints | None:
        """How many tokens chose each expert, int64 [layers, experts], over all ranks.

        It is from when the ranks last added it up, for a rebalance or for `sum_load`; None before. `moe.write_counts`
        writes it to a file."""
        return self._rebalancing.load
