"""Where experts live and how tokens reach them."""

from __future__ import annotations

from pdinfer.moe.dispatch import Dispatched, LocalDispatcher, TokenDispatcher
from pdinfer.moe.migration import ExpertMove, MigrationPlan, plan_migration
from pdinfer.moe.placement import DispatchRule, DispatchTable, ExpertPlacement, dispatch_table

__all__ = [
    "DispatchRule",
    "DispatchTable",
    "Dispatched",
    "ExpertMove",
    "ExpertPlacement",
    "LocalDispatcher",
    "MigrationPlan",
    "TokenDispatcher",
    "dispatch_table",
    "plan_migration",
]
