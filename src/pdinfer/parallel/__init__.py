"""The place of this rank among all ranks, and how ranks act together.

    topology.py   how ranks are divided into groups, in plain ints until `connect`
    groups.py     the collectives that pdinfer uses
    slices.py     which tokens each of several ranks computes or sends

Tested by tests/e2e/test_rank_groups.py too.

May import: process, the ground."""
