"""Which slot of which rank holds which expert, in plain integers.

    placement.py    the placement, and which copy of an expert a rank sends its tokens to
    replicas.py     that choice as tables on the device
    recorder.py     how many tokens chose each expert
    files.py        files of placements and counts, in SGLang's formats
    difference.py   what has to be copied to get from one placement to another

May import: checkpoint, the ground.
"""

from __future__ import annotations

from pdinfer.moe.placement.difference import ExpertMove, MigrationPlan, count_arrivals, plan_migration
from pdinfer.moe.placement.files import ExpertLocation, read_expert_location, write_counts, write_placement
from pdinfer.moe.placement.placement import DispatchRule, DispatchTable, ExpertPlacement, Ints, dispatch_table
from pdinfer.moe.placement.recorder import ExpertLoadRecorder
from pdinfer.moe.placement.replicas import LayerReplicas, ReplicaTables

__all__ = [
    "DispatchRule",
    "DispatchTable",
    "ExpertLoadRecorder",
    "ExpertLocation",
    "ExpertMove",
    "ExpertPlacement",
    "Ints",
    "LayerReplicas",
    "MigrationPlan",
    "ReplicaTables",
    "count_arrivals",
    "dispatch_table",
    "plan_migration",
    "read_expert_location",
    "write_counts",
    "write_placement",
]
