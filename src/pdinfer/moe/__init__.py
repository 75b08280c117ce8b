"""Where experts live and how tokens reach them."""

from __future__ import annotations

from pdinfer.moe.all_to_all import AllToAllDispatcher
from pdinfer.moe.balance import rebalance_experts
from pdinfer.moe.dispatch import Contiguous, Dispatched, LocalDispatcher, Masked, TokenDispatcher
from pdinfer.moe.migration import ExpertMove, MigrationPlan, plan_migration
from pdinfer.moe.placement import DispatchRule, DispatchTable, ExpertPlacement, dispatch_table
from pdinfer.moe.solver import solve_placement

__all__ = [
    "AllToAllDispatcher",
    "Contiguous",
    "DispatchRule",
    "DispatchTable",
    "Dispatched",
    "ExpertMove",
    "ExpertPlacement",
    "LocalDispatcher",
    "Masked",
    "MigrationPlan",
    "TokenDispatcher",
    "dispatch_table",
    "plan_migration",
    "rebalance_experts",
    "solve_placement",
]
