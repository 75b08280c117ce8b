"""From the load of experts to their placement: arithmetic in numpy, no tensor.

    deepseek.py     DeepSeek's EPLB under its own names
    solver.py       a solver that finds more even placements
    assignment.py   experts in the slots of ranks
    exchange.py     relieves the fullest rank, one exchange at a time
    process.py      the solver in a process of its own, where `__main__.py` runs

May import: moe.placement, process, the ground.
"""

from __future__ import annotations

from pdinfer.moe.balance.deepseek import rebalance_experts
from pdinfer.moe.balance.process import SolverProcess, unpack_placement
from pdinfer.moe.balance.solver import solve_placement

__all__ = [
    "SolverProcess",
    "rebalance_experts",
    "solve_placement",
    "unpack_placement",
]
