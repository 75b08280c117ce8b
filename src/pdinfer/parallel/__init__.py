"""The place of this rank among all ranks, and how ranks act together.

    topology.py   how ranks are divided into groups, in plain ints until `connect`
    groups.py     the collectives that pdinfer uses
    slices.py     which tokens each of several ranks computes or sends

Tested by tests/e2e/test_rank_groups.py too.

May import: process, the ground.
"""

from __future__ import annotations

from pdinfer.parallel.groups import ALONE, Begun, Group, Groups, InTouch
from pdinfer.parallel.slices import context_parallel_slices, even_slices
from pdinfer.parallel.topology import Topology

__all__ = [
    "ALONE",
    "Begun",
    "Group",
    "Groups",
    "InTouch",
    "Topology",
    "context_parallel_slices",
    "even_slices",
]
