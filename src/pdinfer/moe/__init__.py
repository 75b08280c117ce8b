"""The mixture of experts: where experts lie, how tokens reach them, and how experts move while engines run.

    layer.py        the router, the experts of this rank, and the way of a token through both
    parallel.py     where a model has its experts on one rank
    dispatchers/    how rows reach other ranks
    placement/      which slot holds which expert
    balance/        from the load of experts to a placement
    migration/      from one placement to the next, live

Tested by tests/e2e/test_expert_ranks.py too.

May import: checkpoint, config, kernels, layers, parallel, process, the ground."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pdinfer.config import ExpertConfig
from pdinfer.moe.balance.solver import solve_placement

if TYPE_CHECKING:
    from pdinfer.moe.dispatchers.base import Contiguous, Dispatched, Masked, Returned, TokenDispatcher
    from pdinfer.moe.placement.files import read_expert_location, write_counts, write_placement
    from pdinfer.moe.placement.recorder import ExpertLoadRecorder

__all__ = [
    "Contiguous",
    "Dispatched",
    "ExpertConfig",
    "ExpertLoadRecorder",
    "Masked",
    "Returned",
    "TokenDispatcher",
    "read_expert_location",
    "solve_placement",
    "write_counts",
    "write_placement",
]


def __getattr__(name: str) -> object:
    """Return what comes with tensors. The process of a solver does without torch, which takes a second to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = dict.fromkeys(("read_expert_location", "write_counts", "write_placement"), "placement.files")
    homes["ExpertLoadRecorder"] = "placement.recorder"
    return getattr(importlib.import_module(f"{__name__}.{homes.get(name, 'dispatchers.base')}"), name)
