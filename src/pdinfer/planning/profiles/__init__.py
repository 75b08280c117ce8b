"""Published deployments as data: each of their settings with ours, or the reason why there is none.

    profile.py            what a deployment becomes: configs, topologies, variables, a plan
    settings.py           the files, decoded strictly
    *.json                a deployment per file, and what a provider for Ascend would call

May import: config, parallel, planning.plan, the ground.
"""

from __future__ import annotations

from pdinfer.planning.profiles.profile import EngineProfile, Profile, profile
from pdinfer.planning.profiles.settings import OpCall, Setting

__all__ = ["EngineProfile", "OpCall", "Profile", "Setting", "profile"]
