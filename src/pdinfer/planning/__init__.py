"""From a deployment to numbers, without a device: does it fit, and do its engines fit each other.

    cluster.py        a plan of engines over ranks, checked
    rank_weights.py   the weights that a rank holds, in bytes

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
