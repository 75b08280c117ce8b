"""From a deployment to numbers, computed without a device: whether it fits, and what a load would see of it.

    search.py         which engines of how many nodes serve a load best
    advice.py         when an engine should change its role
    calibration.py    a few factors over a prior, from what was measured
    measured.py       of which steps measured things consist: bursts, closed loops, runs, loads
    queues.py         sizes in closed form: nodes, waiting, the limits of a decode
    roofline.py       how long steps take by a model's config and a part's numbers
    traffic.py        how long tokens take to experts and back
    simulation/       a load through a cluster of simulated engines
    cluster_plan.py   whether engines fit each other, and what links between them take of their hosts
    plan.py           a checked plan of an engine over ranks
    parts/            hardware: what makers say, and what of it was seen to be reached
    shapes.py         what names of clusters mean
    profiles/         published deployments: each setting, and what it is here
    rank_memory.py    what a rank's device holds: weights, and what there is beside them and the pages

May import: bench, checkpoint, config, diagnosis, execution, kernels, kv, model, moe, pairing, parallel, scheduling, the
ground.
"""

from __future__ import annotations

from pdinfer.diagnosis.affinity import CpuAffinity, cpu_affinity
from pdinfer.planning.advice import advise
from pdinfer.planning.calibration import calibrate
from pdinfer.planning.cluster_plan import ClusterPlan
from pdinfer.planning.measured import Burst, ClosedLoop, MeasuredStep
from pdinfer.planning.parts import hardware
from pdinfer.planning.plan import EnginePlan
from pdinfer.planning.profiles import Profile, profile
from pdinfer.planning.queues import decodes, nodes, queue_s, utilization
from pdinfer.planning.roofline import roofline
from pdinfer.planning.search import search
from pdinfer.planning.simulation import Change, Simulator, Stall, StepRows, cluster, simulate

__all__ = [
    "Burst",
    "Change",
    "ClosedLoop",
    "ClusterPlan",
    "CpuAffinity",
    "EnginePlan",
    "MeasuredStep",
    "Profile",
    "Simulator",
    "Stall",
    "StepRows",
    "advise",
    "calibrate",
    "cluster",
    "cpu_affinity",
    "decodes",
    "hardware",
    "nodes",
    "profile",
    "queue_s",
    "roofline",
    "search",
    "simulate",
    "utilization",
]
