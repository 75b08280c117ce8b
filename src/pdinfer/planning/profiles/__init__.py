"""Published deployments as data: each of their settings with ours, or the reason why there is none.

    profile.py            the files, and what a deployment becomes: configs, topologies, variables, a plan
    *.json                a deployment per file, and what a provider for Ascend would call

May import: config, diagnosis, parallel, planning.cluster_plan, planning.plan, planning.shapes, the ground.
"""

from __future__ import annotations

from pdinfer.planning.profiles.profile import EngineProfile, OpCall, Profile, Setting, profile

__all__ = ["EngineProfile", "OpCall", "Profile", "Setting", "profile"]
