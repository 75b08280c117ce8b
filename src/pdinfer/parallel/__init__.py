"""Which rank this is, and how ranks act together.

    topology.py   how ranks are divided into groups: plain ints until `connect`
    groups.py     the collectives that pdinfer uses
    slices.py     which tokens of a grant each of several writers sends, each exactly once

May import: process, the ground.
"""
