"""Policies choose the prefill and the decode for a request. They are pure functions of snapshots and show their scores.

    traffic_aware.py   `traffic_aware`: the pair that is predicted to give the first token and those after it soonest
    by_load.py         `cache_aware`, `power_of_two`, `least_tokens`, `round_robin`: each side by itself

A policy gets the loads of the ports that can take one more request, and every link between them in `shape.links`. It
returns a `Choice`, or None to let the request wait. It may score each side by itself, or each pair as a whole:

    def fastest_link(shape, prefills, decodes):
        link = max(shape.links, key=lambda link: link.bytes_per_s or math.inf, default=None)  # try the unknown first
        return None if link is None else Choice(prefill=link.prefill, decode=link.decode)

What a policy is asked twice with equal arguments it answers twice with equal choices. Ports that are as good as each
other have their turns by `shape.ordinal`, so that none gets a whole burst because it is the first in a list.

May import: the ground."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdinfer.pairing.policy.by_load import CacheAware, PowerOfTwo, cache_aware, least_tokens, power_of_two, round_robin
from pdinfer.pairing.policy.traffic_aware import TrafficAware, traffic_aware
from pdinfer.stats import DecodeLoad, EngineLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape

Policy = Callable[[RequestShape, Sequence[PrefillLoad], Sequence[DecodeLoad]], Choice | None]

__all__ = [
    "CacheAware",
    "Choice",
    "DecodeLoad",
    "EngineLoad",
    "Policy",
    "PowerOfTwo",
    "PrefillLoad",
    "RequestShape",
    "TrafficAware",
    "cache_aware",
    "least_tokens",
    "power_of_two",
    "round_robin",
    "traffic_aware",
]
