"""A cluster's load, event by event, with the runtime's own decisions and step times that the host gives.

    simulator.py    the call that makes a summary; the Pairing's side
    host.py         when requests are sent
    switching.py    engines that change their roles
    view.py         what a policy is shown
    decode.py       a decode engine
    steps.py        its steps, and what it learns of them
    tables.py       the pages of its sequences
    prefill.py      a prefill engine
    engine.py       what both have in common, and ranks that step together
    links.py        bytes on their way
    job.py          one request, and its record
    pages.py        the pages of a pool
    deployment.py   the cluster that is simulated
    world.py        time, and what is drawn

May import: bench, config, pairing, planning.shapes, scheduling, the ground.
"""

from __future__ import annotations

from pdinfer.planning.simulation.deployment import Change, Cluster, Stall, StepRows, cluster
from pdinfer.planning.simulation.simulator import Simulator, simulate

__all__ = ["Change", "Cluster", "Simulator", "Stall", "StepRows", "cluster", "simulate"]
