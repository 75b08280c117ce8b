"""Whether a deployment fits its devices and its engines fit each other, computed without a device.

    cluster.py        a checked plan of engines over ranks
    rank_weights.py   how many bytes of weights a rank holds

May import: checkpoint, config, kernels, kv, model, moe, parallel, the ground.
"""

from __future__ import annotations

from pdinfer.planning.cluster import ClusterPlan, EnginePlan, engine_nodes, h800_cluster

__all__ = [
    "ClusterPlan",
    "EnginePlan",
    "engine_nodes",
    "h800_cluster",
]
