"""Where experts live and how tokens reach them."""

from __future__ import annotations

from pdinfer.moe.all_to_all import AllToAllDispatcher
from pdinfer.moe.balance import rebalance_experts
from pdinfer.moe.dispatch import Contiguous, Dispatched, LocalDispatcher, Masked, TokenDispatcher
from pdinfer.moe.location_files import ExpertLocation, read_expert_location, write_counts, write_placement
from pdinfer.moe.migration import ExpertMove, MigrationPlan, plan_migration
from pdinfer.moe.placement import DispatchRule, DispatchTable, ExpertPlacement, dispatch_table
from pdinfer.moe.recorder import ExpertLoadRecorder
from pdinfer.moe.solver import solve_placement

__all__ = [
    "AllToAllDispatcher",
    "Contiguous",
    "DispatchRule",
    "DispatchTable",
    "Dispatched",
    "ExpertLoadRecorder",
    "ExpertLocation",
    "ExpertMove",
    "ExpertPlacement",
    "LocalDispatcher",
    "Masked",
    "MigrationPlan",
    "TokenDispatcher",
    "dispatch_table",
    "plan_migration",
    "read_expert_location",
    "rebalance_experts",
    "solve_placement",
    "write_counts",
    "write_placement",
]
