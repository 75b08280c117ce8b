"""From a deployment to numbers, computed without a device: whether it fits, and what a load would see of it.

    simulation/       a load through a cluster of simulated engines
    plan.py           a checked plan of engines over ranks
    host_memory.py    what links between engines take of their hosts
    profiles/         published deployments: each setting, and what it is here
    rank_memory.py    what a rank's device holds beside weights and pages
    rank_weights.py   how many bytes of weights a rank holds

May import: bench, checkpoint, config, execution, kernels, kv, model, moe, pairing, parallel, scheduling, the ground.
"""

from __future__ import annotations

from pdinfer.planning.plan import ClusterPlan, EnginePlan
from pdinfer.planning.profiles import Profile, profile
from pdinfer.planning.simulation import Change, Simulator, Stall, StepRows, cluster, simulate

__all__ = [
    "Change",
    "ClusterPlan",
    "EnginePlan",
    "Profile",
    "Simulator",
    "Stall",
    "StepRows",
    "cluster",
    "profile",
    "simulate",
]
